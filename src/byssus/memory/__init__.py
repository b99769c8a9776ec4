"""Memories: conversations that are filtered and trimmed by marks.

    memory = SQLiteMemory("memory.db", user_id="ann", session_id="trip")
    await memory.add(Msg("user", "你好", "user"))
    await memory.add(Msg("system", "be brief", "system"), marks="hint")
    await memory.get_memory(exclude_mark="hint")

A memory is a thread: messages that an agent writes there can be read here, and marks decide which of them the agent
sends to its model.
"""

from byssus.memory.base import MemoryBase
from byssus.memory.compression import compress
from byssus.memory.in_memory import InMemoryMemory
from byssus.memory.msg import Msg
from byssus.memory.stored import PostgresMemory, SQLiteMemory

__all__ = ["InMemoryMemory", "MemoryBase", "Msg", "PostgresMemory", "SQLiteMemory", "compress"]
