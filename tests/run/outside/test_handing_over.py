"""A run that is handed over stops at its next commit, and another process goes on with it as if nothing had been."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError, ProviderError, RateLimited
from byssus.events import AgentEnd, StreamDone, StreamEvent, StreamStart, TextDelta, TextStart, ToolExecutionEnd
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from byssus.signals import Signal
from byssus.values.results import RunResult
from tests.support.agents import Acted, Heard, check_whole, history, hooks, make, saying, sent
from tests.support.approvals import Deleting, delete
from tests.support.databases import Database
from tests.support.leases import agent_on, die, lease_of, until, with_two
from tests.support.tool_calls import UNKNOWN, Acting, act, ledger

SOON = 60.0  # seconds: no test waits for it


class Gated:
    """A tool that waits until it is let go, and counts its runs."""

    def __init__(self, **options: Any) -> None:
        self.runs = 0
        self.begun, self.gate = asyncio.Event(), asyncio.Event()

        @tool(**options)
        async def work(n: int) -> str:
            self.runs += 1
            self.begun.set()
            await self.gate.wait()
            return f"did {n}"

        self.tool = work


def work(n: int) -> ToolCall:
    return ToolCall(f"w{n}", "work", {"n": n})


class Slowly:
    """A reply whose second half comes when it is let go."""

    def __init__(self, *calls: ToolCall) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self._calls = calls

    async def __call__(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        yield TextStart(0)
        yield TextDelta(0, "Hel")
        self.begun.set()
        await self.gate.wait()
        async for event in saying("lo", calls=self._calls)(request, signal):
            if not isinstance(event, StreamStart | TextStart):
                yield event
            if isinstance(event, StreamDone):
                return


class Failing:
    """A model that fails when it is let go."""

    name = "failing"

    def __init__(self, error: ProviderError) -> None:
        self.error = error
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.requests = 0
        self.has_failed = False

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        self.requests += 1
        self.begun.set()
        await self.gate.wait()
        self.has_failed = True
        raise self.error
        yield


async def handed_over(agent: Agent, run: asyncio.Task[RunResult[Any]]) -> RunResult[Any]:
    result = await run
    assert result.stop_reason == "handed_over"
    assert result.error is None
    await agent.wait_for_idle()
    return result


async def check_free(cp: Checkpointer) -> None:
    """The thread's run has not ended, and no process drives it."""
    lease = await lease_of(cp)
    assert (lease.owner, lease.until) == (None, None)
    assert lease.run is not None
    assert [info.id for info in await cp.unfinished()] == ["t"]


def test_a_tool_that_runs_comes_to_its_end_and_is_not_run_again(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        gated = Gated()
        agent = agent_on(cp, [[work(1), work(2)]], tools=[gated.tool], tool_mode="sequential")
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await gated.begun.wait()
        agent.hand_over(SOON)
        await asyncio.sleep(0)
        assert not run.done()
        gated.gate.set()
        await handed_over(agent, run)
        check_whole(heard)
        assert heard.of(AgentEnd)[0].stop_reason == "handed_over"
        await check_free(other)
        assert await ledger(other) == [("w1", "done", 1)]  # the second one was not started
        provider = ScriptedProvider(["ok"])
        assert (await agent_on(other, provider, tools=[gated.tool]).resume()).text == "ok"
        assert gated.runs == 2
        assert sent(provider) == ["user: go", "assistant: ", "tool_result: did 1", "tool_result: did 2"]

    with_two(database, use)


def test_a_reply_that_streams_comes_to_its_end_and_its_tools_run_elsewhere(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slowly, acting = Slowly(act(1)), Acting()
        agent = agent_on(cp, Acted(slowly), tools=[acting.tool])
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await slowly.begun.wait()
        agent.hand_over(SOON)
        slowly.gate.set()
        await handed_over(agent, run)
        check_whole(heard)
        await check_free(other)
        assert acting.runs == []
        assert await history(other, "t") == ["user: go", "assistant: Hello"]
        assert (await agent_on(other, ["ok"], tools=[acting.tool]).resume()).text == "ok"
        assert [n for n, _ in acting.runs] == [1]

    with_two(database, use)


@pytest.mark.parametrize("has_fallback", [False, True])
def test_a_model_that_failed_is_asked_again_elsewhere(database: Database, has_fallback: bool) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        error = ProviderError("no such model") if has_fallback else RateLimited("slow down", retry_after=60.0)
        failing, fallback = Failing(error), ScriptedProvider([])
        agent = agent_on(cp, failing)
        if has_fallback:
            models = [Model("m", provider="failing"), Model("n", provider="scripted")]
            agent = Agent(provider=[failing, fallback], model=models, checkpointer=cp, thread_id="t")
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await failing.begun.wait()
        if has_fallback:  # the failure comes after the request
            agent.hand_over(SOON)
            await asyncio.sleep(0)
            failing.gate.set()
        else:  # it came before, and the model is to be asked again in a minute
            failing.gate.set()
            await until(lambda: failing.has_failed)
            agent.hand_over(SOON)
        await handed_over(agent, run)
        check_whole(heard)
        await check_free(other)
        assert failing.requests == 1
        assert await history(other, "t") == ["user: go"]
        assert (await agent_on(other, ["ok"]).resume()).text == "ok"

    with_two(database, use)


def test_a_run_whose_last_reply_was_arriving_has_ended(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slowly = Slowly()
        agent = agent_on(cp, Acted(slowly))
        run = asyncio.create_task(agent.prompt("go"))
        await slowly.begun.wait()
        agent.hand_over(SOON)
        slowly.gate.set()
        assert (await run).stop_reason == "stop"
        assert await other.unfinished() == []

    with_two(database, use)


@pytest.mark.parametrize(
    ("recovery", "runs", "told"), [("never", 1, UNKNOWN), ("retry", 2, "tool_result: did 1")], ids=["never", "retry"]
)
def test_a_tool_that_runs_too_long_is_left_as_started_and_its_policy_decides(
    database: Database, recovery: str, runs: int, told: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery=recovery)
        agent = agent_on(cp, [[act(1)]], tools=[acting.tool])
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        agent.hand_over(0)
        await handed_over(agent, run)
        check_whole(heard)
        (end,) = heard.of(ToolExecutionEnd)
        assert (end.stored, end.is_error) == (False, True)
        await check_free(other)
        assert await ledger(other) == [("c1", "started", 1)]
        provider = ScriptedProvider(["ok"])
        assert (await agent_on(other, provider, tools=[acting.tool]).resume()).text == "ok"
        assert sent(provider)[-1] == told
        assert len(acting.runs) == runs
        assert len({key for _, key in acting.runs}) == 1

    with_two(database, use)


def test_what_arrived_of_a_reply_that_takes_too_long_is_kept_and_the_model_is_asked_again(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slowly = Slowly(act(1))
        agent = agent_on(cp, Acted(slowly))
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await slowly.begun.wait()
        agent.hand_over(0)
        await handed_over(agent, run)
        check_whole(heard)
        await check_free(other)
        provider = ScriptedProvider(["ok"])
        assert (await agent_on(other, provider).resume()).text == "ok"
        assert sent(provider) == ["user: go"]
        assert await history(other, "t") == ["user: go", "assistant: Hel", "assistant: ok"]

    with_two(database, use)


def test_messages_that_wait_are_heard_in_the_other_process(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slowly = Slowly()
        agent = agent_on(cp, Acted(slowly))
        run = asyncio.create_task(agent.prompt("go"))
        await slowly.begun.wait()
        await agent.follow_up("and then?")
        agent.hand_over(SOON)
        slowly.gate.set()
        await handed_over(agent, run)
        await check_free(other)
        provider = ScriptedProvider(["ok"])
        assert (await agent_on(other, provider).resume()).text == "ok"
        assert sent(provider) == ["user: go", "assistant: Hello", "user: and then?"]

    with_two(database, use)


def test_a_run_that_is_asked_before_it_begins_stores_its_prompt_and_asks_no_model(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp)
        run = asyncio.create_task(agent.prompt("go"))
        await asyncio.sleep(0)
        agent.hand_over(SOON)
        await handed_over(agent, run)
        await check_free(other)
        assert (await agent_on(other, ["ok"]).resume()).text == "ok"
        assert await history(other, "t") == ["user: go", "assistant: ok"]

    with_two(database, use)


def test_a_prompt_that_finds_interrupted_calls_is_stored_and_leaves_them_as_they_are(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        dead = agent_on(cp, [[act(1)]], tools=[acting.tool])
        run = asyncio.create_task(dead.prompt("go"))
        await acting.begun.wait()
        await die(cp, dead, run)
        agent = agent_on(cp, tools=[acting.tool])
        run = asyncio.create_task(agent.prompt("again"))
        await asyncio.sleep(0)
        agent.hand_over(SOON)
        await handed_over(agent, run)
        await check_free(other)
        provider = ScriptedProvider(["ok"])
        assert (await agent_on(other, provider, tools=[acting.tool]).resume()).text == "ok"
        assert sent(provider) == ["user: go", "assistant: ", "tool_result: did 1", "user: again"]

    with_two(database, use)


def test_a_run_that_waits_for_a_person_is_not_handed_over(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        gated, deleting = Gated(), Deleting()
        agent = agent_on(cp, [[work(1), delete("a")]], tools=[gated.tool, deleting.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await gated.begun.wait()
        while not await other.pending():
            await asyncio.sleep(0.01)
        agent.hand_over(SOON)
        gated.gate.set()
        assert (await run).stop_reason == "waiting"
        assert await other.state("t") == "waiting"

    with_two(database, use)


def test_hooks_hear_of_the_end_where_the_run_ends(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        ended: list[str] = []

        async def on_run_end(result: RunResult[Any], **_: Any) -> None:
            ended.append(result.stop_reason)

        gated = Gated()
        options: Any = {"tools": [gated.tool], "middleware": [hooks(on_run_end=on_run_end)]}
        agent = agent_on(cp, [[work(1)]], **options)
        run = asyncio.create_task(agent.prompt("go"))
        await gated.begun.wait()
        agent.hand_over(SOON)
        gated.gate.set()
        await handed_over(agent, run)
        assert ended == []
        await agent_on(other, ["ok"], **options).resume()
        assert ended == ["stop"]

    with_two(database, use)


def test_an_abort_during_a_hand_over_ends_the_run(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)
        agent = agent_on(cp, [[act(1)]], tools=[acting.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        agent.hand_over(SOON)
        agent.abort()
        assert (await run).stop_reason == "aborted"
        assert await other.unfinished() == []

    with_two(database, use)


def test_an_agent_in_memory_stops_and_goes_on() -> None:
    async def main() -> None:
        gated = Gated()
        agent = make([[work(1)], "ok"], tools=[gated.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await gated.begun.wait()
        agent.hand_over(SOON)
        gated.gate.set()
        await handed_over(agent, run)
        assert (await agent.resume()).text == "ok"
        assert gated.runs == 1

    asyncio.run(main())


@pytest.mark.parametrize("grace", [-1, "soon", True, None, float("nan")])
def test_a_time_that_is_none_is_refused(grace: Any) -> None:
    with pytest.raises(InputError, match="grace must be a number of seconds"):
        make([]).hand_over(grace)


def test_without_a_run_there_is_nothing_to_hand_over() -> None:
    make([]).hand_over()


@pytest.mark.parametrize("policy", ["die", None, True])
def test_a_policy_that_is_none_is_refused(policy: Any) -> None:
    with pytest.raises(InputError, match="on_sigterm must be 'abort' or 'hand_over'"):
        make([], on_sigterm=policy)
