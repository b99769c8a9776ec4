"""A model searches in the threads of the user that it talks to, and in no others."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from byssus import ToolCall, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.cli.tools import threads
from tests.support.databases import Database
from tests.support.tools import context


async def found(cp: Checkpointer, user: str | None, **arguments: object) -> str:
    (made,) = threads.search(cp, user)
    call = ToolCall("1", made.name, dict(arguments))
    outcome = await made.execute(call, msgspec.structs.replace(context(), thread_id="now"))
    return str(outcome.message.text)


def test_a_user_finds_what_was_said_in_their_other_threads(database: Database) -> None:
    async def use() -> None:
        async with database.checkpointer() as cp:
            for user in ("ann", "bob"):
                await cp.create_user(user_id=user, name=user)
            for thread, owner in (("a1", "ann"), ("a2", "ann"), ("now", "ann"), ("b1", "bob"), ("free", None)):
                await cp.append(thread, [UserMessage(f"the ferry to Bergen, said in {thread}")])
                if owner is not None:
                    await cp.set_user(thread, owner)
            lines = (await found(cp, "ann", words="Bergen")).split("\n")
            assert [line.split(",")[0] for line in lines] == ["[a2", "[a1"]
            assert lines[0].endswith(", user] the ferry to Bergen, said in a2")
            assert (await found(cp, "ann", words="Bergen", limit=1)).count("\n") == 0
            assert "said in free" in await found(cp, None, words="Bergen")
            assert "\n" not in await found(cp, None, words="Bergen")
            assert await found(cp, "ann", words="Oslo") == "Nothing was found in other conversations."
            assert "limit must be from 1 to 50" in await found(cp, "ann", words="Bergen", limit=0)
            assert "InputError" in await found(cp, "ann", words="-Bergen")

    asyncio.run(use())


@pytest.mark.parametrize("words", ["", '"', "\0"])
def test_a_query_that_says_nothing_is_a_result_for_the_model(database: Database, words: str) -> None:
    async def use() -> None:
        async with database.checkpointer() as cp:
            assert await found(cp, None, words=words)

    asyncio.run(use())
