"""The inbox of a thread: messages that wait for a run.

Sending needs no lease, so any process can send. Only the run takes messages out: they leave the inbox and join the log
in one transaction, so each is delivered exactly once.
"""

from __future__ import annotations

from typing import NamedTuple

from byssus.queries.log import runs, threads
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
    """Put a message at the end of the inbox. The thread is made if it is new."""
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


def known(tx: Tx, thread_key: ThreadKey, message_id: str) -> str | None:
    """The body of a user's message by its id: one that waits, or one among the last of the thread.

    The thread is made if it is new, and locked until the transaction ends: two senders of one message do not both find
    nothing, and no run moves it from the inbox to the log meanwhile.
    """
    thread, head = threads.take_or_make(tx, thread_key, "key, head")
    waits = "SELECT body FROM inbox WHERE thread = :thread AND id = :id ORDER BY key LIMIT 1"
    row = tx.one(waits, thread=thread, id=message_id)
    if row is not None:
        return str(row[0])
    logged = runs.logged(tx, thread, message_id, head)
    return None if logged is None else logged.body


def waiting(tx: Tx, thread_key: ThreadKey) -> list[InboxRow]:
    """The messages that wait, in the order in which they were sent."""
    rows = tx.all(
        "SELECT kind, inbox.id, body, inbox.created_at FROM inbox JOIN threads ON threads.key = inbox.thread"
        " WHERE namespace = :namespace AND threads.id = :id ORDER BY inbox.key",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return [InboxRow(*row) for row in rows]


def withdraw(tx: Tx, thread_key: ThreadKey, message_id: str) -> bool:
    """Take a message back; False if it is not in the inbox (any more)."""
    row = tx.one(
        "DELETE FROM inbox WHERE key = (SELECT inbox.key FROM inbox JOIN threads ON threads.key = inbox.thread"
        " WHERE namespace = :namespace AND threads.id = :id AND inbox.id = :message ORDER BY inbox.key LIMIT 1)"
        " RETURNING key",
        namespace=thread_key.namespace,
        id=thread_key.id,
        message=message_id,
    )
    if row is not None:
        threads.touch(tx, thread_key)
    return row is not None


def take(
    tx: Tx, thread_key: ThreadKey, *, by: By, expect: int, limits: dict[str, int]
) -> tuple[Position | None, list[str]]:
    """Move messages into the log: of the first kind that has any, as many as its limit. Returns their bodies."""
    known = threads.find(tx, thread_key)
    if known is None:  # it was deleted: it has no messages, and is not made again
        return None, []
    thread = known.key
    for kind, limit in limits.items():
        # One statement: a message that is withdrawn at the same moment is either delivered or withdrawn, never both.
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
