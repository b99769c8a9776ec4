"""The seam between byssus and a database: run a function in a transaction.

A query is a plain function whose first argument is a `Tx`. It does nothing but SQL, so a runner may repeat it. A store
takes queries from anywhere and runs them on OS threads of its own, which are called workers: a thread is a
conversation.

    head = await store.write(threads.append, ThreadKey("", "trip"), rows)        # in a coroutine
    head = store.write_now(threads.append, ThreadKey("", "trip"), rows)          # anywhere else

- A write's outcome is delivered after its COMMIT, never before.
- Writes whose first argument is the same `ThreadKey` (or the same text) happen in the order of their submission.
- A write that was submitted settles before a cancellation of its caller is delivered. A read is dropped at once.
- A query cannot reach the store: it only has its transaction, and calling the store from inside one raises.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

from byssus import telemetry
from byssus.errors import ByssusError
from byssus.store.bell import Bell
from byssus.store.computing import IsDropped, compute
from byssus.store.jobs import CommitFuture, Job, ReadFuture, in_worker
from byssus.store.owners import Presence
from byssus.store.upkeep import Upkeep
from byssus.values.thread_key import ThreadKey

P = ParamSpec("P")
T = TypeVar("T")
Row = tuple[Any, ...]
Durability: TypeAlias = Literal["full", "normal"]
Moment = object  # a time by the database's clock: good as a parameter, and for nothing else


class Dialect(NamedTuple):
    """In what the SQL of databases differs, as far as queries have to know it."""

    name: str  # the kind of database, as OpenTelemetry writes it
    skip_locked: str  # ends a SELECT that takes rows: rows that another transaction has taken are passed over


class Tx(Protocol):
    """One transaction. SQL has `:name` parameters; values are always bound, never pasted."""

    @property
    def dialect(self) -> Dialect: ...

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


class Store(Upkeep, abc.ABC):
    """Runs queries. A database implements `_submit` and what it needs for it."""

    dialect: Dialect
    name: str  # this very database, as people may see it: no password
    presence: Presence  # the proof, for others who use the database, that this process lives
    # Called after each commit of this process with the threads that it is about, before its callers wake.
    on_commit: Callable[[set[ThreadKey]], object] | None = None
    # Called when other processes have told of commits; see `is_told`.
    on_news: Callable[[], object] | None = None
    # Called around each commit, for tests that pull the plug there. (A plain function on the class would bind.)
    boundary: Callable[[str], object] | None = None

    def __init__(self) -> None:
        self.users = 0  # see sharing.py
        self._last_version: Hashable = None  # at the last call of `changed_elsewhere`
        self._worker_ids: set[int] = set()  # until they end: the system uses an id again

    def write(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run the query in a write transaction; the future is done when it is committed."""
        return self._awaited(query, args, kwargs, writes=True)

    def read(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run the query on a snapshot, beside the writer. The future can be cancelled."""
        return self._awaited(query, args, kwargs, writes=False)

    @property
    def base(self) -> Store:
        """This store: what stands for another one has that one here."""
        return self

    def aside(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a blocking call beside the event loop. It settles before a cancellation of its caller is delivered."""
        return in_worker(call)

    async def compute(self, call: Callable[[IsDropped], T]) -> T:
        """Run Python that takes a while beside the event loop and the readers. See `computing.py`."""
        return await compute(call)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until(self, bell: Bell) -> None:
        await bell.wait()

    def submit(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a write and return at once; writes happen in the order of the calls. Needs no event loop."""
        return self._submitted(Job(query, args, kwargs, Future()), writes=True)

    def submit_first(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a write ahead of the queue: a lease must not run out behind a long one."""
        return self._submitted(Job(query, args, kwargs, Future()), writes=True, first=True)

    def submit_read(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a read and return at once. Needs no event loop."""
        return self._submitted(Job(query, args, kwargs, Future()), writes=False)

    def write_now(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a write and block until it is committed. Needs no event loop."""
        job = Job(query, args, kwargs, Future())
        with telemetry.commit(query, self.dialect.name) as span:
            try:
                return self._submitted(job, writes=True).result()
            finally:
                span.committed(job.group)

    def read_now(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a read and block until it is done. Needs no event loop."""
        job = Job(query, args, kwargs, Future())
        try:
            return self._submitted(job, writes=False).result()
        except BaseException:
            if not job.future.done():  # it is the caller who was interrupted, by Ctrl-C for example
                job.drop()
            raise

    @property
    def is_told(self) -> bool:
        """Whether other processes tell of their commits, so that nobody has to look for them."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what was submitted, then let go of the database."""

    @abc.abstractmethod
    def version(self) -> Hashable:
        """Differs from what it was before when anything may have been committed since. Cheap: made to be polled."""

    def changed_elsewhere(self) -> set[str] | None:
        """Which threads other processes may have changed since the last call: `thread_digest` of each. None: any."""
        if not self.has_files:  # no other process sees it
            return set()
        before, self._last_version = self._last_version, self.version()
        return set() if before == self._last_version else None

    def committed(self, jobs: Sequence[Job[Any]]) -> None:
        """Wake the followers of threads in this process."""
        if self.on_commit is not None:
            self.on_commit({key for job in jobs if job.error is None for key in job.announced})

    def before_fork(self) -> None:
        """The process is about to fork: hold still."""

    def after_fork(self) -> None:
        """In the parent: go on."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """In the child: there are no workers here, and the database's connections are the parent's."""

    @abc.abstractmethod
    def _submit(self, job: Job[Any], *, writes: bool, first: bool = False) -> None: ...

    def _awaited(
        self, query: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], *, writes: bool
    ) -> asyncio.Future[T]:
        self._refuse_inside_a_query()
        loop = asyncio.get_running_loop()
        if not writes:
            reading: ReadFuture[T] = ReadFuture(loop=loop)
            reading.job = read = Job(query, args, kwargs, reading)
            self._submit(read, writes=False)
            return reading
        future: CommitFuture[T] = CommitFuture(loop=loop)
        job = Job(query, args, kwargs, future)
        self._submit(job, writes=True)
        if telemetry.is_enabled():
            self._trace(job, future)
        return future

    def _submitted(self, job: Job[T], *, writes: bool, first: bool = False) -> Future[T]:
        self._refuse_inside_a_query()
        assert isinstance(job.future, Future)
        job.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._submit(job, writes=writes, first=first)
        return job.future

    def _trace(self, job: Job[Any], future: asyncio.Future[Any]) -> None:
        span = telemetry.commit(job.query, self.dialect.name)

        def end(_: object) -> None:  # the first callback of its future, so the span ends before the caller goes on
            span.committed(job.group, job.error)
            span.end()

        future.add_done_callback(end)

    def _refuse_inside_a_query(self) -> None:
        if threading.get_ident() in self._worker_ids:
            raise ByssusError("a query called the store; use the transaction that the query was given")
