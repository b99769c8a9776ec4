"""The queries of an import: rows become a thread again.

An import writes into hidden threads, in a namespace that no caller can name, and gives them their names in its last
transaction. Until then a mark stands for it there, with a time that each page puts off. A mark whose time has run out
belongs to an import that was interrupted: the next import puts what is left of it into the trash. (Had it been written
into the trash, the next deletion in any process would have removed it while it was under way.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from byssus.errors import InputError, NotFound, StoreError
from byssus.queries.accounts import quotas, usage, users
from byssus.queries.accounts.users import Leaf
from byssus.queries.log import branches
from byssus.queries.log.branches import Segment
from byssus.queries.log.threads import END
from byssus.queries.moving import tables
from byssus.queries.moving.exporting import LAST, Fields, Line
from byssus.queries.moving.tables import Table
from byssus.queries.tasks import owners, steps
from byssus.queries.versions import checkpoints
from byssus.queries.versions.deleting import IMPORTING, TRASH
from byssus.store.database import Tx
from byssus.store.jobs import about_tasks

SECONDS = 600.0  # between two pages of an import, at most


class Arrival(NamedTuple):
    """A thread that was imported and has no name yet."""

    key: int
    namespace: str
    id: str
    owner: str | None
    tasks: int = 0
    below: str | None = None  # the id of the thread whose child it is


class Account(NamedTuple):
    """A user as they were exported, the leaves of their preferences, and how many rows deleted threads had left."""

    id: str
    fields: Fields
    leaves: Sequence[Leaf]
    left: dict[str, int]


class Arriving(NamedTuple):
    """How far an import is: the threads that are whole, and the one that is being written with its branches."""

    whole: tuple[Arrival, ...] = ()
    key: int = 0
    branches: dict[int, int] = {}  # the keys of its branches, by their numbers  # noqa: RUF012
    header: Fields = {}  # noqa: RUF012
    token: str = ""
    mark: int = 0  # the key of the import's mark: what belongs to no thread is written there


def begin(tx: Tx, token: str, seconds: float) -> None:
    """Set the mark of an import."""
    _make(tx, token)
    _hold(tx, token, seconds)


def add(tx: Tx, token: str, arriving: Arriving, lines: Sequence[Line], seconds: float) -> Arriving:
    """Write a page of checked rows."""
    arriving = arriving._replace(token=token, mark=_hold(tx, token, seconds))
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


@about_tasks
def publish(
    tx: Tx,
    token: str,
    arrivals: Sequence[Arrival],
    forks: Sequence[tuple[int, int, int]],
    account: Account | None = None,
    *,
    makes_users: bool,
) -> None:
    """Give all threads of an import their names: from now on they exist.

    Those who own them must exist, or are made.
    """
    mark = _hold(tx, token, 0)
    _set_parents(tx, arrivals)
    for key, namespace, thread_id, owner, tasks, _ in arrivals:
        # A row that only holds the name: another writer may be about to make the same thread.
        held = _make(tx, thread_id, namespace)
        if held is None:
            raise InputError(
                f"there is already a thread {thread_id!r}; delete it first, or import under another id (as_id=, --as)"
            )
        tx.run("DELETE FROM threads WHERE key = :key", key=held)
        # As with any new thread: a writer that knew another thread of this name must notice.
        tx.run(
            "UPDATE threads SET namespace = :namespace, id = :id, owner = :owner, imported_at = :now,"
            " version = (SELECT MAX(value) FROM"
            " (SELECT value FROM floors UNION ALL SELECT version FROM threads WHERE key = :key) AS known),"
            " lease_epoch = COALESCE((SELECT MAX(value) FROM floors), 0) WHERE key = :key",
            namespace=namespace,
            id=thread_id,
            owner=owner,
            now=tx.now(),
            key=key,
        )
        if tasks:
            _name_tasks(tx, token, mark, key)
        _name_calls(tx, token, key)
    tx.many(
        "UPDATE threads SET origin = :origin, origin_seq = :seq WHERE key = :key",
        [{"key": arrivals[fork].key, "origin": arrivals[origin].key, "seq": seq} for fork, origin, seq in forks],
    )
    if account is not None:
        _settle_account(tx, token, mark, account)
    for owner in sorted({arrival.owner for arrival in arrivals if arrival.owner is not None}):
        if makes_users:
            _hold_user(tx, owner)
        else:
            quotas.take(tx, owner)
    tx.run("DELETE FROM threads WHERE key = :mark", mark=mark)


def _set_parents(tx: Tx, arrivals: Sequence[Arrival]) -> None:
    """Make child threads children again: each line names the parent's id."""
    keys = {(arrival.namespace, arrival.id): arrival.key for arrival in arrivals}
    tx.many(
        "UPDATE threads SET parent = :parent WHERE key = :key",
        [{"key": each.key, "parent": keys[each.namespace, each.below]} for each in arrivals if each.below is not None],
    )


def _name_tasks(tx: Tx, token: str, mark: int, thread: int) -> None:
    """Give tasks the ids that they had, where these are free; else new ones."""
    own = {"thread": thread, "start": len(token) + 2}
    # Rows that only hold the ids, as with threads.
    held = tx.all(
        "INSERT INTO tasks (thread, id, type, status, priority, payload, max_retries, retry_count, created_at,"
        " updated_at) SELECT :mark, substr(id, :start), '', '', 0, '', 0, 0, '', '' FROM tasks WHERE thread = :thread"
        " ORDER BY key ON CONFLICT (id) DO NOTHING RETURNING id",
        mark=mark,
        **own,
    )
    tx.run("DELETE FROM tasks WHERE thread = :mark AND status = ''", mark=mark)
    free = {name for (name,) in held}
    rows = tx.all("SELECT key, substr(id, :start) FROM tasks WHERE thread = :thread ORDER BY key", **own)
    tx.many(
        "UPDATE tasks SET id = :id, status = substr(status, :start) WHERE key = :key",
        [
            {"key": key, "id": name if name in free else f"{token}-{key}", "start": len(_ARRIVING) + 1}
            for key, name in rows
        ],
    )
    owners.follow(tx, thread)


def _name_calls(tx: Tx, token: str, thread: int) -> None:
    """The same for calls: those that an application has logged are looked up by their ids, and no key is shared.

    A child is found by the key of its call.
    """
    tx.run(
        "UPDATE threads SET parent_call = :token || (SELECT CAST(c.key AS TEXT) FROM tool_calls c WHERE"
        " c.thread = :thread AND c.reply > 0 AND c.idempotency_key = threads.parent_call) WHERE parent = :thread"
        " AND EXISTS (SELECT 1 FROM tool_calls c JOIN tool_calls o ON o.idempotency_key = c.idempotency_key"
        " AND o.thread <> :thread JOIN threads t ON t.key = o.thread WHERE c.thread = :thread AND c.reply > 0"
        " AND c.idempotency_key = threads.parent_call AND t.namespace <> :trash AND t.namespace <> :importing)",
        token=f"{token}-",
        thread=thread,
        trash=TRASH,
        importing=IMPORTING,
    )
    tx.run(
        "UPDATE tool_calls SET idempotency_key = :token || CAST(key AS TEXT) WHERE thread = :thread AND reply > 0"
        " AND EXISTS (SELECT 1 FROM tool_calls o JOIN threads t ON t.key = o.thread"
        " WHERE o.idempotency_key = tool_calls.idempotency_key AND o.thread <> :thread"
        " AND t.namespace <> :trash AND t.namespace <> :importing)",
        token=f"{token}-",
        thread=thread,
        trash=TRASH,
        importing=IMPORTING,
    )
    tx.run(
        "UPDATE tool_calls SET call_id = :token || CAST(key AS TEXT), idempotency_key = :token || CAST(key AS TEXT)"
        " WHERE thread = :thread AND reply = 0 AND EXISTS (SELECT 1 FROM tool_calls o"
        " JOIN threads t ON t.key = o.thread WHERE o.idempotency_key = tool_calls.idempotency_key"
        " AND o.thread <> :thread AND t.namespace = '')",
        token=f"{token}-",
        thread=thread,
    )


_LEFT = {"usage": "usage", "tool_usage": "tool_usage", "task": "tasks"}  # of a user and no thread: their tables


def _settle_account(tx: Tx, token: str, mark: int, account: Account) -> None:
    """Make a user as they were, with what deleted threads had left them; one who is there stays as they are."""
    for kind, count in account.left.items():
        if _count(tx, _LEFT[kind], mark) != count:
            raise InputError(f"user {account.id!r} has a row of {kind} twice")
    made = tx.one(f"{_INSERT_USER} RETURNING key", id=account.id, **account.fields)
    if made is None:
        usage.forget(tx, mark)
        return
    tx.many(
        "INSERT INTO preferences (owner, path, value) VALUES (:owner, :path, :value)",
        [{"owner": made[0], "path": path, "value": value} for path, value in account.leaves],
    )
    _name_tasks(tx, token, mark, mark)
    for kind, table in _LEFT.items():
        thread = "NULL" if kind == "task" else "0"
        tx.run(f"UPDATE {table} SET thread = {thread}, owner = :user WHERE thread = :mark", user=account.id, mark=mark)


def _hold_user(tx: Tx, user_id: str) -> None:
    """Take a user's row, made if there is none."""
    while True:
        users.ensure(tx, user_id)
        with suppress(NotFound):  # deleted in between
            return quotas.take(tx, user_id)


def _make(tx: Tx, thread_id: str, namespace: str = IMPORTING) -> int | None:
    row = tx.one(
        "INSERT INTO threads (namespace, id, branch, head, version, message_count, extra, created_at, updated_at)"
        " VALUES (:namespace, :id, 0, 0, 0, 0, '{}', :now, :now) ON CONFLICT (namespace, id) DO NOTHING RETURNING key",
        namespace=namespace,
        id=thread_id,
        now=tx.now(),
    )
    return row[0] if row else None


def _hold(tx: Tx, token: str, seconds: float) -> int:
    """Take the mark and put its end off: who finds it past its end waits for this page, and no page follows that.

    Returns its key.
    """
    row = tx.one(
        "UPDATE threads SET lease_until = :until WHERE namespace = :importing AND id = :token RETURNING key",
        until=tx.after(seconds),
        importing=IMPORTING,
        token=token,
    )
    if row is None:
        raise StoreError(f"this import stood still for more than {SECONDS:g} s and was given up; run it again")
    key: int = row[0]
    return key


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
    return arriving._replace(key=key, branches={}, header=header)


def _end_thread(tx: Tx, arriving: Arriving, end: Fields) -> Arriving:
    """Write the row of a thread, but for its name; and see that the thread is as its header says."""
    header, key = arriving.header, arriving.key
    count = branches.count(tx, arriving.branches[header["branch"]], header["head"])
    if count != header["message_count"]:
        raise InputError(
            f"line {end['at']}: thread {header['id']!r} should have {header['message_count']} messages, and has {count}"
        )
    for table, (counted, what) in _COUNTED.items():
        if _count(tx, table, key) != end[counted]:
            raise InputError(f"line {end['at']}: thread {header['id']!r} has {what} twice")
    if _count(tx, "marks k JOIN branches b ON b.key = k.branch", key) != end["marks"]:
        raise InputError(f"line {end['at']}: thread {header['id']!r} has a mark where there is no message")
    row = _keyed(arriving, tables.THREADS, header)
    tx.run(_UPDATE_THREAD, key=key, version=end["version"], **{name: row[name] for name in _THREAD_COLUMNS})
    checkpoints.show_latest(tx, key)
    _find_by_name(tx, key)
    arrival = Arrival(key, header["namespace"], header["id"], header["owner"], end["tasks"], header["below"])
    return arriving._replace(whole=(*arriving.whole, arrival), key=0, branches={}, header={})


def _find_by_name(tx: Tx, thread: int) -> None:
    """Let the messages of a thread be found by their ids through the index, if they are all in it."""
    tx.run(
        "UPDATE threads SET named = 1 WHERE key = :thread AND NOT EXISTS (SELECT 1 FROM segments s JOIN messages m"
        " ON m.branch = s.source AND m.seq > s.after_seq AND m.seq <= s.upto_seq"
        " WHERE s.branch = threads.branch AND m.plain = 0)",
        thread=thread,
    )


# What is passed over when it comes a second time, and then missed at the end.
_COUNTED = {
    "tool_calls": ("calls", "a tool call"),
    "runs": ("runs", "a run"),
    "tasks": ("tasks", "a task"),
    "usage": ("usage", "a model's usage of a day"),
    "tool_usage": ("tool_usage", "a tool's usage of a day"),
}


def _count(tx: Tx, table: str, thread: int) -> int:
    row = tx.one(f"SELECT COUNT(*) FROM {table} WHERE thread = :thread", thread=thread)
    assert row is not None
    return int(row[0])


def _insert(table: Table, *more: str, unique: bool = False) -> str:
    """Insert what is exported of a row, and more columns; if its unique name is taken, `unique` passes it over."""
    columns = (*more, *table.exported)
    values = ", ".join(f":{name}" for name in columns)
    conflict = f" ON CONFLICT ({', '.join(table.unique)}) DO NOTHING" if unique else ""
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({values}){conflict}"


_INSERT_MESSAGE = _insert(tables.MESSAGES)
_INSERT_MARK = (  # which is passed over if there is no message, and then missed at the end
    "INSERT INTO marks (branch, message, mark) SELECT s.branch, m.key, :mark FROM segments s JOIN messages m"
    " ON m.branch = s.source AND m.seq = :seq WHERE s.branch = :branch AND s.after_seq < :seq AND s.upto_seq >= :seq"
)
_INSERT_CALL = _insert(tables.TOOL_CALLS, "thread", unique=True)
_INSERT_RUN = _insert(tables.RUNS, "thread", unique=True)
_INSERT_ATTEMPT = (
    "INSERT INTO run_attempts (run, number, owner, epoch, began_at, ended_at, outcome)"
    " VALUES (:run, :number, :owner, 0, :began_at, :ended_at, :outcome)"
)
_INSERT_CHECKPOINT = _insert(tables.CHECKPOINTS)
_INSERT_INBOX = _insert(tables.INBOX, "thread")
_INSERT_TASK = _insert(tables.TASKS, "thread", unique=True)
_ARRIVING = "arriving "
_INSERT_USAGE = _insert(tables.USAGE, "thread", "owner", unique=True)
_INSERT_TOOL_USAGE = _insert(tables.TOOL_USAGE, "thread", "owner", unique=True)
_INSERT_INHERITED = _insert(tables.INHERITED, *tables.INHERITED.columns)
_INSERT_USER = _insert(tables.USERS, "id", unique=True)
# Until it is published, an imported thread has no name and no owner.
_THREAD_COLUMNS = tuple(name for name in tables.THREADS.exported if name not in ("namespace", "id", "owner"))
_UPDATE_THREAD = (
    f"UPDATE threads SET version = :version, {', '.join(f'{name} = :{name}' for name in _THREAD_COLUMNS)}"
    " WHERE key = :key"
)


def _add_branches(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    keys = arriving.branches
    for row in rows:
        made = tx.one(
            "INSERT INTO branches (thread, uncounted, summary) VALUES (:thread, 1, :summary) RETURNING key",
            thread=arriving.key,
            summary="" if row["summary"] == tables.NO_SUMMARY else row["summary"],
        )
        assert made is not None
        branch = keys[row["number"]] = made[0]  # a page that is written again comes to other keys, for all of them
        segments = row["segments"]
        branches.write_segments(
            tx, branch, [Segment(keys[s], after, END if upto is None else upto) for s, after, upto in segments]
        )
        inherited = [
            (branch, keys[source], *(LAST if limit is None else limit for limit in limits))
            for source, *limits in row["inherited"]
        ]
        tx.many(_INSERT_INHERITED, [tables.INHERITED.values_of(row) for row in inherited])


def _add_messages(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    tx.many(_INSERT_MESSAGE, [_keyed(arriving, tables.MESSAGES, row) for row in rows])


def _add_marks(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    tx.many(_INSERT_MARK, [_keyed(arriving, tables.MARKS, row) for row in rows])


def _add_calls(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    tx.many(_INSERT_CALL, [{**_keyed(arriving, tables.TOOL_CALLS, row), "thread": arriving.key} for row in rows])


def _add_runs(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    for row in rows:
        branch = None if row["branch"] is None else arriving.branches[row["branch"]]
        values = {**_without(row, "attempted"), "branch": branch, "thread": arriving.key}
        made = tx.one(f"{_INSERT_RUN} RETURNING key", **values)
        if made is None:  # it came a second time, which is noticed at the end
            continue
        attempts = [
            {"run": made[0], "number": n, "owner": owner, "began_at": began, "ended_at": ended, "outcome": outcome}
            for n, (owner, began, ended, outcome) in enumerate(row["attempted"], 1)
        ]
        tx.many(_INSERT_ATTEMPT, attempts)


def _add_checkpoints(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    for is_hidden, some in groupby(rows, key=lambda row: bool(row["hidden"])):
        keyed = [_keyed(arriving, tables.CHECKPOINTS, row) for row in some]
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


def _add_tasks(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    # Under temporary ids, until the thread exists.
    thread = arriving.key or arriving.mark
    for row in rows:
        status = _ARRIVING + row["status"]  # in which no worker finds it
        values = {**_without(row, "steps"), "id": f"{arriving.token}:{row['id']}", "thread": thread, "status": status}
        made = tx.one(f"{_INSERT_TASK} RETURNING key", **values)
        if made is not None:  # else it came a second time, which is noticed at the end
            steps.add(tx, made[0], row["steps"])


def _add_usage(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    tx.many(_INSERT_USAGE, [{**row, "thread": arriving.key or arriving.mark, "owner": ""} for row in rows])


def _add_tool_usage(tx: Tx, arriving: Arriving, rows: Sequence[Fields]) -> None:
    tx.many(_INSERT_TOOL_USAGE, [{**row, "thread": arriving.key or arriving.mark, "owner": ""} for row in rows])


def _keyed(arriving: Arriving, table: Table, row: Fields) -> Fields:
    """A row with the keys of branches in place of their numbers."""
    return {**row, **{name: arriving.branches[row[name]] for name in table.branches}}


def _without(row: Fields, name: str) -> Fields:
    return {key: value for key, value in row.items() if key != name}


_ADD: dict[str, Callable[[Tx, Arriving, Sequence[Fields]], None]] = {
    "branch": _add_branches,
    "message": _add_messages,
    "mark": _add_marks,
    "call": _add_calls,
    "run": _add_runs,
    "checkpoint": _add_checkpoints,
    "inbox": _add_inbox,
    "task": _add_tasks,
    "usage": _add_usage,
    "tool_usage": _add_tool_usage,
}
