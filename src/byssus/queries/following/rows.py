"""What a follower of a thread reads: the thread's row, and what stands beside the log.

`stamp` differs from what it was before when anything of this may have changed: it is the sum of `version`, which counts
the writes to the log, and `touched`, which counts the others.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from byssus.queries.log.branches import Segment
from byssus.queries.log.inbox import InboxRow
from byssus.queries.log.threads import END, MADE_AT
from byssus.store.database import Row, Tx
from byssus.values.thread_key import ThreadKey

_AT_ONCE = 250  # names or rows in one statement
_FEW_RUNS = 8  # so few that Postgres reads them from the end of the index, also without statistics


class FollowedRow(NamedTuple):
    """A thread, as far as a follower needs it."""

    key: int
    made_at: str
    branch: int
    head: int
    version: int
    stamp: int
    title: str
    run: str | None  # the run that has not ended
    lease_epoch: int
    is_driven: int  # whether a run holds the lease
    latest: int | None  # the checkpoint with the highest step
    saved_at: str | None  # when the partial of a reply was begun
    has_mail: int  # whether messages wait in the inbox


class CallRow(NamedTuple):
    """A tool call, as the ledger has it."""

    reply: int
    place: int
    call_id: str
    name: str
    arguments: str
    status: str
    reason: str | None
    question: str | None
    answer: str | None
    attempts: int
    asked_at: str | None
    answered_by: str | None
    answered_from: str | None


class RanRow(NamedTuple):
    """A run. Without `ended_at`, a `stop_reason` means that it waits for a person."""

    key: int
    id: str
    branch: int | None
    first_seq: int
    last_seq: int | None
    ended_at: str | None
    stop_reason: str | None
    error: str | None
    cause: str
    attempts: int


class Mail(NamedTuple):
    """The messages that wait in the inbox: the ids of all, in order, and some that the follower does not know yet."""

    ids: Sequence[str] = ()
    new: Sequence[InboxRow] = ()
    is_all: bool = True  # False: there are more that it does not know


class MadeRow(NamedTuple):
    """A checkpoint that this thread has made."""

    id: str
    step: int
    seq: int
    version: int
    about: str


_CALL = ", ".join(f"c.{name}" for name in CallRow._fields)
_MADE = ", ".join(f"c.{name}" for name in MadeRow._fields)
_RUNS = (
    f"SELECT {', '.join(RanRow._fields)} FROM runs WHERE thread = :thread AND key >= :first ORDER BY key LIMIT :limit"
)
_RUNS_BACK = _RUNS.replace("key >= :first ORDER BY key", "key < :before AND last_seq < :seq ORDER BY key DESC")
_FIND = (
    f"SELECT t.key, {MADE_AT}, t.branch, t.head, t.version, t.version + t.touched, t.title, t.run, t.lease_epoch,"
    " CASE WHEN t.lease_until > :now THEN 1 ELSE 0 END, t.latest, p.saved_at,"
    " CASE WHEN EXISTS (SELECT 1 FROM inbox i WHERE i.thread = t.key) THEN 1 ELSE 0 END"
    " FROM threads t LEFT JOIN partials p ON p.thread = t.key WHERE t.namespace = :namespace AND t.id = :id"
)


def find(tx: Tx, thread_key: ThreadKey) -> FollowedRow | None:
    row = tx.one(_FIND, namespace=thread_key.namespace, id=thread_key.id, now=tx.now())
    return FollowedRow(*row) if row else None


def stamps(tx: Tx, names: Sequence[ThreadKey]) -> dict[ThreadKey, tuple[int, int]]:
    """The key and the stamp of each of these threads that exists."""
    found: dict[ThreadKey, tuple[int, int]] = {}
    for first in range(0, len(names), _AT_ONCE):
        some = names[first : first + _AT_ONCE]
        values = ", ".join(f"(:n{number}, :i{number})" for number in range(len(some)))
        params = {f"{letter}{n}": part for n, name in enumerate(some) for letter, part in zip("ni", name, strict=True)}
        rows = tx.all(
            f"SELECT namespace, id, key, version + touched FROM threads WHERE (namespace, id) IN (VALUES {values})",
            **params,
        )
        found |= {ThreadKey(namespace, name): (key, stamp) for namespace, name, key, stamp in rows}
    return found


def note_watching(tx: Tx, thread_key: ThreadKey, seconds: float) -> None:
    """Note that a follower watches the thread for a while: the process that drives it saves replies more often."""
    tx.run(
        "UPDATE threads SET watched_until = :until WHERE namespace = :namespace AND id = :id",
        until=tx.after(seconds),
        namespace=thread_key.namespace,
        id=thread_key.id,
    )


def is_watched(tx: Tx, thread_key: ThreadKey) -> bool:
    row = tx.one(
        "SELECT 1 FROM threads WHERE namespace = :namespace AND id = :id AND watched_until > :now",
        namespace=thread_key.namespace,
        id=thread_key.id,
        now=tx.now(),
    )
    return row is not None


def partial(tx: Tx, thread: int) -> str | None:
    """The head of the reply that is arriving: a message without what has arrived of it."""
    row = tx.one("SELECT body FROM partials WHERE thread = :thread", thread=thread)
    return row[0] if row else None


def mail(tx: Tx, thread: int, known: Container[str], *, chars: int) -> Mail:
    """What waits in a thread's inbox. Of what is not known, so much that it has more than these characters, or all."""
    rows = tx.all("SELECT key, id FROM inbox WHERE thread = :thread ORDER BY key", thread=thread)
    ids, unknown = [name for _, name in rows], [key for key, name in rows if name not in known]
    new = list[InboxRow]()
    for key in unknown:
        row = tx.one("SELECT kind, id, body, created_at FROM inbox WHERE key = :key", key=key)
        assert row is not None
        new.append(InboxRow(*row))
        chars -= len(new[-1].body)
        if chars < 0:
            break
    return Mail(ids, new, len(new) == len(unknown))


def last_seq(tx: Tx, branch: int) -> int:
    """The last seq of a branch that holds a message; 0 if it has none, or if there is no such branch."""
    return _highest(tx, "messages", "seq", branch, upto=END)


def is_of(tx: Tx, branch: int, thread: int) -> bool:
    """Whether a branch belongs to a thread."""
    row = tx.one("SELECT 1 FROM branches WHERE key = :branch AND thread = :thread", branch=branch, thread=thread)
    return row is not None


def calls(tx: Tx, branch: int, *, first: int, last: int) -> list[CallRow]:
    """The calls of the replies from one seq to another, in order."""
    along = (
        # One bound on either side, as in `threads.ALONG`: with two, SQLite reads all calls of the segment.
        f"SELECT {_CALL}, c.branch FROM segments s JOIN tool_calls c ON c.branch = s.source"
        " AND c.reply >= CASE WHEN s.after_seq < :first THEN :first ELSE s.after_seq + 1 END"
        " AND c.reply <= CASE WHEN s.upto_seq < :last THEN s.upto_seq ELSE :last END"
        " WHERE s.branch = :branch"
    )
    # A call that was open at a rewind or a fork is asked about again on the new branch.
    own = (
        f"SELECT {_CALL}, c.branch FROM tool_calls c WHERE c.branch = :branch"
        " AND c.reply >= :first AND c.reply <= :last"
    )
    rows = tx.all(f"{along} UNION {own}", branch=branch, first=max(first, 1), last=last)
    found: dict[tuple[int, int], Row] = {}
    for row in sorted(rows, key=lambda row: (row[0], row[1], row[-1] == branch)):
        found[row[0], row[1]] = row
    return [CallRow(*row[:-1]) for row in found.values()]


def last_call(tx: Tx, branch: int, upto: int) -> int:
    """The seq of the last reply up to a seq whose calls are in the ledger; 0 if there is none."""
    return _highest(tx, "tool_calls", "reply", branch, upto=upto)


def _highest(tx: Tx, table: str, column: str, branch: int, *, upto: int) -> int:
    """The highest value along a branch, from the end of an index for each segment: a join would read all rows."""
    row = tx.one(
        f"SELECT MAX((SELECT MAX(f.{column}) FROM {table} f WHERE f.branch = s.source AND f.{column} > s.after_seq"
        f" AND f.{column} <= CASE WHEN s.upto_seq < :upto THEN s.upto_seq ELSE :upto END))"
        " FROM segments s WHERE s.branch = :branch",
        branch=branch,
        upto=upto,
    )
    return (row[0] if row else None) or 0


def runs(tx: Tx, thread: int, segments: Sequence[Segment], *, first: int, upto: int) -> list[RanRow]:
    """The runs of a thread that began up to a seq, in order, and the one with the first key wherever it began.

    The runs along a branch have keys in the order of their seqs. So the first one that began later ends the search.
    """
    found, known = list[RanRow](), first
    while True:
        rows = tx.all(_RUNS, thread=thread, first=first, limit=_AT_ONCE)
        for run in map(RanRow._make, rows):
            if run.first_seq <= upto or run.key == known:
                found.append(run)
            elif any(segment.has(run.branch, run.first_seq) for segment in segments):
                return found
        if len(rows) < _AT_ONCE:
            return found
        first = rows[-1][0] + 1


def first_run(tx: Tx, thread: int, segments: Sequence[Segment], seq: int) -> int:
    """A key: all runs along a branch with lower ones had ended before a seq. It looks back from the last run.

    Runs of other branches do not count: after a rewind, the runs that are new end at lower seqs. Nor do those that were
    closed as interrupted: they may have waited at that seq.
    """
    before = END
    while rows := tx.all(_RUNS_BACK, thread=thread, before=before, seq=seq, limit=_FEW_RUNS):
        for run in map(RanRow._make, rows):
            has_ended = run.ended_at is not None and run.stop_reason != "interrupted"
            if has_ended and any(segment.has(run.branch, run.first_seq) for segment in segments):
                return run.key + 1
        before = rows[-1][0]
    return 1


def made(tx: Tx, thread: FollowedRow, *, after: int, upto: int, version: int) -> list[MadeRow]:
    """The checkpoints that a thread has made at places behind one seq and up to another.

    Those that were made up to a version are left out. If there is such a version, the latest checkpoint is listed
    wherever it is.
    """
    is_own = "EXISTS (SELECT 1 FROM branches b WHERE b.key = c.line AND b.thread = :thread)"
    is_wanted = f"c.version > :version AND {is_own}"
    rows = tx.all(
        f"SELECT {_MADE} FROM segments s JOIN checkpoints c ON c.branch = s.source"
        " AND c.seq > CASE WHEN s.after_seq < :after THEN :after ELSE s.after_seq END"
        " AND c.seq <= CASE WHEN s.upto_seq < :upto THEN s.upto_seq ELSE :upto END"
        f" WHERE s.branch = :branch AND {is_wanted}"
        f" UNION SELECT {_MADE} FROM checkpoints c WHERE c.branch = :branch AND c.seq > :after AND c.seq <= :upto"
        f" AND {is_wanted}"
        f" UNION SELECT {_MADE} FROM checkpoints c WHERE c.key = :latest AND c.version > :version AND :version >= 0"
        f" AND {is_own} ORDER BY 3, 4",
        thread=thread.key,
        branch=thread.branch,
        after=after,
        upto=upto,
        version=version,
        latest=thread.latest,
    )
    return [MadeRow(*row) for row in rows]
