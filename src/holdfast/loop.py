"""The turn loop: what happens between a prompt and the end of its run.

It decides and owns no I/O: the journal records, the provider answers, the listeners hear. The order is always the
same: record first, publish after. Every start that is published gets its end, whatever happens in between.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from holdfast import clock, tools
from holdfast.errors import InputError, ProviderError
from holdfast.events import (
    AgentEnd,
    AgentStart,
    Event,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    StreamError,
    StreamEvent,
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
)
from holdfast.middleware import Chain, HookContext
from holdfast.providers.base import Model, Provider, Request
from holdfast.recovery import ValidHistory, with_replies
from holdfast.reply import Reply
from holdfast.signals import Aborted, Signal, until_aborted, wait_all
from holdfast.tools import Tool, ToolContext

M = TypeVar("M", bound=ModelMessage)
_LONGEST_PAUSE = 60.0


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

    provider: Provider
    model: Model
    system_prompt: str
    tools: dict[str, Tool[Any, Any]]
    sequential: bool
    middleware: Chain
    limits: Limits
    retries: int
    grace: float
    thread_id: str | None
    user_id: str | None


class RunResult(Struct, frozen=True):
    """What a run came to.

    `stop_reason` is stop, length, error or aborted, or the limit that ended the run: turn_limit, token_limit,
    cost_limit, time_limit. `messages` are those that the run added.
    """

    run_id: str
    text: str
    messages: list[Message]
    stop_reason: str
    usage: Usage
    error: ProviderError | None = None

    def raise_for_error(self) -> None:
        """Raise the model's failure, if that is how the run ended."""
        if self.error is not None:
            raise self.error


class Run:
    """One run of an agent, from its first message to `agent_end`."""

    def __init__(
        self,
        setup: Setup,
        journal: Journal,
        inbox: Inbox,
        history: ValidHistory,
        publish: Callable[[Event, Signal], None],
        run_id: str,
    ) -> None:
        self.id = run_id
        self.signal = Signal()
        self.error: ProviderError | None = None
        self._setup = setup
        self._journal = journal
        self._inbox = inbox
        self._history = history
        self._publish_to = publish
        self._messages: list[Message] = []
        self._usage = Usage()
        self._turns = 0
        self._stop_reason = "stop"
        self._open_turn = False
        self._open_reply: AssistantMessage | None = None

    async def go(self, begin: Callable[[], Awaitable[Sequence[Message]]]) -> RunResult:
        """Run until there is nothing left to do. `begin` records what the run starts with."""
        self._publish(AgentStart(self.id, self._setup.thread_id))
        failure: Failure | None = None
        seconds = self._setup.limits.seconds
        timer = asyncio.get_running_loop().call_later(seconds, self.signal.abort, "time_limit") if seconds else None
        try:
            await self._turn_by_turn(begin)
            await self._journal.save_extra()
        except BaseException as error:
            failure = as_failure(error)
            self._stop_reason = "aborted" if isinstance(error, asyncio.CancelledError) else "error"
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._close_what_is_open()
            failure = failure or (as_failure(self.error) if self.error else None)
            self._publish(AgentEnd(self.id, self._messages, self._stop_reason, self._usage, failure))
        return RunResult(self.id, self._text(), self._messages, self._stop_reason, self._usage, self.error)

    # --- turns --------------------------------------------------------------------------------------------------------

    async def _turn_by_turn(self, begin: Callable[[], Awaitable[Sequence[Message]]]) -> None:
        self._start_turn()
        self._tell(await begin())
        while True:
            try:
                reply = await self._ask()
            except Aborted:  # before there was anything to record
                self._stop_reason = self._abort_reason()
                return
            results = await self._run_tools(reply)
            self._end_turn(reply, results)
            if not self._goes_on(reply):
                return
            await self._listen_to_inbox(stopping=not reply.tool_calls)
            self._start_turn()

    def _goes_on(self, reply: AssistantMessage) -> bool:
        """Whether there is another turn. What waits in the inbox stays there when a run breaks off."""
        if self.signal.aborted:
            self._stop_reason = self._abort_reason()
            return False
        if reply.failed:
            self._stop_reason = reply.stop_reason
            return False
        stopping = not reply.tool_calls
        if stopping and not self._inbox.waiting(stopping=True):
            self._stop_reason = reply.stop_reason
            return False
        limit = self._setup.limits.reached(self._turns, self._usage)
        self._stop_reason = limit or "stop"
        return limit is None

    def _abort_reason(self) -> str:
        return "time_limit" if self.signal.reason == "time_limit" else "aborted"

    async def _listen_to_inbox(self, *, stopping: bool) -> None:
        with self._inbox.taken(stopping=stopping) as taken:
            waiting = [stamped(message) for message in taken]
            if waiting:
                await self._journal.append(waiting)
        self._tell(waiting)

    def _start_turn(self) -> None:
        self._turns += 1
        self._open_turn = True
        self._publish(TurnStart(self._turns))

    def _end_turn(self, reply: AssistantMessage | None, results: list[ToolResultMessage]) -> None:
        self._open_turn = False
        self._publish(TurnEnd(reply, results))

    # --- the model ----------------------------------------------------------------------------------------------------

    async def _ask(self) -> AssistantMessage:
        """One model call. Its failure is a reply too."""
        setup = self._setup
        request = await until_aborted(self._request(), self.signal, setup.grace)
        stream = setup.provider.stream(request, self.signal)  # what it raises here is a mistake of the program
        began = stamped(AssistantMessage([], model=setup.model.id, provider=setup.provider.name))
        self._open_reply = began
        self._publish(MessageStart(began))
        message = self._priced(await self._reply(request, stream), began)
        self._open_reply = message
        await self._journal.append([message], reserve=len(message.tool_calls))
        self._open_reply = None
        self._usage += message.usage
        self._messages.append(message)
        self._publish(MessageEnd(message))
        return message

    async def _request(self) -> Request:
        setup = self._setup
        context = HookContext(self._journal.extra, setup.thread_id, setup.user_id)
        seen = await setup.middleware.transform_context(self._journal.messages, self.signal, context)
        history = self._history.of(with_replies(seen, self._journal.messages))
        if not history:
            raise InputError(
                f"there is nothing to send to {setup.model.id!r}: the middleware left none of "
                f"{len(self._journal.messages)} messages"
            )
        specs = [tool.spec for tool in setup.tools.values()]
        return Request(setup.model, history, setup.system_prompt, specs)

    async def _reply(self, request: Request, stream: AsyncIterator[StreamEvent]) -> AssistantMessage:
        """Receive the reply; ask again after a passing failure, as long as nothing was shown."""
        setup = self._setup
        for attempt in itertools.count():
            reply = Reply(setup.model.id, setup.provider.name)
            try:
                await until_aborted(self._receive(stream, reply), self.signal, setup.grace)
                return reply.broken("aborted") if self.signal.aborted and not reply.is_whole else reply.message()
            except Aborted:
                return reply.broken("aborted")
            except Exception as raised:  # noqa: BLE001 - a provider's failure, of whatever kind, is the final message
                error = as_provider_error(raised, setup.provider.name)
            if attempt >= setup.retries or not error.retryable or not reply.is_empty:
                break
            try:
                await until_aborted(asyncio.sleep(_pause(attempt, error)), self.signal, setup.grace)
            except Aborted:
                return reply.broken("aborted")
            stream = setup.provider.stream(request, self.signal)
        self.error = error
        failure = as_failure(error)
        self._publish(MessageUpdate(StreamError(failure)))
        return reply.broken("error", failure)

    async def _receive(self, stream: AsyncIterator[StreamEvent], reply: Reply) -> None:
        """The hot path: once for each delta."""
        signal, publish = self.signal, self._publish_to
        try:
            async for event in stream:
                if signal.aborted:  # left behind by a run that is over: say nothing more
                    return
                reply.add(event)
                publish(MessageUpdate(event), signal)
        finally:
            if (close := getattr(stream, "aclose", None)) is not None:
                await close()  # gives the connection back, also when the run is aborted

    def _priced(self, message: AssistantMessage, began: AssistantMessage) -> AssistantMessage:
        usage = message.usage
        if not usage.cost and self._setup.model.prices is not None:
            usage = msgspec.structs.replace(usage, cost=self._setup.model.cost(usage))
        return msgspec.structs.replace(message, usage=usage, id=began.id, created_at=began.created_at)

    # --- tools --------------------------------------------------------------------------------------------------------

    async def _run_tools(self, reply: AssistantMessage) -> list[ToolResultMessage]:
        """Run the calls of a reply. Each result is recorded when its tool ends; the history has them in call order."""
        calls = list(enumerate(reply.tool_calls))
        results: list[ToolResultMessage] = []
        if not calls:
            return results
        if reply.failed:
            results = [stamped(tools.not_started(call, "the reply broke off")) for _, call in calls]
            for (index, _), result in zip(calls, results, strict=True):
                await self._journal.settle(index, result)
            self._journal.close_turn(results)
            self._tell(results)
            return results
        if self._setup.sequential:
            for index, call in calls:
                results.append(await self._run_tool(index, call))
                self._journal.close_turn(results[-1:])
                self._tell(results[-1:])
            return results
        tasks = [asyncio.create_task(self._run_tool(index, call)) for index, call in calls]
        await wait_all(set(tasks), self.signal)
        results = [task.result() for task in tasks]  # the first error is the run's
        self._journal.close_turn(results)
        self._tell(results)
        return results

    async def _run_tool(self, index: int, call: ToolCall) -> ToolResultMessage:
        if self.signal.aborted:
            result = stamped(tools.not_started(call, "the run was aborted"))
            await self._journal.settle(index, result)
            return result
        self._publish(ToolExecutionStart(call.id, call.name, call.arguments))
        result, stored = tools.failure(call, "This call did not come to an end."), False
        try:
            result = stamped(await self._outcome(call))
            await self._journal.settle(index, result)
            stored = True
        finally:
            self._publish(ToolExecutionEnd(call.id, call.name, result, result.is_error, stored))
        return result

    async def _outcome(self, call: ToolCall) -> ToolResultMessage:
        tool = self._setup.tools.get(call.name)
        if tool is None:
            return tools.unknown_tool(call, list(self._setup.tools))
        context = ToolContext(
            call.id,
            call.name,
            self.signal,
            self._setup.thread_id,
            self._setup.user_id,
            self._journal.extra,
            self._on_update(call),
        )
        try:
            return await until_aborted(tool.execute(call, context), self.signal, self._setup.grace)
        except Aborted:
            return tools.aborted(call)
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

    def _text(self) -> str:
        """The text of the last reply."""
        replies = [message for message in self._messages if isinstance(message, AssistantMessage)]
        return replies[-1].text if replies else ""


def stamped(message: M) -> M:
    """The message with an id and a time, where its maker gave none."""
    if message.id and message.created_at:
        return message
    return msgspec.structs.replace(
        message, id=message.id or clock.new_id(), created_at=message.created_at or clock.now()
    )


def _pause(attempt: int, error: ProviderError) -> float:
    """Seconds before the next attempt: what the service asks for, else longer each time, and never in step."""
    wait = error.retry_after if error.retry_after is not None else 0.5 * 2**attempt
    return min(wait, _LONGEST_PAUSE) * (1 + os.urandom(1)[0] / 1024)


def as_failure(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error))


def as_provider_error(error: Exception, provider: str) -> ProviderError:
    """Whatever a provider raised, as one of ours."""
    if isinstance(error, ProviderError):
        return error
    ours = ProviderError(f"provider {provider!r} failed: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
