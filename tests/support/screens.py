"""A screen to print on without a process: an output that says that it is a terminal, of a width and an encoding."""

from __future__ import annotations

import io
import sys

import pytest


class Screen(io.TextIOWrapper):
    """What a person would see."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        self.flush()
        return self._bytes.getvalue().decode(self.encoding)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def screen_of(
    monkeypatch: pytest.MonkeyPatch, columns: int = 80, encoding: str = "utf-8", term: str = "dumb", rows: int = 1000
) -> Screen:
    """Let what this process prints go to a new screen."""
    screen = Screen(encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen
