"""A worker: claims the tasks of a database and runs their handlers.

    worker = Worker("chat.db", concurrency=8)

    @worker.task("summarize")
    async def summarize(ctx, payload): ...

    asyncio.run(worker.run())

- It waits for a bell (`threads/following/hub.py`), for the time of the next task, or for a free slot; it does not poll.
- Once a second it looks for tasks whose worker has died, and for handlers that block their event loop.
- When it ends, it claims nothing more. Its tasks come to their end within the grace period, or are handed back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from byssus.checkpointer import Checkpointer, checkpointer_for
from byssus.errors import ByssusError, InputError, StoreNotOpen
from byssus.queries.tasks import claims
from byssus.queries.tasks.claims import Dead, Leased, Wish
from byssus.run import termination
from byssus.signals import until_done
from byssus.store import keeper, owners
from byssus.store.bell import Bell
from byssus.store.jobs import TASKS
from byssus.threads.following import hub
from byssus.threads.waiting import lease_is_dead
from byssus.values.inputs import checked_choice
from byssus.worker import ready
from byssus.worker.handlers import Handler, HandlerLoop, checked_handler
from byssus.worker.limits import Limit
from byssus.worker.outcomes import (
    MAX_RESULT,
    STOPPED,
    DeadlineMissed,
    Failed,
    HandlerStuck,
    WorkerDied,
    error_json,
)
from byssus.worker.ready import AppSource
from byssus.worker.running import RunningTask, backoff
from byssus.worker.ticking import ticking

F = TypeVar("F", bound=Callable[..., Any])

_SCAN = 1.0  # seconds between two looks for tasks of dead workers, and for handlers that are stuck
_LONGEST_WAIT = 5.0  # seconds until the next look, whatever is known
_LIMITED = 1.0  # seconds until the next look while tasks are ready that limits keep back
_RATED = 0.25  # and if there is a rate among the limits: nothing rings when a bucket has filled
_RENEWALS = 3  # a worker renews its leases more often than this before they run out
_LEAST_SILENCE = 5.0  # seconds for which handlers may block their event loop, or the grace period if that is longer
_AWAY = 1.0  # seconds until the next look while the database does not answer
_log = logging.getLogger("byssus.worker")


class Worker:
    """Runs the tasks of a database: `await worker.run()`, or `async with worker:` beside other work.

    `place` is a path, a DSN or a checkpointer. `handlers` are functions of a context and a payload, by the types of
    tasks; `@worker.task(type)` adds one. At most `concurrency` tasks run at once; `limits` has a `Limit` for each
    limited type. A task whose worker has died is taken by another one when its process is known to have ended, or after
    `lease_seconds`. A handler that is asked to stop has `grace` seconds. Tasks without a handler fail; with
    `unknown="leave"` they are left to other workers. `max_result` is the largest result in characters of JSON. `app`
    (`module:factory`, a factory, or a dict of factories) makes the agents of the ready-made types `agent`, `summarize`
    and `title`, unless there are handlers for these types.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | Checkpointer,
        handlers: Mapping[str, Callable[..., Any]] | None = None,
        *,
        concurrency: int = 8,
        limits: Mapping[str, Limit] | None = None,
        lease_seconds: float = 30.0,
        grace: float = 20.0,
        unknown: Literal["fail", "leave"] = "fail",
        max_result: int = MAX_RESULT,
        app: AppSource | None = None,
    ) -> None:
        self.checkpointer = place if isinstance(place, Checkpointer) else checkpointer_for(place)
        self.app = app
        self.grace = _checked_seconds("grace", grace, 0)
        self.lease_seconds = _checked_seconds("lease_seconds", lease_seconds, 0.1)
        self.max_result = _checked_number("max_result", max_result)
        self.handler_loop = HandlerLoop()
        self._concurrency = _checked_number("concurrency", concurrency)
        self._limits = {kind: _checked_limit(kind, limit).limits for kind, limit in (limits or {}).items()}
        self._leaves_unknown = checked_choice("unknown", unknown, ("fail", "leave")) == "leave"
        self._has_rates = any(limit.per_second is not None for limit in self._limits.values())
        self._handlers: dict[str, Handler] = {}
        self._ready = {} if app is None else ready.handlers(app)
        for kind, function in (handlers or {}).items():
            self.add(kind, function)
        self._running: dict[tuple[str, int], RunningTask] = {}
        self._attempts: set[asyncio.Task[None]] = set()
        self._served: dict[str, str] = {}  # by type: the user whose task was taken last
        self._token = self._owner = ""
        self._bell: Bell | None = None
        self._control: asyncio.Task[None] | None = None
        self._is_stopping = self._is_hungry = self._takes_unknown = self._is_draining_all = False
        self._scanned_at = 0.0
        self._seen: dict[Leased, float] = {}  # leases that have run out, and since when we see that

    # --- what users call ----------------------------------------------------------------------------------------------

    @overload
    def task(self, task_type: str, *, process: bool = False) -> Callable[[F], F]: ...
    @overload
    def task(self, task_type: F) -> F: ...
    def task(self, task_type: Any, *, process: bool = False) -> Any:
        """Add the decorated function as the handler of a type: `@worker.task("summarize")`, or `@worker.task`.

        With `process=True` it runs in a process of its own, which can be killed.
        """
        if callable(task_type):
            return self.add(getattr(task_type, "__name__", ""), task_type)
        return lambda function: self.add(task_type, function, process=process)

    def add(self, task_type: str, function: F, *, process: bool = False) -> F:
        """Add a handler; returns it."""
        name, handler = checked_handler(task_type, function, process=process)
        if name in self._handlers:
            raise InputError(f"there is a handler of {name!r} already: {self._handlers[name].function!r:.80}")
        self._handlers[name] = handler
        return function

    @property
    def running(self) -> list[str]:
        """The ids of the tasks that it runs now."""
        return [task_id for task_id, _ in self._running]

    async def run(self) -> None:
        """Run tasks until `stop()` is called, SIGTERM arrives, or the caller is cancelled; then drain."""
        async with termination.Guard(self.stop_soon):
            control = self._begin()
            cancelled = await until_done(control, self.stop_soon)
            control.result()
            if cancelled is not None:
                raise cancelled

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Claim nothing more, and return when the running tasks have ended or were handed back."""
        self.stop_soon()
        if self._control is not None:
            control = self._control
            cancelled = await until_done(control)
            control.result()
            if cancelled is not None:
                raise cancelled

    def stop_soon(self) -> None:
        """Begin to drain, and return at once."""
        self._is_stopping = True
        self._wake()

    async def drained(self) -> None:
        """Run all tasks that are ready now and that become ready within a few seconds, and return when none is left."""
        control = self._begin(until_idle=True)
        cancelled = await until_done(control, self.stop_soon)
        control.result()
        if cancelled is not None:
            raise cancelled

    # --- for running tasks --------------------------------------------------------------------------------------------

    def knows(self) -> list[str]:
        """The types of tasks that it has handlers for."""
        return sorted({*self._handlers, *self._ready})

    def is_limited(self, kind: str) -> bool:
        """Whether there is a limit for this type."""
        return kind in self._limits

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _begin(self, *, until_idle: bool = False) -> asyncio.Task[None]:
        if self._control is not None and not self._control.done():
            raise ByssusError("this worker is running already")
        self._is_stopping = self._is_hungry = False
        self._is_draining_all = self._takes_unknown = until_idle
        self._scanned_at = 0.0
        self._control = asyncio.create_task(self._serve(until_idle))
        return self._control

    async def _serve(self, until_idle: bool) -> None:
        async with _opened(self.checkpointer):
            store = self.checkpointer.store
            self._token = secrets.token_hex(8)
            keeper.expect(self._token)  # as long as it is alive, no other worker of this process takes our tasks
            self._owner = store.presence.name(self._token, self.lease_seconds)
            bells = hub.of(store)
            self._bell = bells.attach(TASKS)
            try:
                async with ticking(store, lambda: self._is_stopping, first=until_idle):
                    await self._work(self._bell, until_idle)
            finally:
                bells.detach(TASKS, self._bell)
                await self._drain()
                keeper.forget(self._token)
                self.handler_loop.stop()
                self.handler_loop = HandlerLoop()

    async def _work(self, bell: Bell, until_idle: bool) -> None:
        while not self._is_stopping:
            was_idle = not self._running  # what ends during the look may leave something to do
            try:
                seconds = await self._turn()
            except StoreNotOpen:
                raise
            except ByssusError as error:
                _log.warning("a worker could not look for tasks: %s", error)
                seconds = _AWAY
            if seconds > 0 and not self._is_stopping:
                if until_idle and was_idle and not self._running and seconds >= _LONGEST_WAIT:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(seconds, self._until_scan())):
                        await bell.wait()
                        self._is_hungry = True  # a look first would make every task start later

    async def _turn(self) -> float:
        """Do what there is to do; the seconds until the next look."""
        store = self.checkpointer.store
        if self._until_scan() <= 0:
            self._scanned_at = asyncio.get_running_loop().time()
            self._takes_unknown = True
            self._is_hungry = False  # what becomes due is not claimed before it is looked at
            self._look_for_stuck_handlers()
            await self._recover()
        free = self._concurrency - len(self._running)
        if free <= 0:
            return _LONGEST_WAIT
        if not self._is_hungry:
            outlook = await store.read(claims.look, self._types())
            if outlook.seconds is not None and outlook.seconds <= 0:
                await store.write(claims.tend, TASKS, _MISSED)
                return 0
            if not outlook.is_ready:
                return min(outlook.seconds or _LONGEST_WAIT, _LONGEST_WAIT)
        has_looked = not self._is_hungry
        claimed = await self._claim(free)
        self._takes_unknown = self._is_draining_all
        self._is_hungry = claimed == free
        if claimed > 0 or not has_looked:  # where there may be none, a look tells when there will be
            return 0
        return _RATED if self._has_rates else _LIMITED

    async def _claim(self, free: int) -> int:
        wish = Wish(self._owner, self.lease_seconds, free, self._types(), self._limits, self._served)
        claimed = await self.checkpointer.store.write(claims.claim, TASKS, wish)
        for each in claimed:
            task = each.task
            self._served[task.type] = task.owner
            running = RunningTask(self, each, self._handlers.get(task.type) or self._ready.get(task.type))
            self._running[task.id, running.epoch] = running
            attempt = asyncio.create_task(running.run())
            self._attempts.add(attempt)
            attempt.add_done_callback(partial(self._ended, (task.id, running.epoch)))
        return len(claimed)

    def _ended(self, which: tuple[str, int], attempt: asyncio.Task[None]) -> None:
        self._running.pop(which, None)
        self._attempts.discard(attempt)
        if not attempt.cancelled() and (error := attempt.exception()) is not None:
            _log.error("task %r could not be run to its end", which[0], exc_info=error)
        self._wake()  # there is room for another one

    def _types(self) -> list[str] | None:
        """The types that are claimed; None: all. Those without a handler are looked for at each scan."""
        return self.knows() if self._leaves_unknown or not self._takes_unknown else None

    def _until_scan(self) -> float:
        return self._scanned_at + _SCAN - asyncio.get_running_loop().time() if self._scanned_at else 0.0

    def _wake(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    # --- the dead and the stuck ---------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Put back the tasks of workers that have died."""
        store = self.checkpointer.store
        found = [each for each in await store.read(claims.leased) if (each.id, each.epoch) not in self._running]
        now = asyncio.get_running_loop().time()
        self._seen = {each: self._seen.get(each, now) for each in found if each.has_run_out}
        dead = [told for each in found if (told := self._dead(each, now)) is not None]
        if dead:
            error = error_json(WorkerDied("the worker that ran it has died, or stood still for longer than its lease"))
            for task_id in await store.write(claims.recover, TASKS, dead, error):
                _log.warning("the worker of task %r has died; the task goes back", task_id)

    def _dead(self, each: Leased, now: float) -> Dead | None:
        """A task whose worker has died, as far as one can tell.

        A lease that has run out is not enough if the clock was set: a worker that lives renews it soon.
        """
        # A worker has one name for all of its leases, and each is renewed by itself.
        name = f"{each.owner} task={each.id}"
        is_known = each.owner not in ("", self._owner) and lease_is_dead(self.checkpointer.store, name, each.until)
        patience = (owners.seconds_of(each.owner) or 0) / _RENEWALS
        if is_known or (each.has_run_out and now - self._seen[each] >= patience):
            return Dead(each.id, each.epoch, is_known, backoff(0))
        return None

    def _look_for_stuck_handlers(self) -> None:
        """Give up the event loop of the handlers if one of them blocks it."""
        mine = [running for running in self._running.values() if running.is_async]
        if not mine or (silent := self.handler_loop.silent_for()) <= max(self.grace, _LEAST_SILENCE):
            return
        culprit = self.handler_loop.current()
        self.handler_loop = HandlerLoop()
        for running in mine:
            if culprit is None or running.asyncio_task is not culprit:
                running.end(STOPPED)
                continue
            _log.error("the handler of task %r blocks its event loop, and is left behind", running.task.id)
            stuck = HandlerStuck(
                f"the handler has blocked its event loop for {silent:.0f} seconds; await what takes long, or make the "
                "handler a plain function, which runs on an OS thread"
            )
            running.end(Failed(error_json(stuck), may_retry=False))

    async def _drain(self) -> None:
        self._is_stopping = True
        for running in self._running.values():
            running.drain()
        while self._attempts:
            await asyncio.wait(self._attempts)


_MISSED = error_json(DeadlineMissed("the deadline of the task came before it had ended"))


@contextlib.asynccontextmanager
async def _opened(checkpointer: Checkpointer) -> Any:
    """The checkpointer, opened and closed if it was not open."""
    try:
        checkpointer.store  # noqa: B018 - which raises if it is not open
    except StoreNotOpen:
        async with checkpointer:
            yield
        return
    yield


def _checked_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InputError(f"{name} must be a number from 1 up, got {value!r:.80}")
    return value


def _checked_seconds(name: str, value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e6:
        raise InputError(f"{name} must be a number of seconds from {least:g} up, got {value!r:.80}")
    return float(value)


def _checked_limit(kind: str, limit: object) -> Limit:
    if not isinstance(limit, Limit):
        raise InputError(f"the limit of {kind!r} must be a Limit, got {limit!r:.80}")
    return limit
