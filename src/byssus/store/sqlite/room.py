"""Room on a small disk: a WAL can always be folded into its file, and something can be deleted though the disk is full.

What is committed lies in the WAL first. Folding it makes the file grow, and only then does the WAL give its room back.
So a WAL that has filled the disk cannot be folded any more, and nothing can be deleted. Before each transaction:

- The file may grow by half of what is free, without what the WAL still owes it and without a reserve: then there is
  room for the transaction in the WAL, and for the same pages in the file. Whatever needs more fails with SQLITE_FULL,
  before it is written. Deleting needs no new pages, and has the reserve for the pages that it changes.
- The limit of the WAL follows: it is folded the sooner, the less is free; and it is cut off where its room is needed.

With plenty of free space there is nothing to do but to look now and then.
"""

from __future__ import annotations

import os
import time

import apsw

CHECKPOINT_PAGES = 4_000  # 16 MB: the same hot pages are folded into the file once, not once a megabyte

_PLENTY = 2**30  # free bytes: no transaction needs as much
_TIGHT = 2**27  # free bytes, below which each transaction is looked at
_LOOK = 0.25  # seconds between two looks while there is more
_RESERVE = 2_000_000  # bytes that only deletions get, or an eighth of the room on a very small disk
_LEAST_PAGES = 32  # of a WAL, before it is folded
_NO_LIMIT = 2**32 - 2  # pages; SQLite's own limit
_FOLD_MILLISECONDS = 100  # how long a reader is waited for who needs the WAL


class Room:
    """The room that a file and its WAL have on their disk."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._next_look = 0.0
        self._is_limited = False

    def look(self, writer: apsw.Connection) -> None:
        """See that the next transaction leaves enough room. The connection is in none."""
        now = time.monotonic()
        if now < self._next_look:
            return
        free = self._free()
        self._next_look = now + _LOOK if free >= _TIGHT else now
        if free < _PLENTY:
            self._limit(writer, free)
        elif self._is_limited:
            self._is_limited = False
            writer.pragma("max_page_count", _NO_LIMIT)
            writer.wal_autocheckpoint(CHECKPOINT_PAGES)

    def has_for(self, size: int) -> bool:
        """Whether so many bytes can be written, and the disk is not full then."""
        return self._free() > size + _RESERVE

    def _limit(self, writer: apsw.Connection, free: int) -> None:
        wal, page, pages = _size(f"{self._path}-wal"), writer.pragma("page_size"), writer.pragma("page_count")
        owed = max(0, pages * page - _size(self._path))
        reserve = min(_RESERVE, (free + wal + _size(self._path)) // 8)
        if wal and free < max(wal, owed + 2 * reserve) and _fold(writer):
            free, owed = self._free(), 0
        growth = max(0, free - owed - reserve) // 2 // page
        writer.pragma("max_page_count", pages + growth)
        writer.wal_autocheckpoint(max(_LEAST_PAGES, min(CHECKPOINT_PAGES, growth // 4)))
        self._is_limited = True

    def _free(self) -> int:
        if not hasattr(os, "statvfs"):  # Windows
            return _PLENTY
        try:
            found = os.statvfs(os.path.dirname(self._path))
        except OSError:  # of which the transaction tells
            return _PLENTY
        return found.f_bavail * found.f_frsize


def _fold(writer: apsw.Connection) -> bool:
    """Fold the WAL into the file and cut it off; False if it is still being read, or there is no room."""
    timeout = writer.pragma("busy_timeout")
    writer.set_busy_timeout(_FOLD_MILLISECONDS)
    try:
        return bool(writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0][0] == 0)
    except apsw.Error:
        return False
    finally:
        writer.set_busy_timeout(timeout)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
