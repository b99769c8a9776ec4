"""Memories for AgentScope's agents: `MemoryBase` of AgentScope, with its own `Msg`, in a database.

from holdfast.adapters.agentscope import SQLiteMemory

agent = ReActAgent(..., memory=SQLiteMemory("memory.db", user_id="ann", session_id="trip"))
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from holdfast.errors import MissingExtra
from holdfast.memory import stored

try:
    from agentscope.memory import MemoryBase
    from agentscope.message import Msg
except ImportError as error:
    raise MissingExtra("the adapter for AgentScope 1.x", "agentscope") from error

__all__ = ["PostgresMemory", "SQLiteMemory"]


class SQLiteMemory(stored.SQLiteMemory, MemoryBase):  # type: ignore[misc]
    """A memory in a SQLite file, for agents of AgentScope."""

    _class: ClassVar[type[Any]] = Msg

    def __init__(self, db_path: str | os.PathLike[str] = "memory.db", *args: Any, **options: Any) -> None:
        MemoryBase.__init__(self)
        stored.SQLiteMemory.__init__(self, db_path, *args, **options)


class PostgresMemory(stored.PostgresMemory, MemoryBase):  # type: ignore[misc]
    """A memory in a Postgres database, for agents of AgentScope."""

    _class: ClassVar[type[Any]] = Msg

    def __init__(self, dsn: str, *args: Any, **options: Any) -> None:
        MemoryBase.__init__(self)
        stored.PostgresMemory.__init__(self, dsn, *args, **options)
