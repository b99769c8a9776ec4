"""The turn loop: what happens between a prompt and the end of its run.

It decides and owns no I/O: the journal stores, the provider answers, the listeners get the events. The order is always
the same: store first, publish after. Every start event that is published gets its end event, also after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from byssus import telemetry
from byssus.errors import (
    ByssusError,
    HookFailed,
    InputError,
    LeaseLost,
    QuotaExceeded,
    ThreadMoved,
    ToolMissing,
)
from byssus.events import (
    AgentEnd,
    AgentStart,
    Event,
    MessageEnd,
    MessageStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnEnd,
    TurnStart,
)
from byssus.messages import (
    AssistantMessage,
    Failure,
    Message,
    ToolResultMessage,
    Usage,
    UserMessage,
    stamped,
)
from byssus.middleware import HookContext, tokens
from byssus.providers import history as recovery
from byssus.providers.base import Request
from byssus.providers.history import ValidHistory
from byssus.providers.model_call import ModelCall, Route, as_failure, check_provider
from byssus.queries.log.runs import RequestKey
from byssus.run import tool_calls
from byssus.run.journal import Driver, Ending, Journal, Stop, answer_needed, is_waiting, nothing_to_resume
from byssus.run.outside.handing_over import HandOver
from byssus.run.settings import Setup
from byssus.run.tool_calls import Results, RunScope, ToolCalls
from byssus.signals import Aborted, HandedOver, Signal
from byssus.store.keeper import LOST
from byssus.stream import Publish
from byssus.threads.checkpoints import TURN
from byssus.threads.encoding import encode_extra
from byssus.tools import Outcome
from byssus.values import clock
from byssus.values.checkpoints import NewCheckpoint
from byssus.values.output import Output, Reading
from byssus.values.release import Release
from byssus.values.results import RunResult, StopReason, ending_of, usage_of

_NOT_RECORDED = "The run was aborted during this call. How the call ended is not recorded yet."
_ATTEMPTS = 10  # to write the first message without taking the lease first, while others write to the thread too


class _NothingToSay(Exception):
    """There is nothing for a model to answer, or a person must answer first."""


class Run:
    """One run of an agent, from its first message to `agent_end`."""

    def __init__(
        self,
        setup: Setup,
        journal: Journal,
        history: ValidHistory,
        publish: Publish,
        run_id: str,
        output: Output[Any] | None = None,
        request: RequestKey | None = None,
    ) -> None:
        self.id = run_id
        self.signal = Signal()
        self.is_over = False
        self._setup = setup
        self._journal = journal
        self._driver = Driver(run_id, self.signal, request=request)
        self._history = history
        self._publish_to = publish
        self._reading = Reading(output)
        self._error: ByssusError | None = None
        self._messages: list[Message] = []
        self._usage = Usage()
        self._unsettled = 0  # tokens that hooks have spent since the last reply
        self._turns = 0
        self._retries = 0  # model calls that were repeated, and are not recorded yet
        self._stop_reason: StopReason = "stop"
        self._is_announced = False  # whether `agent_start` was published
        self._open_turn = False
        self._is_due = False  # whether the turn ends with a checkpoint
        self._is_ended = False  # by a tool that an earlier run had begun
        self._open_reply: AssistantMessage | None = None
        self._reply_before: AssistantMessage | None = None  # of an earlier attempt, and nothing was left to ask
        self._open_calls: dict[str, ToolExecutionStart] = {}
        self._is_waiting = False  # a tool call of the last reply waits for a person's answer
        self._is_left = False  # a tool call of the last reply is left to the process that the run is handed over to
        self._has_begun = False  # what the run starts with is stored
        self.handing = HandOver(self.signal)
        self._scope = RunScope(
            setup, journal, self.signal, self.handing, self._publish, self._publish_messages, self._context
        )

    @property
    def request(self) -> RequestKey | None:
        """What makes the run's prompt happen once."""
        return self._driver.request

    async def prepare(self, prompts: list[UserMessage] | None) -> None:
        """Load the thread, and raise what keeps this run from beginning before anything is published or stored."""
        check_provider(self._setup.routes)
        history, ledger = self._journal.history, self._journal.ledger
        await history.load(again=prompts is None)
        if prompts is None:
            self._check_resumable()
            self.id = history.unfinished or self.id  # a run that goes on keeps its id
            self._driver = self._driver._replace(run_id=self.id, cause="resume")
        elif recovery.open_calls(history.messages):
            await history.load(again=True)  # another process may have recorded an answer, or settled the calls
        try:
            tool_calls.check_tools(self._setup, self._journal)
        except ToolMissing:
            if await history.is_current():
                raise
            # Else another run is at work on the calls: they are looked at again once this run has the lease.
        if prompts is not None and (is_waiting(ledger) or ledger.questions):
            raise answer_needed(self._setup.thread_id, self._journal)
        # A long thread, for the first time. What hooks make of one is another list, which is made valid by itself.
        if not self._setup.middleware.changes_messages and self._history.is_far_behind(history.messages):
            await asyncio.to_thread(self._history.of, history.messages)
        encode_extra(history.extra)  # raises for what could not be stored at the end
        self._publish_to = history.shown_to_followers(self._publish_to)

    def _check_resumable(self) -> None:
        history, ledger, inbox = self._journal
        if not (
            history.unfinished is not None
            or history.partial is not None
            or ledger.open_calls()
            or recovery.can_continue(history.messages)
            or inbox.has_mail(stopping=True)
        ):
            raise nothing_to_resume(self._setup.thread_id, history.messages)

    async def go(self, prompts: list[UserMessage] | None) -> RunResult[Any]:
        """Append the prompts, or continue where an earlier run stopped, and run until there is nothing left to do."""
        failure: Failure | None = None
        seconds = self._setup.limits.seconds
        timer = asyncio.get_running_loop().call_later(seconds, self.signal.abort, "time_limit") if seconds else None
        try:
            result = await self._to_the_end(prompts)
            failure = as_failure(result.error) if result.error else None
        except BaseException as error:
            failure = as_failure(error)
            self._stop_reason = "aborted" if isinstance(error, asyncio.CancelledError) else "error"
            await self._let_go(error)
            raise
        finally:
            self.is_over = True
            self.handing.stop()
            if timer is not None:
                timer.cancel()
            self._close_what_is_open()
            self._publish(AgentEnd(self.id, self._messages, self._stop_reason, self._usage, failure))
        return result

    async def _to_the_end(self, prompts: list[UserMessage] | None) -> RunResult[Any]:
        journal, limits = self._journal, self._setup.limits
        await self._turn_by_turn(lambda: self._begin(prompts))
        while self._stop_reason == "stop" and not limits.reached(self._turns, self._usage):
            # A hook that is called at the end belongs to the run, so the lease is kept for it.
            has_run_end = self._setup.middleware.has_run_end
            if not journal.inbox.has_mail(stopping=True) and (
                has_run_end or await self._finish(Release.END_IF_INBOX_EMPTY)
            ):
                break
            if self.handing.is_asked:
                self._stop_reason = "handed_over"
                break
            if not await self._take_from_inbox(stopping=True):  # it was withdrawn, or another run took it
                break
            await self._turn_by_turn(None)
        result = self._result()
        stays = self._is_waiting or self._stop_reason == "handed_over" or self.handing.is_late
        try:
            if self._stop_reason != "handed_over":  # the run ends in another process, and the hook is called there
                await self._setup.middleware.run_end(result, self.signal, self._context)
        finally:
            await self._finish(Release.PAUSE if stays else Release.END)
        return result

    async def _finish(self, release: Release, error: BaseException | None = None) -> bool:
        """Give the thread back; False if a message waits in the inbox, and the lease is kept for it."""
        stop = self._stop(self._stop_reason, error or self._error)
        return await self._journal.history.finish(release, self._taken_from_unsettled(), stop)

    def _stop(self, reason: StopReason, error: BaseException | None) -> Stop:
        """How the run stops, for its row."""
        retries, self._retries = self._retries, 0
        return Stop(reason, None if error is None else f"{type(error).__name__}: {error}", retries)

    async def _let_go(self, error: BaseException) -> None:
        """Release the thread after a failure. What tools and hooks wrote to extra is saved, if it can be stored."""
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                await self._finish(Release.PAUSE if self._journal.ledger.open_calls() else Release.END, error)
        else:  # torn down from outside: there is no time to wait
            with contextlib.suppress(Exception):
                self._journal.history.leave(self._taken_from_unsettled())

    def _result(self) -> RunResult[Any]:
        replies = [message for message in self._messages if isinstance(message, AssistantMessage)]
        reply = replies[-1] if replies else self._reply_before
        text, output = "" if reply is None else reply.text, self._reading.value
        return RunResult(self.id, text, self._messages, self._stop_reason, self._usage, self._error, output)

    # --- turns --------------------------------------------------------------------------------------------------------

    async def _turn_by_turn(self, begin: Callable[[], Any] | None) -> None:
        try:
            reply, outcomes = await self._turn(begin)
            while await self._goes_on(reply, outcomes):
                has_taken = await self._take_from_inbox(stopping=not reply.tool_calls)
                if not has_taken and not reply.tool_calls:  # it was withdrawn, or another run took it
                    if self._is_satisfied(reply):
                        self._stop_reason = "error" if self._error else ending_of(reply)
                        break
                    await self._take_from_inbox(stopping=True)
                reply, outcomes = await self._turn()
        except Aborted:  # in a hook, with nothing to record
            self._stop_reason = self._abort_reason()
        except HandedOver:
            self._stop_reason = "handed_over"
            self._close_what_is_open()
        except QuotaExceeded as error:
            self._stop_reason, self._error = "quota_limit", error
            self._end_turn(None, [])
        except _NothingToSay:
            ended = "stop" if self._reply_before is None else ending_of(self._reply_before)
            self._stop_reason = "waiting" if self._is_waiting else "stopped" if self._is_ended else ended
            self._end_turn(None, [])
        if self.signal.reason == LOST:
            raise LeaseLost(self._setup.thread_id or "")

    async def _turn(self, begin: Callable[[], Any] | None = None) -> tuple[AssistantMessage, list[Outcome]]:
        """Ask the model and run the tools that it calls. What the run starts with belongs to its first turn."""
        self._turns += 1
        if begin is None or self._driver.cause == "prompt":  # else it starts with the lease: see `_take_thread`
            self._start_turn()
        with telemetry.turn(self._turns) as span:
            if begin is not None:
                if self.signal.aborted:  # while the thread was loaded: nothing is stored yet
                    raise Aborted
                await begin()
            if self.handing.is_asked:
                raise HandedOver
            reply = await self._ask()
            span.ended_with(reply)
            outcomes = await self._run_tools(reply)
            if reply.tool_calls and self._is_due and not self._is_waiting:
                # The lease is held: it does not fail for lack of knowledge.
                await self._journal.history.checkpoint(self._new_checkpoint(reply))
            self._end_turn(reply, [outcome.message for outcome in outcomes])
        return reply, outcomes

    async def _run_tools(self, reply: AssistantMessage) -> list[Outcome]:
        results = await ToolCalls(self._scope, reply).run() if reply.tool_calls else Results([])
        outcomes, self._is_waiting, self._is_left = results
        return outcomes

    async def _begin(self, prompts: list[UserMessage] | None) -> None:
        """Take the lease, settle what an earlier run left open, and record what this one starts with."""
        journal = self._journal
        if prompts is not None and await self._began_at_once(prompts):
            self._has_begun = True
            return
        await self._take_thread()
        self._has_begun = prompts is None
        if journal.history.partial is not None:
            interrupted = [recovery.interrupted(journal.history.partial)]
            await journal.history.append(interrupted)
            self._publish_messages(interrupted)
        mended = await tool_calls.recover(self._scope)
        self._is_waiting = mended is not None and mended.is_waiting
        self._is_left = mended is not None and mended.is_left
        if self.signal.aborted:
            raise Aborted
        if prompts is None:
            await self._go_on_from(mended)
        elif self._is_waiting and not self._is_left:
            raise answer_needed(self._setup.thread_id, journal)
        else:
            await journal.history.append_prompt(prompts)
            self._publish_messages(prompts)
            self._has_begun = True

    async def _take_thread(self) -> None:
        """Take the lease. A run that another process has ended since is not continued."""
        try:
            await self._journal.history.begin(self._driver)
        except ThreadMoved:
            await self._journal.history.load(again=True)
            self._check_resumable()  # raises, unless that process left something to do: that is another run
            self.id = self._journal.history.unfinished or clock.new_id()
            self._driver = self._driver._replace(run_id=self.id)
            await self._journal.history.begin(self._driver)
        if not self._is_announced:  # a resume is announced when it is known which run it is
            self._start_turn()

    async def _go_on_from(self, mended: Results | None) -> None:
        """Find something for the model to answer in what an earlier run has left."""
        if self._is_left:
            raise HandedOver
        self._is_ended = mended is not None and any(outcome.ends_run for outcome in mended.outcomes)
        if self._is_waiting or self._is_ended:
            self._reply_before = recovery.last_reply(self._journal.history.messages)
            if self._is_ended and self._reply_before is not None:
                self._error = self._reading.end(self._reply_before.text)
            raise _NothingToSay
        if (mended and mended.outcomes) or recovery.can_continue(self._journal.history.messages):
            await self._take_from_inbox(stopping=False)
        elif not await self._take_from_inbox(stopping=True):
            if self._journal.history.unfinished is None:
                raise nothing_to_resume(self._setup.thread_id, self._journal.history.messages)
            if await self._had_replied():
                raise _NothingToSay
            await self._take_from_inbox(stopping=True)

    async def _had_replied(self) -> bool:
        """Whether only the end of the run was not recorded. Then its result is what the run has said, from the log."""
        messages = await self._journal.history.messages_of(self.id)
        reply = recovery.last_reply(messages)
        if reply is None:
            return True  # it had not even its prompt
        if not self._is_satisfied(reply):
            return False
        self._publish(MessageStart(reply))  # the process may have died before it published the reply
        self._publish(MessageEnd(reply))
        self._messages[:] = messages
        self._usage, self._reply_before = usage_of(messages), reply
        return True

    async def _began_at_once(self, prompts: list[UserMessage]) -> bool:
        """The usual case: with nothing to settle, the lease and the prompts are one commit."""
        journal = self._journal
        for _ in range(_ATTEMPTS):
            if journal.history.partial is not None or recovery.open_calls(journal.history.messages):
                return False
            try:
                await journal.history.begin(self._driver, prompts)
            except ThreadMoved:
                await journal.history.load()  # another writer was faster
                continue
            self._publish_messages(prompts)
            return True
        return False

    async def _goes_on(self, reply: AssistantMessage, outcomes: list[Outcome]) -> bool:
        """Whether there is another turn. Queued messages stay in the inbox when a run breaks off."""
        setup, journal = self._setup, self._journal
        results = [outcome.message for outcome in outcomes]
        if self._is_left:  # the hooks are called when the turn is complete
            self._stop_reason = "handed_over"
            return False
        stops = any(outcome.ends_run for outcome in outcomes) or await setup.unless_aborted(
            setup.middleware.stops(reply, results, self.signal, self._context), self.signal
        )
        done = not reply.tool_calls and not journal.inbox.has_mail(stopping=True)
        if self.signal.aborted:
            self._stop_reason = self._abort_reason()
        elif self._is_waiting:
            self._stop_reason = "waiting"
        elif reply.failed:
            self._stop_reason = ending_of(reply)
        elif stops:
            self._stop_reason = "stopped"
            self._error = self._reading.end(reply.text) or self._error
        elif done and self._is_satisfied(reply):
            self._stop_reason = "error" if self._error else ending_of(reply)
        elif limit := setup.limits.reached(self._turns, self._usage):
            self._stop_reason = limit
            self._error = self._reading.end(reply.text) or self._error
        elif self.handing.is_asked:
            self._stop_reason = "handed_over"
        else:
            return True
        return False

    def _is_satisfied(self, reply: AssistantMessage) -> bool:
        """Whether the final reply is valid output; the model gets one chance to correct it."""
        error = self._reading.end(reply.text)
        if error is None or not self._reading.corrects(error):
            self._error = error or self._error
            return True
        return False

    def _abort_reason(self) -> StopReason:
        if self.handing.is_late and self._has_begun:
            return "handed_over"
        return "time_limit" if self.signal.reason == "time_limit" else "aborted"

    async def _take_from_inbox(self, *, stopping: bool) -> bool:
        """Move the messages that are due into the history; False if there are none."""
        if (correction := self._reading.correction) is not None:  # not by way of the inbox: it must not outlive the run
            taken, self._reading.correction = [stamped(UserMessage(correction))], None
            await self._journal.history.append(taken)
        elif self._journal.inbox.has_mail(stopping=stopping):
            taken = await self._journal.inbox.take(stopping=stopping)
        else:
            return False
        self._publish_messages(taken)
        return bool(taken)

    def _start_turn(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            self._publish(AgentStart(self.id, self._setup.thread_id))
        self._open_turn = True
        self._publish(TurnStart(self._turns))

    def _end_turn(self, reply: AssistantMessage | None, results: list[ToolResultMessage]) -> None:
        self._open_turn = False
        self._publish(TurnEnd(reply, results))

    # --- the model ----------------------------------------------------------------------------------------------------

    async def _ask(self) -> AssistantMessage:
        """One model call, recorded. A failed call is recorded as a reply too."""
        setup = self._setup
        request = await setup.unless_aborted(self._request(), self.signal)
        provider, model = setup.routes[0]
        name, now = clock.new_id(), clock.now()
        began = AssistantMessage([], model=model.id, provider=provider.name, id=name, created_at=now)
        saver = self._journal.history.partial_writer(name, now)
        routes = await self._within_quota(request)
        call = ModelCall(routes, request, setup.patience, self.signal, self._publish_to, saver, self.handing.asked)
        self._open_reply = began
        self._publish(MessageStart(began))
        try:
            message = msgspec.structs.replace(await call.answer(), id=name, created_at=now)
        finally:
            self._retries += call.retries
        self._open_reply = message
        self._error = call.error
        if not message.failed and not setup.middleware.is_empty:
            message = await self._checked(message)
        if not message.failed:
            message = tool_calls.mark_invented(message, setup.tools)
        self._is_due = await self._counts_as_due(message)
        checkpoint = self._new_checkpoint(message) if self._is_due and not message.tool_calls else None
        release = self._release_after(message)
        spent = self._taken_from_unsettled() + message.usage.total
        ending = Ending(release, checkpoint, spent)
        if release is not None:
            ends_as = self._abort_reason() if self.signal.aborted else ending_of(message)
            ending = ending._replace(stop=self._stop(ends_as, self._error))
        await self._journal.history.append_reply(message, ending)
        self._open_reply = None
        self._usage += message.usage
        self._messages.append(message)
        self._publish(MessageEnd(message))
        return message

    async def _checked(self, reply: AssistantMessage) -> AssistantMessage:
        """The reply after the hooks have changed it."""
        setup = self._setup
        hooks = setup.middleware.reply(reply, self.signal, self._context)
        withheld = msgspec.structs.replace(reply, content=[], stop_reason="aborted")
        try:
            checked = await setup.checked(hooks, self.signal, withheld=withheld)
        except HookFailed:
            self._journal.history.refuse_partial()
            self._unsettled += reply.usage.total  # the model call is paid for, though its reply is not stored
            raise
        return msgspec.structs.replace(checked, id=reply.id)

    async def _within_quota(self, request: Request) -> list[Route]:
        """The models to call, after reserving tokens of the quota. With few left, the reply is limited to these."""
        routes = self._setup.routes
        if self._journal.history.payer is None:
            return routes
        asked, longest = tokens.needed(request, [route.model for route in routes])
        granted = await self._journal.history.set_aside(asked + longest, asked + tokens.SHORTEST_REPLY)
        if granted is None or granted >= asked + longest:
            return routes
        return [route._replace(model=tokens.shortened(route.model, granted - asked)) for route in routes]

    async def _counts_as_due(self, reply: AssistantMessage) -> bool:
        """Whether the turn of this reply ends with a checkpoint. The turn of a failed reply does not."""
        every = self._setup.checkpoint_every
        if every == 0 or reply.failed:
            return False
        # Of all runs: turns are counted per thread, not per process.
        return every == 1 or await self._journal.history.turns(every) + 1 >= every

    def _new_checkpoint(self, reply: AssistantMessage) -> NewCheckpoint:
        return NewCheckpoint(clock.new_id(), [TURN], recovery.one_line(reply), {})

    def _release_after(self, reply: AssistantMessage) -> Release | None:
        """Whether the lease can be released in the commit of this reply, which saves a commit."""
        if not self._setup.middleware.is_empty or self._reading.schema or reply.tool_calls or self.handing.is_late:
            return None
        return Release.END if reply.failed else Release.END_IF_INBOX_EMPTY

    async def _request(self) -> Request:
        setup = self._setup
        seen = await setup.middleware.messages(self._journal.history.messages, self.signal, self._context)
        self._journal.history.sent(len(seen))
        history = self._history.of(seen)
        if not history:
            raise InputError(
                f"there is nothing to send to {setup.routes[0].model.id!r}: the middleware left none of "
                f"{len(self._journal.history.messages)} messages"
            )
        system_prompt = await setup.middleware.system_prompt(setup.system_prompt, self.signal, self._context)
        specs = [tool.spec for tool in setup.tools.values()]
        return Request(setup.routes[0].model, history, system_prompt, specs, self._reading.schema)

    def _context(self) -> HookContext:
        provider, model = self._setup.routes[0]
        return HookContext(
            self._journal.history.extra,
            self._setup.thread_id,
            self._setup.user_id,
            self.id,
            provider=provider,
            model=model,
            spend=self._spend,
            marked=self._journal.history.marked,
            earlier=self._journal.history.earlier,
            earlier_count=self._journal.history.earlier_count,
        )

    def _taken_from_unsettled(self) -> int:
        spent, self._unsettled = self._unsettled, 0
        return spent

    def _spend(self, usage: Usage) -> None:
        usage = usage.plausible()
        self._usage += usage
        self._unsettled += usage.total

    # --- events -------------------------------------------------------------------------------------------------------

    def _publish(self, event: Event) -> None:
        if isinstance(event, ToolExecutionStart):
            self._open_calls[event.tool_call_id] = event
        elif isinstance(event, ToolExecutionEnd):
            self._open_calls.pop(event.tool_call_id, None)
        self._publish_to(event, self.signal)

    def leave(self) -> RunResult[Any]:
        """End the run for its listeners and its caller. Writes that are still pending publish no more events."""
        self._stop_reason = self._abort_reason()
        for call in list(self._open_calls.values()):
            result = ToolResultMessage(call.tool_call_id, call.tool_name, _NOT_RECORDED, is_error=True)
            self._publish(ToolExecutionEnd(call.tool_call_id, call.tool_name, result, is_error=True, stored=False))
        self._close_what_is_open()
        ended = self._result()
        self._messages = list(self._messages)  # what is recorded later is not added to the published list
        self._publish(AgentEnd(self.id, ended.messages, self._stop_reason, self._usage, None))
        self._publish_to = _nothing
        return ended

    def _publish_messages(self, messages: Sequence[Message]) -> None:
        """Publish messages that are already on disk."""
        for message in messages:
            self._messages.append(message)
            self._publish(MessageStart(message))
            self._publish(MessageEnd(message))

    def _close_what_is_open(self) -> None:
        if not self._is_announced:
            self._start_turn()
        if self._open_reply is not None:
            self._publish(MessageEnd(self._open_reply, stored=False))
            self._open_reply = None
        if self._open_turn:
            self._end_turn(None, [])


def _nothing(event: Event, signal: Signal) -> None:
    """The listener of a run whose `agent_end` was already published: it ignores all events."""
