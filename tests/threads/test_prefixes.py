"""Ids by how they begin, on both databases."""

from __future__ import annotations

import asyncio

import pytest

from byssus import ThreadKey, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError
from byssus.threads.prefixes import Kind, starting_with
from tests.support.databases import Database


@pytest.fixture(autouse=True)
def filled(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await _fill(cp)

    asyncio.run(main())


def found(database: Database, kind: Kind, prefix: str, limit: int = 10) -> list[str]:
    async def main() -> list[str]:
        async with database.checkpointer() as cp:
            return await starting_with(cp.store, kind, prefix, limit)

    return asyncio.run(main())


async def _fill(cp: Checkpointer) -> None:
    for name in ("b", "bee", "be_", "be%", "Bee", "北京", "北"):
        await cp.append(name, UserMessage("hi"))
    await cp.append(ThreadKey("somebody", "beetle"), UserMessage("hi"))
    await cp.create_user("Ann", user_id="ann")
    await cp.create_session("ann", session_id="bees")


def test_an_id_that_there_is_is_found_alone(database: Database) -> None:
    assert found(database, "thread", "b") == ["b"]
    assert found(database, "thread", "北") == ["北"]


def test_else_those_that_begin_so_the_shortest_first_and_nobody_elses(database: Database) -> None:
    assert sorted(found(database, "thread", "be")) == ["be%", "be_", "bee", "bees"]
    assert found(database, "thread", "be")[-1] == "bees"
    assert len(found(database, "thread", "be", 2)) == 2


def test_signs_of_a_pattern_are_only_signs(database: Database) -> None:
    assert found(database, "thread", "be_x") == found(database, "thread", "%") == found(database, "thread", "_") == []


def test_users_and_tasks_are_found_too(database: Database) -> None:
    assert found(database, "user", "a") == ["ann"]
    assert found(database, "task", "a") == []


@pytest.mark.parametrize("prefix", ["", "\0", "\ud800"])
def test_what_is_no_id_begins_none(database: Database, prefix: str) -> None:
    with pytest.raises(InputError, match="a thread id"):
        found(database, "thread", prefix)
