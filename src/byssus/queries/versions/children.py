"""Child threads: the call of a tool that is an agent runs on a thread of its own, below the thread of the call.

- A child is found by its parent and the idempotency key of the call, so a call that is resumed has one child.
- A child is *open* while its call is: then the parent's run goes on with it. Nothing else resumes a child by itself.
- A child goes with its parent: it belongs to the same user, and is deleted, erased and exported with it.
"""

from __future__ import annotations

from typing import NamedTuple

from byssus.queries.accounts import quotas
from byssus.queries.log import runs, threads
from byssus.queries.log.leases import Lease
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

# The condition of the index of open calls.
_OPEN = "IN ('waiting', 'answered', 'started')"
# The keys of a thread, given by a query, and of its open children, and theirs: as a query of `below`.
OPEN_BELOW = (
    "WITH RECURSIVE below (thread) AS ({} UNION SELECT k.key FROM below b"
    f" JOIN tool_calls o ON o.thread = b.thread AND o.status {_OPEN}"
    " JOIN threads k ON k.parent = b.thread AND k.parent_call = o.idempotency_key)"
)


class NewChild(NamedTuple):
    """The child that a call needs: the key of the call, the run that makes it, and the beginning of the child's id."""

    call: str
    run: str
    stem: str
    limit: int | None = None  # children of one run


def begin(tx: Tx, parent: ThreadKey, new: NewChild, *, by: Lease) -> str | None:
    """The id of the child of a call, which is made if there is none; None if the run has its limit of children."""
    row = threads.take(tx, parent, "key, owner", by=by)
    if row is None:
        return None
    key, owner = row
    known = tx.one("SELECT id FROM threads WHERE parent = :parent AND parent_call = :call", parent=key, call=new.call)
    if known is not None:
        found: str = known[0]
        return found
    if new.limit is not None and _count(tx, key, new.run) >= new.limit:
        return None
    number = 1 + len(tx.all("SELECT key FROM threads WHERE parent = :parent", parent=key))
    while not threads.make(tx, child := ThreadKey(parent.namespace, f"{new.stem}-{number}"), tx.now()):
        number += 1
    if owner is not None:
        quotas.take(tx, owner)
    tx.one(  # `one`, not `run`: see `threads.append`
        "UPDATE threads SET parent = :parent, parent_call = :call, owner = :owner"
        " WHERE namespace = :namespace AND id = :id RETURNING key",
        parent=key,
        call=new.call,
        owner=owner,
        namespace=child.namespace,
        id=child.id,
    )
    return child.id


def _count(tx: Tx, parent: int, run: str) -> int:
    """How many children a run has begun."""
    row = tx.one(
        "SELECT COUNT(*) FROM threads k JOIN tool_calls c ON c.thread = k.parent AND c.idempotency_key = k.parent_call"
        " WHERE k.parent = :parent AND c.run = :run",
        parent=parent,
        run=run,
    )
    return int(row[0]) if row else 0


class Child(NamedTuple):
    key: int
    id: str
    parent: int


def below(tx: Tx, thread: int) -> list[Child]:
    """The children of a thread and theirs, each behind its parent."""
    rows = tx.all(
        "WITH RECURSIVE below (key) AS (SELECT key FROM threads WHERE parent = :thread"
        " UNION SELECT k.key FROM below b JOIN threads k ON k.parent = b.key)"
        " SELECT t.key, t.id, t.parent FROM below JOIN threads t ON t.key = below.key ORDER BY t.key",
        thread=thread,
    )
    return [Child(*row) for row in rows]


def of_thread(tx: Tx, thread_key: ThreadKey) -> list[str]:
    """The ids of the children of a thread, the oldest first."""
    rows = tx.all(
        "SELECT k.id FROM threads t JOIN threads k ON k.parent = t.key"
        " WHERE t.namespace = :namespace AND t.id = :id ORDER BY k.key",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return [name for (name,) in rows]


def close_calls(tx: Tx, thread: int) -> None:
    """Close the calls that are open where a thread leaves: they wait for no answer, unless it comes back.

    Their open children have nothing left to do; one that a process drives is asked to stop.
    """
    rows = tx.all(
        f"{OPEN_BELOW.format('SELECT key FROM threads WHERE key = :thread')} SELECT thread FROM below ORDER BY thread",
        thread=thread,
    )
    for (key,) in rows:
        tx.run(
            "UPDATE tool_calls SET status = CASE WHEN status = 'started' THEN 'unknown' ELSE 'left' END,"
            f" ended_at = :now WHERE thread = :thread AND status {_OPEN}",
            thread=key,
            now=tx.now(),
        )
        if key != thread:
            _abandon(tx, key)


def _abandon(tx: Tx, child: int) -> None:
    row = tx.one(
        "UPDATE threads SET lease_abort = lease_epoch, touched = touched + 1 WHERE key = :key"
        " RETURNING run, head, COALESCE(lease_until, '') > :now",
        key=child,
        now=tx.now(),
    )
    if row is not None and row[0] is not None and not row[2]:
        runs.close(tx, child, row[0], head=row[1])
        tx.run("UPDATE threads SET run = NULL, version = version + 1 WHERE key = :key", key=child)
