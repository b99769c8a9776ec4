"""The tool calls of a reply: each is prepared, executed and settled, and every step is recorded before it counts.

A call that an earlier run left behind is settled by what the ledger knows of it:

    no entry    it was never started, so it is run; if another program stored the reply, it counts as started
    waiting     a person has not answered yet: it stays open
    answered    the person's answer is carried out
    started     it may or may not have taken effect: the tool's recovery policy decides

A call that needs its tool for that and finds an agent without it stays as it is: `check_tools` ends the run before
anything is written, so that an approval or a policy is not lost. Only a call that the model invented gets an error
result: `mark_invented` notes that in the reply, because a later run could not tell it from a tool that was removed.

A call that a fork, a rewind or an import has brought along may have run on the other side, under a key that is not
known here: it is never run again automatically, whatever the policy.

An idempotency key is random and is recorded with the start of its call or the question about it, before the tool gets
it. Later attempts read it from the ledger. So no two calls can have the same key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, NamedTuple

import msgspec

from byssus import telemetry, tools
from byssus.errors import HookFailed, ToolMissing
from byssus.events import Event, ToolExecutionEnd, ToolExecutionStart, ToolExecutionUpdate
from byssus.messages import (
    AssistantMessage,
    Message,
    TextContent,
    ToolCall,
    ToolResultMessage,
    checked_dumps,
    stamped,
)
from byssus.middleware import Context
from byssus.providers import history
from byssus.queries.log.answers import Question
from byssus.queries.log.tool_calls import ANSWERED, STARTED, WAITING, LedgerEntry
from byssus.run.children import calls as children
from byssus.run.children.calls import Caller, Open
from byssus.run.children.tool import Above, AgentTool
from byssus.run.journal import Journal, Ledger, entry_of
from byssus.run.outside import answering
from byssus.run.outside.handing_over import HandOver
from byssus.run.settings import Setup
from byssus.signals import Aborted, Signal, until_aborted, wait_all
from byssus.threads.approvals import question_of
from byssus.tools import Done, NotDone, Outcome, Tool, ToolContext
from byssus.values import clock
from byssus.values.decisions import APPROVAL, RECOVERY, Ask, Deny, decode_answer, joined

_log = logging.getLogger("byssus.tool")
_MAY_HAVE_RUN = "This call was interrupted: it may or may not have taken effect. Shall it run again?"
_OFTEN = "This call was interrupted {} times: it may or may not have taken effect. Shall it run again?"
_THREADS = 64  # OS threads at most for the plain tools of one reply; the other calls wait, and count as not started


class _Call(NamedTuple):
    """A tool call, its index in the reply, and its idempotency key."""

    call_index: int
    call: ToolCall
    key: str
    is_left_over: bool = False  # an earlier run left it behind
    is_foreign: bool = False  # it may have been started outside this thread
    is_checked: bool = False  # it has passed the hooks, and a person has approved it if one was asked
    original: str | None = None  # the arguments that a person has replaced, as JSON


class RunScope(NamedTuple):
    """What a run shares with the tool calls of its replies."""

    setup: Setup
    journal: Journal
    signal: Signal
    handing: HandOver
    publish: Callable[[Event], None]
    publish_messages: Callable[[Sequence[Message]], None]
    context: Context


class Results(NamedTuple):
    """How the calls of a reply ended, in call order."""

    outcomes: list[Outcome]
    is_waiting: bool = False  # a call has no result yet: it waits for a person's answer
    is_left: bool = False  # a call has no result yet: the run is handed over


class _Ready(NamedTuple):
    """The call is to be run."""

    call: _Call


class _Ended(NamedTuple):
    """The call has its outcome without being run."""

    outcome: Outcome


class _StaysOpen:
    """The call gets no result in this run: a person has to answer first, or the run was aborted."""


_Prepared = _Ready | _Ended | _StaysOpen


async def recover(run: RunScope) -> Results | None:
    """Settle the calls that an earlier run left open; None if there are none."""
    ledger = run.journal.ledger
    left = ledger.open_calls()
    if not left:
        ledger.unsaved.clear()
        return None
    check_tools(run.setup, run.journal)
    reply = history.last_reply(run.journal.history.messages)
    assert reply is not None
    calls = ToolCalls(run, reply)
    is_foreign = ledger.is_foreign
    if not all(ledger.was_recorded(call_index) for call_index in left):  # another program stored the reply
        await ledger.distrust(len(reply.tool_calls))
    results = await calls.run_left_over(left, is_foreign=is_foreign)
    await run.journal.history.load(again=True)  # a result may lie between messages that were there before
    return results


def mark_invented(reply: AssistantMessage, tools: Container[str]) -> AssistantMessage:
    """The reply, with a mark on each call of a tool that the agent does not have."""
    if all(call.name in tools for call in reply.tool_calls):
        return reply
    content = [
        msgspec.structs.replace(block, is_invented=True)
        if isinstance(block, ToolCall) and block.name not in tools
        else block
        for block in reply.content
    ]
    return msgspec.structs.replace(reply, content=content)


def check_tools(setup: Setup, journal: Journal) -> None:
    """Raise `ToolMissing` if calls that an earlier run left open need tools that this agent does not have."""
    reply = history.last_reply(journal.history.messages)
    if reply is None or reply.failed:
        return
    missing: dict[str, list[str]] = {}
    for call_index, call in journal.ledger.open_calls().items():
        if call.name not in setup.tools and _needs_tool(journal.ledger, call_index, call):
            missing.setdefault(call.name, []).append(call.id)
    if missing:
        raise ToolMissing(setup.thread_id, missing, list(setup.tools))


def _needs_tool(ledger: Ledger, call_index: int, call: ToolCall) -> bool:
    entry = ledger.entries.get(call_index)
    if entry is None:
        may_have_run = ledger.is_foreign or not ledger.was_recorded(call_index)
        return not may_have_run and not call.is_invented
    if entry.status == ANSWERED:  # to carry out a denial, or a result that a person gave, takes no tool
        return decode_answer(entry.answer or "{}").is_approved
    if entry.status == STARTED:  # with "never", no agent could find out more: the outcome is unknown
        return entry.recovery != "never" and (ledger.reply_key, call_index) not in ledger.unsaved
    return True


class ToolCalls:
    """The tool calls of one reply."""

    def __init__(self, run: RunScope, reply: AssistantMessage) -> None:
        self._setup, self._journal, self._signal, self._handing = run.setup, run.journal, run.signal, run.handing
        self._publish, self._publish_messages, self._context = run.publish, run.publish_messages, run.context
        self._reply = reply
        self._is_left = False  # a call was left to the process that the run is handed over to
        self._broken: HookFailed | None = None
        self._listening = False
        self._asking: set[int] = set()  # calls whose child waits for a person

    async def run(self) -> Results:
        """Run the calls of a new reply."""
        return await self._run_all(self._calls())

    async def run_left_over(self, left: Collection[int], *, is_foreign: bool) -> Results:
        """Run or settle those of the calls that an earlier run left open; foreign ones may have run elsewhere."""
        calls = [call for call in self._calls() if call.call_index in left]
        return await self._run_all([call._replace(is_left_over=True, is_foreign=is_foreign) for call in calls])

    def _calls(self) -> list[_Call]:
        return [_Call(i, call, clock.new_id()) for i, call in enumerate(self._reply.tool_calls)]

    async def _run_all(self, calls: list[_Call]) -> Results:
        """Each result is recorded when its tool ends; the history has them in call order."""
        self._listening = True
        try:
            if self._reply.failed:
                settled = {call.call_index: await self._decline(call, "the reply broke off") for call in calls}
                self._close(settled)
            else:
                settled = await self._round(calls)
            while self._may_go_on(len(calls) - len(settled)) and await self._was_answered():
                more = await self._round([call for call in calls if call.call_index not in settled])
                settled |= more
                if not more:  # one by one, and the first one still waits
                    break
                await self._journal.history.load(
                    again=True
                )  # an answer that came late puts its result between the others
        finally:
            self._listening = False
        if self._broken is not None:  # now that each call has its result, a hook that failed may end the run
            raise self._broken
        outcomes = [outcome for _, outcome in sorted(settled.items())]
        return Results(outcomes, is_waiting=len(settled) < len(calls), is_left=self._is_left)

    def _may_go_on(self, unsettled: int) -> bool:
        return unsettled > 0 and not self._signal.aborted and not self._handing.is_asked

    async def _was_answered(self) -> bool:
        """Whether a person has answered while the other calls were running."""
        ledger = self._journal.ledger
        await ledger.refresh()
        if self._asking and not ledger.questions:
            return True
        return any(entry.status == ANSWERED for entry in ledger.entries.values())

    async def _round(self, calls: list[_Call]) -> dict[int, Outcome]:
        if self._setup.sequential or any(self._is_sequential(call.call) for call in calls):
            return await self._run_in_turn(calls)
        return await self._run_at_once(calls)

    async def _run_at_once(self, calls: list[_Call]) -> dict[int, Outcome]:
        slots = asyncio.Semaphore(_THREADS)  # of this reply alone: a tool may wait for the tools of another agent
        tasks = [asyncio.create_task(self._run_in_slot(call, slots)) for call in calls]
        if tasks:
            await wait_all(set(tasks), self._signal)
        errors = [error for task in tasks if (error := task.exception()) is not None]  # each is looked at
        if errors:
            raise errors[0]
        outcomes = {call.call_index: task.result() for call, task in zip(calls, tasks, strict=True)}
        settled = {call_index: outcome for call_index, outcome in outcomes.items() if outcome is not None}
        self._close(settled)
        return settled

    async def _run_in_slot(self, call: _Call, slots: asyncio.Semaphore) -> Outcome | None:
        tool = self._setup.tools.get(call.call.name)
        if tool is None or not tool.needs_thread:
            return await self._run_one(call)
        async with slots:
            return await self._run_one(call)

    async def _run_in_turn(self, calls: list[_Call]) -> dict[int, Outcome]:
        settled: dict[int, Outcome] = {}
        for call in calls:
            outcome = await self._run_one(call)
            if outcome is None:  # what comes behind may build on it
                break
            settled[call.call_index] = outcome
            self._close({call.call_index: outcome})
        return settled

    def _is_sequential(self, call: ToolCall) -> bool:
        return call.name in self._setup.tools and self._setup.tools[call.name].sequential

    def _close(self, settled: dict[int, Outcome]) -> None:
        results = [outcome.message for _, outcome in sorted(settled.items())]
        self._journal.ledger.close_turn(results)
        self._publish_messages(results)

    # --- one call -----------------------------------------------------------------------------------------------------

    async def _run_one(self, asked: _Call) -> Outcome | None:
        """The call's outcome, recorded; None if it stays open."""
        if self._handing.leaves_calls and self._broken is None and not self._reply.failed:
            self._leave(asked)
            return None
        if self._signal.aborted or self._broken is not None:
            if asked.is_left_over or asked.call_index in self._journal.ledger.entries:
                return None
            return await self._decline(asked, "the run was aborted" if self._signal.aborted else "a hook failed")
        match await self._prepared(asked):
            case _Ready(call):
                return await self._executed(call)
            case _Ended(outcome):
                return await self._settle(asked, outcome)
            case _StaysOpen():
                return None

    def _leave(self, asked: _Call) -> None:
        """Leave a call as it is, to the process that the run is handed over to."""
        entry = self._journal.ledger.entries.get(asked.call_index)
        self._is_left = self._is_left or entry is None or entry.status != WAITING

    async def _settle(self, asked: _Call, outcome: Outcome) -> Outcome:
        outcome = outcome._replace(message=stamped(outcome.message))
        await self._journal.ledger.settle(asked.call_index, outcome)
        return outcome

    async def _decline(self, asked: _Call, reason: str) -> Outcome:
        """Settle a call that is not run."""
        return await self._settle(asked, Outcome(tools.not_started(asked.call, reason), status="denied"))

    async def _executed(self, asked: _Call) -> Outcome | None:
        outcome: Outcome | None = Outcome(tools.failure(asked.call, "This call did not come to an end."))
        stored = False
        started = _Started()
        try:
            with telemetry.tool(asked.call) as span:
                outcome, broken = await self._outcome(asked, span, started)
                if outcome is not None:
                    span.returned(outcome.message)
            if outcome is not None:
                outcome = await self._settle(asked, outcome)
            stored = True
        finally:
            if started.is_published:
                message = started.stays_open or tools.aborted(asked.call) if outcome is None else outcome.message
                self._publish_end(message, stored=stored and outcome is not None)
        self._broken = self._broken or broken
        return outcome

    def _publish_end(self, result: ToolResultMessage, *, stored: bool) -> None:
        if result.is_error:
            _log.info("tool %r failed in call %r", result.tool_name, result.tool_call_id)
            _log.debug("call %r of tool %r: %s", result.tool_call_id, result.tool_name, result.text)
        self._publish(ToolExecutionEnd(result.tool_call_id, result.tool_name, result, result.is_error, stored))

    async def _outcome(
        self, asked: _Call, span: telemetry.Span, started: _Started
    ) -> tuple[Outcome | None, HookFailed | None]:
        """Run one call through the middleware. A hook that fails ends the run, but the call gets its result first."""
        setup, call = self._setup, asked.call
        try:
            call, verdict = await self._judged(asked)
            if isinstance(verdict, Deny):
                self._announce(call, started)
                span.failed("blocked")
                return Outcome(tools.failure(call, f"This call was blocked: {verdict.reason}"), status="denied"), None
            tool = setup.tools.get(call.name)
            if tool is not None and verdict is not None:
                await self._ask(asked._replace(call=call), question_of(verdict))
                return None, None
            if tool is not None:
                await self._journal.ledger.start(_entry(asked, call, STARTED, tool))
            self._announce(call, started)
            done = await self._execute(tool, call, asked.key, span)
            return await self._checked(asked, call, done, started), None
        except Aborted:  # in the hook before, or in a tool that is left running
            span.aborted()
            if self._handing.is_late:
                self._leave(asked)
                return None, None
            self._announce(call, started)
            return Outcome(tools.aborted(call), status="aborted"), None
        except HookFailed as error:
            span.failed("HookFailed", str(error))
            _log.warning("a hook failed around call %r of tool %r", call.id, call.name)
            ran = started.is_published
            self._announce(call, started)
            what = "it may have taken effect, but its result is withheld" if ran else "it was not run"
            return Outcome(tools.failure(call, f"A check around this call failed: {what}.")), error

    async def _judged(self, asked: _Call) -> tuple[ToolCall, Deny | Ask | None]:
        """The call as the hooks leave it, and what they and its tool demand before it runs."""
        if asked.is_checked:
            return asked.call, None
        setup, signal = self._setup, self._signal
        hooks = setup.middleware.call(asked.call, signal, self._context)
        call, verdict = await setup.unless_aborted(hooks, signal)
        tool = setup.tools.get(call.name)
        if tool is None or isinstance(verdict, Deny):
            return call, verdict
        demand: Deny | Ask | None = tool.approval
        if tool.decides_by_call:
            context = self._tool_context(call, asked.key)
            demand = await until_aborted(tool.demand(call, context), signal, setup.patience.grace)
            if context.arguments != call.arguments and call.malformed is None:
                call = msgspec.structs.replace(call, arguments=context.arguments)
        if verdict is None or isinstance(demand, Deny):
            return call, demand
        return call, joined(verdict, demand)

    async def _checked(self, asked: _Call, call: ToolCall, done: Outcome | Open, started: _Started) -> Outcome | None:
        """The outcome of a call that has run, after the hooks."""
        if isinstance(done, Open):
            self._stay_open(asked, done, started)
            return None
        return await self._hooked(call, self._noted(asked, done))

    def _stay_open(self, asked: _Call, why: Open, started: _Started) -> None:
        """Leave a call to the next run, which goes on with its child."""
        started.stays_open = ToolResultMessage(asked.call.id, asked.call.name, why.text)
        self._asking.discard(asked.call_index)
        if why.is_left:
            self._leave(asked)
        else:
            self._asking.add(asked.call_index)

    def _announce(self, call: ToolCall, started: _Started) -> None:
        if not started.is_published:
            started.is_published = True
            self._publish(ToolExecutionStart(call.id, call.name, call.arguments))

    async def _execute(
        self, tool: Tool[Any, Any] | None, call: ToolCall, key: str, span: telemetry.Span
    ) -> Outcome | Open:
        if tool is None:
            span.failed("unknown_tool")
            return Outcome(tools.unknown_tool(call, list(self._setup.tools)))
        context = self._tool_context(call, key)
        began = time.perf_counter()
        outcome: Outcome | Open
        try:
            if isinstance(tool, AgentTool):
                above = Above(self._signal, self._handing)
                outcome = await children.run(
                    tool, call, key, Caller(self._setup, self._journal.ledger, above, context.update)
                )
            else:
                outcome = await until_aborted(tool.execute(call, context), self._signal, self._setup.patience.grace)
        except Aborted:
            if self._handing.is_late:
                raise
            span.aborted()
            outcome = Outcome(tools.aborted(call), status="aborted")
        finally:
            context.on_update = None
        if isinstance(outcome, Open):
            return outcome
        return outcome._replace(elapsed_ms=(time.perf_counter() - began) * 1_000)

    def _tool_context(self, call: ToolCall, key: str) -> ToolContext:
        return ToolContext(
            call.id,
            call.name,
            self._signal,
            self._setup.thread_id,
            self._setup.user_id,
            key,
            self._journal.history.extra,
            tools.own_arguments(call),
            self._on_update(call),
        )

    def _on_update(self, call: ToolCall) -> Callable[[Any], None]:
        """Progress may come from a tool's thread; listeners are called on the loop's."""
        loop, home = asyncio.get_running_loop(), threading.get_ident()

        def publish(event: Event) -> None:
            if self._listening and not self._signal.aborted:  # the progress of a tool that was left behind is dropped
                self._publish(event)

        def update(progress: Any) -> None:
            event = ToolExecutionUpdate(call.id, call.name, tools.readable(progress))
            if threading.get_ident() == home:
                publish(event)
            else:
                loop.call_soon_threadsafe(publish, event)

        return update

    # --- what an earlier run left behind ------------------------------------------------------------------------------

    async def _prepared(self, asked: _Call) -> _Prepared:
        """What is to be done with a call, by what the ledger knows of it."""
        entry = self._journal.ledger.entries.get(asked.call_index)
        if entry is None:
            if asked.is_foreign or (asked.is_left_over and not self._journal.ledger.was_recorded(asked.call_index)):
                return await self._recovered(asked, attempts=0)  # it may have been started
            return _Ready(asked)
        if entry.status == WAITING:
            return _StaysOpen()
        call, original = asked.call, entry.arguments if entry.edited is not None else None
        if (arguments := json.loads(entry.edited or entry.arguments)) is not None:  # as people and hooks have left them
            call = msgspec.structs.replace(call, arguments=arguments, malformed=None)
        key = entry.idempotency_key
        asked = asked._replace(call=call, key=key, is_checked=True, is_foreign=False, original=original)
        if entry.status == ANSWERED:
            return await self._decided(asked, entry)
        if known := self._journal.ledger.unsaved.get((self._journal.ledger.reply_key, asked.call_index)):
            return _Ended(Outcome(known))
        return await self._recovered(asked, entry.attempts)

    async def _decided(self, asked: _Call, entry: LedgerEntry) -> _Prepared:
        """Carry out a person's answer."""
        decision = decode_answer(entry.answer or "{}")
        if decision.is_approved:
            return await self._ready_as_edited(asked, entry)
        if decision.result is not None:
            result = msgspec.structs.replace(decision.result, tool_call_id=asked.call.id, tool_name=asked.call.name)
            return _Ended(await self._passed(asked.call, Outcome(result, decision.ends_run)))
        text = "A person was asked about this call and denied it" + (
            ". It was interrupted before, and may or may not have taken effect" if entry.reason == RECOVERY else ""
        )
        reason = f": {decision.reason}" if decision.reason else "."
        return _Ended(Outcome(tools.failure(asked.call, text + reason), status="denied"))

    async def _ready_as_edited(self, asked: _Call, entry: LedgerEntry) -> _Prepared:
        """Run an approved call. If the person's arguments do not fit the tool, the question is put again."""
        tool = self._setup.tools[asked.call.name]
        problem = None if asked.original is None else tool.problem_with(asked.call)
        if problem is None:
            return _Ready(asked)
        said = answering.NOT_FITTING.format(checked_dumps(asked.call.arguments), problem)
        shown = msgspec.structs.replace(asked.call, arguments=json.loads(asked.original or "{}") or {})
        text = f"{entry.question or ''} {said}".strip()
        seconds = None  # the new question has as much time as the first one had
        if entry.asked_at is not None and entry.expires_at is not None:
            seconds = clock.between(entry.asked_at, entry.expires_at)
        question = Question(entry.reason or APPROVAL, text, entry.approvers, seconds, entry.fallback)
        await self._ask(asked._replace(call=shown, original=None), question)
        return _StaysOpen()

    def _noted(self, asked: _Call, outcome: Outcome) -> Outcome:
        """The outcome of a call whose arguments a person has changed says so: the model asked for something else."""
        if asked.original is None:
            return outcome
        note = TextContent(answering.EDITED.format(checked_dumps(asked.call.arguments)))
        return outcome._replace(
            message=msgspec.structs.replace(outcome.message, content=[note, *outcome.message.content])
        )

    async def _recovered(self, asked: _Call, attempts: int) -> _Prepared:
        """Apply the tool's recovery policy to a call that was started and has no result."""
        tool = self._setup.tools.get(asked.call.name)
        policy = "never" if tool is None else tool.recovery
        if policy == "ask":
            await self._ask_whether_again(asked, _MAY_HAVE_RUN)
            return _StaysOpen()
        if asked.is_foreign:
            policy = "never"  # to retry it, or to check, takes the key that it was started with
        if policy == "retry":
            return await self._ready_again(asked, attempts)
        if policy == "check" and tool is not None:
            context = self._tool_context(asked.call, asked.key)
            try:
                answer = await until_aborted(tool.ask_check(context), self._signal, self._setup.patience.grace)
            except Aborted:
                self._is_left = self._handing.is_late
                return _StaysOpen()
            if isinstance(answer, NotDone):
                return await self._ready_again(asked, attempts)
            if isinstance(answer, Done):
                return _Ended(
                    await self._passed(asked.call, self._noted(asked, tools.outcome(asked.call, answer.result)))
                )
        return _Ended(Outcome(history.unknown_outcome(asked.call), status="unknown"))

    async def _ready_again(self, asked: _Call, attempts: int) -> _Prepared:
        """Run a call again, unless it was interrupted so often that it may itself be what ends the process."""
        limit = self._setup.tools[asked.call.name].max_attempts
        if limit is None or attempts < limit:
            return _Ready(asked)
        await self._ask_whether_again(asked, _OFTEN.format(attempts))
        return _StaysOpen()

    async def _passed(self, call: ToolCall, outcome: Outcome) -> Outcome:
        """Pass a result that does not come from running the tool through the hooks, as any result."""
        try:
            return await self._hooked(call, outcome)
        except HookFailed as error:
            self._broken = self._broken or error
            return outcome._replace(
                message=tools.failure(call, "A check around this call failed: its result is withheld.")
            )

    async def _hooked(self, call: ToolCall, outcome: Outcome) -> Outcome:
        """The outcome as the hooks leave it; an aborted run withholds what they have not seen."""
        withheld = tools.failure(call, "The run was aborted before the result of this call could be checked.")
        hooks = self._setup.middleware.result(call, outcome.message, self._signal, self._context)
        return outcome._replace(message=await self._setup.checked(hooks, self._signal, withheld=withheld))

    async def _ask_whether_again(self, asked: _Call, question: str) -> None:
        """Ask about a call that was interrupted. As many people must approve it as at first."""
        ask = self._setup.tools[asked.call.name].approval or Ask()
        await self._ask(asked, question_of(ask, RECOVERY)._replace(text=question))

    async def _ask(self, asked: _Call, question: Question) -> None:
        entry = _entry(asked, asked.call, WAITING, self._setup.tools[asked.call.name])
        await self._journal.ledger.ask(answering.asked(entry, question), question)


class _Started:
    """Whether the start of a call was published; and what its end says if it stays open."""

    is_published = False
    stays_open: ToolResultMessage | None = None


def _entry(asked: _Call, call: ToolCall, status: str, tool: Tool[Any, Any]) -> LedgerEntry:
    return entry_of(call, asked.call_index, asked.key, status, tool.recovery, original=asked.original)
