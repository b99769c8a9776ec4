"""Agent: joins the loop, a provider, tools and a thread.

    agent = Agent(provider=..., model=Model(id="..."), checkpointer=cp, thread_id="trip")
    result = await agent.prompt("hello")

A run is an asyncio task of its own. Cancelling `prompt()` aborts the run, waits until its end is recorded, and then
raises. It does not wait for a database that does not answer: see `run/leaving.py`. An agent without a checkpointer
works in memory.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar, overload

import msgspec

from byssus import telemetry
from byssus.checkpointer import Checkpointer
from byssus.errors import AgentBusy, InputError, NotLoaded
from byssus.messages import UserMessage, stamped
from byssus.middleware import Chain
from byssus.providers import named
from byssus.providers.base import Provider
from byssus.providers.history import ValidHistory
from byssus.providers.named import ModelName
from byssus.queries.log.inbox import FOLLOW_UP, STEER
from byssus.queries.log.runs import RequestKey
from byssus.run import settings, termination
from byssus.run.children import leading
from byssus.run.children.tool import Above, AgentTool, Below, MadeAgent, settings_below
from byssus.run.journal import pending
from byssus.run.known.state import AgentState, Known
from byssus.run.leaving import Leaving
from byssus.run.listeners import Listener, Listeners
from byssus.run.loop import Run
from byssus.run.outside import answering, handing_over, requests
from byssus.run.outside.journals import journal_for
from byssus.run.outside.reporting import report
from byssus.run.settings import Limits, Setup
from byssus.signals import run_blocking, shielded
from byssus.stream import Backlog, EventStream
from byssus.threads import approvals, inbox
from byssus.threads.forks import At
from byssus.threads.inbox import Receipt, Waiting
from byssus.threads.thread import Thread
from byssus.tools import Tool
from byssus.values import clock
from byssus.values.checkpoints import NewCheckpoint
from byssus.values.decisions import Answer, Ask, Pending
from byssus.values.inputs import ThreadId, checked_id, checked_wait, id_of
from byssus.values.output import Output
from byssus.values.prompts import Prompt, as_prompts, single
from byssus.values.results import RunResult

T = TypeVar("T")
InboxMode: TypeAlias = Literal["one-at-a-time", "all"]
Key: TypeAlias = str | None  # of a prompt that happens once

_A_MOMENT = 0.005  # seconds before a checkpoint is tried again, while a run is beginning or ending
_A_WHILE = 0.1  # seconds between two checks of whether an aborted run has ended
_log = logging.getLogger("byssus.agent")
_inside: ContextVar[frozenset[Run]] = ContextVar("byssus_runs", default=frozenset())


class Agent:
    """A model, its tools and its thread.

    `tool_mode` is "parallel" or "sequential"; `steering_mode` and `follow_up_mode` are "one-at-a-time" or "all".
    `model` is a `Model`, or a string that names the service too: "anthropic:<model id>", "openai:<model id>", "local".
    A list names fallbacks: if a model fails before any of its reply was shown, the next one is called. `provider` is
    optional: pass one for keys of your own, another server, or another service. With several providers, each model goes
    to the one that it names.

    `max_retries` is how often a model call is repeated after a transient failure (too many requests, an overload, a
    dropped connection), as long as nothing of the reply was shown. `abort_grace` is how long an aborted run waits for a
    provider or a tool that does not stop; `idle_timeout` how long a stream may be silent; `listener_timeout` how long a
    finished run waits for async listeners. If a tool result is longer than `max_result_chars`, the model sees its
    beginning and its end; the database stores all of it.

    `wait` is how many seconds a run waits for a thread that another run drives, before it raises `ThreadBusy`.
    `save_partial` is how often an incomplete reply is saved, in seconds; None saves only complete replies. While
    another process follows the thread, it is saved every 250 ms. With `stream_durability="strict"`, listeners, streams
    and followers get a piece of a reply only after it is committed, so no crash takes back a word that was shown.

    `checkpoint_every` is "turn" or a number of turns: a checkpoint is made automatically after each. `at` is a
    checkpoint or a seq of the thread. The agent then works on a fork from that point, whose id is `agent.thread_id`.

    `history` is how much of a stored thread is loaded: "all" of it, or a number of messages from its end. With "auto",
    all is loaded, unless the first window in `middleware` needs less of a long thread.

    With `raise_errors`, a run raises the error that `result.error` would hold. Each call can override it.
    `on_sigterm` says what SIGTERM does with a run: "abort" it, or "hand_over" to another process.
    """

    _task: asyncio.Task[Any] | None = None  # a run, or a load
    _run: Run | None = None
    _error: BaseException | None = None
    _above: Above | None = None  # the run of another agent, of which this one is a tool

    def __init__(
        self,
        *,
        model: ModelName | Sequence[ModelName],
        provider: Provider | Sequence[Provider] | None = None,
        system_prompt: str = "",
        tools: Iterable[Tool[..., Any] | Callable[..., Any]] = (),
        checkpointer: Checkpointer | None = None,
        thread_id: ThreadId | None = None,
        user_id: str | None = None,
        middleware: Sequence[object] = (),
        tool_mode: Literal["parallel", "sequential"] = "parallel",
        steering_mode: InboxMode = "one-at-a-time",
        follow_up_mode: InboxMode = "one-at-a-time",
        limits: Limits | None = None,
        max_retries: int = 2,
        idle_timeout: float | None = 300.0,
        max_result_chars: int | None = 50_000,
        abort_grace: float = 1.0,
        listener_timeout: float = 5.0,
        wait: float = 0,
        save_partial: float | None = 1.0,
        stream_durability: Literal["normal", "strict"] = "normal",
        checkpoint_every: Literal["turn"] | int | None = None,
        at: At | None = None,
        history: Literal["auto", "all"] | int = "auto",
        raise_errors: bool = False,
        on_sigterm: Literal["abort", "hand_over"] = "abort",
    ) -> None:
        settings.check_options(tool_mode, system_prompt, limits)
        times = (max_retries, idle_timeout, abort_grace, listener_timeout, save_partial)
        self._setup = Setup(
            named.routes(provider, model),
            system_prompt,
            settings.tools_by_name(tools),
            tool_mode == "sequential",
            (chain := Chain(middleware)),
            limits or Limits(),
            settings.patience(*times, is_strict=settings.checked_strict(stream_durability, checkpointer)),
            id_of(thread_id) if at is None else clock.new_id(),
            None if user_id is None else checked_id(user_id, "a user id"),
            settings.checked_every(checkpoint_every, checkpointer),
            settings.messages_to_load(history, chain),
        )
        self._modes, self._history = inbox.modes(steering_mode, follow_up_mode), ValidHistory(max_result_chars)
        self._checkpointer, self._listener_timeout, self._wait = checkpointer, listener_timeout, checked_wait(wait)
        self._journal = journal_for(checkpointer, thread_id, self._setup, self._modes, self._wait, at)
        self._listeners, self._hands_over = Listeners(), handing_over.checked_policy(on_sigterm)
        self._raise_errors = settings.checked_flag(raise_errors, "raise_errors")
        self.state = AgentState(self._known)

    @property
    def thread_id(self) -> str | None:
        """The thread that this agent drives; with `at=`, the fork that its first run makes."""
        return self._setup.thread_id

    @property
    def user_id(self) -> str | None:
        """The user that owns the thread, or None."""
        return self._setup.user_id

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The checkpointer that stores the thread; None for an agent that works in memory."""
        return self._checkpointer

    @property
    def models(self) -> list[str]:
        """The models that answer, as `service:id`: the first one, and its fallbacks."""
        return [f"{route.provider.name}:{route.model.id}" for route in self._setup.routes]

    @property
    def tools(self) -> list[Tool[..., Any]]:
        """The tools that the model can call."""
        return list(self._setup.tools.values())

    @property
    def system_prompt(self) -> str:
        """The system prompt."""
        return self._setup.system_prompt

    def attach(self, checkpointer: Checkpointer, thread_id: ThreadId, *, user_id: str | None = None) -> None:
        """Give a new agent its checkpointer and thread, as if they had been passed to `Agent(...)`.

        For programs that build agents in one place and choose the database in another. Raises `InputError` for an agent
        that has a checkpointer, or has messages already.
        """
        if self._checkpointer is not None:
            raise InputError(f"the agent has a checkpointer already: {self._checkpointer.name}; attach() a new agent")
        if self._task is not None or self._journal.history.messages:
            raise InputError("the agent has messages already, which would not be stored; attach() a new agent")
        user = self._setup.user_id if user_id is None else checked_id(user_id, "a user id")
        setup = msgspec.structs.replace(self._setup, thread_id=id_of(thread_id), user_id=user)
        self._journal = journal_for(checkpointer, thread_id, setup, self._modes, self._wait, None)
        self._setup, self._checkpointer = setup, checkpointer

    def as_tool(
        self,
        name: str,
        description: str = "",
        *,
        output: type[Any] | None = None,
        sequential: bool = False,
        approval: bool | Ask = False,
    ) -> Tool[[str], Any]:
        """Return a tool for another agent: a call of it gives this agent a task, and returns its answer.

        Each call works on a child thread of its own, with the settings of this agent and for the user of the calling
        one. An interrupted call resumes its child. `output` is the type of the answer, as in `prompt(output=)`.
        """
        if self._checkpointer is not None or self._setup.user_id is not None:
            raise InputError(
                f"the agent for the tool {name!r:.80} has a checkpointer or a user_id of its own; make it without: "
                "each call works on a new thread, in the database and for the user of the agent that calls it"
            )
        return AgentTool(name, description, self._below, output=output, sequential=sequential, approval=approval)

    def _below(self, place: Below) -> MadeAgent:
        """An agent with the settings of this one, for a call of another agent."""
        child = copy.copy(self)
        child._task = child._run = child._error = None
        child._setup = settings_below(self._setup, place)
        child._checkpointer, child._history = place.database, self._history.renewed()
        child._journal = journal_for(place.database, place.thread, child._setup, self._modes, self._wait, None)
        child._listeners, child.state = Listeners(), AgentState(child._known)

        def lead(above: Above) -> None:
            child._above = above

        return MadeAgent(child, child._journal, lead)

    def __repr__(self) -> str:
        return f"Agent({' | '.join(self.models)!r}, thread_id={self.thread_id!r}, tools={list(self._setup.tools)!r})"

    async def __aenter__(self) -> Self:
        """Load the thread, so that `state` and `pending` can be read."""
        await self.load()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the current run, if any; after an exception, abort it first.

        The checkpointer stays open: it belongs to the code that opened it.
        """
        if error is not None:
            await self._end_run()
            return
        try:
            await self.wait_for_idle()
        except asyncio.CancelledError:
            await self._end_run()
            raise

    async def _end_run(self) -> None:
        """Abort the run and wait for its end, also if this task is cancelled; but not for a database that hangs."""
        cancelled: asyncio.CancelledError | None = None
        self.abort()
        while self._run is not None and self._run not in _inside.get() and self._task is not None:
            try:
                with shielded():
                    await asyncio.wait({self._task}, timeout=_A_WHILE)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # --- running ------------------------------------------------------------------------------------------------------

    @overload
    async def prompt(
        self, message: Prompt, *, output: type[T], raise_errors: bool | None = None, key: Key = None
    ) -> RunResult[T]: ...
    @overload
    async def prompt(
        self, message: Prompt, *, output: None = None, raise_errors: bool | None = None, key: Key = None
    ) -> RunResult[None]: ...
    async def prompt(
        self, message: Prompt, *, output: Any = None, raise_errors: bool | None = None, key: Key = None
    ) -> RunResult[Any]:
        """Send a message and run until the agent has nothing left to do.

        A failure of the model is returned in `result.error`; pass `raise_errors=True` to raise it. With `output=` (a
        msgspec Struct, pydantic model, dataclass, ...) the final reply is parsed as that type: `result.output`.

        A prompt with a `key` happens once: sent again, from any process, it joins the run that the key began, or
        returns its result. A message with an id of its own counts as such a key while it is in the thread.
        """
        raises = self._raises(raise_errors)
        return _outcome(await self._ask(message, None if output is None else Output(output), key), raises)

    @overload
    async def resume(self, *, output: type[T], raise_errors: bool | None = None) -> RunResult[T]: ...
    @overload
    async def resume(self, *, output: None = None, raise_errors: bool | None = None) -> RunResult[None]: ...
    async def resume(self, *, output: type[Any] | None = None, raise_errors: bool | None = None) -> RunResult[Any]:
        """Continue where the thread stopped: after a crash, an abort, a failure or an answer. Works in a new process.

        Raises `NothingToResume` if there is nothing to continue. With an open question, the stop reason is "waiting".
        """
        raises = self._raises(raise_errors)
        return _outcome(await self._start(None, None if output is None else Output(output)), raises)

    @overload
    def run_sync(
        self, message: Prompt | None = None, *, output: type[T], raise_errors: bool | None = None, key: Key = None
    ) -> RunResult[T]: ...
    @overload
    def run_sync(
        self, message: Prompt | None = None, *, output: None = None, raise_errors: bool | None = None, key: Key = None
    ) -> RunResult[None]: ...
    def run_sync(
        self, message: Prompt | None = None, *, output: Any = None, raise_errors: bool | None = None, key: Key = None
    ) -> RunResult[Any]:
        """Run `prompt(message)`, or `resume()` without a message, and block until the end.

        Raises inside a running event loop (a notebook, a web service); write `await agent.prompt(...)` there.
        """

        def run() -> Coroutine[Any, Any, RunResult[Any]]:
            if message is None:
                requests.refuse_key(key)
                return self.resume(output=output, raise_errors=raise_errors)
            return self.prompt(message, output=output, raise_errors=raise_errors, key=key)

        instead = "'await agent.resume()'" if message is None else "'await agent.prompt(...)'"
        return run_blocking(run, "run_sync()", instead)

    @overload
    def stream(
        self, message: Prompt | None = None, *, output: type[T], raise_errors: bool | None = None, key: Key = None
    ) -> EventStream[T]: ...
    @overload
    def stream(
        self, message: Prompt | None = None, *, output: None = None, raise_errors: bool | None = None, key: Key = None
    ) -> EventStream[None]: ...
    def stream(
        self, message: Prompt | None = None, *, output: Any = None, raise_errors: bool | None = None, key: Key = None
    ) -> EventStream[Any]:
        """Run `prompt(message)`, or `resume()` without a message, and iterate over its events.

        `async with agent.stream("...") as events:`, then `async for event in events:`. A slow consumer slows the run
        down; leaving early aborts it. `events.result` is set when the iteration has ended. With `raise_errors`, the
        iteration raises the run's error after the last event. A run that a `key` joins yields whole messages.
        """
        raises = self._raises(raise_errors)

        async def run(backlog: Backlog[Any]) -> RunResult[Any]:
            wanted = None if output is None else Output(output)
            if message is None:
                requests.refuse_key(key)
                return _outcome(await self._start(None, wanted, backlog), raises)
            return _outcome(await self._ask(message, wanted, key, backlog), raises)

        return EventStream(run, self._listener_timeout)

    async def _ask(
        self, message: Prompt, output: Output[Any] | None, key: str | None, backlog: Backlog[Any] | None = None
    ) -> RunResult[Any]:
        """Run a prompt; one that has a key, once."""
        messages, thread_key = as_prompts(message), self._journal.history.key
        request = requests.request_of(messages, key, is_stored=thread_key is not None)
        prompts = [stamped(prompt) for prompt in messages]
        if request is None or thread_key is None or self._checkpointer is None:
            return await self._start(prompts, output, backlog)

        def start(*, resumes: bool) -> Coroutine[Any, Any, RunResult[Any]]:
            return self._start(None if resumes else prompts, output, backlog, request)

        once = requests.Once(self._checkpointer.store, thread_key, request, start, self._going)
        return await once.result(output, backlog)

    def _going(self, request: RequestKey) -> asyncio.Task[RunResult[Any]] | None:
        """The task of the run that is going on, if it has this request."""
        return self._task if self._run is not None and self._run.request == request else None

    def _raises(self, raise_errors: bool | None) -> bool:
        """Whether a call raises the error of its result: its own argument, or else the agent's default."""
        if raise_errors is None:
            return self._raise_errors
        return settings.checked_flag(raise_errors, "raise_errors")

    async def load(self) -> None:
        """Load the thread now instead of at the first run."""
        await self._loaded()
        self._check_idle()
        self._task = task = asyncio.create_task(self._journal.history.load())
        task.add_done_callback(self._become_idle)
        await asyncio.shield(task)

    async def earlier(self, limit: int = 100, *, before: int | None = None) -> Thread:
        """Return up to `limit` messages before `state.messages`, or before a seq, to show more of a long thread.

        Neither `state.messages` nor what the model gets changes. For the next page, pass `before=page.seqs[0]`, as long
        as `page.has_earlier`.
        """
        self._check_loaded("earlier()")
        return await self._journal.history.page(limit, before)

    def abort(self) -> None:
        """Stop the current run, if any. Messages so far are kept. May be called from any OS thread."""
        if self._run is not None:
            self._run.signal.abort()

    def hand_over(self, grace: float = handing_over.GRACE) -> None:
        """Stop the current run at its next commit and leave it unfinished. May be called from any thread.

        Another process goes on with it at once: `resume()`, or `cp.supervise()`. Nothing is aborted: tools that run
        and a reply that streams have `grace` seconds to end. The stop reason is "handed_over", or how the run ended if
        nothing was left to do.
        """
        seconds = handing_over.checked_grace(grace)
        if self._run is not None:
            self._run.handing.ask(seconds)

    def steer(self, message: Prompt) -> Receipt:
        """Queue a message for the current run: the model sees it before its next turn.

        The write is submitted when this returns; await the receipt to wait for the commit. A message with an id of its
        own is queued once, even if it is sent again. May be called from any OS thread.
        """
        return self._journal.inbox.send(STEER, single(message, "steer"))

    def follow_up(self, message: Prompt) -> Receipt:
        """Queue a message that is delivered when the run would otherwise stop. Await the receipt as with `steer`."""
        return self._journal.inbox.send(FOLLOW_UP, single(message, "follow_up"))

    async def inbox(self) -> list[Waiting]:
        """The queued messages that were not delivered yet, in order, from all senders."""
        return await self._journal.inbox.waiting()

    async def withdraw(self, message: str | Receipt | Waiting) -> bool:
        """Remove a queued message; False if it was already delivered."""
        return await self._journal.inbox.withdraw(inbox.id_of(message))

    @property
    def pending(self) -> list[Pending]:
        """Open questions as of the last run; `cp.pending()` reads the database. Raises `NotLoaded` before a load."""
        self._check_loaded("pending")
        return pending(self._setup.thread_id or "", self._journal)

    async def answer(self, call_id: str, answer: Answer, *, by: str | None = None, source: str | None = None) -> bool:
        """Answer for a call that waits: "approve", `Approve(arguments=...)`, "deny", `Deny(reason)`, `ToolResult(...)`.

        It is recorded, with who answered (`by`) and from where (`source`); `resume()` (or `prompt()`) goes on with it,
        here or elsewhere. Arguments that do not fit the tool raise `ArgumentsInvalid`, an unknown call `NotFound`, and
        a second answer `AlreadyAnswered`. Returns False if the call needs more approvals.
        """
        return await answering.answer(self._setup, self._journal.ledger, call_id, approvals.checked(answer, by, source))

    async def checkpoint(self, *, tags: Sequence[str] = (), summary: str | None = None, state: Any = None) -> str:
        """Make a checkpoint of the thread as it is now, also during a run; returns its id.

        The default summary is the beginning of the last message. `cp.get` returns `state`; rewinds do not restore it.
        """
        checkpoint = NewCheckpoint(clock.new_id(), tags, summary, {} if state is None else state)
        while not await self._checkpointed(checkpoint):  # noqa: ASYNC110 - no event tells that a lease was claimed
            await asyncio.sleep(_A_MOMENT)
        return checkpoint.id

    async def _checkpointed(self, checkpoint: NewCheckpoint) -> bool:
        """Make the checkpoint, unless a run is about to begin or to end. Between runs, none can begin meanwhile."""
        if self._run is not None:
            return await self._journal.history.checkpoint(checkpoint)
        await self._loaded()
        if self._run is not None or self._task is not None:
            return False
        self._task = task = asyncio.create_task(self._load_and_checkpoint(checkpoint))
        task.add_done_callback(self._become_idle)
        return await asyncio.shield(task)

    async def _load_and_checkpoint(self, checkpoint: NewCheckpoint) -> bool:
        await self._journal.history.load()
        return await self._journal.history.checkpoint(checkpoint)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event)` or `listener(event, signal)` for every event. Returns a function that unsubscribes."""
        return self._listeners.add(listener)

    async def wait_for_idle(self) -> None:
        """Wait until no run is in progress."""
        if self._run in _inside.get():
            raise AgentBusy("wait_for_idle() was called from inside the agent's own run, which it would wait for")
        while self._task is not None:
            await asyncio.wait({self._task})

    async def _start(
        self,
        prompts: list[UserMessage] | None,
        output: Output[Any] | None = None,
        backlog: Backlog[Any] | None = None,
        request: RequestKey | None = None,
    ) -> RunResult[Any]:
        await self._loaded()
        self._check_idle()
        publish = backlog.beside(self._listeners.publish) if backlog is not None else self._listeners.publish
        self._run = run = Run(self._setup, self._journal, self._history, publish, clock.new_id(), output, request)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = task = asyncio.create_task(self._drive(run, prompts, ended))
        task.add_done_callback(lambda task: self._become_idle(task, ended))
        leaving = Leaving(run.signal, lambda: self._journal.history.waiting_since, ended)
        try:
            if self._above is not None:
                with leading.led(run, self._above):
                    return await self._wait_for(run, task, ended, leaving)
            stop = self.hand_over if self._hands_over else partial(run.signal.abort, "terminated")
            async with termination.Guard(stop):
                return await self._wait_for(run, task, ended, leaving)
        finally:
            leaving.stop()

    async def _wait_for(
        self, run: Run, task: asyncio.Task[RunResult[Any]], ended: asyncio.Future[None], leaving: Leaving
    ) -> RunResult[Any]:
        try:
            await ended
            return task.result() if task.done() else self._left(run, task)
        except asyncio.CancelledError:
            run.signal.abort("cancelled")
            await leaving.until_ended(task)
            if not task.done():
                self._left(run, task)
            elif not task.cancelled():
                task.exception()
            raise
        finally:
            if task.done():  # also where tasks start eagerly, and end before they had a callback
                self._become_idle(task, ended)

    def _left(self, run: Run, task: asyncio.Task[RunResult[Any]]) -> RunResult[Any]:
        """Leave an aborted run that waits for its database: it ends in the background, before the next run begins."""
        _log.warning("run %s on thread %r was aborted; the database does not answer", run.id, self._setup.thread_id)
        task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        self._run = None
        return run.leave()

    async def _loaded(self) -> None:
        """Wait for a `load()` in progress, or for an aborted run that is still being recorded."""
        if self._run is None and self._task is not None:
            await asyncio.wait({self._task})

    def _known(self) -> Known:
        return Known(self._journal.history, self._setup.thread_id, self._run is not None, self._error)

    def _check_loaded(self, what: str) -> None:
        if not self._journal.history.is_loaded:
            raise NotLoaded(self._setup.thread_id or "", what)

    def _check_idle(self) -> None:
        if self._run is not None:
            raise AgentBusy(
                "the agent is in the middle of a run; steer() or follow_up() to add to it, or await wait_for_idle()"
            )
        if self._task is not None:
            raise AgentBusy("the agent is loading its thread; await that first, or await wait_for_idle()")

    def _become_idle(self, task: asyncio.Task[Any], ended: asyncio.Future[None] | None = None) -> None:
        if self._task is task:  # and not the next one already
            self._run = self._task = None
        if ended is not None and not ended.done():
            ended.set_result(None)

    async def _drive(self, run: Run, prompts: list[UserMessage] | None, ended: asyncio.Future[None]) -> RunResult[Any]:
        _inside.set(frozenset({run, *(outer for outer in _inside.get() if not outer.is_over)}))
        self._error = None
        provider, model = self._setup.routes[0]
        _log.debug("run %s on thread %r begins", run.id, self._setup.thread_id)
        try:
            with telemetry.run(run.id, self._setup.thread_id, provider.name, model.id) as span:
                await run.prepare(prompts)
                result = await run.go(prompts)
                span.ran(result)
            await self._journal.history.tidy()
            self._error = result.error
            report(run.id, self._setup.thread_id, result.stop_reason, self._error)
            return result
        except BaseException as error:
            self._error = error
            report(run.id, self._setup.thread_id, "aborted", error)
            raise
        finally:
            try:
                await self._listeners.drain(self._listener_timeout)
            finally:
                if not ended.done():  # from inside: a task's callbacks would come a round of the event loop later
                    ended.set_result(None)


def _outcome(result: RunResult[Any], raises: bool) -> RunResult[Any]:
    if raises:
        result.raise_for_error()
    return result
