"""A screen on which a script plays real programs, and what it looked like at each step.

A step is taken where the script says so, and never in between: so the same script makes the same recording, whatever
the machine is doing. Typing and the shell's prompt are the script's; all else on the screen was written by `byssus`.
Times of tools and spinners differ from run to run, and are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyte
from pyte.screens import Char
from wcwidth import wcswidth

from tests.support.display import DIM, Display
from tests.support.window import Window

_KEYS_AT_ONCE = 3
_SPINNER = re.compile("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]")
_TOOK = re.compile(r"\b\d+\.\d s\b")
_THOUGHT = re.compile(r"\bthought for \d+ s\b")
_WAITED = re.compile(r" \d+ s(?= |$)")


class Run(NamedTuple):
    """Characters of one look, from a column on."""

    column: int
    text: str
    look: Char

    @property
    def width(self) -> int:
        return max(wcswidth(self.text), len(self.text) if self.text.isascii() else 0)


Row = tuple[Run, ...]


class Frame(NamedTuple):
    """The screen at a step, and for how long it is shown."""

    rows: tuple[Row, ...]
    seconds: float

    @property
    def text(self) -> str:
        return "\n".join(_plain(row) for row in self.rows).rstrip()


class Screencast:
    """Plays a script: shell commands, and the programs that they start."""

    def __init__(self, folder: Path, columns: int = 84, rows: int = 24) -> None:
        self._folder = folder
        self.display = Display(columns, rows)
        self._stream = pyte.Stream(self.display)
        self.frames: list[Frame] = []

    def shell(self, *arguments: str, env: Mapping[str, str] = {}, hidden: tuple[str, ...] = ()) -> Window:
        """Type a command, and start it; `hidden` arguments are those that a person has in byssus.toml."""
        self._stream.feed("\x1b[0m$ ")
        for typed in _pieces(" ".join(["byssus", *arguments])):
            self._stream.feed(f"\x1b[32m{typed}\x1b[0m")
            self.show(0.08)
        self._stream.feed("\r\n")
        return Window(*arguments, *hidden, home=self._folder, env=env, display=self.display)

    def note(self, text: str) -> None:
        """What the shell says on a line of its own."""
        self._stream.feed(f"\r\n\x1b[J\x1b[31m{text}\x1b[0m\r\n")
        self.show(1.5)

    def type(self, window: Window, text: str) -> None:
        """Type a line slowly, without Enter."""
        typed = ""
        for piece in _pieces(text):
            typed += piece
            window.type(piece)
            window.wait_for_on_screen(typed.rstrip())
            self.show(0.12)

    def enter(self, window: Window, text: str) -> None:
        self.type(window, text)
        window.press("enter")

    def show(self, seconds: float = 1.0) -> None:
        """Take a step: the screen as it is."""
        rows = tuple(self._row(y) for y in range(self.display.lines))
        if self.frames and self.frames[-1].rows == rows:
            self.frames[-1] = self.frames[-1]._replace(seconds=self.frames[-1].seconds + seconds)
        else:
            self.frames.append(Frame(rows, seconds))

    def _row(self, y: int) -> Row:
        line = self.display.buffer[y]
        runs: list[Run] = []
        for x in range(self.display.columns):
            cell = line[x]
            look = cell._replace(data="")
            if not cell.data:
                continue
            if runs and runs[-1].look == look:
                runs[-1] = runs[-1]._replace(text=runs[-1].text + cell.data)
            else:
                runs.append(Run(x, cell.data, look))
        return tuple(_tight(self._steady(run)) for run in runs if run.text.strip() or _is_visible(run.look))

    def _steady(self, run: Run) -> Run:
        text = _THOUGHT.sub("thought for 1 s", _TOOK.sub("0.3 s", _SPINNER.sub("⠋", run.text)))
        if text.startswith("⠋") or run.look.fg == "brightblack" or getattr(run.look, DIM):
            text = _WAITED.sub("", text)
        return run._replace(text=text)


def _tight(run: Run) -> Run:
    """Without the spaces around it, unless they show."""
    if _is_visible(run.look):
        return run
    text = run.text.lstrip(" ")
    return run._replace(column=run.column + len(run.text) - len(text), text=text.rstrip(" "))


def _pieces(text: str) -> list[str]:
    return [text[start : start + _KEYS_AT_ONCE] for start in range(0, len(text), _KEYS_AT_ONCE)]


def _plain(row: Row) -> str:
    text = ""
    for run in row:
        text += " " * max(0, run.column - max(wcswidth(text), 0)) + run.text
    return text.rstrip()


def _is_visible(look: Char) -> bool:
    return look.bg != "default" or look.reverse or look.underscore
