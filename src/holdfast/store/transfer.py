"""The queries of an export and of an import: one thread as a sequence of rows, and back.

- An export reads a thread in one snapshot, page by page. What it shows of other threads' branches, and nothing else of
  them, is part of it. Branches are numbered from 1 in the order of their keys, and versions count from the lowest: so
  the rows are the same wherever the thread is stored.
- An import writes into hidden threads, in a namespace that nobody can name, and gives them their names in its last
  transaction. Until then a mark stands for it there, with a time that each page puts off. A mark whose time has run out
  belongs to an import that was interrupted: the next import puts what is left of it into the trash. (Had it been
  written into the trash, the next deletion in any process would have removed it while it was under way.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from holdfast.errors import InputError, StoreError
from holdfast.store import branches, checkpoints
from holdfast.store.branches import Segment
from holdfast.store.checkpoints import Source
from holdfast.store.database import Row, Tx
from holdfast.store.deleting import TRASH
from holdfast.store.threads import END

IMPORTING = "\x7fimport"
SECONDS = 600.0  # between two pages of an import, at most
PAGE_ROWS = 500
PAGE_BYTES = 4_000_000

Fields = dict[str, Any]
Line = tuple[str, Fields]  # what kind of row it is, and its columns

_LAST = 2**62  # as a step or a version: no limit
_THREAD = (
    *("id", "namespace", "owner", "created_at", "updated_at", "branch", "line", "head", "message_count"),
    *("unledgered", "run", "extra", "ttl"),
)
_MESSAGE = ("branch", "seq", "id", "role", "plain", "created_at", "body")
_CALL = (
    *("branch", "reply", "place", "call_id", "name", "recovery", "idempotency_key", "run", "status", "reason"),
    *("question", "attempts", "asked_at", "started_at", "ended_at", "arguments", "answer"),
)
_CHECKPOINT = (
    *("line", "id", "step", "version", "parent", "branch", "seq", "message_count", "created_at"),
    *("about", "body", "extra"),
)
_INBOX = ("kind", "id", "role", "created_at", "body")
_LONG = {"body", "arguments", "answer", "question", "about", "extra"}

# The checkpoints of a line that one of a thread's lines shows: that line itself, or one that has inherited from it.
_SHOWN = (
    "c.line = :source AND (EXISTS (SELECT 1 FROM branches l WHERE l.key = c.line AND l.thread = :thread AND NOT EXISTS"
    " (SELECT 1 FROM hidden h WHERE h.line = c.line AND h.checkpoint = c.key))"
    " OR EXISTS (SELECT 1 FROM inherited i JOIN branches b ON b.key = i.line WHERE i.source = c.line"
    " AND b.thread = :thread AND (c.step, c.version) <= (i.step, i.version) AND c.version <= i.as_of AND NOT EXISTS"
    " (SELECT 1 FROM hidden h WHERE h.line = i.line AND h.checkpoint = c.key)))"
)


# --- what belongs to a thread -----------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """The branches of an export, by their keys: their numbers, how they are read, and what they inherit."""

    thread: int
    numbers: dict[int, int]
    segments: dict[int, list[Segment]]
    inherited: dict[int, list[Source]]
    lines: list[int]  # those that have checkpoints in it
    has_hidden: bool
    before: int  # the version before the lowest

    def version(self, value: int) -> int | None:
        return None if value == _LAST else value - self.before


def export(tx: Tx, thread_id: str, *, namespace: str = "") -> Iterator[Line]:
    """All rows of a thread, in the order in which an import takes them. Of an unknown thread, there are none."""
    columns = ", ".join(f"t.{name}" for name in _THREAD)
    row = tx.one(
        f"SELECT {columns}, p.saved_at, p.body, t.key FROM threads t LEFT JOIN partials p ON p.thread = t.key"
        " WHERE t.namespace = :namespace AND t.id = :id",
        namespace=namespace,
        id=thread_id,
    )
    if row is None:
        return
    *values, key = row
    thread = dict(zip((*_THREAD, "saved_at", "partial"), values, strict=True))
    plan = _planned(tx, key, thread["branch"], thread["line"])
    yield "thread", _numbered(plan, thread, "branch", "line")
    yield from _branches(plan)
    yield from _messages(tx, plan)
    yield from _calls(tx, plan)
    yield from _checkpoints(tx, plan)
    yield from _inbox(tx, plan)


def _planned(tx: Tx, thread: int, branch: int, line: int) -> _Plan:
    inherited = _inherited(tx, thread)
    own = tx.all(
        "SELECT b.key FROM branches b WHERE b.thread = :thread"
        " AND EXISTS (SELECT 1 FROM checkpoints c WHERE c.line = b.key)",
        thread=thread,
    )
    sources = {source.line for several in inherited.values() for source in several}
    read = {branch: END}
    versions = [v for several in inherited.values() for s in several for v in (s.version, s.as_of) if v != _LAST]
    lines: list[int] = []
    for candidate in sorted({*sources, *(key for (key,) in own)}):
        rows = tx.all(
            f"SELECT c.branch, MAX(c.seq), MIN(c.version) FROM checkpoints c WHERE {_SHOWN} GROUP BY c.branch",
            source=candidate,
            thread=thread,
        )
        lines += [candidate] if rows else []
        versions += [version for _, _, version in rows]
        read.update({key: max(seq, read.get(key, 0)) for key, seq, _ in rows})
    segments = {key: branches.segments_of(tx, key, upto) for key, upto in read.items()}
    called = tx.all("SELECT DISTINCT branch FROM tool_calls WHERE thread = :thread", thread=thread)
    needed = {branch, line, *read, *lines, *inherited, *sources, *(key for (key,) in called)}
    needed.update(segment.source for several in segments.values() for segment in several)
    numbers = {key: number for number, key in enumerate(sorted(needed), 1)}
    hidden = tx.one(
        "SELECT 1 FROM branches b JOIN hidden h ON h.line = b.key WHERE b.thread = :thread LIMIT 1", thread=thread
    )
    return _Plan(thread, numbers, segments, inherited, lines, hidden is not None, min(versions, default=1) - 1)


def _inherited(tx: Tx, thread: int) -> dict[int, list[Source]]:
    """What the lines of a thread have inherited, where that is still something."""
    rows = tx.all(
        "SELECT i.line, i.source, i.step, i.version, i.as_of FROM inherited i JOIN branches b ON b.key = i.line"
        " WHERE b.thread = :thread ORDER BY i.line, i.source",
        thread=thread,
    )
    found: dict[int, list[Source]] = {}
    for line, *limits in rows:
        source = Source(*limits)
        if checkpoints.has_any(tx, line, source):
            found.setdefault(line, []).append(source)
    return found


def _numbered(plan: _Plan, fields: Fields, *names: str) -> Fields:
    return {**fields, **{name: plan.numbers[fields[name]] for name in names}}


def _branches(plan: _Plan) -> Iterator[Line]:
    numbers = plan.numbers
    for key, number in numbers.items():
        segments = [
            [numbers[source], after, None if upto == END else upto]
            for source, after, upto in plan.segments.get(key, [])
        ]
        inherited = [
            [numbers[line], None if step == _LAST else step, plan.version(version), plan.version(as_of)]
            for line, step, version, as_of in plan.inherited.get(key, [])
        ]
        yield "branch", {"number": number, "segments": segments, "inherited": inherited}


def _messages(tx: Tx, plan: _Plan) -> Iterator[Line]:
    read = sorted({segment for several in plan.segments.values() for segment in several})
    for source, after, upto in _joined(read):
        where = "branch = :branch AND seq > :after AND seq <= :upto"
        for row in _paged(tx, "messages", _MESSAGE, where, ("seq",), (after,), branch=source, upto=upto):
            yield "message", _numbered(plan, row, "branch")


def _joined(read: Iterable[Segment]) -> list[Segment]:
    """The same parts of the log, each once."""
    joined: list[Segment] = []
    for piece in read:
        if joined and joined[-1].source == piece.source and piece.after <= joined[-1].upto:
            joined[-1] = joined[-1]._replace(upto=max(joined[-1].upto, piece.upto))
        else:
            joined.append(piece)
    return joined


def _calls(tx: Tx, plan: _Plan) -> Iterator[Line]:
    where = "thread = :thread AND key > :after"
    for row in _paged(tx, "tool_calls", _CALL, where, ("key",), (0,), thread=plan.thread):
        del row["key"]
        yield "call", _numbered(plan, row, "branch")


def _checkpoints(tx: Tx, plan: _Plan) -> Iterator[Line]:
    # Not by their keys: this order has an index. The row of a checkpoint says nothing by its place.
    where = f"{_SHOWN} AND (c.step, c.version, c.key) > (:after, :after_1, :after_2)"
    order = ("step", "version", "key")
    for line in plan.lines:
        keys = {"thread": plan.thread, "source": line}
        for row in _paged(tx, "checkpoints c", _CHECKPOINT, where, order, (-1, -1, -1), **keys):
            key = row.pop("key")
            hidden = _hidden(tx, plan, key) if plan.has_hidden else []
            fields = _numbered(plan, row, "line", "branch")
            yield "checkpoint", {**fields, "version": plan.version(row["version"]), "hidden": hidden}


def _hidden(tx: Tx, plan: _Plan, checkpoint: int) -> list[int]:
    """The lines of the thread that do not show a checkpoint which another one shows."""
    rows = tx.all(
        "SELECT h.line FROM hidden h JOIN branches b ON b.key = h.line"
        " WHERE h.checkpoint = :key AND b.thread = :thread ORDER BY h.line",
        key=checkpoint,
        thread=plan.thread,
    )
    return [plan.numbers[line] for (line,) in rows if line in plan.numbers]


def _inbox(tx: Tx, plan: _Plan) -> Iterator[Line]:
    where = "thread = :thread AND key > :after"
    for row in _paged(tx, "inbox", _INBOX, where, ("key",), (0,), thread=plan.thread):
        del row["key"]
        yield "inbox", row


def _paged(
    tx: Tx, table: str, columns: Sequence[str], where: str, order: Sequence[str], start: Row, **params: Any
) -> Iterator[Fields]:
    """Rows of a table in an order, with a limit to the rows and the bytes that are in memory at once.

    `where` goes on behind `:after`, `:after_1` and so on, which are the columns of the order.
    """
    name, _, alias = table.partition(" ")
    dot = f"{alias}." if alias else ""
    sorting = ", ".join(f"{dot}{column}" for column in order)
    size = " + ".join(f"COALESCE(octet_length({dot}{column}), 0)" for column in columns if column in _LONG)
    sizes_sql = f"SELECT {sorting}, {size} FROM {name} {alias} WHERE {where} ORDER BY {sorting} LIMIT :limit"
    more = tuple(column for column in order if column not in columns)
    wanted = ", ".join(f"{dot}{column}" for column in (*columns, *more))
    rows_sql = f"SELECT {wanted} FROM {name} {alias} WHERE {where} ORDER BY {sorting} LIMIT :limit"
    after, is_last = start, False
    while not is_last:
        bounds = {f"after_{n}" if n else "after": value for n, value in enumerate(after)} | params
        sizes = tx.all(sizes_sql, limit=PAGE_ROWS, **bounds)  # five hundred rows may be a kilobyte or ten gigabytes
        count = _fitting(sizes)
        is_last = count == len(sizes) < PAGE_ROWS
        for row in tx.all(rows_sql, limit=count, **bounds) if count else ():
            fields = dict(zip((*columns, *more), row, strict=True))
            after = tuple(fields[column] for column in order)
            yield fields


def _fitting(sizes: list[Row]) -> int:
    """How many rows make a page."""
    count = total = 0
    for *_, size in sizes:
        total += size
        if count and total > PAGE_BYTES:
            break
        count += 1
    return count


class Owned(NamedTuple):
    """A thread of a user."""

    key: int
    namespace: str
    id: str


def owned(tx: Tx, user: str) -> list[Owned]:
    """The threads of a user, the oldest first."""
    rows = tx.all(
        "SELECT key, namespace, id FROM threads WHERE (owner = :user OR namespace = :user)"
        " AND namespace <> :trash AND namespace <> :importing ORDER BY key",
        user=user,
        trash=TRASH,
        importing=IMPORTING,
    )
    return [Owned(*row) for row in rows]


def origins(tx: Tx, keys: Sequence[int]) -> list[tuple[int, int, int]]:
    """Which of these threads were forked from which other ones of them, by their places, and up to which seq."""
    places = {key: place for place, key in enumerate(keys)}
    found = []
    for key, place in places.items():
        row = tx.one("SELECT origin, origin_seq FROM threads WHERE key = :key", key=key)
        if row is not None and row[0] in places:
            found.append((place, places[row[0]], row[1]))
    return found


# --- an import that is under way --------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """A thread that was imported and has no name yet."""

    key: int
    namespace: str
    id: str
    owner: str | None


class Arriving(NamedTuple):
    """How far an import is: the threads that are whole, and the one that is being written with its branches."""

    whole: tuple[Arrival, ...] = ()
    key: int = 0
    branches: dict[int, int] = {}  # the keys of its branches, by their numbers  # noqa: RUF012
    header: Fields = {}  # noqa: RUF012


def begin(tx: Tx, token: str, seconds: float) -> None:
    """Set the mark of an import."""
    _make(tx, token)
    _hold(tx, token, seconds)


def add(tx: Tx, token: str, arriving: Arriving, lines: Sequence[Line], seconds: float) -> Arriving:
    """Write a page of checked rows."""
    _hold(tx, token, seconds)
    for kind, rows in groupby(lines, key=lambda line: line[0]):
        fields = [row for _, row in rows]
        if kind == "thread":
            (header,) = fields
            arriving = _begin_thread(tx, token, arriving, header)
        elif kind == "end":
            (end,) = fields
            arriving = _end_thread(tx, arriving, end)
        else:
            _ADD[kind](tx, arriving, fields)
    return arriving


def publish(tx: Tx, token: str, arrivals: Sequence[Arrival], forks: Sequence[tuple[int, int, int]]) -> None:
    """Give all threads of an import their names: from now on they exist."""
    _hold(tx, token, 0)
    for key, namespace, thread_id, owner in arrivals:
        # A row that only holds the name: another writer may be about to make the same thread.
        held = _make(tx, thread_id, namespace)
        if held is None:
            raise InputError(
                f"there is already a thread {thread_id!r}; delete it first, or import under another id (as_id=, --as)"
            )
        tx.run("DELETE FROM threads WHERE key = :key", key=held)
        # As with any new thread, nobody may take it for one that they knew under this name.
        tx.run(
            "UPDATE threads SET namespace = :namespace, id = :id, owner = :owner, version = (SELECT MAX(value) FROM"
            " (SELECT value FROM floors UNION ALL SELECT version FROM threads WHERE key = :key) AS known),"
            " lease_epoch = COALESCE((SELECT MAX(value) FROM floors), 0) WHERE key = :key",
            namespace=namespace,
            id=thread_id,
            owner=owner,
            key=key,
        )
    tx.many(
        "UPDATE threads SET origin = :origin, origin_seq = :seq WHERE key = :key",
        [{"key": arrivals[fork].key, "origin": arrivals[origin].key, "seq": seq} for fork, origin, seq in forks],
    )
    tx.run("DELETE FROM threads WHERE namespace = :importing AND id = :token", importing=IMPORTING, token=token)


def discard(tx: Tx, token: str) -> None:
    """Put all that an import has written into the trash."""
    tx.run(
        "UPDATE threads SET namespace = :trash, id = CAST(key AS TEXT), branch = 0, line = 0, latest = NULL,"
        " latest_at = NULL, lease_until = NULL, run = NULL, ttl = NULL, extra = '{}'"
        " WHERE namespace = :importing AND (id = :token OR id LIKE :parts)",
        trash=TRASH,
        importing=IMPORTING,
        token=token,
        parts=f"{token}:%",
    )


def discard_stale(tx: Tx) -> bool:
    """Put into the trash what interrupted imports have left; returns whether there was anything."""
    rows = tx.all(
        "UPDATE threads SET lease_until = NULL WHERE namespace = :importing AND id NOT LIKE :parts"
        " AND (lease_until IS NULL OR lease_until <= :now) RETURNING id",  # a copy of a database has no times of leases
        importing=IMPORTING,
        parts="%:%",
        now=tx.now(),
    )
    for (token,) in rows:
        discard(tx, token)
    return bool(rows)


def _make(tx: Tx, thread_id: str, namespace: str = IMPORTING) -> int | None:
    row = tx.one(
        "INSERT INTO threads (namespace, id, branch, head, version, message_count, extra, created_at, updated_at)"
        " VALUES (:namespace, :id, 0, 0, 0, 0, '{}', :now, :now) ON CONFLICT (namespace, id) DO NOTHING RETURNING key",
        namespace=namespace,
        id=thread_id,
        now=tx.now(),
    )
    return row[0] if row else None


def _hold(tx: Tx, token: str, seconds: float) -> None:
    """Take the mark and put its end off: who finds it past its end waits for this page, and no page follows that."""
    row = tx.one(
        "UPDATE threads SET lease_until = :until WHERE namespace = :importing AND id = :token RETURNING key",
        until=tx.later(seconds),
        importing=IMPORTING,
        token=token,
    )
    if row is None:
        raise StoreError(f"this import stood still for more than {SECONDS:g} s and was given up; run it again")


def _begin_thread(tx: Tx, token: str, arriving: Arriving, header: Fields) -> Arriving:
    key = _make(tx, f"{token}:{len(arriving.whole)}")
    assert key is not None
    if header["partial"] is not None:
        tx.run(
            "INSERT INTO partials (thread, body, saved_at) VALUES (:thread, :body, :at)",
            thread=key,
            body=header["partial"],
            at=header["saved_at"],
        )
    return Arriving(arriving.whole, key, {}, header)


def _end_thread(tx: Tx, arriving: Arriving, end: Fields) -> Arriving:
    """Write the row of a thread, but for its name; and see that the thread is as its header says."""
    header, key, numbers = arriving.header, arriving.key, arriving.branches
    branch = numbers[header["branch"]]
    count = branches.count(tx, branch, header["head"])
    if count != header["message_count"]:
        raise InputError(
            f"line {end['at']}: thread {header['id']!r} should have {header['message_count']} messages, and has {count}"
        )
    row = tx.one("SELECT COUNT(*) FROM tool_calls WHERE thread = :key", key=key)
    if row is None or row[0] != end["calls"]:
        raise InputError(f"line {end['at']}: thread {header['id']!r} has a tool call twice")
    names = ("head", "message_count", "unledgered", "run", "extra", "ttl", "created_at", "updated_at")
    tx.run(
        f"UPDATE threads SET branch = :branch, line = :line, version = :version,"
        f" {', '.join(f'{name} = :{name}' for name in names)} WHERE key = :key",
        key=key,
        branch=branch,
        line=numbers[header["line"]],
        version=end["version"],
        **{name: header[name] for name in names},
    )
    checkpoints.show_latest(tx, key)
    arrival = Arrival(key, header["namespace"], header["id"], header["owner"])
    return Arriving((*arriving.whole, arrival))


def _insert(table: str, *columns: str) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"


_INSERT_MESSAGE = _insert("messages", *_MESSAGE)
_INSERT_CALL = _insert("tool_calls", "thread", *_CALL) + " ON CONFLICT (branch, reply, place) DO NOTHING"
_INSERT_CHECKPOINT = _insert("checkpoints", *_CHECKPOINT)
_INSERT_INBOX = _insert("inbox", "thread", *_INBOX)
_INSERT_INHERITED = _insert("inherited", "line", "source", "step", "version", "as_of")


def _add_branches(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    keys = arriving.branches
    for row in rows:
        made = tx.one("INSERT INTO branches (thread) VALUES (:thread) RETURNING key", thread=arriving.key)
        assert made is not None
        branch = keys[row["number"]] = made[0]  # a page that is written again comes to other keys, for all of them
        segments = row["segments"]
        branches.lay(
            tx, branch, [Segment(keys[s], after, END if upto is None else upto) for s, after, upto in segments]
        )
        inherited = [
            [branch, keys[source], *(_LAST if limit is None else limit for limit in limits)]
            for source, *limits in row["inherited"]
        ]
        columns = ("line", "source", "step", "version", "as_of")
        tx.many(_INSERT_INHERITED, [dict(zip(columns, values, strict=True)) for values in inherited])


def _add_messages(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    tx.many(_INSERT_MESSAGE, [_keyed(arriving, row, "branch") for row in rows])


def _add_calls(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    tx.many(_INSERT_CALL, [{**_keyed(arriving, row, "branch"), "thread": arriving.key} for row in rows])


def _add_checkpoints(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    for is_hidden, some in groupby(rows, key=lambda row: bool(row["hidden"])):
        keyed = [_keyed(arriving, row, "line", "branch") for row in some]
        if not is_hidden:
            tx.many(_INSERT_CHECKPOINT, [_without(row, "hidden") for row in keyed])
            continue
        for row in keyed:
            made = tx.one(f"{_INSERT_CHECKPOINT} RETURNING key", **_without(row, "hidden"))
            assert made is not None
            lines = [arriving.branches[number] for number in row["hidden"]]
            tx.many(
                "INSERT INTO hidden (line, checkpoint) VALUES (:line, :checkpoint)",
                [{"line": line, "checkpoint": made[0]} for line in lines],
            )


def _add_inbox(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    tx.many(_INSERT_INBOX, [{**row, "thread": arriving.key} for row in rows])


def _keyed(arriving: Arriving, row: Fields, *names: str) -> Fields:
    return {**row, **{name: arriving.branches[row[name]] for name in names}}


def _without(row: Fields, name: str) -> Fields:
    return {key: value for key, value in row.items() if key != name}


_ADD: dict[str, Callable[[Tx, Arriving, Sequence[Fields]], None]] = {
    "branch": _add_branches,
    "message": _add_messages,
    "call": _add_calls,
    "checkpoint": _add_checkpoints,
    "inbox": _add_inbox,
}
