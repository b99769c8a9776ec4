"""The ledger of tool calls: what was begun, what waits for a person, and how it ended.

A row is written before its tool runs and settled in the transaction that stores the result. So after a crash each call
of a reply is one of: never started (no row), waiting, answered, started (and then its outcome is unknown), or ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from byssus.errors import ThreadMoved
from byssus.queries.accounts import usage
from byssus.queries.log import answers, threads
from byssus.queries.log.answers import IS_EXPIRED, ApprovalRow, Question
from byssus.queries.log.leases import By, Late, Lease
from byssus.queries.log.threads import MessageRow, Position
from byssus.store.database import Row, Tx
from byssus.values.thread_key import ThreadKey

CallStatus: TypeAlias = Literal[
    "waiting", "answered", "started", "done", "failed", "denied", "aborted", "unknown", "left"
]

WAITING, ANSWERED, STARTED, EXPIRED = "waiting", "answered", "started", "expired"
OPEN = (WAITING, ANSWERED, STARTED)


class Start(NamedTuple):
    """A call that is about to run, or to wait for a person. `reply` and `call_index` identify it."""

    reply: int
    call_index: int
    call_id: str
    name: str
    arguments: str
    recovery: str
    idempotency_key: str
    run: str


class LedgerEntry(NamedTuple):
    """A call as the ledger has it."""

    call_index: int
    call_id: str
    name: str
    arguments: str
    idempotency_key: str
    status: str
    reason: str | None
    question: str | None
    answer: str | None
    attempts: int
    asked_at: str | None
    recovery: str
    edited: str | None = None  # the arguments that a person approved instead
    approvers: int = 1
    expires_at: str | None = None
    fallback: str | None = None  # the answer when the time is over
    approvals: tuple[ApprovalRow, ...] = ()  # in memory; a store has rows of them


# The status of a question whose time is over is `expired`, until its default answer is recorded.
_STATUS = f"CASE WHEN {IS_EXPIRED.format('tool_calls')} THEN '{EXPIRED}' ELSE status END"
_ENTRY = ", ".join(LedgerEntry._fields[:-1]).replace("call_index", "place").replace("status", _STATUS)
_PUT = (
    "INSERT INTO tool_calls (thread, branch, reply, place, call_id, name, arguments, recovery, idempotency_key, run,"
    " status, reason, question, attempts, asked_at, started_at) VALUES (:thread, :branch, :reply, :call_index,"
    " :call_id, :name, :arguments, :recovery, :idempotency_key, :run, :status, :reason, :question, :attempts,"
    " :asked_at, :started_at) ON CONFLICT (branch, reply, place) DO UPDATE SET run = excluded.run,"
    " status = excluded.status, arguments = excluded.arguments, recovery = excluded.recovery,"
    " reason = COALESCE(excluded.reason, tool_calls.reason),"
    " question = COALESCE(excluded.question, tool_calls.question), attempts = tool_calls.attempts + excluded.attempts,"
    " asked_at = COALESCE(excluded.asked_at, tool_calls.asked_at),"
    " started_at = COALESCE(excluded.started_at, tool_calls.started_at)"
)


def start(tx: Tx, thread_key: ThreadKey, call: Start, *, by: Lease) -> None:
    """Record that a tool is about to run."""
    _put(tx, thread_key, by, call, status=STARTED, attempts=1, started_at=tx.now())


def ask(
    tx: Tx, thread_key: ThreadKey, call: Start, question: Question, *, edited: str | None = None, by: Lease
) -> None:
    """Record that a call waits for a person's answer. What was answered to an earlier question is gone."""
    reason, text = question.reason, question.text
    branch = _put(tx, thread_key, by, call, status=WAITING, asked_at=tx.now(), reason=reason, question=text)
    this = "branch = :branch AND reply = :reply AND place = :place"
    tx.run(
        "UPDATE tool_calls SET answer = NULL, answered_by = NULL, answered_at = NULL, answered_from = NULL,"
        f" edited = :edited, approvers = :approvers, expires_at = :expires, fallback = :fallback WHERE {this}",
        edited=edited,
        approvers=question.approvers,
        expires=None if question.seconds is None else tx.after(question.seconds),
        fallback=question.fallback,
        branch=branch,
        reply=call.reply,
        place=call.call_index,
    )
    tx.run(
        f"DELETE FROM approvals WHERE call IN (SELECT key FROM tool_calls WHERE {this})",
        branch=branch,
        reply=call.reply,
        place=call.call_index,
    )


def _put(tx: Tx, thread_key: ThreadKey, by: Lease, call: Start, **values: object) -> int:
    """Write the row of a call; returns its branch."""
    thread, branch = threads.hold(tx, thread_key, by)
    optional = {"reason": None, "question": None, "attempts": 0, "asked_at": None, "started_at": None}
    tx.run(_PUT, **call._asdict(), **{**optional, **values}, thread=thread, branch=branch)
    return branch


def finish(
    tx: Tx,
    thread_key: ThreadKey,
    reply: int,
    ends: Sequence[tuple[int, int, MessageRow, str, float | None]],
    *,
    by: By,
    extra: str | None = None,
) -> Position:
    """Store results, each with the call's index in the reply, its own seq, how the call ended, and after how many
    milliseconds."""
    filled = [(seq, message) for _, seq, message, *_ in ends]
    position = threads.fill(tx, thread_key, filled, by=by, extra=extra)
    for call_index, _, _, status, elapsed in ends:
        _end(tx, position.branch, reply, call_index, status, elapsed)
    return position


def finish_behind(
    tx: Tx,
    thread_key: ThreadKey,
    reply: int,
    ends: Sequence[tuple[int, MessageRow, str, float | None]],
    *,
    by: By,
    extra: str | None = None,
) -> Position:
    """Store results at the end of the log, for a reply that reserved no slots.

    Each comes with the call's index in the reply, how the call ended, and after how many milliseconds.
    """
    added = [message for _, message, *_ in ends]
    position = threads.append(tx, thread_key, added, by=by, extra=extra)
    for call_index, _, status, elapsed in ends:
        _end(tx, position.branch, reply, call_index, status, elapsed)
    return position


def finish_late(
    tx: Tx,
    thread_key: ThreadKey,
    *,
    reply: int,
    end: tuple[int, int, MessageRow, str, float | None],
    has_slot: bool,
    extra: str | None,
    epoch: int,
) -> None:
    """Store a result that could not be stored when its tool ended. Raises `ThreadMoved` if the call has ended since."""
    call_index, _, message, status, elapsed = end
    _, branch = threads.hold(tx, thread_key, Late(epoch))
    if not any(entry.call_index == call_index and entry.status == STARTED for entry in of_reply(tx, branch, reply)):
        raise ThreadMoved(thread_key.id)
    if has_slot:
        finish(tx, thread_key, reply, [end], by=Late(epoch), extra=extra)
    else:
        finish_behind(tx, thread_key, reply, [(call_index, message, status, elapsed)], by=Late(epoch), extra=extra)


def _end(tx: Tx, branch: int, reply: int, call_index: int, status: str, elapsed_ms: float | None) -> None:
    tx.run(
        "UPDATE tool_calls SET status = :status, ended_at = :now, elapsed_ms = :elapsed"
        " WHERE branch = :branch AND reply = :reply AND place = :call_index",
        status=status,
        elapsed=elapsed_ms,
        now=tx.now(),
        branch=branch,
        reply=reply,
        call_index=call_index,
    )
    usage.count_call(tx, branch, reply, call_index, status, elapsed_ms)


def of_reply(tx: Tx, branch: int, reply: int) -> list[LedgerEntry]:
    """What the ledger has about the calls of a reply."""
    rows = tx.all(
        f"SELECT {_ENTRY} FROM tool_calls WHERE branch = :branch AND reply = :reply ORDER BY place",
        branch=branch,
        reply=reply,
        now=tx.now(),
    )
    return [LedgerEntry(*row) for row in rows]


def records(tx: Tx, thread_key: ThreadKey, *, after: int = 0, limit: int) -> tuple[list[Row], list[ApprovalRow]]:
    """The ledger of a thread, oldest first, and the approvals of calls that need several."""
    rows = tx.all(
        "SELECT tool_calls.key, call_id, name, arguments, recovery, idempotency_key, tool_calls.run,"
        f" CASE WHEN {IS_EXPIRED.format('tool_calls')} THEN 'answered' ELSE tool_calls.status END,"
        " attempts, asked_at, started_at, ended_at, edited, answered_by, answered_at, answered_from, approvers,"
        " expires_at FROM tool_calls JOIN threads ON threads.key = tool_calls.thread"
        " WHERE namespace = :namespace AND threads.id = :id AND tool_calls.key > :after"
        " ORDER BY tool_calls.key LIMIT :limit",
        namespace=thread_key.namespace,
        id=thread_key.id,
        after=after,
        limit=limit,
        now=tx.now(),
    )
    return rows, answers.approvals(tx, [row[0] for row in rows if row[-2] > 1])
