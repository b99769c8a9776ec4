"""The subscribers of an agent's events. A listener that fails or is slow does not affect the run.

A plain function is called inline and in order. An exception in it is logged, not raised into the run, and only once per
kind of exception and run: a typo would fail on every event. A coroutine function has its own queue and task, so it
cannot stall the run: when it falls too far behind, it misses `message_update`s and `tool_execution_update`s. It misses
other events only if it has stopped reading altogether.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from byssus.errors import InputError
from byssus.events import Event, MessageUpdate, ToolExecutionUpdate
from byssus.signals import Signal

Listener: TypeAlias = Callable[..., Any]
_log = logging.getLogger("byssus")
_QUEUE = 1_000  # behind this, a listener misses deltas and progress
_FULL = 100_000  # and behind this everything: it has stopped reading


class Listeners:
    """The subscribers of one agent."""

    def __init__(self) -> None:
        # Replaced with each change: a listener that unsubscribes during an event does not make another one miss it.
        self._plain: tuple[Callable[[Event, Signal], None], ...] = ()
        self._queued: list[_Queued] = []

    def add(self, listener: Listener) -> Callable[[], None]:
        """Subscribe; returns the function that unsubscribes."""
        wants_signal = _wants_signal(listener)
        if inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(getattr(listener, "__call__", None)):  # noqa: B004
            queued = _Queued(listener, wants_signal)
            self._queued.append(queued)
            return lambda: self._forget(queued)
        call = _guarded(listener, wants_signal)
        self._plain += (call,)
        return lambda: self._unsubscribe(call)

    def _unsubscribe(self, call: Callable[[Event, Signal], None]) -> None:
        self._plain = tuple(other for other in self._plain if other is not call)

    def _forget(self, queued: _Queued) -> None:
        if queued in self._queued:
            self._queued.remove(queued)
        queued.clear()

    def publish(self, event: Event, signal: Signal) -> None:
        for call in self._plain:
            call(event, signal)
        for queued in self._queued:
            queued.put(event, signal)

    async def drain(self, seconds: float) -> None:
        """Wait until the async listeners have handled all events, or the time is over."""
        tasks = [queued.task for queued in self._queued if queued.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            if late:
                _log.warning("%d listener(s) are still busy %g s after the run", len(late), seconds)


class _Queued:
    def __init__(self, listener: Listener, wants_signal: bool) -> None:
        self._listener = listener
        self._wants_signal = wants_signal
        self._events: deque[tuple[Event, Signal]] = deque()
        self._missed = 0
        self._failures = _Failures(listener)
        self.task: asyncio.Task[None] | None = None

    def put(self, event: Event, signal: Signal) -> None:
        if len(self._events) >= (_QUEUE if isinstance(event, MessageUpdate | ToolExecutionUpdate) else _FULL):
            self._missed += 1
            return
        self._events.append((event, signal))
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._work())

    def clear(self) -> None:
        self._events.clear()

    async def _work(self) -> None:
        try:
            while self._events:
                event, signal = self._events.popleft()
                try:
                    await self._call(event, signal)
                except Exception as error:  # noqa: BLE001 - reported, not raised into the run
                    self._failures.report(error, event, signal)
            if self._missed:
                _log.warning("listener %r was too slow and missed %d updates", self._listener, self._missed)
                self._missed = 0
        finally:
            self.task = None

    def _call(self, event: Event, signal: Signal) -> Awaitable[Any]:
        result: Awaitable[Any] = self._listener(event, signal) if self._wants_signal else self._listener(event)
        return result


def _guarded(listener: Listener, wants_signal: bool) -> Callable[[Event, Signal], None]:
    failures = _Failures(listener)

    def call(event: Event, signal: Signal) -> None:
        try:
            result = listener(event, signal) if wants_signal else listener(event)
            if inspect.iscoroutine(result):
                result.close()
                if failures.is_new(Coroutine, signal):
                    what = "listener %r returned a coroutine, which is not awaited; subscribe an async def"
                    _log.error(what, listener)
        except Exception as error:  # noqa: BLE001 - reported, not raised into the run
            failures.report(error, event, signal)

    return call


class _Failures:
    """What was reported of one listener in the current run."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._signal: Signal | None = None  # of that run
        self._kinds: set[type] = set()

    def is_new(self, kind: type, signal: Signal) -> bool:
        """Whether this kind of failure is the first of its run."""
        if self._signal is not signal:
            self._signal, self._kinds = signal, set()
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        return is_new

    def report(self, error: Exception, event: Event, signal: Signal) -> None:
        if self.is_new(type(error), signal):
            what = "listener %r failed on %s, and the run goes on; another %s in this run is not reported"
            _log.error(what, self._listener, event.type, type(error).__name__, exc_info=error)


def _wants_signal(listener: Listener) -> bool:
    if not callable(listener):
        raise InputError(f"a listener must be callable as f(event) or f(event, signal), got {listener!r}")
    try:
        signature = inspect.signature(listener)
    except (TypeError, ValueError):  # a builtin such as list.append has no signature
        return False
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wants_signal = sum(p.kind in named for p in signature.parameters.values()) > 1
    try:
        signature.bind(*([None, None] if wants_signal else [None]))
    except TypeError as error:
        raise InputError(
            f"a listener must be callable as f(event) or f(event, signal), but {listener!r} takes {signature}"
        ) from error
    return wants_signal
