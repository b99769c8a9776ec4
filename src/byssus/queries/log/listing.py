"""Lists of threads, and what decides the state of each.

Whether the process that holds a lease still lives is not known to a database. So each row says who holds the lease, and
the caller decides (`threads/listing.py`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from byssus.errors import NotFound
from byssus.queries.log.answers import IS_OPEN
from byssus.store.database import Row, Tx
from byssus.values.thread_key import ThreadKey


class Facts(NamedTuple):
    """What the database knows about the state of a thread."""

    owner: str | None  # of the lease; None if there is none, or if it has run out
    until: str  # when the lease ends
    has_run: int  # a run has begun and not ended
    is_waiting: int  # a tool call waits for a person
    is_stopped: int  # paused or cancelled: no run may start


class ListedRow(NamedTuple):
    id: str
    message_count: int
    created_at: str
    updated_at: str
    user_id: str | None
    title: str  # "" if none was set
    opening: str | None  # the first message of a user: the beginning of its body
    facts: Facts


_IS_WAITING = f"EXISTS (SELECT 1 FROM tool_calls c WHERE c.thread = t.key AND {IS_OPEN.format('c')})"
_IS_STOPPED = "t.status IN ('paused', 'cancelled')"
_FACTS = (
    "CASE WHEN t.lease_until > :now THEN t.lease_owner END, COALESCE(t.lease_until, ''), t.run IS NOT NULL,"
    f" {_IS_WAITING}, {_IS_STOPPED}"
)
# What is true of each thread in a state, whether or not the process that holds its lease lives.
_MAY_BE: Final[dict[str, str]] = {
    "running": "t.lease_until > :now",
    "waiting": _IS_WAITING,
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
    f"SELECT t.id, t.message_count, t.created_at, t.updated_at, t.owner, t.title, {_OPENING}, {_FACTS} FROM threads t"
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
) -> list[ListedRow]:
    """Threads, most recently updated first; `before` is the time and the id of the last one of the previous page.

    With `state`, at least the threads that are in it: the caller decides.
    """
    updated_at, thread_id = before or ("~", "")
    of_user = "" if user_id is None else " AND t.owner = :user"
    in_state = "" if state is None else f" AND {_MAY_BE[state]}"
    rows = tx.all(
        f"{_SELECT} WHERE t.namespace = :namespace AND (t.updated_at, t.id) < (:updated_at, :id){of_user}{in_state}"
        " ORDER BY t.updated_at DESC, t.id DESC LIMIT :limit",
        user=user_id or "",
        namespace=namespace,
        updated_at=updated_at,
        id=thread_id,
        limit=limit,
        now=tx.now(),
    )
    return [_listed(row) for row in rows]


def unfinished(tx: Tx, *, namespace: str = "") -> list[ListedRow]:
    """Threads that are interrupted unless a process still runs them, oldest first."""
    rows = tx.all(
        # Of the namespace nothing is looked up: the index of unfinished threads is far shorter than that of names.
        f"{_SELECT} WHERE t.run IS NOT NULL AND t.namespace || '' = :namespace AND NOT {_IS_STOPPED}"
        f" AND NOT {_IS_WAITING} ORDER BY t.key",
        namespace=namespace,
        now=tx.now(),
    )
    return [_listed(row) for row in rows]


def set_title(tx: Tx, thread_key: ThreadKey, title: str) -> None:
    """Set the title of a thread, which must exist. A run that drives the thread does not notice."""
    row = tx.one(
        "UPDATE threads SET title = :title WHERE namespace = :namespace AND id = :id RETURNING key",
        namespace=thread_key.namespace,
        id=thread_key.id,
        title=title,
    )
    if row is None:
        raise NotFound(f"there is no thread {thread_key.id!r}; threads() lists them")


def _listed(row: Row) -> ListedRow:
    *columns, owner, until, has_run, is_waiting, is_stopped = row
    name, count, created_at, updated_at, user_id, title, opening = columns
    known = Facts(owner, until, has_run, is_waiting, is_stopped)
    return ListedRow(name, count, created_at, updated_at, user_id, title, opening, known)
