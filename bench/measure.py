"""What the benches share: a scratch directory, the raw database to compare with, and medians of alternating rounds.

Raw is plain apsw on one thread, without an event loop: the same rows into the same tables, with the same durability.

Figures are ratios within one run. The machine is noisy, so what is compared alternates, and medians are compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import apsw

from byssus.checkpointer import Checkpointer
from byssus.messages import AssistantMessage, Message, TextContent, ToolCall, ToolResultMessage, Usage, UserMessage
from byssus.store.sharing import release
from byssus.store.sqlite.store import open_store
from tests.support import postgres

TEXT = "x" * 330  # a message of about 400 bytes


def scratch() -> Path:
    """A directory that goes away with the process."""
    holder = tempfile.TemporaryDirectory(prefix="byssus-bench-", ignore_cleanup_errors=True)
    _holders.append(holder)
    return Path(holder.name)


_holders: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def place_of(database: str) -> Iterator[str]:
    """Where a new database is: of SQLite a file, of Postgres a server, or the one that BYSSUS_TEST_POSTGRES names."""
    if database == "sqlite":
        yield str(scratch() / "bench.db")
    elif dsn := os.environ.get("BYSSUS_TEST_POSTGRES"):
        yield dsn
    else:
        with postgres.running(fsync="on") as server:
            yield server.dsn()


def message() -> UserMessage:
    return UserMessage(TEXT, id="0123456789abcdef", created_at="2026-01-01T00:00:00.000000Z")


def conversation(count: int) -> list[Message]:
    """As many messages as a real agent would leave behind: users, replies, tool calls and results."""
    turn: list[Message] = [
        message(),
        AssistantMessage(
            [TextContent(TEXT[:200]), ToolCall("call_1", "look", {"where": "here", "depth": 3})], "tool_use"
        ),
        ToolResultMessage("call_1", "look", TEXT, details={"found": [1, 2, 3]}),
        AssistantMessage(TEXT, usage=Usage(1200, 80), model="m", provider="p", id="0123456789abcdef"),
    ]
    return (turn * (count // len(turn) + 1))[:count]


def raw_database(path: Path) -> apsw.Connection:
    """The same tables with the same durability, for plain apsw on this thread."""
    release(open_store(path))
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "FULL")
    return connection


def raw_append(connection: apsw.Connection, thread: str, role: str, body: str, now: str) -> None:
    """One message, one durable commit: the statements that the store uses without a run, written down by hand."""
    execute = connection.execute
    execute("BEGIN IMMEDIATE")
    found = execute(_PLAIN_MOVE, {"now": now, "id": thread}).fetchall()
    if not found:
        raw_thread(connection, thread, now)
        found = execute(_PLAIN_MOVE, {"now": now, "id": thread}).fetchall()
    branch, head, key = found[0]
    execute(INSERT, {"branch": branch, "seq": head, "role": role, "body": body, "now": now})
    execute(COUNT, {"thread": key, "now": now})
    execute("COMMIT")


MOVE = (
    "UPDATE threads SET head = head + 1, version = version + 1, message_count = message_count + 1, updated_at = :now{}"
    " WHERE namespace = '' AND id = :id RETURNING branch, head, key"
)
_PLAIN_MOVE = MOVE.format("")
INSERT = (
    "INSERT INTO messages (branch, seq, id, role, body, created_at)"
    " VALUES (:branch, :seq, '0123456789abcdef', :role, :body, :now)"
)
COUNT = (
    "INSERT INTO usage (thread, owner, day, model, messages, tokens, input, output, cache_read, cache_write, cost,"
    " priced) VALUES (:thread, '', substr(:now, 1, 10), '', 1, 0, 0, 0, 0, 0, 0, 0)"
    " ON CONFLICT (thread, owner, day, model) DO UPDATE SET messages = usage.messages + 1"
)


def raw_thread(connection: apsw.Connection, thread: str, now: str) -> None:
    """Make a thread."""
    key = connection.execute(
        "INSERT INTO threads (namespace, id, branch, head, version, message_count, extra, created_at, updated_at)"
        " VALUES ('', ?, 0, 0, 0, 0, '{}', ?, ?) RETURNING key",
        (thread, now, now),
    ).fetchall()[0][0]
    branch = connection.execute("INSERT INTO branches (thread) VALUES (?) RETURNING key", (key,)).fetchall()[0][0]
    connection.execute("INSERT INTO segments VALUES (?, ?, 0, 4611686018427387904)", (branch, branch))
    connection.execute("UPDATE threads SET branch = ? WHERE key = ?", (branch, key))


def raw_append_many(connection: apsw.Connection, thread: str, rows: Sequence[tuple[str, str]]) -> None:
    """Many messages, one commit."""
    connection.execute("BEGIN IMMEDIATE")
    raw_thread(connection, thread, "2026")
    branch = connection.execute("SELECT branch FROM threads WHERE id = ?", (thread,)).fetchall()[0][0]
    connection.executemany(
        "INSERT INTO messages (branch, seq, id, role, body, created_at) VALUES (?, ?, 'x', ?, ?, '2026')",
        ((branch, seq, role, body) for seq, (role, body) in enumerate(rows, 1)),
    )
    connection.execute("COMMIT")


async def append_rate(cp: Checkpointer, threads: int, each: int) -> float:
    """Appends a second, to so many new threads at once."""
    said, turn = message(), next(_turns)

    async def writer(thread: str) -> None:
        for _ in range(each):
            await cp.append(thread, said)

    started = time.perf_counter()
    await asyncio.gather(*(writer(f"{turn}-{i}") for i in range(threads)))
    return threads * each / (time.perf_counter() - started)


_turns = itertools.count()


def alternate(rounds: int, *measures: Callable[[], float]) -> list[float]:
    """The median of each measure, taken in turns; the first turn only warms up."""
    taken: list[list[float]] = [[] for _ in measures]
    for turn in range(rounds + 1):
        for values, measure in zip(taken, measures, strict=True):
            value = measure()
            if turn:
                values.append(value)
    return [statistics.median(values) for values in taken]


def report(what: str, figure: str, ratio: float, bar: float, *, at_least: bool) -> None:
    good = ratio >= bar if at_least else ratio <= bar
    wanted = f"{'at least' if at_least else 'at most'} {bar:g}"
    print(f"{what:<58} {figure:<34} {ratio:8.2f} x   {wanted:<14} {'ok' if good else 'MISSED'}", flush=True)
