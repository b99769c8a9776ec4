"""What a terminal shows: pyte's screen, and what it leaves out.

These are scrollback, the alternate screen, answers to a program that asks where the cursor is, dim text, emoji of
several code points, and lines that are wrapped again when the width changes, as in most terminals of today.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pyte
from pyte import modes
from pyte.screens import Char, Cursor, Margins, StaticDefaultDict
from wcwidth import wcwidth

DIM = "blink"  # pyte knows no dim text, and nothing here blinks

BRACKETED_PASTE = 2004
_ALTERNATE = {47, 1047, 1049}
_DIM, _BLINK, _NORMAL, _STEADY = 2, 5, 22, 25
_COLOURS = {38, 48}


class Row(StaticDefaultDict[int, Char]):
    """The cells of a row."""

    is_continued = False  # the next row is the rest of a line that was too long


class _Main(NamedTuple):
    """The main screen while a program shows the alternate one."""

    buffer: dict[int, Row]
    cursor: Cursor


class Display(pyte.Screen):
    """A screen with a history. `answer` takes what the terminal sends to the program by itself."""

    buffer: dict[int, Row]  # type: ignore[assignment]  # its rows know more than pyte's

    def __init__(self, columns: int, lines: int, answer: Callable[[str], None] = lambda _: None) -> None:
        self.history: list[Row] = []
        self._main: _Main | None = None
        self.answer = answer
        super().__init__(columns, lines)
        self.buffer = defaultdict(lambda: Row(self.default_char))

    # --- what is shown ------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[str]:
        """The rows of the screen, without spaces at their ends."""
        return [_text(self.buffer[y], self.columns) for y in range(self.lines)]

    @property
    def transcript(self) -> str:
        """All rows that are in the scrollback and on the screen, without the empty ones below."""
        above = [_text(row, self.columns) for row in self.history]
        return "\n".join([*above, *self.rows]).rstrip()

    @property
    def unwrapped(self) -> str:
        """The transcript with long lines as the program wrote them: a word that was cut at the edge is whole."""
        lines: list[str] = []
        rows = [*self.history, *(self.buffer[y] for y in range(self.lines))]
        continues = False
        for row in rows:
            text = _text(row, self.columns)
            lines[-1:] = [lines[-1] + text] if continues else [*lines[-1:], text]
            continues = row.is_continued
        return "\n".join(lines).rstrip()

    def has_private_mode(self, mode: int) -> bool:
        return mode << 5 in self.mode

    # --- scrollback ---------------------------------------------------------------------------------------------------

    def index(self) -> None:
        top, bottom = self.margins or Margins(0, self.lines - 1)
        if self.cursor.y == bottom and top == 0 and self._main is None:
            self.history.append(self.buffer[0])
        super().index()

    def erase_in_display(self, how: int = 0, *args: Any, **kwargs: Any) -> None:
        if how == 3:
            self.history.clear()
            return
        super().erase_in_display(how, *args, **kwargs)
        for y in range(self.cursor.y if how == 0 else 0, self.lines):
            self.buffer[y].is_continued = False

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        super().erase_in_line(how, private)
        if how != 1:
            self.buffer[self.cursor.y].is_continued = False

    # --- text ---------------------------------------------------------------------------------------------------------

    def draw(self, data: str) -> None:
        plain = ""
        for char in data:
            if char.isascii():
                plain += char
                continue
            self._draw_plain(plain)
            plain = ""
            if wcwidth(char) == 0:
                self._join(char)
            elif wcwidth(char) == 2 and self.cursor.x == self.columns - 1 and modes.DECAWM in self.mode:
                self._wrap()
                self._draw_plain(char)
            else:
                self._draw_plain(char)
        self._draw_plain(plain)

    def _draw_plain(self, data: str) -> None:
        while data and modes.DECAWM in self.mode:
            if self.cursor.x >= self.columns:
                self._wrap()
            room = self.columns - self.cursor.x
            super().draw(data[:room])
            data = data[room:]
        super().draw(data)

    def _wrap(self) -> None:
        self.buffer[self.cursor.y].is_continued = True
        self.carriage_return()
        self.linefeed()

    def _join(self, char: str) -> None:
        """A mark, a joiner or a selector belongs to the character before it."""
        line, x = self.buffer[self.cursor.y], self.cursor.x - 1
        if x > 0 and not line[x].data:  # the second half of a wide one
            x -= 1
        if x >= 0:
            line[x] = line[x]._replace(data=line[x].data + char)

    def select_graphic_rendition(self, *attrs: int, **kwargs: Any) -> None:
        if not kwargs:
            super().select_graphic_rendition(*_with_dim(attrs))

    # --- modes and questions ------------------------------------------------------------------------------------------

    def set_mode(self, *args: int, **kwargs: Any) -> None:
        super().set_mode(*args, **kwargs)
        if kwargs.get("private") and not _ALTERNATE.isdisjoint(args) and self._main is None:
            self._main = _Main(dict(self.buffer), self.cursor)
            self.buffer.clear()
            self.cursor = Cursor(0, 0)

    def reset_mode(self, *args: int, **kwargs: Any) -> None:
        super().reset_mode(*args, **kwargs)
        if kwargs.get("private") and not _ALTERNATE.isdisjoint(args) and self._main is not None:
            self.buffer.clear()
            self.buffer.update(self._main.buffer)
            self.cursor = self._main.cursor
            self._main = None

    def report_device_status(self, mode: int, **kwargs: Any) -> None:
        if not kwargs:
            super().report_device_status(mode)

    def write_process_input(self, data: str) -> None:
        self.answer(data)

    # --- size ---------------------------------------------------------------------------------------------------------

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        """Wrap all lines again for the new width; what no longer fits goes into the scrollback, or comes back."""
        lines, columns = lines or self.lines, columns or self.columns
        if self._main is not None or (lines, columns) == (self.lines, self.columns):
            super().resize(lines, columns)
            return
        rows = [*self.history, *(self.buffer[y] for y in range(self.lines))]
        at = len(self.history) + self.cursor.y
        while len(rows) > at + 1 and not _text(rows[-1], self.columns):
            rows.pop()
        made, cursor = self._reflowed(rows, at, columns)
        first = max(0, len(made) - lines)
        self.lines, self.columns = lines, columns
        self.history[:] = made[:first]
        self.buffer.clear()
        self.buffer.update(enumerate(made[first:]))
        self.cursor.y, self.cursor.x = cursor[0] - first, cursor[1]
        self.set_margins()
        self.tabstops = set(range(8, columns, 8))
        self.dirty.update(range(lines))

    def _reflowed(self, rows: list[Row], at: int, columns: int) -> tuple[list[Row], tuple[int, int]]:
        """The rows for a width, and the row and column of the cursor, which was in row `at`."""
        made: list[Row] = []
        cursor = (0, 0)
        line: list[Char] = []
        offset: int | None = None
        for number, row in enumerate(rows):
            if number == at:
                offset = len(line) + self.cursor.x
            line += _cells(row, self.columns, whole=row.is_continued)
            if row.is_continued and number + 1 < len(rows):
                continue
            if offset is not None:
                cursor = (len(made) + min(offset, max(len(line), 1)) // columns, offset % columns)
                line += [self.default_char] * (offset - len(line))
            pieces = [*_pieces(line, columns)] or [[]]
            for piece in pieces:
                made.append(self._row(piece))
                made[-1].is_continued = piece is not pieces[-1]
            line, offset = [], None
        while len(made) <= cursor[0]:
            made.append(self._row([]))
        return made, cursor

    def _row(self, cells: Iterable[Char]) -> Row:
        row = Row(self.default_char)
        row.update(enumerate(cells))
        return row


def _text(row: Row, columns: int) -> str:
    return "".join(row[x].data for x in range(columns)).rstrip()


def _cells(row: Row, columns: int, *, whole: bool) -> list[Char]:
    """The cells of a row; unless it is `whole`, without the empty ones at its end."""
    cells = [row[x] for x in range(columns)]
    while cells and not whole and cells[-1].data == " " and cells[-1].bg == "default" and not cells[-1].reverse:
        cells.pop()
    return cells


def _pieces(line: list[Char], columns: int) -> Iterator[list[Char]]:
    """The line in rows of so many columns; a wide character is not cut."""
    start = 0
    while start < len(line):
        end = start + columns
        if end < len(line) and not line[end].data:
            end -= 1
        yield line[start:end]
        start = end


def _with_dim(attrs: tuple[int, ...]) -> list[int]:
    """The attributes with the one that stands for dim text, which ends together with bold."""
    made: list[int] = []
    rest = iter(attrs)
    for attr in rest:
        made.append(_BLINK if attr == _DIM else attr)
        if attr == _NORMAL:
            made.append(_STEADY)
        if attr in _COLOURS and (kind := next(rest, None)) is not None:
            made += [kind, *(next(rest, 0) for _ in range({5: 1, 2: 3}.get(kind, 0)))]
    return made
