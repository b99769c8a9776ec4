"""The lines of an export: how a row is written as one, and what is demanded of one that comes back.

A line may come from anybody. Each field is checked for its type and its range, each text for what a database takes,
each JSON for what its readers expect; rows must come in their order, and point to what is there. What passes can be
stored and read; and the sums at the end tell whether it is what was exported.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from holdfast.decisions import decode_answer
from holdfast.errors import HoldfastError, InputError
from holdfast.messages import MAX_DEPTH, AssistantMessage, UserMessage, checked_dumps, decode, dumps
from holdfast.rows import storable

FORMAT = 1
# The kinds of rows, in the order in which they come, and what the last line calls their number.
COUNTED = {
    "branch": "branches",
    "message": "messages",
    "call": "calls",
    "checkpoint": "checkpoints",
    "inbox": "inbox",
}
_HIGHEST = 2**53
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
_STATUSES = ("waiting", "answered", "started", "done", "failed", "unknown", "denied", "aborted", "left")
_decoder = json.JSONDecoder()
_strict = json.JSONDecoder(parse_constant=int)  # which fails: NaN and Infinity are JSON for Python alone

_OPTIONAL = {"ttl", "partial", "answer"}  # JSON that may be absent

Check = Callable[[Any], bool]


# --- fields -----------------------------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and storable(value) == value


def _is_name(value: Any) -> bool:
    return _is_text(value) and value != ""


def _is_namespace(value: Any) -> bool:
    return _is_text(value) and not value.startswith("\x7f")


def _is_time(value: Any) -> bool:
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def _is_int(value: Any, lowest: int = 0) -> bool:
    return type(value) is int and lowest <= value < _HIGHEST


_is_number = functools.partial(_is_int, lowest=1)


def _one_of(*values: Any) -> Check:
    return lambda value: any(value == each and type(value) is type(each) for each in values)


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(*checks: Check) -> Check:
    """A list of lists, each with these in it."""

    def is_row(row: Any) -> bool:
        return isinstance(row, list) and len(row) == len(checks) and all(map(_holds, checks, row))

    return lambda value: isinstance(value, list) and all(map(is_row, value))


def _holds(check: Check, value: Any) -> bool:
    return check(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value)) and value == sorted(set(value))


# --- JSON that was stored ---------------------------------------------------------------------------------------------


def _is_object(_: str, value: Any) -> bool:
    return isinstance(value, dict)


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
        and _is_int(value["last"])
        and type(value["seconds"]) in (int, float)
        and 0 <= value["seconds"] < _HIGHEST
        and isinstance(value["tags"], list)
        and all(isinstance(tag, str) for tag in value["tags"])
    )


def _is_arguments(_: str, value: Any) -> bool:
    return isinstance(value, dict) or not value


def _is_answer(text: str, _: Any) -> bool:
    try:
        decode_answer(text)
    except (HoldfastError, AssertionError, LookupError, TypeError, ValueError):
        return False
    return True


def _is_reply(text: str, _: Any) -> bool:
    return isinstance(decode(text), AssistantMessage)


def _is_user_message(text: str, _: Any) -> bool:
    return isinstance(decode(text), UserMessage)


class _Shape(NamedTuple):
    """The fields of a kind of line, and those that are JSON, which come last."""

    fields: dict[str, Check]
    json: dict[str, Callable[[str, Any], bool]]


_SHAPES = {
    "thread": _Shape(
        {
            "id": _is_name,
            "namespace": _is_namespace,
            "owner": _optional(_is_name),
            "created_at": _is_time,
            "updated_at": _is_time,
            "branch": _is_number,
            "line": _is_number,
            "head": _is_int,
            "message_count": _is_int,
            "unledgered": _is_int,
            "run": _optional(_is_text),
            "saved_at": _optional(_is_time),
        },
        {"extra": _is_object, "ttl": _is_retention, "partial": _is_reply},
    ),
    "branch": _Shape(
        {
            "number": _is_number,
            "segments": _list_of(_is_number, _is_int, _optional(_is_number)),
            "inherited": _list_of(_is_number, _optional(_is_int), _optional(_is_number), _is_number),
        },
        {},
    ),
    "message": _Shape(
        {
            "branch": _is_number,
            "seq": _is_number,
            "id": _is_text,
            "role": _is_text,
            "plain": _one_of(0, 1),
            "created_at": _is_time,
        },
        {"body": _is_anything},
    ),
    "call": _Shape(
        {
            "branch": _is_number,
            "reply": _is_int,
            "place": _is_int,
            "call_id": _is_text,
            "name": _is_text,
            "recovery": _one_of("never", "retry", "check", "ask"),
            "idempotency_key": _is_text,
            "run": _is_text,
            "status": _one_of(*_STATUSES),
            "reason": _optional(_one_of("approval", "recovery")),
            "question": _optional(_is_text),
            "attempts": _is_int,
            "asked_at": _optional(_is_time),
            "started_at": _optional(_is_time),
            "ended_at": _optional(_is_time),
        },
        {"arguments": _is_arguments, "answer": _is_answer},
    ),
    "checkpoint": _Shape(
        {
            "line": _is_number,
            "id": _is_name,
            "step": _is_int,
            "version": _is_number,
            "parent": _optional(_is_name),
            "branch": _is_number,
            "seq": _is_int,
            "message_count": _is_int,
            "created_at": _is_time,
            "hidden": _is_numbers,
        },
        {"about": _is_about, "body": _is_object, "extra": _is_object},
    ),
    "inbox": _Shape(
        {
            "kind": _one_of("steer", "follow_up"),
            "id": _is_text,
            "role": _is_text,
            "created_at": _is_time,
        },
        {"body": _is_user_message},
    ),
}


# --- writing ----------------------------------------------------------------------------------------------------------


def format_line(kind: str, row: dict[str, Any]) -> str:
    """A row as a line."""
    shape = _SHAPES[kind]
    head: dict[str, Any] = {"holdfast": kind, "format": FORMAT} if kind == "thread" else {"row": kind}
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


class _Parsed(NamedTuple):
    """A line: a row with its kind, or one of the lines around rows."""

    kind: str
    row: dict[str, Any]


_KIND = re.compile(r'\{"(?:holdfast|row)":"(\w+)",|\{"(end)":\{', re.ASCII)


def _parse(line: bytes) -> _Parsed:
    try:
        return _read(line.decode())
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"this is not UTF-8 ({error})") from error
    except json.JSONDecodeError as error:
        raise InputError(f"this is not JSON ({error.msg} at character {error.pos + 1}): {line[:80]!r}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"this cannot be read: {error}") from error


def _read(text: str) -> _Parsed:
    match = _KIND.match(text)
    if match is None:
        json.loads(text)  # which may be what is wrong
        raise InputError("this is JSON, but no line of an export")
    kind = match[1] or match[2]
    return _Parsed(kind, _row(kind, text) if kind in _SHAPES else json.loads(text))


def _row(kind: str, text: str) -> dict[str, Any]:
    """The checked row of a line."""
    shape = _SHAPES[kind]
    head, texts = _split(list(shape.json), text)
    _unquote(head.pop("quoted", []), texts)
    if head.pop("holdfast" if kind == "thread" else "row", None) != kind:
        raise InputError(f"this begins like a {kind}, and is none")
    if kind == "thread":
        _check_format(head)
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
    return {**head, **{name: texts[name][0] if name in texts else None for name in shape.json}}


def _split(names: Sequence[str], text: str) -> tuple[dict[str, Any], dict[str, tuple[str, Any]]]:
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
        elif name not in _OPTIONAL:
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


def _check_format(head: dict[str, Any]) -> None:
    written = head.pop("format", None)
    if not _is_number(written):
        raise InputError(f"the format of an export cannot be {written!r:.80}")
    if written > FORMAT:
        raise InputError(
            f"this was exported by a newer holdfast, in format {written}; this one reads {FORMAT}: update it"
        )


class _Thread:
    """A thread that is arriving: what its rows may point to, and what its last line has to say."""

    def __init__(self, header: dict[str, Any], line: bytes) -> None:
        self._header = header
        self._digest = hashlib.sha256(line + b"\n")
        self._counts = dict.fromkeys(COUNTED.values(), 0)
        self._kinds = list(COUNTED)  # those that may still come
        self._last: tuple[int, ...] = ()
        self._version = 0  # the highest
        self._checks: dict[str, Callable[[dict[str, Any]], None]] = {
            "branch": self._branch,
            "message": self._message,
            "call": self._call,
            "checkpoint": self._checkpoint,
        }
        if header["message_count"] > header["head"] or header["unledgered"] > header["head"]:
            raise InputError(f"a thread whose head is {header['head']} cannot have more messages than that")
        if (header["saved_at"] is None) != (header["partial"] is None):
            raise InputError("a partial comes with the time when it was saved")

    def row(self, kind: str, row: dict[str, Any], line: bytes) -> None:
        if kind not in self._kinds:
            raise InputError(f"a {kind} cannot come here; the lines are not in the order in which they were exported")
        if kind != self._kinds[0]:
            self._kinds = self._kinds[self._kinds.index(kind) :]
            self._last = ()
        if kind in self._checks:
            self._checks[kind](row)
        self._counts[COUNTED[kind]] += 1
        self._digest.update(line + b"\n")

    def end(self, row: dict[str, Any], at: int) -> dict[str, Any]:
        """What the store is told at the end of a thread that has all its rows."""
        if row.keys() != {"end", "sha256"} or row["end"] != self._counts:
            raise InputError(
                f"thread {self._header['id']!r} is not whole: {dumps(self._counts)} have come, and it should be "
                f"{dumps(row.get('end'))[:200]}"
            )
        if row["sha256"] != self._digest.hexdigest():
            raise InputError(
                f"something in the lines of thread {self._header['id']!r} was changed: their sha256 differs"
            )
        for name in ("branch", "line"):
            self._known(self._header[name], name)
        return {"at": at, "calls": self._counts["calls"], "version": self._version}

    def _branch(self, row: dict[str, Any]) -> None:
        number, end = row["number"], 0
        if number != self._counts["branches"] + 1:
            raise InputError(f"this should be branch {self._counts['branches'] + 1}, and is {number}")
        is_read = number == self._header["branch"]
        for place, (source, after, upto) in enumerate(row["segments"]):
            is_last = place == len(row["segments"]) - 1
            is_open = upto is None and is_read and is_last and source == number and after <= self._header["head"]
            if source > number or after != end or not (is_open or (upto is not None and upto > after)):
                raise InputError(f"branch {number} cannot be read along {row['segments']!r:.200}")
            end = after if upto is None else upto
        if is_read and (not row["segments"] or row["segments"][-1][2] is not None):
            raise InputError(f"branch {number}, on which the thread goes on, has no end to write to")
        self._inherited(number, row["inherited"])

    def _inherited(self, number: int, inherited: list[list[Any]]) -> None:
        for source, step, version, as_of in inherited:
            self._follow((source,), f"what branch {number} inherits")
            if source >= number or (step is None) != (version is None):
                raise InputError(f"branch {number} cannot inherit {inherited!r:.200}")
            self._version = max(self._version, version or 0, as_of)
        self._last = ()

    def _message(self, row: dict[str, Any]) -> None:
        self._known(row["branch"], "branch")
        self._follow((row["branch"], row["seq"]), "a message")
        if row["branch"] == self._header["branch"] and row["seq"] > self._header["head"]:
            raise InputError(f"message {row['seq']} is behind the head of the thread, {self._header['head']}")

    def _call(self, row: dict[str, Any]) -> None:
        self._known(row["branch"], "branch")
        needed = {"waiting": ("reason", "question", "asked_at"), "answered": ("answer",)}.get(row["status"], ())
        missing = [name for name in needed if row[name] is None]
        if missing:
            raise InputError(f"a call that is {row['status']} has no {', no '.join(missing)}")

    def _checkpoint(self, row: dict[str, Any]) -> None:
        for name in ("line", "branch"):
            self._known(row[name], name)
        for number in row["hidden"]:
            self._known(number, "line")
        self._follow((row["line"], row["step"], row["version"]), "a checkpoint")
        self._version = max(self._version, row["version"])

    def _known(self, number: int, what: str) -> None:
        if number > self._counts["branches"]:
            raise InputError(f"there is no {what} {number}")

    def _follow(self, place: tuple[int, ...], what: str) -> None:
        if place <= self._last:
            raise InputError(f"{what} at {place} comes behind {self._last}: the lines are not in their order")
        self._last = place


class Incoming:
    """Lines as they arrive, each checked. An error names the line."""

    def __init__(self) -> None:
        self.forks: list[tuple[int, int, int]] = []  # which thread was forked from which, and up to where
        self._count = 0
        self._threads = 0
        self._thread: _Thread | None = None
        self._user: Any = None  # the sum over all lines, where they are a user's
        self._is_over = False

    def take(self, lines: Sequence[bytes]) -> list[tuple[str, dict[str, Any]]]:
        """The rows of these lines, and where each thread ends."""
        rows = []
        for line in lines:
            self._count += 1
            try:
                rows += self._take(line)
            except InputError as error:
                raise InputError(f"line {self._count}: {error}") from error
        return rows

    def finish(self) -> None:
        """There are no more lines."""
        if self._thread is not None or (self._user is not None and not self._is_over):
            what = "a thread" if self._thread is not None else "the export of a user"
            raise InputError(f"line {self._count + 1} is missing: {what} has no end; what was exported is not all here")
        if self._threads == 0:
            raise InputError("line 1 is missing: there is nothing to import")

    def _take(self, line: bytes) -> list[tuple[str, dict[str, Any]]]:
        kind, row = _parse(line)
        if self._is_over:
            raise InputError("nothing can come behind the end of a user's export")
        if self._thread is None:
            rows = self._between(kind, row, line)
        elif kind == "end":
            rows = [("end", self._thread.end(row, self._count))]
            self._thread = None
            self._threads += 1
        else:
            self._thread.row(kind, row, line)
            rows = [(kind, row)]
        if self._user is not None:
            self._user.update(line + b"\n")
        return rows

    def _between(self, kind: str, row: dict[str, Any], line: bytes) -> list[tuple[str, dict[str, Any]]]:
        """A line that is not within a thread."""
        if kind == "thread":
            self._thread = _Thread(row, line)
            return [(kind, row)]
        if kind == "user" and self._count == 1:
            _check_format(row)
            self._user = hashlib.sha256()
        elif kind == "end" and self._user is not None:
            self._end_user(row)
        else:
            raise InputError(f"this is no beginning of a thread: {line[:80]!r}")
        return []

    def _end_user(self, row: dict[str, Any]) -> None:
        if row.keys() != {"end", "forks", "sha256"} or row["end"] != {"threads": self._threads}:
            raise InputError(f"{self._threads} threads have come, and it should be {dumps(row.get('end'))[:200]}")
        if row["sha256"] != self._user.hexdigest():
            raise InputError("something in the lines of this user was changed: their sha256 differs")
        before = -1
        if not _list_of(_is_int, _is_int, _is_int)(row["forks"]):
            raise InputError(f"the forks cannot be {row['forks']!r:.80}")
        for fork, origin, _ in row["forks"]:
            if not origin < fork < self._threads or fork <= before:
                raise InputError(f"thread {fork} cannot be a fork of thread {origin} of these")
            before = fork
        self.forks = [(fork, origin, seq) for fork, origin, seq in row["forks"]]
        self._is_over = True
