"""Which backups were taken of a database, and where they were written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from byssus.store.database import Tx


class KnownBackup(NamedTuple):
    """A file that a backup was written to."""

    host: str
    path: str
    device: str  # of its directory at that time


def add(tx: Tx, backup: KnownBackup, gone: Sequence[KnownBackup] = ()) -> None:
    """Record one, and forget those that are gone."""
    tx.many("DELETE FROM known_backups WHERE host = :host AND path = :path", [each._asdict() for each in gone])
    tx.run(
        "INSERT INTO known_backups (host, path, device, taken_at) VALUES (:host, :path, :device, :now)"
        " ON CONFLICT (host, path) DO UPDATE SET device = excluded.device, taken_at = excluded.taken_at",
        now=tx.now(),
        **backup._asdict(),
    )


def all_of(tx: Tx) -> list[KnownBackup]:
    return [KnownBackup(*row) for row in tx.all("SELECT host, path, device FROM known_backups ORDER BY key")]


def forget_all(tx: Tx) -> None:
    tx.run("DELETE FROM known_backups")
