"""What happened in a run, in order: attempts, messages, model calls, tool calls, answers of people, and the end.

Nothing is stored for it. It is read from the run's rows, its messages and the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

import msgspec

from byssus.messages import AssistantMessage, Message, decode, plain
from byssus.queries.log import answers, runs
from byssus.queries.log.answers import EXPIRY, ApprovalRow
from byssus.queries.log.runs import AttemptRow, Quarantine, RunRow, TimelineCall, TimelineMessage
from byssus.store.operations import Runner
from byssus.threads.encoding import PAGE
from byssus.threads.runs.records import found
from byssus.values.decisions import RECOVERY, kind_of
from byssus.values.inputs import ThreadId
from byssus.values.results import RunStep

_SHOWN = 120  # characters of a message


async def timeline(store: Runner, run_id: str, thread_id: ThreadId | None = None) -> list[RunStep]:
    """What happened in a run, oldest first; [] for an unknown id."""
    row = await found(store, run_id, thread_id)
    if row is None:
        return []
    attempts = [*_attempts(await store.read(runs.attempts, row.key))]
    messages, turn, after = list[RunStep](), 0, 0
    while page := await store.read(runs.messages, row, after=after, limit=PAGE):
        for logged in page:
            message = decode(logged.body)
            turn += isinstance(message, AssistantMessage)
            messages.append(_message(logged, message, turn))
        after = page[-1].seq
    single = [*_quarantine(await store.read(runs.quarantine, row.key))]
    calls = await store.read(runs.calls, row)
    shared = [call.key for call in calls if call.approvers > 1]
    given = await store.read(answers.approvals, shared) if shared else []
    for call in calls:
        approvals = [approval for approval in given if approval.call == call.key]
        single += [_call(call, approvals), *_answers(call, approvals)]
    return [*_in_order(attempts, messages, *([step] for step in single)), *_end(row)]


def _in_order(*lines: Sequence[RunStep]) -> list[RunStep]:
    """Several lines of steps as one, by their times. The order of a line stays, also where a clock was set back."""
    timed = [(at, step) for line in lines for at, step in zip(accumulate((s.at for s in line), max), line, strict=True)]
    return [step for _, step in sorted(timed, key=lambda each: each[0])]


def _attempts(rows: list[AttemptRow]) -> Iterator[RunStep]:
    for number, owner, epoch, began_at, ended_at, outcome in rows:
        about = {"number": number, "owner": owner, "epoch": epoch}
        yield RunStep(began_at, "attempt", f"attempt {number} by {owner} (lease {epoch})", about)
        if ended_at is not None and outcome != "ended":
            text = f"attempt {number} {_OUTCOMES.get(outcome or '', outcome)}"
            yield RunStep(ended_at, "attempt", text, {**about, "outcome": outcome})


_OUTCOMES = {
    "waiting": "stopped: a tool call waits for a person",
    "interrupted": "was interrupted",
    "handed over": "handed the run over",
    "lost": "was lost: its process stopped without a word, and another one took over",
}


def _message(logged: TimelineMessage, message: Message, turn: int) -> RunStep:
    if not isinstance(message, AssistantMessage):
        text = f"{message.role}: {_shortened(message.text)}"
        return RunStep(logged.stored_at, "message", text, {"seq": logged.seq, "role": message.role})
    seconds = _seconds(message.created_at, logged.stored_at)
    usage, model = message.usage, f"{message.provider or '?'}:{message.model or '?'}"
    about: dict[str, Any] = {
        "seq": logged.seq,
        "turn": turn,
        "model": message.model,
        "provider": message.provider,
        "usage": msgspec.structs.asdict(usage),
        "seconds": seconds,
        "stop_reason": message.stop_reason,
        "error": plain(message.error),
    }
    took = "" if seconds is None else f", {seconds:.1f} s"
    failed = "" if message.error is None else f": {message.error.kind}: {message.error.message}"
    text = f"turn {turn}: {model} {message.stop_reason}, {usage.input:,} in, {usage.output:,} out{took}{failed}"
    began_at = logged.stored_at if seconds is None else min(message.created_at or "", logged.stored_at)
    return RunStep(began_at, "model_call", text, about)


def _quarantine(known: Quarantine) -> Iterator[RunStep]:
    if known.lifted_at is not None:
        yield RunStep(known.lifted_at, "quarantine", "a person lifted the quarantine", {"is_lifted": True})
    if known.since is not None:
        text = "quarantined: too many of its processes died; a person must lift it"
        yield RunStep(known.since, "quarantine", text, {"is_lifted": False})


def _call(call: TimelineCall, approvals: Sequence[ApprovalRow]) -> RunStep:
    about = {name: value for name, value in call._asdict().items() if name not in ("answer", "edited", "key")}
    about["edited_arguments"] = None if call.edited is None else json.loads(call.edited)
    about["approvals"] = [{"by": each.person, "at": each.given_at, "source": each.source} for each in approvals]
    about["decision"] = decision = _decision(call, approvals)
    took = "" if call.elapsed_ms is None else f", {call.elapsed_ms / 1_000:.1f} s"
    often = "" if call.attempts <= 1 else f", {call.attempts} attempts"
    where = "" if call.thread_id is None else f" on thread {call.thread_id}"
    text = f"{call.name} ({call.call_id}) {call.status}{where}{often}{took}{f'; {decision}' if decision else ''}"
    return RunStep(call.started_at or call.asked_at or call.ended_at or "", "tool_call", text, about)


def _answers(call: TimelineCall, approvals: Sequence[ApprovalRow]) -> Iterator[RunStep]:
    """Each approval of several, and the answer."""
    given: list[tuple[str, str | None, str | None, str]]
    given = [(each.given_at, each.person, each.source, "approve") for each in approvals]
    kind = kind_of(call.answer)
    if kind is not None and call.answered_at is not None and not (given and kind == "approve"):
        given.append((call.answered_at, call.answered_by, call.answered_from, kind))
    for at, by, source, answer in given:
        where = "" if source in (None, EXPIRY) else f" from {source}"
        text = f"{call.name} ({call.call_id}): {_who(by, source)} {_what(call, answer)}{where}"
        yield RunStep(at, "answer", text, {"call_id": call.call_id, "answer": answer, "by": by, "source": source})


def _who(by: str | None, source: str | None) -> str:
    return by or ("no answer in time:" if source == EXPIRY else "a person")


def _what(call: TimelineCall, answer: str) -> str:
    if answer != "approve":
        return "denied" if answer == "deny" else "gave the result"
    return "approved" if call.edited is None else "approved with edited arguments"


def _decision(call: TimelineCall, approvals: Sequence[ApprovalRow]) -> str:
    """What a person was asked and answered, or what became of a call whose outcome was unknown."""
    unknown = "its outcome was unknown after an interruption"
    answer = kind_of(call.answer)
    if answer is None:
        if call.reason is not None and call.status == "waiting":
            so_far = f" ({len(approvals)} of {call.approvers} approvals)" if call.approvers > 1 else ""
            return f"{unknown if call.reason == RECOVERY else 'it needs an approval'}: a person is asked{so_far}"
        if call.status == "unknown":
            return f"{unknown}, and the model was told so (recovery={call.recovery!r})"
        if call.attempts <= 1:
            return ""
        if call.thread_id is not None:  # its child knows what was done
            return "its thread was resumed"
        return f"{unknown}: it was tried again (recovery={call.recovery!r})"
    who = _who(call.answered_by, call.answered_from)
    if answer == "approve" and approvals:
        who = ", ".join(each.person for each in approvals)
    decided = f"{who} {_what(call, answer)}"
    return f"{unknown}: {decided}" if call.reason == RECOVERY else decided


def _end(row: RunRow) -> list[RunStep]:
    if row.ended_at is None:
        return []
    retries = f", {row.retries} model calls were repeated" if row.retries else ""
    text = f"ended: {row.stop_reason}{f', {row.error}' if row.error else ''}{retries}"
    return [RunStep(row.ended_at, "end", text, {"stop_reason": row.stop_reason, "retries": row.retries})]


def _seconds(began_at: str | None, ended_at: str) -> float | None:
    if began_at is None:
        return None
    try:
        return max((datetime.fromisoformat(ended_at) - datetime.fromisoformat(began_at)).total_seconds(), 0.0)
    except (TypeError, ValueError):  # a time that a program gave a message of its own
        return None


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
