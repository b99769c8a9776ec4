"""Memories in the hands of somebody who does two things at once, or stops in the middle."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from byssus import (
    Agent,
    AssistantMessage,
    ExcludeMarked,
    Model,
    TextContent,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)
from byssus.errors import ByssusError, InputError, NotFound
from byssus.memory import InMemoryMemory, SQLiteMemory
from byssus.providers.scripted import ScriptedProvider
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.histories import flaws
from tests.support.memories import ids, msg, msgs, stored, texts


def test_a_call_that_a_load_overtakes_writes_nothing_into_the_other_thread(database: Database) -> None:
    async def main() -> None:
        one, other = stored(database, "ann", "s"), stored(database, "bob", "s")
        state = other.state_dict()
        call = asyncio.create_task(one.add(msg("for ann")))
        await asyncio.sleep(0)  # the call waits for the database to be opened
        one.load_state_dict(state)
        with pytest.raises(ByssusError, match="in the middle of a call"):
            await call
        assert await other.size() == 0
        await one.add(msg("for bob"))
        assert texts(await other.get_memory()) == ["for bob"]
        await asyncio.gather(one.close(), other.close())

    asyncio.run(main())


def test_a_fork_in_many_pieces_finds_its_messages_by_their_ids_and_no_others(database: Database) -> None:
    async def main() -> None:
        names = [f"{number:03}" for number in range(200)]
        async with stored(database, session_id="t") as memory, database.checkpointer() as cp:
            await memory.add(msgs(*names))
            await cp.fork("t", new_id="f")
            async with stored(database, session_id="f") as fork:
                assert await fork.delete(names[::2]) == 100
                assert await fork.delete(names[:4]) == 2  # those that are left of them
                await fork.add(msgs(*names[:4], "new", names[199]))
                assert ids(await fork.get_memory())[-5:] == ["000", "001", "002", "003", "new"]
                assert await fork.size() == len(set(names[5::2]) | {"new", *names[:4]})
                assert await fork.update_messages_mark("m", msg_ids=names) == 102
            assert await memory.size() == 200

    asyncio.run(main())


def test_a_memory_of_an_agents_thread_knows_the_ids_that_are_there(database: Database) -> None:
    async def use(cp: Any) -> None:
        await cp.append("t", [UserMessage("one", id="1"), AssistantMessage("two", id="2")])
        async with stored(database, session_id="t") as memory:
            await memory.add(msgs("2", "3"))
            assert ids(await memory.get_memory()) == ["1", "2", "3"]
            assert await memory.delete(["1", "3"]) == 2
            await cp.append("t", UserMessage("four", id="4"))  # and now nothing says who has written what
            await memory.add(msgs("4", "3"))
            assert ids(await memory.get_memory()) == ["2", "4", "3"]

    with_cp(database, use)


def test_a_load_that_overtakes_the_opening_leads_to_the_other_database(tmp_path: Path) -> None:
    async def main() -> None:
        for turn in range(20):
            first, second = tmp_path / f"{turn}-1.db", tmp_path / f"{turn}-2.db"
            other, memory = SQLiteMemory(second, "bob"), SQLiteMemory(first, "ann")
            await other.add(msgs("of the second"))
            call = asyncio.create_task(memory.size())
            await asyncio.sleep(0)
            memory.load_state_dict(other.state_dict())
            await asyncio.gather(call, return_exceptions=True)
            await memory.add(msgs("for the second"))
            assert ids(await other.get_memory()) == ["of the second", "for the second"]
            await asyncio.gather(memory.close(), other.close())

    asyncio.run(main())


def test_a_copy_of_a_memory_is_another_one_of_the_same_thread(database: Database) -> None:
    async def main() -> None:
        source = InMemoryMemory()
        await source.add(msgs("1"))
        async with stored(database) as memory:
            memory.load_state_dict(source.state_dict())
            async with copy.deepcopy(memory) as other:
                await memory.add(msgs("2"))
                assert ids(await other.get_memory()) == ["1", "2"]
            assert await memory.size() == 2

    asyncio.run(main())


def test_a_file_that_was_not_taken_along_is_no_memory_that_forgot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory, state = SQLiteMemory(tmp_path / "a.db"), {"db_path": str(tmp_path / "gone" / "b.db")}
    told: dict[str, Any] = {**state, "user_id": None, "session_id": None, "_compressed_summary": "They met."}
    with pytest.raises(NotFound, match="of this state does not exist"):
        memory.load_state_dict(told)
    assert memory.name.endswith("a.db")
    memory.load_state_dict({**told, "_compressed_summary": ""})
    assert "begins empty" in caplog.text
    assert not (tmp_path / "gone").exists()


# --- what a model sees ------------------------------------------------------------------------------------------------


def test_results_of_a_marked_reply_are_not_shown_either_and_do_not_bring_it_back(database: Database) -> None:
    async def use(cp: Any) -> None:
        asked = AssistantMessage([TextContent("secret"), ToolCall("c", "look", {})], "tool_use", id="reply")
        result = ToolResultMessage("c", "look", "seen", id="result")
        await cp.append("t", [asked, result, UserMessage("hi", id="question")])
        async with stored(database, session_id="t") as memory:
            assert await memory.update_messages_mark("hidden", msg_ids=["reply"]) == 1
        provider = ScriptedProvider(["hello"])
        agent = Agent(
            provider=provider, model=Model("m"), checkpointer=cp, thread_id="t", middleware=[ExcludeMarked("hidden")]
        )
        await agent.prompt("go on")
        assert "secret" not in str(provider.requests[0].messages)
        assert flaws(list(provider.requests[0].messages)) == []

    with_cp(database, use)


def test_where_everything_is_marked_the_last_question_is_sent(database: Database) -> None:
    class MarkAll:
        async def transform_context(self, messages: list[Any], *, signal: Any = None) -> list[Any]:
            async with stored(database, session_id="t") as memory:
                await memory.update_messages_mark("hidden")
            return messages

    async def use(cp: Any) -> None:
        provider = ScriptedProvider(["one", "two"])
        hooks = [MarkAll(), ExcludeMarked("hidden", "\0", "\ud800")]
        agent = Agent(provider=provider, model=Model("m"), checkpointer=cp, thread_id="t", middleware=hooks)
        for text in ("first", "second"):
            assert (await agent.prompt(text)).error is None
        assert [[message.text for message in request.messages] for request in provider.requests] == [
            ["first"],
            ["second"],
        ]

    with_cp(database, use)


def test_a_hook_that_leaves_nothing_before_it_is_no_mistake_of_the_marks(database: Database) -> None:
    class Nothing:
        async def transform_context(self, messages: list[Any], *, signal: Any = None) -> list[Any]:
            return []

    async def use(cp: Any) -> None:
        await cp.append("t", [UserMessage("one", id="1"), AssistantMessage("two", id="2")])
        async with stored(database, session_id="t") as memory:
            await memory.update_messages_mark("hidden", msg_ids=["1"])
        hooks = [Nothing(), ExcludeMarked("hidden")]
        agent = Agent(provider=ScriptedProvider([]), model=Model("m"), checkpointer=cp, thread_id="t", middleware=hooks)
        with pytest.raises(InputError, match="nothing to send"):
            await agent.prompt("three")

    with_cp(database, use)
