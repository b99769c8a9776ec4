"""Changing and removing single messages of a thread.

- Forks and checkpoints may read the same row, and keep it. The thread then goes over to a branch that leaves the
  message out, or has another one in its place; forks and checkpoints are not affected.
- A row that only this thread reads is deleted. A row is never changed: an edit is a new row at the same seq, with the
  same marks.
- An emptied place must not look like a tool call that never ran: up to there, the ledger counts as unknown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from byssus.errors import NotFound
from byssus.queries.log import branches, marks, messages, threads
from byssus.queries.log.branches import OWN, Segment
from byssus.queries.log.leases import By
from byssus.queries.log.threads import END, UNLEASED, MessageRow
from byssus.queries.versions.checkpoints import ThreadState, unknown_thread
from byssus.queries.versions.children import close_calls
from byssus.queries.versions.putting import on_its_line
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey


class MessageRef(NamedTuple):
    """A message by its row, and where it stands in its thread."""

    key: int
    seq: int


def replace(tx: Tx, thread_key: ThreadKey, message_id: str, new: MessageRow | None, *, by: By = UNLEASED) -> None:
    """Replace a message, or remove it if `new` is None. The thread and the message must exist."""
    if threads.find(tx, thread_key) is None:
        raise unknown_thread(thread_key.id)
    key, _ = threads.advance(tx, thread_key, by, create=False)
    old = messages.find(tx, thread_key, message_id)
    if old is None:
        raise NotFound(f"thread {thread_key.id!r} has no message {message_id!r}; load the thread to see which it has")
    thread = on_its_line(tx, key)
    kept_marks = marks.of(tx, thread.branch, old.key)
    branch = remove(tx, thread, [MessageRef(old.key, old.seq)])
    if new is not None:
        added = tx.one(
            "INSERT INTO messages (branch, seq, id, role, body, created_at, plain)"
            " VALUES (:branch, :seq, :id, :role, :body, :at, :plain) RETURNING key",
            branch=branch,
            seq=old.seq,
            id=new.id,
            role=new.role,
            body=new.body,
            at=old.created_at,
            plain=new.plain,
        )
        assert added is not None
        marks.put(tx, branch, [added[0]], kept_marks)
        tx.run("UPDATE threads SET message_count = message_count + 1 WHERE key = :key", key=key)


def remove(tx: Tx, thread: ThreadState, refs: Sequence[MessageRef]) -> int:
    """Remove messages from a thread, whose row is locked; returns the branch that it reads from now on."""
    if _are_its_own(tx, thread.branch, refs):
        branch, upto = thread.branch, max(spot.seq for spot in refs)
        tx.many("DELETE FROM messages WHERE key = :key", [{"key": spot.key} for spot in refs])
    else:
        branch, upto = _passing_by(tx, thread, refs), thread.head
        close_calls(tx, thread.key)
    tx.run("UPDATE branches SET uncounted = 1 WHERE key = :branch", branch=branch)
    tx.run(
        "UPDATE threads SET branch = :branch, message_count = message_count - :count,"
        " unledgered = CASE WHEN unledgered < :upto THEN :upto ELSE unledgered END WHERE key = :key",
        branch=branch,
        count=len(refs),
        upto=upto,
        key=thread.key,
    )
    if branch != thread.branch:  # otherwise each deletion would leave a copy of all marks and segments of the branch
        branches.drop_if_unread(tx, thread.branch, branch)
    return branch


def empty(tx: Tx, thread: ThreadState) -> int:
    """Remove all messages from a thread, whose row is locked: it continues on a new branch, with its summary.

    The messages that are not read any more are left for `deleting.collect`. Returns the new branch.
    """
    branch = branches.begin(tx, thread.key, [Segment(OWN, 0, END)])
    marks.inherit(tx, thread.branch, branch, upto=0)
    close_calls(tx, thread.key)
    tx.run("UPDATE branches SET uncounted = 1 WHERE key = :branch", branch=branch)
    tx.run(
        "UPDATE threads SET branch = :branch, message_count = 0, unledgered = head WHERE key = :key",
        branch=branch,
        key=thread.key,
    )
    return branch


def _are_its_own(tx: Tx, branch: int, refs: Sequence[MessageRef]) -> bool:
    """Whether these messages are a branch's own, and neither a fork nor a checkpoint reads them."""
    own = [piece for piece in branches.segments_of(tx, branch) if piece.source == branch]
    foreign = tx.all(
        "SELECT after_seq, upto_seq FROM segments WHERE source = :branch AND branch <> :branch", branch=branch
    )
    named = tx.one("SELECT COALESCE(MAX(seq), 0) FROM checkpoints WHERE branch = :branch", branch=branch)
    assert named is not None
    return all(
        seq > named[0]
        and any(after < seq <= upto for _, after, upto in own)
        and not any(after < seq <= upto for after, upto in foreign)
        for _, seq in refs
    )


def _passing_by(tx: Tx, thread: ThreadState, refs: Sequence[MessageRef]) -> int:
    """A new branch that reads what a thread reads, without some messages; their places are its own."""
    passed = sorted(spot.seq for spot in refs)
    pieces: list[Segment] = []
    for source, after, upto in branches.segments_upto(tx, thread.point):
        start = after
        for seq in passed[bisect_right(passed, after) : bisect_right(passed, upto)]:
            pieces += [Segment(source, start, seq - 1), Segment(OWN, seq - 1, seq)]
            start = seq
        pieces.append(Segment(source, start, upto))
    branch = branches.begin(tx, thread.key, branches.joined(pieces))
    marks.inherit(tx, thread.branch, branch, upto=thread.head)
    tx.many(
        "DELETE FROM marks WHERE message = :key AND branch = :branch",
        [{"key": spot.key, "branch": branch} for spot in refs],
    )
    return branch
