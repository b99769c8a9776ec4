"""A task that runs: its lease, its handler, the requests to stop, and what is written when it ends.

- The lease is renewed by the store's keeper, on an OS thread, as long as the task runs.
- A request to stop sets the task's signal: handlers see it at their next pause point. After the grace period the
  handler is cut off: cancelled, killed, or left behind. Its late writes are refused, because the epoch has changed.
- What is written at the end names the epoch too. While the database is away it is tried again, until the lease is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeAlias

from byssus.checkpointer import Checkpointer
from byssus.errors import StoreError, StoreNotOpen
from byssus.queries.tasks import claims, steps
from byssus.queries.tasks.claims import ClaimedTask, HeldTask
from byssus.signals import Signal
from byssus.store import keeper
from byssus.store.keeper import ABORTED, LOST, Keeper
from byssus.values.thread_key import ThreadKey
from byssus.worker.context import TaskContext, thread_context
from byssus.worker.handlers import AsyncAttempt, Handler, HandlerLoop, ThreadAttempt
from byssus.worker.outcomes import (
    STOPPED,
    DeadlineMissed,
    Failed,
    GivenBack,
    HandlerStopped,
    Outcome,
    Returned,
    Stopped,
    UnknownTaskType,
    error_json,
)
from byssus.worker.processes import ProcessAttempt
from byssus.worker.steps import Suspension

Reason: TypeAlias = Literal["pause", "cancel", "deadline", "drain", "lost"]

LAST = 2.0  # seconds that a handler has after it was cut off
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 600.0  # seconds
_AGAIN = 0.5  # seconds until a write is tried again
_log = logging.getLogger("byssus.worker")


class Host(Protocol):
    """What a running task needs of its worker."""

    checkpointer: Checkpointer
    grace: float
    lease_seconds: float
    max_result: int
    handler_loop: HandlerLoop

    def knows(self) -> list[str]: ...
    def is_limited(self, kind: str) -> bool: ...


class RunningTask:
    """A task of this worker. All but `lose` is called on the worker's event loop."""

    def __init__(self, host: Host, claimed: ClaimedTask, handler: Handler | None) -> None:
        self.task = claimed.task
        self.epoch = claimed.task.lease_epoch
        self.key = ThreadKey("\x7ftask", self.task.id)  # writes about a task are in order, and beside other tasks'
        self.handler = handler
        self.signal = Signal()  # why the task is to stop
        self.draining = Signal()  # the worker is about to end
        self.suspension: Suspension | None = None  # how the task is given back, if its handler was unwound by a wait
        self.grace, self.max_result = host.grace, host.max_result
        self._host = host
        self._store = host.checkpointer.store
        self._loop = asyncio.get_running_loop()
        self._seconds_left = claimed.seconds_left
        self._ended: asyncio.Future[Outcome] = self._loop.create_future()
        self._attempt: AsyncAttempt | ProcessAttempt | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._is_cut = False
        self._is_lost = False
        self._held = HeldTask(self.task.id, self.epoch, host.lease_seconds, f"{self.task.id}.{self.epoch}")
        self._keeper: Keeper[HeldTask] = keeper.of(self._store, claims.renew, claims.asked)
        self._keeper.keep(self._held, self._noticed)

    def __repr__(self) -> str:
        return f"RunningTask({self.task.id!r}, {self.task.type!r})"

    @property
    def must_stop(self) -> bool:
        """Whether the handler is to stop at its next pause point."""
        return self.signal.aborted

    async def run(self) -> None:
        """Do the task and write how it ended."""
        try:
            if self._seconds_left is not None:
                self._later(max(self._seconds_left, 0), lambda: self.stop("deadline"))
            outcome = self._without_handler() if self.handler is None else await self._handled(self.handler)
            if self.suspension is not None:
                if isinstance(outcome, Failed):
                    _log.warning("task %r failed while it was unwound to wait: %s", self.task.id, outcome.error)
                outcome = GivenBack()
            await self._settle(outcome)
        finally:
            for timer in self._timers:
                timer.cancel()
            self._keeper.drop(self._held)

    # --- the handler --------------------------------------------------------------------------------------------------

    async def _handled(self, handler: Handler) -> Outcome:
        try:
            self._start(handler)
        except Exception as error:  # noqa: BLE001 - no more threads, or no process can be made
            return Failed(error_json(error))
        return await self._ended

    def _start(self, handler: Handler) -> None:
        host, payload = self._host, self.task.payload
        if handler.kind == "async":
            context = TaskContext(self, host.checkpointer, self._store)
            attempt = AsyncAttempt(
                lambda: handler.function(context, json.loads(payload)), host.max_result, self._report
            )
            self._attempt = attempt
            host.handler_loop.call(attempt.start)
        elif handler.kind == "thread":
            call = partial(_called, handler.function, thread_context(self, host.checkpointer), payload)
            ThreadAttempt(call, host.max_result, self._report).start(f"byssus-task-{self.task.id}")
        else:
            blocking = thread_context(self, host.checkpointer)
            self._attempt = process = ProcessAttempt(handler.function, self, blocking, host.max_result)
            process.start(self._report)

    def _without_handler(self) -> Outcome:
        known = ", ".join(map(repr, self._host.knows())) or "none"
        error = UnknownTaskType(f"this worker has no handler for tasks of type {self.task.type!r}; it has: {known}")
        return Failed(error_json(error), may_retry=False)

    def _report(self, outcome: Outcome) -> None:
        """The handler has ended; called from any OS thread."""
        may_stop = self.must_stop or self._is_lost or self.draining.aborted
        if isinstance(outcome, Stopped) and not may_stop:  # it would run again at once, for ever
            raised = HandlerStopped("the handler raised TaskStopped, and nobody had asked the task to stop")
            outcome = Failed(error_json(raised))
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended without this handler
            self._loop.call_soon_threadsafe(self.end, outcome)

    def end(self, outcome: Outcome) -> None:
        """What the attempt comes to. The first outcome counts."""
        if not self._ended.done():
            self._ended.set_result(outcome)

    @property
    def asyncio_task(self) -> asyncio.Task[Any] | None:
        """The handler's task on the handlers' event loop."""
        return self._attempt.task if isinstance(self._attempt, AsyncAttempt) else None

    @property
    def is_async(self) -> bool:
        return self.handler is not None and self.handler.kind == "async"

    # --- stopping -----------------------------------------------------------------------------------------------------

    def stop(self, reason: Reason) -> None:
        """Ask the handler to stop, and cut it off after the grace period."""
        if not self.signal.aborted:
            self.signal.abort(reason)
            self._later(0 if reason == "lost" else self._host.grace, self._cut)
        elif reason == "lost":
            self._cut()

    def drain(self) -> None:
        """The worker ends: the handler may come to its end within the grace period."""
        self.draining.abort("drain")
        self._later(self._host.grace, self._cut)

    def lose(self) -> None:
        """The task has another worker now; called from any OS thread."""
        self._is_lost = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.stop, "lost")

    def _noticed(self, what: str) -> None:
        """The keeper has noticed something; called on its OS thread."""
        if what == LOST:
            self.lose()
        elif what == ABORTED:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ask_why)

    def _ask_why(self) -> None:
        if not self.signal.aborted:
            asking = self._loop.create_task(self._asked())
            _asking.add(asking)
            asking.add_done_callback(_asking.discard)

    async def _asked(self) -> None:
        try:
            word = await self._store.read(claims.asked_of, self.task.id, self.epoch)
        except StoreError as error:
            _log.debug("task %r was asked to stop, and the database is away: %s", self.task.id, error)
            return
        if word is not None:
            self.stop("pause" if word == "pause" else "cancel")

    def _cut(self) -> None:
        """The time is over: stop the handler by force, and leave it behind if it does not end now."""
        if self._ended.done() or self._is_cut:
            return
        self._is_cut = True
        if not self.signal.aborted:
            self.signal.abort("drain")
        if isinstance(self._attempt, AsyncAttempt):
            self._attempt.is_cut = True
            self._host.handler_loop.call(self._attempt.cancel)
        elif self._attempt is not None:
            self._attempt.kill()
        self._later(min(LAST, self._host.grace or LAST), self._leave_behind)

    def _leave_behind(self) -> None:
        if not self._ended.done():
            _log.warning("the handler of task %r does not stop, and is left behind", self.task.id)
            self.end(STOPPED)

    def _later(self, seconds: float, call: Callable[[], object]) -> None:
        self._timers.append(self._loop.call_later(seconds, call))

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _settle(self, outcome: Outcome) -> None:
        while not self._is_lost:
            try:
                if not await self._write(outcome):
                    _log.info("task %r was lost to another worker; its outcome is not written", self.task.id)
                return
            except StoreNotOpen:
                return
            except StoreError as error:
                _log.warning("the end of task %r cannot be written yet: %s", self.task.id, error)
                await asyncio.sleep(_AGAIN)

    async def _write(self, outcome: Outcome) -> bool:
        store, is_limited = self._store, self._host.is_limited(self.task.type)
        if isinstance(outcome, Returned):
            complete = claims.complete_limited if is_limited else claims.complete
            return await store.write(complete, self.key, self._held, outcome.result)
        if self.signal.reason == "deadline":
            late = DeadlineMissed(f"the deadline of the task was {self.task.deadline}, and it had not ended")
            outcome = Failed(error_json(late), may_retry=False)
        if isinstance(outcome, GivenBack) and self.suspension is not None:
            return await store.write(steps.give_back, self.key, *self.suspension)
        if isinstance(outcome, Failed):
            fail = claims.fail_limited if is_limited else claims.fail
            after = backoff(self.task.retry_count) if outcome.retry_after is None else outcome.retry_after
            return await store.write(fail, self.key, self._held, outcome.error, after if outcome.may_retry else None)
        return await store.write(claims.stop, self.key, self._held)


def backoff(retries: int) -> float:
    """The seconds until the next attempt: twice as long after each, and never two tasks in step."""
    seconds = min(_FIRST_BACKOFF * 2.0 ** min(retries, 30), _LONGEST_BACKOFF)
    return seconds * random.uniform(0.75, 1.25)  # noqa: S311


def _called(function: Callable[..., Any], context: object, payload: str) -> Any:
    return function(context, json.loads(payload))


_asking: Final[set[asyncio.Task[None]]] = set()  # which nothing else keeps
