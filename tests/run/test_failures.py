"""The model, the program or the database fails: each start told has its end, and the thread can go on."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from byssus import Limits, ToolCall, ToolResult, tool
from byssus.errors import (
    ByssusError,
    InputError,
    NetworkFailed,
    ProviderError,
    RateLimited,
    StoreFull,
    StoreNotOpen,
    ThreadBusy,
)
from byssus.events import AgentEnd, Event, MessageEnd, StreamEvent, StreamStart, ToolExecutionEnd
from byssus.messages import AssistantMessage, ToolResultMessage, UserMessage
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider, ScriptError
from byssus.signals import Signal
from tests.support.agents import (
    REPLY,
    USER,
    Acted,
    Heard,
    can_go_on,
    check_whole,
    history,
    make,
    run_story,
    saying,
    sent,
    within,
)
from tests.support.databases import Database
from tests.support.histories import flaws

BIG = "x" * 200_000


# --- the model fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("Hel",)], ids=["before output", "in mid-stream"])
@pytest.mark.parametrize("error", [ProviderError("cut"), NetworkFailed("gone"), KeyError("inside")])
def test_a_models_failure_is_the_result_and_leaves_a_thread_that_can_go_on(
    database: Database, words: tuple[str, ...], error: Exception
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(Acted(saying(*words, then=error)), checkpointer=cp, thread_id="t", max_retries=0)
            heard = Heard(agent)
            result = await agent.prompt("hi")
            check_whole(heard)
            assert (result.stop_reason, result.text) == ("error", "".join(words))
            assert isinstance(result.error, ProviderError)
            assert agent.state.error is result.error
            if not isinstance(error, ProviderError):
                assert result.error.__cause__ is error
                assert "acted" in str(result.error)
            with pytest.raises(ProviderError):
                result.raise_for_error()
            reply = result.messages[-1]
            assert isinstance(reply, AssistantMessage)
            assert reply.error is not None
            assert reply.error.kind == type(result.error).__name__
            end = heard.of(AgentEnd)[0]
            assert (end.stop_reason, end.error) == ("error", reply.error)

            resumed = ScriptedProvider(["better"])
            assert (await make(resumed, checkpointer=cp, thread_id="t").resume()).text == "better"
            assert sent(resumed) == ["user: hi"]

    within(main())


def test_a_run_after_a_failure_starts_with_a_clean_slate() -> None:
    async def main() -> None:
        agent = make([ProviderError("cut"), "ok"])
        await agent.prompt("hi")
        result = await agent.prompt("again")
        assert (result.error, result.stop_reason) == (None, "stop")
        assert agent.state.error is None
        result.raise_for_error()

    within(main())


def test_an_agent_or_a_call_can_have_the_models_failure_raised(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            script = [ProviderError(f"cut {number}") for number in range(4)]
            agent = make([*script, "ok"], checkpointer=cp, thread_id="t", max_retries=0, raise_errors=True)
            heard = Heard(agent)
            with pytest.raises(ProviderError, match="cut 0"):
                await agent.prompt("hi")
            assert "cut 0" in str(agent.state.error)
            with pytest.raises(ProviderError, match="cut 1"):
                await agent.resume()
            with pytest.raises(ProviderError, match="cut 2"):
                await agent.prompt("hi", raise_errors=True)
            result = await agent.prompt("again", raise_errors=False)
            assert "cut 3" in str(result.error)
            assert (await agent.resume()).text == "ok"
            check_whole(heard)

    within(main())


def test_a_stream_that_raises_failures_tells_all_events_first(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make([ProviderError("cut"), ProviderError("cut")], checkpointer=cp, thread_id="t", max_retries=0)
            stream = agent.stream("hi", raise_errors=True)
            last: Event | None = None
            with pytest.raises(ProviderError, match="cut"):
                async for event in stream:
                    last = event
            assert isinstance(last, AgentEnd)
            with pytest.raises(ProviderError, match="cut"):
                _ = stream.result
            async with agent.stream() as quiet:
                assert isinstance([event async for event in quiet][-1], AgentEnd)
            assert "cut" in str(quiet.result.error)

    within(main())


def test_run_sync_raises_failures_too_and_only_failures(database: Database) -> None:
    @tool(approval=True)
    def pay() -> str:
        return "paid"

    with database.checkpointer() as cp:
        script: list[Any] = [ProviderError("cut"), [ToolCall("c1", "pay")]]
        agent = make(script, checkpointer=cp, thread_id="t", tools=[pay], max_retries=0)
        with pytest.raises(ProviderError, match="cut"):
            agent.run_sync("hi", raise_errors=True)
        assert agent.run_sync(raise_errors=True).stop_reason == "waiting"
    limited = make([[ToolCall("c1", "pay")]], limits=Limits(turns=1), raise_errors=True)
    assert limited.run_sync("hi").stop_reason == "turn_limit"


def test_raise_errors_is_true_or_false() -> None:
    with pytest.raises(InputError, match="raise_errors must be True or False, got 'yes'"):
        make([], raise_errors="yes")
    with pytest.raises(InputError, match="raise_errors must be True or False, got 1"):
        make([]).stream("hi", raise_errors=1)  # type: ignore[call-overload]


def test_the_tools_of_a_reply_that_failed_do_not_run(database: Database) -> None:
    """The reply is not whole: perhaps the next words would have been another call, or a warning."""
    ran: list[int] = []

    @tool
    def pay() -> str:
        ran.append(1)
        return "paid"

    async def main() -> None:
        async with database.checkpointer() as cp:
            script = Acted(saying("I will", then=NetworkFailed("cut"), calls=[ToolCall("c1", "pay")]))
            agent = make(script, tools=[pay], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            result = await agent.prompt("go")
            check_whole(heard)
            assert result.stop_reason == "error"
            assert ran == []
            await can_go_on(cp)

    within(main())


def test_a_passing_failure_is_tried_again_and_told_once() -> None:
    async def main() -> None:
        agent = make([RateLimited("slow down", retry_after=0), NetworkFailed("gone", retry_after=0), "ok"])
        heard = Heard(agent)
        assert (await agent.prompt("hi")).text == "ok"
        assert heard.story == run_story(["turn_start", *USER, *REPLY, "turn_end"])
        assert agent.state.error is None
        assert [m.role for m in agent.state.messages] == ["user", "assistant"]

    within(main())


def test_a_passing_failure_is_not_tried_again_for_ever() -> None:
    async def main() -> None:
        provider = ScriptedProvider([RateLimited("slow down", retry_after=0)] * 3)
        result = await make(provider, max_retries=2).prompt("hi")
        assert result.stop_reason == "error"
        assert len(provider.requests) == 3

    within(main())


def test_a_failure_that_will_not_pass_is_not_tried_again() -> None:
    async def main() -> None:
        provider = ScriptedProvider([ProviderError("never"), "unused"])
        assert (await make(provider).prompt("hi")).stop_reason == "error"
        assert len(provider.requests) == 1

    within(main())


def test_a_failure_after_something_was_shown_is_not_tried_again() -> None:
    async def main() -> None:
        provider = Acted(saying("Hel", then=NetworkFailed("cut", retry_after=0)), saying("never"))
        assert (await make(provider).prompt("hi")).text == "Hel"
        assert len(provider.requests) == 1

    within(main())


def test_a_stream_that_just_ends_is_a_failure() -> None:
    async def scene(request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        if not request.messages:
            yield StreamStart()

    async def main() -> None:
        agent = make(Acted(scene), max_retries=0)
        heard = Heard(agent)
        result = await agent.prompt("hi")
        assert result.stop_reason == "error"
        assert "ended before" in str(result.error)
        check_whole(heard)

    within(main())


# --- the program fails ------------------------------------------------------------------------------------------------


def test_a_call_that_nobody_scripted_is_raised_and_the_thread_can_go_on(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make([], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            with pytest.raises(ScriptError, match="not scripted"):
                await agent.prompt("hi")
            check_whole(heard)
            assert isinstance(agent.state.error, ScriptError)
            assert not agent.state.is_streaming
            end = heard.of(AgentEnd)[0]
            assert end.error is not None
            assert (end.stop_reason, end.error.kind) == ("error", "ScriptError")
            assert await can_go_on(cp) == ["user: hi", "user: again"]

    within(main())


class Outrage(BaseException):
    """As pytest.fail() raises, and some libraries: no Exception, and no wish of the program to end either."""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_tool_that_raises_beyond_exceptions_has_its_end_told_too(database: Database, kind: str) -> None:
    def sync() -> None:
        raise Outrage("mine")

    async def later() -> None:
        raise Outrage("mine")

    async def main() -> None:
        async with database.checkpointer() as cp:
            made = tool(name="t")(sync) if kind == "sync" else tool(name="t")(later)
            agent = make([[ToolCall("c1", "t")], "went on"], tools=[made], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            with contextlib.suppress(Outrage):  # raised or shown to the model: both are answers
                await agent.prompt("go")
            check_whole(heard)
            assert not agent.state.is_streaming
            await can_go_on(cp)

    within(main())


def test_a_tool_whose_own_work_was_cancelled_did_not_abort_the_run() -> None:
    async def main() -> None:
        @tool
        async def look() -> None:
            inner = asyncio.create_task(asyncio.Event().wait())
            inner.cancel()
            await inner

        agent = make([[ToolCall("c1", "look")], "ok"], tools=[look])
        heard = Heard(agent)
        result = await agent.prompt("go")
        check_whole(heard)
        assert result.stop_reason == "stop"
        shown = next(m for m in result.messages if isinstance(m, ToolResultMessage))
        assert shown.is_error
        assert "run was aborted" not in shown.text
        assert "Cancelled" in shown.text

    within(main())


def test_a_provider_whose_own_work_was_cancelled_has_failed_and_was_not_aborted() -> None:
    async def main() -> None:
        async def scene(request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
            inner = asyncio.create_task(asyncio.Event().wait())
            inner.cancel()
            await inner
            yield StreamStart()

        agent = make(Acted(scene))
        heard = Heard(agent)
        result = await agent.prompt("hi")
        check_whole(heard)
        assert result.stop_reason == "error"
        assert result.error is not None

    within(main())


# --- the database fails -----------------------------------------------------------------------------------------------


def test_a_full_disk_at_the_prompt_is_raised_and_nothing_is_half_written(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["a", "b"], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            await agent.prompt("first")
            database.fill(cp.store)
            with pytest.raises(StoreFull, match=re.escape(cp.name)):
                await agent.prompt(BIG)
            check_whole(heard)
            assert await history(cp, "t") == ["user: first", "assistant: a"]
            database.free(cp.store)
            assert (await agent.prompt("second")).text == "b"
            assert await history(cp, "t") == ["user: first", "assistant: a", "user: second", "assistant: b"]

    within(main())


def test_a_full_disk_at_the_reply_is_raised_and_the_reply_is_told_as_not_stored(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:

            def answer(request: Request) -> str:
                database.fill(cp.store)
                return BIG

            agent = make([answer, "better"], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            with pytest.raises(StoreFull):
                await agent.prompt("hi")
            check_whole(heard)
            assert [event.stored for event in heard.of(MessageEnd)] == [True, False]
            assert isinstance(agent.state.error, StoreFull)
            assert await history(cp, "t") == ["user: hi"]
            database.free(cp.store)
            assert (await agent.prompt("again")).text == "better"  # behind the reply, which is stored first
            assert await history(cp, "t") == ["user: hi", f"assistant: {BIG}", "user: again", "assistant: better"]
            assert [m.text for m in agent.state.messages] == ["hi", BIG, "again", "better"]

    within(main())


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_full_disk_at_a_result_is_raised_and_what_was_stored_stays(database: Database, mode: str) -> None:
    ran: list[str] = []

    async def main() -> None:
        async with database.checkpointer() as cp:
            small_is_stored = asyncio.Event()

            @tool
            async def small() -> str:
                ran.append("small")
                return "small"

            @tool
            async def big() -> str:
                ran.append("big")
                await small_is_stored.wait()
                database.fill(cp.store)
                return BIG

            calls = [ToolCall("c1", "small"), ToolCall("c2", "big")]
            provider = ScriptedProvider([calls, "better"])
            agent = make(provider, tools=[small, big], checkpointer=cp, thread_id="t", tool_mode=mode)
            agent.subscribe(lambda event: small_is_stored.set() if isinstance(event, ToolExecutionEnd) else None)
            heard = Heard(agent)
            with pytest.raises(StoreFull):
                await agent.prompt("go")
            check_whole(heard)
            assert await history(cp, "t") == ["user: go", "assistant: ", "tool_result: small"]
            database.free(cp.store)
            assert (await agent.resume()).text == "better"
            assert sent(provider)[:3] == ["user: go", "assistant: ", "tool_result: small"]
            assert flaws(provider.requests[-1].messages) == []
            assert ran == ["small", "big"]

    within(main())


def test_a_result_that_cannot_be_written_is_not_told_as_committed(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:

            @tool
            async def big() -> str:
                database.fill(cp.store)
                return BIG

            agent = make([[ToolCall("c1", "big")]], tools=[big], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            with pytest.raises(StoreFull):
                await agent.prompt("go")
            end = heard.of(ToolExecutionEnd)[0]
            assert getattr(end, "stored", True) is False
            database.free(cp.store)
            await agent.load()  # stores what could not be stored

    within(main())


def test_closing_the_checkpointer_in_mid_run_is_raised_by_name_and_can_be_mended(database: Database) -> None:
    async def main() -> None:
        cp = database.checkpointer()
        await cp.open()

        async def answer(request: Request) -> str:
            await cp.close()
            return "lost"

        agent = make([answer, "kept"], checkpointer=cp, thread_id="t")
        heard = Heard(agent)
        with pytest.raises(StoreNotOpen, match="async with"):
            await agent.prompt("hi")
        check_whole(heard)
        assert [event.stored for event in heard.of(MessageEnd)] == [True, False]
        async with cp:
            assert (await agent.resume()).text == "kept"
            assert await history(cp, "t") == ["user: hi", "assistant: kept"]

    within(main())


def test_closing_the_checkpointer_under_a_tool_keeps_what_was_stored_and_can_be_mended(database: Database) -> None:
    async def main() -> None:
        cp = database.checkpointer()
        await cp.open()
        first_is_stored = asyncio.Event()

        @tool
        async def first() -> str:
            return "first"

        @tool
        async def second() -> str:
            await first_is_stored.wait()
            await cp.close()
            return "second"

        calls = [ToolCall("c1", "first"), ToolCall("c2", "second")]
        provider = ScriptedProvider([calls, "ok"])
        agent = make(provider, tools=[first, second], checkpointer=cp, thread_id="t")
        agent.subscribe(lambda event: first_is_stored.set() if isinstance(event, ToolExecutionEnd) else None)
        heard = Heard(agent)
        with pytest.raises(StoreNotOpen):
            await agent.prompt("go")
        check_whole(heard)
        async with cp:
            assert (await agent.prompt("again")).text == "ok"
            assert sent(provider) == [
                "user: go",
                "assistant: ",
                "tool_result: first",
                "tool_result: second",
                "user: again",
            ]
            assert [m.text for m in agent.state.messages] == [line.split(": ", 1)[1] for line in await history(cp, "t")]

    within(main())


def test_a_result_that_cannot_be_stored_does_not_lock_the_agent_out_of_its_thread(database: Database) -> None:
    async def main() -> None:
        first_is_stored = asyncio.Event()

        @tool
        async def first() -> str:
            return "first"

        @tool
        async def second() -> ToolResult:
            await first_is_stored.wait()
            return ToolResult("second", {"n": 10**5000})

        async with database.checkpointer() as cp:
            calls = [ToolCall("c1", "first"), ToolCall("c2", "second")]
            provider = ScriptedProvider([calls, "ok", "ok again"])
            agent = make(provider, tools=[first, second], checkpointer=cp, thread_id="t")
            agent.subscribe(lambda event: first_is_stored.set() if isinstance(event, ToolExecutionEnd) else None)
            heard = Heard(agent)
            with contextlib.suppress(ByssusError, ValueError):  # what happens afterwards is what counts
                await agent.prompt("go")
            check_whole(heard)
            assert (await agent.prompt("again")).stop_reason == "stop"
            assert "tool_result: first" in await history(cp, "t")
            assert flaws(provider.requests[-1].messages) == []

    within(main())


@pytest.mark.parametrize("way", ["steer", "follow_up"])
def test_what_waits_in_the_inbox_is_not_lost_when_it_cannot_be_stored(database: Database, way: str) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:

            def fill(event: Event) -> None:
                if event.type == "turn_end" and not agent.state.error:
                    database.fill(cp.store)

            provider = ScriptedProvider(["a", "b"])
            agent = make(provider, checkpointer=cp, thread_id="t")
            getattr(agent, way)("important " + BIG)
            stop = agent.subscribe(fill)
            with pytest.raises(StoreFull):
                await agent.prompt("hi")
            stop()
            database.free(cp.store)
            result = await agent.resume()
            assert result.text == "b"
            assert sent(provider)[-1] == "user: important " + BIG

    within(main())


# --- somebody else writes ---------------------------------------------------------------------------------------------


def test_another_writer_in_mid_stream_finds_the_thread_busy_and_the_run_goes_on_unharmed(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp, database.checkpointer() as other:
            stranger = make(["never"], checkpointer=other, thread_id="t")

            async def answer(request: Request) -> str:
                for write in (
                    other.append("t", UserMessage("me too")),
                    other.save_extra("t", {"mine": 1}),
                    stranger.prompt("me too"),
                    stranger.resume(),
                ):
                    with pytest.raises(ThreadBusy, match=r"'t' is being driven by .*steer"):
                        await write
                return "in time"

            provider = ScriptedProvider([answer, "both"])
            agent = make(provider, checkpointer=cp, thread_id="t")
            agent.state.extra["kept"] = 1
            heard = Heard(agent)
            assert (await agent.prompt("hi")).text == "in time"
            check_whole(heard)
            assert [event.stored for event in heard.of(MessageEnd)] == [True, True]
            assert await history(cp, "t") == ["user: hi", "assistant: in time"]
            await other.append("t", UserMessage("now me"))
            assert (await agent.resume()).text == "both"
            assert sent(provider) == ["user: hi", "assistant: in time", "user: now me"]
            thread = await cp.load("t")
            assert thread is not None
            assert thread.extra == {"kept": 1}

    within(main())


def test_another_writer_under_running_tools_finds_the_thread_busy_and_costs_no_result(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp, database.checkpointer() as other:
            refused = asyncio.Event()

            @tool
            async def first() -> str:
                with pytest.raises(ThreadBusy):
                    await other.append("t", UserMessage("me too"))
                refused.set()
                return "first"

            @tool
            async def second() -> str:
                await refused.wait()
                return "second"

            calls = [ToolCall("c1", "first"), ToolCall("c2", "second")]
            provider = ScriptedProvider([calls, "ok"])
            agent = make(provider, tools=[first, second], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            assert (await agent.prompt("go")).text == "ok"
            check_whole(heard)
            lines = ["user: go", "assistant: ", "tool_result: first", "tool_result: second"]
            assert sent(provider) == lines
            assert await history(cp, "t") == [*lines, "assistant: ok"]

    within(main())


def test_another_writer_that_waits_comes_behind_the_run(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp, database.checkpointer() as other:
            waiting: list[asyncio.Task[None]] = []

            async def answer(request: Request) -> list[ToolCall]:
                waiting.append(asyncio.create_task(other.append("t", UserMessage("me too"), wait=20)))
                return [ToolCall("c1", "look")]

            @tool
            async def look() -> str:
                with pytest.raises(ThreadBusy):  # and so has the one that waits, by now
                    await other.append("t", UserMessage("at once"))
                assert not waiting[0].done()
                return "seen"

            agent = make([answer, "ok"], tools=[look], checkpointer=cp, thread_id="t")
            assert (await agent.prompt("go")).text == "ok"
            await waiting[0]
            lines = ["user: go", "assistant: ", "tool_result: seen", "assistant: ok", "user: me too"]
            assert await history(cp, "t") == lines

    within(main())
