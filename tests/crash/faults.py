"""Disks that fail on purpose, under a SQLite that does not know.

Reads and writes fail below SQLite, in its table of system calls: it sees what the kernel would say (no room, an I/O
error, a file system that became read-only) and makes its own errors of it. A sync is not in that table, so it fails in
an apsw VFS. Such a VFS has one flaw: what it raises inside a checkpoint, which SQLite forgives, comes out of the
statement all the same. So a sync must not fail here while a store closes, or checkpoints by itself.

A fault strikes at the n-th write or sync, so many times in a row or until it is healed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
from collections.abc import Iterator
from typing import Any

import apsw

_TRANSFER = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)
_OPEN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, use_errno=True)
_TRUNCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, use_errno=True)
_UNLINK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, use_errno=True)

LASTING = math.inf
FULL, BROKEN, READ_ONLY, STALE = errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE


class Fault:
    """When to fail. It counts from the moment at which it is armed; a lasting fault at 0 is there at once."""

    def __init__(self) -> None:
        self.count = 0
        self.struck = 0
        self._from = self._upto = 0.0

    def arm(self, at: int, times: float = LASTING) -> None:
        self.count = self.struck = 0
        self._from, self._upto = at, at + times

    def heal(self) -> None:
        self._upto = 0

    def strikes(self) -> bool:
        """Count one more."""
        self.count += 1
        strikes = self._from <= self.count < self._upto
        self.struck += strikes
        return strikes

    @property
    def lasts(self) -> bool:
        """Whether nothing can be written any more."""
        return self._upto == LASTING and self._from <= self.count


# --- reads and writes -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing_writes(code: int) -> Iterator[Fault]:
    """Writes fail with this errno. Of the first one a part still arrives, as on a disk that is almost full. While it
    lasts a broken disk cannot truncate either, and on a read-only one no file is deleted or opened for writing."""
    fault = Fault()
    table = apsw.VFS("system-calls", apsw.vfs_names()[0])

    def refuse() -> int:
        ctypes.set_errno(code)
        return -1

    def write(file: int, data: int, size: int, offset: int) -> int:
        if not fault.strikes():
            return int(real_write(file, data, size, offset))
        if fault.struck == 1 and size > 1:
            fault.count -= 1  # SQLite asks again for the rest, and that is the same write
            return int(real_write(file, data, size // 2, offset))
        return refuse()

    def truncate(file: int, size: int) -> int:
        return refuse() if fault.lasts and code != FULL else int(real_truncate(file, size))

    def open_file(name: bytes, flags: int, mode: int) -> int:
        writes = flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT)
        refused = fault.lasts and writes and code == READ_ONLY
        return refuse() if refused else int(real_open(name, flags, mode))

    def unlink(name: bytes) -> int:
        return refuse() if fault.lasts and code == READ_ONLY else int(real_unlink(name))

    pwrite = "pwrite64" if table.xGetSystemCall("pwrite64") else "pwrite"
    hooks = {
        pwrite: _TRANSFER(write),
        "ftruncate": _TRUNCATE(truncate),
        "open": _OPEN(open_file),
        "unlink": _UNLINK(unlink),
    }
    real: dict[str, Any] = {name: type(hook)(table.xGetSystemCall(name) or 0) for name, hook in hooks.items()}
    real_write, real_truncate, real_open, real_unlink = real.values()
    try:
        for name, hook in hooks.items():
            assert table.xSetSystemCall(name, ctypes.cast(hook, ctypes.c_void_p).value or 0), name
        yield fault
    finally:
        for name, call in real.items():
            table.xSetSystemCall(name, ctypes.cast(call, ctypes.c_void_p).value or 0)
        table.unregister()


@contextlib.contextmanager
def failing_reads(code: int) -> Iterator[Fault]:
    """Reads fail with this errno."""
    fault = Fault()
    table = apsw.VFS("system-calls", apsw.vfs_names()[0])
    name = "pread64" if table.xGetSystemCall("pread64") else "pread"
    address = table.xGetSystemCall(name) or 0
    real = _TRANSFER(address)

    def read(file: int, data: int, size: int, offset: int) -> int:
        if not fault.strikes():
            return int(real(file, data, size, offset))
        ctypes.set_errno(code)
        return -1

    hook = _TRANSFER(read)
    try:
        assert table.xSetSystemCall(name, ctypes.cast(hook, ctypes.c_void_p).value or 0)
        yield fault
    finally:
        table.xSetSystemCall(name, address)
        table.unregister()


# --- syncs ------------------------------------------------------------------------------------------------------------


class _Syncing(apsw.VFS):
    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._base = apsw.vfs_names()[0]
        super().__init__("failing-syncs", self._base, makedefault=True)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _SyncedFile(self._fault, self._base, name, flags)


class _SyncedFile(apsw.VFSFile):
    def __init__(self, fault: Fault, base: str, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._fault = fault
        super().__init__(base, name, flags)

    def xSync(self, flags: int) -> None:
        if self._fault.strikes():
            raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)
        super().xSync(flags)


@contextlib.contextmanager
def failing_syncs() -> Iterator[Fault]:
    """Syncs fail, for the databases that are opened in here."""
    fault = Fault()
    vfs = _Syncing(fault)
    try:
        yield fault
    finally:
        vfs.unregister()
