"""The backups of a database that are known: each is recorded before its file gets its name.

A backup stays in the list until its file is known to be gone: it is no longer in its directory, on the machine that
wrote it, and that directory is on the same disk as before. Backups of other machines and on disks that are not mounted
cannot be checked, and stay in the list.
"""

from __future__ import annotations

import logging
import os
import socket

from byssus.errors import StoreError
from byssus.queries.moving import known_backups
from byssus.queries.moving.known_backups import KnownBackup
from byssus.store.database import Store

_log = logging.getLogger("byssus.store")


def remember(store: Store, path: str) -> None:
    """Record that a backup is written to this file; forget those that are gone. Blocks."""
    here = KnownBackup(socket.gethostname(), path, _device(path))
    try:
        gone = [each for each in store.read_now(known_backups.all_of) if _is_gone(each, store)]
        store.write_now(known_backups.add, here, gone)
    except StoreError as error:  # on a full disk, a backup is wanted all the more
        _log.warning("%s does not know of its backup %r, and an erasure will not name it: %s", store.name, path, error)


def still_known(store: Store) -> list[str]:
    """The backups that may still exist, as paths to show. Blocks."""
    known = [each for each in store.read_now(known_backups.all_of) if not _is_gone(each, store)]
    here = socket.gethostname()
    return [each.path if store.has_files or each.host == here else f"{each.host}:{each.path}" for each in known]


def _is_gone(backup: KnownBackup, store: Store) -> bool:
    # A SQLite file and its backups are on one machine, even if a container gives that another name each time.
    is_here = store.has_files or backup.host == socket.gethostname()
    return is_here and backup.device == _device(backup.path) and not os.path.lexists(backup.path)


def _device(path: str) -> str:
    try:
        return str(os.stat(os.path.dirname(path)).st_dev)  # noqa: PTH116, PTH120
    except OSError:
        return "?"
