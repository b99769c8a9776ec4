"""What `byssus watch` draws: rows of styled pieces of text, for a screen of any size.

Text of models and tools is cleaned before it is drawn: it cannot drive the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from byssus.cli.screen import terminal
from byssus.cli.screen.table import aligned, cut, width, wrapped
from byssus.cli.subcommand import count
from byssus.cli.watch.tasks import rows as task_rows
from byssus.cli.watch.watched import Watched
from byssus.values.decisions import Pending

if TYPE_CHECKING:
    from byssus.storage import TaskRow

Row: TypeAlias = list[tuple[str, str]]  # pieces, each with the name of its style

# Columns from the left: title, least width of the screen for it, width; the rest of the screen is for what it does.
_COLUMNS = (("THREAD", 0, 20), ("STATE", 0, 11))
_WIDE = (("TOKENS/MIN", 70, 10), ("BEGAN", 90, 8))
_PREFIXES = {"user": "> ", "assistant": "", "tool": "  ", "call": "* ", "end": "- "}
_STYLES = {"user": "bold", "assistant": "", "tool": "dim", "call": "call", "end": "dim"}
_MOST_OF_A_TOOL = 12  # rows of a result


def overview(
    runs: Sequence[Watched],
    selected: str | None,
    note: str,
    columns: int,
    lines: int,
    tasks: Sequence[TaskRow] = (),
) -> list[Row]:
    """The list of the runs, with the question that the selected one waits for, and the tasks that run."""
    asking = sum(len(run.waiting) for run in runs)
    live = [run for run in runs if run.left_at is None]
    more = f", {count(len(tasks), 'running task')}" if tasks else ""
    head = f"{count(len(live), 'live run')}, {count(asking, 'question')} waiting{more}"
    rows: list[Row] = [[("bold", cut(head, columns))], [("dim", _line(_heads(columns), columns))]]
    chosen = next((run for run in runs if run.thread_id == selected), None)
    panel = [] if chosen is None else _panel(chosen.waiting, columns, lines)
    below = [
        [("dim" if number == 0 else "", each)] for number, each in enumerate(task_rows(tasks, columns, lines // 3))
    ]
    room = max(lines - len(rows) - len(panel) - len(below) - 2, 1)
    at = next((number for number, run in enumerate(runs) if run is chosen), 0)
    first = max(at - room + 1, 0)
    for run in runs[first : first + room]:
        style = "selected" if run is chosen else "dim" if run.left_at is not None else "asks" if run.waiting else ""
        rows.append([(style, _line(_cells(run, columns), columns))])
    if not runs:
        rows.append([("", cut("Nothing runs now. What begins appears here.", columns))])
    keys = "up/down  enter: follow  q: quit"
    return _framed(rows, [*below, *panel], _keys(chosen, keys), note, columns, lines)


def followed(
    run: Watched | None, thread_id: str, back: int, note: str, columns: int, lines: int, *, is_alone: bool = False
) -> list[Row]:
    """One run: what it has said and done, as far as it fits; `back` rows further up. `is_alone`: there is no list."""
    if run is None:
        head: list[Row] = [[("bold", cut(f"{thread_id}: there is no such thread yet", columns))]]
        return _framed(head, [], "q: quit", note, columns, lines)
    tokens = f", {run.tokens_a_minute(time.monotonic()):,} tokens/min"
    title = terminal.line(f"{run.thread_id}: {run.state}, {run.doing}{tokens}")
    panel = _panel(run.waiting, columns, lines)
    room = max(lines - 1 - len(panel) - 2, 1)
    found: list[Row] = []
    for row in _backwards(run, columns):
        found.append(row)
        if len(found) >= room + back:
            break
    shown = found[min(back, max(len(found) - room, 0)) :][:room][::-1]
    keys = f"page up/down  {'' if is_alone else 'esc: all runs  '}q: quit"
    return _framed([[("bold", cut(title, columns))], *shown], panel, _keys(run, keys), note, columns, lines)


def reading(waiting: Sequence[Pending], first: int, note: str, columns: int, lines: int) -> tuple[list[Row], int]:
    """All of a question, from a row on; and that row, which is in the question."""
    all_rows = question(waiting, columns)
    room = max(lines - 2, 1)
    first = max(min(first, len(all_rows) - room), 0)
    keys = "y: approve  n: deny  up/down  v: back  q: quit"
    return _framed(all_rows[first : first + room], [], keys, note, columns, lines), first


def _panel(waiting: Sequence[Pending], columns: int, lines: int) -> list[Row]:
    """As much of a question as half of the screen holds."""
    all_rows, most = question(waiting, columns), max(lines // 2, 3)
    if len(all_rows) <= most:
        return all_rows
    return [*all_rows[: most - 1], [("asks", cut(f"... {len(all_rows) - most + 1} more rows; v shows all", columns))]]


def question(waiting: Sequence[Pending], columns: int) -> list[Row]:
    """The first question that waits: what is asked, with which arguments, and what it would change."""
    if not waiting:
        return []
    call = waiting[0]
    asked, *details = call.question.splitlines() or [""]
    more = f" ({len(waiting) - 1} more wait)" if len(waiting) > 1 else ""
    approvals = f" ({len(call.approvals)} of {call.approvers} approvals)" if call.approvers > 1 else ""
    rows: list[Row] = [[("dim", "-" * columns)]]
    text = terminal.line(f"{call.reason} of {call.tool_name}: {asked}{approvals}{more}")
    rows += [[("asks", each)] for each in _broken(text, columns)]
    if not details:
        for name, value in call.arguments.items():
            text = value if isinstance(value, str) else terminal.as_json(value)
            rows += [[("", each)] for each in _lines(f"{name}: {text}", columns)]
    for each in details:
        style = {"+": "added", "-": "removed", "@": "dim"}.get(each[:1], "")
        rows += [[(style, part)] for part in _broken(each, columns)]
    return rows


def _framed(rows: list[Row], panel: list[Row], keys: str, note: str, columns: int, lines: int) -> list[Row]:
    """Rows above, a question below them, and the last rows for a note and the keys."""
    bottom: list[Row] = [[("note", cut(terminal.line(note), columns))], [("dim", cut(keys, columns))]]
    above = rows[: max(lines - len(panel) - len(bottom), 1)]
    empty: list[Row] = [[] for _ in range(lines - len(above) - len(panel) - len(bottom))]
    return [*above, *empty, *panel, *bottom][-lines:]


def _keys(run: Watched | None, others: str) -> str:
    return f"y: approve  n: deny  {others}" if run is not None and run.waiting else others


def _heads(columns: int) -> list[str]:
    wide = [title for title, least, _ in _WIDE if columns >= least]
    return [*(title for title, _, _ in _COLUMNS), *wide, "DOES"]


def _cells(run: Watched, columns: int) -> list[str]:
    began = "" if run.run is None else terminal.when(run.run.began_at, utc=False)[11:]
    wide = {"TOKENS/MIN": f"{run.tokens_a_minute(time.monotonic()):,}", "BEGAN": began}
    asks = f"[{len(run.waiting)}?] " if run.waiting else ""
    return [
        terminal.line(run.thread_id),
        run.state,
        *(wide[title] for title, least, _ in _WIDE if columns >= least),
        terminal.line(f"{asks}{run.doing}"),
    ]


def _line(cells: Sequence[str], columns: int) -> str:
    """Cells side by side, as wide as the screen."""
    widths = [(title, size) for title, least, size in (*_COLUMNS, *_WIDE) if columns >= least]
    narrow = {"THREAD": 12, "STATE": 8} if columns < 60 else {}
    fixed = [narrow.get(title, size) for title, size in widths]
    fixed.append(max(columns - sum(fixed) - len(fixed), 1))
    right = [title == "TOKENS/MIN" for title, _ in widths] + [False]
    return " ".join(aligned(cell, size, each) for cell, size, each in zip(cells, fixed, right, strict=True))


def _backwards(run: Watched, columns: int) -> Iterator[Row]:
    """All rows of a run, the last one first."""
    if run.arriving:
        for each in reversed(_lines(run.arriving, columns)):
            yield [("", each)]
    for entry in reversed(run.entries):
        prefix = _PREFIXES[entry.kind]
        lines = _lines(entry.text, max(columns - width(prefix), 1))
        if entry.kind == "tool" and len(lines) > _MOST_OF_A_TOOL:
            lines = [*lines[: _MOST_OF_A_TOOL - 1], f"[... {len(lines) - _MOST_OF_A_TOOL + 1} more rows]"]
        for number, each in reversed([*enumerate(lines)]):
            yield [(_STYLES[entry.kind], f"{prefix if number == 0 else ' ' * width(prefix)}{each}")]


def _lines(text: str, columns: int) -> list[str]:
    """A text as rows of the screen."""
    return [row for line in text.splitlines() for row in _broken(line, columns)] or [""]


def _broken(line: str, columns: int) -> Iterator[str]:
    """One line as rows of the screen; a long word is broken, too."""
    for row in wrapped(terminal.line(line), columns):
        if width(row) <= columns:
            yield row
        else:  # it is ASCII
            yield from (row[at : at + columns] for at in range(0, len(row), columns))
