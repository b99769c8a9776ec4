"""The turn loop: what happens between a prompt and the end of its run.

It decides and owns no I/O: the journal records, the provider answers, the listeners hear. The order is always the
same: record first, publish after. Every start that is published gets its end, whatever happens in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from holdfast import clock, telemetry, tools
from holdfast.calling import ModelCall, Patience, Route, as_failure
from holdfast.errors import HookFailed, InputError, OutputInvalid, ProviderError
from holdfast.events import (
    AgentEnd,
    AgentStart,
    Event,
    MessageEnd,
    MessageStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnEnd,
    TurnStart,
)
from holdfast.inbox import Inbox
from holdfast.journal import Journal
from holdfast.messages import (
    AssistantMessage,
    Failure,
    Message,
    ModelMessage,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from holdfast.middleware import Chain, Deny, HookContext
from holdfast.output import Output
from holdfast.providers.base import Request
from holdfast.recovery import ValidHistory
from holdfast.results import RunResult
from holdfast.signals import Aborted, Signal, turn_into_abort, until_aborted, wait_all
from holdfast.stream import Publish
from holdfast.tools import Outcome, Tool, ToolContext

M = TypeVar("M", bound=ModelMessage)
T = TypeVar("T")
_log = logging.getLogger("holdfast.tool")


class Limits(Struct, frozen=True):
    """Where a run is stopped: turns, tokens (all of them), cost, and seconds of wall time. None: no limit."""

    turns: int | None = 100
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise InputError(f"the limit on {name} must be a number above 0, or None for no limit; got {value!r}")

    def reached(self, turns: int, usage: Usage) -> str | None:
        """The stop reason of the first limit that has been reached."""
        if self.turns is not None and turns >= self.turns:
            return "turn_limit"
        if self.tokens is not None and usage.total >= self.tokens:
            return "token_limit"
        if self.cost is not None and usage.cost >= self.cost:
            return "cost_limit"
        return None


class Setup(Struct, frozen=True):
    """What stays the same from run to run of an agent."""

    routes: list[Route]
    system_prompt: str
    tools: dict[str, Tool[Any, Any]]
    sequential: bool
    middleware: Chain
    limits: Limits
    patience: Patience
    thread_id: str | None
    user_id: str | None


class _Call(NamedTuple):
    """A tool call, its place in the reply, and what makes it unlike any other call."""

    place: int
    call: ToolCall
    key: str


class Run:
    """One run of an agent, from its first message to `agent_end`."""

    def __init__(
        self,
        setup: Setup,
        journal: Journal,
        inbox: Inbox,
        history: ValidHistory,
        publish: Publish,
        run_id: str,
        output: Output[Any] | None = None,
    ) -> None:
        self.id = run_id
        self.signal = Signal()
        self.is_over = False
        self._setup = setup
        self._journal = journal
        self._inbox = inbox
        self._history = history
        self._publish_to = publish
        self._output = output
        self._value: Any = None
        self._repair: UserMessage | None = None
        self._repaired = False
        self._error: ProviderError | None = None
        self._messages: list[Message] = []
        self._usage = Usage()
        self._turns = 0
        self._stop_reason = "stop"
        self._open_turn = False
        self._open_reply: AssistantMessage | None = None
        self._broken: HookFailed | None = None

    async def go(self, begin: Callable[[], Awaitable[Sequence[Message]]]) -> RunResult:
        """Run until there is nothing left to do. `begin` records what the run starts with."""
        self._publish(AgentStart(self.id, self._setup.thread_id))
        failure: Failure | None = None
        seconds = self._setup.limits.seconds
        timer = asyncio.get_running_loop().call_later(seconds, self.signal.abort, "time_limit") if seconds else None
        try:
            result = await self._to_the_end(begin)
            failure = as_failure(result.error) if result.error else None
        except BaseException as error:
            failure = as_failure(error)
            self._stop_reason = "aborted" if isinstance(error, asyncio.CancelledError) else "error"
            if isinstance(error, Exception):  # what tools and hooks wrote to extra counts, if it can be stored at all
                with contextlib.suppress(Exception):
                    await self._journal.save_extra()
            raise
        finally:
            self.is_over = True
            if timer is not None:
                timer.cancel()
            self._close_what_is_open()
            self._publish(AgentEnd(self.id, self._messages, self._stop_reason, self._usage, failure))
        return result

    async def _to_the_end(self, begin: Callable[[], Awaitable[Sequence[Message]]]) -> RunResult:
        await self._turn_by_turn(begin)
        await self._journal.save_extra()
        limits = self._setup.limits
        while (  # something was said while that was being saved
            self._stop_reason == "stop"
            and self._inbox.waiting(stopping=True)
            and not limits.reached(self._turns, self._usage)
        ):
            await self._turn_by_turn(None)
            await self._journal.save_extra()
        result = self._result()
        try:
            await self._setup.middleware.run_end(result, self.signal, self._context())
        finally:
            await self._journal.save_extra()
        return result

    def _result(self) -> RunResult:
        replies = [message for message in self._messages if isinstance(message, AssistantMessage)]
        text = replies[-1].text if replies else ""
        return RunResult(self.id, text, self._messages, self._stop_reason, self._usage, self._error, self._value)

    # --- turns --------------------------------------------------------------------------------------------------------

    async def _turn_by_turn(self, begin: Callable[[], Awaitable[Sequence[Message]]] | None) -> None:
        try:
            if begin is None:
                await self._listen_to_inbox(stopping=True)
            reply, outcomes = await self._turn(begin)
            while await self._goes_on(reply, outcomes):
                await self._listen_to_inbox(stopping=not reply.tool_calls)
                reply, outcomes = await self._turn()
        except Aborted:  # in a hook, with nothing to record
            self._stop_reason = self._abort_reason()

    async def _turn(
        self, begin: Callable[[], Awaitable[Sequence[Message]]] | None = None
    ) -> tuple[AssistantMessage, list[Outcome]]:
        """Ask the model and run the tools that it calls. What the run starts with belongs to its first turn."""
        self._start_turn()
        with telemetry.turn(self._turns) as span:
            if begin is not None:
                if self.signal.aborted:  # while the thread was loaded: nothing was said yet
                    raise Aborted
                self._tell(await begin())
            reply = await self._ask()
            span.ended_with(reply)
            outcomes = await self._run_tools(reply)
            self._end_turn(reply, [outcome.message for outcome in outcomes])
        return reply, outcomes

    async def _goes_on(self, reply: AssistantMessage, outcomes: list[Outcome]) -> bool:
        """Whether there is another turn. What waits in the inbox stays there when a run breaks off."""
        results = [outcome.message for outcome in outcomes]
        stops = any(outcome.ends_run for outcome in outcomes) or await self._unless_aborted(
            self._setup.middleware.stops(reply, results, self.signal, self._context())
        )
        done = not reply.tool_calls and not self._inbox.waiting(stopping=True)
        if self.signal.aborted:
            self._stop_reason = self._abort_reason()
        elif reply.failed:
            self._stop_reason = reply.stop_reason
        elif stops:
            self._stop_reason = "stopped"
            self._conclude(reply)
        elif done and self._is_satisfied(reply):
            self._stop_reason = "error" if self._error else reply.stop_reason
        elif limit := self._setup.limits.reached(self._turns, self._usage):
            self._stop_reason = limit
            self._conclude(reply)
        else:
            return True
        return False

    def _conclude(self, reply: AssistantMessage) -> None:
        """The run ends early: perhaps its last reply is what was asked for all the same."""
        if self._output is not None:
            try:
                self._value = self._output.read(reply.text)
            except OutputInvalid as error:
                self._error = error

    def _is_satisfied(self, reply: AssistantMessage) -> bool:
        """Whether the final reply is what was asked for; it gets one chance to be mended."""
        if self._output is None:
            return True
        try:
            self._value = self._output.read(reply.text)
        except OutputInvalid as error:
            if self._repaired:
                self._error = error
                return True
            # Not by way of the inbox: it must not outlive the run.
            self._repair = UserMessage(f"{error}. {self._output.instruction()}")
            self._repaired = True
            return False
        return True

    def _abort_reason(self) -> str:
        return "time_limit" if self.signal.reason == "time_limit" else "aborted"

    async def _unless_aborted(self, hook: Coroutine[Any, Any, T]) -> T:
        """A hook may hang; an abort does not wait for it. Without hooks there is nothing to wait for."""
        if self._setup.middleware.is_empty:
            return await hook
        return await until_aborted(hook, self.signal, self._setup.patience.grace)

    async def _checked(self, hooks: Coroutine[Any, Any, T], withheld: T) -> T:
        """What hooks make of something that is already there. They get a moment also in an aborted run, because it
        cannot be kept without them; if they need longer, it is withheld."""
        try:
            if self.signal.aborted and not self._setup.middleware.is_empty:
                return await asyncio.wait_for(hooks, self._setup.patience.grace)
            return await self._unless_aborted(hooks)
        except (Aborted, TimeoutError):
            return withheld

    async def _listen_to_inbox(self, *, stopping: bool) -> None:
        if self._repair is not None:
            told, self._repair = [stamped(self._repair)], None
            await self._journal.append(told)
            self._tell(told)
            return
        with self._inbox.taken(stopping=stopping) as taken:
            waiting = [stamped(message) for message in taken]
            if waiting:
                await self._append_taken(waiting)
        self._tell(waiting)

    async def _append_taken(self, messages: list[UserMessage]) -> None:
        try:
            await self._journal.append(messages)
        except asyncio.CancelledError:
            if self._journal.messages[-1:] != messages[-1:]:
                raise
            turn_into_abort(self.signal)  # they are stored, and must not go back into the inbox

    def _start_turn(self) -> None:
        self._turns += 1
        self._open_turn = True
        self._publish(TurnStart(self._turns))

    def _end_turn(self, reply: AssistantMessage | None, results: list[ToolResultMessage]) -> None:
        self._open_turn = False
        self._publish(TurnEnd(reply, results))

    # --- the model ----------------------------------------------------------------------------------------------------

    async def _ask(self) -> AssistantMessage:
        """One model call, recorded. Its failure is a reply too."""
        setup = self._setup
        request = await self._unless_aborted(self._request())
        call = ModelCall(setup.routes, request, setup.patience, self.signal, self._publish_to)
        provider, model = setup.routes[0]
        began = stamped(AssistantMessage([], model=model.id, provider=provider.name))
        self._open_reply = began
        self._publish(MessageStart(began))
        message = msgspec.structs.replace(await call.answer(), id=began.id, created_at=began.created_at)
        self._open_reply = message
        self._error = call.error
        if not message.failed:
            hooks = setup.middleware.reply(message, self.signal, self._context())
            withheld = msgspec.structs.replace(message, content=[], stop_reason="aborted")
            message = msgspec.structs.replace(await self._checked(hooks, withheld), id=began.id)
        await self._journal.append([message], reserve=len(message.tool_calls))
        self._open_reply = None
        self._usage += message.usage
        self._messages.append(message)
        self._publish(MessageEnd(message))
        return message

    async def _request(self) -> Request:
        setup, context = self._setup, self._context()
        seen = await setup.middleware.messages(self._journal.messages, self.signal, context)
        history = self._history.of(seen)
        if not history:
            raise InputError(
                f"there is nothing to send to {setup.routes[0].model.id!r}: the middleware left none of "
                f"{len(self._journal.messages)} messages"
            )
        system_prompt = await setup.middleware.system_prompt(setup.system_prompt, self.signal, context)
        schema = self._output.schema if self._output else None
        specs = [tool.spec for tool in setup.tools.values()]
        return Request(setup.routes[0].model, history, system_prompt, specs, schema)

    def _context(self) -> HookContext:
        provider, model = self._setup.routes[0]
        return HookContext(
            self._journal.extra,
            self._setup.thread_id,
            self._setup.user_id,
            self.id,
            provider=provider,
            model=model,
            spend=self._spend,
        )

    def _spend(self, usage: Usage) -> None:
        self._usage += usage

    # --- tools --------------------------------------------------------------------------------------------------------

    async def _run_tools(self, reply: AssistantMessage) -> list[Outcome]:
        """Run the calls of a reply. Each result is recorded when its tool ends; the history has them in call order."""
        calls = [_Call(index, call, f"{reply.id}/{index}") for index, call in enumerate(reply.tool_calls)]
        if reply.failed:
            outcomes = [await self._decline(call, "the reply broke off") for call in calls]
            self._settled(outcomes)
            return outcomes
        if self._setup.sequential or any(self._is_sequential(call.call) for call in calls):
            outcomes = await self._run_in_turn(calls)
        else:
            outcomes = await self._run_at_once(calls)
        if self._broken is not None:  # now that each call has its result, a hook that failed may end the run
            raise self._broken
        return outcomes

    async def _run_at_once(self, calls: list[_Call]) -> list[Outcome]:
        tasks = [asyncio.create_task(self._run_tool(call)) for call in calls]
        if tasks:
            await wait_all(set(tasks), self.signal)
        errors = [error for task in tasks if (error := task.exception()) is not None]  # each is looked at
        if errors:
            raise errors[0]
        outcomes = [task.result() for task in tasks]
        self._settled(outcomes)
        return outcomes

    async def _run_in_turn(self, calls: list[_Call]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for call in calls:
            outcomes.append(await self._run_tool(call))
            self._settled(outcomes[-1:])
        return outcomes

    async def _decline(self, asked: _Call, reason: str) -> Outcome:
        """Settle a call that is not run."""
        outcome = Outcome(stamped(tools.not_started(asked.call, reason)))
        await self._journal.settle(asked.place, outcome.message)
        return outcome

    def _settled(self, outcomes: list[Outcome]) -> None:
        results = [outcome.message for outcome in outcomes]
        self._journal.close_turn(results)
        self._tell(results)

    def _is_sequential(self, call: ToolCall) -> bool:
        return call.name in self._setup.tools and self._setup.tools[call.name].sequential

    async def _run_tool(self, asked: _Call) -> Outcome:
        if self.signal.aborted:
            return await self._decline(asked, "the run was aborted")
        if self._broken is not None:
            return await self._decline(asked, "a hook failed")
        outcome, stored = Outcome(tools.failure(asked.call, "This call did not come to an end.")), False
        try:
            with telemetry.tool(asked.call) as span:
                outcome, broken = await self._outcome(asked, span)
                span.returned(outcome.message)
            outcome = outcome._replace(message=stamped(outcome.message))
            await self._journal.settle(asked.place, outcome.message)
            stored = True
        finally:
            self._publish_end(outcome.message, stored=stored)
        self._broken = self._broken or broken
        return outcome

    def _publish_end(self, result: ToolResultMessage, *, stored: bool) -> None:
        if result.is_error:
            _log.info("tool %r failed in call %r", result.tool_name, result.tool_call_id)
            _log.debug("call %r of tool %r: %s", result.tool_call_id, result.tool_name, result.text)
        self._publish(ToolExecutionEnd(result.tool_call_id, result.tool_name, result, result.is_error, stored))

    async def _outcome(self, asked: _Call, span: telemetry.Span) -> tuple[Outcome, HookFailed | None]:
        """Run one call through the middleware. A hook that fails ends the run, but the call gets its result first."""
        chain, context, call = self._setup.middleware, self._context(), asked.call
        started = False
        try:
            allowed = await self._unless_aborted(chain.call(call, self.signal, context))
            call = call if isinstance(allowed, Deny) else allowed
            self._publish(ToolExecutionStart(call.id, call.name, call.arguments))
            started = True
            if isinstance(allowed, Deny):
                span.failed("blocked")
                return Outcome(tools.failure(call, f"This call was blocked: {allowed.reason}")), None
            outcome = await self._execute(call, asked.key, span)
            withheld = tools.failure(call, "The run was aborted before the result of this call could be checked.")
            hooks = chain.result(call, outcome.message, self.signal, context)
            return outcome._replace(message=await self._checked(hooks, withheld)), None
        except Aborted:  # in the hook before
            if not started:
                self._publish(ToolExecutionStart(call.id, call.name, call.arguments))
            span.aborted()
            return Outcome(tools.aborted(call)), None
        except HookFailed as error:
            span.failed("HookFailed", str(error))
            _log.warning("a hook failed around call %r of tool %r", call.id, call.name)
            if not started:
                self._publish(ToolExecutionStart(call.id, call.name, call.arguments))
            what = "it may have taken effect, but its result is withheld" if started else "it was not run"
            return Outcome(tools.failure(call, f"A check around this call failed: {what}.")), error

    async def _execute(self, call: ToolCall, key: str, span: telemetry.Span) -> Outcome:
        tool = self._setup.tools.get(call.name)
        if tool is None:
            span.failed("unknown_tool")
            return Outcome(tools.unknown_tool(call, list(self._setup.tools)))
        context = ToolContext(
            call.id,
            call.name,
            self.signal,
            self._setup.thread_id,
            self._setup.user_id,
            hashlib.sha256(key.encode()).hexdigest()[:32],
            self._journal.extra,
            self._on_update(call),
        )
        try:
            return await until_aborted(tool.execute(call, context), self.signal, self._setup.patience.grace)
        except Aborted:
            span.aborted()
            return Outcome(tools.aborted(call))
        finally:
            context.on_update = None

    def _on_update(self, call: ToolCall) -> Callable[[Any], None]:
        """Progress may come from a tool's thread; listeners are called on the loop's."""
        loop, home = asyncio.get_running_loop(), threading.get_ident()

        def publish(event: Event) -> None:
            if self._open_turn and not self.signal.aborted:  # a tool that was left behind has nothing more to say
                self._publish(event)

        def update(progress: Any) -> None:
            event = ToolExecutionUpdate(call.id, call.name, tools.readable(progress))
            if threading.get_ident() == home:
                publish(event)
            else:
                loop.call_soon_threadsafe(publish, event)

        return update

    # --- telling ------------------------------------------------------------------------------------------------------

    def _publish(self, event: Event) -> None:
        self._publish_to(event, self.signal)

    def _tell(self, messages: Sequence[Message]) -> None:
        """Publish messages that are already on disk."""
        for message in messages:
            self._messages.append(message)
            self._publish(MessageStart(message))
            self._publish(MessageEnd(message))

    def _close_what_is_open(self) -> None:
        if self._open_reply is not None:
            self._publish(MessageEnd(self._open_reply, stored=False))
            self._open_reply = None
        if self._open_turn:
            self._end_turn(None, [])


def stamped(message: M) -> M:
    """The message with an id and a time, where its maker gave none."""
    if message.id and message.created_at:
        return message
    return msgspec.structs.replace(
        message, id=message.id or clock.new_id(), created_at=message.created_at or clock.now()
    )
