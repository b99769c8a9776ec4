"""Memories for AgentScope's agents: `MemoryBase` of AgentScope, with its own `Msg`, in a database.

from byssus.adapters.agentscope import SQLiteMemory

agent = ReActAgent(..., memory=SQLiteMemory("memory.db", user_id="ann", session_id="trip"))
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from byssus.errors import MissingExtra
from byssus.memory import stored
from byssus.memory.stored import Durability

try:
    from agentscope.memory import MemoryBase
    from agentscope.message import Msg
except ImportError as error:
    raise MissingExtra("the adapter for AgentScope 1.x", "agentscope") from error

__all__ = ["PostgresMemory", "SQLiteMemory"]


class _OfAgentScope(stored.StoredMemory, MemoryBase):  # type: ignore[misc]
    """What both have in common: the messages are AgentScope's."""

    _class: ClassVar[type[Any]] = Msg

    if TYPE_CHECKING:

        async def add(self, memories: Any, *args: Any, **kwargs: Any) -> None: ...

        async def get_memory(self, *args: Any, **kwargs: Any) -> list[Any]: ...

        async def search(self, query: str, limit: int = 10) -> list[Any]: ...


class SQLiteMemory(_OfAgentScope, stored.SQLiteMemory):
    """A memory in a SQLite file, for agents of AgentScope."""

    def __init__(
        self,
        db_path: str | os.PathLike[str] = "memory.db",
        user_id: str | None = None,
        session_id: str | None = None,
        *,
        durability: Durability = "full",
        wait: float = 0,
    ) -> None:
        MemoryBase.__init__(self)
        stored.SQLiteMemory.__init__(self, db_path, user_id, session_id, durability=durability, wait=wait)


class PostgresMemory(_OfAgentScope, stored.PostgresMemory):
    """A memory in a Postgres database, for agents of AgentScope."""

    def __init__(
        self,
        dsn: str,
        user_id: str | None = None,
        session_id: str | None = None,
        *,
        schema: str | None = None,
        durability: Durability = "full",
        pool_size: int = 8,
        listen_dsn: str | None = None,
        wait: float = 0,
    ) -> None:
        MemoryBase.__init__(self)
        stored.PostgresMemory.__init__(
            self,
            dsn,
            user_id,
            session_id,
            schema=schema,
            durability=durability,
            pool_size=pool_size,
            listen_dsn=listen_dsn,
            wait=wait,
        )
