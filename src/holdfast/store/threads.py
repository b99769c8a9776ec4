"""Threads and their log.

- A write takes the thread's row first, so two writers of one thread queue up there on any database.
- `version` counts the writes to a thread. A writer that passes the version it knows (`expect`) cannot write past
  somebody else's message.
- A reply that asks for tools reserves a seq for each call, so results that commit in any order read in call order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import ThreadMoved
from holdfast.store.database import Tx

_END = 2**62


class Stored(NamedTuple):
    """A message as it is stored."""

    id: str
    role: str
    body: str


class Position(NamedTuple):
    """Where a thread stands after a write."""

    head: int
    version: int


class ThreadRow(NamedTuple):
    branch: int
    head: int
    version: int
    extra: str


class ThreadInfo(NamedTuple):
    """A thread as a list shows it. Times are ISO 8601 UTC text."""

    id: str
    message_count: int
    created_at: str
    updated_at: str


def append(
    tx: Tx,
    thread_id: str,
    messages: Sequence[Stored],
    *,
    namespace: str = "",
    expect: int | None = None,
    reserve: int = 0,
) -> Position:
    """Add messages at the end, and keep `reserve` places free behind them. The thread is made if it is new."""
    now = tx.now()
    size = len(messages) + reserve
    branch, head, version = _advance(tx, namespace, thread_id, size, len(messages), now)
    if expect is not None and version != expect + 1:
        raise ThreadMoved(_moved(thread_id))
    tx.many(
        "INSERT INTO messages (branch, seq, id, role, body, created_at)"
        " VALUES (:branch, :seq, :id, :role, :body, :now)",
        [
            {"branch": branch, "seq": seq, "id": message_id, "role": role, "body": body, "now": now}
            for seq, (message_id, role, body) in enumerate(messages, head - size + 1)
        ],
    )
    return Position(head, version)


def fill(tx: Tx, thread_id: str, places: Sequence[tuple[int, Stored]], *, namespace: str = "") -> Position:
    """Put messages into reserved places. A place that is taken means that somebody else settled it."""
    now = tx.now()
    last = max(seq for seq, _ in places)
    row = tx.one(
        "UPDATE threads SET version = version + 1, message_count = message_count + :count, updated_at = :now,"
        " head = CASE WHEN head < :last THEN :last ELSE head END"
        " WHERE namespace = :namespace AND id = :id RETURNING branch, head, version",
        namespace=namespace,
        id=thread_id,
        count=len(places),
        now=now,
        last=last,
    )
    if row is None:
        raise ThreadMoved(f"thread {thread_id!r} was deleted while it was being written; start it again")
    branch, head, version = row
    for seq, m in places:
        stored = tx.one(
            "INSERT INTO messages (branch, seq, id, role, body, created_at)"
            " VALUES (:branch, :seq, :id, :role, :body, :now) ON CONFLICT (branch, seq) DO NOTHING RETURNING seq",
            branch=branch,
            seq=seq,
            id=m.id,
            role=m.role,
            body=m.body,
            now=now,
        )
        if not stored:
            raise ThreadMoved(_moved(thread_id))
    return Position(head, version)


def save_extra(tx: Tx, thread_id: str, extra: str, *, namespace: str = "", expect: int | None = None) -> Position:
    """Replace the thread's extra. The thread is made if it is new."""
    _, head, version = _advance(tx, namespace, thread_id, 0, 0, tx.now())
    if expect is not None and version != expect + 1:
        raise ThreadMoved(_moved(thread_id))
    tx.run(
        "UPDATE threads SET extra = :extra WHERE namespace = :namespace AND id = :id",
        extra=extra,
        namespace=namespace,
        id=thread_id,
    )
    return Position(head, version)


def find(tx: Tx, thread_id: str, *, namespace: str = "") -> ThreadRow | None:
    row = tx.one(
        "SELECT branch, head, version, extra FROM threads WHERE namespace = :namespace AND id = :id",
        namespace=namespace,
        id=thread_id,
    )
    return ThreadRow(*row) if row else None


def page(tx: Tx, branch: int, *, after: int, upto: int, limit: int) -> list[tuple[int, str]]:
    """The next messages of a branch in order, each with its seq: short reads keep the WAL short."""
    return tx.all(
        "SELECT m.seq, m.body FROM segments s JOIN messages m"
        " ON m.branch = s.source AND m.seq > s.after_seq AND m.seq <= s.upto_seq AND m.seq > :after AND m.seq <= :upto"
        " WHERE s.branch = :branch AND s.upto_seq > :after ORDER BY s.after_seq, m.seq LIMIT :limit",
        branch=branch,
        after=after,
        upto=upto,
        limit=limit,
    )


def recent(tx: Tx, *, namespace: str = "", limit: int, before: ThreadInfo | None = None) -> list[ThreadInfo]:
    """Threads, the one that was written last first; `before` goes on after the last one of an earlier list."""
    rows = tx.all(
        "SELECT id, message_count, created_at, updated_at FROM threads"
        " WHERE namespace = :namespace AND (updated_at, id) < (:updated_at, :id)"
        " ORDER BY updated_at DESC, id DESC LIMIT :limit",
        namespace=namespace,
        updated_at=before.updated_at if before else "~",
        id=before.id if before else "",
        limit=limit,
    )
    return [ThreadInfo(*row) for row in rows]


def info(tx: Tx, thread_id: str, *, namespace: str = "") -> ThreadInfo | None:
    row = tx.one(
        "SELECT id, message_count, created_at, updated_at FROM threads WHERE namespace = :namespace AND id = :id",
        namespace=namespace,
        id=thread_id,
    )
    return ThreadInfo(*row) if row else None


def _advance(tx: Tx, namespace: str, thread_id: str, size: int, count: int, now: str) -> tuple[int, int, int]:
    """Take the thread's row, move its head and count: one statement where the thread exists."""
    move = (
        "UPDATE threads SET head = head + :size, version = version + 1, message_count = message_count + :count,"
        " updated_at = :now WHERE namespace = :namespace AND id = :id RETURNING branch, head, version"
    )
    row = tx.one(move, namespace=namespace, id=thread_id, size=size, count=count, now=now)
    if row is None:
        _create(tx, namespace, thread_id, now)
        row = tx.one(move, namespace=namespace, id=thread_id, size=size, count=count, now=now)
        assert row is not None
    return row


def _create(tx: Tx, namespace: str, thread_id: str, now: str) -> None:
    row = tx.one(
        "INSERT INTO threads (namespace, id, branch, head, version, message_count, extra, created_at, updated_at)"
        " VALUES (:namespace, :id, 0, 0, 0, 0, '{}', :now, :now)"
        " ON CONFLICT (namespace, id) DO NOTHING RETURNING key",
        namespace=namespace,
        id=thread_id,
        now=now,
    )
    if row is None:  # another writer was faster
        return
    branch = tx.one("INSERT INTO branches (thread) VALUES (:thread) RETURNING key", thread=row[0])
    assert branch is not None
    tx.run(
        "INSERT INTO segments (branch, source, after_seq, upto_seq) VALUES (:branch, :branch, 0, :end)",
        branch=branch[0],
        end=_END,
    )
    tx.run("UPDATE threads SET branch = :branch WHERE key = :key", branch=branch[0], key=row[0])


def _moved(thread_id: str) -> str:
    return (
        f"thread {thread_id!r} was written by somebody else during this run; what was committed is kept: "
        "prompt or resume again to go on from what the thread holds now"
    )
