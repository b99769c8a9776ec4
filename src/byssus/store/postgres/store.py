"""Postgres behind the seam: a few writers with group commit, and readers beside them.

- Each of them is a worker with a connection of its own (see `pool.py`).
- Writes of one thread always go to the same writer, so they happen in the order of their submission. A writer takes all
  that waits into one transaction and commits once; when one of them fails, all run again, with a savepoint each. Within
  a transaction they are run in the order of their threads' ids, so that two processes do not lock each other out.
- What needs no answer is sent together with what follows (see `postgres_tx.py`): an append costs two round trips, and
  the second is the COMMIT.
- A deadlock and a lost connection are not the caller's business: the transaction is run again. If the answer to a
  COMMIT was lost, the writer's row tells what became of it, so nothing is written twice.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any

import psycopg

from byssus.errors import InputError, StoreError, StoreNotOpen, StoreUnreachable
from byssus.store import keeper, owners, sharing
from byssus.store.database import Durability, Store, Tx
from byssus.store.jobs import NO_THREAD, Job, deliver
from byssus.store.postgres.notifications import News
from byssus.store.postgres.pool import IDLE_SECONDS, PATIENCE, Pool, Retries, WorkerConnection
from byssus.store.postgres.server import (
    VERSION_TABLE,
    Connection,
    Server,
    is_forbidden,
    is_left_behind,
    is_lost,
    newest,
)
from byssus.store.postgres.tx import DIALECT, PostgresTx
from byssus.store.schema import check_version
from byssus.store.sqlite.file import check_durability
from byssus.values import clock

_GROUP_WRITES = 64  # a group holds the locks of all its threads until its end
_GATHER = 0.0003  # seconds
_INTERRUPT_PAUSE = 0.2  # seconds between two tries to interrupt a query
_SPLIT_AFTER = 3  # lost connections in a row
_SLOW_SECONDS = 1.0
_LEAVE_SECONDS = 2.0  # for a row that is of no use any more
_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
# The row is refused if the schema is newer than what this process knows (see the table). The subquery reads what is
# committed when the table's lock has been given, so it sees a migration that this statement has waited for.
_MARK = (
    "INSERT INTO writers (id, last, written_at, known, version)"
    " VALUES (:writer, :number, transaction_timestamp(), {known}, (SELECT version FROM {versions}))"
    " ON CONFLICT (id) DO UPDATE SET last = excluded.last, written_at = excluded.written_at,"
    " known = excluded.known, version = excluded.version RETURNING {durable}"
)
# Not a SELECT: one would neither see nor wait for the first row of a connection while it is not committed.
_ASK = (
    "INSERT INTO writers (id, last, written_at) VALUES (:id, 0, transaction_timestamp())"
    " ON CONFLICT (id) DO UPDATE SET written_at = writers.written_at RETURNING last, {durable}"
)
# By the transaction that it is about: whatever the server's settings say, and whenever they change. What is stronger
# than `on` is left as it is.
_DURABLE = {
    "full": (
        "set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
        " WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)"
    ),
    "normal": "set_config('synchronous_commit', 'off', true)",
}
_UNMARK = "DELETE FROM writers WHERE id = :id OR written_at < transaction_timestamp() - interval '1 day'"
_log = logging.getLogger("byssus.store")


class _Worker:
    """Serves a queue of jobs."""

    def __init__(self, store: PostgresStore, name: str, jobs: queue.SimpleQueue[Job[Any] | None]) -> None:
        self._store = store
        self.jobs = jobs
        self.connection = WorkerConnection(store.pool)
        self._name = name
        self._running: threading.Thread | None = None

    def start(self) -> None:
        if self._running is None:
            self._running = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._running.start()

    def end(self) -> None:
        """Let the worker stop when it has finished what waits for it."""
        if self._running is not None:
            self.jobs.put(None)

    def join(self) -> None:
        if self._running is not None:
            self._running.join()

    def _serve(self) -> None:
        self._store.enter()
        while (job := self._next()) is not None:
            group = self._group(job)
            try:
                self._settle(group)
            except BaseException as error:  # noqa: BLE001 - it travels to the callers; the worker must live
                for member in group:
                    member.error = member.error or self._store.server.translate(error)
            self._told(group)
            deliver(group)
        self._leave()
        self.connection.close()

    def _next(self) -> Job[Any] | None:
        while True:
            try:
                return self.jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self.connection.close()

    def _group(self, job: Job[Any]) -> list[Job[Any]]:
        return [job]

    def _answer(self, group: list[Job[Any]]) -> float | None:
        """How long the server may take to answer; None: as long as it likes."""
        return None if any(job.takes_long for job in group) else self._store.server.answer_seconds

    def _settle(self, group: list[Job[Any]]) -> None:
        raise NotImplementedError

    def _told(self, group: list[Job[Any]]) -> None: ...

    def _leave(self) -> None: ...


class _Reader(_Worker):
    """Runs queries on a snapshot, one at a time. A query whose caller is gone is interrupted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._changing = threading.Lock()  # held while the server is asked, so that it never gives up the next job
        self._job: Job[Any] | None = None

    def _settle(self, group: list[Job[Any]]) -> None:
        (job,) = group
        with self._changing:
            self._job = job
        try:
            if job.begin(lambda: self._stop_aside(job)):
                self._run(job)
        finally:
            job.end()
            with self._changing:
                self._job = None
            self._store.read_ended()

    def _stop_aside(self, job: Job[Any]) -> None:
        threading.Thread(target=self._stop, args=(job,), name="byssus-cancel", daemon=True).start()

    def _stop(self, job: Job[Any]) -> None:
        """Until it has ended: what arrives between two statements is lost."""
        while True:
            with self._changing:
                if self._job is not job:
                    return
                self.connection.interrupt()
            time.sleep(_INTERRUPT_PAUSE)

    def _run(self, job: Job[Any]) -> None:
        retries = Retries(self._store.pool)
        while not job.is_dropped:
            try:
                tx = self.connection.begin(_READ, answer=self._answer([job]))
                job.run(tx)
                tx.flush("COMMIT")
                self._store.pool.away_since = None
                return
            except BaseException as error:
                self.connection.end(error)
                if is_forbidden(error) or not self._store.pool.may_try_again(error):
                    raise
                retries.wait(error)


class _Writer(_Worker):
    """Commits writes, all that wait in one transaction."""

    def __init__(self, store: PostgresStore, name: str) -> None:
        super().__init__(store, name, queue.SimpleQueue())
        self._versions = f'"{store.server.schema}".{VERSION_TABLE}'
        durable = _DURABLE[store.durability]
        self._mark = _MARK.format(known=newest(), versions=self._versions, durable=durable)
        self._ask = _ASK.format(durable=durable)
        self._id = clock.new_id()
        self._number = 0  # of the transaction
        self._was_crowded = False
        self._is_in_doubt = False  # whether it may have been committed without our knowledge

    def _group(self, job: Job[Any]) -> list[Job[Any]]:
        if self._was_crowded:  # those who waited with each other come back together: let them arrive
            time.sleep(_GATHER)
        group = [job]
        while len(group) < _GROUP_WRITES:
            try:
                waiting = self.jobs.get_nowait()
            except queue.Empty:
                break
            if waiting is None:  # the end of the queue: leave it for the serving loop
                self.jobs.put(None)
                break
            group.append(waiting)
        self._was_crowded = len(group) > 1
        return sorted(group, key=lambda member: member.thread)

    def _settle(self, group: list[Job[Any]]) -> None:
        began = time.monotonic()
        try:
            self._commit(group)
        except (psycopg.Error, StoreError) as error:
            why = type(self._store.server.translate(error)).__name__
            _log.warning("%d write(s) to %r failed: %s", len(group), self._store.name, why)
            raise
        finally:
            if (took := time.monotonic() - began) > _SLOW_SECONDS:
                _log.warning("%d write(s) to %r took %.1f s", len(group), self._store.name, took)

    def _commit(self, group: list[Job[Any]]) -> None:
        """Run the group until it is known what became of it."""
        self._number += 1
        self._is_in_doubt = False
        retries = Retries(self._store.pool)
        carefully, losses = False, 0
        while True:
            try:
                if not (self._is_in_doubt and self._was_committed()):
                    self._attempt(group, carefully=carefully)
                self._store.pool.away_since = None
                break
            except BaseException as error:
                self.connection.end(error)
                if is_left_behind(error):
                    self._check_version()
                if self._is_in_doubt:  # whatever it was: nothing may be run again before that is settled
                    self._wait_in_doubt(retries, error)
                elif self._store.pool.may_try_again(error):
                    retries.wait(error)
                    losses += is_lost(error)
                elif carefully or len(group) == 1:
                    raise
                else:
                    carefully = True
            if losses >= _SPLIT_AFTER and len(group) > 1 and not self._is_in_doubt:
                self._commit_each(group)
                return
        self._store.news.announce({key for job in group if job.error is None for key in job.announced})

    def _told(self, group: list[Job[Any]]) -> None:
        self._store.committed(group)

    def _commit_each(self, group: list[Job[Any]]) -> None:
        """It may be one of them that kills the connection each time."""
        for job in group:
            try:
                self._commit([job])
            except BaseException as error:  # noqa: BLE001 - it travels to the caller
                job.error = self._store.server.translate(error)

    def _check_version(self) -> None:
        """Raise what opening this database would raise now."""
        tx = self.connection.begin(_READ, answer=self._answer([]))
        row = tx.one(f"SELECT version FROM {self._versions}")
        tx.flush("COMMIT")
        check_version(row[0] if row else 0, newest(), self._store.name)

    def _wait_in_doubt(self, retries: Retries, error: BaseException) -> None:
        try:
            retries.wait(error)
        except BaseException as last:
            raise StoreUnreachable(
                f"{self._store.name!r} went away in the middle of a COMMIT, and for {retries.seconds:g} s there "
                "was no telling whether the write is stored; look before you repeat it"
            ) from last

    def _was_committed(self) -> bool:
        """What became of the transaction whose COMMIT was not answered. Waits for it, should it still be under way."""
        tx = self.connection.begin(_WRITE, answer=self._answer([]))
        row = tx.one(self._ask, id=self._id)
        tx.flush("COMMIT")  # which waits for a standby, should that be what was missing
        self._is_in_doubt = False
        return row is not None and row[0] == self._number

    def _attempt(self, group: list[Job[Any]], *, carefully: bool) -> None:
        tx = self.connection.begin(_WRITE, answer=self._answer(group))
        tx.run_along(self._mark, writer=self._id, number=self._number)
        threads = [None, *(job.thread for job in group)]
        if not carefully:  # of those on one thread, the first; those on no thread in particular may be about any
            tx.foresee(
                [job for job, before in zip(group, threads, strict=False) if job.thread not in (NO_THREAD, before)]
            )
        for job, following in zip(group, [*group[1:], None], strict=True):
            tx.turn_to(job)
            if carefully:
                self._attempt_one(job, tx)
            else:
                job.run(tx)
            if job.thread != NO_THREAD and following is not None and following.thread != job.thread:
                tx.leave_thread()
        if not tx.is_answered:
            tx.flush()  # the mark must be there before the COMMIT is sent: see `_was_committed`
        self._store.reach("before commit")
        self._is_in_doubt = True
        try:
            tx.flush("COMMIT")
        except BaseException as error:
            self._is_in_doubt = is_lost(error) or self.connection.is_broken  # else the server has refused it
            raise
        self._is_in_doubt = False
        if tx.outcome != "COMMIT":
            raise StoreError(f"{self._store.name!r} rolled back a transaction, because a statement in it had failed")
        self._store.reach("after commit")

    def _attempt_one(self, job: Job[Any], tx: PostgresTx) -> None:
        """Run one job so that its failure is its own."""
        tx.flush("SAVEPOINT job")
        try:
            job.run(tx)
            tx.flush("RELEASE SAVEPOINT job")
        except BaseException as error:
            if self._store.pool.may_try_again(error) or self.connection.is_broken:
                raise
            job.error = self._store.server.translate(error)
            tx.undo("ROLLBACK TO SAVEPOINT job")

    def _leave(self) -> None:
        if self._number:
            with contextlib.suppress(psycopg.Error):
                tx = self.connection.begin(_WRITE, answer=_LEAVE_SECONDS)
                tx.run(_UNMARK, id=self._id)
                tx.flush("COMMIT")


class PostgresStore(Store):
    """One schema of a Postgres database. Get it from `open_store`, which shares it within the process."""

    dialect = DIALECT
    remains = (
        "The rows are deleted. Postgres keeps their dead versions in its files until VACUUM has run and the space is "
        "used again (VACUUM FULL rewrites the tables at once), and copies in WAL archives, replicas and backups until "
        "those expire."
    )

    def __init__(
        self,
        server: Server,
        durability: Durability,
        pool_size: int,
        patience: float = PATIENCE,
        *,
        connection: Connection | None = None,
    ) -> None:
        """`connection` was made to prepare the database; the first worker takes it."""
        super().__init__()
        self.server = server
        self.pool = Pool(server, patience, connection)
        self.name = server.name
        self.presence = owners.Presence(owners.in_memory())
        self.durability = durability
        self.pool_size = pool_size
        self._open = True
        self._gate = threading.Lock()  # nothing is queued behind the end of a queue
        self.news = News(server, self._hear)
        reads: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._readers = [_Reader(self, "byssus-read", reads) for _ in range(pool_size // 2)]
        self._writers = [_Writer(self, "byssus-write") for _ in range(pool_size - len(self._readers))]
        self._first = _Writer(self, "byssus-write-first")
        self._reads = 0  # under way

    def _submit(self, job: Job[Any], *, writes: bool, first: bool = False) -> None:
        with self._gate:
            if not self._open:
                raise StoreNotOpen(f"the store on {self.name!r} is closed; open it again in this process to go on")
            if not writes:
                self._reads += 1
                workers: Sequence[_Worker] = self._readers[: self._reads]  # no more than there is work for
            else:
                workers = [self._first if first else self._writers[hash(job.thread) % len(self._writers)]]
            workers[0].jobs.put(job)
            for worker in workers:
                worker.start()

    def read_ended(self) -> None:
        with self._gate:
            self._reads -= 1

    def enter(self) -> None:
        """The caller is a worker of this store: a query on it must not call the store."""
        self._worker_ids.add(threading.get_ident())

    def reach(self, boundary: str) -> None:
        if self.boundary is not None:
            self.boundary(boundary)

    def version(self) -> Hashable:
        if not self._open:
            raise StoreNotOpen(f"the store on {self.name!r} is closed")
        return self.news.version()

    def _hear(self) -> None:
        if self.on_news is not None:
            self.on_news()

    @property
    def is_told(self) -> bool:
        return self.news.is_receiving

    def changed_elsewhere(self) -> set[str] | None:
        if not self._open:
            raise StoreNotOpen(f"the store on {self.name!r} is closed")
        return self.news.names()

    def keys_given(self, tables: Sequence[str]) -> None:
        for table in tables:
            self.write_now(_restart_keys, table, f'"{self.server.schema}".{table}')

    def close(self) -> None:
        with self._gate:
            if not self._open:
                return
            self._open = False
            for worker in self._workers():
                worker.end()
        for worker in self._workers():
            worker.join()
        self.pool.close()
        self.news.close()
        self._worker_ids.clear()
        self.presence.leave(has_leases=keeper.has_leases(self))

    def abandon(self) -> None:
        self._gate = threading.Lock()  # another OS thread may have held it when the process forked
        self._open = False
        self.news.abandon()
        self.pool.abandon()
        for worker in self._workers():
            worker.connection.abandon()

    def _workers(self) -> Sequence[_Worker]:
        return (*self._readers, *self._writers, self._first)

    def check_same(self, durability: Durability, pool_size: int) -> None:
        """Refuse an opener who wants something else than the first one did."""
        if (self.durability, self.pool_size) != (durability, pool_size):
            raise InputError(
                f"{self.name!r} is already open in this process with durability={self.durability!r} and "
                f"pool_size={self.pool_size}; use the same for every opener, not {durability!r} and {pool_size}"
            )


def _restart_keys(tx: Tx, table: str, full_name: str) -> None:
    """The next key that the database gives is above all that are there."""
    tx.one(
        f"SELECT setval(pg_get_serial_sequence(:name, 'key'), COALESCE(MAX(key), 0) + 1, false) FROM {table}",
        name=full_name,
    )


def open_store(server: Server, *, durability: Durability = "full", pool_size: int = 8) -> PostgresStore:
    """The store on this database, its tables made and migrated if need be. Give it back with `sharing.release`."""
    check_durability(durability)

    def make() -> PostgresStore:
        connection = server.prepare()
        return PostgresStore(server, durability, pool_size, connection=connection)

    return sharing.share(lambda _: server.key, make, lambda store: store.check_same(durability, pool_size))
