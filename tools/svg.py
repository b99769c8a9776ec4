"""A terminal as an SVG: one picture, or an animation of several that starts over.

Each row that stays the same is one element, however many steps it is there for. Runs of one look are placed by their
columns and stretched to them, so tables stay aligned in any font. Without animations the last step is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from pyte.screens import Char

from tests.support.display import DIM
from tools.screencast import Frame, Row, Run

_WIDTH, _HEIGHT, _MARGIN = 8.4, 18, 14  # of a character, of a row, around them
_HOLD = 4.0  # seconds that the last step stays
_COLORS = {
    "black": "#484f58",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#56d4dd",
    "white": "#c9d1d9",
    "brightblack": "#8b949e",
    "brightred": "#ffa198",
    "brightgreen": "#a5f3b0",
    "brightbrown": "#f2cc60",
    "brightblue": "#a5d6ff",
    "brightmagenta": "#e2c5ff",
    "bfightmagenta": "#e2c5ff",
    "brightcyan": "#b3f0ff",
    "brightwhite": "#ffffff",
}
_FOREGROUND, _BACKGROUND = "#e6edf3", "#0d1117"
_STYLE = (
    f"text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:{_FOREGROUND};"
    "white-space:pre}.b{font-weight:700}.i{font-style:italic}.u{text-decoration:underline}.d{opacity:.6}"
)


class Shown(NamedTuple):
    """A row that is there from one step to another."""

    y: int
    row: Row
    first: int
    end: int


def animation(frames: Sequence[Frame], title: str) -> str:
    """The steps one after another, again and again."""
    starts = [sum(frame.seconds for frame in frames[:number]) for number in range(len(frames))]
    total = starts[-1] + _HOLD
    times = [f"{100 * start / total:.2f}".rstrip("0").rstrip(".") for start in starts] + ["100"]
    spans = sorted({(each.first, each.end) for each in _shown(frames)})
    whole = (0, len(frames))
    style = "".join(
        _keyframes(number, times[first], times[end])
        for number, (first, end) in enumerate(spans)
        if (first, end) != whole
    )
    style += f".a{{visibility:hidden;animation-duration:{total:.1f}s;animation-iteration-count:infinite;"
    style += "animation-timing-function:step-end}.z{visibility:visible}"
    elements = []
    for each in _shown(frames):
        number = spans.index((each.first, each.end))
        last = " z" if each.end == len(frames) else ""
        kind = "" if (each.first, each.end) == whole else f' class="a{last} t{number}"'
        elements.append(f"<g{kind}>{_row(each.y, each.row)}</g>")
    return _document(frames[-1], title, style, elements)


def picture(frame: Frame, title: str) -> str:
    """One step, without the empty rows below."""
    last = max(y for y, row in enumerate(frame.rows) if row)
    frame = frame._replace(rows=frame.rows[: last + 1])
    return _document(frame, title, "", [_row(y, row) for y, row in enumerate(frame.rows) if row])


def _keyframes(number: int, begin: str, end: str) -> str:
    """Visible between two times, and hidden before and after."""
    hidden, visible = "{visibility:hidden}", "{visibility:visible}"
    steps = (f"0%{hidden}" if begin != "0" else "") + f"{begin}%{visible}"
    steps += f"{end}%{hidden}" if end != "100" else f"100%{visible}"
    return f"@keyframes k{number}{{{steps}}}.t{number}{{animation-name:k{number}}}"


def _shown(frames: Sequence[Frame]) -> Iterator[Shown]:
    for y in range(len(frames[0].rows)):
        first = 0
        for step in range(1, len(frames) + 1):
            if step == len(frames) or frames[step].rows[y] != frames[first].rows[y]:
                if frames[first].rows[y]:
                    yield Shown(y, frames[first].rows[y], first, step)
                first = step


def _document(last: Frame, title: str, style: str, elements: Sequence[str]) -> str:
    columns = max((run.column + run.width for row in last.rows for run in row), default=0)
    width, height = 2 * _MARGIN + max(columns, 84) * _WIDTH, 2 * _MARGIN + len(last.rows) * _HEIGHT
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {size}>'
    box = f'<rect width="100%" height="100%" rx="8" fill="{_BACKGROUND}"/>'
    name = f"<title>{escape(title)}</title>"
    return "\n".join([head, name, f"<style>{_STYLE}{style}</style>", box, *elements, "</svg>", ""])


def _row(y: int, row: Row) -> str:
    middle = _MARGIN + y * _HEIGHT + 13
    return "".join(_box(run, y) + _text(run, middle) for run in row)


def _box(run: Run, y: int) -> str:
    _, behind = _colors(run.look)
    if behind is None:
        return ""
    place = f'x="{_MARGIN + run.column * _WIDTH:.1f}" y="{_MARGIN + y * _HEIGHT}"'
    return f'<rect {place} width="{run.width * _WIDTH:.1f}" height="{_HEIGHT}" fill="{behind}"/>'


def _text(run: Run, middle: float) -> str:
    if not run.text.strip():
        return ""
    look = run.look
    flags = {"b": look.bold, "i": look.italics, "u": look.underscore, "d": getattr(look, DIM)}
    kinds = " ".join(name for name, is_set in flags.items() if is_set)
    color, _ = _colors(look)
    text = run.text.rstrip() if not look.underscore else run.text
    width = run._replace(text=text).width * _WIDTH
    parts = [f'x="{_MARGIN + run.column * _WIDTH:.1f}" y="{middle}" textLength="{width:.1f}"']
    parts += [f'class="{kinds}"'] if kinds else []
    parts += [f'style="fill:{color}"'] if color != _FOREGROUND else []
    return f"<text {' '.join(parts)}>{escape(text, quote=False)}</text>"


def _colors(look: Char) -> tuple[str, str | None]:
    """The color of the text, and of what is behind it if that is not the background."""
    front = _color(look.fg, _FOREGROUND)
    behind = None if look.bg == "default" else _color(look.bg, _BACKGROUND)
    return (behind or _BACKGROUND, front) if look.reverse else (front, behind)


def _color(name: str, default: str) -> str:
    if name == "default":
        return default
    return _COLORS.get(name, f"#{name}")
