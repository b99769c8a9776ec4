"""Statistics: messages, tokens and cost by thread, day and model, and tool calls by thread, day and tool.

- The transaction that stores a message counts it, so no statistic reads the messages; a check of the database counts
  them again and compares.
- A deleted message stays counted, and a deleted thread's rows pass to its user.
- How long tools took is kept in buckets, each 5 % wider than the one before: percentiles are right within 2.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from byssus.store.database import Row, Tx

LONG_NAME = 200  # characters of a model's or a tool's name: an index has its limits
_SHORTEST_MS, _WIDER = 0.05, 1.05
_UNKNOWN_BUCKET = -1


class Spent(NamedTuple):
    """What a message cost: all its tokens, which of them were what, and by which model."""

    model: str = ""
    tokens: int = 0
    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    cost: float = 0.0

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        return Spent(
            self.model,
            self.tokens + other.tokens,
            self.input + other.input,
            self.output + other.output,
            self.cache_read + other.cache_read,
            self.cache_write + other.cache_write,
            self.cost + other.cost,
        )


_NOTHING = Spent()
_COLUMNS = "thread, owner, day, model, messages, tokens, input, output, cache_read, cache_write, cost, priced"
_SUMS = ("messages", "tokens", "input", "output", "cache_read", "cache_write", "cost", "priced")
_ADDED = " ON CONFLICT (thread, owner, day, model) DO UPDATE SET " + ", ".join(
    f"{name} = usage.{name} + excluded.{name}" for name in _SUMS
)
COUNT = (
    "INSERT INTO usage (thread, owner, day, model, messages, tokens, input, output, cache_read, cache_write, cost,"
    " priced) VALUES (:thread, '', substr(:now, 1, 10), '', :messages, 0, 0, 0, 0, 0, 0, 0)"
    " ON CONFLICT (thread, owner, day, model) DO UPDATE SET messages = usage.messages + excluded.messages"
)
_COUNT_SPENT = (
    f"INSERT INTO usage ({_COLUMNS}) VALUES (:thread, '', substr(:now, 1, 10), :model, :messages, :tokens, :input,"
    " :output, :cache_read, :cache_write, :cost, CASE WHEN :cost > 0 THEN 0 ELSE COALESCE((SELECT (:input * p.input"
    " + :output * p.output + :cache_read * p.cache_read + :cache_write * p.cache_write) / 1000000.0 FROM prices p"
    f" WHERE p.model = :model), 0) END){_ADDED}"
)


def count(tx: Tx, thread: int, messages: Sequence[Spent | None]) -> None:
    """Count messages that are being stored, by what each has spent. This is part of every append."""
    plain = messages.count(None)
    if plain:
        tx.run(COUNT, thread=thread, messages=plain, now=tx.now())
    if plain == len(messages):
        return
    by_model: dict[str, tuple[int, Spent]] = {}
    for spent in messages:
        if spent is not None:
            number, total = by_model.get(spent.model, (0, _NOTHING))
            by_model[spent.model] = (number + 1, spent + total)
    for number, total in by_model.values():
        tx.run(_COUNT_SPENT, thread=thread, messages=number, now=tx.now(), **total._asdict())


_COUNT_CALL = (
    "INSERT INTO tool_usage (thread, owner, day, name, bucket, calls, failures, total_ms)"
    " SELECT thread, '', substr(:now, 1, 10), substr(name, 1, :long), :bucket, 1, :failures, :ms FROM tool_calls"
    " WHERE {} ON CONFLICT (thread, owner, day, name, bucket) DO UPDATE SET calls = tool_usage.calls + 1,"
    " failures = tool_usage.failures + excluded.failures, total_ms = tool_usage.total_ms + excluded.total_ms"
)
_COUNT_AT = _COUNT_CALL.format("branch = :branch AND reply = :reply AND place = :call_index")
RAN = ("done", "failed", "aborted", "unknown")  # how a call ended that was begun


def count_call(tx: Tx, branch: int, reply: int, call_index: int, status: str, elapsed_ms: float | None) -> None:
    """Count a call of the ledger that has just ended."""
    if status in RAN:
        tx.run(
            _COUNT_AT,
            branch=branch,
            reply=reply,
            call_index=call_index,
            bucket=bucket_of(elapsed_ms),
            failures=int(status != "done"),
            ms=elapsed_ms or 0.0,
            long=LONG_NAME,
            now=tx.now(),
        )


def bucket_of(elapsed_ms: float | None) -> int:
    """The bucket of a time."""
    if elapsed_ms is None:
        return _UNKNOWN_BUCKET
    if elapsed_ms <= _SHORTEST_MS:
        return 0
    return math.floor(math.log(elapsed_ms / _SHORTEST_MS, _WIDER)) + 1


def middle_of(bucket: int) -> float:
    """The time, in milliseconds, that stands for a bucket."""
    return 0.0 if bucket <= 0 else _SHORTEST_MS * _WIDER ** (bucket - 0.5)


def bequeath(tx: Tx, thread: int) -> None:
    """The thread is about to be deleted: what was spent in it stays with its owner."""
    tx.run(
        f"INSERT INTO usage ({_COLUMNS}) SELECT 0, t.owner, u.day, u.model, {', '.join(f'u.{name}' for name in _SUMS)}"
        " FROM usage u JOIN threads t ON t.key = u.thread WHERE u.thread = :thread AND t.owner IS NOT NULL" + _ADDED,
        thread=thread,
    )
    tx.run(
        "INSERT INTO tool_usage (thread, owner, day, name, bucket, calls, failures, total_ms)"
        " SELECT 0, t.owner, u.day, u.name, u.bucket, u.calls, u.failures, u.total_ms"
        " FROM tool_usage u JOIN threads t ON t.key = u.thread WHERE u.thread = :thread AND t.owner IS NOT NULL"
        " ON CONFLICT (thread, owner, day, name, bucket) DO UPDATE SET calls = tool_usage.calls + excluded.calls,"
        " failures = tool_usage.failures + excluded.failures, total_ms = tool_usage.total_ms + excluded.total_ms",
        thread=thread,
    )
    forget(tx, thread)


def forget(tx: Tx, thread: int) -> None:
    """Remove what was counted of a thread."""
    for table in ("usage", "tool_usage"):
        tx.run(f"DELETE FROM {table} WHERE thread = :thread", thread=thread)


def forget_user(tx: Tx, user_id: str) -> None:
    """Remove what deleted threads of a user have left."""
    for table in ("usage", "tool_usage"):
        tx.run(f"DELETE FROM {table} WHERE thread = 0 AND owner = :user", user=user_id)


# --- asking -----------------------------------------------------------------------------------------------------------


class Scope(NamedTuple):
    """Which usage: of a user (with that of their deleted threads), of one thread, or of all; and since which day."""

    user: str | None
    thread: int | None
    since: str


_OF_USER = (
    "(SELECT u.*, t.id AS thread_id FROM threads t JOIN {table} u ON u.thread = t.key WHERE t.owner = :user"
    " AND u.day >= :since UNION ALL SELECT u.*, NULL FROM {table} u WHERE u.thread = 0 AND u.owner = :user"
    " AND u.day >= :since)"
)
_OF_THREAD = (
    "(SELECT u.*, t.id AS thread_id FROM {table} u JOIN threads t ON t.key = u.thread WHERE u.thread = :thread"
    " AND u.day >= :since)"
)
_OF_ALL = "(SELECT u.*, t.id AS thread_id FROM {table} u LEFT JOIN threads t ON t.key = u.thread WHERE u.day >= :since)"


def _rows(table: str, scope: Scope) -> tuple[str, dict[str, object]]:
    if scope.thread is not None:
        return _OF_THREAD.format(table=table), {"thread": scope.thread, "since": scope.since}
    if scope.user is not None:
        return _OF_USER.format(table=table), {"user": scope.user, "since": scope.since}
    return _OF_ALL.format(table=table), {"since": scope.since}


def by(tx: Tx, column: str, scope: Scope) -> list[Row]:
    """Messages, tokens and cost for each day, model or thread (its id; None: those that were deleted)."""
    source, params = _rows("usage", scope)
    sums = ", ".join(f"SUM({name})" for name in _SUMS[:-2])
    return tx.all(
        f"SELECT {column}, {sums}, SUM(cost + priced) FROM {source} AS u GROUP BY {column} ORDER BY {column}", **params
    )


def tools(tx: Tx, scope: Scope) -> list[Row]:
    """What tools did: name, bucket, calls, failures, milliseconds."""
    source, params = _rows("tool_usage", scope)
    return tx.all(
        f"SELECT name, bucket, SUM(calls), SUM(failures), SUM(total_ms) FROM {source} AS u"
        " GROUP BY name, bucket ORDER BY name, bucket",
        **params,
    )


def sessions(tx: Tx, scope: Scope) -> int:
    """How many threads were made or written since then."""
    row = tx.one(
        "SELECT COUNT(*) FROM threads WHERE updated_at >= :since AND (:every_user = 1 OR owner = :user)"
        " AND (:every = 1 OR key = :thread) AND namespace = ''",
        since=scope.since,
        user=scope.user or "",
        every_user=int(scope.user is None),
        thread=scope.thread or 0,
        every=int(scope.thread is None),
    )
    return int(row[0]) if row else 0


def today(tx: Tx, days_before: int) -> str:
    """The day that lies so many days before today, by the database's clock."""
    row = tx.one("SELECT substr(:then, 1, 10)", then=tx.after(-86_400.0 * days_before))
    assert row is not None
    return str(row[0])


# --- prices -----------------------------------------------------------------------------------------------------------


def set_price(tx: Tx, model: str, prices: dict[str, float]) -> None:
    """From now on, what comes from a model without its cost is priced like this."""
    tx.run(
        "INSERT INTO prices (model, input, output, cache_read, cache_write)"
        " VALUES (:model, :input, :output, :cache_read, :cache_write) ON CONFLICT (model) DO UPDATE SET"
        " input = excluded.input, output = excluded.output, cache_read = excluded.cache_read,"
        " cache_write = excluded.cache_write",
        model=model,
        **prices,
    )


def remove_price(tx: Tx, model: str) -> bool:
    return tx.one("DELETE FROM prices WHERE model = :model RETURNING key", model=model) is not None


def prices(tx: Tx) -> list[Row]:
    return tx.all("SELECT model, input, output, cache_read, cache_write FROM prices ORDER BY model")


# --- counting again ---------------------------------------------------------------------------------------------------


class Counted(NamedTuple):
    """A thread that can be counted again: its key and its id."""

    key: int
    id: str


def countable(tx: Tx, after: int, limit: int) -> list[Counted]:
    """Threads of which nothing was removed, in the order of their keys."""
    rows = tx.all(
        "SELECT t.key, t.id FROM threads t WHERE t.key > :after AND NOT EXISTS"
        " (SELECT 1 FROM branches b WHERE b.thread = t.key AND b.uncounted = 1) ORDER BY t.key LIMIT :limit",
        after=after,
        limit=limit,
    )
    return [Counted(*row) for row in rows]


def written(tx: Tx, thread: int, after: int, limit: int) -> list[Row]:
    """What was written to a thread, with keys behind a key: key, day, body and whether it is plain JSON."""
    return tx.all(
        "SELECT m.key, substr(m.created_at, 1, 10), m.body, m.plain FROM branches b JOIN messages m ON m.branch = b.key"
        " WHERE b.thread = :thread AND m.key > :after ORDER BY m.key LIMIT :limit",
        thread=thread,
        after=after,
        limit=limit,
    )


def counted(tx: Tx, thread: int) -> list[Row]:
    """What is counted of a thread: day, model, and the sums without what was priced."""
    return tx.all(
        f"SELECT day, model, {', '.join(_SUMS[:-1])} FROM usage WHERE thread = :thread ORDER BY day, model",
        thread=thread,
    )


def set_counted(tx: Tx, thread: int, rows: Iterable[tuple[str, int, Spent]]) -> None:
    """Put what was counted again in the place of what was; prices of the time stay."""
    tx.run(f"UPDATE usage SET {', '.join(f'{name} = 0' for name in _SUMS[:-1])} WHERE thread = :thread", thread=thread)
    for day, messages, spent in rows:
        tx.run(
            f"INSERT INTO usage ({_COLUMNS}) VALUES (:thread, '', :day, :model, :messages, :tokens, :input, :output,"
            f" :cache_read, :cache_write, :cost, 0){_ADDED}",
            thread=thread,
            day=day,
            messages=messages,
            **spent._asdict(),
        )
