"""Who holds a lease, and whether that process has ended.

A process that holds leases keeps a file locked (flock). The kernel unlocks it when the process ends, however it ends,
in whatever container and of whatever user it was. So the file proves both: locked, the process lives; found unlocked,
it has ended. The file of a SQLite database is beside it; for a server it is in the memory of the machine.

- A file that is not found proves nothing: the process may be on another machine, or in a container that cannot be
  looked into. Then its lease has to run out. Pids, boots and host names prove nothing either: a pid is used again,
  /proc may hide a process, and machines that were cloned share all of them.
- A SQLite file is used by one machine at a time. There, a process of another boot has ended too.
- Files of processes that were killed are removed an hour after one was found: until then a lease may name them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # a system without it: no process can prove that it lives, and leases run out
    fcntl = None  # type: ignore[assignment]

_KEPT_SECONDS = 3_600.0  # for how long the file of a process that has ended is kept
_PROOF = re.compile(r"[0-9a-f]{32}")
_UNKNOWN = "?"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MARK = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_log = logging.getLogger("byssus.store")

_proofs: set[str] = set()  # of this process, also those of stores that are closed
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_proofs.clear)


class Presence:
    """The proof that this process lives, for all who share one database.

    `stem` is where the files are: a path without its end; None if no other process uses the database. `like` is a file
    whose permissions they get. With `one_machine`, all who use the database are on the machine that this process is on.
    """

    def __init__(self, stem: str | None, *, like: str | None = None, one_machine: bool = False) -> None:
        self.stem = stem
        self._like = like
        self._one_machine = one_machine
        self._changing = threading.Lock()
        self._file: int | None = None
        self._proof = ""

    def name(self, token: str, seconds: float) -> str:
        """The name under which this process takes a lease of so many seconds: what people read first, then the rest."""
        proof = self._shown()
        return f"{_host()}:{os.getpid()} proof={proof} boot={_boot()} seconds={seconds:g} lease={token}"

    def has_ended(self, owner: str) -> bool:
        """Whether the process that took a lease is known to have ended."""
        known = _parts(owner)
        if self._one_machine and _UNKNOWN != _boot() != known.get("boot", _UNKNOWN) != _UNKNOWN:
            return True
        proof = known.get("proof", "")
        return self.stem is not None and _PROOF.fullmatch(proof) is not None and _is_unlocked(self.stem + proof)

    def leave(self, *, has_leases: bool) -> None:
        """The store is closed. The file stays, without its lock, if a lease that was not given back names it."""
        with self._changing:
            file, self._file = self._file, None
            if file is not None:
                if not has_leases:
                    _remove(f"{self.stem}{self._proof}")
                os.close(file)

    def abandon(self) -> None:
        """In a child process: the lock is the parent's, and must end with the parent."""
        if self._file is not None:
            os.close(self._file)  # closing a copy unlocks nothing
            self._file = None

    def _shown(self) -> str:
        """The end of the file's name, which others find in the name of an owner. The file is made for the first one."""
        with self._changing:
            if not self._proof:
                self._proof = secrets.token_hex(16)
                _proofs.add(self._proof)
                if self.stem is not None and fcntl is not None:
                    _tidy(self.stem)
                    self._file = self._locked(self.stem + self._proof)
            return self._proof

    def _locked(self, path: str) -> int | None:
        """A new file with a lock on it; None where there can be none: then leases of this process have to run out."""
        file = None
        try:
            file = os.open(path, _MAKE, 0o600)
            self._make_like(file)
            fcntl.flock(file, fcntl.LOCK_EX)  # waits for a process that tidies up, and looks at it just now
        except OSError as error:
            _log.debug("%r cannot be made and locked (%s): leases of this process have to run out", path, error)
            if file is not None:
                _remove(path)
                os.close(file)
            return None
        return file

    def _make_like(self, file: int) -> None:
        """Give the file to those who may use the database: what root makes must be no secret to the others."""
        if self._like is None:
            os.fchmod(file, 0o644)
            return
        like = os.stat(self._like)
        if os.geteuid() == 0:  # as SQLite does with the files that it makes
            os.fchown(file, like.st_uid, like.st_gid)
        os.fchmod(file, like.st_mode & 0o666)


def in_memory() -> str:
    """Where the processes of this machine keep their files, if the database itself is elsewhere."""
    folders = ("/dev/shm", os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - the names there cannot be guessed
    folder = next((folder for folder in folders if os.access(folder, os.W_OK)), folders[-1])
    return os.path.join(folder, "byssus-owner-")


def token_of(owner: str) -> str | None:
    """The token of a lease that this process holds or held; None if the owner is another process."""
    known = _parts(owner)
    if known.get("proof") in _proofs:
        return known.get("lease")
    return None


def seconds_of(owner: str) -> float | None:
    """How long the lease of an owner lasts without a renewal; None if its name does not say so."""
    try:
        return float(_parts(owner)["seconds"])
    except (KeyError, ValueError):
        return None


def _parts(owner: str) -> dict[str, str]:
    return {key: value for key, is_part, value in (part.partition("=") for part in owner.split(" ")[1:]) if is_part}


def _is_unlocked(path: str) -> bool:
    """Whether the file exists and is not locked."""
    with _opened(path, _READ) as file:
        return file is not None and _can_be_locked(file)


def _can_be_locked(file: int) -> bool:
    try:  # shared, so that two who look do not take each other for the owner
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _tidy(stem: str) -> None:
    """Mark the files of processes that have ended, and remove those that were marked an hour ago."""
    folder, start = os.path.split(stem)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for path in [entry.path for entry in entries if entry.name.startswith(start)]:
            with contextlib.suppress(OSError), _opened(path, _MARK) as file:
                if file is None or not _can_be_locked(file):
                    continue
                found = os.fstat(file)
                if found.st_size == 0:
                    os.write(file, b"this process has ended\n")
                elif time.time() - found.st_mtime > _KEPT_SECONDS:
                    _remove(path)


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int | None]:
    """A file that exists; None if it is none, or may not be opened."""
    try:
        file = os.open(path, flags)
    except OSError:
        yield None
        return
    try:
        yield file if stat.S_ISREG(os.fstat(file).st_mode) else None
    finally:
        os.close(file)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


@functools.cache
def _host() -> str:
    return socket.gethostname().replace(" ", "-") or "localhost"


@functools.cache
def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return _UNKNOWN
