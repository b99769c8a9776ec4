"""What an agent knows of its thread before it was loaded, and `async with Agent(...)`, which loads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from byssus import Agent, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import AgentBusy, NotLoaded, StoreNotOpen
from tests.support.agents import Acted, Hanging, history, make, within
from tests.support.approvals import Deleting, delete
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.leases import agent_on, is_free, with_two

KNOWN: dict[str, Callable[[Agent], Any]] = {
    "pending": lambda agent: agent.pending,
    "messages": lambda agent: agent.state.messages,
    "usage": lambda agent: agent.state.usage,
}


@pytest.mark.parametrize("what", KNOWN)
def test_what_is_not_loaded_is_not_told_as_empty(database: Database, what: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(cp, [[delete("a")]], tools=[Deleting().tool]).prompt("go")
        agent = agent_on(other)
        assert repr(agent.state) == "AgentState(not loaded, idle)"  # a repr never raises
        with pytest.raises(NotLoaded, match=rf"{what} of thread 't' .* await agent\.load\(\)") as raised:
            KNOWN[what](agent)
        assert raised.value.thread_id == "t"
        assert isinstance(raised.value, RuntimeError)
        await agent.load()
        assert [call.call_id for call in agent.pending] == ["a"]
        assert len(agent.state.messages) == 2
        assert KNOWN[what](agent)

    with_two(database, use)


def test_a_run_loads_and_so_does_one_that_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        first, second = agent_on(cp, ["hello"]), agent_on(cp)
        await first.prompt("hi")
        assert len(first.state.messages) == 2
        with pytest.raises(ValueError, match="Cannot continue"):
            await second.resume()
        assert len(second.state.messages) == 2
        assert second.pending == []

    with_cp(database, use)


@pytest.mark.parametrize("what", KNOWN)
def test_an_agent_in_memory_has_nothing_to_load(what: str) -> None:
    assert not KNOWN[what](make([])) or what == "usage"


def test_extra_may_be_set_before_the_thread_is_loaded(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.save_extra("t", {"a": 1})
        agent = agent_on(cp)
        agent.state.extra["b"] = 2
        assert agent.state.is_streaming is False
        assert agent.state.error is None
        async with agent:
            assert agent.state.extra == {"a": 1, "b": 2}

    with_cp(database, use)


# --- async with -------------------------------------------------------------------------------------------------------


def test_entering_loads_and_leaving_keeps_the_checkpointer_open(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(cp, [[delete("a")]], tools=[Deleting().tool]).prompt("go")
        async with agent_on(other) as agent:
            assert [call.call_id for call in agent.pending] == ["a"]
            assert len(agent.state.messages) == 2
        assert await history(other, "t") == ["user: go", "assistant: "]
        async with agent:  # again
            assert len(agent.state.messages) == 2

    with_two(database, use)


def test_a_checkpointer_that_is_not_open_is_named(database: Database) -> None:
    async def main() -> None:
        with pytest.raises(StoreNotOpen):
            async with agent_on(database.checkpointer()):
                pass

    within(main())


def test_an_agent_in_memory_can_be_entered_too() -> None:
    async def main() -> None:
        async with make(["hello"]) as agent:
            await agent.prompt("hi")
        assert len(agent.state.messages) == 2

    within(main())


def test_leaving_waits_for_the_run(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        async with agent_on(cp, ["hello"]) as agent:
            run = asyncio.create_task(agent.prompt("hi"))
            await asyncio.sleep(0)
            assert agent.state.is_streaming
        assert not agent.state.is_streaming
        assert (await run).text == "hello"
        assert await is_free(cp)

    with_cp(database, use)


def test_an_exception_aborts_the_run_and_waits_for_its_end(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        hanging = Hanging("Hel")
        agent = agent_on(cp, Acted(hanging))
        with pytest.raises(KeyError, match="mine"):
            async with agent:
                run = asyncio.create_task(agent.prompt("hi"))
                await hanging.begun.wait()
                raise KeyError("mine")
        assert not agent.state.is_streaming
        assert hanging.closed
        assert (await run).stop_reason == "aborted"
        assert await history(cp, "t") == ["user: hi", "assistant: Hel"]
        assert await is_free(cp)

    with_cp(database, use)


@pytest.mark.parametrize("when", ["in the block", "while leaving"])
def test_a_cancellation_aborts_the_run_and_waits_for_its_end(database: Database, when: str) -> None:
    async def use(cp: Checkpointer) -> None:
        hanging = Hanging("Hel")
        agent = agent_on(cp, Acted(hanging))
        runs, left = [], asyncio.Event()

        async def block() -> None:
            async with agent:
                runs.append(asyncio.create_task(agent.prompt("hi")))
                await hanging.begun.wait()
                left.set()
                if when == "in the block":
                    await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await left.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not agent.state.is_streaming
        assert (await runs[0]).stop_reason == "aborted"
        assert await is_free(cp)

    with_cp(database, use)


def test_entering_an_agent_that_runs_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        hanging = Hanging()
        agent = agent_on(cp, Acted(hanging))
        run = asyncio.create_task(agent.prompt(UserMessage("hi")))
        await hanging.begun.wait()
        with pytest.raises(AgentBusy):
            async with agent:
                pass
        agent.abort()
        await run

    with_cp(database, use)
