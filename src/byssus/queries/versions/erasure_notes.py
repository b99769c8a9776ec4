"""The notes about erasures: one is open until the files are known to hold nothing of what was erased.

They have a module of their own because every process that opens a database reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from byssus.store.database import Tx


def add(tx: Tx) -> None:
    tx.run("INSERT INTO erasures (began_at) VALUES (:now)", now=tx.now())


def unfinished(tx: Tx) -> list[int]:
    """The erasures whose bytes may still be in the files."""
    return [key for (key,) in tx.all("SELECT key FROM erasures WHERE finished_at IS NULL ORDER BY key")]


def finish(tx: Tx, keys: Sequence[int]) -> None:
    """The files are known to hold nothing of these any more."""
    tx.many(
        "UPDATE erasures SET finished_at = :now WHERE key = :key AND finished_at IS NULL",
        [{"key": key, "now": tx.now()} for key in keys],
    )
