"""SIGTERM: current runs end as by `abort()`, or are handed over, and then the program exits with the code 143.

- Only the default action, which ends the process immediately, is replaced, only while there is a run in the main
  thread, and it is restored afterwards. If a program has its own SIGTERM handler, that one is used alone.
- `finally`, `async with` and atexit do their work on the way out. When all runs are over, SystemExit comes out of
  `asyncio.run()`: by way of `prompt()`, if that is what the program's main task waits for. Elsewhere `prompt()` is
  cancelled with all other tasks; SystemExit from one of them would be raised again by a task that waits for it, in the
  middle of the shutdown.
- A SIGTERM is never lost. Where there is no run to end, it does what it would have done without us.
- A second SIGTERM changes nothing, because an abort waits only a short time. Code that follows the last run can be
  ended by it as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_EXIT_CODE = 128 + signal.SIGTERM  # what a shell reports for a program that SIGTERM ended
_log = logging.getLogger("byssus.agent")


class Guard:
    """Around the wait for a run: when SIGTERM came meanwhile, the program ends there."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_home = threading.current_thread() is threading.main_thread()  # where signals are handled
        self.exit: _Exit | None = None
        self._stop = stop

    async def __aenter__(self) -> None:
        _guards.add(self)
        if self.is_home and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # in a subinterpreter, which has no signals
                signal.signal(signal.SIGTERM, _on_sigterm)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _guards.discard(self)
        if not _guards and self.is_home and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.exit is not None:
            self.exit.run_is_over(self)
            await self.exit.wait(kind)

    def end(self, way: _Exit) -> None:
        if self in _guards:  # and not just over
            self.leave_by(way)
            _log.info("SIGTERM: the run stops")
            self._stop()

    def leave_by(self, way: _Exit) -> None:
        self.exit = way
        way.runs.add(self)


class _Exit:
    """The end of the program, as far as one event loop is concerned: when all of its runs are over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.runs: set[Guard] = set()
        self._loop = loop
        self._is_raised = False
        self._all_over: asyncio.Event | None = None

    def run_is_over(self, guard: Guard) -> None:
        self.runs.discard(guard)
        if not self.runs:
            if self._all_over is not None:
                self._all_over.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed: this is the end already
                self._loop.call_soon(self._leave)  # behind the main task, if that waits

    async def wait(self, kind: type[BaseException] | None) -> None:
        """Wait for the end, instead of returning or raising what was about to be raised."""
        is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if kind is not None and not is_cancelled and not issubclass(kind, Exception):
            return
        if _is_main(asyncio.current_task()):
            self._all_over = asyncio.Event()
            if self.runs:
                await self._all_over.wait()
            self._leave()
        elif not is_cancelled:
            await self._loop.create_future()  # everything is cancelled soon

    def _leave(self) -> None:
        if not self._is_raised:
            self._is_raised = True
            raise SystemExit(_EXIT_CODE)


def _is_main(task: Any) -> bool:
    """Whether what the task raises comes out of the event loop, and not out of another task that waits for it.

    asyncio marks the task that `asyncio.run()` waits for only by this callback. On other event loops it is not
    visible; then the task counts as one of many, which is harmless.
    """
    mark = getattr(asyncio.base_events, "_run_until_complete_cb", None)
    return any(callback is mark for callback, *_ in getattr(task, "_callbacks", None) or ())


def is_ending() -> bool:
    """Whether SIGTERM has come, and the program ends when its runs are over: no other run should begin."""
    return bool(_endings)


def _forget() -> None:
    _guards.clear()
    _endings.clear()


_guards: set[Guard] = set()
_endings: list[int] = []  # the signals that have come
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # a child has no runs, and its SIGTERM is its own


def _on_sigterm(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Can run between any two instructions, even inside a lock: it only takes note; the event loops do the rest."""
    guards = list(_guards)
    if not any(guard.is_home and guard.loop.is_running() for guard in guards):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
        return
    _endings.append(number)
    exits = {guard.loop: guard.exit for guard in guards if guard.exit is not None}
    for guard in guards:
        leaving = exits.setdefault(guard.loop, _Exit(guard.loop))
        if guard.is_home:  # it may be over before its loop comes round to it
            guard.leave_by(leaving)
        with contextlib.suppress(RuntimeError):  # its loop was closed, and the run with it
            guard.loop.call_soon_threadsafe(guard.end, leaving)
