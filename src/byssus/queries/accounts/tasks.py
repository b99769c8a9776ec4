"""Tasks: work that belongs to a session, and how far it is."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from byssus.errors import NotFound
from byssus.queries.accounts import sessions
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

TaskStatus: TypeAlias = Literal["pending", "running", "paused", "completed", "failed", "cancelled"]

ENDED = ("completed", "failed", "cancelled")
STATUSES: tuple[str, ...] = get_args(TaskStatus)


class Task(NamedTuple):
    id: str
    session_id: str
    type: str
    status: str
    priority: int
    payload: str
    result: str | None
    max_retries: int
    retry_count: int
    created_at: str
    updated_at: str
    started_at: str | None
    completed_at: str | None


_COLUMNS = ", ".join(f"k.{name}" if name != "session_id" else "t.id" for name in Task._fields)
_FROM = "tasks k JOIN threads t ON t.key = k.thread"


def create(
    tx: Tx, thread_key: ThreadKey, task_id: str, type_: str, payload: str, priority: int, max_retries: int
) -> Task:
    thread = sessions.take(tx, thread_key)
    tx.run(
        "INSERT INTO tasks (id, thread, type, status, priority, payload, max_retries, retry_count, created_at,"
        " updated_at) VALUES (:id, :thread, :type, 'pending', :priority, :payload, :retries, 0, :now, :now)",
        id=task_id,
        thread=thread,
        type=type_,
        priority=priority,
        payload=payload,
        retries=max_retries,
        now=tx.now(),
    )
    return require(tx, task_id)


def get(tx: Tx, task_id: str) -> Task | None:
    row = tx.one(f"SELECT {_COLUMNS} FROM {_FROM} WHERE k.id = :id AND t.namespace = ''", id=task_id)
    return Task(*row) if row else None


def require(tx: Tx, task_id: str) -> Task:
    """The task, which must exist."""
    task = get(tx, task_id)
    if task is None:
        raise unknown(task_id)
    return task


def unknown(task_id: str) -> NotFound:
    return NotFound(f"there is no task {task_id!r}; list_tasks(session_id) lists those of a session")


def of_session(tx: Tx, session_id: str | None, *, status: str | None, limit: int, offset: int) -> list[Task] | None:
    """Tasks of a session or of all, the most urgent first, then the oldest; None if there is no such session."""
    if session_id is not None and sessions.get(tx, ThreadKey("", session_id)) is None:
        return None
    rows = tx.all(
        f"SELECT {_COLUMNS} FROM {_FROM} WHERE t.namespace = '' AND (:every = 1 OR t.id = :session)"
        " AND (:any = 1 OR k.status = :status) ORDER BY k.priority DESC, k.key LIMIT :limit OFFSET :offset",
        every=int(session_id is None),
        session=session_id or "",
        any=int(status is None),
        status=status or "",
        limit=limit,
        offset=offset,
    )
    return [Task(*row) for row in rows]


def set_status(tx: Tx, task_id: str, status: str, result: str | None) -> Task:
    """Say how far a task is. It starts once, ends each time, and is tried again when it had failed."""
    tx.run(
        "UPDATE tasks SET status = :status, updated_at = :now, result = COALESCE(:result, result),"
        " started_at = CASE WHEN :begins = 1 THEN COALESCE(started_at, :now) ELSE started_at END,"
        " completed_at = CASE WHEN :ends = 1 THEN :now ELSE NULL END,"
        " retry_count = retry_count + CASE WHEN :again = 1 AND status = 'failed' THEN 1 ELSE 0 END"
        " WHERE id = :id",
        id=task_id,
        status=status,
        result=result,
        begins=int(status in ("running", "completed", "failed")),
        ends=int(status in ENDED),
        again=int(status in ("pending", "running")),
        now=tx.now(),
    )
    return require(tx, task_id)


def update(tx: Tx, task_id: str, changes: dict[str, Any]) -> Task:
    sets = "".join(f", {column} = :{column}" for column in sorted(changes))
    tx.run(f"UPDATE tasks SET updated_at = :now{sets} WHERE id = :id", id=task_id, now=tx.now(), **changes)
    return require(tx, task_id)


def remove(tx: Tx, task_id: str) -> None:
    if tx.one("DELETE FROM tasks WHERE id = :id RETURNING key", id=task_id) is None:
        raise unknown(task_id)
