"""The bytes of a file as text, its version, and what a change of it looks like."""

from __future__ import annotations

import difflib
import hashlib

from byssus.errors import InputError

_LONGEST_DIFF = 12_000  # characters that a person is shown
_COMPARED = 3_000  # changed lines of one side; above, both sides are shown whole


def decoded(path: str, data: bytes) -> str:
    """Return the text of a file. Raises `InputError` if it is none."""
    if b"\0" in data:
        raise InputError(f"{path!r} is a binary file: it has a NUL byte at {data.index(0):,}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path!r} is not UTF-8 text: byte 0x{data[error.start]:02x} at {error.start:,}") from error


def version_of(data: bytes) -> str:
    """Return what names the content of a file: the beginning of its SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def difference(before: str, after: str) -> tuple[int, int, str]:
    """Return how many lines are added and removed, and the unified diff, cut where it gets too long."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    # Compared line by line, two long files take minutes: what they share at both ends is left out first.
    head = _shared(old, new)
    tail = _shared(old[head:][::-1], new[head:][::-1])
    first = max(head - 3, 0)
    ends = (len(old) - max(tail - 3, 0), len(new) - max(tail - 3, 0))
    parts = old[first : ends[0]], new[first : ends[1]]
    if max(map(len, parts)) > _COMPARED:
        lines = [f"@@ {len(parts[0])} lines become {len(parts[1])} from line {first + 1} @@\n"]
        lines += [f"-{line}" for line in parts[0]] + [f"+{line}" for line in parts[1]]
    else:
        lines = _moved(list(difflib.unified_diff(*parts))[2:], first)
    added = sum(line.startswith("+") for line in lines)
    removed = sum(line.startswith("-") for line in lines)
    return added, removed, _cut(lines)


def _shared(old: list[str], new: list[str]) -> int:
    return next(
        (i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), min(len(old), len(new))
    )


def _moved(lines: list[str], by: int) -> list[str]:
    """The hunks of a diff of parts of two files, with the line numbers of the whole ones."""
    return [_header(line, by) if line.startswith("@@") else line for line in lines]


def _header(line: str, by: int) -> str:
    words = line.split(" ")
    for index in (1, 2):
        sign, (start, comma, count) = words[index][0], words[index][1:].partition(",")
        words[index] = f"{sign}{int(start) + by}{comma}{count}"
    return " ".join(words)


def _cut(lines: list[str]) -> str:
    shown, left = [], _LONGEST_DIFF
    for number, line in enumerate(lines):
        if (left := left - len(line)) < 0:
            more = len(lines) - number
            shown.append(f"... and {more:,} more lines of this diff; the call's arguments have all of the new text")
            break
        shown.append(line if line.endswith("\n") else f"{line}\n\\ no newline at the end\n")
    return "".join(shown).rstrip("\n")
