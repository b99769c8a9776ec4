"""An abort does not wait for a database that cannot be written: the caller gets its result, and the rest follows."""

from __future__ import annotations

import asyncio

import pytest

from byssus.checkpointer import Checkpointer
from byssus.events import AgentEnd, MessageEnd, ToolExecutionEnd
from tests.support.agents import Heard, check_whole, history
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, Slow, agent_on, is_free, until, with_two
from tests.support.locks import foreign_lock

AT_ONCE = 15  # seconds: far less than the lock is waited for


def test_an_abort_returns_though_nothing_can_be_written_and_the_rest_is_recorded_afterwards(
    database: Database,
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW, "fine"], tools=[slow.tool])
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        with foreign_lock(database) as lock:
            lock.take()
            agent.abort()
            result = await asyncio.wait_for(run, AT_ONCE)
            assert result.stop_reason == "aborted"
            assert [message.role for message in result.messages] == ["user", "assistant"]
            check_whole(heard)
            assert [event.stored for event in heard.of(ToolExecutionEnd)] == [False]
            assert not agent.state.is_streaming
            lock.release()
        await agent.wait_for_idle()
        assert "aborted" in (await history(other, "t"))[-1]
        assert await is_free(other)
        assert len(heard.of(AgentEnd)) == 1
        assert [message.role for message in result.messages] == ["user", "assistant"]  # as it was told
        assert (await agent.prompt("again")).text == "fine"

    with_two(database, use)


def test_a_cancelled_prompt_returns_though_nothing_can_be_written(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW, "fine"], tools=[slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        with foreign_lock(database) as lock:
            lock.take()
            run.cancel()
            done, _ = await asyncio.wait({run}, timeout=AT_ONCE)
            assert done == {run}
            assert run.cancelled()
            lock.release()
        await agent.wait_for_idle()
        assert await is_free(other)

    with_two(database, use)


def test_a_prompt_that_cannot_be_stored_can_be_aborted(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, ["never", "fine"])
        with foreign_lock(database) as lock:
            lock.take()
            run = asyncio.create_task(agent.prompt("go"))
            await until(lambda: agent._journal.history.waiting_since)
            agent.abort()
            result = await asyncio.wait_for(run, AT_ONCE)
            assert (result.stop_reason, result.messages) == ("aborted", [])
            lock.release()
        await agent.wait_for_idle()
        assert await is_free(other)  # and the prompt is stored: it was on its way
        assert (await history(other, "t"))[0] == "user: go"

    with_two(database, use)


def test_the_next_prompt_waits_until_the_aborted_run_is_recorded(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW, "fine"], tools=[slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        with foreign_lock(database) as lock:
            lock.take()
            agent.abort()
            await asyncio.wait_for(run, AT_ONCE)
            following = asyncio.create_task(agent.prompt("again"))
            await asyncio.wait({following}, timeout=0.2)
            assert not following.done()
            lock.release()
        assert (await following).text == "fine"
        assert [line.split(":")[0] for line in await history(other, "t")] == [
            *("user", "assistant", "tool_result"),
            *("user", "assistant"),
        ]

    with_two(database, use)


@pytest.mark.parametrize("way", ["abort", "close"])
def test_a_stream_ends_with_all_its_events_though_nothing_can_be_written(database: Database, way: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW], tools=[slow.tool])
        with foreign_lock(database) as lock:
            async with asyncio.timeout(AT_ONCE), agent.stream("go") as events:
                last = None
                async for event in events:
                    if isinstance(event, MessageEnd) and event.message.role == "assistant":
                        await slow.begun.wait()
                        lock.take()
                        if way == "close":
                            break
                        agent.abort()
                    last = event
            lock.release()
        if way == "abort":
            assert isinstance(last, AgentEnd)
            assert events.result.stop_reason == "aborted"
        await agent.wait_for_idle()
        assert await is_free(other)

    with_two(database, use)
