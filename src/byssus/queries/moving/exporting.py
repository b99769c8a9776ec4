"""The queries of an export: one thread, or what is kept of a user, as a sequence of rows.

An export reads a thread in one snapshot, page by page. What it shows of other threads' branches, and nothing else of
them, is part of it. Branches are numbered from 1 in the order of their keys, and versions count from the lowest: so the
rows are the same wherever the thread is stored.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from byssus.queries.log import branches, runs
from byssus.queries.log.branches import Point, Segment
from byssus.queries.log.threads import END
from byssus.queries.moving import tables
from byssus.queries.moving.tables import Table
from byssus.queries.tasks import steps
from byssus.queries.versions import checkpoints, children
from byssus.queries.versions.checkpoints import Source
from byssus.queries.versions.deleting import IMPORTING, TRASH
from byssus.store.database import Row, Tx
from byssus.values.thread_key import ThreadKey

PAGE_ROWS = 500
PAGE_BYTES = 4_000_000

Fields = dict[str, Any]
Line = tuple[str, Fields]  # what kind of row it is, and its columns

LAST = 2**62  # as a step or a version: no limit

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
    marked: dict[int, Point]  # of each that is read, whose marks and summary count there, and up to where
    inherited: dict[int, list[Source]]
    lines: list[int]  # those that have checkpoints in it
    has_hidden: bool
    before: int  # the version before the lowest

    def version(self, value: int) -> int | None:
        return None if value == LAST else value - self.before


def export(tx: Tx, thread_key: ThreadKey, exported: Container[int] = ()) -> Iterator[Line]:
    """All rows of a thread, in the order in which an import takes them. Of an unknown thread, there are none.

    `exported` has the keys of the threads that the export has already: a child of one of them stays its child.
    """
    columns = ", ".join(f"t.{name}" for name in tables.THREADS.exported)
    row = tx.one(
        f"SELECT {columns}, p.saved_at, p.body, o.id, o.key, t.key FROM threads t"
        " LEFT JOIN partials p ON p.thread = t.key LEFT JOIN threads o ON o.key = t.parent"
        " WHERE t.namespace = :namespace AND t.id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    if row is None:
        return
    *values, parent, key = row
    thread = dict(zip((*tables.THREADS.exported, "saved_at", "partial", "below"), values, strict=True))
    if parent not in exported:
        thread |= {"below": None, "parent_call": None}
    plan = _planned(tx, key, thread["branch"], thread["line"])
    yield "thread", _numbered(plan, tables.THREADS, thread)
    yield from _branches(tx, plan)
    yield from _messages(tx, plan)
    yield from _marks(tx, plan)
    for kind, call in _by_key(tx, tables.TOOL_CALLS, thread=key):
        yield kind, _numbered(plan, tables.TOOL_CALLS, call)
    yield from _runs(tx, plan)
    yield from _checkpoints(tx, plan)
    yield from _by_key(tx, tables.INBOX, thread=key)
    yield from _tasks(tx, "thread = :thread", thread=key)
    for table in (tables.USAGE, tables.TOOL_USAGE):
        yield from _by_key(tx, table, thread=key)


def family(tx: Tx, thread_key: ThreadKey) -> dict[int, str]:
    """A thread and its children, and theirs: their keys and ids, each behind its parent."""
    row = tx.one(
        "SELECT key, id FROM threads WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return {} if row is None else {row[0]: row[1], **{child.key: child.id for child in children.below(tx, row[0])}}


def account(tx: Tx, user_id: str) -> Iterator[Line]:
    """What is kept of a user, what deleted threads have left them, and their tasks that belong to no thread.

    Of an unknown one, there is nothing.
    """
    row = tx.one(f"SELECT {', '.join(tables.USERS.exported)} FROM users WHERE id = :id", id=user_id)
    if row is None:
        return
    yield "account", dict(zip(tables.USERS.exported, row, strict=True))
    for table in (tables.USAGE, tables.TOOL_USAGE):
        yield from _by_key(tx, table, thread=0, owner=user_id)
    yield from _tasks(tx, "owner = :owner AND thread IS NULL", owner=user_id)


def _planned(tx: Tx, thread: int, branch: int, line: int) -> _Plan:
    inherited = _inherited(tx, thread)
    own = tx.all(
        "SELECT b.key FROM branches b WHERE b.thread = :thread"
        " AND EXISTS (SELECT 1 FROM checkpoints c WHERE c.line = b.key)",
        thread=thread,
    )
    sources = {source.line for several in inherited.values() for source in several}
    read = {branch: END}
    versions = [v for several in inherited.values() for s in several for v in (s.version, s.as_of) if v != LAST]
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
    marked = {key: branches.marks_point(tx, thread, branch, Point(key, upto, 0)) for key, upto in read.items()}
    called = tx.all("SELECT DISTINCT branch FROM tool_calls WHERE thread = :thread", thread=thread)
    needed = {branch, line, *read, *lines, *inherited, *sources, *(key for (key,) in called)}
    needed.update(segment.source for several in segments.values() for segment in several)
    numbers = {key: number for number, key in enumerate(sorted(needed), 1)}
    hidden = tx.one(
        "SELECT 1 FROM branches b JOIN hidden h ON h.line = b.key WHERE b.thread = :thread LIMIT 1", thread=thread
    )
    before = min(versions, default=1) - 1
    return _Plan(thread, numbers, segments, marked, inherited, lines, hidden is not None, before)


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


def _numbered(plan: _Plan, table: Table, row: Fields) -> Fields:
    """A row with the numbers of branches in place of their keys."""
    return {**row, **{name: plan.numbers[row[name]] for name in table.branches}}


def _branches(tx: Tx, plan: _Plan) -> Iterator[Line]:
    numbers = plan.numbers
    for key, number in numbers.items():
        segments = [
            [numbers[source], after, None if upto == END else upto]
            for source, after, upto in plan.segments.get(key, [])
        ]
        inherited = [
            [numbers[line], None if step == LAST else step, plan.version(version), plan.version(as_of)]
            for line, step, version, as_of in plan.inherited.get(key, [])
        ]
        summary = _summary(tx, plan.marked[key].branch) if key in plan.marked else ""
        yield (
            "branch",
            {"number": number, "segments": segments, "inherited": inherited, "summary": summary or tables.NO_SUMMARY},
        )


def _summary(tx: Tx, branch: int) -> str:
    row = tx.one("SELECT summary FROM branches WHERE key = :branch", branch=branch)
    return row[0] if row else ""


def _messages(tx: Tx, plan: _Plan) -> Iterator[Line]:
    read = sorted({segment for several in plan.segments.values() for segment in several})
    for source, after, upto in _joined(read):
        where = "branch = :branch AND seq > :after AND seq <= :upto"
        for row in _paged(tx, tables.MESSAGES, where, ("seq",), (after,), branch=source, upto=upto):
            yield "message", _numbered(plan, tables.MESSAGES, row)


def _marks(tx: Tx, plan: _Plan) -> Iterator[Line]:
    """In the order of the messages, and of each message's marks."""
    for key in sorted(plan.marked):
        bearer, upto, _ = plan.marked[key]
        if tx.one("SELECT 1 FROM marks WHERE branch = :bearer LIMIT 1", bearer=bearer) is None:
            continue
        for source, after, end in plan.segments[key]:
            for seq, mark in _marks_between(tx, bearer, source, after, min(end, upto)):
                yield "mark", {"branch": plan.numbers[key], "seq": seq, "mark": mark}


def _marks_between(tx: Tx, bearer: int, source: int, after: int, upto: int) -> Iterator[tuple[int, str]]:
    cursor = (after, LAST)  # the seq of a message, and the key of its mark
    while rows := tx.all(
        "SELECT m.seq, k.key, k.mark FROM messages m JOIN marks k ON k.message = m.key AND k.branch = :bearer"
        " WHERE m.branch = :source AND m.seq >= :seq AND m.seq <= :upto AND (m.seq, k.key) > (:seq, :key)"
        " ORDER BY m.seq, k.key LIMIT :limit",
        bearer=bearer,
        source=source,
        seq=cursor[0],
        key=cursor[1],
        upto=upto,
        limit=PAGE_ROWS,
    ):
        yield from ((seq, mark) for seq, _, mark in rows)
        cursor = rows[-1][:2]


def _runs(tx: Tx, plan: _Plan) -> Iterator[Line]:
    """The runs of a thread, each with its attempts. A branch that the export does not have is not named."""
    for row in _paged(tx, tables.RUNS, "thread = :thread AND key > :after", ("key",), (0,), thread=plan.thread):
        key, branch = row.pop("key"), row["branch"]
        attempted = [
            [owner, began_at, ended_at, outcome] for _, owner, _, began_at, ended_at, outcome in runs.attempts(tx, key)
        ]
        yield "run", {**row, "branch": plan.numbers.get(branch), "attempted": attempted}


def _joined(read: Iterable[Segment]) -> list[Segment]:
    """The same parts of the log, each once."""
    joined: list[Segment] = []
    for piece in read:
        if joined and joined[-1].source == piece.source and piece.after <= joined[-1].upto:
            joined[-1] = joined[-1]._replace(upto=max(joined[-1].upto, piece.upto))
        else:
            joined.append(piece)
    return joined


def _checkpoints(tx: Tx, plan: _Plan) -> Iterator[Line]:
    # Not by their keys: this order has an index. The row of a checkpoint says nothing by its place.
    where = f"{_SHOWN} AND (step, version, key) > (:after, :after_1, :after_2)"
    order = ("step", "version", "key")
    for line in plan.lines:
        keys = {"thread": plan.thread, "source": line}
        for row in _paged(tx, tables.CHECKPOINTS, where, order, (-1, -1, -1), **keys):
            key = row.pop("key")
            hidden = _hidden(tx, plan, key) if plan.has_hidden else []
            fields = _numbered(plan, tables.CHECKPOINTS, row)
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


def _tasks(tx: Tx, whose: str, **params: Any) -> Iterator[Line]:
    """Tasks, each with its steps."""
    for row in _paged(tx, tables.TASKS, f"{whose} AND key > :after", ("key",), (0,), **params):
        yield "task", {**row, "steps": [list(step) for step in steps.fields(tx, row.pop("key"))]}


def _by_key(tx: Tx, table: Table, **whose: Any) -> Iterator[Line]:
    where = " AND ".join(f"{name} = :{name}" for name in whose)
    for row in _paged(tx, table, f"{where} AND key > :after", ("key",), (0,), **whose):
        del row["key"]
        yield table.line, row


def _paged(tx: Tx, table: Table, where: str, order: Sequence[str], start: Row, **params: Any) -> Iterator[Fields]:
    """The exported rows of a table in an order, with a limit to the rows and the bytes that are in memory at once.

    `where` calls the table `c`, and goes on behind `:after`, `:after_1` and so on: the columns of the order.
    """
    columns = (*table.exported, *(column for column in order if column not in table.exported))
    size = " + ".join(f"COALESCE(octet_length({column}), 0)" for column in table.long) or "0"
    source = f"FROM {table.name} c WHERE {where} ORDER BY {', '.join(order)} LIMIT :limit"
    sizes_sql = f"SELECT {', '.join(order)}, {size} {source}"
    rows_sql = f"SELECT {', '.join(columns)} {source}"
    after, is_last = start, False
    while not is_last:
        bounds = {f"after_{n}" if n else "after": value for n, value in enumerate(after)} | params
        sizes = tx.all(sizes_sql, limit=PAGE_ROWS, **bounds)  # five hundred rows may be a kilobyte or ten gigabytes
        count = _fitting(sizes)
        is_last = count == len(sizes) < PAGE_ROWS
        for row in tx.all(rows_sql, limit=count, **bounds) if count else ():
            fields = dict(zip(columns, row, strict=True))
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
    indexes = {key: index for index, key in enumerate(keys)}
    found = []
    for key, index in indexes.items():
        row = tx.one("SELECT origin, origin_seq FROM threads WHERE key = :key", key=key)
        if row is not None and row[0] in indexes:
            found.append((index, indexes[row[0]], row[1]))
    return found
