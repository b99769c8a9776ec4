"""The moves between the states of a task that people ask for: pause, resume, cancel and try again.

A running task is only asked to pause or to be cancelled. The worker that runs it makes the move; if that worker has
died, the next one that finds the task does.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from byssus.errors import IllegalMove
from byssus.queries.tasks import tasks
from byssus.queries.tasks.tasks import Task
from byssus.store.database import Tx
from byssus.store.jobs import about_tasks

Move: TypeAlias = Literal["pause", "resume", "cancel", "retry"]

# From which states people may ask for a move, and where it leads. Workers make the others: pending -> running, and
# running -> completed, failed, pending, paused, cancelled.
MOVES: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "pause": (("pending", "running"), "paused"),
    "resume": (("paused",), "pending"),
    "cancel": (("pending", "running", "paused"), "cancelled"),
    "retry": (("failed", "cancelled"), "pending"),
}

_SETS: Final[dict[str, str]] = {
    # A paused task goes on waiting, for its time or its event, when it is resumed.
    "pause": "",
    "resume": "",
    "cancel": ", completed_at = :now, run_at = NULL, waits_for = NULL",
    # A person who tries it again begins a new series of tries, and a deadline that has passed would end it at once.
    "retry": ", completed_at = NULL, error = NULL, retry_count = 0, run_at = NULL, waits_for = NULL,"
    " progress = NULL, progress_note = NULL,"
    " deadline = CASE WHEN deadline <= :now THEN NULL ELSE deadline END",
}


@about_tasks
def move(tx: Tx, task_id: str, asked: Move) -> Task:
    """Make a move, or ask the worker that runs the task to make it."""
    origins, target = MOVES[asked]
    task = _taken(tx, task_id)
    if task.status == "running" and task.lease_until is not None:
        return _ask(tx, task, asked)
    if task.status not in origins:
        raise IllegalMove(task_id, task.status, asked, _legal(task))
    tx.run(
        f"UPDATE tasks SET status = :target, updated_at = :now, asked = NULL{_SETS[asked]} WHERE id = :id",
        target=target,
        now=tx.now(),
        id=task_id,
    )
    return tasks.require(tx, task_id)


def _ask(tx: Tx, task: Task, asked: Move) -> Task:
    """Leave word for the worker that runs the task. Resuming one that was asked to pause takes the word back."""
    is_legal = asked == "cancel" or (asked, task.asked) in (("pause", None), ("pause", "pause"), ("resume", "pause"))
    if not is_legal:
        raise IllegalMove(task.id, "running", asked, _legal(task))
    tx.run(
        "UPDATE tasks SET asked = :asked, updated_at = :now WHERE id = :id",
        asked=None if asked == "resume" else asked,
        now=tx.now(),
        id=task.id,
    )
    return tasks.require(tx, task.id)


def _taken(tx: Tx, task_id: str) -> Task:
    """The task, its row locked."""
    if tx.one("UPDATE tasks SET priority = priority WHERE id = :id RETURNING key", id=task_id) is None:
        raise tasks.unknown(task_id)
    return tasks.require(tx, task_id)


def _legal(task: Task) -> list[str]:
    if task.status == "running" and task.asked is not None:
        return ["resume", "cancel"] if task.asked == "pause" else ["cancel"]
    return [name for name, (origins, _) in MOVES.items() if task.status in origins]
