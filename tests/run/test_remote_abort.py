"""A run that is ended from somewhere else."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from byssus import Agent, AssistantMessage, Middleware, ToolCall, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import RateLimited
from byssus.events import (
    AgentEnd,
)
from byssus.providers.base import Request
from byssus.providers.history import valid_history
from tests.support import forked
from tests.support.agents import Acted, Hanging, Heard, check_whole, saying, sent, within
from tests.support.checkpointers import loaded
from tests.support.databases import Database
from tests.support.histories import flaws
from tests.support.leases import (
    FAR_AWAY,
    LOOK,
    Slow,
    Streaming,
    agent_on,
    claim,
    dead_owner,
    expire,
    is_free,
    until,
    with_two,
)

pytestmark = pytest.mark.processes


class Stuck:
    """Where a run can stand still: it says so, and stays there."""

    def __init__(self, where: str) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self._where = where

    async def stand_still(self, where: str) -> None:
        if where == self._where:
            self.begun.set()
            await asyncio.Event().wait()

    def agent(self, cp: Checkpointer) -> Agent:
        stuck = self

        class Hooks(Middleware):
            async def transform_context(self, messages: Any, **_: Any) -> Any:
                await stuck.stand_still("a hook before the model")
                return messages

            async def before_tool_call(self, call: ToolCall, **_: Any) -> None:
                await stuck.stand_still("a hook before a tool")

            async def should_stop_after_turn(self, *_: object, **__: object) -> bool:
                await stuck.stand_still("a hook after the turn")
                return False

        @tool(name="look")
        async def look_around() -> str:
            await stuck.stand_still("a tool")
            return "seen"

        @tool(name="look")
        def look_and_block() -> str:
            stuck.begun.set()
            stuck.let_go.wait()
            return "seen"

        async def answer(request: Request) -> Any:
            await stuck.stand_still("the model")
            if stuck._where == "a pause between two attempts":
                stuck.begun.set()
                return RateLimited("slow down", retry_after=50)
            return LOOK

        looks = look_and_block if self._where == "a tool on a thread" else look_around
        return agent_on(cp, [answer, "ok"], tools=[looks], middleware=[Hooks()], abort_grace=0.05)


PLACES = [
    "the model",
    "a pause between two attempts",
    "a tool",
    "a tool on a thread",
    "a hook before the model",
    "a hook before a tool",
    "a hook after the turn",
]


# --- ending a run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_stands_still_anywhere_is_ended_from_elsewhere(database: Database, place: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        stuck = Stuck(place)
        agent = stuck.agent(cp)
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await until(stuck.begun.is_set)
        assert await other.abort("t") is True
        result = await run
        stuck.let_go.set()
        assert result.stop_reason == "aborted"
        check_whole(heard)
        assert heard.of(AgentEnd)[0].stop_reason == "aborted"
        assert await is_free(cp)
        assert await other.unfinished() == []
        assert flaws(valid_history((await loaded(other, "t")).messages)) == []
        assert await other.abort("t") is False
        assert (await agent_on(other, ["fine"]).prompt("and now?")).text == "fine"

    with_two(database, use)


def test_what_had_arrived_of_the_reply_is_kept(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        hanging = Hanging("Hel", "lo")
        run = asyncio.create_task(agent_on(cp, Acted(hanging)).prompt("go"))
        await hanging.begun.wait()
        await other.abort("t")
        assert (await run).text == "Hello"
        reply = (await loaded(other, "t")).messages[-1]
        assert isinstance(reply, AssistantMessage)
        assert (reply.text, reply.stop_reason) == ("Hello", "aborted")

    with_two(database, use)


def test_there_is_nothing_to_end_where_nothing_runs(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        assert await cp.abort("nobody") is False
        assert await cp.load("nobody") is None
        await agent_on(cp, ["ok"]).prompt("go")
        assert await other.abort("t") is False
        asking = Slow(approval=True)
        agent = agent_on(cp, [[ToolCall("c1", "slow")], "well"], tools=[asking.tool])
        assert (await agent.prompt("go")).stop_reason == "waiting"
        assert await other.abort("t") is False
        await agent.answer("c1", "deny")
        assert (await agent.resume()).text == "well"  # nothing of that is left over
        await claim(cp, FAR_AWAY, "hm")
        await expire(cp)
        assert await other.abort("t") is False

    with_two(database, use)


def test_there_is_nothing_to_end_where_the_owner_is_gone(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, dead_owner(cp), "go")
        assert [info.id for info in await other.unfinished()] == ["t"]
        assert await other.abort("t") is False

    with_two(database, use)


def test_only_the_run_of_that_thread_ends(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        scenes = {name: Hanging(name) for name in "abc"}
        runs = {
            name: asyncio.create_task(agent_on(cp, Acted(scene), name).prompt("go")) for name, scene in scenes.items()
        }
        for scene in scenes.values():
            await scene.begun.wait()
        assert await other.abort("b")
        assert (await runs["b"]).stop_reason == "aborted"
        assert not runs["a"].done()
        assert not runs["c"].done()
        for name in "ac":
            assert await other.abort(name)
            assert (await runs[name]).stop_reason == "aborted"

    with_two(database, use)


def test_an_abort_is_for_one_run_and_not_for_the_next(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        for _ in range(3):
            hanging = Hanging("Hel")
            run = asyncio.create_task(agent_on(cp, Acted(hanging)).prompt("go"))
            await hanging.begun.wait()
            assert await other.abort("t")
            assert await other.abort("t") in (True, False)  # it may have ended in between
            assert (await run).stop_reason == "aborted"
            slow.let_go.set()
            agent = agent_on(cp, [[ToolCall("c1", "slow")], "ok"], tools=[slow.tool])
            assert (await agent.prompt("and now?")).text == "ok"

    with_two(database, use)


def test_an_abort_of_a_run_that_has_lost_its_thread_does_not_end_the_new_one(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, FAR_AWAY, "theirs")
        assert await other.abort("t") is True  # they do not listen
        await expire(cp)
        slow = Slow()
        run = asyncio.create_task(agent_on(other, [[ToolCall("c1", "slow")], "ok"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        await cp.save_extra("another", {})  # something changes, so that its keeper looks
        await asyncio.sleep(0.15)
        slow.let_go.set()
        assert (await run).text == "ok"

    with_two(database, use)


def test_a_run_is_ended_as_soon_as_it_has_begun(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        cp.lease_seconds = 2.0  # what is missed at first is seen with the next renewal
        for number in range(10):
            hanging = Hanging("Hel")
            agent = agent_on(cp, Acted(hanging), f"t{number}")
            heard = Heard(agent)
            run = asyncio.create_task(agent.prompt("go"))
            await until(lambda thread_id=f"t{number}": other.abort(thread_id))  # type: ignore[misc]
            assert (await run).stop_reason == "aborted"
            check_whole(heard)

    with_two(database, use)


# --- from another process ---------------------------------------------------------------------------------------------


ELSEWHERE = """
import asyncio, sys
from byssus.checkpointer import checkpointer_for

async def main():
    async with checkpointer_for(sys.argv[1]) as cp:
        print(await eval(sys.argv[2]))

asyncio.run(main())
"""


async def elsewhere(database: Database, expression: str) -> str:
    """What another process gets when it awaits the expression."""
    done = await asyncio.to_thread(forked.run, ["-W", "error", "-c", ELSEWHERE, database.place, expression])
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


@pytest.mark.parametrize("place", ["the model", "a tool", "a hook before a tool"])
def test_a_run_is_ended_from_another_process(database: Database, place: str) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            stuck = Stuck(place)
            agent = stuck.agent(cp)
            heard = Heard(agent)
            run = asyncio.create_task(agent.prompt("go"))
            await until(stuck.begun.is_set)
            assert await elsewhere(database, "cp.abort('t')") == "True"
            assert (await run).stop_reason == "aborted"
            check_whole(heard)
            assert await is_free(cp)

    within(main())


def test_another_process_steers_answers_and_sees_what_is_arriving(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            streaming = Streaming("one ", "two ")
            asking = Slow(approval=True)
            asking.let_go.set()
            provider = Acted(streaming, saying(calls=[ToolCall("c1", "slow")]), saying("ok"))
            agent = agent_on(cp, provider, tools=[asking.tool], save_partial=0.01)
            run = asyncio.create_task(agent.prompt("go"))
            await until(lambda: streaming.is_saved(cp))
            assert "one two" in await elsewhere(database, "cp.load('t')")
            assert "under way" not in await elsewhere(database, "cp.steer('t', 'from elsewhere')")
            streaming.let_go.set()
            assert (await run).stop_reason == "waiting"
            assert sent(provider, 1)[-1] == "user: from elsewhere"
            assert "c1" in await elsewhere(database, "cp.pending()")
            assert await elsewhere(database, "cp.answer('t', 'c1', 'approve')") == "True"
            assert (await agent.resume()).text == "ok"
            assert asking.runs == 1

    within(main())
