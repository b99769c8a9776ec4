"""What happened in a run, in order: attempts, messages, model calls, tool calls, and the end.

Nothing is stored for it. It is read from the run's rows, its messages and the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

import msgspec

from byssus.messages import AssistantMessage, Message, decode, plain
from byssus.queries.log import runs
from byssus.queries.log.runs import AttemptRow, RunRow, TimelineCall, TimelineMessage
from byssus.store.operations import Runner
from byssus.threads.encoding import PAGE
from byssus.threads.runs.records import found
from byssus.values.decisions import RECOVERY, decode_answer
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
    calls = [_call(call) for call in await store.read(runs.calls, row)]
    return [*_in_order(attempts, messages, *([call] for call in calls)), *_end(row)]


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


def _call(call: TimelineCall) -> RunStep:
    about = {name: value for name, value in call._asdict().items() if name != "answer"}
    about["decision"] = decision = _decision(call)
    took = "" if call.elapsed_ms is None else f", {call.elapsed_ms / 1_000:.1f} s"
    often = "" if call.attempts <= 1 else f", {call.attempts} attempts"
    where = "" if call.thread_id is None else f" on thread {call.thread_id}"
    text = f"{call.name} ({call.call_id}) {call.status}{where}{often}{took}{f'; {decision}' if decision else ''}"
    return RunStep(call.started_at or call.asked_at or call.ended_at or "", "tool_call", text, about)


def _decision(call: TimelineCall) -> str:
    """What a person was asked and answered, or what became of a call whose outcome was unknown."""
    unknown = "its outcome was unknown after an interruption"
    if call.answer is None:
        if call.reason is not None and call.status == "waiting":
            return f"{unknown if call.reason == RECOVERY else 'it needs an approval'}: a person is asked"
        if call.status == "unknown":
            return f"{unknown}, and the model was told so (recovery={call.recovery!r})"
        if call.attempts <= 1:
            return ""
        if call.thread_id is not None:  # its child knows what was done
            return "its thread was resumed"
        return f"{unknown}: it was tried again (recovery={call.recovery!r})"
    answer = decode_answer(call.answer)
    what = "approved" if answer.is_approved else "gave the result" if answer.result is not None else "denied"
    who = call.answered_by or "a person"
    return f"{unknown}: {who} {what}" if call.reason == RECOVERY else f"{who} {what}"


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
