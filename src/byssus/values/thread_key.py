"""Which thread: an id, in a namespace.

The namespace is empty for agents, checkpointers and AgentStorage; a memory of a user has the user's id there, so that
two users' "main" are two threads.
"""

from __future__ import annotations

from typing import NamedTuple


class ThreadKey(NamedTuple):
    """A thread by its namespace and its id."""

    namespace: str
    id: str
