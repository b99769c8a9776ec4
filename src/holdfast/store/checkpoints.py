"""Checkpoints: named positions in the log, each with a state of its own.

- A thread shows the checkpoints of its line: those that were made on it, and those that it has inherited from the lines
  before, up to the point of the fork or the rewind and as they were then.
- A row never changes. Replacing and deleting hide it from the thread's lines; it is removed when no line shows it.
- Whoever writes holds the thread's row, so what a thread shows changes for one writer at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.errors import InputError, NotFound
from holdfast.store import branches, threads
from holdfast.store.branches import Point
from holdfast.store.database import Moment, Tx
from holdfast.store.leases import By
from holdfast.store.threads import ANY, VISITOR, Position, Stored

_LAST = 2**62  # no step and no version is behind it
_LOOK = 200  # so many of one name are looked at: what is in more than one thread is so at once


class New(NamedTuple):
    """A checkpoint that is to be made. Without a time, it is made now."""

    id: str
    step: int
    parent: str | None
    about: str
    body: str
    created_at: str | None = None


class Row(NamedTuple):
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
    def order(self) -> tuple[int, int]:
        return self.step, self.version


class Source(NamedTuple):
    """A line whose checkpoints another one shows: up to (step, version), as they were at a version of its thread."""

    line: int
    step: int = _LAST
    version: int = _LAST
    as_of: int = _LAST


class Anchor(NamedTuple):
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


class Place(NamedTuple):
    """How far the messages of a put agree with the thread's: up to a seq, so many, and whether those are all it has."""

    seq: int
    messages: int
    is_end: bool


_COLUMNS = ", ".join(f"c.{name}" for name in Row._fields)
_ANCHOR = ", ".join(Anchor._fields)
# A thread that was made by a process with an older holdfast, which still runs, has no line yet.
_LINE = "CASE WHEN t.line = 0 THEN t.branch ELSE t.line END"
# The lines whose checkpoints a line shows, as rows. (CROSS: SQLite goes through these, and not through all of a name.)
_LINES = (
    "(SELECT CAST(:line AS BIGINT) AS source, CAST(:last AS BIGINT) AS step, CAST(:last AS BIGINT) AS version,"
    " CAST(:last AS BIGINT) AS as_of"
    " UNION ALL SELECT source, step, version, as_of FROM inherited WHERE line = :line) i"
)
_SHOWN = (
    "c.line = :source AND (c.step, c.version) <= (:upto_step, :upto_version) AND c.version <= :as_of"
    " AND NOT EXISTS (SELECT 1 FROM hidden h WHERE h.line = :line AND h.checkpoint = c.key)"
)


# --- what a thread shows ----------------------------------------------------------------------------------------------


def anchor(tx: Tx, thread_id: str, *, namespace: str = "") -> Anchor | None:
    row = tx.one(
        f"SELECT {_ANCHOR} FROM threads WHERE namespace = :namespace AND id = :id", namespace=namespace, id=thread_id
    )
    return Anchor(*row) if row else None


def anchor_of(tx: Tx, key: int) -> Anchor:
    row = tx.one(f"SELECT {_ANCHOR} FROM threads WHERE key = :key", key=key)
    assert row is not None
    return Anchor(*row)


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
) -> list[Row]:
    """The checkpoints of a line, the highest step first: those below a step and up to a seq."""
    lines = sources(tx, line)
    skip = offset if len(lines) == 1 else 0  # of several lines, each may have all of the first ones
    wanted = min(limit + offset, _LAST) - skip
    found: list[Row] = []
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
        found += [Row(*row) for row in rows]
        found.sort(key=lambda row: row.order, reverse=True)
    return found[offset - skip : offset - skip + limit]


def named(tx: Tx, line: int, checkpoint_id: str) -> Row | None:
    """The checkpoint that a line shows under an id."""
    row = tx.one(
        f"SELECT {_COLUMNS} FROM {_LINES} CROSS JOIN checkpoints c WHERE c.line = i.source AND c.id = :id"
        " AND (c.step + 0, c.version) <= (i.step, i.version) AND c.version <= i.as_of AND NOT EXISTS"
        " (SELECT 1 FROM hidden h WHERE h.line = :line AND h.checkpoint = c.key)",  # + 0: the index of names is meant
        line=line,
        id=checkpoint_id,
        last=_LAST,
    )
    return Row(*row) if row else None


def has_any(tx: Tx, line: int, source: Source) -> bool:
    """Whether a line shows something of one of its sources."""
    return highest(tx, line, source) is not None


def highest(tx: Tx, line: int, source: Source) -> tuple[int, int] | None:
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


def lines(tx: Tx, thread: int) -> list[int]:
    """The lines of a thread: the one that it is on, and then those that rewinds have left, the last one first."""
    rows = tx.all(
        "SELECT b.key FROM branches b JOIN threads t ON t.key = b.thread WHERE b.thread = :thread AND (b.key = t.line"
        " OR EXISTS (SELECT 1 FROM checkpoints c WHERE c.line = b.key)"
        " OR EXISTS (SELECT 1 FROM inherited i WHERE i.line = b.key))"
        " ORDER BY CASE WHEN b.key = t.line THEN 0 ELSE 1 END, b.key DESC",
        thread=thread,
    )
    return [key for (key,) in rows]


def find(tx: Tx, thread: Anchor, checkpoint_id: str) -> tuple[int, Row] | None:
    """The checkpoint of a thread with this id, and a line that shows it; if no other one, then one that was left."""
    row = named(tx, thread.line, checkpoint_id)
    if row is not None:
        return thread.line, row
    for line in lines(tx, thread.key):
        row = named(tx, line, checkpoint_id)
        if row is not None:
            return line, row
    return None


def get(tx: Tx, thread_id: str, checkpoint_id: str | None, *, namespace: str = "") -> tuple[Row, str] | None:
    """A checkpoint of a thread (None: its latest), and its body."""
    thread = anchor(tx, thread_id, namespace=namespace)
    if thread is None:
        return None
    if checkpoint_id is None:
        return _by_key(tx, thread.latest)
    found = find(tx, thread, checkpoint_id)
    return None if found is None else _by_key(tx, found[1].key)


def _by_key(tx: Tx, key: int | None) -> tuple[Row, str] | None:
    row = None if key is None else tx.one(f"SELECT {_COLUMNS}, c.body FROM checkpoints c WHERE c.key = :key", key=key)
    return None if row is None else (Row(*row[:-1]), row[-1])


def is_there(tx: Tx, row: Row) -> bool:
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


def recent(tx: Tx, *, namespace: str = "", limit: int, offset: int) -> list[tuple[str, Row]]:
    """The latest checkpoint of each thread that has any, the newest first."""
    rows = tx.all(
        f"SELECT t.id, {_COLUMNS} FROM threads t JOIN checkpoints c ON c.key = t.latest"
        " WHERE t.namespace = :namespace AND t.latest IS NOT NULL"
        " ORDER BY t.latest_at DESC, t.id DESC LIMIT :limit OFFSET :offset",
        namespace=namespace,
        limit=limit,
        offset=offset,
    )
    return [(row[0], Row(*row[1:])) for row in rows]


def listed(tx: Tx, thread_id: str, *, limit: int, offset: int, namespace: str = "") -> list[Row]:
    """The checkpoints of a thread, the highest step first."""
    thread = anchor(tx, thread_id, namespace=namespace)
    return [] if thread is None else shown(tx, thread.line, limit=limit, offset=offset)


def _limits(source: Source) -> dict[str, int]:
    return {
        "source": source.line,
        "upto_step": source.step,
        "upto_version": source.version,
        "as_of": source.as_of,
    }


# --- making them ------------------------------------------------------------------------------------------------------


def put(
    tx: Tx,
    thread_id: str,
    new: New,
    tail: Sequence[Stored],
    place: Place,
    *,
    left: New,
    by: By = VISITOR,
    expect: int = ANY,
    namespace: str = "",
) -> Anchor:
    """Make a checkpoint whose messages agree with the thread's up to a place, and go on with a tail of their own.

    Behind the thread's last message, the tail is appended to it. Elsewhere it becomes a branch; the thread goes over to
    it, unless it is at a higher step already. What it leaves gets a name, if it has none: `left`. The thread is made if
    it is new.
    """
    size = len(tail) if place.is_end else 0
    key, _ = threads.advance(tx, thread_id, namespace, by, size=size, count=size, expect=expect)
    thread = _on_its_line(tx, key)
    freed = _make_room(tx, thread, new)
    if place.is_end:
        threads.add(tx, thread.branch, thread.head - size, tail)
        point = thread.point
    elif not tail:
        point = Point(thread.branch, place.seq, place.messages)
    else:
        point = _diverge(tx, thread, new, left, tail, place)
    insert(tx, thread, new, point)
    if freed:
        branches.collect(tx, freed)
    show_latest(tx, key)
    return thread


def put_here(
    tx: Tx, thread_id: str, new: New, *, by: By, expect: int = ANY, extra: str | None = None, namespace: str = ""
) -> Position:
    """Make a checkpoint of a thread as it stands, behind its latest one."""
    key, position = threads.advance(tx, thread_id, namespace, by, expect=expect)
    if extra is not None:
        threads.set_extra(tx, key, extra)
    thread = _on_its_line(tx, key)
    insert(tx, thread, following(tx, thread, new), thread.point)
    show_latest(tx, key)
    return position


def _on_its_line(tx: Tx, key: int) -> Anchor:
    tx.run(f"UPDATE threads AS t SET line = {_LINE} WHERE key = :key AND line = 0", key=key)
    return anchor_of(tx, key)


def append(
    tx: Tx,
    thread_id: str,
    messages: Sequence[Stored],
    *,
    new: New,
    by: By,
    extra: str | None = None,
    release: str = "",
    whole: bool = False,
    namespace: str = "",
) -> Position:
    """Add a run's messages, and a checkpoint of the thread as it stands then: for the end of a turn, when no call is
    open. It asks nothing, and costs no round trip."""
    position = threads.append(
        tx, thread_id, messages, namespace=namespace, by=by, extra=extra, release=release, whole=whole
    )
    _add_here(tx, thread_id, namespace, new)
    return position


def _add_here(tx: Tx, thread_id: str, namespace: str, new: New) -> None:
    tx.run(
        "INSERT INTO checkpoints (line, id, step, version, parent, branch, seq, message_count, about, body, extra,"
        f" created_at) SELECT {_LINE}, :id, COALESCE(c.step, 0) + 1, t.version, c.id, t.branch, t.head,"
        " t.message_count, :about, :body, t.extra, :now FROM threads t LEFT JOIN checkpoints c ON c.key = t.latest"
        " WHERE t.namespace = :namespace AND t.id = :thread",
        namespace=namespace,
        thread=thread_id,
        id=new.id,
        about=new.about,
        body=new.body,
        now=tx.now(),
    )
    tx.run(
        f"UPDATE threads AS t SET line = {_LINE},"
        f" latest = (SELECT MAX(c.key) FROM checkpoints c WHERE c.id = :id AND c.line = {_LINE}), latest_at = :now"
        " WHERE namespace = :namespace AND id = :thread",
        namespace=namespace,
        thread=thread_id,
        id=new.id,
        now=tx.now(),
    )


def following(tx: Tx, thread: Anchor, new: New) -> New:
    """The checkpoint as the child of the latest one."""
    latest = _by_key(tx, thread.latest)
    if latest is None:
        return new._replace(step=1)
    return new._replace(step=latest[0].step + 1, parent=latest[0].id)


def insert(tx: Tx, thread: Anchor, new: New, point: Point, *, line: int | None = None) -> None:
    """Add the row. Where results may still arrive before its point, it gets a branch where those places stay empty."""
    branch = branches.make(tx, thread.key, point) if branches.empty_places(tx, point) else point.branch
    now: Moment | str = tx.now() if new.created_at is None else new.created_at
    tx.run(
        "INSERT INTO checkpoints (line, id, step, version, parent, branch, seq, message_count, about, body, extra,"
        " created_at) VALUES (:line, :id, :step, :version, :parent, :branch, :seq, :count, :about, :body, :extra,"
        " :now)",
        line=line or thread.line,
        id=new.id,
        step=new.step,
        version=thread.version,
        parent=new.parent,
        branch=branch,
        seq=point.seq,
        count=point.messages,
        about=new.about,
        body=new.body,
        extra=thread.extra,
        now=now,
    )


def show_latest(tx: Tx, thread: int) -> None:
    """Note the thread's latest checkpoint, as lists show it."""
    line = anchor_of(tx, thread).line
    latest = shown(tx, line, limit=1)
    tx.run(
        "UPDATE threads SET latest = :latest, latest_at = :at WHERE key = :key",
        latest=latest[0].key if latest else None,
        at=latest[0].created_at if latest else None,
        key=thread,
    )


def _make_room(tx: Tx, thread: Anchor, new: New) -> list[int]:
    """Take the one away that has the same id; returns the branches that it was read along."""
    _refuse_cycle(tx, thread, new)
    old = named(tx, thread.line, new.id)
    return [] if old is None else drop(tx, thread.key, [old.key])


def _refuse_cycle(tx: Tx, thread: Anchor, new: New) -> None:
    """Refuse a checkpoint that would be its own ancestor. A new id can only be one if somebody names it as a parent."""
    if new.parent is None:
        return
    is_parent = tx.one(
        f"SELECT 1 FROM {_LINES} CROSS JOIN checkpoints c WHERE c.line = i.source AND c.parent = :id LIMIT 1",
        line=thread.line,
        id=new.id,
        last=_LAST,
    )
    if new.parent != new.id and is_parent is None:
        return
    path: list[str] = [new.id]
    parent: str | None = new.parent
    while parent is not None and parent != new.id and parent not in path:
        path.append(parent)
        row = named(tx, thread.line, parent)
        parent = row.parent if row else None
    if parent == new.id:
        raise InputError(
            f"checkpoint {new.id!r} of thread {thread.id!r} would be its own ancestor: "
            f"{' <- '.join(map(repr, [*path, new.id]))}; name another parent_checkpoint_id"
        )


def _diverge(tx: Tx, thread: Anchor, new: New, left: New, tail: Sequence[Stored], place: Place) -> Point:
    """Store the tail on a branch of its own, and let the thread go over to it."""
    start = Point(thread.branch, place.seq, place.messages)
    # What was replaced this time may be replaced each time, as a last message that says how things stand. Then only so
    # much gets a branch of its own, and the rest goes where the next one finds it.
    lasting = len(tail) - (thread.message_count - place.messages)
    if lasting > 0 and branches.is_long(tx, start):
        start, tail = _go_on(tx, thread, start, tail[:lasting]), tail[lasting:]
    branch = branches.make(tx, thread.key, start)
    threads.add(tx, branch, start.seq, tail)
    point = Point(branch, start.seq + len(tail), start.messages + len(tail))
    latest = _by_key(tx, thread.latest)
    if latest is None or new.step >= latest[0].step or latest[0].id == new.id:
        leave(tx, thread, left, apart=True)
        close_calls(tx, thread.key)
        go_over(tx, thread.key, point)
    return point


def _go_on(tx: Tx, thread: Anchor, start: Point, messages: Sequence[Stored]) -> Point:
    """Store messages behind a point, on a branch that later ones can go on with."""
    branch = branches.free_source(tx, thread.key, start)
    if branch is None:
        branch = branches.make(tx, thread.key, start)
    threads.add(tx, branch, start.seq, messages)
    return Point(branch, start.seq + len(messages), start.messages + len(messages))


def leave(tx: Tx, thread: Anchor, left: New, *, apart: bool = False) -> str | None:
    """Make sure that where the thread stands has a name: what it leaves stays reachable. Returns the name.

    `apart` keeps a new one out of the thread's line.
    """
    name = _name_of_head(tx, thread)
    if name is not None or (thread.head == 0 and thread.extra == "{}"):
        return name
    line = thread.line
    if apart:
        made = tx.one("INSERT INTO branches (thread) VALUES (:thread) RETURNING key", thread=thread.key)
        assert made is not None
        line = made[0]
    insert(tx, thread, following(tx, thread, left), thread.point, line=line)
    return left.id


def _name_of_head(tx: Tx, thread: Anchor) -> str | None:
    """The checkpoint that holds a thread as it stands, if there is one."""
    path = branches.segments_of(tx, thread.branch, thread.head)
    for branch in dict.fromkeys([thread.branch, *(segment.source for segment in path[-1:])]):
        rows = tx.all(
            "SELECT c.id, c.key FROM checkpoints c WHERE c.branch = :branch AND c.seq = :head AND c.extra = :extra"
            " ORDER BY c.key DESC LIMIT 10",
            branch=branch,
            head=thread.head,
            extra=thread.extra,
        )
        for name, key in rows:
            row = named(tx, thread.line, name)
            if row and row.key == key and branches.segments_of(tx, branch, thread.head) == path:
                return row.id
    return None


def go_over(tx: Tx, key: int, point: Point, extra: str | None = None, line: int | None = None) -> None:
    """Let a thread go on from a point. What a run had begun is over, and what had arrived of a reply is gone."""
    tx.run(
        "UPDATE threads SET branch = :branch, head = :head, message_count = :count, unledgered = :head, run = NULL,"
        " lease_owner = NULL, lease_until = NULL, extra = COALESCE(:extra, extra), line = COALESCE(:line, line)"
        " WHERE key = :key",
        branch=point.branch,
        head=point.seq,
        count=point.messages,
        extra=extra,
        line=line,
        key=key,
    )
    tx.run("DELETE FROM partials WHERE thread = :key", key=key)


def close_calls(tx: Tx, thread: int) -> None:
    """Close the calls that are open where a thread leaves: nobody is asked about them, unless it comes back."""
    tx.run(
        "UPDATE tool_calls SET status = CASE WHEN status = 'started' THEN 'unknown' ELSE 'left' END, ended_at = :now"
        " WHERE thread = :thread AND status IN ('waiting', 'answered', 'started')",
        thread=thread,
        now=tx.now(),
    )


# --- taking them away -------------------------------------------------------------------------------------------------


def drop(tx: Tx, thread: int, keys: Iterable[int]) -> list[int]:
    """Take checkpoints away from all lines of a thread; returns the branches along which nobody may read any more.

    A row that another thread's line still shows is only hidden.
    """
    mine = lines(tx, thread)
    freed: list[int] = []
    for key in keys:
        gone = tx.one(
            "DELETE FROM checkpoints WHERE key = :key AND (EXISTS"
            " (SELECT 1 FROM branches b WHERE b.key = checkpoints.line AND b.thread = :thread) OR EXISTS"
            " (SELECT 1 FROM hidden h WHERE h.line = checkpoints.line AND h.checkpoint = checkpoints.key))"
            f" AND NOT EXISTS (SELECT 1 FROM {_HEIRS} AND b.thread <> :thread) RETURNING branch",
            key=key,
            thread=thread,
        )
        if gone is not None:
            freed.append(gone[0])
        else:
            tx.many(
                "INSERT INTO hidden (line, checkpoint) VALUES (:line, :key) ON CONFLICT (line, checkpoint) DO NOTHING",
                [{"line": line, "key": key} for line in mine],
            )
    return freed


# The lines that have inherited a checkpoint and still show it.
_HEIRS = (
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
