"""SQLite behind the seam: one writer with group commit, and readers beside it.

- One worker owns the write connection. It takes all the writes that wait into one transaction and commits once: that is
  what makes `synchronous=FULL` cheap. When one of them fails, the others run again, with a savepoint each, so that a
  failure does not sink its neighbours.
- Readers are connections of their own on the WAL; a database in memory is read through the writer. A read whose
  caller is gone is interrupted.
- The file is closed while the process forks. The child inherits no connection; it opens the file again if needed.
  A fork waits for the transaction that is being written, but not for reads: they are interrupted, and run again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import apsw

from byssus.errors import InputError, StoreFull, StoreNotOpen, StoreUnusable
from byssus.store import keeper, sharing
from byssus.store.database import Durability, Store, Tx
from byssus.store.jobs import Job, deliver
from byssus.store.owners import Presence
from byssus.store.schema import check_version
from byssus.store.sqlite.file import (
    MEMORY,
    as_read,
    can_be_left,
    check_durability,
    check_library,
    checked_path,
    connect,
    copy_pages,
    newest,
    translate,
)
from byssus.store.sqlite.opened_file import OpenedFile, identity, make_private, refuse_second_name
from byssus.store.sqlite.pauses import Pauses
from byssus.store.sqlite.reading import Reader
from byssus.store.sqlite.room import Room
from byssus.store.sqlite.tx import DIALECT, SQLiteTx

T = TypeVar("T")

_GROUP_WRITES = 256  # a group ends here, because the lock between processes is not fair
_GROUP_SECONDS = 0.010
_BUSY_SECONDS = 30.0
_READERS = 4
_ATTEMPTS = 5  # to open a file that others remove or replace meanwhile
_REPEATS = 5  # of a read that forks interrupt: then they wait for it, or it would never end
_SCRUB_MILLISECONDS = 1_000  # how long a reader is waited for who keeps erased pages
_SLOW_SECONDS = 1.0  # a commit that takes longer is worth a word
_FULL_TEXT = "SELECT name FROM sqlite_schema WHERE type = 'table' AND sql LIKE 'CREATE VIRTUAL TABLE % USING fts5 %'"
_log = logging.getLogger("byssus.store")


class SQLiteStore(Store):
    """One database file. Get it from `open_store`, which shares it within the process."""

    dialect = DIALECT
    remains = "Backups, exports and copies of this file, and snapshots of its disk, are not touched: erase them too."

    def __init__(self, path: str, durability: Durability, busy_seconds: float, *, read_only: bool = False) -> None:
        super().__init__()
        self.name = self.path = path
        self.durability = durability
        self.has_files = path != MEMORY
        self.presence = Presence(f"{path}-owner-" if self.has_files else None, like=path, one_machine=True)
        self._busy_seconds = busy_seconds
        self._read_only = read_only
        self._schema = newest()
        self._file: OpenedFile | None = None  # None in memory
        self._room = Room(path)
        self._open_file()
        self._pauses = Pauses()
        self._generation = 0  # grows when the connections are replaced
        # An entry of `_queue` is a job, None for its end, or `_first` for the next one of those that go ahead of it.
        self._queue: queue.SimpleQueue[Job[Any] | deque[Job[Any]] | None] = queue.SimpleQueue()
        self._first: deque[Job[Any]] = deque()
        self._open = True
        self._gate = threading.Lock()  # nothing is queued behind the end of the queue
        self._local = threading.local()
        self._at_work: list[Reader] = []
        self._watching = threading.Lock()
        self._watch: tuple[int, apsw.Connection | None] = (0, None)  # the generation, and its connection that watches
        self._looks = itertools.count()
        self._readers = None if path == MEMORY else ThreadPoolExecutor(_READERS, "byssus-read")
        self._writing = threading.Thread(target=self._serve, name="byssus-write", daemon=True)
        self._writing.start()

    @property
    def key(self) -> Hashable | None:
        """What others in this process find it by: the file that is open, whatever its path leads to. None in memory."""
        return None if self._file is None else self._file.key

    def _open_file(self) -> None:
        """Open the file, and know which one that is; others may remove it or replace it meanwhile."""
        if self.path == MEMORY:
            self._use_writer(self._connect_anew())
            return
        for _ in range(_ATTEMPTS):
            if not self._read_only:
                make_private(self.path)
            before = identity(self.path)
            try:
                connection = self._connect_anew()
            except apsw.Error:
                if before is not None and before == identity(self.path):
                    raise
                continue
            self._file = OpenedFile.of(self.path, before, has_wal=not self._read_only)
            if self._file is not None:
                self._use_writer(connection)
                return
            _leave_wal(connection)
            connection.close()
        raise StoreUnusable(
            f"{self.path!r} was removed or replaced while it was being opened, {_ATTEMPTS} times; find out what does "
            "that, then try again"
        )

    def _connect(self) -> apsw.Connection:
        """Another connection to the same file."""
        self.check_place()
        connection = self._connect_anew()
        try:
            self.check_place()
        except StoreUnusable:
            _leave_wal(connection)
            connection.close()
            raise
        return connection

    def _connect_anew(self) -> apsw.Connection:
        return connect(self.path, self.durability, self._busy_seconds, read_only=self._read_only)

    def check_place(self) -> None:
        """Raise once the path does not lead to the file that is open."""
        if self._file is not None:
            self._file.check()

    def _use_writer(self, connection: apsw.Connection) -> None:
        self._writer = connection
        self._tx = SQLiteTx(connection)
        self._execute = connection.cursor().execute
        self._connections = [connection]

    def check_same(self, durability: Durability, busy_seconds: float | None = None) -> None:
        """Refuse an opener who wants something else than the first one did."""
        if busy_seconds not in (None, self._busy_seconds):
            raise InputError(
                f"{self.path!r} is already open in this process with busy_timeout={self._busy_seconds:g}; "
                f"use the same for every opener, not {busy_seconds:g}"
            )
        if self.durability != durability:
            raise InputError(
                f"{self.path!r} is already open in this process with durability={self.durability!r}; "
                f"use the same for every opener, not {durability!r}"
            )
        if self._file is not None and not self._read_only:
            self._file.check_writable()

    def before_fork(self) -> None:
        """Close the file: a child would inherit SQLite's belief in locks that only the parent holds."""
        self._pauses.pause(self._interrupt_reads)
        if self.path != MEMORY:
            self._disconnect()

    def after_fork(self) -> None:
        try:
            if self._file is not None:
                self._reopen_file(self._file)
                self._at_work.clear()
                self._generation += 1
        finally:
            self._pauses.go_on()

    def _reopen_file(self, before: OpenedFile) -> None:
        """Open the same file again: it may have been moved while it was closed."""
        before.check()
        self._use_writer(self._connect_anew())
        before.check()
        self._file = OpenedFile.of(self.path, before.key, has_wal=not self._read_only) or before

    def abandon(self) -> None:
        self._gate = threading.Lock()  # another OS thread may have held it when the process forked
        self._open = False

    def close(self) -> None:
        with self._gate:
            if not self._open:
                return
            self._open = False
            self._queue.put(None)
        self._writing.join()
        if self._readers is not None:
            self._readers.shutdown()
        self._worker_ids.clear()
        with self._watching:
            self._disconnect()
        self.presence.leave(has_leases=keeper.has_leases(self))

    def version(self) -> Hashable:
        if self.path == MEMORY:
            return next(self._looks)
        with self._pauses, self._watching:
            if not self._open:
                raise StoreNotOpen(f"the store on {self.path!r} is closed")
            if self._file is not None:
                self._file.check_all()
            generation, connection = self._watch
            if connection is None or generation != self._generation:
                connection = self._connect()
                self._connections.append(connection)
                self._watch = (self._generation, connection)
            return (self._generation, connection.pragma("data_version"))

    def scrub(self, *, rewrite: bool = True) -> bool:
        """VACUUM leaves nothing in free pages and in the gaps of others; then the WAL is folded in and emptied."""
        if not self.has_files:
            return True
        try:
            with self._pauses:
                if not self._open:
                    raise StoreNotOpen(f"the store on {self.path!r} is closed")
                connection = self._connect()
                try:
                    connection.pragma("temp_store", 0)  # a large database does not fit into memory
                    if rewrite:
                        self._refuse_to_fill_the_disk(connection)
                        for (index,) in connection.execute(_FULL_TEXT).fetchall():  # it keeps words of deleted rows
                            connection.execute(f"INSERT INTO {index} ({index}) VALUES ('optimize')")
                        connection.execute("VACUUM")
                    return self._has_folded(connection)
                finally:
                    connection.close()
        except apsw.Error as error:
            raise self._translate(error) from error

    def _refuse_to_fill_the_disk(self, connection: apsw.Connection) -> None:
        """A database is rewritten through its WAL. Should that fill the disk, the WAL must owe nothing to the file:
        or it could not be folded any more (see room.py)."""
        is_folded = self._has_folded(connection)
        size = connection.pragma("page_count") * connection.pragma("page_size")
        if not is_folded and not self._room.has_for(2 * size):
            raise StoreFull(f"no room left to rewrite {self.path!r}; free some disk space and try again")

    def _has_folded(self, connection: apsw.Connection) -> bool:
        """Fold the WAL and empty it, unless a reader needs an older state."""
        connection.set_busy_timeout(_SCRUB_MILLISECONDS)
        try:
            return bool(connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0][0] == 0)
        finally:
            connection.set_busy_timeout(int(self._busy_seconds * 1000))

    def pages_to(self, path: str, look: Callable[[Tx], T], progress: Callable[[int, int], object]) -> T | None:
        if not self.has_files:
            return None
        with self._beside() as source:
            # One read transaction from the first page to the last: a backup whose source sees the writes of others
            # would begin again with each of them.
            tx = SQLiteTx(source)
            tx.begin("BEGIN")
            tx.one("SELECT 1 FROM sqlite_schema")  # with which it begins
            seen = look(tx)
            try:
                copy_pages(source, path, progress)
            except apsw.Error as error:
                raise translate(error, path, self._busy_seconds) from error
            return seen

    def overwrite_deleted(self) -> None:
        self.write_now(_overwrite_deleted)

    def integrity(self) -> list[str]:
        if not self.has_files:
            return self.read_now(_integrity)
        with self._beside() as connection:  # FTS5 believes for a while in what a connection has read before
            return _integrity(SQLiteTx(connection))

    @contextlib.contextmanager
    def _beside(self) -> Iterator[apsw.Connection]:
        """A connection of one's own, for what takes long."""
        with self._pauses:
            if not self._open:
                raise StoreNotOpen(f"the store on {self.path!r} is closed")
            try:
                connection = self._connect()
                try:
                    yield connection
                finally:
                    connection.close()
            except apsw.Error as error:
                raise self._translate(error) from error

    def _disconnect(self) -> None:
        try:
            if self._file is not None:
                self._file.check_all()
        except StoreUnusable:  # what has the path now, and what lies beside it, is not ours to change
            for connection in self._connections:
                _leave_wal(connection)
        for connection in reversed(self._connections):  # the writer last: it folds the WAL into the file
            connection.close()

    def _submit(self, job: Job[Any], *, writes: bool, first: bool = False) -> None:
        with self._gate:
            if not self._open:
                raise StoreNotOpen(f"the store on {self.path!r} is closed; open it again in this process to go on")
            if first:
                self._first.append(job)
                self._queue.put(self._first)
            elif writes or self._readers is None:
                self._queue.put(job)
            else:
                self._readers.submit(self._read, job)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, job: Job[Any]) -> None:
        try:
            self._run_read(job)
        except apsw.InterruptError as error:
            job.error = error  # no caller waits for it
        except BaseException as error:  # noqa: BLE001 - it travels to the caller
            job.error = self._translate(as_read(error))
        deliver([job])

    def _run_read(self, job: Job[Any]) -> None:
        for repeats in itertools.count():
            try:
                with self._pauses:
                    self.check_place()
                    self._reader().run(job, gives_way=repeats < _REPEATS)
                break
            except apsw.InterruptError:
                if job.is_dropped:
                    raise  # else it was a fork: what follows waits for its end

    def _reader(self) -> Reader:
        known: tuple[int, Reader] | None = getattr(self._local, "known", None)
        if known is None or known[0] != self._generation:
            connection = self._connect()
            connection.pragma("query_only", True)
            self._connections.append(connection)
            self._worker_ids.add(threading.get_ident())
            known = self._local.known = (
                self._generation,
                Reader(connection, lambda execute: SQLiteTx(connection, execute)),
            )
            self._at_work.append(known[1])
        return known[1]

    def _interrupt_reads(self) -> None:
        for reader in list(self._at_work):
            reader.give_way()

    # --- writing ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._worker_ids.add(threading.get_ident())
        while (job := self._take()) is not None:
            group: list[Job[Any]] = []
            began = time.monotonic()
            try:
                with self._pauses:
                    self._commit_group(job, group)
                    if self._file is not None:
                        self._file.check_committed()
            except BaseException as error:  # noqa: BLE001 - it travels to the callers; the worker must live
                for member in group:
                    member.error = member.error or self._translate(error)
                with contextlib.suppress(apsw.Error):
                    self._roll_back()
                why = type(self._translate(error)).__name__
                _log.warning("%d write(s) to %r failed: %s", len(group), self.path, why)
            if (took := time.monotonic() - began) > _SLOW_SECONDS:
                _log.warning("%d write(s) to %r took %.1f s", len(group), self.path, took)
            self.committed(group)
            deliver(group)

    def _commit_group(self, job: Job[Any], group: list[Job[Any]]) -> None:
        """Run the job and all that waits behind it in one transaction."""
        group.append(job)
        self._begin(group)
        whole = self._run_in_a_row(job, group) or self._run_carefully(group)
        try:
            if whole:
                self._commit()
                return
        except apsw.Error:
            self._roll_back()
        # The whole transaction is gone, from inside a savepoint or at its end. Queries can be repeated: each of the
        # neighbours gets a transaction of its own, and only a job that fails there gets the error.
        for member in group:
            if member.error is None:
                self._alone(member)

    def _run_in_a_row(self, job: Job[Any] | None, group: list[Job[Any]]) -> bool:
        """Run what waits, hoping for the best: savepoints are worth their price only when something fails."""
        tx, writer, deadline = self._tx, self._writer, time.monotonic() + _GROUP_SECONDS
        while job is not None:
            try:
                job.run(tx)
            except BaseException as error:  # noqa: BLE001 - it travels to the caller
                job.error = self._translate(error)
                return False
            if not writer.in_transaction:  # it ended the transaction: from here on nothing would be undone
                return False
            full = len(group) >= _GROUP_WRITES or time.monotonic() >= deadline
            job = None if full else self._next()
            if job is not None:
                group.append(job)
        return True

    def _run_carefully(self, group: list[Job[Any]]) -> bool:
        """A job failed: start again without it, with a savepoint for each. False if the transaction is lost."""
        self._roll_back()
        self._begin_to_write()
        return all(self._attempt(member) for member in group if member.error is None)

    def _take(self, *, block: bool = True) -> Job[Any] | None:
        """The next job; None at the end of the queue."""
        while not self._first:
            entry = self._queue.get(block)
            if entry is not self._first:
                return entry  # type: ignore[return-value]
        return self._first.popleft()  # what announced it is passed over later

    def _next(self) -> Job[Any] | None:
        try:
            job = self._take(block=False)
        except queue.Empty:
            return None
        if job is None:  # the end of the queue: leave it for the serving loop
            self._queue.put(None)
        return job

    def _commit(self) -> None:
        if self.boundary is not None:
            self.boundary("before commit")
        self._execute("COMMIT")
        if self.boundary is not None:
            self.boundary("after commit")

    def _begin(self, group: list[Job[Any]]) -> None:
        try:
            if self._file is not None:
                self._file.check_writable()
                self._room.look(self._writer)
            self._begin_to_write()
        except (apsw.Error, StoreUnusable):
            # The jobs that were queued meanwhile have waited as long: they fail now, and not each in its turn.
            while (job := self._next()) is not None:
                group.append(job)
            raise

    def _begin_to_write(self) -> None:
        """Begin a transaction, unless a newer version has migrated the file since it was opened."""
        self._tx.begin("BEGIN IMMEDIATE")
        ((version,),) = self._execute("PRAGMA user_version")
        check_version(version, self._schema, self.path)

    def _attempt(self, job: Job[Any]) -> bool:
        """Run one job inside the group. False means that the whole transaction is gone."""
        try:
            self._execute("SAVEPOINT job")
            try:
                job.run(self._tx)
            except BaseException as error:  # noqa: BLE001 - it travels to the caller
                job.error = self._translate(error)
                self._execute("ROLLBACK TO job")
            self._execute("RELEASE job")
            return True
        except apsw.Error:  # the savepoint is gone, and the transaction with it or not
            self._roll_back()
            return False

    def _alone(self, job: Job[Any]) -> None:
        try:
            self._begin_to_write()
            job.run(self._tx)
            self._commit()
        except BaseException as error:  # noqa: BLE001 - it travels to the caller
            self._roll_back()
            job.error = self._translate(error)

    def _roll_back(self) -> None:
        if self._writer.in_transaction:
            self._execute("ROLLBACK")

    def _translate(self, error: BaseException) -> BaseException:
        # SQLite does not check that text is text: what a damaged file holds comes to light when Python reads it.
        ours = isinstance(error, apsw.Error | UnicodeDecodeError)
        return translate(error, self.path, self._busy_seconds) if ours else error


def _leave_wal(connection: apsw.Connection) -> None:
    """Let a connection be closed without folding its WAL."""
    with contextlib.suppress(apsw.Error):  # it is closed already
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)


def _overwrite_deleted(tx: Tx) -> None:
    tx.run("PRAGMA secure_delete = ON")


def _integrity(tx: Tx) -> list[str]:
    try:
        return [text for (text,) in tx.all("PRAGMA integrity_check") if text != "ok"]
    except (apsw.CorruptError, apsw.NotADBError) as error:
        return [str(error)]


# --- opening ----------------------------------------------------------------------------------------------------------


def open_store(
    path: str | os.PathLike[str],
    *,
    durability: Durability = "full",
    busy_seconds: float | None = None,
    read_only: bool = False,
) -> SQLiteStore:
    """The store on this file, made and migrated if need be. Give it back with `release`.

    With `read_only` the file is left as it is, to the byte, where that can be.
    """
    check_durability(durability)
    check_library(apsw.sqlite_lib_version())
    name = checked_path(path)

    def key(store: SQLiteStore | None) -> Hashable | None:
        if store is not None:
            return store.key
        return None if name == MEMORY else identity(name)

    def make() -> SQLiteStore:
        seconds = _BUSY_SECONDS if busy_seconds is None else busy_seconds
        try:
            is_left = read_only and can_be_left(name)
            if name != MEMORY and not is_left:  # what is only read may have many names
                _refuse_replaced(name)
                refuse_second_name(name)
            return SQLiteStore(name, durability, seconds, read_only=is_left)
        except apsw.Error as error:
            raise translate(as_read(error), name, seconds) from error

    return sharing.share(key, make, lambda store: store.check_same(durability, busy_seconds))


def _refuse_replaced(name: str) -> None:
    """Refuse to open a file under a path whose former file is still open here: both would use the same WAL."""
    for store in sharing.still_open():
        if isinstance(store, SQLiteStore) and store.path == name:
            store.check_place()
