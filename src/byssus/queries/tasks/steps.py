"""Durable steps: what the handler of a task has called, slept for and waited for.

- A step is written by the worker that holds the task. Each write locks the task's row first and checks the epoch of
  the lease there, so a worker that has lost the task can neither start a step nor record its end.
- A step that is `done` never runs again. One that is `started` may or may not have run: its recovery policy decides.
  One that `failed` is run again when the task is tried again.
- Events and waits of one name match in order: the first event answers the first wait, and so on. An event that comes
  before its wait is kept as a wait that is done.
- The answer of a person to "may this step run again?" is an event named `step:<name>`. It settles the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from byssus.errors import ByssusError, InputError, NotFound
from byssus.store.database import Moment, Row, Tx
from byssus.store.jobs import about_tasks
from byssus.values.thread_key import ThreadKey

StepKind: TypeAlias = Literal["call", "sleep", "wait"]
StepStatus: TypeAlias = Literal["started", "waiting", "done", "failed"]

CALL, SLEEP, WAIT = "call", "sleep", "wait"
STARTED, DONE, FAILED, WAITING = "started", "done", "failed", "waiting"
ANSWER: Final = "answer"  # what an agent task waits for whose run waits for a person
ASK: Final = "step:"  # begins the name of an event that answers for a step


class TaskLost(ByssusError):
    """The worker does not hold the task any more. It is internal: the handler is stopped."""


class StepRow(NamedTuple):
    name: str
    kind: str
    status: str
    recovery: str | None
    attempts: int
    result: str | None
    error: str | None
    until: str | None
    started_at: str
    ended_at: str | None


_COLUMNS = ", ".join(StepRow._fields)
_VALUES = ", ".join(f":{name}" for name in StepRow._fields)
_STEP = "task = :task AND kind = :kind AND name = :name"


class StepName(NamedTuple):
    """What a step is found by."""

    kind: str
    name: str


def nth(name: str, number: int) -> str:
    """The name of the n-th use of a name in one task."""
    return name if number == 1 else f"{name}#{number}"


def of_task(tx: Tx, task_id: str) -> list[StepRow]:
    """The steps of a task, in the order in which they began."""
    rows = tx.all(
        f"SELECT {_COLUMNS} FROM task_steps WHERE task = (SELECT key FROM tasks WHERE id = :id) ORDER BY key",
        id=task_id,
    )
    return [StepRow(*row) for row in rows]


# --- written by the worker that holds the task ------------------------------------------------------------------------


def take(tx: Tx, task_id: str, epoch: int) -> int:
    """Lock the row of a task that this worker holds, and return its key.

    A lease that has run out counts until the task is taken from the worker, which changes the epoch.
    """
    row = tx.one(
        "UPDATE tasks SET lease_epoch = lease_epoch WHERE id = :id AND lease_epoch = :epoch AND status = 'running'"
        " AND lease_until IS NOT NULL RETURNING key",
        id=task_id,
        epoch=epoch,
    )
    if row is None:
        raise TaskLost(f"this worker has lost task {task_id!r}")
    return int(row[0])


def start(tx: Tx, task_id: str, epoch: int, name: str, recovery: str, *, again: bool = False) -> StepRow | None:
    """Record that a step starts. A step that is not to be called now is returned as it is.

    That is one which is done, or one that was started before and has no end, unless it is to run `again`. With the
    policy "ask", such a one waits for a person from now on.
    """
    task = take(tx, task_id, epoch)
    step = StepName(CALL, name)
    found = _find(tx, task, step)
    if found is None:
        _insert(tx, task, step, STARTED, recovery=recovery, attempts=1)
        return None
    if found.status in (DONE, WAITING):
        return found
    if found.status == STARTED and not again:
        if recovery == "ask":
            _change(tx, task, step, WAITING)
            return found._replace(status=WAITING)
        return found
    tx.run(
        "UPDATE task_steps SET status = 'started', recovery = :recovery, attempts = attempts + 1, started_at = :now,"
        f" ended_at = NULL, error = NULL WHERE {_STEP}",
        recovery=recovery,
        now=tx.now(),
        task=task,
        **step._asdict(),
    )
    return None


def finish(tx: Tx, task_id: str, epoch: int, name: str, *, result: str | None = None, error: str | None = None) -> None:
    """Record how a step has ended: with a result, or with an error."""
    task = take(tx, task_id, epoch)
    _change(tx, task, StepName(CALL, name), DONE if error is None else FAILED, result=result, error=error)


def wait(tx: Tx, task_id: str, epoch: int, step: StepName, seconds: float | None) -> StepRow:
    """Record that the handler sleeps, or waits for an event; returns how far that is.

    When its time is over, a sleep is done and a wait has failed. That stays so, whenever the handler asks again.
    """
    task = take(tx, task_id, epoch)
    if _find(tx, task, step) is None:
        _insert(tx, task, step, WAITING, until=None if seconds is None else tx.after(seconds))
    tx.run(
        f"UPDATE task_steps SET status = :ending, ended_at = :now WHERE {_STEP} AND status = 'waiting'"
        " AND until <= :now",
        ending=DONE if step.kind == SLEEP else FAILED,
        now=tx.now(),
        task=task,
        **step._asdict(),
    )
    found = _find(tx, task, step)
    assert found is not None
    return found


def suspend(tx: Tx, task_id: str, epoch: int, waits: Sequence[StepName]) -> None:
    """Give a task back until one of its waits is over. No retry is counted.

    If one is over already, the task may be taken again at once.
    """
    task = take(tx, task_id, epoch)
    found = [row for step in waits if (row := _find(tx, task, step)) is not None]
    if any(row.status != WAITING for row in found):
        leave(tx, task, waits_for=None, run_at=None)
        return
    names = [ASK + row.name if row.kind == CALL else row.name for row in found if row.kind != SLEEP]
    until = [row.until for row in found if row.until is not None]
    leave(tx, task, waits_for=names[0] if names else None, run_at=min(until, default=None))


@about_tasks
def give_back(tx: Tx, _: ThreadKey, query: Callable[..., object], args: Sequence[Any]) -> bool:
    """Give a task back with such a query; False if the worker has lost it."""
    try:
        query(tx, *args)
    except TaskLost:
        return False
    return True


def leave(tx: Tx, task: int, *, waits_for: str | None, run_at: Moment | None) -> None:
    """Give back a task whose row is locked. A pause or a cancellation that was asked for takes effect."""
    tx.one(  # `one`, not `run`: an event of the same transaction must see it
        "UPDATE tasks SET status = CASE asked WHEN 'pause' THEN 'paused' WHEN 'cancel' THEN 'cancelled'"
        " ELSE 'pending' END, completed_at = CASE asked WHEN 'cancel' THEN :now END, asked = NULL,"
        " lease_owner = NULL, lease_until = NULL, waits_for = :waits_for, run_at = :run_at, updated_at = :now"
        " WHERE key = :task RETURNING key",
        task=task,
        waits_for=waits_for,
        run_at=run_at,
        now=tx.now(),
    )


# --- events -----------------------------------------------------------------------------------------------------------


@about_tasks
def send(tx: Tx, task_id: str, name: str, value: str) -> bool:
    """Record an event with its value as JSON; whether the task waits for it. If not, it is kept for a later wait."""
    task = _take_for_event(tx, task_id)
    rows = tx.all(
        "SELECT name, status = 'waiting' AND (until IS NULL OR until > :now) FROM task_steps"
        " WHERE task = :task AND kind = 'wait'",
        now=tx.now(),
        task=task,
    )
    is_open: dict[str, bool] = dict(rows)
    number = 1
    while not is_open.get(nth(name, number), True):
        number += 1
    step = StepName(WAIT, nth(name, number))
    if step.name not in is_open:
        _insert(tx, task, step, DONE, result=value, ended_at=tx.now())
        return False
    _change(tx, task, step, DONE, result=value)
    wake(tx, task)
    return True


@about_tasks
def answer(tx: Tx, task_id: str, name: str, result: str | None) -> None:
    """Record a person's answer for a step that may have run: its result, or None if it is to run again."""
    task = _take_for_event(tx, task_id)
    found = _find(tx, task, StepName(CALL, name))
    running = tx.one("SELECT key FROM tasks WHERE key = :task AND status = 'running'", task=task)
    if found is None or found.status not in (STARTED, WAITING) or (found.status == STARTED and running is not None):
        is_now = "is unknown" if found is None else "is running now" if found.status == STARTED else found.status
        raise InputError(
            f"step {name!r} of task {task_id!r} needs no answer: it {is_now.replace(DONE, 'is done')}; "
            "task_steps() lists the steps"
        )
    if result is None:
        _change(tx, task, StepName(CALL, name), FAILED)
    else:
        _change(tx, task, StepName(CALL, name), DONE, result=result)
    wake(tx, task)


def wake(tx: Tx, task: int) -> None:
    """Let a task go on that waits."""
    tx.one(  # `one`, not `run`: a worker of the same transaction must see it
        "UPDATE tasks SET waits_for = NULL, run_at = NULL, updated_at = :now WHERE key = :task"
        " AND status IN ('pending', 'paused') AND waits_for IS NOT NULL RETURNING key",
        task=task,
        now=tx.now(),
    )


def wake_answered(tx: Tx, thread_key: ThreadKey) -> None:
    """A question of the thread was answered: let agent tasks go on that wait for it, also those of threads above."""
    tx.one(  # `one`, not `run`: a worker of the same transaction must see it
        "WITH RECURSIVE above (thread) AS (SELECT key FROM threads WHERE namespace = :namespace AND id = :id"
        " UNION SELECT t.parent FROM above a JOIN threads t ON t.key = a.thread WHERE t.parent IS NOT NULL)"
        " UPDATE tasks SET waits_for = NULL, run_at = NULL, updated_at = :now WHERE waits_for = :answer"
        " AND status IN ('pending', 'paused') AND thread IN (SELECT thread FROM above) RETURNING key",
        namespace=thread_key.namespace,
        id=thread_key.id,
        answer=ANSWER,
        now=tx.now(),
    )


def _take_for_event(tx: Tx, task_id: str) -> int:
    """Lock the row of a task that may still be waiting for something."""
    row = tx.one("UPDATE tasks SET lease_epoch = lease_epoch WHERE id = :id RETURNING key, status", id=task_id)
    if row is None:
        raise NotFound(f"there is no task {task_id!r}; list_tasks() lists them")
    if row[1] == "completed":
        raise InputError(f"task {task_id!r} is completed, and waits for no event; create a new task")
    return int(row[0])


# --- rows -------------------------------------------------------------------------------------------------------------


def _find(tx: Tx, task: int, step: StepName) -> StepRow | None:
    row: Row | None = tx.one(f"SELECT {_COLUMNS} FROM task_steps WHERE {_STEP}", task=task, **step._asdict())
    return StepRow(*row) if row else None


def _insert(
    tx: Tx,
    task: int,
    step: StepName,
    status: str,
    *,
    recovery: str | None = None,
    attempts: int = 0,
    result: str | None = None,
    until: Moment | None = None,
    ended_at: Moment | None = None,
) -> None:
    tx.run(
        "INSERT INTO task_steps (task, kind, name, status, recovery, attempts, result, until, started_at, ended_at)"
        " VALUES (:task, :kind, :name, :status, :recovery, :attempts, :result, :until, :now, :ended_at)",
        task=task,
        status=status,
        recovery=recovery,
        attempts=attempts,
        result=result,
        until=until,
        now=tx.now(),
        ended_at=ended_at,
        **step._asdict(),
    )


def _change(
    tx: Tx, task: int, step: StepName, status: str, *, result: str | None = None, error: str | None = None
) -> None:
    tx.run(
        "UPDATE task_steps SET status = :status, result = :result, error = :error,"
        f" ended_at = CASE WHEN :status = 'waiting' THEN NULL ELSE :now END WHERE {_STEP}",
        status=status,
        result=result,
        error=error,
        now=tx.now(),
        task=task,
        **step._asdict(),
    )


# --- exports ----------------------------------------------------------------------------------------------------------


def fields(tx: Tx, task: int) -> list[Row]:
    """The steps of a task, by its key, as exports have them."""
    return tx.all(f"SELECT {_COLUMNS} FROM task_steps WHERE task = :task ORDER BY key", task=task)


def add(tx: Tx, task: int, rows: Sequence[Sequence[Any]]) -> None:
    """Add the steps of a task as they were exported."""
    tx.many(
        f"INSERT INTO task_steps (task, {_COLUMNS}) VALUES (:task, {_VALUES})",
        [{"task": task, **dict(zip(StepRow._fields, row, strict=True))} for row in rows],
    )
