"""Changing and removing single messages of a thread.

- Others may read the same row: forks, and checkpoints. They keep it. The thread then goes over to a branch that passes
  the message by, or has another one in its place; nobody else notices.
- A row that nobody else reads is removed at once. A row is never changed: an edit is a new one in the same place.
- A place that is empty again must not look like a call that never ran: up to there, the ledger counts as unknown.
"""

from __future__ import annotations

from holdfast.errors import NotFound
from holdfast.store import branches, threads
from holdfast.store.branches import Point, Segment
from holdfast.store.database import Tx
from holdfast.store.leases import By
from holdfast.store.putting import close_calls, on_its_line
from holdfast.store.sessions import find, unknown
from holdfast.store.threads import VISITOR, Stored


def replace(
    tx: Tx, thread_id: str, message_id: str, new: Stored | None, *, by: By = VISITOR, namespace: str = ""
) -> None:
    """Put another message in the place of one; None: nothing."""
    if threads.find(tx, thread_id, namespace=namespace) is None:
        raise unknown(thread_id)
    key, _ = threads.advance(tx, thread_id, namespace, by, count=0 if new else -1, create=False)
    said = find(tx, thread_id, message_id, namespace=namespace)
    if said is None:
        raise missing(thread_id, message_id)
    thread = on_its_line(tx, key)
    source = _source(tx, thread.branch, said.seq)
    if source == thread.branch and not _is_shared(tx, thread.branch, said.seq):
        branch = thread.branch
        tx.run("DELETE FROM messages WHERE branch = :branch AND seq = :seq", branch=branch, seq=said.seq)
    else:
        point = thread.point if new else thread.point._replace(messages=thread.point.messages + 1)
        branch = _passing_by(tx, key, point, said.seq)
        close_calls(tx, key)
        tx.run("UPDATE threads SET branch = :branch WHERE key = :key", branch=branch, key=key)
    if new is not None:
        tx.run(
            "INSERT INTO messages (branch, seq, id, role, body, created_at, plain)"
            " VALUES (:branch, :seq, :id, :role, :body, :at, :plain)",
            branch=branch,
            seq=said.seq,
            id=new.id,
            role=new.role,
            body=new.body,
            at=said.created_at,
            plain=new.plain,
        )
    tx.run("UPDATE branches SET uncounted = 1 WHERE key = :branch", branch=branch)
    upto = said.seq if branch == thread.branch else thread.head
    tx.run("UPDATE threads SET unledgered = :upto WHERE key = :key AND unledgered < :upto", upto=upto, key=key)


def missing(thread_id: str, message_id: str) -> NotFound:
    return NotFound(
        f"session {thread_id!r} has no message {message_id!r}; get_conversation_history lists those that it has"
    )


def _source(tx: Tx, branch: int, seq: int) -> int:
    """The branch whose own message stands at a seq."""
    return next(piece.source for piece in branches.segments_of(tx, branch) if piece.after < seq <= piece.upto)


def _is_shared(tx: Tx, branch: int, seq: int) -> bool:
    """Whether somebody else reads a message of a branch: a fork or a checkpoint."""
    row = tx.one(
        "SELECT 1 FROM branches b WHERE b.key = :branch AND (EXISTS (SELECT 1 FROM segments s WHERE s.source = b.key"
        " AND s.branch <> b.key AND s.after_seq < :seq AND s.upto_seq >= :seq)"
        " OR EXISTS (SELECT 1 FROM checkpoints c WHERE c.branch = b.key AND c.seq >= :seq))",
        branch=branch,
        seq=seq,
    )
    return row is not None


def _passing_by(tx: Tx, thread: int, point: Point, seq: int) -> int:
    """A branch that reads what another one does up to a point, but for one message, whose place is its own."""
    row = tx.one("INSERT INTO branches (thread) VALUES (:thread) RETURNING key", thread=thread)
    assert row is not None
    branch: int = row[0]
    pieces: list[Segment] = []
    for piece in branches.cut(tx, point):
        if piece.after < seq <= piece.upto:
            own = Segment(branches.OWN, seq - 1, seq)
            pieces += [piece._replace(upto=seq - 1), own, piece._replace(after=seq)]
        else:
            pieces.append(piece)
    branches.lay(tx, branch, branches.joined(pieces))
    return branch
