"""Markdown that is still arriving, cut into blocks that never change again.

A block is closed when the line behind it has begun another one. The text is taken line by line, so where a stream cuts
it makes no difference: the same text gives the same blocks. Nothing is lost, either: every line that is not blank is in
exactly one block. A list is cut into its items, and code into pieces of a few lines, so that neither has to end before
it can be printed.

Two things of Markdown are given up for that: a reference (`[text][name]`) is not looked up, because its definition may
come later; and HTML is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

from byssus.cli.screen import terminal

Kind = Literal["text", "item", "code", "plain"]

PIECE = 8  # lines of code that are printed at once
_CONTEXT = 200  # lines of code before a piece, for its colors
_OPEN_CONTEXT = 24  # the same while the piece arrives: it is drawn many times a second
_FEW = 8  # lines of an open block that are parsed again with each new one
_ITEM = re.compile(r" {0,3}(?:[-+*]|\d{1,9}[.)]) {1,4}(?=\S)")
_STAND_INS = {  # a short block that is continued and ended by the same lines as a long one of its kind
    "paragraph_open": ["x"],
    "table_open": ["x|x", "-|-"],
    "code_block": ["    x"],
}
_FENCE = re.compile(r"( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)")
_parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


class Block(NamedTuple):
    """A part of a text that can be drawn by itself.

    `source` is its lines. `number` is that of an item in an ordered list. Of code, `before` is what stands before the
    lines in the same block, `is_first` and `is_last` say whether its fences are among the lines.
    """

    kind: Kind
    source: str
    has_gap: bool = True  # a blank line belongs before it
    number: int | None = None
    language: str = ""
    before: str = ""
    is_first: bool = True
    is_last: bool = True


def parse(source: str) -> list[Token]:
    """The tokens of a block, without HTML and references."""
    return _parser.parse(source)


def blocks_of(text: str) -> list[Block]:
    """A whole text."""
    splitter = Splitter()
    return [*splitter.feed(text), *splitter.end()]


class Splitter:
    """Takes a text as it arrives and gives its blocks."""

    def __init__(self) -> None:
        self._rest = ""  # of a line that has not ended
        self._lines: list[str] = []  # of blocks that are open
        self._fence: _Fence | None = None
        self._number: int | None = None  # of the next item, if the open lines go on with a list that was begun before
        self._is_in_list = False
        self._is_open_by: str = ""  # what begins a line that can only be more of the open block
        self._stand_in: list[str] = []  # is parsed with the next line instead of the open block, if that is long
        self._is_at_start = True

    def feed(self, delta: str) -> list[Block]:
        """Add what has arrived; returns the blocks that it closes."""
        text = self._rest + delta
        *lines, self._rest = text.split("\n")
        return [block for line in lines for block in self._take(line.removesuffix("\r"))]

    def end(self) -> list[Block]:
        """The blocks that are left: nothing more arrives."""
        found = self.feed("\n") if self._rest else []
        if self._fence is not None:
            found += self._fence.close(None)
            self._fence = None
        found += self._closed(len(self._lines))
        self._lines = []
        return found

    def tail(self) -> list[Block]:
        """What is open, as it looks now."""
        rest = [terminal.clean(self._rest.rstrip("\r"))] if self._rest.strip() else []
        if self._fence is not None:
            return self._fence.tail(rest)
        lines = [*self._lines, *rest]
        return [each for _, each in self._cut(lines)]

    def _take(self, line: str) -> list[Block]:
        line = terminal.clean(line)
        if self._fence is not None:
            return self._take_code(line)
        if not self._lines and not line.strip():
            return []
        self._lines.append(line)
        if self._is_more(line):
            return []
        starts = [start for start, _ in self._cut(self._lines)]
        found = self._closed(starts[-1]) if starts else []
        self._is_open_by, self._stand_in = self._sign_of_more(), []
        if not self._is_open_by and len(self._lines) >= _FEW:
            self._stand_in = _STAND_INS.get(parse("\n".join(self._lines) + "\n")[0].type, [])
        opening = _FENCE.fullmatch(self._lines[0]) if len(self._lines) == 1 else None
        if opening:
            self._fence = _Fence(self._lines[0], opening, has_gap=not self._is_at_start)
            self._lines, self._is_in_list, self._is_at_start = [], False, False
        return found

    def _take_code(self, line: str) -> list[Block]:
        assert self._fence is not None
        if not self._fence.is_closed_by(line):
            return self._fence.add(line)
        found = self._fence.close(line)
        self._fence = None
        return found

    def _is_more(self, line: str) -> bool:
        """Whether the line, now the last one, only adds to the open block. Takes the same time for each line."""
        if self._is_open_by and line.startswith(self._is_open_by):
            return True
        return bool(self._stand_in) and [each[0] for each in _ranges([*self._stand_in, *self._lines[-2:]])] == [0]

    def _sign_of_more(self) -> str:
        """What each further line of the open block begins with, if such a line can begin nothing else."""
        if item := _ITEM.match(self._lines[0] if self._lines else ""):
            is_item = [kind for _, _, kind, _ in _ranges(self._lines[:1])] == ["item"]  # and not a line across
            return " " * item.end() if is_item else ""
        if len(self._lines) > 2 and all(line.startswith("|") for line in self._lines):
            return "|"
        return ">" if self._lines and all(line.startswith(">") for line in self._lines) else ""

    def _closed(self, upto: int) -> list[Block]:
        """Take the blocks out of the first open lines."""
        if upto == 0:
            return []
        found = [block for start, block in self._cut(self._lines) if start < upto]
        behind = [block for start, block in self._cut(self._lines) if start >= upto]
        self._lines = self._lines[upto:]
        self._is_at_start = self._is_at_start and not found
        is_same_list = bool(behind) and behind[0].kind == "item" and not behind[0].has_gap
        self._is_in_list, self._number = is_same_list, behind[0].number if is_same_list else None
        return found

    def _cut(self, lines: list[str]) -> list[tuple[int, Block]]:
        """The blocks of some lines, each with the line in which it begins."""
        found: list[tuple[int, Block]] = []
        for number, (start, end, kind, place) in enumerate(_ranges(lines)):
            source = "\n".join(lines[start:end]).rstrip("\n ")
            goes_on = number == 0 and self._is_in_list and kind == "item"
            is_first_item = place == 0 and not goes_on
            has_gap = is_first_item if kind == "item" else True
            if number == 0 and self._is_at_start:
                has_gap = False
            found.append((start, Block(kind, source, has_gap, None)))
            if kind == "item":
                found[-1] = start, found[-1][1]._replace(number=self._item_number(lines[start], found, is_first_item))
        return found

    def _item_number(self, line: str, found: list[tuple[int, Block]], is_first: bool) -> int | None:
        marker = re.match(r" {0,3}(\d{1,9})[.)]", line)
        if marker is None:
            return None
        if is_first:
            return int(marker[1])
        before = found[-2][1].number if len(found) > 1 else None
        return self._number if before is None else before + 1


class _Fence:
    """A block of code that is open."""

    def __init__(self, line: str, opening: re.Match[str], *, has_gap: bool) -> None:
        self._indent = len(opening[1])
        self._mark = opening[2]
        self._language = opening[3].split(maxsplit=1)[0] if opening[3].strip() else ""
        self._opening = line
        self._has_gap = has_gap
        self._printed: list[str] = []
        self._lines: list[str] = []
        self._is_first = True

    def is_closed_by(self, line: str) -> bool:
        text = line.strip(" \t")
        is_mark = len(text) >= len(self._mark) and set(text) == {self._mark[0]}
        return is_mark and len(line) - len(line.lstrip(" ")) < 4

    def add(self, line: str) -> list[Block]:
        self._lines.append(line)
        return [self._piece()] if len(self._lines) == PIECE else []

    def close(self, line: str | None) -> list[Block]:
        return [self._piece(line)]

    def tail(self, rest: list[str]) -> list[Block]:
        block = self._block([*self._lines, *rest])
        return [block._replace(before="\n".join(self._printed[-_OPEN_CONTEXT:]))]

    def _piece(self, closing: str | None = None) -> Block:
        block = self._block(self._lines, closing=closing)
        self._printed = [*self._printed, *self._lines][-_CONTEXT:]
        self._lines, self._is_first = [], False
        return block

    def _block(self, lines: list[str], *, closing: str | None = None) -> Block:
        opening = [self._opening] if self._is_first else []
        source = "\n".join([*opening, *lines, *([] if closing is None else [closing])])
        return Block(
            "code",
            source,
            self._has_gap and self._is_first,
            language=self._language,
            before="\n".join(self._printed),
            is_first=self._is_first,
            is_last=closing is not None,
        )


def _ranges(lines: list[str]) -> Iterator[tuple[int, int, Kind, int]]:
    """The blocks at the top of a text: their first line, the line behind the last one, and of items their place."""
    done = 0
    for token in parse("\n".join(lines) + "\n"):
        if token.map is None or token.nesting < 0:
            continue
        start, end = token.map
        is_list = token.type in ("bullet_list_open", "ordered_list_open")
        if token.level == 0:
            yield from _uncovered(lines, done, start)
            place, done = 0, max(done, end)
            if not is_list:
                yield start, end, "text", 0
        elif token.level == 1 and token.type == "list_item_open":
            yield start, end, "item", place
            place += 1
    yield from _uncovered(lines, done, len(lines))


def _uncovered(lines: list[str], start: int, end: int) -> Iterator[tuple[int, int, Kind, int]]:
    """Lines that are in no block: definitions of references, which are shown as they stand."""
    for number in range(start, end):
        if lines[number].strip():
            yield number, number + 1, "plain", 0
