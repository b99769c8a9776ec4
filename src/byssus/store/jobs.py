"""A query on its way through a store, and the future that carries its outcome back to its caller.

A job is settled on a worker of the store, an OS thread, and delivered where its caller waits: on the caller's event
loop, or through a `concurrent.futures.Future` if the caller has none.

- Delivery only sets results. The tasks that wait are resumed by their event loop afterwards, one at a time, so a task
  that raises SystemExit cannot keep its neighbours in the same commit from their outcomes.
- A future of a submitted write cannot be cancelled. A task that is cancelled while it waits gets its CancelledError
  once the job is settled.
- A read can be cancelled at once: nothing depends on how it ends. It is not begun any more, and one that runs is
  interrupted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from byssus.values.thread_key import ThreadKey

T = TypeVar("T")
NO_THREAD = ThreadKey("", "")  # of a query that is not about one thread


class CommitFuture(asyncio.Future[T]):
    """A future that refuses cancellation: the job runs to its end, and its caller learns how it ended."""

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002
        return False


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

    def begin(self, interrupt: Callable[[], object]) -> bool:
        """Whether it is still to be run; if so, `interrupt` is called should it be dropped while it runs."""
        self._interrupt = interrupt  # before the look: whoever drops it looks for this afterwards
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
        self.result = self.query(tx, *self._args, **self._kwargs)

    def call(self, tx: object) -> T:
        """Return what the query returns, or raise what it raises."""
        return self.query(tx, *self._args, **self._kwargs)


def deliver(jobs: Sequence[Job[Any]]) -> None:
    """Hand each job's outcome to its caller. An event loop is woken once, however many of its jobs are done."""
    for job in jobs:
        job.group = len(jobs)
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
    for job in jobs:
        if job.is_dropped:
            continue
        if job.error is None:
            job.future.set_result(job.result)
        else:
            job.future.set_exception(_accepted(job.error))
        if isinstance(job.future, ReadFuture):
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
