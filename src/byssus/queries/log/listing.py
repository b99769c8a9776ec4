"""Lists of threads, and what decides the state of each.

Whether the process that holds a lease still lives is not known to a database. So each row says who holds the lease, and
the caller decides (`threads/listing.py`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from byssus.errors import NotFound
from byssus.queries.log.answers import IS_OPEN
from byssus.queries.versions.children import OPEN_BELOW
from byssus.store.database import Row, Tx
from byssus.values.thread_key import ThreadKey


class Facts(NamedTuple):
    """What the database knows about the state of a thread."""

    owner: str | None  # of the lease; None if there is none, or if it has run out
    until: str  # when the lease ends
    has_run: int  # a run has begun and not ended
    is_waiting: int  # a tool call waits for a person
    is_stopped: int  # paused or cancelled: no run may start
    is_quarantined: int  # its run has ended its process again and again


class ListedRow(NamedTuple):
    id: str
    message_count: int
    created_at: str
    updated_at: str
    user_id: str | None
    title: str  # "" if none was set
    opening: str | None  # the first message of a user: the beginning of its body
    parent: str | None  # the id of the thread whose call it is
    facts: Facts


# A call of the thread waits, or one of an open child. Below most threads, nothing is looked for: they have no child.
_IS_WAITING = (
    f"(EXISTS (SELECT 1 FROM tool_calls c WHERE c.thread = t.key AND {IS_OPEN.format('c')})"
    " OR (EXISTS (SELECT 1 FROM threads k WHERE k.parent = t.key) AND EXISTS"
    f" ({OPEN_BELOW.format('SELECT t.key')} SELECT 1 FROM below JOIN tool_calls c ON c.thread = below.thread"
    f" AND {IS_OPEN.format('c')})))"
)
_IS_STOPPED = "t.status IN ('paused', 'cancelled')"
_FACTS = (
    "CASE WHEN t.lease_until > :now THEN t.lease_owner END, COALESCE(t.lease_until, ''), t.run IS NOT NULL,"
    f" {_IS_WAITING}, {_IS_STOPPED}, t.quarantined_at IS NOT NULL"
)
# What is true of each thread in a state, whether or not the process that holds its lease lives.
_MAY_BE: Final[dict[str, str]] = {
    "running": "t.lease_until > :now",
    "waiting": _IS_WAITING,
    "quarantined": "t.quarantined_at IS NOT NULL",
    "interrupted": f"t.run IS NOT NULL AND NOT {_IS_STOPPED} AND NOT {_IS_WAITING}",
    "idle": f"(t.run IS NULL OR {_IS_STOPPED}) AND NOT {_IS_WAITING}",
}
# The first message of a user, if it is among the first twenty: a few steps in an index, however long the thread is.
# Of a body of megabytes the beginning is enough.
_OPENING = (
    "(SELECT substr(m.body, 1, 4000) FROM segments s JOIN messages m ON m.branch = s.source AND m.seq > s.after_seq"
    " AND m.seq <= CASE WHEN s.upto_seq < 20 THEN s.upto_seq ELSE 20 END"
    " WHERE s.branch = t.branch AND s.after_seq < 20 AND m.role = 'user' ORDER BY s.after_seq, m.seq LIMIT 1)"
)
_SELECT = (
    f"SELECT t.id, t.message_count, t.created_at, t.updated_at, t.owner, t.title, {_OPENING},"
    f" (SELECT p.id FROM threads p WHERE p.key = t.parent), {_FACTS} FROM threads t"
)


def facts(tx: Tx, thread_key: ThreadKey) -> Facts | None:
    """What decides the state of a thread; None if there is no such thread."""
    row = tx.one(
        f"SELECT {_FACTS} FROM threads t WHERE t.namespace = :namespace AND t.id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
        now=tx.now(),
    )
    return Facts(*row) if row else None


def one(tx: Tx, thread_key: ThreadKey) -> ListedRow | None:
    row = tx.one(
        f"{_SELECT} WHERE t.namespace = :namespace AND t.id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
        now=tx.now(),
    )
    return _listed(row) if row else None


def page(
    tx: Tx,
    *,
    namespace: str = "",
    limit: int,
    before: tuple[str, str] | None = None,
    user_id: str | None = None,
    state: str | None = None,
    children: bool = False,
) -> list[ListedRow]:
    """Threads, most recently updated first; `before` is the time and the id of the last one of the previous page.

    With `state`, at least the threads that are in it: the caller decides. Child threads only with `children`.
    """
    updated_at, thread_id = before or ("~", "")
    of_user = "" if user_id is None else " AND t.owner = :user"
    in_state = "" if state is None else f" AND {_MAY_BE[state]}"
    kind = "" if children else " AND t.parent IS NULL"
    rows = tx.all(
        f"{_SELECT} WHERE t.namespace = :namespace AND (t.updated_at, t.id) < (:updated_at, :id)"
        f"{of_user}{in_state}{kind} ORDER BY t.updated_at DESC, t.id DESC LIMIT :limit",
        user=user_id or "",
        namespace=namespace,
        updated_at=updated_at,
        id=thread_id,
        limit=limit,
        now=tx.now(),
    )
    return [_listed(row) for row in rows]


def children(tx: Tx, thread_key: ThreadKey) -> list[ListedRow]:
    """The child threads of a thread, oldest first."""
    rows = tx.all(
        f"{_SELECT} WHERE t.parent = (SELECT key FROM threads WHERE namespace = :namespace AND id = :id)"
        " ORDER BY t.key",
        namespace=thread_key.namespace,
        id=thread_key.id,
        now=tx.now(),
    )
    return [_listed(row) for row in rows]


def unfinished(tx: Tx, *, namespace: str = "") -> list[ListedRow]:
    """Threads that are interrupted unless a process still runs them, oldest first. Children go on with their parent."""
    rows = tx.all(
        # Of the namespace nothing is looked up: the index of unfinished threads is far shorter than that of names.
        f"{_SELECT} WHERE t.run IS NOT NULL AND t.namespace || '' = :namespace AND NOT {_IS_STOPPED}"
        f" AND NOT {_IS_WAITING} AND t.quarantined_at IS NULL AND t.parent IS NULL ORDER BY t.key",
        namespace=namespace,
        now=tx.now(),
    )
    return [_listed(row) for row in rows]


class InterruptedRow(NamedTuple):
    """A thread whose run has not ended, and how many of its processes have died."""

    id: str
    user_id: str | None
    epoch: int
    owner: str | None  # of the lease; None if there is none, or if it has run out
    until: str
    deaths: int


# An attempt without an end is that of a process which died, if no process drives the run.
_DEATHS = (
    "(SELECT COUNT(*) FROM runs r JOIN run_attempts a ON a.run = r.key WHERE r.thread = t.key AND r.id = t.run"
    " AND (a.outcome = 'lost' OR a.ended_at IS NULL) AND a.began_at > COALESCE(t.lifted_at, ''))"
)


# The run belongs to a task that was paused: `resume_task` goes on with it.
_IS_PAUSED_TASK = (
    "EXISTS (SELECT 1 FROM runs p JOIN tasks k ON k.thread = p.thread AND k.status = 'paused'"
    " AND p.request_key = 'task:' || k.id WHERE p.id = t.run AND p.thread = t.key)"
)


def interrupted(tx: Tx) -> list[InterruptedRow]:
    """Threads that are interrupted unless a process still runs them, the most recently updated first.

    Without children, because the run of the parent goes on with them, and without the runs of paused tasks.
    """
    rows = tx.all(
        "SELECT t.id, t.owner, t.lease_epoch, CASE WHEN t.lease_until > :now THEN t.lease_owner END,"
        f" COALESCE(t.lease_until, ''), {_DEATHS} FROM threads t WHERE t.run IS NOT NULL AND t.namespace || '' = ''"
        f" AND NOT {_IS_STOPPED} AND NOT {_IS_WAITING} AND t.quarantined_at IS NULL AND t.parent IS NULL"
        f" AND NOT {_IS_PAUSED_TASK} ORDER BY t.updated_at DESC, t.key DESC",
        now=tx.now(),
    )
    return [InterruptedRow(*row) for row in rows]


class QuarantinedRow(NamedTuple):
    id: str
    user_id: str | None
    run_id: str | None
    since: str
    deaths: int


def quarantined(tx: Tx) -> list[QuarantinedRow]:
    """Threads that are quarantined, the last one first."""
    rows = tx.all(
        f"SELECT t.id, t.owner, t.run, t.quarantined_at, {_DEATHS} FROM threads t"
        " WHERE t.quarantined_at IS NOT NULL AND t.namespace = '' ORDER BY t.quarantined_at DESC, t.key DESC"
    )
    return [QuarantinedRow(*row) for row in rows]


def quarantine(tx: Tx, thread_key: ThreadKey, epoch: int) -> bool:
    """Let no run start on a thread until a person lifts it; False if a process has taken the thread meanwhile."""
    row = tx.one(
        "UPDATE threads SET quarantined_at = :now WHERE namespace = :namespace AND id = :id AND lease_epoch = :epoch"
        " AND run IS NOT NULL AND quarantined_at IS NULL RETURNING key",
        now=tx.now(),
        namespace=thread_key.namespace,
        id=thread_key.id,
        epoch=epoch,
    )
    return row is not None


def lift_quarantine(tx: Tx, thread_key: ThreadKey) -> bool:
    """Let runs start on a thread again; False if it was not quarantined."""
    row = tx.one(
        "UPDATE threads SET quarantined_at = NULL, lifted_at = :now WHERE namespace = :namespace AND id = :id"
        " AND quarantined_at IS NOT NULL RETURNING key",
        now=tx.now(),
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return row is not None


def set_title(tx: Tx, thread_key: ThreadKey, title: str) -> None:
    """Set the title of a thread, which must exist. A run that drives the thread does not notice."""
    row = tx.one(
        "UPDATE threads SET title = :title, touched = touched + 1 WHERE namespace = :namespace AND id = :id"
        " RETURNING key",
        namespace=thread_key.namespace,
        id=thread_key.id,
        title=title,
    )
    if row is None:
        raise NotFound(f"there is no thread {thread_key.id!r}; threads() lists them")


def _listed(row: Row) -> ListedRow:
    *columns, owner, until, has_run, is_waiting, is_stopped, is_quarantined = row
    name, count, created_at, updated_at, user_id, title, opening, parent = columns
    known = Facts(owner, until, has_run, is_waiting, is_stopped, is_quarantined)
    return ListedRow(name, count, created_at, updated_at, user_id, title, opening, parent, known)
