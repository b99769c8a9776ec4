"""Draws blocks of Markdown and plain text as lines of styled text, with rich.

Only the sixteen colors of the terminal are used, so the person's own theme is kept. Lines are not padded, and code is
not wrapped: what is copied out of the terminal is what was said.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown, TableElement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from byssus.cli.chat.live.drawn import markdown
from byssus.cli.chat.live.drawn.markdown import Block
from byssus.cli.screen import terminal

Line = list[Segment]

THEMES = ("dark", "light", "plain")
_CODE = {"dark": "ansi_dark", "light": "ansi_light", "plain": "ansi_dark"}
_MOST_CODE = 100_000  # characters: longer code is not colored
_NAMES = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "gray"]
_PT_COLORS = [f"ansi{name}" for name in _NAMES]
_PT_COLORS += ["ansibrightblack", *(f"ansibright{name}" for name in _NAMES[1:7]), "ansiwhite"]
_STYLES = {
    "you": "bold cyan",
    "faint": "bright_black",
    "note": "bright_black",
    "good": "green",
    "bad": "red",
    "ask": "bold yellow",
    "tool": "bold magenta",
    "markdown.h1": "bold underline",
    "markdown.h2": "bold",
    "markdown.h3": "bold",
    "markdown.code": "cyan",
    "markdown.code_block": "cyan",
    "markdown.block_quote": "bright_black",
    "markdown.item.bullet": "cyan",
    "markdown.item.number": "cyan",
    "markdown.link": "underline",
    "markdown.link_url": "bright_black underline",
    "markdown.hr": "bright_black",
    "markdown.table.border": "bright_black",
    "markdown.table.header": "bold",
}


class _Heading(Heading):
    """A heading on the left, like all text."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text
        text.justify = "left"
        yield text


class _Table(TableElement):
    """A table as wide as what is in it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for drawn in super().__rich_console__(console, options):
            if isinstance(drawn, Table):
                drawn.pad_edge = True
                drawn.expand = False
                for column in drawn.columns:
                    column.overflow = "fold"
            yield drawn


class _Markdown(Markdown):
    """Markdown with our headings and tables."""

    elements = {**Markdown.elements, "heading_open": _Heading, "table_open": _Table}  # noqa: RUF012


_EMPTY = _Markdown("", hyperlinks=False)


def _parsed(source: str) -> _Markdown:
    """A block that was parsed by us. A new one would make another parser each time."""
    found = copy.copy(_EMPTY)
    found.parsed = markdown.parse(source)
    return found


class Appearance(NamedTuple):
    """How things are drawn: the width in columns, and the theme."""

    width: int
    theme: str = "dark"
    has_colors: bool = True


class Drawer:
    """Draws for one width and theme."""

    def __init__(self, look: Appearance) -> None:
        self.look = look
        self.width = look.width
        is_colored = look.has_colors and look.theme != "plain"
        self._console = Console(
            file=io.StringIO(),
            width=max(look.width, 8),
            height=1000,
            force_terminal=True,
            color_system="standard",
            no_color=not is_colored,
            legacy_windows=False,
            highlight=False,
            markup=False,
            emoji=False,
            theme=Theme(_STYLES),
        )
        self._is_colored = is_colored
        self._options = self._console.options

    def style(self, name: str) -> Style:
        return self._console.get_style(name) if name else Style.null()

    # --- lines --------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> list[Line]:
        """A block of Markdown, with the blank line before it."""
        lines: list[Line] = [[]] if block.has_gap else []
        if block.kind == "code":
            return [*lines, *self._code(block)]
        if block.kind == "plain":
            return [*lines, *self.text(block.source)]
        source = block.source
        if block.number is not None:  # a list that is drawn item by item goes on with its number
            _, dot, rest = source.lstrip(" ").partition("." if "." in source[:14] else ")")
            source = f"{block.number}{dot}{rest}"
        return [*lines, *self._lines(_parsed(source))]

    def text(self, text: str, style: str = "", *, indent: int = 0) -> list[Line]:
        """Plain text, wrapped at words. It is cleaned here: it may come from anywhere."""
        drawn: Any = Text(terminal.clean(text), style=style, overflow="fold")
        return self._lines(Padding(drawn, (0, 0, 0, indent)) if indent else drawn)

    def line(self, *parts: tuple[str, str]) -> Line:
        """One line of several styles, which is not wrapped: each part is its style and its text."""
        return [Segment(terminal.line(text), self.style(style)) for style, text in parts]

    def _code(self, block: Block) -> list[Line]:
        lines = block.source.split("\n")
        first = [self.line(("faint", lines.pop(0).strip()))] if block.is_first else []
        last = [self.line(("faint", lines.pop().strip()))] if block.is_last else []
        return [*first, *(self._colored(block, lines) if lines else []), *last]

    def _colored(self, block: Block, lines: list[str]) -> list[Line]:
        before = block.before.split("\n") if block.before else []
        source = "\n".join([*before, *lines])
        if not self._is_colored or not block.language or len(source) > _MOST_CODE:
            return [[Segment(line.expandtabs(4))] for line in lines]
        syntax = Syntax(source, block.language, theme=_CODE[self.look.theme], background_color="default", tab_size=4)
        text = syntax.highlight(source.expandtabs(4))
        drawn = [_stripped(list(line.render(self._console))) for line in text.split("\n", allow_blank=True)]
        drawn = drawn[len(before) :][: len(lines)]
        return [*drawn, *([] for _ in range(len(lines) - len(drawn)))]

    def _lines(self, drawn: Any) -> list[Line]:
        options = self._options.update(height=None)
        found = [_stripped(line) for line in Segment.split_lines(self._console.render(drawn, options))]
        while found and not found[-1]:
            found.pop()
        while found and not found[0]:
            found.pop(0)
        return found

    # --- the forms of a line ------------------------------------------------------------------------------------------

    def ansi(self, line: Line) -> str:
        """A line as it is sent to the terminal."""
        if not self._is_colored:
            return "".join(segment.text for segment in line)
        system = ColorSystem.STANDARD
        return "".join(
            segment.style.render(segment.text, color_system=system) if segment.style else segment.text
            for segment in line
            if not segment.control
        )

    def fragments(self, line: Line) -> list[tuple[str, str]]:
        """A line as prompt_toolkit draws it."""
        return [(self._pt(segment.style), segment.text) for segment in line if not segment.control]

    def _pt(self, style: Style | None) -> str:
        return "" if style is None or not self._is_colored else _pt_style(style)


def _pt_style(style: Style) -> str:
    found = _PT_CACHE.get(style)
    if found is None:
        words = [name for name in ("bold", "italic", "underline", "strike", "reverse") if getattr(style, name)]
        if style.color is not None and style.color.number is not None and style.color.number < len(_PT_COLORS):
            words.append(f"fg:{_PT_COLORS[style.color.number]}")
        found = _PT_CACHE[style] = " ".join(words)
    return found


_PT_CACHE: dict[Style, str] = {}


def _stripped(line: Iterable[Segment]) -> Line:
    """A line without the spaces that only fill it up."""
    found = [segment for segment in line if segment.text and segment.text != "\n"]
    while found and not found[-1].text.strip(" \n"):
        found.pop()
    if found:
        last = found[-1]
        found[-1] = Segment(last.text.rstrip(" \n"), last.style)
    return found


def are_colors_wanted() -> bool:
    return not os.environ.get("NO_COLOR")
