"""The caller gives up, or the event loop does: the run ends in good order all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from anyio._backends._asyncio import CancelScope

from byssus import Agent, ToolCall, tool
from byssus.events import AgentEnd
from tests.support.agents import Acted, Hanging, Heard, Stubborn, can_go_on, check_whole, history, make, saying, within
from tests.support.databases import Database


def test_cancelling_a_prompt_ends_its_run_in_good_order(database: Database) -> None:
    async def main() -> None:
        hanging = Hanging("Hel")
        async with database.checkpointer() as cp:
            agent = make(Acted(hanging), checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            running = asyncio.create_task(agent.prompt("hi"))
            await hanging.begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert running.cancelled()
            assert not agent.state.is_streaming
            check_whole(heard)
            assert heard.of(AgentEnd)[0].stop_reason == "aborted"
            assert await can_go_on(cp) == ["user: hi", "assistant: Hel", "user: again"]

    within(main())


def test_a_timeout_around_a_prompt_is_a_timeout(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(Acted(Hanging("Hel")), checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await agent.prompt("hi")
            check_whole(heard)
            await can_go_on(cp)

    within(main())


def test_a_cancel_scope_of_anyio_around_a_prompt_waits_for_its_end_and_burns_no_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deliveries, deliver = list[object](), CancelScope._deliver_cancellation

    def counting(scope: Any, origin: Any) -> bool:
        deliveries.append(scope)
        return deliver(scope, origin)

    monkeypatch.setattr(CancelScope, "_deliver_cancellation", counting)

    async def main() -> None:
        stubborn = Stubborn()
        agent = make(Acted(stubborn), abort_grace=0.2)
        heard = Heard(agent)
        with anyio.move_on_after(0.05) as scope:
            await agent.prompt("hi")
        stubborn.release.set()
        assert scope.cancelled_caught
        assert not agent.state.is_streaming
        check_whole(heard)

    within(main())
    assert len(deliveries) < 30, "anyio cancels it in each round of the event loop"


def test_cancelling_twice_still_waits_for_the_run_to_end() -> None:
    async def main() -> None:
        stubborn = Stubborn()
        agent = make(Acted(stubborn), abort_grace=0.2)
        heard = Heard(agent)
        running = asyncio.create_task(agent.prompt("hi"))
        await stubborn.begun.wait()
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        was_streaming = agent.state.is_streaming
        stubborn.release.set()
        await agent.wait_for_idle()
        assert not was_streaming
        check_whole(heard)

    within(main())


def test_cancelling_a_prompt_under_a_running_tool_settles_its_call(database: Database) -> None:
    async def main() -> None:
        begun = asyncio.Event()

        @tool
        async def stuck() -> None:
            begun.set()
            await asyncio.Event().wait()

        async with database.checkpointer() as cp:
            agent = make([[ToolCall("c1", "stuck")]], tools=[stuck], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            running = asyncio.create_task(agent.prompt("go"))
            await begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            check_whole(heard)
            assert [line.split(":")[0] for line in await history(cp, "t")] == ["user", "assistant", "tool_result"]
            await can_go_on(cp)

    within(main())


def test_a_loop_that_shuts_down_ends_the_run_in_good_order(database: Database) -> None:
    cp = database.checkpointer()
    agent: Agent | None = None
    heard: Heard | None = None
    kept: list[asyncio.Task[Any]] = []

    async def main() -> None:
        nonlocal agent, heard
        await cp.open()
        hanging = Hanging("Hel")
        agent = make(Acted(hanging, saying("ok")), checkpointer=cp, thread_id="t")
        heard = Heard(agent)
        kept.append(asyncio.create_task(agent.prompt("hi")))
        await hanging.begun.wait()

    within(main())
    assert heard is not None
    assert agent is not None
    check_whole(heard)
    assert not agent.state.is_streaming

    async def afterwards() -> None:
        async with cp:
            assert agent is not None
            assert (await agent.prompt("again")).text == "ok"
            lines = ["user: hi", "assistant: Hel", "user: again", "assistant: ok"]
            assert await history(cp, "t") == lines

    within(afterwards())


def test_a_loop_that_shuts_down_under_running_tools_settles_their_calls(database: Database) -> None:
    cp = database.checkpointer()
    kept: list[asyncio.Task[Any]] = []
    heards: list[Heard] = []

    async def main() -> None:
        await cp.open()
        begun = asyncio.Event()

        @tool
        async def stuck() -> None:
            begun.set()
            await asyncio.Event().wait()

        calls = [ToolCall("c1", "stuck"), ToolCall("c2", "stuck")]
        agent = make([calls], tools=[stuck], checkpointer=cp, thread_id="t")
        heards.append(Heard(agent))
        kept.append(asyncio.create_task(agent.prompt("go")))
        await begun.wait()

    within(main())
    check_whole(heards[0])

    async def afterwards() -> None:
        async with cp:
            await can_go_on(cp)

    within(afterwards())


def test_a_loop_that_shuts_down_before_the_run_has_begun_does_not_leave_the_agent_busy() -> None:
    agent = make(["ok"])
    kept: list[asyncio.Task[Any]] = []

    async def main() -> None:
        kept.append(asyncio.create_task(agent.prompt("hi")))  # makes its run, which does not come to take a step

    asyncio.run(main())
    assert not agent.state.is_streaming
    assert within(agent.prompt("again")).text == "ok"
