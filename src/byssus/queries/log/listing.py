"""Lists of threads, and what decides the state of each.

Whether the process that holds a lease still lives is not known to a database. So each row says who holds the lease, and
the caller decides (`threads/listing.py`).
"""

from __future__ import annotations

from typing import NamedTuple

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
    facts: Facts


_IS_WAITING = "EXISTS (SELECT 1 FROM tool_calls c WHERE c.thread = t.key AND c.status = 'waiting')"
_IS_STOPPED = "t.status IN ('paused', 'cancelled')"
_FACTS = (
    "CASE WHEN t.lease_until > :now THEN t.lease_owner END, COALESCE(t.lease_until, ''), t.run IS NOT NULL,"
    f" {_IS_WAITING}, {_IS_STOPPED}"
)
_SELECT = f"SELECT t.id, t.message_count, t.created_at, t.updated_at, t.owner, {_FACTS} FROM threads t"


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


def page(tx: Tx, *, namespace: str = "", limit: int, before: tuple[str, str] | None = None) -> list[ListedRow]:
    """Threads, most recently updated first; `before` is the time and the id of the last one of the previous page."""
    updated_at, thread_id = before or ("~", "")
    rows = tx.all(
        f"{_SELECT} WHERE t.namespace = :namespace AND (t.updated_at, t.id) < (:updated_at, :id)"
        " ORDER BY t.updated_at DESC, t.id DESC LIMIT :limit",
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


def _listed(row: Row) -> ListedRow:
    return ListedRow(*row[:5], facts=Facts(*row[5:]))
