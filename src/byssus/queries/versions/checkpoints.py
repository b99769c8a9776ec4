"""Checkpoints: named positions in the log, each with a state of its own.

- A thread shows the checkpoints of its line: those that were made on it, and those that it has inherited from the lines
  before, up to the point of the fork or the rewind and as they were then.
- A row never changes. Replacing and deleting hide it from the thread's lines; it is removed when no line shows it.
- A writer holds the lock of the thread's row, so what a thread shows changes for one writer at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from byssus.errors import InputError, NotFound
from byssus.queries.log.branches import Point
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

HIGHEST_STEP = 2**53 - 1  # any JSON reader can hold it
_LAST = 2**62  # no step and no version is behind it
_LOOK = 200  # rows of one id that are read: if several threads have it, these show it


class NewCheckpointRow(NamedTuple):
    """A checkpoint that is to be made. Without a time, it is made now."""

    id: str
    step: int
    parent: str | None
    about: str
    body: str
    created_at: str | None = None


class CheckpointRow(NamedTuple):
    """A checkpoint as lists need it."""

    key: int
    line: int
    id: str
    step: int
    version: int
    parent: str | None
    branch: int
    seq: int
    message_count: int
    about: str
    created_at: str

    @property
    def point(self) -> Point:
        return Point(self.branch, self.seq, self.message_count)

    @property
    def doomed(self) -> CheckpointRef:
        return CheckpointRef(self.key, self.version)

    @property
    def order(self) -> tuple[int, int]:
        return self.step, self.version


class CheckpointRef(NamedTuple):
    """A checkpoint that is to be removed: its key, and the version that the caller has seen."""

    key: int
    version: int


class Source(NamedTuple):
    """A line whose checkpoints another one shows: up to (step, version), as they were at a version of its thread."""

    line: int
    step: int = _LAST
    version: int = _LAST
    as_of: int = _LAST


class ThreadState(NamedTuple):
    """A thread, as far as its checkpoints depend on it."""

    key: int
    id: str
    branch: int
    head: int
    version: int
    message_count: int
    line: int
    latest: int | None
    extra: str
    owner: str | None
    ttl: str | None

    @property
    def point(self) -> Point:
        return Point(self.branch, self.head, self.message_count)


class Agreement(NamedTuple):
    """How far the messages of a put agree with the thread's: up to a seq, so many, and whether those are all it has."""

    seq: int
    messages: int
    is_end: bool


_COLUMNS = ", ".join(f"c.{name}" for name in CheckpointRow._fields)
_THREAD_STATE = ", ".join(ThreadState._fields)
# A thread that was made by a process with an older byssus, which still runs, has no line yet.
ON_LINE = "CASE WHEN t.line = 0 THEN t.branch ELSE t.line END"
# The lines whose checkpoints a line shows, as rows. (CROSS: SQLite goes through these, and not through all of a name.)
LINES = (
    "(SELECT CAST(:line AS BIGINT) AS source, CAST(:last AS BIGINT) AS step, CAST(:last AS BIGINT) AS version,"
    " CAST(:last AS BIGINT) AS as_of"
    " UNION ALL SELECT source, step, version, as_of FROM inherited WHERE line = :line) i"
)
_SHOWN = (
    "c.line = :source AND (c.step, c.version) <= (:upto_step, :upto_version) AND c.version <= :as_of"
    " AND NOT EXISTS (SELECT 1 FROM hidden h WHERE h.line = :line AND h.checkpoint = c.key)"
)


# --- what a thread shows ----------------------------------------------------------------------------------------------


def thread_state(tx: Tx, thread_key: ThreadKey) -> ThreadState | None:
    row = tx.one(
        f"SELECT {_THREAD_STATE} FROM threads WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return ThreadState(*row) if row else None


def thread_state_of(tx: Tx, key: int) -> ThreadState:
    row = tx.one(f"SELECT {_THREAD_STATE} FROM threads WHERE key = :key", key=key)
    assert row is not None
    return ThreadState(*row)


def sources(tx: Tx, line: int) -> list[Source]:
    """The lines whose checkpoints a line shows: its own, and then those that may have the highest steps."""
    rows = tx.all(
        "SELECT source, step, version, as_of FROM inherited WHERE line = :line"
        " ORDER BY step DESC, version DESC, source",
        line=line,
    )
    return [Source(line), *(Source(*row) for row in rows)]


def shown(
    tx: Tx, line: int, *, limit: int = _LAST, offset: int = 0, below: int = _LAST, upto_seq: int = _LAST
) -> list[CheckpointRow]:
    """The checkpoints of a line, the highest step first: those below a step and up to a seq."""
    lines = sources(tx, line)
    skip = offset if len(lines) == 1 else 0  # of several lines, each may have all of the first ones
    wanted = min(limit + offset, _LAST) - skip
    found: list[CheckpointRow] = []
    for source in lines:
        if 0 < wanted <= len(found) and found[wanted - 1].order > (source.step, source.version):
            break  # nothing that is left comes before these
        rows = tx.all(
            f"SELECT {_COLUMNS} FROM checkpoints c WHERE {_SHOWN} AND c.step < :below AND c.seq <= :upto_seq"
            " ORDER BY c.step DESC, c.version DESC LIMIT :limit OFFSET :skip",
            line=line,
            below=below,
            upto_seq=upto_seq,
            limit=wanted,
            skip=skip,
            **_limits(source),
        )
        found += [CheckpointRow(*row) for row in rows]
        found.sort(key=lambda row: row.order, reverse=True)
    return found[offset - skip : offset - skip + limit]


def named(tx: Tx, line: int, checkpoint_id: str) -> CheckpointRow | None:
    """The checkpoint that a line shows under an id."""
    row = tx.one(
        f"SELECT {_COLUMNS} FROM {LINES} CROSS JOIN checkpoints c WHERE c.line = i.source AND c.id = :id"
        " AND (c.step + 0, c.version) <= (i.step, i.version) AND c.version <= i.as_of AND NOT EXISTS"
        " (SELECT 1 FROM hidden h WHERE h.line = :line AND h.checkpoint = c.key)",  # + 0: the index of names is meant
        line=line,
        id=checkpoint_id,
        last=_LAST,
    )
    return CheckpointRow(*row) if row else None


def has_any(tx: Tx, line: int, source: Source) -> bool:
    """Whether a line shows something of one of its sources."""
    return _highest(tx, line, source) is not None


def _highest(tx: Tx, line: int, source: Source) -> tuple[int, int] | None:
    """The highest step, with its version, that a line shows of one of its sources."""
    row = tx.one(
        f"SELECT c.step, c.version FROM checkpoints c WHERE {_SHOWN} ORDER BY c.step DESC, c.version DESC LIMIT 1",
        line=line,
        **_limits(source),
    )
    return (row[0], row[1]) if row else None


def extra_of(tx: Tx, key: int) -> str:
    row = tx.one("SELECT c.extra FROM checkpoints c WHERE c.key = :key", key=key)
    assert row is not None
    extra: str = row[0]
    return extra


def inherit(tx: Tx, line: int, old: int, *, upto: tuple[int, int] = (_LAST, _LAST), as_of: int) -> None:
    """Let a new line show what another one shows, up to a step and its version."""
    for source in sources(tx, old):
        limit = min((source.step, source.version), upto)
        seen = source._replace(step=limit[0], version=limit[1], as_of=min(source.as_of, as_of))
        highest = _highest(tx, old, seen)  # a tight limit spares lists the lines of no use
        if highest is not None:
            tx.run(
                "INSERT INTO inherited (line, source, step, version, as_of)"
                " VALUES (:line, :source, :step, :version, :as_of)",
                line=line,
                source=seen.line,
                step=highest[0],
                version=highest[1],
                as_of=seen.as_of,
            )
    tx.run(
        "INSERT INTO hidden (line, checkpoint) SELECT :line, h.checkpoint FROM hidden h WHERE h.line = :old",
        line=line,
        old=old,
    )


_LINES = (
    "branches b JOIN threads t ON t.key = b.thread WHERE b.thread = :thread AND (b.key = t.line"
    " OR EXISTS (SELECT 1 FROM checkpoints c WHERE c.line = b.key)"
    " OR EXISTS (SELECT 1 FROM inherited i WHERE i.line = b.key))"
)


def lines(tx: Tx, thread: int) -> list[int]:
    """The lines of a thread: the one that it is on, and then those that rewinds have left, the last one first."""
    rows = tx.all(
        f"SELECT b.key FROM {_LINES} ORDER BY CASE WHEN b.key = t.line THEN 0 ELSE 1 END, b.key DESC", thread=thread
    )
    return [key for (key,) in rows]


def find(tx: Tx, thread: ThreadState, checkpoint_id: str) -> tuple[int, CheckpointRow] | None:
    """The checkpoint of a thread with this id, and a line that shows it; if no other one, then one that was left."""
    row = named(tx, thread.line, checkpoint_id)
    if row is not None:
        return thread.line, row
    for line in lines(tx, thread.key):
        row = named(tx, line, checkpoint_id)
        if row is not None:
            return line, row
    return None


def get(tx: Tx, thread_key: ThreadKey, checkpoint_id: str | None) -> tuple[CheckpointRow, str] | None:
    """A checkpoint of a thread (None: its latest), and its body."""
    thread = thread_state(tx, thread_key)
    if thread is None:
        return None
    if checkpoint_id is None:
        return _by_key(tx, thread.latest)
    found = find(tx, thread, checkpoint_id)
    return None if found is None else _by_key(tx, found[1].key)


def _by_key(tx: Tx, key: int | None) -> tuple[CheckpointRow, str] | None:
    row = None if key is None else tx.one(f"SELECT {_COLUMNS}, c.body FROM checkpoints c WHERE c.key = :key", key=key)
    return None if row is None else (CheckpointRow(*row[:-1]), row[-1])


def is_there(tx: Tx, row: CheckpointRow) -> bool:
    """Whether a checkpoint is still the one that it was."""
    found = tx.one("SELECT c.version, c.branch FROM checkpoints c WHERE c.key = :key", key=row.key)
    return found == (row.version, row.branch)


def thread_with(tx: Tx, checkpoint_id: str, *, namespace: str = "") -> str | None:
    """The id of the one thread that has a checkpoint of this name."""
    rows = tx.all(
        "SELECT t.id FROM checkpoints c JOIN branches b ON b.key = c.line JOIN threads t ON t.key = b.thread"
        " WHERE c.id = :id AND t.namespace = :namespace AND NOT EXISTS"
        " (SELECT 1 FROM hidden h WHERE h.line = c.line AND h.checkpoint = c.key) LIMIT :limit",
        id=checkpoint_id,
        namespace=namespace,
        limit=_LOOK,
    )
    rows += tx.all(  # those that only a fork still shows
        "SELECT t.id FROM checkpoints c JOIN hidden o ON o.line = c.line AND o.checkpoint = c.key"
        " JOIN inherited i ON i.source = c.line AND (c.step, c.version) <= (i.step, i.version) AND c.version <= i.as_of"
        " JOIN branches b ON b.key = i.line JOIN threads t ON t.key = b.thread"
        " WHERE c.id = :id AND t.namespace = :namespace AND NOT EXISTS"
        " (SELECT 1 FROM hidden h WHERE h.line = i.line AND h.checkpoint = c.key) LIMIT :limit",
        id=checkpoint_id,
        namespace=namespace,
        limit=_LOOK,
    )
    names = sorted({name for (name,) in rows})
    if len(names) > 1:
        some = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        raise InputError(
            f"checkpoint {checkpoint_id!r} is in more than one thread ({some}); pass thread_id= to say which is meant"
        )
    return names[0] if names else None


def recent(tx: Tx, *, namespace: str = "", limit: int, offset: int) -> list[tuple[str, CheckpointRow]]:
    """The latest checkpoint of each thread that has any, the newest first."""
    rows = tx.all(
        f"SELECT t.id, {_COLUMNS} FROM threads t JOIN checkpoints c ON c.key = t.latest"
        " WHERE t.namespace = :namespace AND t.latest IS NOT NULL"
        " ORDER BY t.latest_at DESC, t.id DESC LIMIT :limit OFFSET :offset",
        namespace=namespace,
        limit=limit,
        offset=offset,
    )
    return [(row[0], CheckpointRow(*row[1:])) for row in rows]


def list_page(tx: Tx, thread_key: ThreadKey, *, limit: int, offset: int) -> list[CheckpointRow]:
    """The checkpoints of a thread, the highest step first."""
    thread = thread_state(tx, thread_key)
    return [] if thread is None else shown(tx, thread.line, limit=limit, offset=offset)


def _limits(source: Source) -> dict[str, int]:
    return {
        "source": source.line,
        "upto_step": source.step,
        "upto_version": source.version,
        "as_of": source.as_of,
    }


# --- the latest one ---------------------------------------------------------------------------------------------------


def show_latest(tx: Tx, thread: int) -> None:
    """Note the thread's latest checkpoint, as lists show it."""
    line = thread_state_of(tx, thread).line
    latest = shown(tx, line, limit=1)
    tx.run(
        "UPDATE threads SET latest = :latest, latest_at = :at WHERE key = :key",
        latest=latest[0].key if latest else None,
        at=latest[0].created_at if latest else None,
        key=thread,
    )


# --- removing them ----------------------------------------------------------------------------------------------------


class DroppedCheckpoints(NamedTuple):
    """The keys of the checkpoints that were removed, and the branches that may not be read any more."""

    checkpoints: list[int]
    branches: list[int]


def drop(tx: Tx, thread: int, doomed: Iterable[CheckpointRef]) -> DroppedCheckpoints:
    """Remove checkpoints from all lines of a thread. A row that another thread's line still shows is only hidden."""
    taken, freed = [], []
    for key, version in sorted(doomed):
        # Locked first: if two threads remove the same one at once, the second sees that it is the last. Checked by its
        # version: the key of a deleted checkpoint may have been given to another one.
        held = tx.one(
            "UPDATE checkpoints SET step = step WHERE key = :key AND version = :version RETURNING key",
            key=key,
            version=version,
        )
        if held is None:
            continue
        gone = tx.one(
            "DELETE FROM checkpoints WHERE key = :key AND (EXISTS"
            " (SELECT 1 FROM branches b WHERE b.key = checkpoints.line AND b.thread = :thread) OR EXISTS"
            " (SELECT 1 FROM hidden h WHERE h.line = checkpoints.line AND h.checkpoint = checkpoints.key))"
            f" AND NOT EXISTS (SELECT 1 FROM {_INHERITING_LINES} AND b.thread <> :thread) RETURNING branch",
            key=key,
            thread=thread,
        )
        if gone is not None:
            freed.append(gone[0])
        if gone is not None or _hide(tx, thread, key):
            taken.append(key)
    return DroppedCheckpoints(taken, freed)


def _hide(tx: Tx, thread: int, key: int) -> bool:
    """Let no line of a thread show a checkpoint; False if none of them did."""
    hidden = tx.all(
        f"INSERT INTO hidden (line, checkpoint) SELECT b.key, CAST(:key AS BIGINT) FROM {_LINES}"
        " ON CONFLICT (line, checkpoint) DO NOTHING RETURNING line",
        thread=thread,
        key=key,
    )
    return bool(hidden)


# The lines that have inherited a checkpoint and still show it.
_INHERITING_LINES = (
    "inherited i JOIN branches b ON b.key = i.line WHERE i.source = checkpoints.line"
    " AND (checkpoints.step, checkpoints.version) <= (i.step, i.version) AND checkpoints.version <= i.as_of"
    " AND NOT EXISTS (SELECT 1 FROM hidden h WHERE h.line = i.line AND h.checkpoint = checkpoints.key)"
)


def unknown_checkpoint(thread_id: str, checkpoint_id: str) -> NotFound:
    return NotFound(
        f"thread {thread_id!r} has no checkpoint {checkpoint_id!r}; list_checkpoints({thread_id!r}) names them"
    )


def unknown_thread(thread_id: str) -> NotFound:
    return NotFound(f"there is no thread {thread_id!r}; threads() lists them")
