"""Backups: the whole database in one SQLite file, taken while other processes write.

- A backup is one snapshot. A SQLite file is copied page by page; from any other database, rows are read in one
  transaction.
- It is written under a temporary name, and renamed when it is complete, verified and on disk. An existing file is never
  overwritten: concurrent backups do not conflict, and a failed one leaves no file.
- It contains no deleted data: it has no free pages and no search index.
- An incremental backup updates the rows that differ, in one transaction. Until the commit, the file is the old backup.
  It only updates a backup of the same database that was not changed since: a hash over all rows is compared.

Long work runs on a thread of its own, and stops at the next page when its caller is cancelled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from byssus.accounts.rows import BackupResult
from byssus.errors import ByssusError, InputError, StoreCorrupt, StoreError, StoreFull
from byssus.maintenance.copy import PASSES, Comparison, Mirror, Progress, RunQuery
from byssus.queries.moving import checks, copying
from byssus.queries.moving.copying import Backup, Digest
from byssus.queries.moving.tables import TABLES
from byssus.queries.search import index
from byssus.store import sharing
from byssus.store.database import Store, Tx
from byssus.store.jobs import takes_long
from byssus.store.operations import Runner
from byssus.store.sqlite import store as sqlite
from byssus.store.sqlite.file import COMPACTED, MEMORY, checked_path, compact, fold, sync
from byssus.store.sqlite.opened_file import create_private
from byssus.threads import known_backups
from byssus.values.places import looks_like_dsn, redacted

T = TypeVar("T")
OnProgress = Callable[[int, int], object]
Counts = dict[str, Any]  # what is known of a backup when it is made

_LOOK = 0.2  # seconds between two looks whether the caller was cancelled
_BESIDE = ("", "-wal", "-shm", "-journal", COMPACTED)  # what SQLite and we keep beside a file


async def backup(
    store: Runner, path: str | os.PathLike[str], *, incremental: bool = False, progress: OnProgress | None = None
) -> BackupResult:
    """Write the whole database into a new SQLite file, while other processes write, and verify it.

    Raises if the file exists. With `incremental`, it can be an earlier backup of this database: then only rows that
    differ are written. `progress(done, total)` is called on another thread; only the ratio of the two is meaningful.
    """
    target = _checked_target(path)
    began = time.monotonic()

    def work(meter: Meter) -> BackupResult:
        refuse_unfinished(store.base)
        if incremental and os.path.lexists(target):
            result = _renewed(store.base, target, meter)
        else:
            result = _new(store.base, target, meter)
        meter.end()
        size = os.stat(target).st_size  # noqa: PTH116
        seconds = round(time.monotonic() - began, 3)
        return cast("BackupResult", {"path": target, "bytes": size, **result, "seconds": seconds})

    return await stoppable(store, work, progress)


# --- what takes long --------------------------------------------------------------------------------------------------


class _Stopped(ByssusError):
    """The caller was cancelled."""


class Meter:
    """How far something is that has several steps. It never goes back, also if a step has to be done again."""

    def __init__(self, progress: OnProgress | None) -> None:
        self._progress = progress
        self._stopped = threading.Event()
        self._done = 0
        self._units = 0  # of one step
        self._steps = 1

    def stop(self) -> None:
        self._stopped.set()

    def of(self, steps: int) -> None:
        self._steps = steps

    def report(self, step: int, done: int, total: int) -> None:
        """So much of a step is done, the first of which has number 0."""
        if self._stopped.is_set():
            raise _Stopped
        self._units = self._units or max(total, 1)
        share = min(done / total, 1) if total else 1
        last = self._units * self._steps - 1  # the end is reported when there is nothing left to do
        self._show(max(self._done, min(int((step + share) * self._units), last)))

    def end(self) -> None:
        self._units = self._units or 1
        self._show(self._units * self._steps)

    def _show(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(done, self._units * self._steps)


async def stoppable(store: Runner, work: Callable[[Meter], T], progress: OnProgress | None) -> T:
    if progress is not None and not callable(progress):
        raise InputError(f"progress must be a function of two numbers, got {progress!r:.80}")
    meter = Meter(progress)
    outcome: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work(meter))
        except BaseException as error:  # noqa: BLE001 - it travels to the caller
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="byssus-backup")
    thread.start()
    try:
        while not await store.aside(lambda: futures.wait([outcome], _LOOK).done):
            pass
    except BaseException:  # cancelled, or a Ctrl-C
        meter.stop()
        await store.aside(thread.join)
        raise
    return outcome.result()


def _within(tx: Tx) -> RunQuery:
    """Queries as parts of one transaction."""

    def ask(query: Callable[..., T], /, *args: object) -> T:
        return query(tx, *args)

    return ask


def _sha256(ask: RunQuery, progress: OnProgress) -> tuple[str, dict[str, int]]:
    """The hash over all rows of a database, and how many there are."""
    total = sum(ask(copying.counts).values())
    digests = [Digest(table) for table in TABLES]
    for table, digest in zip(TABLES, digests, strict=True):
        after = table.start
        while after != table.end:
            rows, after = ask(copying.page, table, after, table.end)
            digest.add(len(rows), copying.encoded(rows))
            progress(sum(each.rows for each in digests), total)
    return copying.combined(digest.value() for digest in digests), {
        table.name: digest.rows for table, digest in zip(TABLES, digests, strict=True)
    }


# --- a new backup -----------------------------------------------------------------------------------------------------


def _new(store: Store, target: str, meter: Meter) -> Counts:
    if os.path.lexists(target):
        raise _taken(target)
    meter.of(2)
    with _unfinished(target) as part:
        rows = store.pages_to(part, copying.counts, lambda done, total: meter.report(0, done, total))
        if rows is not None:
            with opened(part) as file:
                file.write_now(index.discard)
            compact(part, lambda: meter.report(1, 0, 1))
        with opened(part) as file:
            if rows is None:
                database, sha256, rows = _copy_rows(store, file, meter)
            else:
                database = file.read_now(copying.identity)
                sha256 = _verified(file, rows, meter)
            file.write_now(copying.mark_backup, database, store.name, sha256)
            refuse_damaged(file, target)
        fold(part)
        known_backups.remember(store, target)
        _publish(part, target)
    return {"rows": rows, "written": sum(rows.values()), "incremental": False, "verified": True, "sha256": sha256}


def _copy_rows(store: Store, file: Store, meter: Meter) -> tuple[str, str, dict[str, int]]:
    """Copy all rows, as of one moment, and compare both."""
    steps = {"comparing": 0, "copying": 0, "verifying": 1}

    def report(progress: Progress) -> None:
        meter.report(steps[progress.step], progress.done, progress.total)

    def snapshot(tx: Tx) -> tuple[str, Comparison]:  # it may have to be run again, and goes on then
        mark = file.write_now(copying.begin, store.name)
        assert mark is not None
        mirror = Mirror(_within(tx), file.read_now, file.write_now, report)
        return copying.identity(tx), _made_equal(mirror, mark.key)

    database, found = store.read_now(snapshot)
    file.write_now(copying.finish, found.sha256)
    return database, found.sha256, _rows(found)


def _made_equal(mirror: Mirror, mark: int) -> Comparison:
    found = mirror.compare("comparing")
    for _ in range(PASSES):  # a key that was given again keeps its old parent until its own row is written
        if found.differences:
            mirror.write(mark, found)
            found = mirror.compare("verifying")
    if found.differences:
        raise StoreError(f"the backup differs from the database ({mirror.describe(found)}); try again")
    return found


def _rows(found: Comparison) -> dict[str, int]:
    return {table.name: digest.rows for table, digest in zip(TABLES, found.digests, strict=True)}


def _verified(file: Store, expected: dict[str, int], meter: Meter) -> str:
    sha256, rows = _sha256(file.read_now, lambda done, total: meter.report(1, done, total))
    if rows != expected:
        wrong = next(name for name in expected if rows[name] != expected[name])
        raise StoreCorrupt(
            f"the backup has {rows[wrong]} rows in table {wrong}, and the database {expected[wrong]}; check the disk, "
            "then try again"
        )
    return sha256


def refuse_unfinished(store: Store) -> None:
    mark = store.read_now(copying.last_mark)
    if mark is not None and mark.finished_at is None:
        raise InputError(
            f"{store.name} is itself an unfinished copy of {mark.source}; finish that one first: run it again"
        )


def refuse_damaged(file: Store, name: str) -> None:
    found = file.integrity()
    if not found:
        dangling = file.read_now(checks.dangling)
        found = [f"row {key} of {table} points to no row of {parent}" for table, key, _, _, parent in dangling]
    if found:
        raise StoreCorrupt(
            f"{name!r} is damaged ({found[0]}); check the disk; "
            "'byssus check' tells whether the database that it comes from is, too"
        )


# --- files ------------------------------------------------------------------------------------------------------------


def _checked_target(path: object) -> str:
    """Where a backup goes. A directory is not made: the disk that belongs there may not be mounted."""
    name = checked_name(path)
    folder = None
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # of which `checked_path` tells
        folder = Path(name).expanduser().absolute().parent
    if folder is not None and not folder.is_dir():
        raise InputError(f"there is no directory {str(folder)!r} for the backup; make it, or name another file")
    return checked_path(name)


def checked_name(path: object) -> str:
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError(f"a backup is a file: pass its name, got {redacted(repr(path)):.80}")
    if name == MEMORY or looks_like_dsn(name):
        raise InputError("a backup is a file: pass its name; to copy into another database, use 'byssus copy'")
    return name


def _taken(target: str) -> InputError:
    return InputError(
        f"there is a file {target!r} already, and a backup does not overwrite: name another one, or pass "
        "incremental=True (--incremental) to bring an earlier backup up to date"
    )


@contextlib.contextmanager
def _unfinished(target: str) -> Iterator[str]:
    """A new file beside the target, whose name says what it is; it is gone afterwards."""
    part = f"{target}.unfinished-{secrets.token_hex(4)}"
    try:
        create_private(part)
    except OSError as error:
        raise StoreError(f"{target!r} cannot be written ({error}); choose another place for the backup") from error
    try:
        yield part
    except OSError as error:
        kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(f"{target!r} could not be written ({error}); check the disk, then try again") from error
    finally:
        for suffix in _BESIDE:
            with contextlib.suppress(OSError):
                os.unlink(part + suffix)  # noqa: PTH108


def _publish(part: str, target: str) -> None:
    """Give the file its name, unless there is such a file by now."""
    try:
        try:
            os.link(part, target)
            os.unlink(part)  # noqa: PTH108 - at once: a file with two names is no database
        except FileExistsError:
            raise
        except OSError:  # a file system without links: the first to make the file has the name
            create_private(target)
            os.replace(part, target)  # noqa: PTH105
    except FileExistsError:
        raise _taken(target) from None
    with contextlib.suppress(OSError):  # not every system lets a directory be opened
        sync(os.path.dirname(target))  # noqa: PTH120


@contextlib.contextmanager
def opened(path: str, *, read_only: bool = False) -> Iterator[Store]:
    store = sqlite.open_store(path, read_only=read_only)
    try:
        yield store
    finally:
        sharing.release(store)


# --- an earlier backup ------------------------------------------------------------------------------------------------


def _renewed(store: Store, target: str, meter: Meter) -> Counts:
    """Make an earlier backup equal to the database, in one transaction."""
    if os.stat(target).st_size == 0:  # noqa: PTH116
        raise InputError(f"{target!r} is empty, and no earlier backup; name another file")
    meter.of(4)
    with opened(target) as file:
        if file is store:
            raise InputError(f"{target!r} is the database itself; name another file for the backup")
        database = store.read_now(copying.identity)
        _refuse_others(file.read_now(copying.backup_mark), target, database)
        known_backups.remember(store, target)
        file.overwrite_deleted()
        found, written, removed = file.write_now(_apply, store, target, meter)
        if removed:  # what moved from page to page before it was deleted has left copies
            file.scrub()
        refuse_damaged(file, target)
    fold(target)
    return {"rows": _rows(found), "written": written, "incremental": True, "verified": True, "sha256": found.sha256}


def _refuse_others(mark: Backup | None, target: str, database: str) -> Backup:
    if mark is None:
        raise InputError(f"{target!r} is a database, and no backup; name another file")
    if mark.database != database:
        raise InputError(
            f"{target!r} is a backup of another database ({mark.source}, taken at {mark.taken_at}); name another file"
        )
    return mark


class _Applied(NamedTuple):
    """What an incremental backup has changed in its file."""

    found: Comparison
    written: int  # rows that were added or changed
    removed: int


def _apply(tx: Tx, store: Store, target: str, meter: Meter) -> _Applied:
    """All that an incremental backup does to its file. Whatever goes wrong undoes all of it."""
    steps = {"comparing": 1, "copying": 2, "verifying": 3}
    database = store.read_now(copying.identity)
    mark = _refuse_others(copying.backup_mark(tx), target, database)  # again: this transaction keeps other writers out
    refuse_changed(_within(tx), mark, target, lambda done, total: meter.report(0, done, total))

    def report(progress: Progress) -> None:
        meter.report(steps[progress.step], progress.done, progress.total)

    key = copying.reopen(tx, store.name)
    written = removed = 0

    @takes_long
    def snapshot(source: Tx) -> Comparison:  # it may have to be run again, and goes on then
        nonlocal written, removed
        mirror = Mirror(_within(source), _within(tx), _within(tx), report)
        try:
            return _made_equal(mirror, key)
        finally:
            written += sum(mirror.written.values())
            removed += mirror.removed

    found = store.read_now(snapshot)
    copying.finish(tx, found.sha256)
    copying.mark_backup(tx, database, store.name, found.sha256)
    return _Applied(found, written, removed)


def refuse_changed(ask: RunQuery, mark: Backup, name: str, progress: OnProgress) -> None:
    """Refuse what is not what it was when it was taken. After an upgrade there is no telling."""
    if mark.shape == copying.shape() and _sha256(ask, progress)[0] != mark.sha256:
        raise InputError(
            f"{name!r} is not what it was when the backup was taken ({mark.taken_at}): another program has changed it, "
            "or it is damaged; name another file ('byssus copy' takes it as it is)"
        )
