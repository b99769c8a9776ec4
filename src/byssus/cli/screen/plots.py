"""Plots of text: bars and sparklines, of blocks, or of ASCII characters where the output cannot encode blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from byssus.cli.screen import terminal
from byssus.cli.screen.table import aligned, width

_EIGHTHS = "▏▎▍▌▋▊▉█"
_LEVELS, _PLAIN_LEVELS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_LONGEST_LABEL = 32
_LEAST = 4  # columns of a bar


class Bar(NamedTuple):
    """A row of a chart: what, how much, and how much in words."""

    label: str
    value: float
    figure: str


def chart(title: str, bars: Sequence[Bar], columns: int) -> Iterator[str]:
    """The rows of a chart: a bar of the highest value is as long as there is room."""
    labels = [terminal.printable(bar.label) for bar in bars]
    figures = max(width(bar.figure) for bar in bars)
    room = min(max(map(width, labels)), _LONGEST_LABEL, max(columns - figures - _LEAST - 4, 1))
    longest = max(columns - room - figures - 4, _LEAST)
    most = max(bar.value for bar in bars)
    yield terminal.styled(title, "bold")
    for label, bar in zip(labels, bars, strict=True):
        figure = aligned(bar.figure, figures, True)
        yield f"{aligned(label, room, False)}  {figure}  {drawn_bar(bar.value, most, longest)}".rstrip()


def drawn_bar(value: float, most: float, columns: int) -> str:
    """A bar; anything above 0 is at least a sign."""
    if value <= 0 or most <= 0:
        return ""
    eighths = max(round(value / most * columns * 8), 1)
    whole, part = divmod(eighths, 8)
    if _has_blocks():
        return f"{_EIGHTHS[-1] * whole}{_EIGHTHS[part - 1] if part else ''}"
    return "#" * max(round(eighths / 8), 1)


def sparkline(values: Sequence[float | None]) -> str:
    """One character a value, from the bottom for 0 to the top for the highest; a space for None."""
    levels = _LEVELS if _has_blocks() else _PLAIN_LEVELS
    most = max((value for value in values if value is not None), default=0) or 1
    steps = len(levels) - 1
    return "".join(" " if value is None else levels[round(value / most * steps)] for value in values)


def _has_blocks() -> bool:
    blocks = _EIGHTHS + _LEVELS
    return terminal.drawn(blocks, "") == blocks
