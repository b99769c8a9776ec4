"""Tasks of sessions: operations for both APIs (see store/operations.py)."""

from __future__ import annotations

import json
from typing import Any, cast

from byssus.accounts.rows import TaskRow, TaskStatus
from byssus.errors import InputError
from byssus.queries.accounts import tasks
from byssus.queries.accounts.tasks import STATUSES, Task
from byssus.store.operations import Runner
from byssus.threads.encoding import encode_strictly
from byssus.values import clock
from byssus.values.inputs import UNCHANGED, checked_choice, checked_count, checked_id, checked_text, readable_id
from byssus.values.thread_key import ThreadKey

_HIGHEST_PRIORITY = 2**31


async def create_task(
    store: Runner, session_id: str, task_type: str, payload: Any, priority: int = 0, *, max_retries: int = 3
) -> TaskRow:
    """Create a pending task. Tasks with a higher priority are listed first.

    `max_retries` is stored for your worker; it is not enforced here.
    """
    kind, text = _checked_type(task_type), encode_strictly("payload", payload)
    retries = checked_count("max_retries", max_retries)
    urgency = _checked_priority(priority)
    session = checked_id(session_id, "a session id")
    return _as_dict(
        await store.write(tasks.create, ThreadKey("", session), clock.new_id(), kind, text, urgency, retries)
    )


async def get_task(store: Runner, task_id: str) -> TaskRow | None:
    """Return the task, or None if the id is unknown."""
    name = readable_id(task_id, "a task id")
    task = None if name is None else await store.read(tasks.get, name)
    return None if task is None else _as_dict(task)


async def list_tasks(
    store: Runner, session_id: str | None = None, status: TaskStatus | None = None, limit: int = 100, offset: int = 0
) -> list[TaskRow] | None:
    """Return the tasks of a session, or of all sessions, highest priority first. None if the session is unknown."""
    name = None if session_id is None else readable_id(session_id, "a session id")
    if session_id is not None and name is None:
        return None
    wanted = None if status is None else checked_choice("status", status, STATUSES)
    limit, offset = checked_count("limit", limit), checked_count("offset", offset)
    found = await store.read(tasks.of_session, name, status=wanted, limit=limit, offset=offset)
    return None if found is None else [_as_dict(task) for task in found]


async def update_task_status(store: Runner, task_id: str, status: TaskStatus, result: Any = None) -> TaskRow:
    """Set the status of a task, and its result.

    `started_at` is set when it first runs (or ends), `completed_at` when it is completed, failed or cancelled. A failed
    task that becomes pending or running again counts one retry.
    """
    wanted = checked_choice("status", status, STATUSES)
    text = None if result is None else encode_strictly("result", result)
    return _as_dict(await store.write(tasks.set_status, checked_id(task_id, "a task id"), wanted, text))


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
        changes["type"] = _checked_type(task_type)
    if payload is not UNCHANGED:
        changes["payload"] = encode_strictly("payload", payload)
    if priority is not UNCHANGED:
        changes["priority"] = _checked_priority(priority)
    if max_retries is not UNCHANGED:
        changes["max_retries"] = checked_count("max_retries", max_retries)
    return _as_dict(await store.write(tasks.update, checked_id(task_id, "a task id"), changes))


async def delete_task(store: Runner, task_id: str) -> None:
    """Delete a task."""
    await store.write(tasks.remove, checked_id(task_id, "a task id"))


def _as_dict(task: Task) -> TaskRow:
    result = None if task.result is None else json.loads(task.result)
    return cast("TaskRow", {**task._asdict(), "payload": json.loads(task.payload), "result": result})


def _checked_type(value: object) -> str:
    if not value:
        raise InputError(f"a task's type must be a string with at least one character, got {value!r:.80}")
    return checked_text("a task's type", value)


def _checked_priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -_HIGHEST_PRIORITY < value < _HIGHEST_PRIORITY:
        raise InputError(f"priority must be a whole number below {_HIGHEST_PRIORITY:,}, got {value!r:.80}")
    return value
