"""A query on its way through a store, and the future that carries its outcome back to its caller.

A job is settled on a worker of the store, an OS thread, and delivered where its caller waits: on the caller's event
loop, or through a `concurrent.futures.Future` if the caller has none.

- Delivery only sets results. The tasks that wait are resumed by their event loop afterwards, one at a time, so a task
  that raises SystemExit cannot keep its neighbours in the same commit from their outcomes.
- A signal handler that raises SystemExit may interrupt the event loop anywhere, also between two results. The outcome
  is kept with its future, and a task that is cancelled, as all are when the program ends, looks for it there.
- A future of a submitted write cannot be cancelled. A task that is cancelled while it waits gets its CancelledError
  once the job is settled. Until then it waits shielded, because anyio would cancel it again and again (`signals.py`).
- A read can be cancelled at once: nothing depends on how it ends. It is not begun any more, and one that runs is
  interrupted.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from byssus.signals import shielded, until_done
from byssus.values.thread_key import ThreadKey

T = TypeVar("T")
Q = TypeVar("Q", bound=Callable[..., Any])
NO_THREAD = ThreadKey("", "")  # of a query that is not about one thread
TASKS = ThreadKey("\x7ftasks", "")  # stands for tasks that are ready, where commits are announced


class CommitFuture(asyncio.Future[T]):
    """A future that refuses cancellation: the job runs to its end, and its caller learns how it ended."""

    _waiters: tuple[asyncio.Future[None], ...] = ()  # one for each task that awaits it: these can be cancelled
    job: Job[T] | None = None  # which has ended, and whose outcome is on its way

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002
        if self.job is not None:
            self.get_loop().call_soon(_settle, [self.job])
        return False

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            waiter: asyncio.Future[None] = self.get_loop().create_future()
            self._waiters = (*self._waiters, waiter)
            try:
                yield from waiter
            except asyncio.CancelledError as error:
                self.cancel()
                with shielded():
                    cancelled = yield from until_done(self).__await__()
                self.exception()  # it is not the task's any more, and must not be reported as never retrieved
                raise cancelled or error from None
        return self.result()

    __iter__ = __await__

    def wake(self) -> None:
        """Let the tasks go on that await it, now that it is done."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.job = None


def thread_digest(thread_key: ThreadKey) -> str:
    """A thread in a few letters, for word between processes. Two threads may have the same."""
    return f"{zlib.crc32('/'.join(thread_key).encode('utf-8', 'surrogatepass')):08x}"


def takes_long(query: Q) -> Q:
    """Mark a query with statements that may take minutes, on a large database: no time limit for an answer applies."""
    query.takes_long = True  # type: ignore[attr-defined]
    return query


def about_tasks(query: Q) -> Q:
    """Mark a write after which a task may be ready to run: workers that wait for tasks are woken."""
    query.about_tasks = True  # type: ignore[attr-defined]
    return query


class ReadFuture(asyncio.Future[T]):
    """The future of a read. When it is cancelled, the job is dropped."""

    job: Job[T] | None = None  # while it is under way

    def cancel(self, msg: object = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled and self.job is not None:
            self.job.drop()
            self.job = None
        return is_cancelled


class Job(Generic[T]):
    """A query with its arguments, and then its outcome."""

    __slots__ = ("_args", "_interrupt", "_kwargs", "error", "future", "group", "is_dropped", "loop", "query", "result")

    def __init__(
        self,
        query: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        future: CommitFuture[T] | ReadFuture[T] | Future[T],
    ) -> None:
        self.query = query
        self._args = args
        self._kwargs = kwargs
        self.future = future
        # The event loop on which its caller waits; None for a caller that blocks.
        self.loop = future.get_loop() if isinstance(future, asyncio.Future) else None
        self.result: T | None = None
        self.error: BaseException | None = None
        self.group = 1  # how many jobs shared its transaction
        self.is_dropped = False  # whether its caller no longer waits for it
        self._interrupt: Callable[[], object] | None = None

    @property
    def thread(self) -> ThreadKey:
        """The thread that it is about, if its first argument says so: a thread's key, or another text."""
        first = self._args[0] if self._args else ""
        if isinstance(first, ThreadKey):
            return first
        return ThreadKey("", first) if isinstance(first, str) else NO_THREAD

    @property
    def announced(self) -> set[ThreadKey]:
        """Whose followers its commit wakes. A claim wakes no worker: it would wake itself, and look for ever."""
        return {self.thread, TASKS} if getattr(self.query, "about_tasks", False) else {self.thread} - {TASKS}

    @property
    def takes_long(self) -> bool:
        """Whether a database may take minutes to answer."""
        return getattr(self.query, "takes_long", False)

    def begin(self, interrupt: Callable[[], object]) -> bool:
        """Whether it is still to be run; if so, `interrupt` is called should it be dropped while it runs."""
        self._interrupt = interrupt  # set before the check: a caller that drops the job reads this afterwards
        return not self.is_dropped

    def end(self) -> None:
        """It is run no longer: there is nothing to interrupt."""
        self._interrupt = None

    def drop(self) -> None:
        """Its caller no longer waits for it. Never blocks."""
        self.is_dropped = True
        if (interrupt := self._interrupt) is not None:
            interrupt()

    def run(self, tx: object) -> None:
        """Run the query and keep what it returns. A repeated run starts afresh."""
        self.error = None
        self.result = self.call(tx)

    def call(self, tx: object) -> T:
        """Return what the query returns, or raise what it raises."""
        return self.query(tx, *self._args, **self._kwargs)


def deliver(jobs: Sequence[Job[Any]]) -> None:
    """Hand each job's outcome to its caller. An event loop is woken once, however many of its jobs are done."""
    for job in jobs:
        job.group = len(jobs)
        if isinstance(job.future, CommitFuture):
            job.future.job = job
    for loop in {job.loop for job in jobs}:
        mine = [job for job in jobs if job.loop is loop]
        try:
            if loop is None:
                _settle(mine)
            else:
                loop.call_soon_threadsafe(_settle, mine)
        except RuntimeError:  # that loop is closed: nothing waits there any more, and what is committed stays so
            continue


def _settle(jobs: Sequence[Job[Any]]) -> None:
    """Set the outcomes. May be run again for what it did not get to."""
    for job in jobs:
        if job.is_dropped:
            continue
        if not job.future.done():
            if job.error is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(_accepted(job.error))
        if isinstance(job.future, CommitFuture):
            job.future.wake()
        elif isinstance(job.future, ReadFuture):
            job.future.job = None  # or the two would keep each other, and a page of texts, until they are collected


def _accepted(error: BaseException) -> BaseException:
    """The error in a form that a future accepts: it refuses StopIteration, and its caller would wait for ever."""
    if not isinstance(error, StopIteration):
        return error
    accepted = RuntimeError(f"a query raised {error!r}")
    accepted.__cause__ = error
    return accepted


def in_worker(call: Callable[[], T]) -> CommitFuture[T]:
    """Run a blocking call on a worker of its own, beside the event loop. It cannot be cancelled either."""
    future: CommitFuture[T] = CommitFuture(loop=asyncio.get_running_loop())
    job: Job[T] = Job(lambda _: call(), (), {}, future)

    def run() -> None:
        try:
            job.run(None)
        except BaseException as error:  # noqa: BLE001 - it travels to the caller
            job.error = error
        deliver([job])

    threading.Thread(target=run, name="byssus-aside").start()
    return future
