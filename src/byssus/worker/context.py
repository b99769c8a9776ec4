"""What a handler gets with its payload: who asks for the task, how far it is, and whether it is to stop.

An async handler gets a `TaskContext`, whose methods are awaited. A plain function gets a `ThreadContext`: the same
methods, which block.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from byssus.checkpointer import Checkpointer
from byssus.errors import InputError
from byssus.queries.tasks import claims
from byssus.queries.tasks.tasks import Task
from byssus.signals import Signal
from byssus.store.operations import Blocking, Runner, to_the_end
from byssus.values.inputs import checked_text
from byssus.values.thread_key import ThreadKey
from byssus.worker.outcomes import TaskStopped

_LONGEST_NOTE = 1_000


class Attempt(Protocol):
    """The task that runs, as far as its context has to know it (`running.py`)."""

    @property
    def task(self) -> Task: ...
    @property
    def epoch(self) -> int: ...
    @property
    def key(self) -> ThreadKey: ...
    @property
    def signal(self) -> Signal: ...
    @property
    def draining(self) -> Signal: ...
    def lose(self) -> None: ...


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
        """A key for other services that stays the same in each attempt at this task, and at this step of it."""
        return f"{self.id}:{checked_text('name', name)}" if name else self.id

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


def thread_context(running: Attempt, checkpointer: Checkpointer) -> ThreadContext:
    return ThreadContext(TaskContext(running, checkpointer, Blocking(checkpointer.store)))


def checked_progress(fraction: object, note: object) -> tuple[float, str | None]:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise InputError(f"progress must be a number from 0 to 1, got {fraction!r:.80}")
    assert not math.isnan(fraction)
    return float(fraction), None if note is None else checked_text("the note of a progress", note)[:_LONGEST_NOTE]
