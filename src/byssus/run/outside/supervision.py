"""Supervision: resume runs that other processes have handed over or left unfinished.

- A query finds threads whose run has not ended and that no process drives: handed over, answered by a person, or left
  by a process that died. They are resumed, most recently updated first, at most `concurrency` at once.
- Several processes can supervise one database. Each waits a random moment before it takes a thread, and losing that
  race is not an error.
- A run that has ended its process `max_deaths` times is quarantined, because it may be the cause. The other runs of
  that process may have died along with it, so on their last attempt runs are taken one at a time.
- If an agent cannot be created or its run fails, that is reported, and the thread is tried again later with a growing
  delay. Other threads are not affected.
- When supervision ends, its runs are handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from byssus.errors import (
    ByssusError,
    InputError,
    NothingToResume,
    ThreadBusy,
    ThreadInactive,
    ThreadMoved,
    ThreadQuarantined,
)
from byssus.queries.log import listing
from byssus.queries.log.listing import InterruptedRow
from byssus.run import termination
from byssus.run.outside import handing_over
from byssus.signals import shielded
from byssus.store.operations import HasStore
from byssus.threads.listing import state
from byssus.threads.waiting import lease_is_dead
from byssus.values.results import RunResult
from byssus.values.thread_key import ThreadKey

_log = logging.getLogger("byssus.supervision")

_CONCURRENCY = 8
_EVERY = 0.5  # seconds between two looks
_JITTER = 0.2  # seconds at most before a thread is taken
_LONGEST_PAUSE = 60.0  # seconds before a thread is tried again that failed
MAX_DEATHS = 3
# Another process or a person was faster.
_FASTER = (ThreadBusy, ThreadMoved, NothingToResume, ThreadInactive, ThreadQuarantined)


class Resumable(Protocol):
    """The part of an agent that supervision uses."""

    @property
    def checkpointer(self) -> Any: ...
    @property
    def thread_id(self) -> str | None: ...
    @property
    def user_id(self) -> str | None: ...
    def attach(self, checkpointer: Any, thread_id: str, *, user_id: str | None = None) -> None: ...
    async def resume(self) -> RunResult[Any]: ...
    def hand_over(self, grace: float) -> None: ...


Factory: TypeAlias = Callable[[str, str | None], Resumable | Awaitable[Resumable]]


class TakeOver(NamedTuple):
    """A thread that was taken over: the result of its run, or the error, or that it was quarantined."""

    thread_id: str
    user_id: str | None
    result: RunResult[Any] | None = None
    error: Exception | None = None
    is_quarantined: bool = False


class _Failures(NamedTuple):
    times: int
    not_before: float  # by the event loop's clock


class Supervision:
    """Resumes interrupted runs: `async with cp.supervise(factory):`, or `await cp.supervise(factory)`."""

    def __init__(
        self,
        database: HasStore,
        factory: Factory,
        *,
        concurrency: int = _CONCURRENCY,
        every: float = _EVERY,
        max_deaths: int | None = MAX_DEATHS,
        grace: float = handing_over.GRACE,
        report: Callable[[TakeOver], object] | None = None,
    ) -> None:
        if not callable(factory):
            raise InputError(f"factory must be a function of a thread id and a user id, got {factory!r:.80}")
        self._database = database
        self._factory = factory
        self._concurrency = _checked_number("concurrency", concurrency)
        self._every = _checked_seconds(every)
        self._max_deaths = None if max_deaths is None else _checked_number("max_deaths", max_deaths)
        self._grace = handing_over.checked_grace(grace)
        self._report = report or _log_it
        self._agents: dict[str, Resumable | None] = {}  # by thread; None while it is made
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by thread
        self._failures: dict[str, _Failures] = {}
        self._last_attempt: str | None = None  # the thread that would be quarantined if its process died once more
        self._woken = asyncio.Event()
        self._is_stopping = False
        self._supervising: asyncio.Task[None] | None = None

    @property
    def running(self) -> list[str]:
        """The threads that are being resumed now."""
        return [thread_id for thread_id, agent in self._agents.items() if agent is not None]

    def __await__(self) -> Generator[Any, None, None]:
        return self._supervise().__await__()

    async def __aenter__(self) -> Self:
        self._supervising = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Take over no more threads, and hand over the current runs."""
        self._is_stopping = True
        self._woken.set()
        if self._supervising is not None:
            await asyncio.shield(self._supervising)

    async def drained(self) -> None:
        """Resume all threads that are interrupted now, and return when none is left."""
        while await self._look() or self._tasks:
            await self._next()
        self._is_stopping = True

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        try:
            while not self._is_stopping:
                try:
                    await self._look()
                except Exception as error:  # noqa: BLE001 - a database that was away for a while is no reason to end
                    _log.warning("supervision could not look for interrupted runs: %s", error)
                await self._next()
        finally:
            await self._hand_over()

    async def _next(self) -> None:
        """Wait until it is time to look again, or a run has ended and makes room."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._every * random.uniform(0.75, 1.25)):  # noqa: S311 - not in step with others
                await self._woken.wait()
        if not self._is_stopping:
            self._woken.clear()

    async def _look(self) -> int:
        """Start to resume what is interrupted, as far as there is room; how many threads that were."""
        store, started, now = self._database.store, 0, asyncio.get_running_loop().time()
        self._failures = {
            name: known for name, known in self._failures.items() if now < known.not_before + _LONGEST_PAUSE
        }
        for row in await store.read(listing.interrupted):
            if self._is_stopping or termination.is_ending() or len(self._agents) >= self._concurrency:
                break
            if row.id in self._agents or not self._is_due(row.id):
                continue
            if row.owner is not None and not lease_is_dead(store, row.owner, row.until):
                continue
            if self._max_deaths is not None and row.deaths >= self._max_deaths:
                await self._quarantine(row)
                continue
            if self._is_last_attempt(row):
                if self._last_attempt is not None:
                    continue
                self._last_attempt = row.id
            self._agents[row.id] = None
            self._tasks[row.id] = task = asyncio.create_task(self._take(row))
            task.add_done_callback(partial(self._taken, row.id))
            started += 1
        return started

    def _is_due(self, thread_id: str) -> bool:
        known = self._failures.get(thread_id)
        return known is None or asyncio.get_running_loop().time() >= known.not_before

    def _is_last_attempt(self, row: InterruptedRow) -> bool:
        return self._max_deaths is not None and 0 < row.deaths == self._max_deaths - 1

    async def _quarantine(self, row: InterruptedRow) -> None:
        if await self._database.store.write(listing.quarantine, ThreadKey("", row.id), row.epoch):
            _log.error(
                "thread %r is quarantined: its run has ended its process %d times. Find out why, then lift it: "
                "byssus resume %s --lift",
                *(row.id, row.deaths, row.id),
            )
            self._report_safely(TakeOver(row.id, row.user_id, is_quarantined=True))

    # --- taking -------------------------------------------------------------------------------------------------------

    async def _take(self, row: InterruptedRow) -> None:
        try:
            await asyncio.sleep(random.uniform(0, min(_JITTER, self._every)))  # noqa: S311
            if await state(self._database.store, row.id) != "interrupted":  # another process was faster
                return
            agent = await self._made(row)
            if self._is_stopping or termination.is_ending():
                return
            self._agents[row.id] = agent
            result = await agent.resume()
        except _FASTER as error:
            _log.debug("thread %r is not taken over: %s", row.id, error)
            self._failures[row.id] = _Failures(0, asyncio.get_running_loop().time() + self._every)
        except asyncio.CancelledError:
            if self._is_stopping or _is_cancelled():
                raise
            self._failed(row, ByssusError(f"the agent of thread {row.id!r} waited for something that was cancelled"))
        except Exception as error:  # noqa: BLE001 - of one thread: the others go on
            self._failed(row, error)
        else:
            self._failures.pop(row.id, None)
            self._report_safely(TakeOver(row.id, row.user_id, result))

    async def _made(self, row: InterruptedRow) -> Resumable:
        made: Any = self._factory(row.id, row.user_id)
        agent: Any = await made if inspect.isawaitable(made) else made
        if not hasattr(type(agent), "resume") or not hasattr(type(agent), "hand_over"):
            raise InputError(f"the factory must return an Agent for thread {row.id!r}, and returned {agent!r:.80}")
        if agent.checkpointer is None:
            agent.attach(self._database, row.id, user_id=agent.user_id or row.user_id)
        if agent.thread_id != row.id:
            raise InputError(
                f"the factory returned an agent for thread {agent.thread_id!r}, and not for {row.id!r}; pass "
                "thread_id=thread_id to Agent(...)"
            )
        checked: Resumable = agent
        return checked

    def _failed(self, row: InterruptedRow, error: Exception) -> None:
        known = self._failures.get(row.id)
        count = 1 if known is None else known.times + 1
        pause = min(self._every * 2**count, _LONGEST_PAUSE)
        self._failures[row.id] = _Failures(count, asyncio.get_running_loop().time() + pause)
        self._report_safely(TakeOver(row.id, row.user_id, error=error))

    def _report_safely(self, taken: TakeOver) -> None:
        try:
            self._report(taken)
        except Exception:  # noqa: BLE001 - it is the program's, and ends nothing here
            _log.exception("the report of a take-over failed, for thread %r", taken.thread_id)

    def _taken(self, thread_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[thread_id], self._agents[thread_id]
        if self._last_attempt == thread_id:
            self._last_attempt = None
        self._woken.set()  # there is room for another one
        if not task.cancelled():
            task.exception()

    async def _hand_over(self) -> None:
        """Hand the current runs over, also if this is cancelled meanwhile."""
        self._is_stopping = True
        for thread_id, agent in self._agents.items():
            if agent is not None:
                agent.hand_over(self._grace)
            else:  # nothing is taken yet, and a factory may wait for something that never comes
                self._tasks[thread_id].cancel()
        with shielded():
            while self._tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(set(self._tasks.values()))


def _is_cancelled() -> bool:
    """Whether the current task was asked to end. Else a CancelledError comes from something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _log_it(taken: TakeOver) -> None:
    if taken.error is not None:
        _log.warning("thread %r could not be resumed: %s", taken.thread_id, taken.error)
    elif taken.result is not None:
        _log.info("thread %r was resumed: %s", taken.thread_id, taken.result.stop_reason)


def _checked_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1e6:
        raise InputError(f"{name} must be a number from 1 up, got {value!r:.80}")
    return value


def _checked_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise InputError(f"every must be a number of seconds above 0, got {value!r:.80}")
    return value
