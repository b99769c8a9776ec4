"""What the benches share: a scratch directory, the raw database to compare with, and medians of alternating rounds.

Figures are ratios within one run. The machine is noisy, so what is compared alternates, and medians are compared.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import apsw

from holdfast.messages import AssistantMessage, Message, TextContent, ToolCall, ToolResultMessage, Usage, UserMessage

TEXT = "x" * 330  # a message of about 400 bytes


def scratch() -> Path:
    """A directory that goes away with the process."""
    holder = tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True)
    _holders.append(holder)
    return Path(holder.name)


_holders: list[tempfile.TemporaryDirectory[str]] = []


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
    """The least that stores the same: threads with a head, and messages in order, with the same durability."""
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "FULL")
    connection.execute(
        "CREATE TABLE threads (id TEXT PRIMARY KEY, head INTEGER, updated_at TEXT);"
        "CREATE TABLE messages (key INTEGER PRIMARY KEY, thread TEXT, seq INTEGER, role TEXT, body TEXT,"
        " created_at TEXT, UNIQUE (thread, seq))"
    )
    return connection


def raw_append(connection: apsw.Connection, thread: str, role: str, body: str, now: str) -> None:
    """One message, one durable commit."""
    connection.execute("BEGIN IMMEDIATE")
    head = connection.execute(
        "INSERT INTO threads VALUES (?, 1, ?) ON CONFLICT (id) DO UPDATE SET head = head + 1, updated_at = ?"
        " RETURNING head",
        (thread, now, now),
    ).fetchall()[0][0]
    connection.execute(
        "INSERT INTO messages (thread, seq, role, body, created_at) VALUES (?, ?, ?, ?, ?)",
        (thread, head, role, body, now),
    )
    connection.execute("COMMIT")


def raw_append_many(connection: apsw.Connection, thread: str, rows: Sequence[tuple[str, str]]) -> None:
    """Many messages, one commit."""
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(
        "INSERT INTO messages (thread, seq, role, body) VALUES (?, ?, ?, ?)",
        ((thread, seq, role, body) for seq, (role, body) in enumerate(rows, 1)),
    )
    connection.execute("COMMIT")


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
