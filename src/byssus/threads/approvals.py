"""Tool calls that wait for a person, the answers to them, and the ledger of all calls of a thread."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, cast

from byssus.errors import InputError
from byssus.queries.log import tool_calls as ledger
from byssus.queries.log.tool_calls import CallStatus
from byssus.store.operations import Runner
from byssus.threads.encoding import PAGE
from byssus.values.decisions import Answer, Pending, Recovery, Why, encode_answer
from byssus.values.inputs import ThreadId, checked_thread, column_id


class ToolCallRecord(NamedTuple):
    """A tool call in the ledger.

    `status` is started, waiting (for a person) or answered; or how it ended: done, failed, denied, aborted, unknown,
    left (by a rewind, unanswered).
    """

    call_id: str
    tool_name: str
    arguments: dict[str, Any]
    recovery: Recovery
    idempotency_key: str
    run_id: str
    status: CallStatus
    attempts: int
    asked_at: str | None
    started_at: str | None
    ended_at: str | None


async def pending(store: Runner, thread_id: ThreadId | None = None) -> list[Pending]:
    """The tool calls that wait for a person, of one thread or of all."""
    rows = await store.read(ledger.pending, None if thread_id is None else checked_thread(thread_id))
    return [
        Pending(*row[:3], json.loads(row.arguments) or {}, cast("Why", row.reason), row.question, row.asked_at)
        for row in rows
    ]


async def answer(store: Runner, thread_id: ThreadId, call_id: str, answer: Answer) -> None:
    """Answer a waiting tool call: "approve", "deny", `Deny(reason)` or `ToolResult(...)`.

    The answer is stored. The current run carries it out, or else the next one (`resume()`, `prompt()`).
    """
    await record_answer(store, thread_id, call_id, encode_answer(answer))


async def record_answer(store: Runner, thread_id: ThreadId, call_id: str, encoded: str) -> None:
    """Record an answer that is encoded already."""
    if not isinstance(call_id, str):
        raise InputError(f"a call is named by its id, got {call_id!r:.80}; pending() lists what waits")
    await store.write(ledger.answer, checked_thread(thread_id), column_id(call_id), encoded)


async def tool_calls(store: Runner, thread_id: ThreadId) -> list[ToolCallRecord]:
    """The ledger of the thread: every tool call that was started or waited for a person, oldest first."""
    thread_key, after, found = checked_thread(thread_id), 0, list[ToolCallRecord]()
    while True:
        rows = await store.read(ledger.records, thread_key, after=after, limit=PAGE)
        found += [ToolCallRecord(row[1], row[2], json.loads(row[3]) or {}, *row[4:]) for row in rows]
        if len(rows) < PAGE:
            return found
        after = rows[-1][0]
