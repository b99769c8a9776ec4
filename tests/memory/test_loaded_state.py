"""States: where a memory is, and what one holds that was loaded and waits to be stored."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from byssus import (
    ToolCall,
)
from byssus.checkpointer import Checkpointer
from byssus.errors import (
    InputError,
    StoreNotOpen,
    ThreadBusy,
)
from byssus.memory import InMemoryMemory, PostgresMemory, SQLiteMemory
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, Slow, agent_on
from tests.support.memories import ids, kept, msg, msgs, released, stored, texts


def test_a_state_says_where_the_data_are_and_another_memory_goes_on_there(database: Database, tmp_path: Path) -> None:
    async def main() -> None:
        memory = stored(database, "ann", "s")
        assert memory.state_dict()["_compressed_summary"] == ""  # of a database that may not be there yet
        await memory.add(msgs("1"), "m")
        await memory.update_compressed_summary("so far \ud800")
        for state in (memory.state_dict(), await closed(memory)):
            assert state == {
                "db_path" if database.system == "sqlite" else "dsn": memory.name,
                "user_id": "ann",
                "session_id": "s",
                "_compressed_summary": "so far \ud800",
            }
            assert json.loads(json.dumps(state)) == state
        other = stored(database, "bob")
        await other.add(msgs("of bob"))
        other.load_state_dict(json.loads(json.dumps(state)))
        assert texts(await other.get_memory("m")) == ["so far \ud800", "text of 1"]
        assert (other.user_id, other.session_id) == ("ann", "s")
        await other.add(msgs("2"))
        await other.close()

    async def closed(memory: Any) -> Any:
        await memory.close()
        return memory.state_dict()

    asyncio.run(main())
    assert kept(database) == ["so far \ud800", "text of 1", "text of 2"]
    assert kept(database, None, "bob") == ["text of of bob"]


def test_a_state_of_nobodys_default_session_is_one_too(database: Database) -> None:
    async def main() -> None:
        async with stored(database) as memory, stored(database, "bob", "t") as other:
            await memory.add(msgs("1"))
            other.load_state_dict(memory.state_dict())
            assert (other.user_id, other.session_id, await other.size()) == (None, None, 1)

    asyncio.run(main())


def test_a_state_leads_to_the_same_file_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    async def main() -> None:
        monkeypatch.chdir(here)
        memory = SQLiteMemory("memory.db", "ann")
        later = SQLiteMemory("later.db")
        await memory.add(msgs("1"))
        other = SQLiteMemory("other.db")
        await other.add(msgs("of the other file"))
        monkeypatch.chdir(there)
        other.load_state_dict(memory.state_dict())
        assert ids(await other.get_memory()) == ["1"]
        fresh = SQLiteMemory("fresh.db")
        fresh.load_state_dict(memory.state_dict())
        assert ids(await fresh.get_memory()) == ["1"]
        await later.add(msgs("1"))
        for each in (memory, other, fresh, later):
            await each.close()
        released()

    asyncio.run(main())
    assert list(there.iterdir()) == []
    assert {path.name for path in here.iterdir()} == {"memory.db", "other.db", "later.db"}


def test_who_goes_over_to_another_file_lets_go_of_the_first(tmp_path: Path) -> None:
    async def main() -> None:
        memory, other = SQLiteMemory(tmp_path / "a.db"), SQLiteMemory(tmp_path / "b.db")
        await memory.add(msgs("1"))
        await other.add(msgs("2"))
        store = memory._here.handle.known()
        memory.load_state_dict(other.state_dict())
        released()
        assert store is not None
        assert store.users == 0
        assert ids(await memory.get_memory()) == ["2"]
        await memory.close()
        await other.close()

    asyncio.run(main())


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_no_password_gets_into_a_state(database: Database) -> None:
    async def main() -> None:
        memory = PostgresMemory(f"{database.place}&password=s3cret", "ann", "s")
        await memory.add(msgs("1"))
        state = memory.state_dict()
        assert "s3cret" not in f"{state} {memory!r} {memory.name}"
        memory.load_state_dict(state)
        assert ids(await memory.get_memory()) == ["1"]
        await memory.close()

    asyncio.run(main())


def test_what_is_no_state_of_this_memory_is_refused_and_changes_nothing(database: Database) -> None:
    async def main() -> None:
        async with stored(database, "ann", "s") as memory:
            await memory.add(msgs("1"))
            own = memory.state_dict()
            place, other = ("db_path", "dsn") if database.system == "sqlite" else ("dsn", "db_path")
            bad: list[tuple[dict[str, Any], type[Exception], bool]] = [
                ({other: own[place], "user_id": "bob", "session_id": "t"}, InputError, True),
                ({other: own[place]}, InputError, False),
                ({**own, other: "x"}, InputError, True),
                ({**own, place: 5, "user_id": "bob"}, InputError, True),
                ({**own, place: "", "user_id": "bob"}, InputError, True),
                ({**own, "user_id": 5}, InputError, True),
                ({**own, "session_id": ""}, InputError, True),
                ({**own, "user_id": "bob", "content": 5}, InputError, True),
                ({place: own[place], "session_id": "t"}, KeyError, True),
                ({"messages": [], "name": "an agent's"}, KeyError, True),
                ({"_compressed_summary": 5}, InputError, True),
                ({}, KeyError, True),
            ]
            for state, error, strict in bad:
                with pytest.raises(error):
                    memory.load_state_dict(state, strict=strict)
                assert memory.state_dict() == own
            memory.load_state_dict({"messages": [], "name": "an agent's"}, strict=False)
            memory.load_state_dict({place: own[place], "session_id": "s"}, strict=False)
            assert memory.state_dict() == own
            assert ids(await memory.get_memory()) == ["1"]

    asyncio.run(main())


def test_a_state_with_a_summary_alone_sets_it(database: Database) -> None:
    """As AgentScope's memories with a database have it."""

    async def main() -> None:
        async with stored(database, "ann", "s") as memory:
            await memory.add(msgs("1"), "m")
            memory.load_state_dict({"_compressed_summary": "so far"})
            assert memory.state_dict()["_compressed_summary"] == "so far"
            assert texts(await memory.get_memory("m")) == ["so far", "text of 1"]

    asyncio.run(main())
    assert kept(database) == ["so far", "text of 1"]


async def some_state() -> dict[str, Any]:
    memory = InMemoryMemory()
    await memory.add(msgs("new"), "m")
    await memory.update_compressed_summary("so far")
    return memory.state_dict()


def test_a_state_that_was_loaded_while_the_memory_was_closed_is_stored_when_it_opens(database: Database) -> None:
    async def main() -> None:
        async with stored(database, "ann", "s") as memory:
            await memory.add(msgs("1"))
        memory.load_state_dict(await some_state())
        with pytest.raises(StoreNotOpen):
            await memory.size()
        assert memory.state_dict()["_compressed_summary"] == "so far"
        await memory.open()
        async with stored(database, "ann", "s") as other:
            assert texts(await other.get_memory("m")) == ["so far", "text of new"]
        await memory.close()

    asyncio.run(main())


def test_a_state_that_was_loaded_is_not_lost_when_the_memory_is_closed(database: Database) -> None:
    async def main() -> None:
        async with stored(database, "ann", "s") as memory:
            await memory.add(msgs("1"))
            memory.load_state_dict(await some_state())

    asyncio.run(main())
    assert kept(database) == ["so far", "text of new"]


def test_each_of_several_calls_at_once_sees_the_state_that_was_loaded_before(database: Database) -> None:
    async def main() -> None:
        async with stored(database, "ann", "s") as memory:
            for _ in range(10):
                await memory.clear()
                await memory.add(msgs("1", "2", "3"))
                memory.load_state_dict(await some_state())
                assert await asyncio.gather(*(memory.size() for _ in range(5))) == [1] * 5

    asyncio.run(main())


def test_a_state_that_could_not_be_stored_is_tried_again(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        running = asyncio.create_task(agent_on(cp, [CALL_SLOW, "done"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        async with stored(database, None, "t") as memory:
            memory.load_state_dict(await some_state())
            for _ in range(2):
                with pytest.raises(ThreadBusy):
                    await memory.get_memory()
            slow.let_go.set()
            await running
            assert texts(await memory.get_memory()) == ["so far", "text of new"]

    with_cp(database, use)


def test_what_a_cancelled_call_has_loaded_is_not_loaded_again(database: Database) -> None:
    async def main() -> None:
        source = InMemoryMemory()
        await source.add(msgs("1", "2"))
        async with stored(database) as memory, stored(database) as other:
            memory.load_state_dict(source.state_dict())
            call = asyncio.create_task(memory.size())
            while await other.size() == 0:
                await asyncio.sleep(0)
                call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await other.add(msgs("3"))
            assert ids(await memory.get_memory()) == ["1", "2", "3"]

    asyncio.run(main())


def test_what_is_loaded_after_closing_is_stored_when_it_is_closed_again(database: Database) -> None:
    async def main() -> None:
        source, memory = InMemoryMemory(), stored(database)
        await source.add(msgs("1"), marks="a")
        await memory.close()
        memory.load_state_dict(source.state_dict())
        await memory.close()
        async with stored(database) as other:
            assert ids(await other.get_memory(mark="a")) == ["1"]

    asyncio.run(main())


def test_a_loaded_state_is_stored_once_whichever_event_loop_comes_first(database: Database) -> None:
    source = InMemoryMemory()
    asyncio.run(source.add(msgs(*map(str, range(50)))))
    memory = stored(database)
    memory.load_state_dict(source.state_dict())
    together = threading.Barrier(3)

    def ask(number: int) -> int:
        async def main() -> int:
            together.wait()
            await memory.add(msg("mine", f"of {number}"))
            size: int = await memory.size()
            return size

        return asyncio.run(main())

    with ThreadPoolExecutor(3) as pool:
        sizes = list(pool.map(ask, range(3)))
    assert max(sizes) == 53
    asyncio.run(memory.close())


def test_a_state_that_cannot_be_stored_keeps_its_memory_open(database: Database) -> None:
    async def use(cp: Any) -> None:
        source, memory, slow = InMemoryMemory(), stored(database, session_id="t"), Slow()
        await source.add(msgs("1"))
        agent = agent_on(cp, [[ToolCall("c", "slow", {})], "done"], tools=[slow.tool])
        run = asyncio.create_task(agent.prompt("hi"))
        await slow.begun.wait()
        memory.load_state_dict(source.state_dict())
        with pytest.raises(ThreadBusy):
            await memory.close()
        slow.let_go.set()
        await run
        await memory.close()
        async with stored(database, session_id="t") as other:
            assert ids(await other.get_memory()) == ["1"]

    with_cp(database, use)
