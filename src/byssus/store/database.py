"""The seam between byssus and a database: run a function in a transaction.

A query is a plain function whose first argument is a `Tx`. It does nothing but SQL, so a runner may repeat it. A store
takes queries from any thread and any event loop:

    head = await store.write(threads.append, ThreadKey("", "trip"), rows)        # in a coroutine
    head = store.write_now(threads.append, ThreadKey("", "trip"), rows)          # anywhere else

- A write's outcome is delivered after its COMMIT, never before.
- Writes whose first argument is the same `ThreadKey` (or the same text) happen in the order of their submission.
- A write that was submitted settles before a cancellation of its caller is delivered.
- A query cannot reach the store: it only has its transaction, and calling the store from inside one raises.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextvars import Context
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from byssus import telemetry
from byssus.errors import ByssusError
from byssus.values.thread_key import ThreadKey

P = ParamSpec("P")
T = TypeVar("T")
Row = tuple[Any, ...]
Moment = object  # a time by the database's clock: good as a parameter, and for nothing else


class Tx(Protocol):
    """One transaction. SQL has `:name` parameters; values are always bound, never pasted."""

    def one(self, sql: str, /, **params: Any) -> Row | None:
        """The first row, if there is one."""

    def all(self, sql: str, /, **params: Any) -> list[Row]:
        """All rows."""

    def run(self, sql: str, /, **params: Any) -> None:
        """A statement that answers nothing."""

    def many(self, sql: str, rows: Sequence[dict[str, Any]], /) -> None:
        """The same statement for each set of parameters."""

    def now(self) -> Moment:
        """The time of this transaction by the database's clock; stored, it is ISO 8601, UTC, microseconds."""

    def after(self, seconds: float, /) -> Moment:
        """So many seconds after `now`."""


NO_THREAD = ThreadKey("", "")


class CommitFuture(asyncio.Future[T]):
    """A future that cannot be cancelled: a task that waits for it is cancelled when it is done, and not before.

    The task that waits is resumed by `settle`, and not a round of the event loop later.
    """

    _waiter: tuple[Callable[[Any], object], Context] | None = None

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002
        return False

    def add_done_callback(self, fn: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        if self._waiter is None and context is not None and not self.done():
            self._waiter = (fn, context)  # what a task passes that awaits us
        else:
            super().add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        if self._waiter is not None and self._waiter[0] == fn:
            self._waiter = None
            return 1
        return super().remove_done_callback(fn)

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Set the outcome, and go on with the task that waits for it. On the loop's thread."""
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)
        if self._waiter is not None:
            (fn, context), self._waiter = self._waiter, None
            context.run(fn, self)


class Job(Generic[T]):
    """A query on its way through a store, and whoever waits for its outcome."""

    __slots__ = ("_args", "_future", "_kwargs", "_loop", "_query", "error", "group", "result")

    def __init__(
        self,
        query: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._query = query
        self._args = args
        self._kwargs = kwargs
        self._loop = loop
        self._future: CommitFuture[T] | Future[T] = CommitFuture(loop=loop) if loop else Future()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.group = 1  # how many jobs were settled with it

    @property
    def thread(self) -> ThreadKey:
        """The thread that it is about, if its first argument says so: a thread's key, or another text."""
        first = self._args[0] if self._args else ""
        if isinstance(first, ThreadKey):
            return first
        return ThreadKey("", first) if isinstance(first, str) else NO_THREAD

    def run(self, tx: Tx) -> None:
        """Run the query; what it raises is for the caller. A repeated run starts afresh."""
        self.error = None
        self.result = self._query(tx, *self._args, **self._kwargs)

    def call(self, tx: Tx) -> T:
        """What the query returns, or raises."""
        return self._query(tx, *self._args, **self._kwargs)

    @staticmethod
    def deliver(jobs: Sequence[Job[Any]]) -> None:
        """Tell everyone who waits. An event loop is woken once, however many of its jobs are done."""
        for loop in {job._loop for job in jobs}:
            try:
                if loop is None:
                    _settle_all(jobs, None)
                else:
                    loop.call_soon_threadsafe(_settle_all, jobs, loop)
            except RuntimeError:  # that loop is closed: nobody waits any more, and what is committed stays so
                continue


def _carried(error: BaseException) -> BaseException:
    """The error as a future can carry it: it refuses StopIteration, and the caller would wait for ever."""
    if not isinstance(error, StopIteration):
        return error
    carried = RuntimeError(f"a query raised {error!r}")
    carried.__cause__ = error
    return carried


def _settle_all(jobs: Sequence[Job[Any]], loop: asyncio.AbstractEventLoop | None) -> None:
    """Settle those of the jobs that are waited for here: on this loop, or on none."""
    size = len(jobs)
    for job in jobs:
        if job._loop is not loop:
            continue
        job.group = size
        future, error = job._future, None if job.error is None else _carried(job.error)
        if isinstance(future, CommitFuture):
            future.settle(job.result, error)
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(job.result)


def in_thread(call: Callable[[], T]) -> CommitFuture[T]:
    """Run something that blocks on a thread of its own; like a write, it settles before a cancellation arrives."""
    future: CommitFuture[T] = CommitFuture(loop=asyncio.get_running_loop())
    job: Job[T] = Job(lambda _: call(), (), {}, future.get_loop())
    job._future = future

    def run() -> None:
        try:
            job.run(None)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - it travels to the caller
            job.error = error
        Job.deliver([job])

    threading.Thread(target=run, name="byssus-open").start()
    return future


class Store(abc.ABC):
    """Runs queries. A database implements `_submit` and what it needs for it."""

    system: str  # the database's kind, as OpenTelemetry writes it
    name: str  # this very database, as people may see it: no password
    has_files = False  # whether they are ours to scrub
    remains = ""  # where erased data may still be, for people
    # Where the index for search has the keys of what it is about.
    index_keys: ClassVar[dict[str, str]] = {"message_words": "message", "call_words": "call"}
    # Called around each commit, for tests that pull the plug there. (A plain function on the class would bind.)
    boundary: Callable[[str], object] | None = None

    def __init__(self) -> None:
        self.users = 0  # see sharing.py
        self._own_threads: set[int] = set()  # until they end: the number of a thread is used again

    def write(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run the query in a write transaction; the future is done when it is committed."""
        self._refuse_inside_a_query()
        job = Job(query, args, kwargs, asyncio.get_running_loop())
        self._submit(job, writes=True)
        if telemetry.is_enabled():
            self._trace(job)
        return job._future  # type: ignore[return-value]

    def read(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run the query on a snapshot, beside the writer."""
        self._refuse_inside_a_query()
        job = Job(query, args, kwargs, asyncio.get_running_loop())
        self._submit(job, writes=False)
        return job._future  # type: ignore[return-value]

    @property
    def base(self) -> Store:
        """This store: what stands for another one has that one here."""
        return self

    def aside(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run something that blocks beside the event loop; it settles before a cancellation arrives."""
        return in_thread(call)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def submit(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `write`, from any thread, for whoever waits later; writes happen in the order of the calls."""
        return self._submitted(Job(query, args, kwargs, None), writes=True)

    def submit_first(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `submit`, ahead of all that waits: a lease must not run out behind a long queue."""
        return self._submitted(Job(query, args, kwargs, None), writes=True, first=True)

    def write_first(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The same, and wait for it."""
        return self.submit_first(query, *args, **kwargs).result()

    def submit_read(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `read`, from any thread, for whoever waits later."""
        return self._submitted(Job(query, args, kwargs, None), writes=False)

    def write_now(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `write`, for code without an event loop: blocks until it is committed."""
        job = Job(query, args, kwargs, None)
        with telemetry.commit(query, self.system) as span:
            try:
                return self._submitted(job, writes=True).result()
            finally:
                span.committed(job.group)

    def read_now(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `read`, for code without an event loop."""
        return self.submit_read(query, *args, **kwargs).result()

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what was submitted, then let go of the database."""

    @abc.abstractmethod
    def version(self) -> Hashable:
        """Differs from what it was before when anything may have been committed since. Cheap: made to be polled."""

    def scrub(self, *, rewrite: bool = True) -> bool:  # noqa: ARG002
        """Blocks until the files hold nothing that was deleted; False while a reader keeps it there.

        Without `rewrite`, it is only looked whether that reader is gone.
        """
        return True

    def pages_to(self, path: str, hear: Callable[[int, int], object]) -> dict[str, int] | None:  # noqa: ARG002
        """Copy this database page by page, as of one moment, into an empty file; returns how many rows each table had.

        `hear` is told how many of how many pages are there. None: here are no pages to copy.
        """
        return None

    def integrity(self) -> list[str]:
        """What is wrong below the rows: in pages and indexes. Blocks for as long as reading everything takes."""
        return []

    def before_fork(self) -> None:  # noqa: B027 - not every database minds
        """The process is about to fork: hold still."""

    def after_fork(self) -> None:  # noqa: B027
        """In the parent: go on."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """In the child: there are no threads here, and the database's connections are the parent's."""

    def keys_given(self, tables: Sequence[str]) -> None:  # noqa: B027 - most databases have nothing to do
        """Rows with keys of their own were added to these tables: keys that the database gives go on behind them."""

    @abc.abstractmethod
    def _submit(self, job: Job[Any], *, writes: bool, first: bool = False) -> None: ...

    def _submitted(self, job: Job[T], *, writes: bool, first: bool = False) -> Future[T]:
        self._refuse_inside_a_query()
        assert isinstance(job._future, Future)
        job._future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._submit(job, writes=writes, first=first)
        return job._future

    def _trace(self, job: Job[Any]) -> None:
        span = telemetry.commit(job._query, self.system)

        def end(_: object) -> None:  # on the caller's loop, before the caller goes on
            span.committed(job.group, job.error)
            span.end()

        job._future.add_done_callback(end)

    def _refuse_inside_a_query(self) -> None:
        if threading.get_ident() in self._own_threads:
            raise ByssusError("a query called the store; use the transaction that the query was given")
