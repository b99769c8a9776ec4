"""States of AgentScope's InMemoryMemory, loaded by ours."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg

from tests.adapters.agentscope import acting
from tests.support.databases import Database


async def filled(count: int = 3) -> Any:
    memory = InMemoryMemory()
    await memory.add([Msg("user", f"old {number}", "user") for number in range(count)], marks=["a", "a", "b"])
    await memory.update_compressed_summary("in short")
    return memory


async def shown(memory: Any, **chosen: Any) -> list[dict[str, Any]]:
    found = await memory.get_memory(**{"prepend_summary": False, **chosen})
    return [message.to_dict() for message in found]


def test_the_content_the_marks_and_the_summary_are_taken_over(database: Database) -> None:
    async def main() -> None:
        upstream, ours = await filled(), acting.memory_at(database.place)
        await ours.add(acting.asked("before"), marks="a")
        await ours.update_compressed_summary("before")
        ours.load_state_dict(upstream.state_dict())
        assert ours.state_dict()["_compressed_summary"] == "in short"
        assert await ours.size() == 3
        await ours.close()

        again = acting.memory_at(database.place)
        for chosen in ({}, {"mark": "a"}, {"mark": "b"}, {"exclude_mark": "b"}):
            assert await shown(again, **chosen) == await shown(upstream, **chosen)
        assert (await again.get_memory())[0].content == "in short"
        for expected in (3, 3, 0):  # it has the mark twice
            assert await again.update_messages_mark(None, "a") == expected
        await again.close()

    asyncio.run(main())


def test_whoever_asks_first_after_a_load_is_answered_from_it(database: Database) -> None:
    """Calls that are made at once as well."""

    async def main() -> None:
        ours = acting.memory_at(database.place)
        await ours.add(acting.asked("before"))
        for _ in range(10):
            upstream = await filled(30)
            ours.load_state_dict(upstream.state_dict())
            new = acting.asked("new")
            size, found, marked, _ = await asyncio.gather(
                ours.size(), shown(ours), ours.update_messages_mark("c", "b"), ours.add(new)
            )
            assert size in (30, 31)
            assert found[:30] == await shown(upstream)
            assert marked == 30
            assert await shown(ours) == [*await shown(upstream), new.to_dict()]
        await ours.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"content": [5]},
        {"content": [["a"]]},
        {"content": []},
        {"content": [Msg("user", "of an older version", "user").to_dict()]},
        {"_compressed_summary": "in short", "content": []},
    ],
    ids=str,
)
def test_what_upstream_takes_is_taken_and_what_it_refuses_is_refused(database: Database, state: dict[str, Any]) -> None:
    async def outcome(memory: Any) -> Any:
        await memory.add(acting.asked("before"))
        try:
            memory.load_state_dict(state)
        except KeyError:
            return KeyError
        except ValueError:
            return ValueError
        return await shown(memory), [message.content for message in await memory.get_memory()]

    async def main() -> None:
        ours = acting.memory_at(database.place)
        assert await outcome(ours) == await outcome(InMemoryMemory())
        await ours.close()

    asyncio.run(main())
