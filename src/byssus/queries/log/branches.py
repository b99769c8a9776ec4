"""Branches: the lines along which the log is read, and which parts of it are still read at all.

- A branch reads the log along its segments. A new branch gets those of the one that it leaves, up to the point where it
  leaves it, and its own behind them: the list stays flat, and no message is touched.
- A slot that is still empty belongs to both sides: on each, the result of that side goes there. So it becomes the new
  branch's own.
- A message is needed while a thread's branch, or a branch that a checkpoint reads, leads past it. `collect` removes the
  others. A transaction that starts to use a branch holds the row of a thread that uses it already, so nothing becomes
  needed while `collect` runs. One that continues a branch that no thread reads locks its row, as `collect` does.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from byssus.queries.log import marks, threads
from byssus.queries.log.threads import ALONG, END
from byssus.store.database import Tx

OWN = 0  # stands for the branch that is being made
_MANY = 4  # segments


class Segment(NamedTuple):
    """Of `source`, the messages after one seq and up to another."""

    source: int
    after: int
    upto: int

    def has(self, branch: int | None, seq: int) -> bool:
        """Whether it reads what a branch has at a seq."""
        return self.source == branch and self.after < seq <= self.upto


class Point(NamedTuple):
    """A position in the log: along which branch, up to where, and how many messages that is."""

    branch: int
    seq: int
    messages: int


def segments_of(tx: Tx, branch: int, upto: int = END) -> list[Segment]:
    """The segments of a branch, up to a seq."""
    rows = tx.all(
        "SELECT source, after_seq, upto_seq FROM segments WHERE branch = :branch AND after_seq < :upto"
        " ORDER BY after_seq",
        branch=branch,
        upto=upto,
    )
    return [Segment(source, after, min(end, upto)) for source, after, end in rows]


def sources_of(tx: Tx, branch: int) -> set[int]:
    """The branches that a branch is read along: few, however many pieces of them there are."""
    return {source for (source,) in tx.all("SELECT DISTINCT source FROM segments WHERE branch = :b", b=branch)}


def count(tx: Tx, branch: int, upto: int, *, after: int = 0) -> int:
    """How many messages there are up to a seq."""
    row = tx.one(f"SELECT COUNT(*) FROM {ALONG} WHERE s.branch = :branch", branch=branch, after=after, upto=upto)
    assert row is not None
    return int(row[0])


def has_lost(tx: Tx, branch: int) -> bool:
    """Whether messages were ever removed from a branch, or came with an import; also if others took their places."""
    row = tx.one("SELECT uncounted FROM branches WHERE key = :branch", branch=branch)
    return row is None or row[0] != 0


def is_long(tx: Tx, point: Point) -> bool:
    """Whether a branch has so many segments that another one is worth avoiding."""
    return len(segments_of(tx, point.branch, point.seq)) >= _MANY


def free_source(tx: Tx, thread: int, point: Point) -> int | None:
    """A branch of this thread that ends at a point and that no thread reads: new messages can be added to it.

    It must read the same rows as the point. Others may read it up to the point; only its own segment leads further.
    And it must never have had other messages there: a follower that has seen them would take the new ones for these.
    """
    path = segments_of(tx, point.branch, point.seq)
    if path:
        _take(tx, path[-1].source)
    if not path or parting(path, segments_of(tx, path[-1].source, point.seq)) != point.seq:
        return None
    row = tx.one(
        "SELECT b.key FROM branches b WHERE b.key = :source AND b.thread = :thread AND b.uncounted = 0"
        " AND NOT EXISTS (SELECT 1 FROM threads t WHERE t.key = b.thread AND t.branch = b.key)"
        " AND NOT EXISTS (SELECT 1 FROM messages m WHERE m.branch = b.key AND m.seq > :seq)"
        " AND NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.branch = b.key AND c.seq > :seq)",
        source=path[-1].source,
        thread=thread,
        seq=point.seq,
    )
    return row[0] if row else None


def make(tx: Tx, thread: int, point: Point) -> int:
    """A new branch of a thread that leaves another one at a point."""
    branch = begin(tx, thread, segments_upto(tx, point))
    marks.inherit(tx, point.branch, branch, upto=point.seq)
    return branch


def marks_point(tx: Tx, thread: int, branch: int, point: Point) -> Point:
    """The branch whose marks and summary count at a point that a thread shows, and up to where.

    `branch` is the one that the thread reads. Its own marks count where the point is on another thread's branch: what
    that thread has marked after the fork is not visible here.
    """
    own = tx.one("SELECT 1 FROM branches WHERE key = :branch AND thread = :thread", branch=point.branch, thread=thread)
    if own is not None:
        return point
    seq = parting(segments_of(tx, point.branch, point.seq), segments_of(tx, branch, point.seq))
    return point._replace(branch=branch, seq=seq)


def begin(tx: Tx, thread: int, segments: Iterable[Segment]) -> int:
    """A new branch of a thread, without any marks."""
    row = tx.one("INSERT INTO branches (thread) VALUES (:thread) RETURNING key", thread=thread)
    assert row is not None
    branch: int = row[0]
    write_segments(tx, branch, segments)
    return branch


def write_segments(tx: Tx, branch: int, segments: Iterable[Segment]) -> None:
    """Give a branch its segments."""
    tx.many(
        "INSERT INTO segments (branch, source, after_seq, upto_seq) VALUES (:branch, :source, :after, :upto)",
        [
            {"branch": branch, "source": branch if source == OWN else source, "after": after, "upto": upto}
            for source, after, upto in segments
        ],
    )


def segments_upto(tx: Tx, point: Point) -> list[Segment]:
    """The segments of a branch that leaves another one at a point."""
    empty = empty_slots(tx, point)
    pieces: list[Segment] = []
    for source, after, upto in segments_of(tx, point.branch, point.seq):
        start = after
        for gap in empty:
            first, last = max(gap.after, after), min(gap.upto, upto)
            if first < last:
                pieces += [Segment(source, start, first), Segment(OWN, first, last)]
                start = last
        pieces.append(Segment(source, start, upto))
    return joined([*pieces, Segment(OWN, point.seq, END)])


def joined(pieces: Iterable[Segment]) -> list[Segment]:
    """The segments without empty ones, and with adjacent ones of one source joined."""
    found: list[Segment] = []
    for piece in pieces:
        if piece.after == piece.upto:
            continue
        if found and found[-1].source == piece.source and found[-1].upto == piece.after:
            found[-1] = found[-1]._replace(upto=piece.upto)
        else:
            found.append(piece)
    return found


class Gap(NamedTuple):
    """Slots without a message: after one seq and up to another."""

    after: int
    upto: int


def empty_slots(tx: Tx, point: Point) -> list[Gap]:
    """The slots behind the last reply, up to the point, that hold no message. Only there can one still be filled.

    They are returned as ranges: a thread that was imported may have as many as there are numbers.
    """
    if point.messages == point.seq:  # the usual case: no slot is empty anywhere
        return []
    last = last_reply(tx, point)
    if last == 0:
        return []
    rows = tx.all(
        f"SELECT m.seq FROM {ALONG} WHERE s.branch = :branch", branch=point.branch, after=last, upto=point.seq
    )
    ends = [last, *sorted(seq for (seq,) in rows), point.seq + 1]
    return [Gap(before, seq - 1) for before, seq in itertools.pairwise(ends) if before < seq - 1]


def last_reply(tx: Tx, point: Point) -> int:
    """The seq of the last reply up to a point; 0 if there is none."""
    found = threads.last_spoken(tx, point.branch, before=point.seq + 1, roles=["assistant"])
    return found[0] if found else 0


def parting(a: list[Segment], b: list[Segment]) -> int:
    """The seq up to which two branches read the very same rows."""
    same = 0
    for one, other in zip(a, b, strict=False):
        if one.source != other.source or one.after != other.after:
            break
        same = min(one.upto, other.upto)
        if one.upto != other.upto:
            break
    return same


# --- what is not needed any more --------------------------------------------------------------------------------------


class Collected(NamedTuple):
    """How many messages were removed, and the branches that are still to be looked at."""

    messages: int
    left: list[int]


def collect(tx: Tx, candidates: Iterable[int], *, limit: int = 2**31) -> Collected:
    """Delete the messages of these branches, and of their sources, that no thread and no checkpoint reads."""
    waiting, removed = sorted(set(candidates)), 0
    while waiting:
        if removed >= limit:
            return Collected(removed, waiting)
        branch = waiting.pop()
        _take(tx, branch)
        if not _is_read(tx, branch):
            sources = tx.all("SELECT source FROM segments WHERE branch = :branch", branch=branch)
            tx.run("DELETE FROM segments WHERE branch = :branch", branch=branch)
            marks.forget(tx, branch)
            waiting = sorted({*waiting, *(source for (source,) in sources)} - {branch})
        needed, room = _needed(tx, branch), limit - removed
        count = _trim(tx, branch, needed, room)
        removed += count
        if count == room:  # there may be more of it
            waiting.append(branch)
        elif not needed:
            _remove(tx, branch)
    return Collected(removed, [])


def drop_if_unread(tx: Tx, branch: int, successor: int) -> None:
    """Delete the segments of a branch that its thread has just left for another one, unless a checkpoint reads it.

    Where the successor has the same sources, `collect` finds them through it later.
    """
    if sources_of(tx, branch) - sources_of(tx, successor) - {branch}:
        collect(tx, [branch])
        return
    _take(tx, branch)
    if not _is_read(tx, branch):
        tx.run("DELETE FROM segments WHERE branch = :branch", branch=branch)
        marks.forget(tx, branch)


def unread(tx: Tx, thread: int) -> list[int]:
    """The branches of a thread that neither it nor a checkpoint reads: left behind, or sources of others."""
    rows = tx.all(
        "SELECT b.key FROM branches b JOIN threads t ON t.key = b.thread WHERE b.thread = :thread AND b.key <> t.branch"
        " AND NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.branch = b.key)",
        thread=thread,
    )
    return [key for (key,) in rows]


def _take(tx: Tx, branch: int) -> None:
    """Lock a branch's row: it is either continued, or checked for whether it is needed, never both at once."""
    tx.run("UPDATE branches SET thread = thread WHERE key = :branch", branch=branch)


def _is_read(tx: Tx, branch: int) -> bool:
    """Whether a thread, or a checkpoint, is read along this branch."""
    row = tx.one(
        "SELECT 1 FROM branches b WHERE b.key = :branch AND (EXISTS"
        " (SELECT 1 FROM threads t WHERE t.key = b.thread AND t.branch = b.key)"
        " OR EXISTS (SELECT 1 FROM checkpoints c WHERE c.branch = b.key))",
        branch=branch,
    )
    return row is not None


def _needed(tx: Tx, source: int) -> list[tuple[int, int]]:
    """The parts of a branch's own messages that are read: after one seq and up to another, in order."""
    return tx.all(
        "SELECT s.after_seq, s.upto_seq FROM segments s JOIN branches b ON b.key = s.branch"
        " JOIN threads t ON t.key = b.thread AND t.branch = b.key WHERE s.source = :source"
        " UNION SELECT s.after_seq, CASE WHEN c.seq < s.upto_seq THEN c.seq ELSE s.upto_seq END"
        " FROM segments s JOIN checkpoints c ON c.branch = s.branch"
        " AND c.seq = (SELECT MAX(seq) FROM checkpoints x WHERE x.branch = s.branch)"
        " WHERE s.source = :source AND c.seq > s.after_seq ORDER BY 1, 2",
        source=source,
    )


def _trim(tx: Tx, branch: int, needed: list[tuple[int, int]], limit: int) -> int:
    """Delete a branch's own messages that are not read, at most `limit`.

    Between two parts lies the result of a call that was open when a fork left: the fork has its own result.
    """
    gaps: list[tuple[int, int]] = []
    end = -1
    for after, upto in [*needed, (END, END)]:
        if after > end:
            gaps.append((end, after))
        end = max(end, upto)
    keys = _keys_in(tx, branch, gaps, limit)
    tx.many("DELETE FROM messages WHERE key = :key", [{"key": key} for key in keys])
    if keys:
        tx.run("UPDATE branches SET uncounted = 1 WHERE key = :branch", branch=branch)
    last = max((upto for _, upto in needed), default=0)
    tx.run("DELETE FROM tool_calls WHERE branch = :branch AND reply > :last", branch=branch, last=last)
    return len(keys)


def _keys_in(tx: Tx, branch: int, gaps: list[tuple[int, int]], limit: int) -> list[int]:
    """A branch's own messages in some parts of it: after one seq and up to another, each."""
    if len(gaps) > _MANY:  # a fork has lost many messages: one scan is faster than many seeks
        rows = tx.all("SELECT key, seq FROM messages WHERE branch = :branch ORDER BY seq", branch=branch)
        ends, starts = [upto for _, upto in gaps], [*(after for after, _ in gaps), END]
        inside = (key for key, seq in rows if seq > starts[bisect_left(ends, seq)])
        return list(itertools.islice(inside, limit))
    keys: list[int] = []
    for after, upto in gaps:
        rows = tx.all(
            "SELECT key FROM messages WHERE branch = :branch AND seq > :after AND seq <= :upto"
            " ORDER BY seq LIMIT :limit",
            branch=branch,
            after=after,
            upto=upto,
            limit=limit - len(keys),
        )
        keys += [key for (key,) in rows]
    return keys


def _remove(tx: Tx, branch: int) -> None:
    """Remove the branch itself, unless it still stands for a line, others are read along it, or a log of tools is
    kept there. What it says about its thread's usage stays true."""
    tx.run(
        "UPDATE branches SET uncounted = 1 WHERE key = (SELECT t.branch FROM branches b JOIN threads t"
        " ON t.key = b.thread WHERE b.key = :branch AND b.uncounted = 1)",
        branch=branch,
    )
    row = tx.one(
        "DELETE FROM branches WHERE key = :branch"
        " AND NOT EXISTS (SELECT 1 FROM threads t WHERE t.key = branches.thread AND :branch IN (t.branch, t.line))"
        " AND NOT EXISTS (SELECT 1 FROM segments s WHERE s.source = branches.key OR s.branch = branches.key)"
        " AND NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.line = branches.key OR c.branch = branches.key)"
        " AND NOT EXISTS (SELECT 1 FROM inherited i WHERE i.line = branches.key OR i.source = branches.key)"
        " AND NOT EXISTS (SELECT 1 FROM tool_calls c WHERE c.branch = branches.key AND c.reply = 0) RETURNING thread",
        branch=branch,
    )
    if row is not None:  # what its runs wrote is gone
        tx.run(
            "UPDATE runs SET branch = NULL WHERE thread = :thread AND branch = :branch", thread=row[0], branch=branch
        )
