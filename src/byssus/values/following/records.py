"""Values that travel as one line of JSON with a `type`: events, and the items of a thread that is followed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from byssus.errors import InputError
from byssus.messages import (
    Failure,
    Message,
    ToolCall,
    ToolResultMessage,
    Usage,
    checked_dumps,
    from_value,
    part_from_value,
    plain,
)

_MESSAGE_FIELDS = {"message": Message, "result": ToolResultMessage}
_LIST_FIELDS = {"messages": Message, "tool_results": ToolResultMessage}
_PART_FIELDS: dict[str, Any] = {"usage": Usage, "error": Failure, "tool_call": ToolCall}


class Record(Struct, frozen=True, tag_field="type", omit_defaults=True, gc=False):
    """A value with a `type` and a JSON form."""

    def to_json(self) -> str:
        """The value as one line of JSON, which `from_json` reads; fields that have their default are left out."""
        try:
            return checked_dumps(self.to_value())
        except (TypeError, ValueError, RecursionError) as error:
            tag = type(self).__struct_config__.tag
            raise InputError(f"a {tag} event cannot be written as JSON: {error}") from error

    def to_value(self) -> dict[str, Any]:
        """The value as a dict of what JSON has; fields that have their default are left out."""
        defaults = dict(zip(reversed(self.__struct_fields__), reversed(self.__struct_defaults__), strict=False))
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        kept = {name: plain(value) for name, value in fields.items() if name not in defaults or value != defaults[name]}
        return {"type": type(self).__struct_config__.tag, **kept}


def read(text: str | bytes, kinds: Mapping[str, type[Struct]], what: str) -> Any:
    """The value that `to_json` wrote, of one of these kinds. Fields that this version does not know are ignored."""
    try:
        return _from_value(json.loads(text), kinds, what)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"this is no {what} as JSON ({error}): {text!r:.80}") from error


def _from_value(value: Any, kinds: Mapping[str, type[Struct]], what: str) -> Any:
    if not isinstance(value, dict) or not isinstance(name := value.get("type"), str):
        raise TypeError("it has no type")
    if (kind := kinds.get(name)) is None:
        raise InputError(
            f"the {what} type {name!r:.80} is unknown in this version; skip the {what}, or upgrade byssus to read it"
        )
    known = {each.name: each.type for each in msgspec.structs.fields(kind)}
    fields = {key: item for key, item in value.items() if key in known}
    if "stream_event" in fields:
        fields["stream_event"] = _from_value(fields["stream_event"], kinds, what)
    return kind(**{key: _field(key, item, known[key]) for key, item in fields.items()})


def _field(name: str, value: Any, kind: Any) -> Any:
    if name == "stream_event":
        return value
    if value is not None and name in _MESSAGE_FIELDS:
        return _message(value, kind)
    if name in _LIST_FIELDS:
        return [_message(item, _LIST_FIELDS[name]) for item in value]
    if isinstance(value, dict) and name in _PART_FIELDS:
        return part_from_value(value, _PART_FIELDS[name])
    return msgspec.convert(value, kind)


def _message(value: Any, kind: Any) -> Message:
    message: Message = from_value(value)
    is_right: bool = isinstance(message, kind)
    if not is_right:
        raise TypeError(f"{value!r:.80} where another message belongs")
    return message
