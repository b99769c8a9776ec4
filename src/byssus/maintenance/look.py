"""A look at a place from outside: whether there is a database, how large it is, and who may read it.

Nothing is made, migrated or locked. A file is known as ours by its header: SQLite's `application_id`.
"""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path
from typing import NamedTuple

from byssus.store import opening
from byssus.store.sqlite import file as sqlite_file

_MAGIC = b"SQLite format 3\0"
_ID_AT = 68  # where the application_id stands in the header
_OURS = sqlite_file.APPLICATION_ID.to_bytes(4, "big")
_BESIDE = ("", "-wal", "-shm")


class Look(NamedTuple):
    """What there is at a place. `bytes` and `mode` are None if there is nothing; `mode` also on a server."""

    name: str
    kind: str
    is_there: bool
    bytes: int | None = None
    mode: int | None = None

    @property
    def permissions(self) -> str | None:
        """As `ls -l` shows them, with their number: -rw------- (0600)."""
        return None if self.mode is None else f"{stat.filemode(self.mode)} ({stat.S_IMODE(self.mode):04o})"

    @property
    def is_private(self) -> bool:
        """Whether only the owner of the file may read it."""
        return self.mode is None or not self.mode & 0o077


def look_at(place: str) -> Look:
    """What there is at a path or a DSN. A directory raises `StoreUnusable`, a silent server `StoreUnreachable`."""
    name = opening.name(place)
    if opening.is_dsn(place):
        server = opening.postgres_server(place)
        is_there = server.exists()
        return Look(name, "Postgres", is_there, server.size() if is_there else None)
    if not opening.exists(place):
        return Look(name, "SQLite file", is_there=False)
    path = sqlite_file.located(place)
    sqlite_file.refuse_directory(place, path)
    return Look(path, "SQLite file", True, _size(path), Path(path).stat().st_mode)


def is_database(path: str) -> bool:
    """Whether a file is a SQLite database of ours. Call it for files that this process has not opened as one."""
    try:
        with Path(path).open("rb", buffering=0) as file:
            header = file.read(_ID_AT + 4)
    except OSError:
        return False
    return header.startswith(_MAGIC) and header[_ID_AT:] == _OURS


def sqlite_version() -> str:
    """The version of the SQLite library that is used."""
    return sqlite_file.library_version()


def _size(path: str) -> int:
    total = 0
    for suffix in _BESIDE:
        with contextlib.suppress(OSError):
            total += Path(path + suffix).stat().st_size
    return total
