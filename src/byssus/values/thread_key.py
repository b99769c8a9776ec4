"""Which thread: an id, in a namespace.

The namespace is empty for agents, checkpointers and AgentStorage; a memory of a user has the user's id there, so that
two users' "main" are two threads.

No id is longer than `LONGEST_ID` bytes of UTF-8: two of them, a namespace and an id, fit into an entry of an index on
every database.
"""

from __future__ import annotations

from typing import NamedTuple

LONGEST_ID = 1_000


class ThreadKey(NamedTuple):
    """A thread by its namespace and its id."""

    namespace: str
    id: str
