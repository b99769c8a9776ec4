"""Handlers: the functions that do tasks, and where they run.

- Async handlers share an event loop on an OS thread of the worker. So one that never yields cannot stop the worker: the
  loop is given up, and the next handlers get a new one.
- Plain functions run on an OS thread each. One that does not stop when it is asked to is left behind.
- Functions with `process=True` run in a process each, which can be killed (`processes.py`).

Whatever a handler raises becomes an outcome, SystemExit and KeyboardInterrupt included. A child process that a handler
has forked ends where the handler ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from byssus.errors import InputError
from byssus.values.inputs import checked_text
from byssus.worker.outcomes import STOPPED, Failed, GivenBack, Outcome, error_json, outcome_of_error, outcome_of_value

_log = logging.getLogger("byssus.worker")


class Handler(NamedTuple):
    """A function and how it is run."""

    function: Callable[..., Any]
    kind: Literal["async", "thread", "process"]


def checked_handler(name: object, function: object, *, process: bool = False) -> tuple[str, Handler]:
    """A handler for a type of tasks."""
    if not isinstance(name, str) or not checked_text("a task's type", name):
        raise InputError(f"a task's type must be a string with at least one character, got {name!r:.80}")
    if not callable(function):
        raise InputError(f"the handler of {name!r} must be a function of a context and a payload, got {function!r:.80}")
    # Of an object that can be called, the method says it.
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    if is_async and process:
        raise InputError(f"the handler of {name!r} is async; process=True is for plain functions")
    return name, Handler(function, "process" if process else "async" if is_async else "thread")


class AsyncAttempt:
    """A handler on the event loop."""

    def __init__(self, call: Callable[[], Awaitable[Any]], max_result: int, ended: Callable[[Outcome], object]) -> None:
        self._call = call
        self._max_result = max_result
        self._ended = ended
        self.task: asyncio.Task[None] | None = None
        self.is_cut = False

    def start(self) -> None:
        """On the loop."""
        self.task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """On the loop. A handler that is cancelled before its first step has not run at all."""
        self.is_cut = True
        if self.task is not None:
            self.task.cancel()

    async def _run(self) -> None:
        pid = os.getpid()
        outcome: Outcome = STOPPED
        try:
            if not self.is_cut:
                outcome = outcome_of_value(await self._call(), self._max_result)
        except asyncio.CancelledError as error:
            outcome = STOPPED if self.is_cut else Failed(error_json(error))
        except BaseException as error:  # noqa: BLE001 - the loop would end with a SystemExit
            outcome = outcome_of_error(error)
        end_child(pid)
        # What a handler returns that has caught its cancellation is not what it was to do.
        self._ended(outcome if not self.is_cut or isinstance(outcome, GivenBack) else STOPPED)


class HandlerLoop:
    """An event loop on an OS thread of its own, started with the first handler."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._asked_at: float | None = None  # when it was asked to answer, if it has not answered yet

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, soon."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="byssus-handlers", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(function)

    def silent_for(self) -> float:
        """For how many seconds the loop owes an answer; if it owes none, it is asked for one."""
        asked_at = self._asked_at
        if asked_at is not None:
            return time.monotonic() - asked_at
        if self._loop is not None:
            self._asked_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._answer)
        return 0.0

    def current(self) -> asyncio.Task[Any] | None:
        """The task that the loop is at."""
        return None if self._loop is None else asyncio.current_task(self._loop)

    def stop(self, seconds: float = 2.0) -> None:
        """End the loop. What still runs on it is cancelled; a loop that is blocked is left behind."""
        if self._loop is not None and self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(seconds)

    def _answer(self) -> None:
        self._asked_at = None

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=1.0))
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:  # noqa: BLE001 - the end of an OS thread that nobody waits for
            _log.warning("the event loop of handlers has ended: %s", type(error).__name__)
        finally:
            if not asyncio.all_tasks(loop):
                loop.close()


class ThreadAttempt:
    """A handler on an OS thread."""

    def __init__(self, call: Callable[[], Any], max_result: int, ended: Callable[[Outcome], object]) -> None:
        self._call = call
        self._max_result = max_result
        self._ended = ended

    def start(self, name: str) -> None:
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        pid = os.getpid()
        try:
            outcome = outcome_of_value(self._call(), self._max_result)
        except BaseException as error:  # noqa: BLE001 - it travels to the task
            outcome = outcome_of_error(error)
        end_child(pid)
        self._ended(outcome)


def end_child(pid: int) -> None:
    """End this process if it is not the one that it was: a handler has forked, and this is the child."""
    if os.getpid() != pid:
        os._exit(0)
