"""Running a tool's function: off the event loop if it blocks, and within its timeout."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

_GRACE = 1.0  # seconds that a tool has to clean up after its timeout
_running: set[asyncio.Task[Any]] = set()  # including those that ignored their cancellation


class TimedOut(Exception):
    """The work exceeded its timeout."""


class Exited(Exception):
    """The function raised SystemExit, which must not end the program."""


async def run(function: Callable[..., Any], arguments: dict[str, Any], *, positional: bool = False) -> Any:
    """Call a plain or an async function."""
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
    """Do the work, or raise `TimedOut` soon after the timeout, even if the work ignores its cancellation."""
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
            await asyncio.wait({task})  # a caller that cancels has its own limit
        raise
    if not task.done() or task.cancelled() or task.exception() is not None:
        raise TimedOut
    return task.result()  # late, but the work is done: a real result is better than a timeout


def _bury(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # mark the exception as retrieved


async def in_thread(function: Callable[[], R]) -> R:
    """Run a blocking function on its own daemon thread.

    Not in the event loop's pool: a function that hangs must neither exhaust the pool nor keep the program from exiting.
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
        except StopIteration as stop:  # a future cannot hold it
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:  # noqa: BLE001 - it travels to the caller
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed: there is no caller any more
            return

    threading.Thread(target=work, name="byssus-tool", daemon=True).start()
    return await future
