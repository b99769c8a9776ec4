"""Lists of threads: the state of each, which all that shows one agrees about."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from byssus import ToolCall, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError, LeaseLost, ProviderError
from byssus.storage import AgentStorage
from byssus.values.thread_key import ThreadKey
from tests.support.agents import Acted
from tests.support.databases import Database
from tests.support.leases import (
    CALL_SLOW,
    FAR_AWAY,
    DatabaseClock,
    Slow,
    Streaming,
    agent_on,
    changed,
    claim,
    dead_owner,
    die,
    expire,
    live_owner,
    unfinished,
    until,
    with_two,
)

# --- states -----------------------------------------------------------------------------------------------------------


async def state(cp: Checkpointer, thread_id: str = "t") -> str:
    """The state of a thread. All that tells of it must agree."""
    found = await cp.state(thread_id)
    info = await cp.info(thread_id)
    assert info is not None
    assert info.state == found
    assert [listed.state for listed in await cp.threads() if listed.id == thread_id] == [found]
    assert (thread_id in await unfinished(cp)) == (found == "interrupted")
    assert bool(await cp.pending(thread_id)) == (found == "waiting")
    return found


def test_a_thread_without_a_run_is_idle(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        assert await cp.state("nothing was ever stored here") == "idle"
        await cp.append("written", UserMessage("x"))
        await agent_on(cp, ["ok"], "finished").prompt("go")
        await agent_on(cp, [ProviderError("no")], "failed", max_retries=0).prompt("go")
        await cp.steer("steered", "hello")
        for name in ("written", "finished", "failed", "steered"):
            assert await state(other, name) == "idle"

    with_two(database, use)


def test_a_run_that_streams_in_another_process_is_running_and_interrupted_when_that_has_died(
    database: Database,
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        scene = Streaming("half ", "an ", "answer")
        agent = agent_on(cp, Acted(scene), save_partial=0.001)
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: scene.is_saved(other))
        assert (await state(cp), await state(other)) == ("running", "running")
        await die(cp, agent, run)
        assert await state(other) == "interrupted"
        assert (await agent_on(other, ["ok"]).resume()).text == "ok"
        assert (await state(cp), await state(other)) == ("idle", "idle")

    with_two(database, use)


def test_a_question_waits_until_it_is_answered_and_then_for_its_run(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        ask = Slow(approval=True)
        calls = [ToolCall("c1", "slow"), ToolCall("c2", "slow")]
        await agent_on(cp, [calls], tools=[ask.tool]).prompt("go")
        assert await state(other) == "waiting"
        await other.answer("t", "c1", "approve")
        assert await state(other) == "waiting"
        await other.answer("t", "c2", "approve")
        assert await state(other) == "interrupted"  # it was answered, and nobody went on
        run = asyncio.create_task(agent_on(cp, ["ok"], tools=[ask.tool]).resume())
        await until(lambda: ask.begun.is_set() or run.done())
        assert await state(other) == "running"
        ask.let_go.set()
        await run
        assert await state(other) == "idle"

    with_two(database, use)


def test_while_a_run_goes_on_its_question_does_not_make_the_thread_wait(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        ask, slow = Slow("ask", approval=True), Slow()
        calls = [ToolCall("c1", "ask"), ToolCall("c2", "slow")]
        run = asyncio.create_task(agent_on(cp, [calls], tools=[ask.tool, slow.tool]).prompt("go"))
        await slow.begun.wait()
        await until(lambda: other.pending("t"))
        assert await other.state("t") == "running"
        slow.let_go.set()
        await run
        assert await state(other) == "waiting"

    with_two(database, use)


def test_a_lease_of_another_machine_is_running_until_it_runs_out(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, FAR_AWAY, "go")
        assert await state(other) == "running"
        await expire(cp)
        assert await state(other) == "interrupted"

    with_two(database, use)


def test_a_lease_of_this_machine_is_running_while_its_process_lives(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        with live_owner(cp) as lives:
            await claim(cp, lives, "go", thread_id="lives")
            await claim(cp, dead_owner(cp), "go", thread_id="died")
            assert await state(other, "lives") == "running"
            assert await state(other, "died") == "interrupted"
        await expire(cp)
        assert await state(other, "lives") == "interrupted"

    with_two(database, use)


def test_a_session_that_no_run_may_take_up_is_not_interrupted(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, dead_owner(cp), "go")
        for stop in (cp.pause_session, cp.cancel_session):
            await stop("t")
            assert await state(other) == "idle"
        await cp.resume_session("t")
        assert await state(other) == "interrupted"

    with_two(database, use)


def test_when_the_clock_jumps_ahead_a_run_has_lost_its_thread(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        time_is = DatabaseClock(monkeypatch)
        slow = Slow()
        run = asyncio.create_task(agent_on(cp, [CALL_SLOW], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        time_is.off = timedelta(hours=1)
        assert await state(other) == "interrupted"  # as its next write shows
        await agent_on(other, ["mine"], tools=[slow.tool]).resume()
        assert await state(other) == "idle"
        slow.let_go.set()
        with pytest.raises(LeaseLost):
            await run

    with_two(database, use)


def test_when_the_clock_went_back_a_lease_that_nobody_renews_ends_in_its_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        time_is = DatabaseClock(monkeypatch)
        await claim(cp, changed(FAR_AWAY, seconds=0.2), "theirs")
        time_is.off = -timedelta(days=1)  # until tomorrow, says the row
        assert await other.state("t") == "running"

        async def is_interrupted() -> bool:
            return await other.state("t") == "interrupted"

        await until(is_interrupted)

    with_two(database, use)


def test_the_state_of_a_thread_in_a_namespace(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, FAR_AWAY, "go", thread_id="main")
        assert await other.state(ThreadKey("ann", "main")) == "idle"
        assert await other.state(ThreadKey("", "main")) == "running"
        with pytest.raises(InputError, match="a thread id must be a string"):
            await other.state("")

    with_two(database, use)


def test_the_storage_tells_the_state_too(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, dead_owner(cp), "go")

    with_two(database, use)
    with AgentStorage(database.place) as storage:
        assert storage.state("t") == "interrupted"
        assert storage.state("another") == "idle"
