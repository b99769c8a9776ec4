"""Ids by how they begin, for people who type only the start of one."""

from __future__ import annotations

from typing import Final, Literal

from byssus.store.database import Tx

Kind = Literal["thread", "user", "task", "run"]

# Threads of memories have a namespace and are named with their user.
_TABLES: Final = {
    "thread": "threads WHERE namespace = '' AND",
    "user": "users WHERE",
    "task": "tasks WHERE",
    "run": "runs WHERE",
}


def starting_with(tx: Tx, kind: Kind, prefix: str, limit: int) -> list[str]:
    """The id itself if there is such a one; else some that begin with it, the shortest first."""
    if tx.one(f"SELECT 1 FROM {_TABLES[kind]} id = :prefix", prefix=prefix):
        return [prefix]
    rows = tx.all(
        f"SELECT id FROM {_TABLES[kind]} substr(id, 1, :length) = :prefix ORDER BY length(id), id LIMIT :limit",
        prefix=prefix,
        length=len(prefix),
        limit=limit,
    )
    return [name for (name,) in rows]
