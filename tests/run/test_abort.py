"""An abort ends a run within a bounded time, whoever ignores it, and keeps what was said."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from byssus import ToolCall, ToolContext, tool
from byssus.errors import (
    AgentBusy,
    RateLimited,
)
from byssus.events import Event, MessageUpdate
from byssus.messages import AssistantMessage, Message, ToolResultMessage
from byssus.providers.base import Request
from tests.support.agents import (
    REPLY,
    USER,
    Acted,
    Hanging,
    Heard,
    Stubborn,
    can_go_on,
    check_whole,
    history,
    make,
    run_story,
    saying,
    stubbornly,
    within,
)
from tests.support.databases import Database


def test_an_abort_ends_a_stream_that_hangs_and_keeps_what_was_said(database: Database) -> None:
    async def main() -> None:
        hanging = Hanging("Hel", "lo")
        async with database.checkpointer() as cp:
            agent = make(Acted(hanging), checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            running = asyncio.create_task(agent.prompt("hi"))
            await hanging.begun.wait()
            agent.abort()
            result = await running
            assert (result.stop_reason, result.text, result.error) == ("aborted", "Hello", None)
            assert hanging.closed
            check_whole(heard)
            assert heard.story == run_story(["turn_start", *USER, *REPLY, "turn_end"])
            reply = result.messages[-1]
            assert isinstance(reply, AssistantMessage)
            assert reply.stop_reason == "aborted"
            assert await history(cp, "t") == ["user: hi", "assistant: Hello"]
            assert await can_go_on(cp) == ["user: hi", "assistant: Hello", "user: again"]

    within(main())


def test_an_abort_before_anything_was_said_leaves_the_prompt(database: Database) -> None:
    async def main() -> None:
        hanging = Hanging()
        async with database.checkpointer() as cp:
            agent = make(Acted(hanging), checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            running = asyncio.create_task(agent.prompt("hi"))
            await hanging.begun.wait()
            agent.abort()
            assert (await running).stop_reason == "aborted"
            check_whole(heard)
            assert await can_go_on(cp) == ["user: hi", "user: again"]

    within(main())


def test_an_abort_from_another_thread_ends_the_run() -> None:
    async def main() -> None:
        hanging = Hanging("Hel")
        agent = make(Acted(hanging))
        running = asyncio.create_task(agent.prompt("hi"))
        await hanging.begun.wait()
        threading.Thread(target=agent.abort).start()
        assert (await running).stop_reason == "aborted"

    within(main())


def test_an_abort_before_the_run_has_begun_ends_it_too() -> None:
    async def main() -> None:
        agent = make(Acted(Hanging("Hel")))
        heard = Heard(agent)
        running = asyncio.create_task(agent.prompt("hi"))
        await asyncio.sleep(0)  # the prompt has been taken, and nothing else has happened
        agent.abort()
        assert (await running).stop_reason == "aborted"
        check_whole(heard)

    within(main())


def test_an_abort_does_not_wait_for_a_provider_that_ignores_it(database: Database) -> None:
    async def main() -> None:
        stubborn = Stubborn()
        async with database.checkpointer() as cp:
            agent = make(Acted(stubborn), checkpointer=cp, thread_id="t", abort_grace=0.01)
            heard = Heard(agent)
            running = asyncio.create_task(agent.prompt("hi"))
            await stubborn.begun.wait()
            agent.abort()
            result = await running
            assert (result.stop_reason, result.text) == ("aborted", "Hel")
            told = len(heard)
            stubborn.release.set()
            await stubborn.over.wait()
            check_whole(heard)
            assert len(heard) == told  # what it says afterwards is not heard
            assert await can_go_on(cp) == ["user: hi", "assistant: Hel", "user: again"]

    within(main())


def test_an_abort_by_a_listener_in_mid_stream_is_an_abort_and_no_failure() -> None:
    async def main() -> None:
        agent = make(["one two three"])
        heard = Heard(agent)

        def stop(event: Event) -> None:
            if isinstance(event, MessageUpdate) and event.stream_event.type == "text_delta":
                agent.abort()

        agent.subscribe(stop)
        result = await agent.prompt("hi")
        assert (result.stop_reason, result.text, result.error) == ("aborted", "one ", None)
        assert agent.state.error is None
        reply = result.messages[-1]
        assert isinstance(reply, AssistantMessage)
        assert (reply.stop_reason, reply.error) == ("aborted", None)
        assert "error" not in [event.stream_event.type for event in heard.of(MessageUpdate)]
        check_whole(heard)

    within(main())


def test_an_abort_reaches_a_listener_that_takes_the_signal() -> None:
    async def main() -> None:
        agent = make(["one two three"])
        agent.subscribe(lambda event, signal: signal.abort() if event.type == "message_update" else None)
        assert (await agent.prompt("hi")).stop_reason == "aborted"

    within(main())


def test_an_abort_does_not_wait_for_a_plain_tool_that_is_blocked(database: Database) -> None:
    async def main() -> None:
        begun, release = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        @tool
        def stuck() -> str:
            loop.call_soon_threadsafe(begun.set)
            release.wait(60)
            return "late"

        async with database.checkpointer() as cp:
            agent = make([[ToolCall("c1", "stuck")]], tools=[stuck], checkpointer=cp, thread_id="t", abort_grace=0.01)
            heard = Heard(agent)
            running = asyncio.create_task(agent.prompt("go"))
            await begun.wait()
            agent.abort()
            result = await running
            release.set()
            assert result.stop_reason == "aborted"
            check_whole(heard)
            assert "may or may not" in result.messages[-1].text
            assert await history(cp, "t") == [
                "user: go",
                "assistant: ",
                f"tool_result: {result.messages[-1].text}",
            ]
            await can_go_on(cp)

    within(main())


def test_an_abort_does_not_wait_for_an_async_tool_that_swallows_its_cancellation(database: Database) -> None:
    async def main() -> None:
        begun, release = asyncio.Event(), asyncio.Event()
        kept: list[ToolContext] = []

        @tool
        async def stuck(ctx: ToolContext) -> str:
            kept.append(ctx)
            begun.set()
            await stubbornly(release)
            return "late"

        async with database.checkpointer() as cp:
            agent = make([[ToolCall("c1", "stuck")]], tools=[stuck], checkpointer=cp, thread_id="t", abort_grace=0.01)
            heard = Heard(agent)
            running = asyncio.create_task(agent.prompt("go"))
            await begun.wait()
            agent.abort()
            result = await running
            assert result.stop_reason == "aborted"
            kept[0].update("still here")
            release.set()
            await asyncio.sleep(0)
            check_whole(heard)
            await can_go_on(cp)

    within(main())


def test_an_abort_keeps_the_results_of_tools_that_had_finished_and_starts_no_others(database: Database) -> None:
    async def main() -> None:
        ran: list[str] = []

        @tool
        async def first() -> str:
            ran.append("first")
            return "done"

        @tool
        async def second(ctx: ToolContext) -> str:
            ran.append("second")
            agent.abort()
            await ctx.signal.wait()
            await asyncio.Event().wait()
            return "never"

        @tool
        async def third() -> str:
            ran.append("third")
            return "never"

        calls = [ToolCall("c1", "first"), ToolCall("c2", "second"), ToolCall("c3", "third")]
        async with database.checkpointer() as cp:
            agent = make([calls], tools=[first, second, third], checkpointer=cp, thread_id="t", tool_mode="sequential")
            heard = Heard(agent)
            result = await agent.prompt("go")
            check_whole(heard)
            assert ran == ["first", "second"]
            assert [m.text.split(": ")[-1] for m in result.messages if isinstance(m, ToolResultMessage)] == [
                "done",
                "it may or may not have taken effect.",
                "This call was not started, because the run was aborted.",
            ]
            assert [m.role for m in result.messages] == ["user", "assistant", *["tool_result"] * 3]
            await can_go_on(cp)

    within(main())


def test_an_abort_when_idle_does_nothing() -> None:
    async def main() -> None:
        agent = make(["a", "b"])
        agent.abort()
        assert (await agent.prompt("hi")).stop_reason == "stop"
        agent.abort()
        assert (await agent.prompt("hi")).stop_reason == "stop"

    within(main())


def test_a_prompt_right_after_an_abort_is_refused_until_the_run_has_ended() -> None:
    async def main() -> None:
        hanging = Hanging("Hel")
        agent = make(Acted(hanging, saying("ok")))
        running = asyncio.create_task(agent.prompt("hi"))
        await hanging.begun.wait()
        agent.abort()
        with pytest.raises(AgentBusy, match="wait_for_idle"):
            await agent.prompt("at once")
        await agent.wait_for_idle()
        assert not agent.state.is_streaming
        assert (await agent.prompt("now")).text == "ok"
        assert (await running).stop_reason == "aborted"

    within(main())


def test_an_abort_ends_a_middleware_that_hangs() -> None:
    async def main() -> None:
        begun, release = asyncio.Event(), asyncio.Event()

        class Slow:
            async def transform_context(self, messages: list[Message], *, signal: Any = None) -> list[Message]:
                begun.set()
                await release.wait()
                return messages

        agent = make(["late"], middleware=[Slow()])
        heard = Heard(agent)
        running = asyncio.create_task(agent.prompt("hi"))
        await begun.wait()
        agent.abort()
        done, _ = await asyncio.wait({running}, timeout=5)
        release.set()
        await asyncio.wait({running})
        assert done, "the run went on until the middleware was ready"
        check_whole(heard)

    within(main())


def test_an_abort_ends_the_wait_between_two_attempts() -> None:
    async def main() -> None:
        asked = asyncio.Event()

        def busy(request: Request) -> Exception:
            asked.set()
            return RateLimited("slow down", retry_after=3600)

        agent = make([busy])
        heard = Heard(agent)
        running = asyncio.create_task(agent.prompt("hi"))
        await asked.wait()
        agent.abort()
        assert (await running).stop_reason == "aborted"
        check_whole(heard)

    within(main())
