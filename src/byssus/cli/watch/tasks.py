"""Tasks that run, as `byssus watch` draws them: one row each, with a bar of its progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from byssus.cli.screen import terminal
from byssus.cli.screen.table import aligned, cut

if TYPE_CHECKING:
    from byssus.storage import TaskRow

HEADS = ("TASK", "THREAD", "PROGRESS")
_TYPE, _THREAD = 20, 20  # columns
_NARROW = 60  # columns of a screen on which the thread is left out
_BAR = 20


def cells(task: TaskRow, bar: int = _BAR) -> tuple[str, str, str]:
    """The type of a task, its thread or user, and its progress."""
    of = task["session_id"] or task["user_id"] or ""
    return terminal.line(task["type"]), terminal.line(of), progress(task, bar)


def progress(task: TaskRow, bar: int = _BAR) -> str:
    """How far a task is; if it has not told, since when it runs."""
    asked = f"asked to {task['asked']}" if task["asked"] else ""
    share = task["progress"]
    if share is None and not task["progress_note"]:
        since = "" if task["started_at"] is None else f"since {terminal.when(task['started_at'], utc=False)[11:]}"
        return asked or since
    done = "" if share is None else f"[{'#' * round(share * bar):{bar}}] {share:4.0%}"
    return terminal.line("  ".join(filter(None, (done, task["progress_note"], asked))))


def rows(tasks: Sequence[TaskRow], columns: int, most: int) -> list[str]:
    """At most so many lines, each as wide as the screen at most; none if no task runs."""
    if not tasks or most < 2:
        return []
    is_narrow = columns < _NARROW
    lines = [
        _line((*each[:1], "" if is_narrow else each[1], each[2]), columns, is_narrow)
        for each in (HEADS, *(cells(task, 10 if is_narrow else _BAR) for task in tasks))
    ]
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], cut(f"... {len(lines) - most + 1} more tasks run", columns)]


def _line(texts: tuple[str, str, str], columns: int, is_narrow: bool) -> str:
    fixed = [aligned(texts[0], _TYPE if not is_narrow else _TYPE // 2, False)]
    fixed += [] if is_narrow else [aligned(texts[1], _THREAD, False)]
    return cut(" ".join([*fixed, texts[2]]), columns)
