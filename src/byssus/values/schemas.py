"""From a Python type to a JSON schema, and from JSON to a value of that type.

msgspec does it for structs, dataclasses, TypedDicts, enums and the builtin types. A pydantic model does it on its own,
also deep inside of one of those; pydantic is never imported here.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

_DEFINITIONS = "#/$defs/"


def describe(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type, with what it refers to under `$defs`. Raises TypeError for a type that has none."""
    if _is_pydantic(kind):
        return _own_schema(kind)
    # The names that msgspec gives to its parts are only known afterwards, so it is asked twice.
    _, taken = msgspec.json.schema_components([kind], schema_hook=_pydantic_only, ref_template=_DEFINITIONS + "{name}")
    definitions: dict[str, Any] = dict.fromkeys(taken)
    names: dict[type, str] = {}

    def schema_hook(custom: type) -> dict[str, Any]:
        if custom not in names:
            names[custom] = _add(custom, definitions)
        return {"$ref": _DEFINITIONS + names[custom]}

    (schema,), components = msgspec.json.schema_components(
        [kind], schema_hook=schema_hook, ref_template=_DEFINITIONS + "{name}"
    )
    definitions.update(components)
    if schema.keys() == {"$ref"}:  # the type itself: it stands at the root, not among the definitions
        name = schema["$ref"].rsplit("/", 1)[1]
        schema = definitions[name]
        if not _refers(definitions, _DEFINITIONS + name):  # a tree needs itself there too
            del definitions[name]
    return {**schema, "$defs": definitions} if definitions else schema


def _refers(schema: Any, place: str) -> bool:
    if isinstance(schema, dict):
        return schema.get("$ref") == place or any(_refers(part, place) for part in schema.values())
    return isinstance(schema, list) and any(_refers(part, place) for part in schema)


def convert(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """JSON data as a value of the type. Raises `msgspec.ValidationError`, which says where it does not fit."""
    if _is_pydantic(kind):
        try:
            return cast("T", _decode(kind, value))
        except ValueError as error:
            raise msgspec.ValidationError(str(error)) from error
    return msgspec.convert(value, kind, strict=strict, dec_hook=_decode, str_keys=True)


def _decode(kind: type, value: Any) -> Any:
    if not _is_pydantic(kind):
        raise NotImplementedError(f"no way to make a {kind.__name__} from JSON")
    try:
        return kind.model_validate(value)  # type: ignore[attr-defined]
    except ValueError as error:
        raise ValueError(_reasons(error)) from error


def _pydantic_only(kind: type) -> dict[str, Any]:
    if not _is_pydantic(kind):
        raise NotImplementedError
    return {"type": "object"}


def _reasons(error: ValueError) -> str:
    """What pydantic found wrong, a clause for each place, without its links."""
    found = getattr(error, "errors", None)
    if not callable(found):
        return str(error)
    places = ((".".join(str(part) for part in item["loc"]), item) for item in found(include_url=False))
    return "; ".join(
        f"{place + ': ' if place else ''}{item['msg']} (got {item['input']!r:.80})" for place, item in places
    )


def _own_schema(model: Any) -> dict[str, Any]:
    try:
        return dict(model.model_json_schema())
    except Exception as error:
        raise TypeError(f"{model.__name__}: {str(error).splitlines()[0]}") from error


def _add(model: Any, definitions: dict[str, Any]) -> str:
    """Put a pydantic model and what it refers to among the definitions; returns its name there."""
    schema = _own_schema(model)
    parts: dict[str, Any] = schema.pop("$defs", {})
    if schema.keys() == {"$ref"}:  # one that refers to itself is already among its parts
        root = str(schema["$ref"]).removeprefix(_DEFINITIONS)
    else:
        root = re.sub(r"[^\w.-]", "_", model.__name__)
        parts[root] = schema
    number, renamed = 1, {name: name for name in parts}
    while any(
        (other := definitions.get(renamed[name], ...)) is not ... and other != _pointing(part, renamed)
        for name, part in parts.items()
    ):  # another module's model, or a struct, has one of these names
        number += 1
        renamed = {name: f"{name}_{number}" for name in parts}
    definitions.update({renamed[name]: _pointing(part, renamed) for name, part in parts.items()})
    return renamed[root]


def _pointing(part: Any, renamed: dict[str, str]) -> Any:
    if isinstance(part, list):
        return [_pointing(item, renamed) for item in part]
    if not isinstance(part, dict):
        return part
    changed = {key: _pointing(item, renamed) for key, item in part.items()}
    reference = part.get("$ref")
    if isinstance(reference, str) and (name := reference.removeprefix(_DEFINITIONS)) in renamed:
        changed["$ref"] = _DEFINITIONS + renamed[name]
    return changed


def _is_pydantic(kind: Any) -> bool:
    return isinstance(kind, type) and callable(getattr(kind, "model_validate", None)) and hasattr(kind, "model_fields")
