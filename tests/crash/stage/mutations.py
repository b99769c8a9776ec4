"""Exports that were changed: by accident, or by somebody who knows the format and seals what they have changed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

from byssus.maintenance.shapes import COUNTED
from byssus.messages import dumps

Lines = list[str]

_WORDS = ("", "x", "victim", "kept", "approve", "x" * 6_000, "\0", "\ud800", "../../etc", "'; DROP TABLE users; --")
_STATES = (
    "answered",
    "started",
    "waiting",
    "done",
    "unknown",
    "left",
    "active",
    "paused",
    "retry",
    "never",
    "tool_result",
)
_NUMBERS = (0, 1, -1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308)
_OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": {}}, [None], "2026-01-01T00:00:00.000000Z", "9999")
_NAMES = ("owner", "namespace", "id", "user", "run", "status", "answer", "role", "name", "recovery", "body", "tokens")


def mutated(lines: Lines, others: Lines, chance: random.Random) -> list[str | bytes]:
    """The lines of an export, changed in some places; `others` are of another one."""
    changed = list(lines)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        changed = chance.choice(_LINE_CHANGES)(changed, others, chance) or ["{}"]
    if chance.random() < 0.85:
        changed = sealed(changed)
    if chance.random() < 0.1:
        return _garbled(changed, chance)
    return list(changed)


def sealed(lines: Lines) -> Lines:
    """The same lines with ends that fit to them, as far as there are ends."""
    found: Lines = []
    start = 0
    for line in lines:
        value = _parsed(line)
        if value.get("byssus") == "thread":
            start = len(found)
        if isinstance(value.get("end"), dict) and "sha256" in value:
            is_whole = "threads" in value["end"]
            inside = found if is_whole else found[start:]
            if not is_whole:
                rows = [_parsed(each).get("row") for each in inside]
                value = {**value, "end": {name: rows.count(kind) for kind, name in COUNTED.items()}}
            value["sha256"] = _digest(inside)
            line = dumps(value)
        found.append(line)
    return found


def _digest(lines: Lines) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")).hexdigest()


def _parsed(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# --- changes ----------------------------------------------------------------------------------------------------------


def _value(chance: random.Random) -> Any:
    return chance.choice(chance.choice([_WORDS, _STATES, _NUMBERS, _OTHERS]))


def _change_value(lines: Lines, _: Lines, chance: random.Random) -> Lines:
    """Another value somewhere in a line, however deep."""
    place = chance.randrange(len(lines))
    value = _parsed(lines[place])
    if not value:
        return lines
    inner: Any = value
    while True:
        key = chance.choice(list(inner)) if isinstance(inner, dict) else chance.randrange(len(inner))
        if not (isinstance(inner[key], dict | list) and inner[key] and chance.random() < 0.7):
            break
        inner = inner[key]
    match chance.random():
        case draw if draw < 0.1 and isinstance(inner, dict):
            del inner[key]
        case draw if draw < 0.2 and isinstance(inner, dict):
            inner[chance.choice(_NAMES)] = _value(chance)
        case _:
            inner[key] = _value(chance)
    return _with(lines, place, value)


def _change_name(lines: Lines, _: Lines, chance: random.Random) -> Lines:
    """Another value for what somebody would change who means no good."""
    places = [n for n, line in enumerate(lines) if any(name in _parsed(line) for name in _NAMES)]
    if not places:
        return lines
    place = chance.choice(places)
    value = _parsed(lines[place])
    name = chance.choice([name for name in _NAMES if name in value])
    value[name] = chance.choice([_value(chance), "victim", "kept", "answered", "started", {"answer": "approve"}])
    return _with(lines, place, value)


def _with(lines: Lines, place: int, value: dict[str, Any]) -> Lines:
    return [*lines[:place], dumps(value), *lines[place + 1 :]]


def _drop(lines: Lines, _: Lines, chance: random.Random) -> Lines:
    place = chance.randrange(len(lines))
    return [*lines[:place], *lines[place + 1 :]]


def _repeat(lines: Lines, _: Lines, chance: random.Random) -> Lines:
    place, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    return [*lines[:place], lines[other], *lines[place:]]


def _swap(lines: Lines, _: Lines, chance: random.Random) -> Lines:
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    changed = list(lines)
    changed[one], changed[other] = changed[other], changed[one]
    return changed


def _graft(lines: Lines, others: Lines, chance: random.Random) -> Lines:
    """Some lines of another export."""
    place, start = chance.randrange(len(lines)), chance.randrange(len(others))
    return [*lines[:place], *others[start : start + chance.choice([1, 3, 30])], *lines[place:]]


def _break_off(lines: Lines, _: Lines, chance: random.Random) -> Lines:
    return lines[: chance.randrange(1, len(lines) + 1)]


def _nest(lines: Lines, _: Lines, chance: random.Random) -> Lines:
    place = chance.randrange(len(lines))
    deep = chance.choice([10, 500, 100_000])
    return [*lines[:place], lines[place].replace("{}", "[" * deep + "]" * deep, 1), *lines[place + 1 :]]


def _garbled(lines: Lines, chance: random.Random) -> list[str | bytes]:
    """Other bytes somewhere."""
    data: list[str | bytes] = [line.encode("utf-8", "surrogatepass") for line in lines]
    place = chance.randrange(len(data))
    line = bytearray(data[place])  # type: ignore[arg-type]
    for _ in range(chance.choice([1, 3, 20])):
        if line:
            line[chance.randrange(len(line))] = chance.randrange(256)
    data[place] = bytes(line)
    return data


_LINE_CHANGES: tuple[Callable[[Lines, Lines, random.Random], Lines], ...] = (
    *(_change_value,) * 6,
    *(_change_name,) * 6,
    _drop,
    _repeat,
    _swap,
    _graft,
    _break_off,
    _nest,
)
