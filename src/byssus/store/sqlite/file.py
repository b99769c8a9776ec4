"""A SQLite file as byssus opens it: whose it is, how durable, with the newest schema; and its errors as ours."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence

import apsw

from byssus.errors import (
    ByssusError,
    InputError,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnusable,
)
from byssus.store.database import Durability
from byssus.store.schema import Migration, check_version, migrations
from byssus.store.sqlite.opened_file import make_private
from byssus.store.sqlite.room import CHECKPOINT_PAGES
from byssus.values.places import EXAMPLE, looks_like_dsn, redacted

MEMORY = ":memory:"
APPLICATION_ID = 0x42595353  # "BYSS"
OLDEST_SQLITE = (3, 51, 3)  # before it, two connections that write and checkpoint can corrupt a WAL database
SYNCHRONOUS = {"full": "FULL", "normal": "NORMAL"}

_BACKUP_PAGES = 1_000  # 4 MB between two looks
_FOLD_MILLISECONDS = 1_000
_COMPACT_STEPS = 1_000_000  # of SQLite's machine, between two looks
COMPACTED = "-compacted"  # the suffix of a file while it is rewritten
_log = logging.getLogger("byssus.store")


def check_durability(durability: object) -> None:
    if durability not in SYNCHRONOUS:
        raise InputError(f"durability must be one of {', '.join(SYNCHRONOUS)}, got {durability!r}")


def library_version() -> str:
    """The version of the SQLite that apsw carries."""
    return apsw.sqlite_lib_version()


def check_library(version: str) -> None:
    """Refuse a SQLite that can corrupt a database."""
    if tuple(int(part) for part in version.split(".")[:3]) < OLDEST_SQLITE:
        wanted = ".".join(map(str, OLDEST_SQLITE))
        raise StoreUnusable(
            f"SQLite {version} can corrupt a database that two connections write; byssus needs {wanted} or newer: "
            "pip install --upgrade apsw"
        )


def translate(error: BaseException, path: str, waited: float) -> BaseException:
    """A database error as one of ours: recognised by its code, with the next step."""
    for kind, make in _TRANSLATIONS:
        if isinstance(error, kind):
            ours = make(path, waited, error)
            ours.__cause__ = error
            return ours
    ours = StoreError(f"SQLite could not work on {path!r}: {error}")
    ours.__cause__ = error
    return ours


def as_read(error: BaseException) -> BaseException:
    """An error of a reader: a value that is too long there comes from a damaged file."""
    return apsw.CorruptError(str(error)) if isinstance(error, apsw.TooBigError) else error


def _disk_error(path: str, error: BaseException) -> ByssusError:
    if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE:  # there was no room for the index of the WAL
        return StoreFull(f"no room left to write {path!r}; free some disk space and try again")
    return StoreError(f"the disk failed under {path!r} ({error}); check it, then try again")


_TRANSLATIONS: list[tuple[type[Exception], Callable[[str, float, BaseException], ByssusError]]] = [
    (
        apsw.BusyError,
        lambda path, waited, _: StoreBusy(
            f"another process held the write lock on {path!r} for more than {waited:g} s; "
            "end its transaction, or try again"
        ),
    ),
    (
        apsw.FullError,
        lambda path, _, __: StoreFull(f"no room left to write {path!r}; free some disk space and try again"),
    ),
    (
        apsw.ReadOnlyError,
        lambda path, _, __: StoreReadOnly(
            f"{path!r} cannot be written; give this process the right to write the file and its directory"
        ),
    ),
    (
        apsw.NotADBError,
        lambda path, _, __: StoreUnusable(f"{path!r} is not a SQLite database; choose another path"),
    ),
    (
        apsw.CantOpenError,
        lambda path, _, error: StoreUnusable(
            f"{path!r} cannot be opened ({error}{_hindrance(path)}); check that the path is right and may be read and "
            "written"
        ),
    ),
    (
        apsw.CorruptError,  # what SQLite says of a read that fails, too
        lambda path, _, error: StoreCorrupt(
            f"{path!r} could not be read, or is damaged ({error}); check the disk, then restore a backup"
        ),
    ),
    (
        UnicodeDecodeError,
        lambda path, _, error: StoreCorrupt(
            f"{path!r} is damaged: it holds text that is none ({error}); restore a backup"
        ),
    ),
    (
        apsw.TooBigError,
        lambda path, _, __: InputError(f"a value is too long for {path!r}: SQLite holds up to 1,000,000,000 bytes"),
    ),
    (
        apsw.IOError,
        lambda path, _, error: _disk_error(path, error),
    ),
]


def check_path(path: object) -> str:
    """The path as text, if it can be one."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError(f"a database path must be a file name or {MEMORY!r}, got {redacted(repr(path)):.80}")
    if looks_like_dsn(name):
        raise InputError(
            f"{redacted(name)!r} is no path; a database is a file, or Postgres: {EXAMPLE}. A file with such a name is "
            "written with its directory: ./..."
        )
    return name


def check_busy_timeout(seconds: object) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 86_400:
        raise InputError(f"busy_timeout must be a number of seconds above 0, and a day at most; got {seconds!r:.80}")
    return float(seconds)


def checked_path(path: str | os.PathLike[str]) -> str:
    name = check_path(path)
    if name == MEMORY:
        return name
    try:
        file = located(os.fsdecode(name.encode()))
        refuse_directory(name, file)
    except UnicodeEncodeError as error:
        raise InputError(f"a database path cannot contain lone surrogates, got {name!r}") from error
    except OSError as error:
        raise StoreUnusable(f"{name!r} cannot be opened ({error}); check that it may be read and written") from error
    try:
        _make_directory(os.path.dirname(file))
    except OSError as error:
        raise StoreUnusable(f"the directory of {name!r} cannot be made ({error}); choose another path") from error
    return os.path.realpath(file)


def _hindrance(path: str) -> str:
    """Why a file cannot be opened, as far as that is known: SQLite does not say."""
    folder = os.path.dirname(path)
    if not os.access(folder, os.W_OK):
        return f": {folder!r} cannot be written, or is read-only"
    if os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK):
        return ": it cannot be read and written, or is read-only"
    return ""


def located(name: str) -> str:
    """The path from the root on, `~` resolved, in one form: a slash at the end and `.` are nothing."""
    path = os.path.expanduser(name)
    if name.startswith("~") and path == name:
        raise FileNotFoundError(f"there is no home directory {name.partition(os.sep)[0]!r}")
    drive, rest = os.path.splitdrive(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    parts = rest.replace(os.altsep or os.sep, os.sep).split(os.sep)
    return f"{drive}{os.sep}{os.sep.join(part for part in parts if part not in ('', os.curdir))}"


def refuse_directory(name: str, file: str) -> None:
    if _is_directory(file):
        raise StoreUnusable(
            f"{name!r} is a directory; name a file in it, for example {os.path.join(file, 'chat.db')!r}"
        )


def _is_directory(path: str) -> bool:
    """Whether there is a directory; a path that cannot even be looked at raises."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _make_directory(folder: str) -> None:
    """Make the directory so that it survives a power cut: SQLite syncs the one that holds its files, and no other."""
    if _is_directory(folder):
        return
    parent = os.path.dirname(folder)
    _make_directory(parent)
    try:
        os.mkdir(folder, 0o700)
        os.chmod(folder, 0o700)  # a umask may take from the owner, too
    except FileExistsError:  # another process was faster, or it is something else
        if not _is_directory(folder):
            raise
    with contextlib.suppress(OSError):  # not every system lets a directory be opened
        handle = os.open(parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def connect(path: str, durability: Durability, busy_seconds: float, *, read_only: bool = False) -> apsw.Connection:
    """A connection to a file of ours, which is there; one that only reads leaves it as it is, if it `can_be_left`."""
    flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
    connection = apsw.Connection(path, flags=flags)
    try:
        connection.set_busy_timeout(int(busy_seconds * 1000))
        # A file that is not ours is closed unchanged, its WAL included.
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        _check_owner(connection, path)
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        if path != MEMORY and not read_only:
            _enter_wal(connection, path, busy_seconds)
        connection.pragma("synchronous", SYNCHRONOUS[durability])
        connection.pragma("foreign_keys", True)
        connection.pragma("temp_store", "MEMORY")  # savepoints keep their pages here
        connection.wal_autocheckpoint(CHECKPOINT_PAGES)
        if sys.platform == "darwin":
            connection.pragma("fullfsync", True)  # fsync alone does not reach the disk there
        _migrate(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_owner(connection: apsw.Connection, path: str) -> None:
    """Refuse a file that is not ours before anything is written to it."""
    connection.execute("BEGIN")  # one look: another process may be making the tables just now
    try:
        owner = connection.pragma("application_id")
        version = connection.pragma("user_version")
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' LIMIT 4")]
    finally:
        if connection.in_transaction:  # a disk error has ended it already, and is raised to the caller
            connection.execute("ROLLBACK")
    if owner == APPLICATION_ID:
        return
    if owner or tables or version:
        raise StoreUnusable(
            f"{path!r} is another program's database (application id {owner}, tables {', '.join(tables) or 'none'}); "
            "choose another path"
        )


def _enter_wal(connection: apsw.Connection, path: str, busy_seconds: float) -> None:
    """Many processes may open a new file at once, and SQLite does not wait for this lock on its own."""
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            mode = connection.pragma("journal_mode", "wal")
            break
        except apsw.BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    if mode != "wal":
        raise StoreUnusable(f"{path!r} is on a file system without shared memory (WAL is refused); use a local disk")


def newest() -> int:
    """The schema that this version knows."""
    return migrations("sqlite", key="INTEGER PRIMARY KEY")[-1].number


def _migrate(connection: apsw.Connection, path: str) -> None:
    known = migrations("sqlite", key="INTEGER PRIMARY KEY")
    version = connection.pragma("user_version")
    check_version(version, known[-1].number, path)
    if version < known[-1].number:
        connection.execute("BEGIN IMMEDIATE")
        try:
            _apply(connection, known)
            connection.execute("COMMIT")
            _log.info("%r was brought from schema %d to %d", path, version, known[-1].number)
        except BaseException:
            with contextlib.suppress(apsw.Error):
                connection.execute("ROLLBACK")
            raise


def _apply(connection: apsw.Connection, known: Sequence[Migration]) -> None:
    version = connection.pragma("user_version")  # again, under the lock: another process may have been faster
    for migration in known:
        if migration.number > version:
            connection.execute(migration.sql)
            connection.pragma("user_version", migration.number)
    connection.pragma("application_id", APPLICATION_ID)


# --- backups ----------------------------------------------------------------------------------------------------------


def can_be_left(path: str) -> bool:
    """Whether a file can be read as it is: it has the newest tables, and nothing beside it, as a reader would leave it
    there."""
    connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return bool(connection.pragma("user_version") == newest() and connection.pragma("journal_mode") != "wal")
    finally:
        connection.close()


def copy_pages(source: apsw.Connection, path: str, progress: Callable[[int, int], object]) -> None:
    """Copy what a connection sees into a file that holds nothing yet. The connection is in a read transaction."""
    target = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        target.pragma("journal_mode", "off")  # should this fail, the file is thrown away
        target.pragma("synchronous", "off")
        with target.backup("main", source, "main") as backup:
            while not backup.done:
                backup.step(_BACKUP_PAGES)
                progress(backup.page_count - backup.remaining, backup.page_count)
    finally:
        target.close()


def compact(path: str, progress: Callable[[], object]) -> None:
    """Rewrite a database that is not open elsewhere, without remains of deleted rows. `progress` is called often."""
    fresh = path + COMPACTED
    try:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_progress_handler(lambda: bool(progress()), _COMPACT_STEPS)
            make_private(fresh)
            connection.execute("VACUUM INTO ?", (fresh,))
        finally:
            connection.close()
    except apsw.Error as error:
        raise translate(error, path, 0) from error
    os.replace(fresh, path)


def fold(path: str) -> None:
    """Turn a database that is not open any more into one plain file, and sync it."""
    try:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(_FOLD_MILLISECONDS)
            connection.pragma("journal_mode", "delete")
        finally:
            connection.close()
    except apsw.BusyError:  # it is being read: the files beside it are removed when the reader is done
        return
    except apsw.Error as error:
        raise translate(error, path, _FOLD_MILLISECONDS / 1_000) from error
    sync(path)


def sync(path: str | os.PathLike[str]) -> None:
    """Sync a file that is not open, or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
