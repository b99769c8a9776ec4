"""Any Python value as readable JSON.

Every value is accepted, and nothing here raises: a value without a better form is shown as its repr, and if that fails
as the name of its class. The result holds JSON types only, so it is the same after a reload.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

_Walk: TypeAlias = Callable[[Any], Any]
_Form: TypeAlias = Callable[[Any, _Walk], Any]

_DEEPEST = 100  # levels; each takes a few frames of a stack that may already be deep


def readable(value: Any) -> Any:
    """Return the value as strings, numbers, booleans, None, lists and dicts."""
    return _walk(value, set())


def shown(value: object) -> str:
    """Return the repr of any value; never raises."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - foreign code, and any answer is better than none
        return f"<{type(value).__name__}: its repr raised {type(error).__name__}>"


def error_text(error: BaseException) -> str:
    """Return an error as the text that a model reads."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return f"{type(error).__name__} (its text cannot be read)"


def _walk(value: Any, above: set[int]) -> Any:
    if value is None or type(value) in (str, bool, float):
        return value
    if id(value) in above:
        return f"<{type(value).__name__}: the same again, in a circle>"
    if len(above) >= _DEEPEST:
        return shown(value)
    above.add(id(value))
    try:
        return _form(value)(value, lambda item: _walk(item, above))
    except Exception:  # noqa: BLE001 - a property, an iterator or a dump of the value's own failed
        return shown(value)
    finally:
        above.discard(id(value))


def _form(value: Any) -> _Form:
    if not isinstance(value, type):
        for attribute, form in _BY_ATTRIBUTE:
            if hasattr(value, attribute):
                return form
        for kind, form in _BY_CLASS:
            if isinstance(value, kind):
                return form
    return lambda item, _: shown(item)


def _whole_number(value: int, _: _Walk) -> int | str:
    number = int(value)
    # Python cannot write longer ones in decimal, and neither could the database's JSON.
    return number if number.bit_length() < 10_000 else hex(number)


def _dumped(value: Any, walk: _Walk) -> Any:
    try:
        return walk(value.model_dump(mode="json"))
    except Exception:  # noqa: BLE001 - it holds what pydantic has no JSON for
        return walk(value.model_dump())


def _struct(value: Struct, walk: _Walk) -> dict[str, Any]:
    config = type(value).__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field else {}
    fields = {field.encode_name: walk(getattr(value, field.name)) for field in msgspec.structs.fields(value)}
    return {**tag, **fields}


def _mapping(value: Mapping[Any, Any], walk: _Walk) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = walk(key)
        name = name if isinstance(name, str) else json.dumps(name)
        while name in result:  # 1 and "1" are two keys in Python and one in JSON
            name += "'"
        result[name] = walk(item)
    return result


def _set(value: Set[Any], walk: _Walk) -> list[Any]:
    try:
        ordered: Iterable[Any] = sorted(value)
    except TypeError:
        ordered = sorted(value, key=shown)
    return [walk(item) for item in ordered]


_BY_ATTRIBUTE: tuple[tuple[str, _Form], ...] = (
    ("model_dump", _dumped),  # pydantic
    ("__dataclass_fields__", lambda v, walk: {f.name: walk(getattr(v, f.name)) for f in dataclasses.fields(v)}),
    ("__attrs_attrs__", lambda v, walk: {a.name: walk(getattr(v, a.name)) for a in v.__attrs_attrs__}),
    ("_asdict", lambda v, walk: walk(v._asdict())),  # named tuples
    ("tolist", lambda v, walk: walk(v.tolist())),  # numpy, for arrays and single numbers
)
_BY_CLASS: tuple[tuple[Any, _Form], ...] = (
    (Enum, lambda v, walk: walk(v.value)),
    (str, lambda v, _: str.__str__(v)),
    (int, _whole_number),
    (float, lambda v, _: float(v)),
    ((bytes, bytearray, memoryview), lambda v, _: base64.b64encode(v).decode()),
    (Struct, _struct),
    (Mapping, _mapping),
    (Set, _set),
    (Sequence, lambda v, walk: [walk(item) for item in v]),
    (os.PathLike, lambda v, walk: walk(os.fspath(v))),
    (BaseException, lambda v, _: error_text(v)),
    (object, lambda v, _: msgspec.to_builtins(v)),  # dates, Decimal, UUID; a TypeError for everything else
)
