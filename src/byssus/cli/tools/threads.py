"""A tool that searches in one's own threads: those of the user that the agent's thread belongs to."""

from __future__ import annotations

from typing import Annotated, Any

from byssus import ToolContext, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError

_MOST = 50  # hits for the model
_LOOKED_AT = 500  # hits from which those of others are left out
_SECONDS = 10.0


def search(checkpointer: Checkpointer, user_id: str | None) -> list[Any]:
    """Return the tool `search_threads` for the threads of a user, or for those that belong to no user."""

    @tool(recovery="retry")
    async def search_threads(
        words: Annotated[str, 'all must occur; "a phrase" in quotes, -word for what must not'],
        context: ToolContext,
        limit: Annotated[int, "how many hits, newest first"] = 10,
    ) -> str:
        """Search in the user's other conversations with you. A hit has its thread, time, role and a piece of text."""
        if not 1 <= limit <= _MOST:
            raise InputError(f"limit must be from 1 to {_MOST}, got {limit}")
        hits = await checkpointer.search(
            words, user_id=user_id, kinds="message", limit=_LOOKED_AT, timeout=_SECONDS, marks=("", "")
        )
        owners: dict[str, str | None] = {}
        found: list[str] = []
        for hit in hits:
            thread = hit["session_id"]
            if thread == context.thread_id:
                continue
            if thread not in owners:
                info = await checkpointer.info(thread)
                owners[thread] = "" if info is None else info.user_id  # "": deleted meanwhile; no user has this id
            if owners[thread] == user_id:
                found.append(f"[{thread}, {hit['created_at'][:16]}, {hit['role']}] {hit['snippet']}")
            if len(found) == limit:
                break
        return "\n".join(found) or "Nothing was found in other conversations."

    return [search_threads]
