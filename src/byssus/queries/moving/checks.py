"""The queries of a check: what a database says about itself, beside what can be counted; and how that is put right.

- What is compared with each other is read in one query, which is one snapshot: a thread that is written to meanwhile is
  not taken for a broken one.
- Each query reads a page. What is put right is put right under the thread's row, and counted again there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from byssus.queries.accounts.usage import LONG_NAME, RAN
from byssus.queries.log.branches import Segment
from byssus.queries.moving.tables import KEYS, LOCAL, TABLES
from byssus.queries.search import engines
from byssus.queries.search.kinds import KINDS
from byssus.queries.versions import checkpoints
from byssus.queries.versions.checkpoints import ON_LINE
from byssus.queries.versions.deleting import IMPORTING, TRASH
from byssus.store.database import Row, Tx
from byssus.store.jobs import takes_long
from byssus.values.thread_key import LONGEST_ID

FEW = 20  # rows that are named of what is wrong in one way

_PARENTS = [
    (table.name, table.columns[0], column, parent) for table in (*TABLES, *LOCAL) for column, parent in table.parents
]
_READ = (
    "FROM segments s JOIN messages m ON m.branch = s.source AND m.seq > s.after_seq AND m.seq <= s.upto_seq"
    " WHERE s.branch = {}.branch"
)
_ENDED = ", ".join(f"'{status}'" for status in RAN)


class ThreadFacts(NamedTuple):
    """A thread: what its row says, and what there is."""

    key: int
    namespace: str
    id: str
    branch: int
    head: int
    message_count: int
    line: int
    latest: int | None
    latest_at: str | None
    thread_of_branch: int | None
    thread_of_line: int | None
    messages: int  # that are read along its branch
    highest: int | None
    is_countable: int  # whether nothing of it was removed, so that its usage can be counted again
    has_checkpoints: int  # whether its line may show any
    is_misnamed: int  # whether ids are looked for in an index that does not have all of its messages


class Shown(NamedTuple):
    """The checkpoint that a thread should name as its latest."""

    key: int | None
    at: str | None


class BranchFacts(NamedTuple):
    """A branch, and how it is read. `thread` is the one that stands on it now, if one does."""

    key: int
    thread: int | None
    thread_id: str | None
    segments: list[Segment]

    @property
    def place(self) -> int:
        return self.key


class CheckpointFacts(NamedTuple):
    """A checkpoint, and how many messages there are between the one before it on its branch, in this page, and it."""

    branch: int
    seq: int
    key: int
    id: str
    message_count: int
    before: int | None
    messages: int

    @property
    def place(self) -> tuple[int, int, int]:
        return self.branch, self.seq, self.key


class MarkFacts(NamedTuple):
    """A mark, and whether its message is read along the branch that it belongs to."""

    key: int
    branch: int
    message: int
    mark: str
    is_read: int

    @property
    def place(self) -> int:
        return self.key


class UserFacts(NamedTuple):
    """A user, and the leaves that are kept of the preferences."""

    key: int
    id: str
    preferences: str
    quota_used: int
    leaves: list[tuple[str, str]]

    @property
    def place(self) -> int:
        return self.key


# --- threads ----------------------------------------------------------------------------------------------------------


@takes_long
def threads(tx: Tx, after: int, limit: int) -> list[tuple[ThreadFacts, Shown]]:
    rows = tx.all(
        "SELECT t.key, t.namespace, t.id, t.branch, t.head, t.message_count, t.line, t.latest, t.latest_at,"
        " (SELECT b.thread FROM branches b WHERE b.key = t.branch),"
        " (SELECT b.thread FROM branches b WHERE b.key = t.line),"
        f" (SELECT COUNT(*) {_READ.format('t')}), (SELECT MAX(m.seq) {_READ.format('t')}),"
        " CASE WHEN EXISTS (SELECT 1 FROM branches b WHERE b.thread = t.key AND b.uncounted = 1) THEN 0 ELSE 1 END,"
        f" CASE WHEN EXISTS (SELECT 1 FROM checkpoints c WHERE c.line = {ON_LINE})"
        f" OR EXISTS (SELECT 1 FROM inherited i WHERE i.line = {ON_LINE}) THEN 1 ELSE 0 END,"
        f" CASE WHEN t.named = 1 AND EXISTS (SELECT 1 {_READ.format('t')} AND m.plain = 0) THEN 1 ELSE 0 END"
        " FROM threads t WHERE t.key > :after AND t.namespace NOT IN (:trash, :importing) ORDER BY t.key LIMIT :limit",
        after=after,
        trash=TRASH,
        importing=IMPORTING,
        limit=limit,
    )
    found = [ThreadFacts(*row) for row in rows]
    return [(thread, _latest(tx, thread)) for thread in found]


def _latest(tx: Tx, thread: ThreadFacts) -> Shown:
    if not thread.has_checkpoints:
        return Shown(None, None)
    rows = checkpoints.shown(tx, thread.line or thread.branch, limit=1)
    return Shown(rows[0].key, rows[0].created_at) if rows else Shown(None, None)


def hold(tx: Tx, thread: int) -> bool:
    """Take a thread's row, which keeps other writers out. False if it is gone."""
    row = tx.one(
        "UPDATE threads SET head = head WHERE key = :key AND namespace <> :trash RETURNING key", key=thread, trash=TRASH
    )
    return row is not None


def is_there(tx: Tx, thread: int) -> bool:
    """Whether a thread was not deleted since its key was read."""
    row = tx.one("SELECT 1 FROM threads WHERE key = :key AND namespace <> :trash", key=thread, trash=TRASH)
    return row is not None


def is_countable(tx: Tx, thread: int) -> bool:
    row = tx.one("SELECT 1 FROM branches WHERE thread = :thread AND uncounted = 1 LIMIT 1", thread=thread)
    return row is None


def set_message_count(tx: Tx, thread: int) -> None:
    tx.run(
        f"UPDATE threads SET message_count = (SELECT COUNT(*) {_READ.format('threads')}) WHERE key = :key", key=thread
    )


def raise_head(tx: Tx, thread: int) -> None:
    """The head is not below a message. A caller that knows the thread looks again."""
    tx.run(
        f"UPDATE threads SET head = (SELECT MAX(m.seq) {_READ.format('threads')}), version = version + 1"
        f" WHERE key = :key AND head < (SELECT MAX(m.seq) {_READ.format('threads')})",
        key=thread,
    )


def unname(tx: Tx, thread: int) -> None:
    """Let ids be looked for among all messages: that finds them in any case."""
    tx.run("UPDATE threads SET named = 0 WHERE key = :key", key=thread)


# --- branches and checkpoints -----------------------------------------------------------------------------------------


def branches(tx: Tx, after: int, limit: int) -> list[BranchFacts]:
    rows = tx.all(
        "SELECT b.key, t.key, t.id FROM branches b LEFT JOIN threads t ON t.key = b.thread AND t.branch = b.key"
        " WHERE b.key > :after ORDER BY b.key LIMIT :limit",
        after=after,
        limit=limit,
    )
    if not rows:
        return []
    read: dict[int, list[Segment]] = {}
    for branch, *piece in tx.all(
        "SELECT branch, source, after_seq, upto_seq FROM segments WHERE branch > :after AND branch <= :last"
        " ORDER BY branch, after_seq",
        after=after,
        last=rows[-1][0],
    ):
        read.setdefault(branch, []).append(Segment(*piece))
    return [BranchFacts(key, thread, name, read.get(key, [])) for key, thread, name in rows]


@takes_long
def checkpoints_by_branch(tx: Tx, after: tuple[int, int, int], limit: int) -> list[CheckpointFacts]:
    """Checkpoints in the order of their branches and seqs: so the messages before them are only counted once."""
    rows = tx.all(
        "SELECT p.branch, p.seq, p.key, p.id, p.message_count, p.before, (SELECT COUNT(*) FROM segments s"
        " JOIN messages m ON m.branch = s.source"
        " AND m.seq > CASE WHEN s.after_seq < COALESCE(p.before, 0) THEN p.before ELSE s.after_seq END"
        " AND m.seq <= CASE WHEN s.upto_seq < p.seq THEN s.upto_seq ELSE p.seq END WHERE s.branch = p.branch)"
        " FROM (SELECT q.*, LAG(q.seq) OVER (PARTITION BY q.branch ORDER BY q.seq, q.key) AS before"
        " FROM (SELECT c.branch, c.seq, c.key, c.id, c.message_count FROM checkpoints c"
        " WHERE (c.branch, c.seq, c.key) > (:branch, :seq, :key) ORDER BY c.branch, c.seq, c.key LIMIT :limit) AS q)"
        " AS p ORDER BY p.branch, p.seq, p.key",
        branch=after[0],
        seq=after[1],
        key=after[2],
        limit=limit,
    )
    return [CheckpointFacts(*row) for row in rows]


def marks(tx: Tx, after: int, limit: int) -> list[MarkFacts]:
    rows = tx.all(
        "SELECT k.key, k.branch, k.message, k.mark, CASE WHEN EXISTS (SELECT 1 FROM messages m JOIN segments s"
        " ON s.source = m.branch AND s.after_seq < m.seq AND s.upto_seq >= m.seq"
        " WHERE m.key = k.message AND s.branch = k.branch) THEN 1 ELSE 0 END"
        " FROM marks k WHERE k.key > :after ORDER BY k.key LIMIT :limit",
        after=after,
        limit=limit,
    )
    return [MarkFacts(*row) for row in rows]


def dangling(tx: Tx) -> list[tuple[str, int, str, int, str]]:
    """Rows that point to what is not there: table, key, column, value and the other table; a few of each kind."""
    return [
        (table, key, column, value, parent)
        for table, name, column, parent in _PARENTS
        for key, value in tx.all(
            f"SELECT c.{name}, c.{column} FROM {table} c WHERE c.{column} IS NOT NULL AND NOT EXISTS"
            f" (SELECT 1 FROM {parent} p WHERE p.{KEYS[parent]} = c.{column}) LIMIT :few",
            few=FEW,
        )
    ]


_IDS = [("threads", "namespace"), ("threads", "id"), ("users", "id"), ("checkpoints", "id"), ("tasks", "id")]


@takes_long
def long_ids(tx: Tx) -> list[tuple[str, str, str, int]]:
    """Ids that are longer than they can be now: table, column, how they begin, and their bytes; a few of each kind."""
    return [
        (table, column, *row)
        for table, column in _IDS
        for row in tx.all(
            f"SELECT substr({column}, 1, 60), octet_length({column}) FROM {table}"
            f" WHERE octet_length({column}) > :most ORDER BY key LIMIT :few",
            most=LONGEST_ID,
            few=FEW,
        )
    ]


# --- tools ------------------------------------------------------------------------------------------------------------


def ended_calls(tx: Tx, thread: int, after: int, limit: int) -> list[Row]:
    """Calls that were begun and have ended: key, day, name, status and how long they took."""
    return tx.all(
        "SELECT key, substr(COALESCE(ended_at, ''), 1, 10), substr(name, 1, :long), status, elapsed_ms FROM tool_calls"
        f" WHERE thread = :thread AND key > :after AND status IN ({_ENDED}) ORDER BY key LIMIT :limit",
        thread=thread,
        after=after,
        limit=limit,
        long=LONG_NAME,
    )


def counted_calls(tx: Tx, thread: int) -> list[Row]:
    """What is counted of a thread's calls: day, name, bucket, calls, failures and milliseconds."""
    return tx.all(
        "SELECT day, name, bucket, calls, failures, total_ms FROM tool_usage WHERE thread = :thread"
        " ORDER BY day, name, bucket",
        thread=thread,
    )


def set_counted_calls(tx: Tx, thread: int, rows: Iterable[tuple[str, str, int, int, int, float]]) -> None:
    tx.run("DELETE FROM tool_usage WHERE thread = :thread", thread=thread)
    for day, name, bucket, calls, failures, total_ms in rows:
        tx.run(
            "INSERT INTO tool_usage (thread, owner, day, name, bucket, calls, failures, total_ms)"
            " VALUES (:thread, '', :day, :name, :bucket, :calls, :failures, :ms)",
            thread=thread,
            day=day,
            name=name,
            bucket=bucket,
            calls=calls,
            failures=failures,
            ms=total_ms,
        )


# --- users ------------------------------------------------------------------------------------------------------------


def users(tx: Tx, after: int, limit: int) -> list[UserFacts]:
    rows = tx.all(
        "SELECT key, id, preferences, quota_used FROM users WHERE key > :after ORDER BY key LIMIT :limit",
        after=after,
        limit=limit,
    )
    if not rows:
        return []
    leaves: dict[int, list[tuple[str, str]]] = {}
    for owner, path, value in tx.all(
        "SELECT owner, path, value FROM preferences WHERE owner > :after AND owner <= :last",
        after=after,
        last=rows[-1][0],
    ):
        leaves.setdefault(owner, []).append((path, value))
    return [UserFacts(key, name, text, used, leaves.get(key, [])) for key, name, text, used in rows]


def held_preferences(tx: Tx, user: int) -> str | None:
    """A user's preferences, the row taken."""
    row = tx.one("UPDATE users SET preferences = preferences WHERE key = :key RETURNING preferences", key=user)
    return row[0] if row else None


def set_leaves(tx: Tx, user: int, leaves: Iterable[tuple[str, str]]) -> None:
    tx.run("DELETE FROM preferences WHERE owner = :owner", owner=user)
    tx.many(
        "INSERT INTO preferences (owner, path, value) VALUES (:owner, :path, :value)",
        [{"owner": user, "path": path, "value": value} for path, value in leaves],
    )


# --- the index for search ---------------------------------------------------------------------------------------------


class IndexFacts(NamedTuple):
    """Keys of rows that should be in the index and are not, and of what is there without its row; a few of each."""

    missing: list[int]
    surplus: list[int]


@takes_long
def index(tx: Tx, tokenizer: int, kind: str) -> IndexFacts | None:
    """How the index of a kind agrees with its rows; None if it will be rebuilt anyway."""
    state = tx.one("SELECT upto, tokenizer FROM indexing WHERE kind = :kind", kind=kind)
    if state is None or state[1] != tokenizer:
        return None
    table, words, column = KINDS[kind].table, KINDS[kind].tokens, engines.of(tx).key_column(kind)
    missing = tx.all(
        f"SELECT r.key FROM {table} r WHERE r.key <= :upto AND NOT EXISTS"
        f" (SELECT 1 FROM {words} w WHERE w.{column} = r.key) ORDER BY r.key LIMIT :few",
        upto=state[0],
        few=FEW,
    )
    surplus = tx.all(
        f"SELECT DISTINCT w.{column} FROM {words} w WHERE NOT EXISTS"
        f" (SELECT 1 FROM {table} r WHERE r.key = w.{column}) LIMIT :few",
        few=FEW,
    )
    return IndexFacts([key for (key,) in missing], [key for (key,) in surplus])
