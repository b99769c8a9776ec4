"""Tool calls that wait for a person, the answers to them, and the ledger of all calls of a thread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from byssus.errors import InputError
from byssus.messages import checked_dumps
from byssus.queries.log import answers
from byssus.queries.log import tool_calls as ledger
from byssus.queries.log.answers import ApprovalRow, NewAnswer, PendingRow, Question
from byssus.queries.log.tool_calls import CallStatus
from byssus.store.database import Row
from byssus.store.operations import Runner
from byssus.threads.encoding import PAGE
from byssus.values.decisions import (
    APPROVAL,
    RECOVERY,
    Answer,
    Approval,
    Ask,
    Pending,
    Recovery,
    Why,
    approval_in,
    encode_answer,
    is_approval,
    kind_of,
)
from byssus.values.inputs import ThreadId, checked_count, checked_id, checked_text, checked_thread, column_id
from byssus.values.thread_key import ThreadKey

_LONGEST_NAME = 500  # characters of who answered, and from where


class ToolCallRecord(NamedTuple):
    """A tool call in the ledger.

    `status` is started, waiting (for a person) or answered; or how it ended: done, failed, denied, aborted, unknown,
    left (by a rewind, unanswered). `arguments` are the model's; `edited_arguments` are those that a person approved
    instead. `answered_from` is "expiry" if there was no answer before `expires_at`. `approvals` are those of a call
    that needs several `approvers`.
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
    edited_arguments: dict[str, Any] | None = None
    answered_by: str | None = None
    answered_at: str | None = None
    answered_from: str | None = None
    approvers: int = 1
    expires_at: str | None = None
    approvals: tuple[Approval, ...] = ()


async def pending(
    store: Runner,
    thread_id: ThreadId | None = None,
    *,
    user: str | None = None,
    limit: int | None = None,
    before: Pending | None = None,
    namespace: str | None = "",
) -> list[Pending]:
    """Tool calls that wait for a person, longest waiting first: of one thread, or of all threads.

    `user` leaves out the threads of other users. `namespace=None` lists the threads of all namespaces. For the next
    page, pass the last one of this list as `before`.
    """
    thread_key = None if thread_id is None else checked_thread(thread_id)
    owner = None if user is None else checked_id(user, "user")
    count = None if limit is None else checked_count("limit", limit)
    if namespace:
        checked_thread(ThreadKey(namespace, "any"))
    after = None if before is None else await store.read(answers.place_of, *_checked_before(before))
    rows, approvals = await store.read(
        answers.pending, thread_key, namespace=namespace, user=owner, limit=count, after=after
    )
    return [_pending(row, _of_call(approvals, row.key)) for row in rows]


def _checked_before(before: object) -> tuple[ThreadKey, str, str]:
    if not isinstance(before, Pending) or not before.thread_id:
        raise InputError(f"before must be a Pending from an earlier list, got {before!r:.80}")
    return ThreadKey(before.namespace, before.thread_id), column_id(before.call_id), before.asked_at


def _pending(row: PendingRow, approvals: Sequence[Approval]) -> Pending:
    return Pending(
        *row[:3],
        json.loads(row.arguments) or {},
        cast("Why", row.reason),
        *row[5:8],
        user_id=row.owner,
        approvers=row.approvers,
        approvals=list(approvals),
        expires_at=row.expires_at,
        default=kind_of(row.fallback),
    )


def _of_call(approvals: Sequence[ApprovalRow], key: int) -> list[Approval]:
    return [Approval(*row[1:]) for row in approvals if row.call == key]


async def answer(
    store: Runner,
    thread_id: ThreadId,
    call_id: str,
    answer: Answer,
    *,
    by: str | None = None,
    source: str | None = None,
) -> bool:
    """Answer for a call that waits: "approve", `Approve(arguments=...)`, "deny", `Deny(reason)` or `ToolResult(...)`.

    `by` is who answers, and `source` from where ("web", "mail"); the ledger keeps both, and the time. The answer is
    recorded; the thread's next run (`resume()`, `prompt()`) acts upon it, or the one that is going on. The first answer
    counts: a later one raises `AlreadyAnswered`. An unknown thread or call raises `NotFound`. Returns False if the call
    needs more approvals.
    """
    return await record_answer(store, thread_id, call_id, checked(answer, by, source))


async def record_answer(store: Runner, thread_id: ThreadId, call_id: str, answer: NewAnswer) -> bool:
    """Record an answer that was checked already."""
    return await store.write(answers.answer, checked_thread(thread_id), column_id(checked_call(call_id)), answer)


def checked_call(call_id: object) -> str:
    if not isinstance(call_id, str):
        raise InputError(f"a call is named by its id, got {call_id!r:.80}; pending() lists what waits")
    return call_id


async def tool_calls(store: Runner, thread_id: ThreadId) -> list[ToolCallRecord]:
    """The ledger of the thread: every tool call that was started or waited for a person, oldest first."""
    thread_key, after, found = checked_thread(thread_id), 0, list[ToolCallRecord]()
    while True:
        rows, approvals = await store.read(ledger.records, thread_key, after=after, limit=PAGE)
        found += [_record(row, tuple(_of_call(approvals, row[0]))) for row in rows]
        if len(rows) < PAGE:
            return found
        after = rows[-1][0]


def _record(row: Row, approvals: tuple[Approval, ...]) -> ToolCallRecord:
    _, call_id, name, arguments, *ran, edited, by, at, source, approvers, expires_at = row
    record = ToolCallRecord(call_id, name, json.loads(arguments) or {}, *ran)
    return record._replace(
        edited_arguments=None if edited is None else json.loads(edited),
        answered_by=by,
        answered_at=at,
        answered_from=source,
        approvers=approvers,
        expires_at=expires_at,
        approvals=approvals,
    )


def question_of(ask: Ask, reason: str = APPROVAL) -> Question:
    """A question as it is stored. Whether an interrupted call runs again is never decided by a default."""
    if ask.expires is None or reason == RECOVERY:
        return Question(reason, ask.question, ask.approvers)
    return Question(reason, ask.question, ask.approvers, ask.expires, encode_answer(ask.default))


def checked(answer: object, by: object = None, source: object = None) -> NewAnswer:
    """A person's answer, checked, as it is stored."""
    encoded, approval = encode_answer(answer), approval_in(answer)
    edited = None if approval.arguments is None else _encode_arguments(approval.arguments)
    return NewAnswer(encoded, _name("by", by), _name("source", source), edited, is_approval(answer))


def _name(what: str, value: object) -> str | None:
    if value is None:
        return None
    text = checked_text(what, value).strip()
    if not text or len(text) > _LONGEST_NAME:
        raise InputError(f"{what} must have 1 to {_LONGEST_NAME} characters, got {value!r:.80}")
    return text


def _encode_arguments(arguments: object) -> str:
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        raise InputError(f"Approve(arguments=) takes a dict of all arguments by name, got {arguments!r:.80}")
    try:
        return checked_dumps(arguments)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the arguments of an approval cannot be stored as JSON: {error}") from error
