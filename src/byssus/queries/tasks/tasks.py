"""Tasks: work that belongs to a session, to a user or to neither, and how far it is.

- A task that may start now is pending, without `run_at` and `waits_for`; the indexes of the table are built on that.
- A running task whose `lease_until` is NULL is run by a program that sets its status itself: no worker touches it.
- The id of a task with a unique key is made of that key, so the key is unique as long as the task exists.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from byssus.errors import InputError, NotFound
from byssus.queries.accounts import quotas, sessions
from byssus.queries.log import threads
from byssus.queries.log.leases import By
from byssus.queries.log.threads import UNLEASED, MessageRow
from byssus.store.database import Tx
from byssus.store.jobs import about_tasks
from byssus.values.thread_key import ThreadKey

TaskStatus: TypeAlias = Literal["pending", "running", "paused", "completed", "failed", "cancelled"]
Asked: TypeAlias = Literal["pause", "cancel"]

ENDED = ("completed", "failed", "cancelled")
STATUSES: tuple[str, ...] = get_args(TaskStatus)


class Task(NamedTuple):
    id: str
    session_id: str | None
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
    owner: str  # "": no user
    error: str | None
    run_at: str | None
    deadline: str | None
    unique_key: str | None
    parent: str | None
    progress: float | None
    progress_note: str | None
    waits_for: str | None
    asked: str | None
    schedule: str | None
    lease_owner: str | None
    lease_until: str | None
    lease_epoch: int


class NewTask(NamedTuple):
    """A task to be created."""

    id: str
    type: str
    payload: str
    priority: int = 0
    max_retries: int = 3
    run_at: str | None = None
    deadline: str | None = None
    unique_key: str | None = None
    parent: str | None = None
    schedule: str | None = None
    owner: str = ""  # of a task without a session


_COLUMNS = ", ".join(f"k.{name}" if name != "session_id" else "t.id" for name in Task._fields)
_MADE = ", ".join(name if name != "session_id" else "NULL" for name in Task._fields)
_FROM = "tasks k LEFT JOIN threads t ON t.key = k.thread"
_INSERT = (
    "INSERT INTO tasks (id, thread, owner, type, status, priority, payload, max_retries, retry_count, created_at,"
    " updated_at, run_at, deadline, unique_key, parent, schedule) VALUES (:id, :thread, :owner, :type, 'pending',"
    " :priority, :payload, :max_retries, 0, :now, :now,"
    " CASE WHEN CAST(:run_at AS TEXT) <= :now THEN NULL ELSE :run_at END,"
    " :deadline, :unique_key, :parent, :schedule) ON CONFLICT (id) DO NOTHING"
)
_IS_SHOWN = "(k.thread IS NULL OR t.namespace = '')"


@about_tasks
def create(tx: Tx, about: ThreadKey, new: NewTask, message: MessageRow | None = None, *, by: By = UNLEASED) -> Task:
    """Create a task of a session, with the message that asks for it. One whose unique key is taken stays as it is.

    `about` is the session, or `of_no_session(new.id)`.
    """
    if new.unique_key is not None and (known := get(tx, new.id)) is not None:
        return known
    session_id, thread, owner = None, None, new.owner
    if about.namespace == "":
        session_id = about.id
        row = threads.take(tx, about, "key, COALESCE(owner, '')")
        if row is None:
            raise sessions.unknown(session_id)
        thread, owner = row
    elif owner:
        quotas.take(tx, owner)
    made = tx.one(
        f"{_INSERT} RETURNING {_MADE}",
        thread=thread,
        now=tx.now(),
        **{**new._asdict(), "owner": owner},
    )
    if made is None:  # somebody else was faster
        return require(tx, new.id)
    if message is not None and session_id is not None:
        sessions.save(tx, about, message, by=by)
    return Task(*made)._replace(session_id=session_id)


def of_no_session(task_id: str) -> ThreadKey:
    """What a write is about that makes a task without a session."""
    return ThreadKey("\x7ftask", task_id)


def get(tx: Tx, task_id: str) -> Task | None:
    row = tx.one(f"SELECT {_COLUMNS} FROM {_FROM} WHERE k.id = :id AND {_IS_SHOWN}", id=task_id)
    return Task(*row) if row else None


def require(tx: Tx, task_id: str) -> Task:
    """The task, which must exist."""
    task = get(tx, task_id)
    if task is None:
        raise unknown(task_id)
    return task


def unknown(task_id: str) -> NotFound:
    return NotFound(f"there is no task {task_id!r}; list_tasks(session_id) lists those of a session")


class Wanted(NamedTuple):
    """Which tasks a list shows; None: any."""

    session_id: str | None = None
    status: str | None = None
    owner: str | None = None
    type: str | None = None
    before: str | None = None  # the id of the last task of the page before


def page(tx: Tx, wanted: Wanted, *, limit: int, offset: int) -> list[Task] | None:
    """Tasks, highest priority first, then oldest first; None if there is no such session."""
    if wanted.session_id is not None and sessions.get(tx, ThreadKey("", wanted.session_id)) is None:
        return None
    where, values = [_IS_SHOWN], dict[str, Any]()
    for column, name in (("t.id", "session_id"), ("k.status", "status"), ("k.owner", "owner"), ("k.type", "type")):
        if (value := getattr(wanted, name)) is not None:
            where.append(f"{column} = :{name}")
            values[name] = value
    if wanted.before is not None:
        row = tx.one("SELECT priority, key FROM tasks WHERE id = :id", id=wanted.before)
        if row is None:
            raise InputError(f"there is no task {wanted.before!r} to list the ones after")
        where.append("(k.priority < :priority OR (k.priority = :priority AND k.key > :key))")
        values |= {"priority": row[0], "key": row[1]}
    rows = tx.all(
        f"SELECT {_COLUMNS} FROM {_FROM} WHERE {' AND '.join(where)} ORDER BY k.priority DESC, k.key"
        " LIMIT :limit OFFSET :offset",
        limit=limit,
        offset=offset,
        **values,
    )
    return [Task(*row) for row in rows]


@about_tasks
def set_status(tx: Tx, task_id: str, status: str, result: str | None) -> Task:
    """Say how far a task is. It starts once, ends each time, and is tried again when it had failed.

    A worker that runs it loses its lease: what it writes from then on is refused.
    """
    tx.run(
        "UPDATE tasks SET status = :status, updated_at = :now, result = COALESCE(:result, result),"
        " started_at = CASE WHEN :begins = 1 THEN COALESCE(started_at, :now) ELSE started_at END,"
        " completed_at = CASE WHEN :ends = 1 THEN :now ELSE NULL END,"
        " retry_count = retry_count + CASE WHEN :again = 1 AND status = 'failed' THEN 1 ELSE 0 END,"
        " error = CASE WHEN :status = 'failed' THEN error ELSE NULL END,"
        " run_at = CASE WHEN status = :status THEN run_at ELSE NULL END, waits_for = NULL, asked = NULL,"
        " lease_epoch = lease_epoch + CASE WHEN lease_until IS NULL THEN 0 ELSE 1 END,"
        " lease_owner = NULL, lease_until = NULL WHERE id = :id",
        id=task_id,
        status=status,
        result=result,
        begins=int(status in ("running", "completed", "failed")),
        ends=int(status in ENDED),
        again=int(status in ("pending", "running")),
        now=tx.now(),
    )
    return require(tx, task_id)


@about_tasks
def update(tx: Tx, task_id: str, changes: dict[str, Any]) -> Task:
    sets = "".join(f", {column} = :{column}" for column in sorted(changes))
    tx.run(f"UPDATE tasks SET updated_at = :now{sets} WHERE id = :id", id=task_id, now=tx.now(), **changes)
    return require(tx, task_id)


def remove(tx: Tx, task_id: str) -> None:
    if tx.one("DELETE FROM tasks WHERE id = :id RETURNING key", id=task_id) is None:
        raise unknown(task_id)
