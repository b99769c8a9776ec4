"""Forks and rewinds: a new branch that leaves another one, and a new line that inherits what was shown there.

A fork is a new thread with them; a rewind gives them to the thread itself. Either costs a few rows, however long the
thread is. Nothing that existed changes: the other side, or what was left, reads as before.
"""

from __future__ import annotations

from typing import NamedTuple

from byssus.errors import InputError, NotFound
from byssus.queries.accounts import quotas
from byssus.queries.log import branches, marks, threads
from byssus.queries.log.branches import Point, Segment
from byssus.queries.log.leases import By
from byssus.queries.log.threads import UNLEASED
from byssus.queries.versions import checkpoints, children, putting
from byssus.queries.versions.checkpoints import CheckpointRow, NewCheckpointRow, ThreadState
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

At = str | int | None

_CALLED = ("title", "model", "metadata")
# A question on another branch has no time limit: its default answer was for the call that it was asked about.
_QUESTION = (
    "reply, place, call_id, name, arguments, approvers, recovery, run, reason, question, attempts, asked_at, started_at"
)


_IS_QUESTION = "status IN ('waiting', 'answered', 'left')"


class Parting(NamedTuple):
    """Where a branch leaves another one: the point, the extra there, and which line's checkpoints up to which."""

    point: Point
    extra: str
    line: int
    step: int
    version: int


class Left(NamedTuple):
    """What a rewind has left: where it parts, from which other one of them (None: from what is shown), and its forks.

    `shown` has what neither the thread's line nor one before this shows, the highest step first.
    """

    shown: list[CheckpointRow]
    parted_at: int
    within: int | None
    forks: list[str]


class Node(NamedTuple):
    """A thread in a tree: how it came to be, what it shows of its own, what it has left, and the ids of its forks.

    `parent` is the thread whose child it is, and `children` are the ids of its own.
    """

    thread: ThreadState
    origin: str | None
    origin_seq: int | None
    shown: list[CheckpointRow]
    left: list[Left]
    forks: list[str]
    parent: str | None
    children: list[str]


def fork(tx: Tx, thread_key: ThreadKey, new_id: str, at: At, *, token: str, owner: str | None = None) -> None:
    """A new thread that shares another one's past, up to a checkpoint, a seq or its head.

    It has the same title, model and metadata, and belongs to the same user, unless `owner` is given, who must exist.
    Usage, tasks and the tool calls that an application has logged stay with the other thread. The idempotency keys of
    its calls begin with `token`, which no other fork may have.
    """
    thread = _held(tx, thread_key)
    parting = part(tx, thread, at)
    (key,) = threads.take_or_make(tx, ThreadKey(thread_key.namespace, new_id))
    new = checkpoints.thread_state_of(tx, key)
    if key == thread.key or not _is_new(tx, key):
        raise InputError(f"there is already a thread {new_id!r}; choose another id for the fork of {thread_key.id!r}")
    user = owner or thread.owner
    if user is not None:  # also if it is the same: a removal of the user must see this thread
        quotas.take(tx, user)
    tx.run("DELETE FROM segments WHERE branch = :branch", branch=new.branch)
    point = parting.point
    branches.write_segments(tx, new.branch, branches.segments_upto(tx, point))
    marked_point = branches.marks_point(tx, thread.key, thread.branch, point)
    marks.inherit(tx, marked_point.branch, new.branch, upto=marked_point.seq)
    called = ", ".join(f"{name} = (SELECT o.{name} FROM threads o WHERE o.key = :origin)" for name in _CALLED)
    tx.run(
        "UPDATE threads SET head = :head, message_count = :count, extra = :extra, unledgered = :head, origin = :origin,"
        f" origin_seq = :head, owner = :owner, {called},"
        # Only of the branch that the origin reads is it known whether a memory alone has written it.
        " named = COALESCE((SELECT o.named FROM threads o WHERE o.key = :origin AND o.branch = :branch), 0),"
        " version = CASE WHEN version < :version THEN :version ELSE version END WHERE key = :key",
        head=point.seq,
        count=point.messages,
        branch=point.branch,
        extra=parting.extra,
        origin=thread.key,
        owner=user,
        version=thread.version,
        key=key,
    )
    _ask_again(tx, point, key, new.branch, token)
    upto = (parting.step, parting.version)
    checkpoints.inherit(tx, new.line, parting.line, upto=upto, as_of=thread.version)
    checkpoints.show_latest(tx, key)


def rewind(tx: Tx, thread_key: ThreadKey, to: At, *, token: str, left: NewCheckpointRow, by: By = UNLEASED) -> str:
    """Let a thread go on from an earlier point; returns the checkpoint that names where it stood.

    The idempotency keys of the calls that are open there begin with `token`, as those of a fork do.
    """
    _held(tx, thread_key)
    threads.advance(tx, thread_key, by, create=False)
    thread = _held(tx, thread_key)
    key = thread.key
    parting = part(tx, thread, to)
    name = putting.leave(tx, thread, left)
    branch = branches.begin(tx, key, branches.segments_upto(tx, parting.point))
    marked_point = branches.marks_point(tx, key, thread.branch, parting.point)
    marks.inherit(tx, marked_point.branch, branch, upto=marked_point.seq)
    upto = (parting.step, parting.version)
    checkpoints.inherit(tx, branch, parting.line, upto=upto, as_of=thread.version)
    children.close_calls(tx, key)
    _ask_again(tx, parting.point, key, branch, token)
    putting.go_over(tx, key, parting.point._replace(branch=branch), parting.extra, branch)
    checkpoints.show_latest(tx, key)
    return name


def part(tx: Tx, thread: ThreadState, at: At) -> Parting:
    """The point that a checkpoint's id, a seq, or None (the head) stands for."""
    if at is None:
        return Parting(thread.point, thread.extra, thread.line, 2**62, 2**62)
    if isinstance(at, str):
        found = checkpoints.find(tx, thread, at)
        if found is None:
            raise checkpoints.unknown_checkpoint(thread.id, at)
        line, row = found
        return Parting(row.point, checkpoints.extra_of(tx, row.key), line, row.step, row.version)
    if at > thread.head:
        raise NotFound(f"thread {thread.id!r} has no seq {at}: its head is {thread.head}; choose one from 0 to there")
    point = Point(thread.branch, at, _count_upto(tx, thread, at))
    last = _last_upto(tx, thread, point)
    step, version = last.order if last else (-1, 0)
    return Parting(point, thread.extra, thread.line, step, version)


def _count_upto(tx: Tx, thread: ThreadState, seq: int) -> int:
    """How many messages there are up to a seq; without empty places, the seq says it. Counted from the nearer end."""
    if thread.message_count == thread.head:
        return seq
    if seq < thread.head // 2:
        return branches.count(tx, thread.branch, seq)
    return thread.message_count - branches.count(tx, thread.branch, thread.head, after=seq)


def _last_upto(tx: Tx, thread: ThreadState, point: Point) -> CheckpointRow | None:
    """The latest checkpoint whose messages are the first of those up to a point."""
    path = branches.segments_of(tx, point.branch, point.seq)
    known = {point.branch: point.seq}
    limit = 16  # the first one, nearly always: not all of a long list is read for it
    while True:
        rows = checkpoints.shown(tx, thread.line, limit=limit, upto_seq=point.seq)
        for row in rows:
            if row.branch not in known:
                known[row.branch] = branches.parting(path, branches.segments_of(tx, row.branch))
            if row.seq <= known[row.branch]:
                return row
        if len(rows) < limit:
            return None
        limit *= 16


def _held(tx: Tx, thread_key: ThreadKey) -> ThreadState:
    """The thread, which must exist, its row locked."""
    row = threads.take(tx, thread_key)
    if row is None:
        raise checkpoints.unknown_thread(thread_key.id)
    return putting.on_its_line(tx, row[0])


def _is_new(tx: Tx, key: int) -> bool:
    """Whether a thread, whose row is locked, holds nothing yet; messages may wait in its inbox."""
    row = tx.one(
        "SELECT 1 FROM threads WHERE key = :key AND head = 0 AND message_count = 0 AND latest IS NULL"
        " AND origin IS NULL AND extra = '{}' AND run IS NULL AND owner IS NULL AND title = '' AND model IS NULL"
        " AND metadata = '{}' AND status = 'active'",
        key=key,
    )
    return row is not None


def _ask_again(tx: Tx, point: Point, thread: int, branch: int, token: str) -> None:
    """Put the questions that are open at a parting on the new branch too, where a person answers them again.

    An answer is for one run of a tool, and so is an idempotency key: neither passes to the new branch. A call that was
    started on the other side gets no row here, so that nothing runs it again.
    """
    if not any(_has_questions(tx, old, point.seq) for old in branches.sources_of(tx, point.branch) | {point.branch}):
        return
    reply = branches.last_reply(tx, point)
    # They are on the branch that the run wrote to: the one that is left, or the one that holds the reply.
    said_on = [source for source, after, upto in branches.segments_of(tx, point.branch) if after < reply <= upto]
    for old in dict.fromkeys([point.branch, *said_on]):
        rows = tx.all(
            f"INSERT INTO tool_calls (thread, branch, status, idempotency_key, {_QUESTION}) SELECT :thread, :branch,"
            f" 'waiting', :token || CAST(place AS TEXT), {_QUESTION} FROM tool_calls WHERE branch = :old"
            f" AND reply = :reply AND reply > 0 AND {_IS_QUESTION} RETURNING key",
            thread=thread,
            branch=branch,
            token=f"{token}-",
            old=old,
            reply=reply,
        )
        if rows:
            return


def _has_questions(tx: Tx, branch: int, seq: int) -> bool:
    """Whether calls of a branch up to a seq wait for a person, or did so when it was left."""
    row = tx.one(
        f"SELECT 1 FROM tool_calls WHERE branch = :branch AND reply > 0 AND reply <= :seq AND {_IS_QUESTION} LIMIT 1",
        branch=branch,
        seq=seq,
    )
    return row is not None


# --- looking ----------------------------------------------------------------------------------------------------------


def node(tx: Tx, thread_key: ThreadKey) -> Node | None:
    """A thread as a tree shows it."""
    thread = checkpoints.thread_state(tx, thread_key)
    if thread is None:
        return None
    above = _lines_above(tx, thread.key)
    shown = [row for row in checkpoints.shown(tx, thread.line) if row.line not in above]
    origin = tx.one(
        "SELECT o.id, t.origin_seq FROM threads t JOIN threads o ON o.key = t.origin WHERE t.key = :key", key=thread.key
    )
    forks = tx.all("SELECT id, branch, head FROM threads WHERE origin = :key ORDER BY key", key=thread.key)
    name, seq = origin or (None, None)
    left = _left(tx, thread, shown, above, forks)
    parent = tx.one("SELECT p.id FROM threads t JOIN threads p ON p.key = t.parent WHERE t.key = :key", key=thread.key)
    names = [fork_id for fork_id, _, _ in forks]
    return Node(
        thread, name, seq, shown, left, names, parent[0] if parent else None, children.of_thread(tx, thread_key)
    )


def _left(
    tx: Tx, thread: ThreadState, shown: list[CheckpointRow], above: set[int], forks: list[tuple[str, int, int]]
) -> list[Left]:
    """What rewinds have left, the last one first. Each of them, and each fork, hangs where it parts last."""
    known = {row.key for row in shown}
    paths = [branches.segments_of(tx, thread.branch, thread.head)]
    found: list[Left] = []
    for line in checkpoints.lines(tx, thread.key):
        fresh = [row for row in checkpoints.shown(tx, line) if row.line not in above and row.key not in known]
        if fresh:
            known.update(row.key for row in fresh)
            path = branches.segments_of(tx, fresh[0].branch, fresh[0].seq)
            place, seq = _parts_last(paths, path)
            found.append(Left(fresh, seq, place - 1 if place else None, []))
            paths.append(path)
    for fork_id, branch, head in forks if found else []:
        place, _ = _parts_last(paths, branches.segments_of(tx, branch, head))
        if place:
            found[place - 1].forks.append(fork_id)
    return found


def _parts_last(paths: list[list[Segment]], path: list[Segment]) -> tuple[int, int]:
    """Which of these a branch shares most with, and up to which seq."""
    partings = [branches.parting(each, path) for each in paths]
    most = max(partings)
    return partings.index(most), most


def _lines_above(tx: Tx, thread: int) -> set[int]:
    """The lines of the threads that a thread was forked from: what it shares with those stands there."""
    rows = tx.all(
        "WITH RECURSIVE above (key) AS (SELECT origin FROM threads WHERE key = :thread"
        " UNION SELECT t.origin FROM above JOIN threads t ON t.key = above.key)"
        " SELECT b.key FROM above JOIN branches b ON b.thread = above.key",
        thread=thread,
    )
    return {key for (key,) in rows}


def shared(tx: Tx, a: str, b: str, *, namespace: str = "") -> tuple[ThreadState, ThreadState, int]:
    """Two threads, and the seq up to which they read the very same rows."""
    found = []
    for name in (a, b):
        thread = checkpoints.thread_state(tx, ThreadKey(namespace, name))
        if thread is None:
            raise checkpoints.unknown_thread(name)
        found.append(thread)
    one, other = found
    paths = [branches.segments_of(tx, thread.branch, thread.head) for thread in found]
    return one, other, branches.parting(*paths)
