"""The signal that asks a run to stop.

It is set once and from any thread. A tool looks at `aborted` between two steps, or awaits `wait()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from byssus.errors import InputError

__all__ = ["Aborted", "Signal"]

T = TypeVar("T")
_log = logging.getLogger("byssus")

_abandoned: set[asyncio.Task[Any]] = set()  # work that ignored its cancellation: kept alive, no longer waited for


class Aborted(Exception):
    """The signal was set before the work was done."""


class HandedOver(Exception):
    """The run was asked to stop here and leave the rest to another process."""


class Signal:
    """Set once, by `abort()` or by a limit; `reason` says why."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._reason: str | None = None

    @property
    def aborted(self) -> bool:
        """True once the run has been asked to stop."""
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Why the run was asked to stop, or None."""
        return self._reason

    def abort(self, reason: str = "aborted") -> None:
        """Set the signal. The first reason stays."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - the others want to know too
                _log.exception("a callback of an abort signal failed")

    def on_abort(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back once when the signal is set (now if it is set already); returns a function that unregisters it."""
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return lambda: self._forget(callback)
        callback()
        return lambda: None

    async def wait(self) -> None:
        """Return when the signal is set."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        forget = self.on_abort(lambda: loop.call_soon_threadsafe(done.set))
        try:
            await done.wait()
        finally:
            forget()

    def _forget(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)


async def until_aborted(work: Coroutine[Any, Any, T], signal: Signal, grace: float) -> T:
    """Do the work, or raise `Aborted` soon after the signal is set, even if the work ignores its cancellation.

    Work that does not end within `grace` seconds of its cancellation is left behind. A cancellation of the caller
    sets the signal, so that a run which is torn down from outside ends like one that was aborted.
    """
    if signal.aborted:
        work.close()
        raise Aborted
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    task = loop.create_task(_waking(work, woken))
    forget = signal.on_abort(lambda: loop.call_soon_threadsafe(woken.set))
    try:
        await _wait(woken, signal)
    finally:
        forget()
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=grace)
    if not task.done():
        _abandoned.add(task)
        task.add_done_callback(_bury)
        raise Aborted
    if task.cancelled():
        if signal.aborted:
            raise Aborted
        raise RuntimeError("it was cancelled from inside")
    return task.result()


async def _waking(work: Coroutine[Any, Any, T], woken: asyncio.Event) -> T:
    """Do the work and say so at once: a task's callbacks would come a round of the event loop later."""
    try:
        return await work
    finally:
        woken.set()


async def wait_all(tasks: set[asyncio.Task[T]], signal: Signal) -> None:
    """Wait until all are done; a cancellation of the caller sets the signal and the wait goes on."""
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            turn_into_abort(signal)


def shielded() -> contextlib.AbstractContextManager[object]:
    """A block in which anyio does not cancel this task.

    The cancel scopes of anyio (Starlette, FastAPI, MCP and httpx have them) cancel a task again in each round of the
    event loop until it has left the scope. A task that must wait to the end of something would burn a core meanwhile.
    Nothing but a shielded scope in that very task prevents it. Without anyio there are no such scopes.
    """
    scope = getattr(sys.modules.get("anyio"), "CancelScope", None)
    return contextlib.nullcontext() if scope is None else scope(shield=True)


async def until_done(
    future: asyncio.Future[Any], on_cancel: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait until a future is done, whatever comes in between; returns the last cancellation that came."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            with contextlib.nullcontext() if cancelled is None else shielded():
                await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    return cancelled


async def _wait(woken: asyncio.Event, signal: Signal) -> None:
    try:
        await woken.wait()
    except asyncio.CancelledError:
        turn_into_abort(signal)


def run_blocking(work: Callable[[], Coroutine[Any, Any, T]], method: str, instead: str) -> T:
    """Do the work on an event loop of its own and return when it is done, for code that has no event loop."""
    refuse_in_loop(method, instead)
    return asyncio.run(work())


def refuse_in_loop(method: str, instead: str) -> None:
    """Raise inside a running event loop, which a method that blocks would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InputError(f"{method} was called inside a running event loop, which it would block; write {instead} there")


def turn_into_abort(signal: Signal) -> None:
    """A cancellation arrived at a point where the run must go on to its end: it becomes an abort."""
    current = asyncio.current_task()
    if current is not None:
        current.uncancel()
    signal.abort("cancelled")


def _bury(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # mark it as retrieved
