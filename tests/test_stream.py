"""agent.stream(): the events of one run for a consumer who sets the pace, and to whom the run belongs."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from byssus import Agent, Model, ToolCall, ToolContext, tool
from byssus.errors import (
    AgentBusy,
    AuthenticationFailed,
    HookFailed,
    InputError,
    NothingToResume,
    Overloaded,
    StoreFull,
)
from byssus.events import (
    AgentEnd,
    AgentStart,
    Event,
    MessageEnd,
    MessageUpdate,
    StreamDone,
    StreamEvent,
    StreamStart,
    TextDelta,
    TextEnd,
    TextStart,
    ToolExecutionUpdate,
)
from byssus.messages import UserMessage
from byssus.providers.base import Request
from byssus.providers.model_call import _Watch
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from byssus.stream import Backlog, EventStream
from byssus.values.results import RunResult
from tests.support.agents import (
    REPLY,
    RESULT,
    USER,
    Acted,
    Hanging,
    Heard,
    Stubborn,
    can_go_on,
    check_whole,
    executed,
    history,
    is_stored,
    make,
    run_story,
    saying,
    sent,
    within,
)
from tests.support.databases import Database

SIZE = 1_000  # events that wait for a consumer before the run does
LONG = 3600.0  # seconds that no test has


async def taken(stream: EventStream[Any]) -> list[Event]:
    return [event async for event in stream]


def deltas(events: list[Event]) -> list[str]:
    return [
        event.stream_event.delta
        for event in events
        if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta)
    ]


def other_than_updates(events: list[Event]) -> list[str]:
    return [event.type for event in events if not isinstance(event, MessageUpdate | ToolExecutionUpdate)]


async def until_delta(stream: EventStream[Any]) -> None:
    """Take events until a part of the reply has come."""
    async for event in stream:
        if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta):
            return
    raise AssertionError("the stream ended without a delta")


@tool
def look() -> str:
    return "seen"


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever asyncio has to complain about, also of tasks that nobody keeps, is a failure."""
    yield
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# --- what it gives ----------------------------------------------------------------------------------------------------


def test_a_stream_gives_what_a_listener_hears_and_then_the_result() -> None:
    async def main() -> None:
        agent = make([[ToolCall("c1", "look")], "hello there"], tools=[look])
        heard = Heard(agent)
        stream = agent.stream("hi")
        events = await taken(stream)
        assert events == heard
        assert heard.story == run_story(
            ["turn_start", *USER, *REPLY, *executed("c1"), *RESULT, "turn_end"], ["turn_start", *REPLY, "turn_end"]
        )
        assert (stream.result.text, stream.result.stop_reason) == ("hello there", "stop")
        assert stream.result.messages == agent.state.messages

    within(main())


def test_a_message_end_of_a_stream_means_that_the_message_is_on_disk(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make([[ToolCall("c1", "look")], "ok"], tools=[look], checkpointer=cp, thread_id="t")
            ends = [event async for event in agent.stream("hi") if isinstance(event, MessageEnd)]
            assert len(ends) == 4
            assert all(is_stored(cp, event.message) for event in ends)

    within(main())


def test_a_stream_takes_whatever_a_prompt_takes() -> None:
    async def main() -> None:
        agent = make(["ok"])
        stream = agent.stream(["a", UserMessage("b")])
        await taken(stream)
        assert [message.text for message in stream.result.messages] == ["a", "b", "ok"]

    within(main())


def test_a_stream_without_a_message_resumes(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await make([OSError("no network")], checkpointer=cp, thread_id="t").prompt("hi")
            stream = make(["ok"], checkpointer=cp, thread_id="t").stream()
            check_whole(await taken(stream))
            assert stream.result.text == "ok"
            assert await history(cp, "t") == ["user: hi", "assistant: ", "assistant: ok"]

    within(main())


class City(msgspec.Struct):
    name: str


def test_a_stream_brings_structured_output() -> None:
    async def main() -> None:
        agent = make(["no idea", '{"name": "Oslo"}', "again", '{"name": "Rome"}'], max_retries=0)
        stream = agent.stream("where?", output=City)
        check_whole(await taken(stream))
        assert stream.result.output == City("Oslo")
        agent.follow_up("and then?")
        stream = agent.stream(output=City)
        await taken(stream)
        assert stream.result.output == City("Rome")

    within(main())


def test_a_stream_tells_of_the_model_that_answered_after_others_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("byssus.providers.model_call._pause", lambda attempt, error: 0.0)

    async def main() -> None:
        script: list[Step] = [Overloaded("busy"), Overloaded("busy"), AuthenticationFailed("no"), "from the third"]
        agent = make(script, model=[Model("a"), Model("b"), Model("c")], max_retries=1)
        heard = Heard(agent)
        stream = agent.stream("hi")
        events = await taken(stream)
        assert events == heard
        check_whole(events)
        assert deltas(events) == ["from ", "the ", "third"]
        assert stream.result.text == "from the third"

    within(main())


def test_a_model_that_fails_is_a_result_of_the_stream_and_does_not_raise() -> None:
    async def main() -> None:
        error = AuthenticationFailed("no")
        stream = make([error]).stream("hi")
        check_whole(await taken(stream))
        assert stream.result.error is error

    within(main())


def test_whoever_has_seen_agent_end_finds_the_result_and_may_prompt_again() -> None:
    async def main() -> None:
        agent = make(["one", "two"])
        async for event in (stream := agent.stream("hi")):
            if isinstance(event, AgentEnd):
                assert stream.result.text == "one"
                assert not agent.state.is_streaming
                assert (await agent.prompt("again")).text == "two"

    within(main())


def test_streams_of_several_agents_run_side_by_side() -> None:
    async def main() -> None:
        streams = [make([f"reply {number}"]).stream("hi") for number in range(10)]
        for events in await asyncio.gather(*map(taken, streams)):
            check_whole(events)
        assert [stream.result.text for stream in streams] == [f"reply {number}" for number in range(10)]

    within(main())


def test_an_agent_streams_one_run_after_the_other() -> None:
    async def main() -> None:
        agent = make(["one", "two"])
        first, second = agent.stream("a"), agent.stream("b")
        assert deltas(await taken(first)) == ["one"]
        assert deltas(await taken(second)) == ["two"]
        assert first.result.run_id != second.result.run_id

    within(main())


# --- what it raises ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", ["", "  ", [], 5, [None]])
def test_bad_input_is_raised_out_of_the_iteration_and_nothing_is_stored(database: Database, message: Any) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make([], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            stream = agent.stream(message)
            with pytest.raises(InputError, match=r"prompt\(\)"):
                await anext(stream)
            assert await taken(stream) == []
            assert heard == []
            assert await cp.load("t") is None
            assert not agent.state.is_streaming

    within(main())


def test_an_output_that_is_no_type_is_raised_out_of_the_iteration() -> None:
    output: Any = 5
    with pytest.raises(InputError):
        within(taken(make([]).stream("hi", output=output)))


def test_a_stream_with_nothing_to_resume_says_so() -> None:
    with pytest.raises(NothingToResume):
        within(taken(make([]).stream()))


def test_a_stream_during_a_run_is_refused_and_hears_nothing_of_it() -> None:
    async def main() -> None:
        hanging = Hanging("Hel")
        agent = make(Acted(hanging))
        first = agent.stream("hi")
        await until_delta(first)
        second = agent.stream("at once")
        with pytest.raises(AgentBusy, match="wait_for_idle"):
            await anext(second)
        await second.aclose()
        assert agent.state.is_streaming
        await first.aclose()
        assert first.result.stop_reason == "aborted"

    within(main())


def test_a_hook_that_fails_is_raised_after_all_events() -> None:
    class Failing:
        def transform_context(self, messages: list[Any]) -> list[Any]:
            raise ValueError("no")

    async def main() -> None:
        agent = make([], middleware=[Failing()])
        heard, events = Heard(agent), list[Event]()
        stream = agent.stream("hi")
        with pytest.raises(HookFailed):
            async for event in stream:
                events.append(event)
        assert events == heard
        check_whole(events)
        assert await taken(stream) == []
        with pytest.raises(HookFailed):
            _ = stream.result

    within(main())


def test_a_full_disk_is_raised_after_all_events(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["a" * 100_000, "ok"], checkpointer=cp, thread_id="t")
            events: list[Event] = []
            with pytest.raises(StoreFull):
                async for event in agent.stream("hi"):
                    events.append(event)
                    if isinstance(event, MessageEnd):
                        database.fill(cp.store)
            check_whole(events)
            assert isinstance(events[-1], AgentEnd)
            database.free(cp.store)
            assert (await agent.prompt("again")).text == "ok"

    within(main())


def test_the_result_of_a_stream_that_has_not_ended_is_refused() -> None:
    async def main() -> None:
        stream = make(["ok"]).stream("hi")
        with pytest.raises(InputError, match="no result"):
            _ = stream.result
        await anext(stream)
        with pytest.raises(InputError, match="no result"):
            _ = stream.result
        await taken(stream)
        assert stream.result.text == "ok"

    within(main())


def test_two_tasks_that_take_from_one_stream_are_told_so() -> None:
    async def main() -> None:
        hanging = Hanging("Hel")
        stream = make(Acted(hanging)).stream("hi")
        await until_delta(stream)
        waiting = asyncio.create_task(taken(stream))
        await hanging.begun.wait()
        await asyncio.sleep(0)
        with pytest.raises(InputError, match="two tasks"):
            await anext(stream)
        await stream.aclose()
        assert deltas(await waiting) == []

    within(main())


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_stream_that_is_never_iterated_starts_nothing_and_warns_of_nothing(quiet: None) -> None:
    async def main() -> None:
        provider = ScriptedProvider()
        agent = make(provider)
        agent.stream("hi")
        async with agent.stream("hi"):
            pass
        await agent.stream("hi").aclose()
        assert not agent.state.is_streaming
        assert provider.requests == []

    within(main())
    make([]).stream("hi")  # and needs no event loop for it


def test_breaking_out_ends_the_run_in_good_order_and_waits_for_it(database: Database) -> None:
    async def main() -> None:
        hanging = Hanging("Hel")
        async with database.checkpointer() as cp:
            agent = make(Acted(hanging), checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            async with agent.stream("hi") as events:
                await until_delta(events)
            assert not agent.state.is_streaming
            assert hanging.closed
            check_whole(heard)
            assert (events.result.stop_reason, events.result.text) == ("aborted", "Hel")
            assert await taken(events) == []
            assert await can_go_on(cp) == ["user: hi", "assistant: Hel", "user: again"]

    within(main())


def test_closing_is_for_everybody_at_any_time() -> None:
    async def main() -> None:
        agent = make(["one", "two"])
        stream = agent.stream("hi")
        await taken(stream)
        await stream.aclose()
        await stream.aclose()
        assert stream.result.stop_reason == "stop"
        closed = agent.stream("hi")
        await closed.aclose()
        assert await taken(closed) == []
        assert (await agent.prompt("hi")).text == "two"

    within(main())


def test_closing_after_the_last_reply_does_not_make_it_an_abort() -> None:
    async def main() -> None:
        agent = make(["one"])
        async with agent.stream("hi") as events:
            async for event in events:
                if isinstance(event, AgentEnd):
                    break
        assert events.result.stop_reason == "stop"

    within(main())


def test_a_failure_of_the_run_that_nobody_took_is_raised_when_the_stream_is_closed() -> None:
    class Failing:
        def on_run_end(self, result: RunResult[Any]) -> None:
            raise ValueError("no")

    async def main() -> None:
        agent = make(Acted(Hanging("Hel"), Hanging("Hel")), middleware=[Failing()])
        with pytest.raises(HookFailed):
            async with agent.stream("hi") as events:
                await until_delta(events)
        with pytest.raises(KeyError, match="mine"):  # what the body raised comes first
            async with agent.stream("hi") as events:
                await until_delta(events)
                raise KeyError("mine")

    within(main())


@pytest.mark.parametrize("times", [1, 3])
def test_cancelling_the_consumer_ends_the_run_in_good_order_and_waits_for_it(database: Database, times: int) -> None:
    async def main() -> None:
        stubborn = Stubborn()
        async with database.checkpointer() as cp:
            agent = make(Acted(stubborn), checkpointer=cp, thread_id="t", abort_grace=0.05)
            heard = Heard(agent)
            consuming = asyncio.create_task(taken(agent.stream("hi")))
            await stubborn.begun.wait()
            for _ in range(times):
                consuming.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await consuming
            was_streaming = agent.state.is_streaming
            stubborn.release.set()
            await stubborn.over.wait()
            assert not was_streaming
            assert consuming.cancelled()
            check_whole(heard)
            assert await can_go_on(cp) == ["user: hi", "assistant: Hel", "user: again"]

    within(main())


def test_cancelling_the_consumer_in_its_own_work_ends_the_run_too() -> None:
    async def main() -> None:
        busy, agent = asyncio.Event(), make(Acted(Hanging("Hel")))
        heard = Heard(agent)

        async def consume() -> None:
            async with agent.stream("hi") as events:
                await until_delta(events)
                busy.set()
                await asyncio.Event().wait()

        consuming = asyncio.create_task(consume())
        await busy.wait()
        consuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consuming
        assert not agent.state.is_streaming
        check_whole(heard)

    within(main())


def test_cancelling_the_consumer_before_the_run_has_begun_leaves_nothing(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["ok"], checkpointer=cp, thread_id="t")
            loading = asyncio.create_task(agent.load())
            await asyncio.sleep(0)
            stream = agent.stream("hi")
            consuming = asyncio.create_task(taken(stream))
            await asyncio.sleep(0)
            consuming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consuming
            await loading
            assert await taken(stream) == []
            assert await cp.load("t") is None
            assert (await agent.prompt("hi")).text == "ok"

    within(main())


def test_a_timeout_around_a_stream_is_a_timeout() -> None:
    async def main() -> None:
        agent = make(Acted(Hanging("Hel")))
        heard = Heard(agent)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await taken(agent.stream("hi"))
        assert not agent.state.is_streaming
        check_whole(heard)

    within(main())


def test_an_exception_of_the_consumer_is_its_own_and_ends_the_run() -> None:
    async def main() -> None:
        agent = make(Acted(Hanging("Hel")))
        heard = Heard(agent)
        with pytest.raises(KeyError, match="mine"):
            async with agent.stream("hi") as events:
                async for event in events:
                    if isinstance(event, MessageUpdate):
                        raise KeyError("mine")
        assert not agent.state.is_streaming
        check_whole(heard)

    within(main())


@pytest.mark.parametrize("how", ["break", "exception", "cancellation"])
def test_a_stream_that_is_merely_dropped_aborts_its_run(database: Database, how: str, quiet: None) -> None:
    async def consume(agent: Agent) -> None:
        async for event in agent.stream("hi"):
            if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta):
                if how == "break":
                    break
                raise KeyError("mine") if how == "exception" else asyncio.CancelledError

    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(Acted(Hanging("Hel")), checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            await asyncio.gather(consume(agent), return_exceptions=True)
            await agent.wait_for_idle()
            check_whole(heard)
            assert heard.of(AgentEnd)[0].stop_reason == "aborted"
            assert await can_go_on(cp) == ["user: hi", "assistant: Hel", "user: again"]

    within(main())


def test_a_stream_that_is_dropped_in_another_thread_aborts_its_run(quiet: None) -> None:
    async def main() -> None:
        agent = make(Acted(Hanging("Hel")))
        heard, streams = Heard(agent), [agent.stream("hi")]
        await until_delta(streams[0])
        threading.Thread(target=streams.clear).start()
        while agent.state.is_streaming:
            await asyncio.sleep(0)
        check_whole(heard)

    within(main())


def test_a_failure_of_a_run_whose_stream_was_dropped_is_kept_by_the_agent(quiet: None) -> None:
    class Failing:
        def on_run_end(self, result: RunResult[Any]) -> None:
            raise ValueError("no")

    async def main() -> None:
        agent = make(Acted(Hanging("Hel")), middleware=[Failing()])
        await until_delta(agent.stream("hi"))
        await agent.wait_for_idle()
        assert isinstance(agent.state.error, HookFailed)

    within(main())


@pytest.mark.parametrize("kept", [True, False])
def test_a_loop_that_shuts_down_under_a_stream_ends_its_run_in_good_order(
    database: Database, kept: bool, quiet: None
) -> None:
    cp = database.checkpointer()
    streams: list[EventStream[Any]] = []
    heards: list[Heard] = []

    async def main() -> None:
        await cp.open()
        agent = make(Acted(Hanging("Hel")), checkpointer=cp, thread_id="t")
        heards.append(Heard(agent))
        stream = agent.stream("hi")
        await until_delta(stream)
        if kept:
            streams.append(stream)

    within(main())
    check_whole(heards[0])

    async def afterwards() -> None:
        async with cp:
            for stream in streams:
                assert isinstance((await taken(stream))[-1], AgentEnd)
                await stream.aclose()
            await can_go_on(cp)

    within(afterwards())


def test_a_stream_whose_loop_was_closed_is_dropped_without_a_word() -> None:
    """A loop that is merely closed takes its tasks with it, and asyncio says so; the stream adds nothing to that."""

    async def run(backlog: Backlog[Any]) -> RunResult[Any]:
        backlog.put(AgentStart("r"), Signal())
        await asyncio.Event().wait()
        raise AssertionError

    loop = asyncio.new_event_loop()
    stream = EventStream(run, LONG)
    loop.run_until_complete(anext(stream))
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    del stream, task
    gc.collect()  # an exception in there would be a warning, and a warning is an error


# --- from inside ------------------------------------------------------------------------------------------------------


def test_an_abort_inside_the_loop_comes_to_the_end_with_all_events() -> None:
    async def main() -> None:
        agent = make(Acted(Hanging("Hel")))
        events: list[Event] = []
        async for event in (stream := agent.stream("hi")):
            events.append(event)
            if isinstance(event, MessageUpdate):
                agent.abort()
        check_whole(events)
        assert stream.result.stop_reason == "aborted"

    within(main())


def test_steering_inside_the_loop_is_said_before_the_next_turn() -> None:
    async def main() -> None:
        provider = ScriptedProvider([[ToolCall("c1", "look")], "ok", "bye"])
        agent = make(provider, tools=[look])
        async for event in agent.stream("hi"):
            if event.type == "tool_execution_start":
                agent.steer("left")
                agent.follow_up("and then?")
        assert sent(provider, 1)[-1] == "user: left"
        assert sent(provider, 2)[-1] == "user: and then?"

    within(main())


def test_a_stream_inside_the_agents_own_tool_is_refused() -> None:
    async def main() -> None:
        refused: list[AgentBusy] = []

        @tool
        async def recurse() -> str:
            try:
                await anext(agent.stream("deeper"))
            except AgentBusy as error:
                refused.append(error)
            return "done"

        agent = make([[ToolCall("c1", "recurse")], "ok"], tools=[recurse])
        check_whole(await taken(agent.stream("hi")))
        assert len(refused) == 1

    within(main())


def test_a_tool_that_closes_the_stream_of_its_own_run_ends_it() -> None:
    async def main() -> None:
        @tool
        async def hang_up() -> None:
            await stream.aclose()

        agent = make([[ToolCall("c1", "hang_up")]], tools=[hang_up], abort_grace=0.01)
        heard = Heard(agent)
        stream = agent.stream("hi")
        await taken(stream)
        check_whole(heard)
        assert stream.result.stop_reason == "aborted"

    within(main())


def test_a_stream_of_another_agent_inside_a_tool_tells_the_tool_alone() -> None:
    async def main() -> None:
        inner = make(["from inside"])

        @tool
        async def ask() -> str:
            return "".join(deltas(await taken(inner.stream("deeper"))))

        agent = make([[ToolCall("c1", "ask")], "ok"], tools=[ask])
        stream = agent.stream("hi")
        assert deltas(await taken(stream)) == ["ok"]
        assert stream.result.messages[2].text == "from inside"

    within(main())


# --- the pace ---------------------------------------------------------------------------------------------------------


class Chatty:
    """A scene that says a number of words without a pause; `said` counts them."""

    def __init__(self, *parts: int) -> None:
        self._parts = parts
        self.said = 0
        self.rests = [asyncio.Event() for _ in parts]  # set when a part was said
        self.goes_on = asyncio.Event()

    async def __call__(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        yield TextStart(0)
        for words, rest in zip(self._parts, self.rests, strict=True):
            for _ in range(words):
                self.said += 1
                yield TextDelta(0, f"{self.said} ")
            rest.set()
            if rest is not self.rests[-1]:
                await self.goes_on.wait()
        yield TextEnd(0)
        yield StreamDone()

    async def stops(self) -> None:
        """Wait until it says no more for as long as it would need to say everything."""
        before = -1
        while self.said > before:
            before = self.said
            for _ in range(100):
                await asyncio.sleep(0)


def test_a_slow_consumer_slows_the_model_and_misses_nothing() -> None:
    async def main() -> None:
        chatty, waiting, events = Chatty(5_000), list[int](), list[Event]()
        async for event in make(Acted(chatty), listener_timeout=LONG).stream("hi"):
            events.append(event)
            if len(events) % 100 == 0:
                await chatty.stops()
                waiting.append(chatty.said - len(deltas(events)))
        check_whole(events)
        assert deltas(events) == [f"{number} " for number in range(1, 5_001)]
        assert SIZE - 20 < max(waiting) <= SIZE

    within(main())


def test_a_fast_consumer_hears_as_it_is_said() -> None:
    async def main() -> None:
        chatty = Chatty(1, 1)
        stream = make(Acted(chatty)).stream("hi")
        await until_delta(stream)
        assert chatty.said == 1
        chatty.goes_on.set()
        assert deltas(await taken(stream)) == ["2 "]

    within(main())


def test_a_consumer_that_takes_nothing_is_not_waited_for_and_misses_updates_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        agent = make([" ".join(["word"] * 5_000), "again"], listener_timeout=0.01)
        heard = Heard(agent)
        stream = agent.stream("hi")
        events = [await anext(stream)]
        await agent.wait_for_idle()
        events += await taken(stream)
        check_whole(events)
        assert other_than_updates(events) == other_than_updates(list(heard))
        assert SIZE - 20 < len(deltas(events)) < SIZE
        assert (await agent.prompt("hi")).text == "again"

    with caplog.at_level(logging.WARNING, "byssus"):
        within(main())
    assert "missed" in caplog.text


def test_a_consumer_that_has_caught_up_is_waited_for_again() -> None:
    async def main() -> None:
        chatty = Chatty(3_000, 3_000)
        stream = make(Acted(chatty), listener_timeout=0.01).stream("hi")
        events = [await anext(stream)]
        await chatty.rests[0].wait()  # the run went on without it
        stream._backlog._patience = LONG
        while len(events) < SIZE:
            events.append(await anext(stream))
        chatty.goes_on.set()
        async for event in stream:
            events.append(event)
            if len(events) % 500 == 0:
                await chatty.stops()
        check_whole(events)
        assert deltas(events)[-3_000:] == [f"{number} " for number in range(3_001, 6_001)]

    within(main())


def test_the_time_in_which_the_consumer_is_waited_for_is_no_silence_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        looks, looked_often = 0, asyncio.Event()

        def look(watch: _Watch) -> None:
            nonlocal looks
            looks += 1
            if looks == 5:
                looked_often.set()
            before(watch)

        before = _Watch._look
        monkeypatch.setattr(_Watch, "_look", look)
        agent = make(Acted(Chatty(2_000)), idle_timeout=0.02, listener_timeout=LONG)
        stream = agent.stream("hi")
        await anext(stream)
        await looked_often.wait()
        await taken(stream)
        assert (stream.result.stop_reason, stream.result.error) == ("stop", None)

    within(main())


def test_a_model_that_falls_silent_after_the_consumer_was_waited_for_has_stalled() -> None:
    async def main() -> None:
        before = len(["turn_start", "user", "user", "assistant", "start", "text_start"])
        chatty = Chatty(SIZE - before, 1)  # its last word fills the backlog
        agent = make(Acted(chatty), idle_timeout=0.05, listener_timeout=LONG)
        stream = agent.stream("hi")
        await anext(stream)
        await chatty.stops()
        await taken(stream)
        assert stream.result.stop_reason == "error"
        assert "sent nothing" in str(stream.result.error)

    within(main())


def test_an_abort_ends_the_wait_for_a_consumer_at_once() -> None:
    async def main() -> None:
        chatty = Chatty(5_000)
        agent = make(Acted(chatty), listener_timeout=LONG)
        stream = agent.stream("hi")
        events = [await anext(stream)]
        await chatty.stops()
        agent.abort()
        await agent.wait_for_idle()
        events += await taken(stream)
        check_whole(events)
        assert stream.result.stop_reason == "aborted"
        assert stream.result.text == "".join(deltas(events))

    within(main())


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_full_stream_that_is_left_ends_its_run(how: str) -> None:
    async def main() -> None:
        chatty = Chatty(5_000)
        agent = make(Acted(chatty), listener_timeout=LONG)
        heard = Heard(agent)
        stream = agent.stream("hi")
        await anext(stream)
        await chatty.stops()
        if how == "closed":
            await stream.aclose()
        else:
            del stream
            await agent.wait_for_idle()
        assert not agent.state.is_streaming
        check_whole(heard)
        assert chatty.said < 2_000

    within(main())


def test_a_reply_that_is_whole_is_recorded_without_waiting_for_the_consumer(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            words = SIZE - len(["turn_start", "user", "user", "assistant", "start", "text_start", "text_end", "done"])
            agent = make(Acted(Chatty(words)), checkpointer=cp, thread_id="t", listener_timeout=LONG)
            stream = agent.stream("hi")
            await anext(stream)  # agent_start; the end of the reply is the event with which the backlog is full
            await agent.wait_for_idle()
            assert len(await history(cp, "t")) == 2
            assert len(deltas(await taken(stream))) == words

    within(main())


def test_the_progress_of_tools_does_not_fill_the_memory_and_their_ends_are_kept() -> None:
    @tool
    async def busy(ctx: ToolContext) -> str:
        for number in range(5_000):
            ctx.update(number)
        return "done"

    async def main() -> None:
        agent = make([[ToolCall("c1", "busy")], "ok"], tools=[busy])
        stream = agent.stream("hi")
        events = await taken(stream)
        check_whole(events)
        assert SIZE - 20 < len([event for event in events if isinstance(event, ToolExecutionUpdate)]) <= SIZE
        assert stream.result.text == "ok"

    within(main())


def test_the_failure_of_a_model_is_told_to_a_consumer_whose_backlog_is_full() -> None:
    @tool
    async def busy(ctx: ToolContext) -> None:
        for number in range(5_000):
            ctx.update(number)

    async def main() -> None:
        agent = make([[ToolCall("c1", "busy")], AuthenticationFailed("no")], tools=[busy], listener_timeout=LONG)
        stream = agent.stream("hi")
        await anext(stream)
        await agent.wait_for_idle()
        updates = [event.stream_event.type for event in await taken(stream) if isinstance(event, MessageUpdate)]
        assert updates[-1] == "error"

    within(main())


def test_a_consumer_that_waits_for_the_agent_does_not_wait_for_ever() -> None:
    async def main() -> None:
        agent = make(Acted(Chatty(3_000)), listener_timeout=0.01)
        async for _ in (stream := agent.stream("hi")):
            await agent.wait_for_idle()
        assert stream.result.stop_reason == "stop"

    within(main())


def test_listeners_hear_everything_whatever_the_pace_of_the_consumer() -> None:
    async def main() -> None:
        agent = make(Acted(Chatty(3_000), saying("ok")), listener_timeout=0.01)
        heard = Heard(agent)
        async with agent.stream("hi") as events:
            await anext(events)
            await agent.wait_for_idle()
        assert len(deltas(list(heard))) == 3_000
        check_whole(heard)

    within(main())
