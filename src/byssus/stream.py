"""`agent.stream(...)`: the events of one run, as an async iterator.

    async with agent.stream("hello") as events:
        async for event in events:
            ...

The consumer sets the pace. Events wait in a backlog until they are taken. While the backlog is full, the run does not
read the model's stream further, so a slow client slows down the model instead of filling the memory. If the consumer
takes nothing for `listener_timeout` seconds, the run continues without it, and the consumer misses `message_update`
events until it has caught up. Tools do not wait when they report progress, so a full backlog drops
`tool_execution_update` events.

The run belongs to the consumer. Cancelling the consumer or closing the stream aborts the run and waits for its end.
Dropping the stream (`break` in a plain `async for`) aborts it too, but does not wait. For that to work, the run must
not keep the `EventStream` alive, so it references only the backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

from byssus.errors import InputError
from byssus.events import AgentEnd, Event, MessageUpdate, StreamDone, ToolExecutionUpdate
from byssus.signals import Signal, until_done
from byssus.values.results import RunResult

__all__ = ["EventStream"]

T = TypeVar("T")

_SIZE = 1_000  # events that wait for the consumer before the run waits for it
_FULL = 100_000  # and behind this everything is missed: it has stopped reading
_log = logging.getLogger("byssus")


class Backlog(Generic[T]):
    """The events of one run that its consumer has not taken yet, and finally the run's result."""

    def __init__(self, patience: float) -> None:
        self.result: RunResult[T] | None = None
        self.error: Exception | None = None
        self.is_over = False
        self.is_closed = False
        self._is_told = False  # the error was raised to the consumer
        self._patience = patience
        self._events: deque[Event] = deque()
        self._signal: Signal | None = None
        self._news: asyncio.Future[None] | None = None  # what the consumer waits for
        self._taken: asyncio.Future[None] | None = None  # what the run waits for
        self._is_behind = False
        self._missed = 0

    # --- the run's side -----------------------------------------------------------------------------------------------

    def beside(self, publish: Publish) -> Publish:
        """Publish to the listeners first, then to the consumer."""

        def both(event: Event, signal: Signal) -> Backlog[T] | None:
            publish(event, signal)
            return self.put(event, signal)

        return both

    def put(self, event: Event, signal: Signal) -> Backlog[T] | None:
        """Add an event; returns the backlog itself when the run had better wait for `room()` in it."""
        self._signal = signal
        waiting = len(self._events)
        if self.is_closed or (waiting >= _SIZE and self._is_missed(event, waiting)):
            self._missed += not self.is_closed
            return None
        self._events.append(event)
        _wake(self._news)
        return self if waiting + 1 >= _SIZE and not self._is_behind and not _is_whole(event) else None

    def _is_missed(self, event: Event, waiting: int) -> bool:
        if isinstance(event, MessageUpdate):
            return self._is_behind
        return isinstance(event, ToolExecutionUpdate) or waiting >= _FULL

    async def room(self) -> None:
        """Wait until the consumer has made room, but no longer for one that takes nothing."""
        while len(self._events) >= _SIZE and not self._is_behind and not self.is_closed:
            self._taken = asyncio.get_running_loop().create_future()
            try:
                done, _ = await asyncio.wait({self._taken}, timeout=self._patience)
            finally:
                self._taken = None
            self._is_behind = not done

    async def follow(self, run: Callable[[Backlog[T]], Awaitable[RunResult[T]]]) -> None:
        """Run to the end. An exception is raised to the consumer, not reported by the event loop."""
        try:
            self.result = await run(self)
        except (SystemExit, KeyboardInterrupt):  # the program ends now, not when the consumer reads it
            self._end()
            raise
        except asyncio.CancelledError:  # closed before it began, or the event loop is shut down
            self._end()
        except Exception as error:  # noqa: BLE001 - see above
            self._end(error)
        else:
            self._end()

    def _end(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_over = True
        _wake(self._news)

    # --- the consumer's side ------------------------------------------------------------------------------------------

    async def take(self) -> Event | None:
        """The next event; None when there are no more.

        `agent_end` is held back until the run is over: after it, the result is set and the agent is ready for the next
        prompt.
        """
        if self._news is not None:
            raise InputError("two tasks take from one stream at the same time; let one take, and pass the events on")
        while not self._events or (isinstance(self._events[0], AgentEnd) and not self.is_over):
            if self.is_over:
                return None
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None
        event = self._events.popleft()
        if not self._events:
            self._catch_up()
        _wake(self._taken)
        return event

    def _catch_up(self) -> None:
        self._is_behind = False
        if self._missed:
            _log.warning("the consumer of a stream was too slow and missed %d updates", self._missed)
            self._missed = 0

    def take_error(self) -> Exception | None:
        """What the run raised, once."""
        if self._is_told:
            return None
        self._is_told = True
        return self.error

    def close(self, task: asyncio.Task[None] | None) -> None:
        """The consumer is gone: end the run."""
        self.is_closed = True
        self._events.clear()
        _wake(self._news)
        _wake(self._taken)
        if self._signal is not None:
            self._signal.abort("closed")
        elif task is not None:  # it has not begun
            task.cancel()


Publish: TypeAlias = Callable[[Event, Signal], Backlog[Any] | None]


class EventStream(Generic[T]):
    """The events of one run, as an async iterator. The first `anext` starts the run; without one, nothing happens.

    The iteration raises what `prompt()` would raise. Leaving `async with` early, `aclose()` and a cancellation abort
    the run and wait for its end. A stream that is merely dropped aborts its run in the background; `await
    agent.wait_for_idle()` waits for that.
    """

    def __init__(self, run: Callable[[Backlog[T]], Awaitable[RunResult[T]]], patience: float) -> None:
        self._run = run
        self._backlog: Backlog[T] = Backlog(patience)
        self._task: asyncio.Task[None] | None = None

    @property
    def result(self) -> RunResult[T]:
        """The result of the run, once it is over. Raises what the run raised."""
        if self._backlog.result is not None:
            return self._backlog.result
        if self._backlog.error is not None:
            raise self._backlog.error
        raise InputError("the stream has no result: it is there when the iteration has come to its end")

    def __repr__(self) -> str:
        result, error = self._backlog.result, self._backlog.error
        if result is not None or error is not None:
            how = f"over: {result.stop_reason if result is not None else type(error).__name__}"
        else:
            how = "not started" if self._task is None else "closed" if self._backlog.is_closed else "running"
        return f"EventStream({how})"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        backlog = self._backlog
        if self._task is None:
            if backlog.is_closed:
                raise StopAsyncIteration
            self._task = asyncio.create_task(backlog.follow(self._run))
            self._task.add_done_callback(_look_at)
        try:
            event = await backlog.take()
        except asyncio.CancelledError:
            await self._end(self._task)
            raise
        if event is not None:
            return event
        if (error := backlog.take_error()) is not None:
            raise error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the run if it is not over, and wait for its end. Raises its exception, unless it was raised before."""
        if self._task is None:
            self._backlog.close(None)
            return
        await self._end(self._task)
        if (error := self._backlog.take_error()) is not None:
            raise error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except Exception:
            if error is None:  # what happened in the body comes first
                raise

    async def _end(self, task: asyncio.Task[None]) -> None:
        """Like a cancelled `prompt()`: the run has ended when this returns, whatever happens meanwhile."""
        self._backlog.close(task)
        cancelled = await until_done(task)
        if cancelled is not None:
            raise cancelled

    def __del__(self) -> None:
        # Through the event loop: the garbage collector comes at any moment and in any thread.
        if self._task is not None and not self._task.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the run with it
                self._task.get_loop().call_soon_threadsafe(self._backlog.close, self._task)


def _is_whole(event: Event) -> bool:
    """Whether a reply is complete: it is recorded immediately, not when the consumer reads it."""
    return isinstance(event, MessageUpdate) and isinstance(event.stream_event, StreamDone)


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # raised through the event loop already
