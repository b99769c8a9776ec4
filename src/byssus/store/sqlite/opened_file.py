"""The file that a store has open: it has one name, and that name still leads to it.

SQLite finds the WAL and the shared memory of a database by its name. So everybody who works on a file must call it by
the same name, and a name must not pass to another file while it is in use. SQLite does not check either.

- A file with two names is refused: a second hard link, or a file that is a mount point (`-v ./chat.db:/app/chat.db`).
  Under each name there would be a WAL, and one of them would be lost.
- A store compares what its path leads to with what it has open: before each transaction, after each commit and before
  the outcomes of that are delivered, and while a lease is kept. Once they differ, the store is lost: all that it is
  asked raises the same StoreUnusable, until it is closed.

A file is known by its device and its inode. Which one SQLite has opened is only believed if the path led to the same
file before and after that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from typing import Self

from byssus.errors import StoreFull, StoreUnusable

Identity = tuple[int, int]  # of a file: device and inode

_MOUNTS = "/proc/self/mountinfo"
_DESCRIPTORS = "/proc/self/fd"
_PRIVATE = 0o600
_HEADER = 100  # bytes with which every SQLite file begins
_LOOK = 0.1  # seconds between two looks at which file the WAL is; that there is one is looked at each time
_ESCAPED = re.compile(r"\\([0-7]{3})")


def identity(path: str) -> Identity | None:
    """The file that a path leads to; None if there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (found.st_dev, found.st_ino)


def make_private(path: str) -> None:
    """Make an empty file that only its owner may read, if there is none. SQLite's would be readable for everybody.

    SQLite gives the files beside it the same rights. The file is new, so closing it here takes no lock from anybody.
    """
    try:
        create_private(path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"no room left to make {path!r}; free some disk space and try again") from error
        raise StoreUnusable(
            f"{path!r} cannot be made ({error}); check that the path is right and that its directory may be written"
        ) from error


def create_private(path: str) -> None:
    """Create a file that its owner alone may read and write. There must be none."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE))
    os.chmod(path, _PRIVATE)  # a umask may take from the owner, too


# --- one name ---------------------------------------------------------------------------------------------------------


def refuse_second_name(path: str) -> None:
    """Refuse a file that others may know by another name."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        raise StoreUnusable(_linked(path, found))
    if is_mount_point(path):
        raise StoreUnusable(
            f"{path!r} is a mount point: the file is mounted by itself, so its WAL is not seen on the other side; "
            f"mount its directory instead (docker run -v ./data:{os.path.dirname(path)})"
        )


def _linked(path: str, found: os.stat_result) -> str:
    others = _other_names(path, found)
    also = f" (also {', '.join(map(repr, others))})" if others else ""
    return (
        f"{path!r} has {found.st_nlink} names{also}: who opens it by another one keeps a WAL of their own, and "
        "messages would be lost; remove the other names (a symbolic link does no harm)"
    )


def _other_names(path: str, found: os.stat_result) -> list[str]:
    """Other names of a file in the same directory. Those elsewhere are hard to find."""
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            return sorted(each.path for each in entries if each.inode() == found.st_ino and each.path != path)[:3]
    except OSError:
        return []


def is_mount_point(path: str) -> bool:
    """Whether a file, whose path has no symbolic links, is mounted by itself."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            return path in mount_points(mounts.read())
    except OSError:  # no Linux, or no /proc: at least a file of another file system is seen
        return os.stat(path).st_dev != os.stat(os.path.dirname(path)).st_dev


def mount_points(mountinfo: str) -> set[str]:
    """The mount points that a /proc/PID/mountinfo lists. It writes spaces and the like as octal numbers."""
    fields = (line.split(" ") for line in mountinfo.splitlines())
    return {_ESCAPED.sub(lambda code: chr(int(code[1], 8)), field[4]) for field in fields if len(field) > 4}


# --- the same file ----------------------------------------------------------------------------------------------------


class OpenedFile:
    """The files that a store has open under one path: the database, its WAL and the shared memory."""

    def __init__(self, path: str, key: Identity, beside: dict[str, Identity | None]) -> None:
        self.key = key
        self._path = path
        self._beside = beside  # by the path
        self._wal = f"{path}-wal"
        self._looked = time.monotonic()
        self._lost: str | None = None

    @classmethod
    def of(cls, path: str, before: Identity | None, *, has_wal: bool) -> Self | None:
        """What was just opened; None if the path did not lead to the same file before that."""
        beside = {f"{path}{suffix}": identity(f"{path}{suffix}") for suffix in ("-wal", "-shm")} if has_wal else {}
        if before is None or before != identity(path) or None in beside.values():
            return None
        return cls(path, before, beside)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        """Raise once the path leads elsewhere."""
        self._check_found(self._find(self._path))

    def check_writable(self) -> None:
        """Raise also while the file has a second name."""
        found = self._find(self._path)
        self._check_found(found)
        if found is not None and found.st_nlink > 1:
            raise StoreUnusable(_linked(self._path, found))

    def check_committed(self) -> None:
        """Raise if another process that opens the path now would not see what was committed."""
        self.check()
        now = time.monotonic()
        # A stat of a file that is written all the time makes its next sync slower: Linux then has to keep exact times.
        if now - self._looked > _LOOK or not os.access(self._wal, os.F_OK):
            self._looked = now
            self.check_all()

    def check_all(self) -> None:
        """Raise once anything of it is another file."""
        self.check()
        for path, known in self._beside.items():
            if identity(path) != known:
                self._lost = (
                    f"{path!r} was removed or replaced while the database was open, and with it what was written last; "
                    "nothing more is written. Close the database in all processes, open it again and run 'byssus "
                    "check'; never remove this file while a process uses the database"
                )
                raise StoreUnusable(self._lost)

    def _find(self, path: str) -> os.stat_result | None:
        if self._lost is not None:
            raise StoreUnusable(self._lost)
        try:
            return os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreUnusable(f"{path!r} cannot be looked at any more ({error}); nothing is written to it") from error

    def _check_found(self, found: os.stat_result | None) -> None:
        if found is None or (found.st_dev, found.st_ino) != self.key:
            self._lost = self._what_happened(is_replaced=found is not None)
            raise StoreUnusable(self._lost)
        if found.st_size < _HEADER:  # an empty file, to SQLite: the next process that opens it throws the WAL away
            self._lost = (
                f"{self._path!r} was emptied while it was open; nothing more is written to it. End this "
                f"process, keep {self._wal!r} if you want to look for the last messages, and restore a backup"
            )
            raise StoreUnusable(self._lost)

    def _what_happened(self, *, is_replaced: bool) -> str:
        """What has happened, where the messages are, and what to do."""
        name = _name_of(self.key)
        there = f"moved to {name!r}" if name else "removed, or moved away" if name is None else "removed"
        what = f"replaced by another file: the one that was open is {there}" if is_replaced else there
        text = f"{self._path!r} was {what}, while it was open; nothing more is written to it. "
        if name == "":
            return text + "Close it and open it again to start with an empty database there, or restore a backup first"
        goal = name or "its new name"
        text += f"Its messages are there, the last ones in {self._wal!r}: end this process, then move "
        if is_replaced:
            return text + f"that to {f'{goal}-wal'!r}, before anything opens the new file"
        return text + f"both back together, or that to {f'{goal}-wal'!r}"


def _name_of(key: Identity) -> str | None:
    """The name that a file which this process has open has now; "" if it was removed, None if that is unknown."""
    try:
        numbers = os.listdir(_DESCRIPTORS)
    except OSError:
        return None
    for number in numbers:
        descriptor = f"{_DESCRIPTORS}/{number}"
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found = os.stat(descriptor)
            if (found.st_dev, found.st_ino) == key:
                return os.readlink(descriptor) if found.st_nlink else ""
    return None
