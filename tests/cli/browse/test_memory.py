"""`byssus memory`: what is told to people, and what to programs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from byssus import UserMessage
from byssus.memory import Msg, PostgresMemory, SQLiteMemory
from tests.support.commands import Command, command
from tests.support.databases import Database

pytestmark = pytest.mark.processes


@pytest.fixture
def byssus(tmp_path: Path, database: Database) -> Command:
    return command(tmp_path, database.place)


@pytest.fixture
def told(database: Database) -> Database:
    """Ann has a memory with a mark twice; there is a thread with a summary, and one that nobody has marked."""

    async def main() -> None:
        kind = PostgresMemory if database.place.startswith("postgres") else SQLiteMemory
        async with kind(database.place, user_id="ann", session_id="trip") as memory:
            await memory.add(Msg("ann", "Where to?\x1b[31m", "user", timestamp="noon"), marks=["a", "b", "a"])
            await memory.add(Msg("friend", [{"type": "text", "text": "北京"}, {"type": "other"}], "assistant"))
        async with database.checkpointer() as cp:
            await cp.append("plain", UserMessage("hello"))
            await cp.append("summed up", UserMessage("hello"))
        async with kind(database.place, session_id="summed up") as memory:
            await memory.update_compressed_summary("They met.")

    asyncio.run(main())
    return database


def test_the_list_has_memories_of_users_and_threads_with_marks_or_a_summary(told: Database, byssus: Command) -> None:
    lines = byssus("memory").stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["summed up", "trip of ann"]
    assert lines[1].endswith("2 messages, 1 marked")
    assert json.loads(byssus("memory", "--user", "ann", "--json").stdout)[0]["session_id"] == "trip"
    assert len(byssus("memory", "--limit", 1).stdout.splitlines()) == 1
    assert "--limit N shows more" in byssus("memory", "--limit", 1).stderr
    assert byssus("memory", "--user", "bob").stderr.startswith("User 'bob' has no memories")


def test_a_memory_is_shown_with_its_marks_and_its_summary(told: Database, byssus: Command) -> None:
    shown = byssus("memory", "trip", "--user", "ann").stdout
    assert shown.startswith("-- ann (user), noon, #a, #b, #a\nWhere to?")
    assert "\x1b" not in shown
    assert '北京\n{"type": "other"}\n' in shown
    assert byssus("memory", "summed up").stdout.startswith("-- summary\nThey met.\n\n-- user, ")
    found = json.loads(byssus("memory", "trip", "--user", "ann", "--json").stdout)
    assert [message["marks"] for message in found["messages"]] == [["a", "b", "a"], []]


def test_an_unknown_memory_is_an_error_that_says_where_to_look(told: Database, byssus: Command) -> None:
    assert (
        "no memory 'trip' without a user (--user ID names one); 'byssus memory' lists"
        in byssus("memory", "trip", code=1).stderr
    )
    assert "no memory 'x' of user 'ann'" in byssus("memory", "x", "--user", "ann", code=1).stderr
