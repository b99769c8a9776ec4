"""Ids of threads, users and tasks by how they begin: the command line takes the start of an id, as git does."""

from __future__ import annotations

from byssus.queries.log import prefixes
from byssus.queries.log.prefixes import Kind
from byssus.store.operations import Runner
from byssus.values.inputs import checked_id

__all__ = ["Kind", "starting_with"]


async def starting_with(store: Runner, kind: Kind, prefix: str, limit: int) -> list[str]:
    """The id itself if there is such a one; else at most `limit` ids that begin with it, the shortest first."""
    return await store.read(prefixes.starting_with, kind, checked_id(prefix, f"a {kind} id"), limit)
