"""Files below one folder, and nothing outside it.

A path is walked name by name from the open folder (`openat` with `O_NOFOLLOW`), so no link is ever followed, also not
one that takes the place of a directory in the middle of a call. `..` is refused. A hard link cannot be told from any
other file: what it shares can be read; a write replaces the name and leaves the other one as it was.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NamedTuple

from byssus.errors import InputError

LARGEST = 10_000_000  # bytes of a file that is read
_ONLY = os.O_NOFOLLOW | os.O_CLOEXEC
_AS_FILE = _ONLY | os.O_NONBLOCK | os.O_NOCTTY  # opening a pipe or a device must not block
_MOST_SCANNED = 200_000  # entries of one directory


# What the tools add to a call before a person approves it. See `Folder.check`.
Where = Annotated[str, "leave it out: it is added for the person who approves the call"]


class DirectoryEntry(NamedTuple):
    """A name in a directory. `kind` is file, directory, link or other."""

    name: str
    kind: str


class Opened(NamedTuple):
    """The bytes of a file, and its mode."""

    data: bytes
    mode: int


class Folder:
    """A folder whose files a model may use. It must exist."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.path.isdir(path):  # noqa: PTH112 - as in the rest of this module, names are joined with care
            raise InputError(f"the folder {os.fspath(path)!r} does not exist, or is no directory; name another one")
        self.path = os.path.realpath(path)

    def check(self, folder: str) -> None:
        """Refuse a call that a person has approved for another folder: it may run long after, and elsewhere."""
        if folder not in ("", self.path):
            raise InputError(f"this call is for the folder {folder!r}, and the tool works in {self.path!r}")

    def bind(self, arguments: dict[str, Any]) -> None:
        """Add the folder to a call that a person is asked about. A model may have left it empty."""
        arguments["folder"] = arguments.get("folder") or self.path
        self.check(arguments["folder"])

    def parts(self, path: str) -> tuple[str, ...]:
        """Return the names of a path below the folder. Raises `InputError` if it leads elsewhere."""
        if "\0" in path:
            raise InputError(f"{path!r:.200} is no path: it has a NUL character")
        try:
            os.fsencode(path)
        except UnicodeError as error:
            raise InputError(f"{path!r:.200} is no path: {error.reason}") from error  # type: ignore[attr-defined]
        if os.path.isabs(path):  # noqa: PTH117
            inside = self.path.rstrip("/") + "/"
            if not f"{path}/".startswith(inside):
                raise InputError(f"{path!r:.200} is outside the folder {self.path!r}; use a path below it")
            path = path[len(inside) :]
        names = tuple(name for name in path.split("/") if name not in ("", "."))
        if ".." in names:
            raise InputError(f"{path!r:.200} has '..'; use a path below the folder, without it")
        return names

    def read(self, path: str) -> Opened:
        """Read a file. Raises `InputError` if it is none, or too large."""
        *above, name = self._named(path)
        with self._directory(above, path) as parent:
            return self._read_in(parent, name, path)

    def _read_in(self, parent: int, name: str, path: str) -> Opened:
        with _told(path, parent, name):
            file = os.open(name, os.O_RDONLY | _AS_FILE, dir_fd=parent)
        try:
            about = os.fstat(file)
            _check_file(path, about)
            with os.fdopen(file, "rb", closefd=False) as opened:
                data = opened.read(LARGEST + 1)
        finally:
            os.close(file)
        if len(data) > LARGEST:  # it has grown meanwhile
            raise InputError(_too_large(path, len(data)))
        return Opened(data, stat.S_IMODE(about.st_mode))

    def find(self, path: str) -> Opened | None:
        """Read a file that may not exist."""
        try:
            return self.read(path)
        except InputError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def write(self, path: str, data: bytes, replaces: Opened | None) -> None:
        """Put a file there in one step: a crash leaves the old or the new one.

        Raises `InputError` if the file is not (any more) what it replaces; None: it must be new.
        """
        *above, name = self._named(path)
        with self._directory(above, path, make=True) as parent:
            draft = f".{name[:40]}.{secrets.token_hex(6)}.tmp"
            with _told(path, parent, name):
                file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ONLY, 0o666, dir_fd=parent)
            try:
                with os.fdopen(file, "wb") as opened:
                    opened.write(data)
                    opened.flush()
                    if replaces is not None:
                        os.fchmod(file, replaces.mode)
                    os.fsync(file)
                if replaces is not None:
                    _lock(parent)  # until it is closed: of two writes at once, the second one sees the first
                    if self._read_in(parent, name, path).data != replaces.data:
                        raise InputError(f"{path!r} has changed meanwhile; read it again")
                with _told(path, parent, name):
                    if replaces is None:
                        os.link(draft, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
                    else:
                        os.rename(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=parent)
            os.fsync(parent)

    def entries(self, path: str, pattern: str = "") -> tuple[list[DirectoryEntry], bool]:
        """List a directory, sorted; and whether it has more entries than are looked at."""
        found: list[DirectoryEntry] = []
        with self._directory(self.parts(path), path) as directory, os.scandir(directory) as listed:
            for number, each in enumerate(listed):
                if number == _MOST_SCANNED:
                    return sorted(found), True
                if not pattern or fnmatch.fnmatch(each.name, pattern):
                    found.append(DirectoryEntry(each.name, _kind(each)))
        return sorted(found), False

    def size(self, path: str) -> int | None:
        """Return the size of a file; None for anything else, or nothing."""
        *above, name = self._named(path)
        try:
            with self._directory(above, path) as parent:
                about = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except (OSError, InputError):
            return None
        return about.st_size if stat.S_ISREG(about.st_mode) else None

    def _named(self, path: str) -> tuple[str, ...]:
        parts = self.parts(path)
        if not parts:
            raise InputError(f"{path!r:.200} is the folder itself; name a file in it")
        return parts

    @contextmanager
    def _directory(self, names: Sequence[str], path: str, *, make: bool = False) -> Iterator[int]:
        """Open a directory below the folder, name by name; missing ones are made if `make`."""
        with _told(path, None, self.path):
            current = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _ONLY)
        try:
            for name in names:
                with _told(path, current, name):
                    if make:
                        with suppress(FileExistsError):
                            os.mkdir(name, dir_fd=current)
                    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _ONLY, dir_fd=current)
                os.close(current)
                current = below
            yield current
        finally:
            os.close(current)


def shown(name: str) -> str:
    """A file name as text on one line: bytes that are not UTF-8 are shown by their numbers."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").replace("\n", "\\n")


def _lock(directory: int) -> None:
    with suppress(OSError):  # a network file system may have no locks for directories
        fcntl.flock(directory, fcntl.LOCK_EX)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def _check_file(path: str, about: os.stat_result) -> None:
    if stat.S_ISDIR(about.st_mode):
        raise InputError(f"{path!r} is a directory; list_files lists it")
    if not stat.S_ISREG(about.st_mode):
        raise InputError(f"{path!r} is no regular file")
    if about.st_size > LARGEST:
        raise InputError(_too_large(path, about.st_size))


def _too_large(path: str, size: int) -> str:
    return f"{path!r} has {size:,} bytes, and at most {LARGEST:,} are read"


@contextmanager
def _told(path: str, parent: int | None, name: str) -> Iterator[None]:
    """Turn the system's errors into words that a model can act upon."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path!r:.200}: {_why(error, parent, name)}") from error


def _why(error: OSError, parent: int | None, name: str) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
        with suppress(OSError):
            if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                return f"{shown(name)!r} is a symbolic link; links are not followed"
        if error.errno == errno.ELOOP:
            return f"{shown(name)!r} was a symbolic link; links are not followed"
    if isinstance(error, FileNotFoundError):
        return "there is no such file or directory"
    return (error.strerror or str(error)).lower()
