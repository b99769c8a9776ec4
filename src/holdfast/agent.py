"""Agent: joins the loop, a provider, tools and a thread.

    agent = Agent(provider=..., model=Model(id="..."), checkpointer=cp, thread_id="trip")
    result = await agent.prompt("hello")

A run is a task of its own. Cancelling `prompt()` aborts the run, waits until it has ended in good order, and then
raises. An agent without a checkpointer works in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

from holdfast import clock, recovery, telemetry, termination
from holdfast.calling import Patience, Route
from holdfast.checkpointer import SQLiteCheckpointer, encode_extra
from holdfast.errors import AgentBusy, InputError, NothingToContinue, ThreadMoved
from holdfast.inbox import Inbox
from holdfast.journal import Journal, MemoryJournal, ThreadJournal
from holdfast.listeners import Listener, Listeners
from holdfast.loop import Limits, Run, Setup, stamped
from holdfast.messages import (
    AssistantMessage,
    Block,
    ImageContent,
    Message,
    TextContent,
    ToolResultMessage,
    Usage,
    UserMessage,
    image_type,
)
from holdfast.middleware import Chain
from holdfast.output import Output
from holdfast.providers.base import Model, Provider
from holdfast.results import RunResult
from holdfast.stream import Backlog, EventStream
from holdfast.tools import Tool

Prompt: TypeAlias = str | UserMessage | Sequence[str | UserMessage | Block]

_ATTEMPTS = 10  # to write the first message of a run, while others write to the thread too
_log = logging.getLogger("holdfast.agent")
_inside: ContextVar[frozenset[Run]] = ContextVar("holdfast_runs", default=frozenset())


class AgentState:
    """What an agent knows now. Read it; the run writes it. `extra` is yours to change."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @property
    def messages(self) -> list[Message]:
        """The thread's history; empty until the first run (or `load()`) has loaded it."""
        return self._agent._journal.messages

    @property
    def extra(self) -> dict[str, Any]:
        """A JSON object that is stored with the thread when a run ends."""
        return self._agent._journal.extra

    @property
    def is_streaming(self) -> bool:
        """Whether a run is going on."""
        return self._agent._run is not None

    @property
    def error(self) -> BaseException | None:
        """How the last run failed, or None."""
        return self._agent._error

    @property
    def usage(self) -> Usage:
        """Tokens and cost of all replies in the history."""
        return sum((message.usage for message in self.messages if isinstance(message, AssistantMessage)), Usage())


class Agent:
    """A model, its tools and its thread.

    `tool_mode` is "parallel" or "sequential"; `steering_mode` and `follow_up_mode` are "one-at-a-time" or "all".
    `model` may be a list: when one fails and nothing of its reply was shown, the next is asked. Models of several
    services need a list of providers; a model goes to the one that its `provider` names.

    `max_retries` is how often a model call is repeated after a passing failure (too many requests, an overload, a
    dropped connection), as long as nothing of the reply was shown. `abort_grace` is how long an aborted run waits for a
    provider or a tool that does not stop; `idle_timeout` how long a stream may be silent; `listener_timeout` how long a
    finished run waits for async listeners. Of a tool result longer than `max_result_chars` the model sees the beginning
    and the end; the database keeps it whole.
    """

    def __init__(
        self,
        *,
        provider: Provider | Sequence[Provider],
        model: Model | Sequence[Model],
        system_prompt: str = "",
        tools: Iterable[Tool[..., Any] | Callable[..., Any]] = (),
        checkpointer: SQLiteCheckpointer | None = None,
        thread_id: str | None = None,
        user_id: str | None = None,
        middleware: Sequence[object] = (),
        tool_mode: str = "parallel",
        steering_mode: str = "one-at-a-time",
        follow_up_mode: str = "one-at-a-time",
        limits: Limits | None = None,
        max_retries: int = 2,
        idle_timeout: float | None = 300.0,
        max_result_chars: int | None = 50_000,
        abort_grace: float = 1.0,
        listener_timeout: float = 5.0,
    ) -> None:
        _check_options(tool_mode, system_prompt, limits)
        _check_patience(max_retries, idle_timeout, abort_grace, listener_timeout)
        self._setup = Setup(
            _routes(provider, model),
            system_prompt,
            _by_name(tools),
            tool_mode == "sequential",
            Chain(middleware),
            limits or Limits(),
            Patience(max_retries, idle_timeout, abort_grace),
            thread_id,
            user_id,
        )
        self._journal = _journal(checkpointer, thread_id)
        self._inbox = Inbox(steering_mode, follow_up_mode)
        self._history = recovery.ValidHistory(max_result_chars)
        self._listeners = Listeners()
        self._listener_timeout = listener_timeout
        self._task: asyncio.Task[Any] | None = None
        self._run: Run | None = None
        self._error: BaseException | None = None
        self.state = AgentState(self)

    # --- running ------------------------------------------------------------------------------------------------------

    async def prompt(self, message: Prompt, *, output: type[Any] | None = None) -> RunResult:
        """Say something and run until the agent has nothing left to do.

        A model's failure does not raise: look at `result.error`, or call `result.raise_for_error()`. With `output=` (a
        msgspec Struct, pydantic model, dataclass, ...) the final reply is read as that type: `result.output`.
        """
        prompts = [stamped(prompt) for prompt in as_prompts(message)]
        wanted = None if output is None else Output(output)
        return await self._start(self._journal.load, lambda: self._begin_with(prompts), wanted)

    async def resume(self) -> RunResult:
        """Go on where the thread stopped, also in a fresh process: after a crash, an abort or a failure."""
        return await self._start(self._check_resumable, self._begin_again)

    def stream(self, message: Prompt | None = None, *, output: type[Any] | None = None) -> EventStream:
        """The same as `prompt()`, or without a message as `resume()`, for whoever takes the events one by one.

        `async with agent.stream("...") as events:`, then `async for event in events:`. A slow consumer slows the run
        down; one that leaves early aborts it. `events.result` is there in the end.
        """

        async def run(backlog: Backlog) -> RunResult:
            wanted = None if output is None else Output(output)
            if message is None:
                return await self._start(self._check_resumable, self._begin_again, wanted, backlog)
            prompts = [stamped(prompt) for prompt in as_prompts(message)]
            return await self._start(self._journal.load, lambda: self._begin_with(prompts), wanted, backlog)

        return EventStream(run, self._listener_timeout)

    async def load(self) -> None:
        """Load the thread now, rather than with the first run."""
        await self._loaded()
        self._check_idle()
        self._task = task = asyncio.create_task(self._journal.load())
        task.add_done_callback(self._become_idle)
        await asyncio.shield(task)

    def abort(self) -> None:
        """End the run that is going on, if any. What was already said is kept. May be called from any thread."""
        if self._run is not None:
            self._run.signal.abort()

    def steer(self, message: str | UserMessage) -> None:
        """Say something into the run: the model sees it before its next turn."""
        self._inbox.steer(_single(message, "steer"))

    def follow_up(self, message: str | UserMessage) -> None:
        """Say something when the run would stop."""
        self._inbox.follow_up(_single(message, "follow_up"))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Hear every event: `listener(event)` or `listener(event, signal)`. Returns a function that ends it."""
        return self._listeners.add(listener)

    async def wait_for_idle(self) -> None:
        """Wait until no run is going on."""
        if self._run in _inside.get():
            raise AgentBusy("wait_for_idle() was called from inside the agent's own run, which it would wait for")
        while self._task is not None:
            await asyncio.wait({self._task})

    async def _start(
        self,
        prepare: Callable[[], Awaitable[None]],
        begin: Callable[[], Awaitable[Sequence[Message]]],
        output: Output[Any] | None = None,
        backlog: Backlog | None = None,
    ) -> RunResult:
        await self._loaded()
        self._check_idle()
        publish = backlog.beside(self._listeners.publish) if backlog is not None else self._listeners.publish
        self._run = run = Run(self._setup, self._journal, self._inbox, self._history, publish, clock.new_id(), output)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = task = asyncio.create_task(self._drive(run, prepare, begin, ended))
        task.add_done_callback(lambda task: self._become_idle(task, ended))
        async with termination.Guard(run.signal):
            return await self._wait_for(run, task, ended)

    async def _wait_for(self, run: Run, task: asyncio.Task[RunResult], ended: asyncio.Future[None]) -> RunResult:
        try:
            await ended
            return task.result()
        except asyncio.CancelledError:
            run.signal.abort("cancelled")
            while not task.done():  # soon: an aborted run does not wait for anybody
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({task})
            if not task.cancelled():
                task.exception()
            raise
        finally:
            if task.done():  # also where tasks start eagerly, and end before they had a callback
                self._become_idle(task, ended)

    async def _loaded(self) -> None:
        """Let a `load()` that is under way finish first."""
        if self._run is None and self._task is not None:
            await asyncio.wait({self._task})

    def _check_idle(self) -> None:
        if self._run is not None:
            raise AgentBusy(
                "the agent is in the middle of a run; steer() or follow_up() to add to it, or await wait_for_idle()"
            )
        if self._task is not None:
            raise AgentBusy("the agent is loading its thread; await that first, or await wait_for_idle()")

    def _check_provider(self) -> None:
        """A missing key or package is said before anything is stored; with several models, another one may serve."""
        check = getattr(self._setup.routes[0].provider, "check", None)
        if check is not None and len(self._setup.routes) == 1:
            check()

    def _become_idle(self, task: asyncio.Task[Any], ended: asyncio.Future[None] | None = None) -> None:
        if self._task is task:  # and not the next one already
            self._run = self._task = None
        if ended is not None and not ended.done():
            ended.set_result(None)

    async def _drive(
        self,
        run: Run,
        prepare: Callable[[], Awaitable[None]],
        begin: Callable[[], Awaitable[Sequence[Message]]],
        ended: asyncio.Future[None],
    ) -> RunResult:
        _inside.set(frozenset({run, *(outer for outer in _inside.get() if not outer.is_over)}))
        self._error = None
        provider, model = self._setup.routes[0]
        _log.debug("run %s on thread %r begins", run.id, self._setup.thread_id)
        try:
            with telemetry.run(run.id, self._setup.thread_id, provider.name, model.id) as span:
                self._check_provider()
                await prepare()
                if self._history.is_far_behind(self.state.messages):  # a long thread, for the first time
                    await asyncio.to_thread(self._history.of, self.state.messages)
                encode_extra(self.state.extra)  # what cannot be stored at the end is said before anything happens
                result = await run.go(begin)
                span.ran(result)
            self._error = result.error
            self._report(run, result.stop_reason)
            return result
        except BaseException as error:
            self._error = error
            self._report(run, "aborted")
            raise
        finally:
            try:
                await self._listeners.drain(self._listener_timeout)
            finally:
                if not ended.done():  # from inside: a task's callbacks would come a round of the event loop later
                    ended.set_result(None)

    def _report(self, run: Run, stop_reason: str) -> None:
        thread_id, error = self._setup.thread_id, self._error
        if error is None or isinstance(error, asyncio.CancelledError):
            _log.info("run %s on thread %r ended: %s", run.id, thread_id, stop_reason)
        else:  # its text may quote what was said
            _log.warning("run %s on thread %r failed: %s", run.id, thread_id, type(error).__name__)
            _log.debug("run %s on thread %r failed", run.id, thread_id, exc_info=error)

    # --- how a run begins ---------------------------------------------------------------------------------------------

    async def _begin_with(self, prompts: list[UserMessage]) -> list[Message]:
        """Settle what an earlier run left open, and record the prompts behind whatever the thread holds by now."""
        recovered: list[Message] = []
        for _ in range(_ATTEMPTS):
            await self._journal.load()
            try:
                recovered += await self._recover()
                await self._journal.append(prompts)
            except ThreadMoved:
                continue  # somebody else wrote since we looked: read it first
            return [*recovered, *prompts]
        raise ThreadMoved(
            f"thread {self._setup.thread_id!r} is being written by others all the time; prompt again when they are done"
        )

    async def _begin_again(self) -> list[Message]:
        recovered: list[Message] = list(await self._recover())
        if recovered or recovery.can_continue(self.state.messages):
            return recovered
        with self._inbox.taken(stopping=True) as taken:
            waiting = [stamped(message) for message in taken]
            await self._journal.append(waiting)
        return list(waiting)

    async def _check_resumable(self) -> None:
        await self._journal.load(again=True)
        messages = self.state.messages
        if recovery.open_calls(messages) or recovery.can_continue(messages) or self._inbox.waiting(stopping=True):
            return
        if not messages:
            where = f"thread {self._setup.thread_id!r}" if self._setup.thread_id else "the agent"
            raise NothingToContinue(f"{where} has no messages to continue from; prompt() it first")
        raise NothingToContinue(f"Cannot continue from message role: {messages[-1].role}; prompt() it instead")

    async def _recover(self) -> list[ToolResultMessage]:
        open_calls = recovery.open_calls(self.state.messages)
        if not open_calls:
            self._journal.unsaved.clear()
            return []
        known, reply = self._journal.unsaved, recovery.last_reply_id(self.state.messages)
        results = {
            i: known.get((reply, i)) or stamped(recovery.unknown_outcome(call)) for i, call in open_calls.items()
        }
        await self._journal.recover(results)
        return list(results.values())


def as_prompts(message: Prompt) -> list[UserMessage]:
    """What a caller meant to say, as user messages."""
    if isinstance(message, str | UserMessage):
        return [_single(message, "prompt")]
    items: list[Any] = list(message) if isinstance(message, Sequence) else [message]
    if any(isinstance(item, Block) for item in items) and all(isinstance(item, Block | str) for item in items):
        blocks = [TextContent(item) if isinstance(item, str) else item for item in items]
        return [_single(UserMessage(blocks), "prompt")]
    if not items:
        raise InputError("prompt() got an empty list; say something")
    return [_single(item, "prompt") for item in items]


def _single(message: object, method: str) -> UserMessage:
    if isinstance(message, str):
        message = UserMessage(message)
    if not isinstance(message, UserMessage):
        raise InputError(f"{method}() takes text or a UserMessage, got {type(message).__name__}: {message!r:.80}")
    for block in message.content:
        if isinstance(block, ImageContent) and image_type(block) is None:
            raise InputError(
                f"{method}() got an image that is none ({block.data[:20]!r}...): pass the base64 of a PNG, JPEG, GIF "
                "or WebP file"
            )
    if not any(not isinstance(block, TextContent) or block.text.strip() for block in message.content):
        raise InputError(f"{method}() got an empty message ({message.text!r}); say something")
    return message


def _routes(provider: object, model: object) -> list[Route]:
    """Which provider serves which model, in the order in which they are asked."""
    providers: list[Any] = list(provider) if isinstance(provider, Sequence) else [provider]
    models: list[Any] = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    for item in providers or [provider]:
        if not callable(getattr(item, "stream", None)):
            raise InputError(f"provider must have a stream() method, as AnthropicProvider() does; got {item!r}")
    if len(names := {getattr(item, "name", None) for item in providers}) < len(providers):
        raise InputError(f"two providers share one of the names {names}, so that a model could only mean the first")
    for item in models or [model]:
        if not isinstance(item, Model):
            raise InputError(f"model must be a Model, for example Model(id='...', provider='...'); got {item!r}")
    return [Route(_serving(providers, item), item) for item in models]


def _serving(providers: list[Provider], model: Model) -> Provider:
    if len(providers) == 1:
        return providers[0]
    for provider in providers:
        if provider.name == model.provider:
            return provider
    names = ", ".join(repr(provider.name) for provider in providers)
    raise InputError(f"model {model.id!r} names the provider {model.provider!r}, but there are only {names}")


def _by_name(tools: Iterable[Tool[..., Any] | Callable[..., Any]]) -> dict[str, Tool[Any, Any]]:
    named: dict[str, Tool[Any, Any]] = {}
    if not isinstance(tools, Iterable):
        raise InputError(f"tools must be a list of functions, got {tools!r}")
    for item in tools:
        if not callable(item):
            raise InputError(f"a tool must be a function, with @tool or without; got {item!r}")
        tool = item if isinstance(item, Tool) else Tool(item)
        if tool.name in named:
            raise InputError(
                f"two tools are named {tool.name!r}; give one of them another name: @tool(name=...), or "
                "mcp_tools(prefix=...)"
            )
        named[tool.name] = tool
    return named


def _journal(checkpointer: SQLiteCheckpointer | None, thread_id: str | None) -> Journal:
    if checkpointer is None and thread_id is None:
        return MemoryJournal()
    if checkpointer is None:
        raise InputError(
            f"thread_id={thread_id!r} without a checkpointer: nothing would be stored; pass checkpointer=... too, "
            "or leave both out to work in memory"
        )
    if not hasattr(type(checkpointer), "store"):
        raise InputError(
            f"checkpointer must be a checkpointer, for example SQLiteCheckpointer('chat.db'), got {checkpointer!r}"
        )
    if thread_id is None:
        raise InputError("a checkpointer without a thread_id: pass thread_id=... to say which thread is driven")
    return ThreadJournal(checkpointer, thread_id)


def _check_options(tool_mode: object, system_prompt: object, limits: object) -> None:
    if tool_mode not in ("parallel", "sequential"):
        raise InputError(f"tool_mode must be 'parallel' or 'sequential', got {tool_mode!r}")
    if not isinstance(system_prompt, str):
        raise InputError(f"system_prompt must be a string, got {system_prompt!r:.80}")
    if not isinstance(limits, Limits | None):
        raise InputError(f"limits must be Limits(...), for example Limits(turns=20); got {limits!r:.80}")


def _check_patience(max_retries: object, idle_timeout: object, abort_grace: object, listener_timeout: object) -> None:
    if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
        raise InputError(f"max_retries must be a whole number from 0 up, got {max_retries!r}")
    if idle_timeout is not None and not (isinstance(idle_timeout, int | float) and idle_timeout > 0):
        raise InputError(f"idle_timeout must be a number of seconds above 0, or None; got {idle_timeout!r}")
    for name, seconds in (("abort_grace", abort_grace), ("listener_timeout", listener_timeout)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
            raise InputError(f"{name} must be a number of seconds from 0 up, got {seconds!r:.80}")
