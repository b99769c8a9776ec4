"""The steps of tasks: what a handler has done, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from byssus.store.database import Row, Tx

StepKind: TypeAlias = Literal["call", "sleep", "wait"]
StepStatus: TypeAlias = Literal["started", "done", "failed", "waiting"]

_FIELDS = ("name", "kind", "status", "recovery", "attempts", "result", "error", "until", "started_at", "ended_at")


def fields(tx: Tx, task: int) -> list[Row]:
    """The steps of a task, by its key, as exports have them."""
    return tx.all(f"SELECT {', '.join(_FIELDS)} FROM task_steps WHERE task = :task ORDER BY key", task=task)


def add(tx: Tx, task: int, rows: Sequence[Sequence[Any]]) -> None:
    """Add the steps of a task as they were exported."""
    tx.many(
        f"INSERT INTO task_steps (task, {', '.join(_FIELDS)}) VALUES (:task, {', '.join(f':{f}' for f in _FIELDS)})",
        [{"task": task, **dict(zip(_FIELDS, row, strict=True))} for row in rows],
    )
