"""Structured output: a reply that is a value of a type.

The schema goes to the provider, which has a mechanism of its own for it or gets the schema in words. The reply is
validated here in any case. The root of the schema is always an object, because services want one; a type that is none
(a list, a number, a union) stands under "value" in it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from byssus.errors import InputError, OutputInvalid
from byssus.messages import dumps
from byssus.values.schemas import convert, describe

T = TypeVar("T")

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)


class Output(Generic[T]):
    """The type of a structured reply: msgspec, pydantic, dataclass, TypedDict or builtin."""

    def __init__(self, kind: type[T]) -> None:
        try:
            schema = describe(kind)
            _try_out(kind)
        except Exception as error:  # a hint that names nothing, an ambiguous union, pydantic's own ...
            raise InputError(
                f"output={kind!r} cannot be described to a model ({error}); use a msgspec Struct, a pydantic model, a "
                "dataclass, a TypedDict, or builtin types"
            ) from error
        self._kind = kind
        self._wrapped = schema.get("type") != "object"
        if self._wrapped:
            definitions = schema.pop("$defs", None)
            schema = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
            if definitions:
                schema["$defs"] = definitions
        self.schema: dict[str, Any] = schema

    def instruction(self) -> str:
        """The schema in words, for a provider that has no mechanism of its own."""
        return in_words(self.schema)

    def read(self, text: str) -> T:
        """The value that the reply holds."""
        failure: Exception | None = None
        for candidate in _candidates(text):
            try:
                return self._value(json.loads(candidate, parse_constant=_no_number))
            except (ValueError, RecursionError) as error:  # no JSON: the first error counts, the others guess
                failure = failure or error
            except Exception as error:  # noqa: BLE001 - JSON that does not fit; the type's own checks raise what they like
                failure = error
                break
        raise OutputInvalid(f"the reply is no valid {_name(self._kind)}: {failure}; it was {_shortened(text)!r}") from (
            failure
        )

    def _value(self, value: Any) -> T:
        try:
            inner = value["value"] if self._wrapped and isinstance(value, dict) else value
        except KeyError:
            inner = value  # a model that left the wrapping off
        try:
            return convert(inner, self._kind)
        except Exception as error:
            raise _DoesNotFit(str(error)) from error


class Reading:
    """The output of one run: the value of its final reply. The model gets one chance to correct a reply."""

    def __init__(self, output: Output[Any] | None) -> None:
        self.value: Any = None
        self.correction: str | None = None  # what to tell the model
        self._output = output
        self._is_corrected = False

    @property
    def schema(self) -> dict[str, Any] | None:
        return None if self._output is None else self._output.schema

    def end(self, text: str) -> OutputInvalid | None:
        """Read a reply that is the last one in any case; returns what is wrong with it."""
        if self._output is not None:
            try:
                self.value = self._output.read(text)
            except OutputInvalid as error:
                return error
        return None

    def corrects(self, error: OutputInvalid) -> bool:
        """Whether the model gets another chance after this error. Then `correction` says what is wrong."""
        if self._is_corrected or self._output is None:
            return False
        self.correction = f"{error}. {self._output.instruction()}"
        self._is_corrected = True
        return True


def in_words(schema: dict[str, Any]) -> str:
    """The instruction for a model without structured output."""
    return f"Reply with JSON only, no other text, that fits this JSON schema:\n{dumps(schema)}"


class _DoesNotFit(Exception):
    pass


def _try_out(kind: Any) -> None:
    """Raise now if msgspec cannot parse this type from any reply. Custom validators are not called."""
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.convert(None, kind, dec_hook=lambda kind, value: value)  # noqa: ARG005


def _candidates(text: str) -> Iterator[str]:
    """Where the JSON of a reply may be: some models wrap it in a sentence or in a code block."""
    yield text
    for opening, closing in ("{}", "[]"):
        start, end = text.find(opening), text.rfind(closing)
        if 0 <= start < end:
            yield text[start : end + 1]
    if (blocks := _FENCED.findall(text)) and len(blocks) == 1:
        yield blocks[0]


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:150]} [...] {text[-50:]}"


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__origin__") else str(kind)
