"""What a handler gets with its payload: who asks for the task, how far it is, and whether it is to stop.

An async handler gets a `TaskContext`, whose methods are awaited. A plain function gets a `ThreadContext`: the same
methods, which block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from byssus.checkpointer import Checkpointer
from byssus.errors import InputError
from byssus.queries.tasks import claims
from byssus.queries.tasks.tasks import Task
from byssus.signals import Signal
from byssus.store.operations import Blocking, Runner, to_the_end
from byssus.values.decisions import Recovery
from byssus.values.inputs import checked_text
from byssus.values.thread_key import ThreadKey
from byssus.worker.outcomes import TaskStopped
from byssus.worker.steps import SteppedAttempt, Steps, bound, current, perform_beside, perform_here, seconds_of

_LONGEST_NOTE = 1_000


class Attempt(SteppedAttempt, Protocol):
    """The task that runs, as far as its context has to know it (`running.py`)."""

    @property
    def task(self) -> Task: ...
    @property
    def key(self) -> ThreadKey: ...
    @property
    def signal(self) -> Signal: ...
    @property
    def draining(self) -> Signal: ...
    @property
    def grace(self) -> float: ...
    @property
    def max_result(self) -> int: ...


class TaskContext:
    """The task of an async handler.

    `cancelled` is true once the task is to stop: paused, cancelled, past its deadline, or lost to another worker.
    `draining` is true once the worker is about to end; the task may go on for the worker's `grace`.
    """

    def __init__(self, running: Attempt, checkpointer: Checkpointer, runner: Runner) -> None:
        task = running.task
        self.id = task.id
        self.type = task.type
        self.session_id = task.session_id
        self.user_id = task.owner or None
        self.parent_id = task.parent
        self.attempt = task.retry_count + 1
        self.max_retries = task.max_retries
        self.checkpointer = checkpointer
        self._running = running
        self._runner = runner
        perform = perform_here if isinstance(runner, Blocking) else perform_beside
        self._steps = Steps(self.id, running, runner, perform, max_result=running.max_result)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self.type!r})"

    @property
    def cancelled(self) -> bool:
        """Whether the task is to stop."""
        return self._running.signal.aborted

    @property
    def draining(self) -> bool:
        """Whether the worker is about to end."""
        return self._running.draining.aborted

    def idempotency_key(self, name: str = "") -> str:
        """A key for other services that stays the same in each attempt at this task: of a step, or of the task.

        Without a name it is the key of the step that is running.
        """
        name = checked_text("name", name) or current() or ""
        return f"{self.id}:{name}" if name else self.id

    async def checkpoint(self) -> None:
        """A pause point: raises `TaskStopped` if the task is to stop."""
        if self.cancelled:
            raise TaskStopped

    async def progress(self, fraction: float, note: str | None = None) -> None:
        """Store how far the task is, from 0 to 1, with a note. A pause point."""
        amount, text = checked_progress(fraction, note)
        await self.checkpoint()
        running = self._running
        if not await self._runner.write(claims.set_progress, running.key, self.id, running.epoch, amount, text):
            running.lose()
            raise TaskStopped

    # The first two parameters are positional: the function may have parameters with these names.
    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        recovery: Recovery = "never",
        check: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function once: its result is stored as JSON, and returned from there when the handler starts again.

        A function that raises is called again in the next attempt. `recovery` is for a call that was interrupted and
        may have taken effect: "never" raises `StepUnknown`, "retry" calls it again (see `idempotency_key`), "check"
        asks `check`, which gets the same arguments and returns `Done(result)`, `NotDone()` or `Unknown()`, and "ask"
        waits for the event `step:<name>`. A name that is used again stands for another step.
        """
        return await self._steps.step(name, bound(function, args, kwargs), recovery, bound(check, args, kwargs))

    async def sleep(self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> None:
        """Return when the time is over. The task holds no worker meanwhile; its handler starts again then."""
        await self._steps.sleep(seconds_of(days=days, hours=hours, minutes=minutes, seconds=seconds))

    async def wait_for(self, name: str, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - it outlives the process
        """Return the value of an event, which `send_event(task_id, name, value)` sends. Holds no worker meanwhile.

        After `timeout` seconds without the event it raises TimeoutError, now and whenever the handler starts again.
        """
        return await self._steps.wait_for(name, timeout)


class ThreadContext:
    """The task of a plain function: as `TaskContext`, with methods that block."""

    def __init__(self, context: TaskContext) -> None:
        self._context = context

    def __repr__(self) -> str:
        return repr(self._context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def checkpoint(self) -> None:
        """A pause point: raises `TaskStopped` if the task is to stop."""
        to_the_end(self._context.checkpoint())

    def progress(self, fraction: float, note: str | None = None) -> None:
        """Store how far the task is, from 0 to 1, with a note. A pause point."""
        to_the_end(self._context.progress(fraction, note))

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        recovery: Recovery = "never",
        check: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function once: see `TaskContext.step`. It is called here, on the handler's OS thread."""
        return to_the_end(self._context.step(name, function, *args, recovery=recovery, check=check, **kwargs))

    def sleep(self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> None:
        """Return when the time is over. The task holds no worker meanwhile; its handler starts again then."""
        to_the_end(self._context.sleep(days=days, hours=hours, minutes=minutes, seconds=seconds))

    def wait_for(self, name: str, timeout: float | None = None) -> Any:
        """Return the value of an event: see `TaskContext.wait_for`."""
        return to_the_end(self._context.wait_for(name, timeout))


def thread_context(running: Attempt, checkpointer: Checkpointer) -> ThreadContext:
    return ThreadContext(TaskContext(running, checkpointer, Blocking(checkpointer.store)))


def checked_progress(fraction: object, note: object) -> tuple[float, str | None]:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise InputError(f"progress must be a number from 0 to 1, got {fraction!r:.80}")
    assert not math.isnan(fraction)
    return float(fraction), None if note is None else checked_text("the note of a progress", note)[:_LONGEST_NOTE]
