"""How a tool's function is run: off the event loop if it blocks, and not for longer than it may."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

_GRACE = 1.0  # seconds that a tool has to clean up after its time was over
_running: set[asyncio.Task[Any]] = set()  # also those that ignored their cancellation and are no longer waited for


class TimedOut(Exception):
    """The work took longer than it may."""


class Exited(Exception):
    """The function asked the whole program to exit, which is not its business."""


async def run(function: Callable[..., Any], arguments: dict[str, Any], *, positional: bool = False) -> Any:
    """Call a function of either kind."""
    args, kwargs = (arguments.values(), {}) if positional else ((), arguments)
    try:
        if is_async(function):
            return await function(*args, **kwargs)
        result = await in_thread(lambda: function(*args, **kwargs))
        return await result if hasattr(type(result), "__await__") else result
    except SystemExit as error:  # it would end the event loop
        raise Exited(error.code) from error


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def within(work: Coroutine[Any, Any, R], seconds: float | None) -> R:
    """Do the work, or raise `TimedOut` soon after so many seconds, whatever the work thinks of its cancellation."""
    if seconds is None:
        return await work
    task = asyncio.create_task(work)
    _running.add(task)
    task.add_done_callback(_bury)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=_GRACE)
    except asyncio.CancelledError:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # whoever cancels a call knows how long to wait for it
        raise
    if not task.done() or task.cancelled() or task.exception() is not None:
        raise TimedOut
    return task.result()  # it was late, but it has done its work: the truth is worth more than the limit


def _bury(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # nobody else may ask


async def in_thread(function: Callable[[], R]) -> R:
    """Run a blocking function on a daemon thread of its own.

    Not the event loop's pool: one that hangs must neither use it up nor keep the program from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: R | None = None
        error: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as stop:  # a future cannot carry it
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:  # noqa: BLE001 - it travels to the caller
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=work, name="byssus-tool", daemon=True).start()
    return await future
