"""Runs that were interrupted: they are found, taken up and ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus import (
    AssistantMessage,
    ToolCall,
    UserMessage,
)
from byssus.checkpointer import Checkpointer
from byssus.errors import (
    NothingToResume,
    ProviderError,
)
from byssus.events import AgentEnd, MessageEnd
from byssus.messages import Usage
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.log import listing
from byssus.signals import Signal
from byssus.store.database import Tx
from tests.support.agents import Heard, check_whole, history, hooks
from tests.support.databases import Database
from tests.support.leases import (
    CALL_SLOW,
    FAR_AWAY,
    Slow,
    agent_on,
    brief,
    claim,
    dead_owner,
    die,
    expire,
    is_free,
    look,
    unfinished,
    until,
    with_two,
)
from tests.support.plans import plan_of

# --- runs that were interrupted ---------------------------------------------------------------------------------------


def test_a_run_is_unfinished_from_its_crash_to_its_end(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        assert await unfinished(other) == []
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW], tools=[slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        assert await unfinished(other) == []  # it is running
        await die(cp, agent, run)
        assert await unfinished(other) == ["t"]
        again = Slow()
        agent = agent_on(other, [CALL_SLOW], tools=[again.tool])
        run = asyncio.create_task(agent.resume())
        await until(lambda: again.begun.is_set() or run.done())
        assert await unfinished(cp) == []  # it is running again
        await die(other, agent, run)
        assert await unfinished(cp) == ["t"]
        await agent_on(cp, ["ok"], tools=[slow.tool]).resume()
        assert await unfinished(other) == []

    with_two(database, use)


def test_a_run_that_waits_for_a_person_is_unfinished_when_it_was_answered(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        ask = Slow(approval=True)
        ask.let_go.set()
        calls = [ToolCall("c1", "slow"), ToolCall("c2", "slow")]
        assert (await agent_on(cp, [calls], tools=[ask.tool]).prompt("go")).stop_reason == "waiting"
        assert await unfinished(other) == []
        await other.answer("t", "c1", "approve")
        assert await unfinished(other) == []  # there is another question
        await other.answer("t", "c2", "approve")
        assert await unfinished(other) == ["t"]
        assert (await agent_on(cp, ["ok"], tools=[ask.tool]).resume()).text == "ok"
        assert await unfinished(other) == []

    with_two(database, use)


def test_only_interrupted_threads_are_listed_the_oldest_first(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cp.append("written", UserMessage("x"))
        await agent_on(cp, ["ok"], "finished").prompt("go")
        await agent_on(cp, [ProviderError("no")], "failed", max_retries=0).prompt("go")
        await cp.steer("steered", "hello")
        for name in ("c", "a", "b"):
            await claim(cp, dead_owner(cp), "go", thread_id=name)
        await claim(cp, FAR_AWAY, "go", thread_id="far away")
        assert await unfinished(other) == ["c", "a", "b"]
        await expire(cp)
        assert await unfinished(other) == ["c", "a", "b", "far away"]
        infos = await other.unfinished()
        assert (infos[0].id, infos[0].message_count) == ("c", 1)

    with_two(database, use)


async def died_behind_its_reply(cp: Checkpointer, script: list[Any]) -> None:
    """A run whose last reply is stored, and whose end is not."""
    begun = asyncio.Event()

    async def hang(_: Any, *, signal: Signal) -> None:
        begun.set()
        await signal.wait()  # a hook that goes on would have some seconds more

    agent = agent_on(cp, script, tools=[look], middleware=[hooks(on_run_end=hang)], abort_grace=0)
    run = asyncio.create_task(agent.prompt("go", key="k"))
    await begun.wait()
    await die(cp, agent, run)


@pytest.mark.parametrize("way", ["resume", "key", "prompt"])
def test_a_run_that_died_behind_its_last_reply_is_ended_by_the_next_one(database: Database, way: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        said = AssistantMessage("that is", stop_reason="length", usage=Usage(input=7, output=2))
        script: list[Any] = [[ToolCall("c1", "look")], said]
        whole = await agent_on(cp, script, "whole", tools=[look]).prompt("go")
        await died_behind_its_reply(cp, script)
        assert await unfinished(other) == ["t"]
        provider = ScriptedProvider(["more"] if way == "prompt" else [])
        agent = agent_on(other, provider, tools=[look])
        heard = Heard(agent)
        if way == "prompt":
            assert (await agent.prompt("and?")).text == "more"
        else:
            result = await (agent.resume() if way == "resume" else agent.prompt("go", key="k"))
            assert (result.text, result.stop_reason, result.error) == ("that is", "length", None)
            assert brief(result.messages) == brief(whole.messages) == await history(cp, "t")
            assert result.usage == whole.usage != Usage()
            assert [event.message for event in heard.of(MessageEnd)] == result.messages[-1:]
            (end,) = heard.of(AgentEnd)
            assert (end.messages, end.usage, end.stop_reason) == (result.messages, result.usage, "length")
            assert await agent_on(cp, []).prompt("go", key="k") == result  # as it is read from the log
            with pytest.raises(NothingToResume):
                await agent.resume()
        check_whole(heard)
        provider.assert_done()
        assert await unfinished(other) == []
        assert await is_free(cp)

    with_two(database, use)


@pytest.mark.parametrize(("said", "asked"), [("[7]", []), ("seven", ["[7]"])])
def test_the_output_of_a_run_that_died_behind_its_reply_is_read(
    database: Database, said: str, asked: list[str]
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await died_behind_its_reply(cp, [said])
        provider = ScriptedProvider(asked)  # what is no valid output is corrected, as in a run that was not interrupted
        result = await agent_on(other, provider).resume(output=list[int])
        assert (result.output, result.text, result.stop_reason) == ([7], "[7]", "stop")
        provider.assert_done()

    with_two(database, use)


def test_a_run_that_died_before_it_said_anything_has_no_reply_of_an_earlier_one(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(cp, ["ok"]).prompt("go")
        await claim(cp, dead_owner(cp))
        result = await agent_on(other, []).resume()
        assert (result.text, result.messages, result.stop_reason) == ("", [], "stop")

    with_two(database, use)


def test_what_a_crashed_run_left_behind_is_told_as_it_is_mended(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [[ToolCall("c1", "look"), *CALL_SLOW]], tools=[slow.tool, look])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await until(lambda: _has(other, 3))
        await die(cp, agent, run)
        again = agent_on(other, ["ok"], tools=[slow.tool, look])
        heard = Heard(again)
        result = await again.prompt("still there?")
        check_whole(heard)
        lines = brief(result.messages)
        assert "unknown" in lines[0]
        assert lines[1:] == ["user: still there?", "assistant: ok"]
        assert [event.message for event in heard.of(MessageEnd)] == result.messages
        assert brief(again.state.messages) == await history(cp, "t")

    with_two(database, use)


async def _has(cp: Checkpointer, messages: int) -> bool:
    thread = await cp.load("t")
    return thread is not None and len(thread.messages) == messages


def plan_of_unfinished(tx: Tx) -> str:
    return plan_of(tx, listing.unfinished)


def test_what_was_interrupted_is_found_without_looking_at_all_threads(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await asyncio.gather(*(cp.append(f"t{number}", UserMessage("x")) for number in range(200)))
        plan = await cp.store.read(plan_of_unfinished)
        assert "threads_unfinished" in plan, plan

    with_two(database, use)
