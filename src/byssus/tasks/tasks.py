"""Tasks: operations for both APIs (see store/operations.py)."""

from __future__ import annotations

import hashlib
from typing import Any

from byssus.errors import InputError
from byssus.messages import UserMessage
from byssus.queries.log.leases import Unleased
from byssus.queries.tasks import moves, tasks
from byssus.queries.tasks.tasks import STATUSES, NewTask, Task, Wanted
from byssus.store.operations import Runner
from byssus.tasks.rows import TaskRow, TaskStatus, task_row
from byssus.threads.encoding import Appendable, encode_strictly, message_row
from byssus.threads.waiting import retry_while_driven
from byssus.values import clock
from byssus.values.clock import Time
from byssus.values.inputs import (
    UNCHANGED,
    checked_choice,
    checked_count,
    checked_id,
    checked_new_id,
    checked_text,
    checked_wait,
    readable_id,
    refuse_long_id,
)
from byssus.values.thread_key import ThreadKey

_HIGHEST_PRIORITY = 2**31


async def create_task(
    store: Runner,
    session_id: str | None,
    task_type: str,
    payload: Any,
    priority: int = 0,
    *,
    max_retries: int = 3,
    run_at: Time | None = None,
    deadline: Time | None = None,
    unique_key: str | None = None,
    parent_id: str | None = None,
    user_id: str | None = None,
    message: str | Appendable | None = None,
    wait: float = 0,
) -> TaskRow:
    """Create a pending task, which a `Worker` runs. Tasks with a higher priority come first, then older ones.

    The task belongs to a session and its user; with `session_id=None`, to the user `user_id` or to none. It starts at
    `run_at` at the earliest, and fails if it has not ended at `deadline`. A task that fails is run again up to
    `max_retries` times. If there is a task with the same `unique_key`, in whatever state, that one is returned and
    nothing is created. `message` is appended to the session in the same transaction; while a run holds the session it
    raises `ThreadBusy`, after waiting up to `wait` seconds.
    """
    new = NewTask(
        id=clock.new_id() if unique_key is None else id_of_key(unique_key),
        type=checked_new_type(task_type),
        payload=encode_strictly("payload", payload),
        priority=checked_priority(priority),
        max_retries=checked_count("max_retries", max_retries),
        run_at=None if run_at is None else clock.stored(run_at, "run_at"),
        deadline=None if deadline is None else clock.stored(deadline, "deadline"),
        unique_key=unique_key,
        parent=None if parent_id is None else checked_new_id(parent_id, "parent_id"),
        owner="" if user_id is None else checked_id(user_id, "user_id"),
    )
    about = tasks.of_no_session(new.id) if session_id is None else ThreadKey("", checked_id(session_id, "a session id"))
    if session_id is not None and user_id is not None:
        raise InputError("a task of a session belongs to the session's user; pass session_id or user_id, not both")
    if message is None:
        return task_row(await store.write(tasks.create, about, new))
    if session_id is None:
        raise InputError("message= is appended to the session of the task; pass a session_id")
    row = message_row(UserMessage(message) if isinstance(message, str) else message)
    made: Task = await retry_while_driven(
        store,
        lambda dead_epoch: store.write(tasks.create, about, new, row, by=Unleased(dead_epoch)),
        checked_wait(wait),
    )
    return task_row(made)


async def get_task(store: Runner, task_id: str) -> TaskRow | None:
    """Return the task, or None if the id is unknown."""
    name = readable_id(task_id, "a task id")
    task = None if name is None else await store.read(tasks.get, name)
    return None if task is None else task_row(task)


async def list_tasks(
    store: Runner,
    session_id: str | None = None,
    status: TaskStatus | None = None,
    limit: int = 100,
    offset: int = 0,
    *,
    user_id: str | None = None,
    task_type: str | None = None,
    before: TaskRow | str | None = None,
) -> list[TaskRow] | None:
    """Return tasks, highest priority first, then oldest first. None if the session is unknown.

    `session_id`, `status`, `user_id` and `task_type` filter the list. For the next page, pass the last task of this
    list, or its id, as `before`.
    """
    name = None if session_id is None else readable_id(session_id, "a session id")
    if session_id is not None and name is None:
        return None
    wanted = Wanted(
        session_id=name,
        status=None if status is None else checked_choice("status", status, STATUSES),
        owner=None if user_id is None else checked_id(user_id, "user_id"),
        type=None if task_type is None else checked_type(task_type),
        before=None if before is None else _checked_before(before),
    )
    limit, offset = checked_count("limit", limit), checked_count("offset", offset)
    found = await store.read(tasks.page, wanted, limit=limit, offset=offset)
    return None if found is None else [task_row(task) for task in found]


async def pause_task(store: Runner, task_id: str) -> TaskRow:
    """Pause a pending or running task.

    A running one is asked to: its handler stops at its next pause point, or after the worker's `grace`.
    """
    return task_row(await store.write(moves.move, checked_id(task_id, "a task id"), "pause"))


async def resume_task(store: Runner, task_id: str) -> TaskRow:
    """Let a paused task go on: it is pending again. Its handler starts from the beginning; finished steps are kept."""
    return task_row(await store.write(moves.move, checked_id(task_id, "a task id"), "resume"))


async def cancel_task(store: Runner, task_id: str) -> TaskRow:
    """Cancel a task that has not ended. A running one is asked to stop, as by `pause_task`."""
    return task_row(await store.write(moves.move, checked_id(task_id, "a task id"), "cancel"))


async def retry_task(store: Runner, task_id: str) -> TaskRow:
    """Run a failed or cancelled task again, with `max_retries` retries. Finished steps are not repeated."""
    return task_row(await store.write(moves.move, checked_id(task_id, "a task id"), "retry"))


async def update_task_status(store: Runner, task_id: str, status: TaskStatus, result: Any = None) -> TaskRow:
    """Set the status of a task, and its result: for programs that run tasks without a `Worker`.

    `started_at` is set when it first runs (or ends), `completed_at` when it is completed, failed or cancelled. A failed
    task that becomes pending or running again counts one retry. Any status can follow any other. A worker that runs the
    task loses it.
    """
    wanted = checked_choice("status", status, STATUSES)
    text = None if result is None else encode_strictly("result", result)
    return task_row(await store.write(tasks.set_status, checked_id(task_id, "a task id"), wanted, text))


async def update_task(
    store: Runner,
    task_id: str,
    *,
    task_type: str = UNCHANGED,
    payload: Any = UNCHANGED,
    priority: int = UNCHANGED,
    max_retries: int = UNCHANGED,
) -> TaskRow:
    """Change the given fields of a task."""
    changes: dict[str, Any] = {}
    if task_type is not UNCHANGED:
        changes["type"] = checked_new_type(task_type)
    if payload is not UNCHANGED:
        changes["payload"] = encode_strictly("payload", payload)
    if priority is not UNCHANGED:
        changes["priority"] = checked_priority(priority)
    if max_retries is not UNCHANGED:
        changes["max_retries"] = checked_count("max_retries", max_retries)
    return task_row(await store.write(tasks.update, checked_id(task_id, "a task id"), changes))


async def delete_task(store: Runner, task_id: str) -> None:
    """Delete a task with its steps. A worker that runs it stops."""
    await store.write(tasks.remove, checked_id(task_id, "a task id"))


def id_of_key(unique_key: object) -> str:
    """The id of the task with this unique key."""
    if not isinstance(unique_key, str):
        raise InputError(f"unique_key must be a string, got {unique_key!r:.80}")
    return hashlib.sha256(checked_new_id(unique_key, "unique_key").encode()).hexdigest()[:32]


def _checked_before(before: object) -> str:
    name = before.get("id") if isinstance(before, dict) else before
    if not isinstance(name, str) or not name:
        raise InputError(f"before must be a task from an earlier list, or its id; got {before!r:.80}")
    return checked_id(name, "before")


def checked_type(value: object) -> str:
    if not value:
        raise InputError(f"a task's type must be a string with at least one character, got {value!r:.80}")
    return checked_text("a task's type", value)


def checked_new_type(value: object) -> str:
    """The type that a task gets now. It is in an index, and Postgres takes no long text there."""
    return refuse_long_id(checked_type(value), "a task's type")


def checked_priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -_HIGHEST_PRIORITY < value < _HIGHEST_PRIORITY:
        raise InputError(f"priority must be a whole number below {_HIGHEST_PRIORITY:,}, got {value!r:.80}")
    return value
