"""The lines of an export, one by one: how a row is written as one, and what is demanded of one that comes back.

A line may come from anybody. Each field is checked for its type and its range, each text for what a database takes,
each JSON for what its readers expect.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Container, Sequence
from datetime import date, datetime
from typing import Any, NamedTuple, get_args

from byssus.errors import ByssusError, InputError
from byssus.messages import MAX_DEPTH, AssistantMessage, UserMessage, checked_dumps, decode, dumps
from byssus.queries.accounts.usage import LONG_NAME
from byssus.queries.log.marks import MAX_MARK
from byssus.queries.moving.tables import TABLES, Column
from byssus.queries.tasks.steps import StepKind, StepStatus
from byssus.values.decisions import decode_answer
from byssus.values.inputs import column_text, refuse_long_id

FORMAT = 6
# The kinds of rows of a thread, in the order in which they come, and what the last line calls their number.
COUNTED = {
    "branch": "branches",
    "message": "messages",
    "mark": "marks",
    "call": "calls",
    "run": "runs",
    "checkpoint": "checkpoints",
    "inbox": "inbox",
    "task": "tasks",
    "usage": "usage",
    "tool_usage": "tool_usage",
}
# Fields and kinds that older formats do not have: see `since` in `queries/moving/tables.py`. An older byssus refuses a
# newer file, because it would lose what it does not know.
_TABLES = {table.line: table for table in TABLES if table.line}
_HIGHEST = 2**53
_BUCKETS = 20_000  # more than the longest time comes to
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_decoder = json.JSONDecoder()
_strict = json.JSONDecoder(parse_constant=int)  # which fails: NaN and Infinity are JSON for Python alone

Check = Callable[[Any], bool]


# --- fields -----------------------------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and column_text(value) == value


def is_name(value: Any) -> bool:
    return _is_id(value) and value != ""


def _is_id(value: Any) -> bool:
    if not _is_text(value):
        return False
    refuse_long_id(value, "an id")  # which says more than that it cannot be
    return True


def _is_namespace(value: Any) -> bool:
    return _is_id(value) and not value.startswith("\x7f")


def _is_time(value: Any) -> bool:
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def _is_day(value: Any) -> bool:
    if not isinstance(value, str) or not _DAY.fullmatch(value):
        return False
    try:
        date.fromisoformat(value)
    except ValueError:
        return False
    return True


def _is_short(value: Any) -> bool:
    return _is_text(value) and len(value) <= LONG_NAME


def _is_mark(value: Any) -> bool:
    return _is_text(value) and len(value) <= MAX_MARK


def is_int(value: Any, lowest: int = 0, below: int = _HIGHEST) -> bool:
    return type(value) is int and lowest <= value < below


_is_number = functools.partial(is_int, lowest=1)


def _is_amount(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and value >= 0


def _one_of(*values: Any) -> Check:
    return lambda value: any(value == each and type(value) is type(each) for each in values)


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(*checks: Check) -> Check:
    """A list of lists, each with these in it."""

    def is_row(row: Any) -> bool:
        return isinstance(row, list) and len(row) == len(checks) and all(map(_holds, checks, row))

    return lambda value: isinstance(value, list) and all(map(is_row, value))


def _holds(check: Check, value: Any) -> bool:
    return check(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value)) and value == sorted(set(value))


def _is_json(value: Any) -> bool:
    """Whether it is text that holds JSON."""
    if not _is_text(value):
        return False
    try:
        checked_dumps(json.loads(value))
    except (ValueError, RecursionError):
        return False
    return True


# --- JSON that was stored ---------------------------------------------------------------------------------------------


def _is_object(_: str, value: Any) -> bool:
    return isinstance(value, dict)


def _is_string(_: str, value: Any) -> bool:
    return isinstance(value, str)


def _is_anything(_: str, __: Any) -> bool:
    return True


def _is_about(_: str, value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"tags", "summary"}
        and isinstance(value["tags"], list)
        and all(isinstance(tag, str) for tag in value["tags"])
        and isinstance(value["summary"], str | None)
    )


def _is_retention(_: str, value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"last", "seconds", "tags"}
        and is_int(value["last"])
        and type(value["seconds"]) in (int, float)
        and 0 <= value["seconds"] < _HIGHEST
        and isinstance(value["tags"], list)
        and all(isinstance(tag, str) for tag in value["tags"])
    )


def _is_answer(text: str, _: Any) -> bool:
    try:
        decode_answer(text)
    except (ByssusError, AssertionError, LookupError, TypeError, ValueError):
        return False
    return True


def _is_reply(text: str, _: Any) -> bool:
    return isinstance(decode(text), AssistantMessage)


def _is_user_message(text: str, _: Any) -> bool:
    return isinstance(decode(text), UserMessage)


# How a field of each kind is checked; `tables.py` says which kind a field is.
_CHECKS: dict[str, Check] = {
    "branch": _is_number,
    "flag": _one_of(0, 1),
    "number": _is_number,
    "count": is_int,
    "sum": functools.partial(is_int, below=2**62),
    "priority": functools.partial(is_int, lowest=1 - 2**31, below=2**31),
    "bucket": functools.partial(is_int, lowest=-1, below=_BUCKETS),
    "amount": _is_amount,
    "text": _is_text,
    "short text": _is_short,
    "long text": _is_text,
    "name": is_name,
    "token": _is_id,
    "namespace": _is_namespace,
    "mark": _is_mark,
    "time": _is_time,
    "day": _is_day,
    "segments": list_of(_is_number, is_int, _optional(_is_number)),
    "inherited": list_of(_is_number, _optional(is_int), _optional(_is_number), _is_number),
    "numbers": _is_numbers,
    "steps": list_of(
        *(_is_text, _one_of(*get_args(StepKind)), _one_of(*get_args(StepStatus)), _optional(_is_text), is_int),
        *(_optional(_is_json), _optional(_is_json), _optional(_is_time), _is_time, _optional(_is_time)),
    ),
    "attempts": list_of(_is_text, _is_time, _optional(_is_time), _optional(_is_text)),
}
_JSON_CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "any": _is_anything,
    "object": _is_object,
    "string": _is_string,
    "about": _is_about,
    "retention": _is_retention,
    "answer": _is_answer,
    "reply": _is_reply,
    "user message": _is_user_message,
}


def _check_of(field: Column) -> Check:
    check = _one_of(*field.choices) if field.kind == "choice" else _CHECKS[field.kind]
    return _optional(check) if field.is_optional else check


class _Shape(NamedTuple):
    """The fields of a kind of line, and those that are JSON, which come last."""

    fields: dict[str, Check]
    json: dict[str, Callable[[str, Any], bool]]
    optional: frozenset[str]  # JSON that may be absent
    new: dict[str, Any]  # the fields that a format does not have yet, with what stands for them


@functools.cache
def _shape(kind: str, written: int) -> _Shape:
    fields = [field for field in _TABLES[kind].line_fields if field.since <= written]
    return _Shape(
        {field.name: _check_of(field) for field in fields if not field.is_json},
        {field.name: _JSON_CHECKS[field.kind] for field in fields if field.is_json},
        frozenset(field.name for field in fields if field.is_optional),
        {field.name: field.before for field in _TABLES[kind].line_fields if field.since > written},
    )


def kinds(written: int) -> list[str]:
    """The kinds of rows that a thread has in a format."""
    return [kind for kind in COUNTED if _TABLES[kind].since <= written]


# --- writing ----------------------------------------------------------------------------------------------------------


def format_line(kind: str, row: dict[str, Any]) -> str:
    """A row as a line."""
    shape = _shape(kind, FORMAT)
    head: dict[str, Any] = {"byssus": kind, "format": FORMAT} if kind == "thread" else {"row": kind}
    head |= {name: row[name] for name in shape.fields}
    texts = {name: row[name] for name in shape.json if row[name] is not None}
    quoted = [name for name, text in texts.items() if not _stands_in_a_line(text)]
    if quoted:
        head["quoted"] = quoted
        texts |= {name: dumps(texts[name]) for name in quoted}
    return dumps(head)[:-1] + "".join(f',"{name}":{text}' for name, text in texts.items()) + "}"


def _stands_in_a_line(text: str) -> bool:
    """Whether a text is JSON that every program reads, and on one line."""
    try:
        return "\n" not in text and _strict.raw_decode(text)[1] == len(text)
    except (ValueError, RecursionError):
        return False


# --- reading ----------------------------------------------------------------------------------------------------------


class Parsed(NamedTuple):
    """A line: a row with its kind, or one of the lines around rows."""

    kind: str
    row: dict[str, Any]


_WRITTEN = re.compile(r'\{"byssus":"thread","format":([1-9]\d{0,8}),', re.ASCII)
_KIND = re.compile(r'\{"(?:byssus|row)":"(\w+)",|\{"(end)":\{', re.ASCII)


def parse(line: bytes, written: int) -> Parsed:
    """What a line says, in a format; the first line of a thread has its own."""
    try:
        return _read(line.decode(), written)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"this is not UTF-8 ({error})") from error
    except json.JSONDecodeError as error:
        raise InputError(f"this is not JSON ({error.msg} at character {error.pos + 1}): {line[:80]!r}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"this cannot be read: {error}") from error


def _read(text: str, written: int) -> Parsed:
    match = _KIND.match(text)
    if match is None:
        json.loads(text)  # which may be what is wrong
        raise InputError("this is JSON, but no line of an export")
    kind = match[1] or match[2]
    return Parsed(kind, _row(kind, text, written) if kind in _TABLES else json.loads(text))


def _row(kind: str, text: str, written: int) -> dict[str, Any]:
    """The checked row of a line. That of a thread has the format that it is written in."""
    if kind == "thread":
        match = _WRITTEN.match(text)
        written = checked_format({"format": int(match[1])}) if match else FORMAT
    shape = _shape(kind, written)
    head, texts = _split(list(shape.json), shape.optional, text)
    _unquote(head.pop("quoted", []), texts)
    if head.pop("byssus" if kind == "thread" else "row", None) != kind:
        raise InputError(f"this begins like a {kind}, and is none")
    new = {**shape.new, "format": checked_format(head)} if kind == "thread" else shape.new
    if head.keys() != shape.fields.keys():
        odd = sorted(head.keys() ^ shape.fields.keys())
        raise InputError(f"a {kind} has other fields than these; look at {', '.join(map(repr, odd))}")
    for name, check in shape.fields.items():
        if not check(head[name]):
            raise InputError(f"the {name} of this {kind} cannot be {head[name]!r:.80}")
    for name, (raw, value) in texts.items():
        if raw.count("[") + raw.count("{") >= MAX_DEPTH:
            checked_dumps(value)
        if not shape.json[name](raw, value):
            raise InputError(f"the {name} of this {kind} cannot be {raw[:80]!r}")
    return {**head, **{name: texts[name][0] if name in texts else None for name in shape.json}, **new}


def _split(
    names: Sequence[str], optional: Container[str], text: str
) -> tuple[dict[str, Any], dict[str, tuple[str, Any]]]:
    """The fields of a line, and its JSON, each as text and as a value."""
    # A quote within a string is escaped, so this is found where the first field with JSON begins, and nowhere else.
    at = text.find(f',"{names[0]}":') if names else len(text)
    if at < 0:
        json.loads(text)
        raise InputError(f"there is no {names[0]!r}")
    head = json.loads(text[:at] + "}" if names else text)
    texts: dict[str, tuple[str, Any]] = {}
    for name in names:
        mark = f',"{name}":'
        if text.startswith(mark, at):
            begin = at + len(mark)
            value, at = _decoder.raw_decode(text, begin)
            texts[name] = (text[begin:at], value)
        elif name not in optional:
            raise InputError(f"there is no {name!r}, or not in its place")
    if names and text[at:] != "}":
        raise InputError(f"this is not as it was exported, from character {at + 1} on: {text[at : at + 80]!r}")
    return head, texts


def _unquote(quoted: Any, texts: dict[str, tuple[str, Any]]) -> None:
    for name in quoted if isinstance(quoted, list) else [quoted]:
        raw = texts[name][1] if isinstance(name, str) and name in texts else None
        if not isinstance(raw, str) or not _is_text(raw):
            raise InputError(f"{name!r:.80} is no quoted text")
        try:
            texts[name] = (raw, json.loads(raw))
        except (ValueError, RecursionError) as error:
            raise InputError(f"the {name} is not JSON ({error}): {raw[:80]!r}") from error


def checked_format(head: dict[str, Any]) -> int:
    """The format of an export, taken out of its first line."""
    written = head.pop("format", None)
    if not _is_number(written):
        raise InputError(f"the format of an export cannot be {written!r:.80}")
    if written > FORMAT:
        raise InputError(
            f"this was exported by a newer byssus, in format {written}; this one reads {FORMAT}: update it"
        )
    return int(written)
