"""The inbox of a thread: what was said to a run and not heard yet.

Sending needs no lease, so anybody can. Taking is for the run: what it takes leaves the inbox and joins the log in one
transaction, so that nothing is heard twice or lost in between.
"""

from __future__ import annotations

from typing import NamedTuple

from byssus.queries.log import threads
from byssus.queries.log.leases import By
from byssus.queries.log.threads import MessageRow, Position
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

STEER, FOLLOW_UP = "steer", "follow_up"


class InboxRow(NamedTuple):
    kind: str
    id: str
    body: str
    created_at: str


def send(tx: Tx, thread_key: ThreadKey, kind: str, message: MessageRow) -> None:
    """Put a message behind all that waits."""
    (thread,) = threads.take_or_make(tx, thread_key)
    tx.run(
        "INSERT INTO inbox (thread, kind, id, role, body, created_at) VALUES (:thread, :kind, :id, :role, :body, :now)",
        thread=thread,
        kind=kind,
        id=message.id,
        role=message.role,
        body=message.body,
        now=tx.now(),
    )


def waiting(tx: Tx, thread_key: ThreadKey) -> list[InboxRow]:
    """What waits, in the order in which it was said."""
    rows = tx.all(
        "SELECT kind, inbox.id, body, inbox.created_at FROM inbox JOIN threads ON threads.key = inbox.thread"
        " WHERE namespace = :namespace AND threads.id = :id ORDER BY inbox.key",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return [InboxRow(*row) for row in rows]


def withdraw(tx: Tx, thread_key: ThreadKey, message_id: str) -> bool:
    """Take a message back; False if it is not there (any more)."""
    row = tx.one(
        "DELETE FROM inbox WHERE key = (SELECT inbox.key FROM inbox JOIN threads ON threads.key = inbox.thread"
        " WHERE namespace = :namespace AND threads.id = :id AND inbox.id = :message ORDER BY inbox.key LIMIT 1)"
        " RETURNING key",
        namespace=thread_key.namespace,
        id=thread_key.id,
        message=message_id,
    )
    return row is not None


def take(
    tx: Tx, thread_key: ThreadKey, *, by: By, expect: int, limits: dict[str, int]
) -> tuple[Position | None, list[str]]:
    """Move what waits into the log: of the first kind that has something, so many messages. Returns their bodies."""
    known = threads.find(tx, thread_key)
    if known is None:  # it was deleted: there is nothing to hear, and it is not made anew
        return None, []
    thread = known.key
    for kind, limit in limits.items():
        # In one statement: what somebody withdraws at this very moment is heard or withdrawn, and never both.
        rows = tx.all(
            "DELETE FROM inbox WHERE key IN"
            " (SELECT key FROM inbox WHERE thread = :thread AND kind = :kind ORDER BY key LIMIT :limit)"
            " RETURNING key, id, role, body",
            thread=thread,
            kind=kind,
            limit=limit,
        )
        if rows:
            break
    else:
        return None, []
    taken = [MessageRow(*row) for _, *row in sorted(rows)]
    position = threads.append(tx, thread_key, taken, by=by, expect=expect)
    return position, [message.body for message in taken]
