"""Answers to questions about tool calls: how an agent checks one, and what it changes in the entry of its call."""

from __future__ import annotations

import json

from byssus.errors import ArgumentsInvalid
from byssus.messages import ToolCall
from byssus.queries.log.answers import ApprovalRow, NewAnswer, Question
from byssus.queries.log.tool_calls import ANSWERED, WAITING, LedgerEntry
from byssus.run.journal import Ledger
from byssus.run.settings import Setup
from byssus.values import clock
from byssus.values.decisions import APPROVAL

EDITED = "A person approved this call with other arguments: {}. Its result follows.\n"
NOT_FITTING = "(It was approved with the arguments {}, which do not fit the tool: {})"


async def answer(setup: Setup, ledger: Ledger, call_id: str, answer: NewAnswer) -> bool:
    """Record an answer. Arguments that do not fit the tool are refused here, if this agent has the tool."""
    if answer.edited is not None:
        tool = setup.tools.get(await ledger.tool_of(call_id) or "")
        arguments = json.loads(answer.edited)
        problem = None if tool is None else tool.problem_with(ToolCall(call_id, tool.name, arguments))
        if problem is not None:
            raise ArgumentsInvalid(
                f"the arguments of this approval do not fit the tool of call {call_id!r}: {problem}. Nothing was "
                "recorded: approve it with others"
            )
    return await ledger.answer(call_id, answer)


def asked(entry: LedgerEntry, question: Question) -> LedgerEntry:
    """A call that waits for the answer to a question."""
    now = clock.now()
    expires_at = None if question.seconds is None else clock.after(now, question.seconds)
    return entry._replace(
        status=WAITING,
        reason=question.reason,
        question=question.text,
        asked_at=now,
        approvers=question.approvers,
        expires_at=expires_at,
        fallback=question.fallback,
        answer=None,
        approvals=(),
    )


def asked_again(entry: LedgerEntry, text: str) -> Question:
    """The question about a call, put again: it waits as long as at first."""
    seconds = None
    if entry.asked_at is not None and entry.expires_at is not None:
        seconds = clock.seconds_between(entry.asked_at, entry.expires_at)
    return Question(entry.reason or APPROVAL, text, entry.approvers, seconds, entry.fallback)


def answered(entry: LedgerEntry, answer: NewAnswer) -> LedgerEntry:
    """A call that has its answer."""
    return entry._replace(status=ANSWERED, answer=answer.answer, edited=answer.edited or entry.edited)


def approved(entry: LedgerEntry, answer: NewAnswer) -> LedgerEntry:
    """A call that has one approval more, and needs others."""
    approval = ApprovalRow(entry.call_index, answer.by or "", clock.now(), answer.source)
    return entry._replace(approvals=(*entry.approvals, approval))


def is_expired(entry: LedgerEntry) -> bool:
    """Whether the time for an answer is over, by the clock of this machine."""
    return entry.status == WAITING and entry.expires_at is not None and entry.expires_at <= clock.now()
