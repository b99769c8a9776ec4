"""What a run tells, in which order; and the tools with which the other tests of the agent look at it."""

from __future__ import annotations

import asyncio

import pytest

from byssus import Agent, AssistantMessage, ToolCall, ToolContext, ToolResultMessage, UserMessage, tool
from byssus.errors import ProviderError, RateLimited
from byssus.events import (
    AgentEnd,
    AgentStart,
    Event,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    StreamDone,
    StreamStart,
    TextDelta,
    TextEnd,
    TextStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnEnd,
    TurnStart,
)
from byssus.store.database import Tx
from tests.support.agents import (
    REPLY,
    RESULT,
    USER,
    Acted,
    Heard,
    check_whole,
    executed,
    is_stored,
    make,
    run_story,
    saying,
    within,
)
from tests.support.databases import Database

# --- tools of the tests -----------------------------------------------------------------------------------------------


def bodies(tx: Tx) -> list[str]:
    return [body for (body,) in tx.all("SELECT body FROM messages ORDER BY branch, seq")]


# --- the order of events ----------------------------------------------------------------------------------------------


def told(agent: Agent, *prompts: str) -> Heard:
    heard = Heard(agent)

    async def main() -> None:
        for prompt in prompts:
            await agent.prompt(prompt)

    within(main())
    check_whole(heard)
    return heard


def test_a_run_without_tools() -> None:
    heard = told(make(["hello there"]), "hi")
    assert heard.story == run_story(["turn_start", *USER, *REPLY, "turn_end"])


def test_a_second_run_tells_the_same() -> None:
    one = run_story(["turn_start", *USER, *REPLY, "turn_end"])
    assert told(make(["a", "b"]), "hi", "again").story == one + one


def test_the_stream_of_a_text_reply() -> None:
    heard = told(make(["hello there"]), "hi")
    assert [event.stream_event for event in heard.of(MessageUpdate)] == [
        StreamStart(),
        TextStart(0),
        TextDelta(0, "hello "),
        TextDelta(0, "there"),
        TextEnd(0),
        StreamDone(),
    ]


def test_parallel_tools_end_as_they_finish_and_are_told_in_call_order() -> None:
    second_is_done = asyncio.Event()

    @tool
    async def slow() -> str:
        await second_is_done.wait()
        return "slow"

    @tool
    async def fast() -> str:
        return "fast"

    agent = make([[ToolCall("c1", "slow"), ToolCall("c2", "fast")], "done"], tools=[slow, fast])
    agent.subscribe(lambda event: second_is_done.set() if event.type == "tool_execution_end" else None)
    heard = told(agent, "go")
    assert heard.story == run_story(
        [
            "turn_start",
            *USER,
            *REPLY,
            "tool_execution_start c1",
            "tool_execution_start c2",
            "tool_execution_end c2",
            "tool_execution_end c1",
            *RESULT,
            *RESULT,
            "turn_end",
        ],
        ["turn_start", *REPLY, "turn_end"],
    )
    results = [event.message for event in heard.of(MessageEnd) if isinstance(event.message, ToolResultMessage)]
    assert [message.tool_call_id for message in results] == ["c1", "c2"]
    assert heard.of(TurnEnd)[0].tool_results == results


def test_sequential_tools_are_told_one_after_the_other() -> None:
    @tool
    def look() -> str:
        return "seen"

    agent = make([[ToolCall("c1", "look"), ToolCall("c2", "look")], "done"], tools=[look], tool_mode="sequential")
    assert told(agent, "go").story == run_story(
        ["turn_start", *USER, *REPLY, *executed("c1"), *RESULT, *executed("c2"), *RESULT, "turn_end"],
        ["turn_start", *REPLY, "turn_end"],
    )


def test_steering_comes_between_two_turns_one_message_at_a_time() -> None:
    agent = make(["one", "two", "three"])
    agent.steer("first")
    agent.steer("second")
    turn = ["turn_start", *REPLY, "turn_end"]
    assert told(agent, "go").story == run_story(["turn_start", *USER, *REPLY, "turn_end", *USER], turn + USER, turn)


def test_steering_mode_all_takes_everything_at_once() -> None:
    agent = make(["one", "two"], steering_mode="all")
    agent.steer("first")
    agent.steer("second")
    assert told(agent, "go").story == run_story(
        ["turn_start", *USER, *REPLY, "turn_end", *USER, *USER], ["turn_start", *REPLY, "turn_end"]
    )


def test_a_follow_up_comes_when_the_run_would_stop() -> None:
    @tool
    def look() -> str:
        return "seen"

    agent = make([[ToolCall("c1", "look")], "done", "followed"], tools=[look])
    agent.follow_up("more")
    assert told(agent, "go").story == run_story(
        ["turn_start", *USER, *REPLY, *executed("c1"), *RESULT, "turn_end"],
        ["turn_start", *REPLY, "turn_end", *USER],
        ["turn_start", *REPLY, "turn_end"],
    )


def test_several_prompts_at_once_are_told_in_order() -> None:
    agent = make(["ok"])
    heard = Heard(agent)
    within(agent.prompt(["a", UserMessage("b")]))
    assert heard.story == run_story(["turn_start", *USER, *USER, *REPLY, "turn_end"])


def test_an_unknown_tool_has_a_start_and_an_end_too() -> None:
    assert told(make([[ToolCall("c1", "nope")], "ok"]), "go").story == run_story(
        ["turn_start", *USER, *REPLY, *executed("c1"), *RESULT, "turn_end"], ["turn_start", *REPLY, "turn_end"]
    )


def test_two_calls_with_one_id_have_two_starts_and_two_ends() -> None:
    @tool
    def look() -> str:
        return "seen"

    heard = told(make([[ToolCall("c1", "look"), ToolCall("c1", "look")], "ok"], tools=[look]), "go")
    assert len(heard.of(ToolExecutionStart)) == len(heard.of(ToolExecutionEnd)) == 2


@pytest.mark.parametrize("error", [RateLimited("slow down"), RuntimeError("boom")])
def test_a_model_that_fails_before_it_speaks(error: Exception) -> None:
    heard = told(make([error], max_retries=0), "hi")
    assert heard.story == run_story(["turn_start", *USER, *REPLY, "turn_end"])
    assert [event.stream_event.type for event in heard.of(MessageUpdate)] == ["error"]


def test_a_model_that_fails_in_mid_stream() -> None:
    heard = told(make(Acted(saying("Hel", then=ProviderError("cut")))), "hi")
    assert heard.story == run_story(["turn_start", *USER, *REPLY, "turn_end"])
    kinds = [event.stream_event.type for event in heard.of(MessageUpdate)]
    assert kinds == ["start", "text_start", "text_delta", "text_end", "error"]


def test_events_carry_what_they_tell_of() -> None:
    @tool
    def look(at: str, ctx: ToolContext) -> str:
        ctx.update("half")
        return f"saw {at}"

    call = ToolCall("c1", "look", {"at": "sky"})
    heard = told(make([[call], "done"], tools=[look]), "go")
    start, end = heard[0], heard[-1]
    assert isinstance(start, AgentStart)
    assert isinstance(end, AgentEnd)
    assert start.run_id == end.run_id
    assert start.thread_id is None
    assert [event.turn for event in heard.of(TurnStart)] == [1, 2]
    assert [message.role for message in end.messages] == ["user", "assistant", "tool_result", "assistant"]
    assert end.messages == [event.message for event in heard.of(MessageEnd)]
    assert (end.stop_reason, end.error) == ("stop", None)
    began, ended = heard.of(ToolExecutionStart)[0], heard.of(ToolExecutionEnd)[0]
    assert (began.tool_call_id, began.tool_name, began.arguments) == ("c1", "look", {"at": "sky"})
    assert (ended.tool_name, ended.result.text, ended.is_error) == ("look", "saw sky", False)
    first = heard.of(TurnEnd)[0]
    assert first.message is not None
    assert first.message.tool_calls == [call]
    assert first.tool_results == [ended.result]


def test_an_assistants_message_starts_empty_and_ends_whole() -> None:
    heard = told(make(["hello"]), "hi")
    started, ended = heard.of(MessageStart)[-1].message, heard.of(MessageEnd)[-1].message
    assert isinstance(started, AssistantMessage)
    assert started.content == []
    assert ended.text == "hello"


# --- record first, publish after --------------------------------------------------------------------------------------


def test_a_message_is_on_disk_when_its_end_is_told(database: Database) -> None:
    seen: list[tuple[str, bool]] = []

    async def main() -> None:
        async with database.checkpointer() as cp:

            @tool
            def look() -> str:
                return "seen"

            def listen(event: Event) -> None:
                if isinstance(event, MessageEnd):
                    seen.append((event.message.role, event.stored and is_stored(cp, event.message)))

            agent = make([[ToolCall("c1", "look")], "done", "more"], tools=[look], checkpointer=cp, thread_id="t")
            agent.follow_up("and then?")
            agent.subscribe(listen)
            await agent.prompt("go")

    within(main())
    roles = ["user", "assistant", "tool_result", "assistant", "user", "assistant"]
    assert seen == [(role, True) for role in roles]


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_result_is_on_disk_when_its_tool_has_ended_while_others_still_run(database: Database, mode: str) -> None:
    seen: list[bool] = []

    async def main() -> None:
        first_has_ended = asyncio.Event()
        async with database.checkpointer() as cp:

            @tool
            async def fast() -> str:
                return "fast"

            @tool
            async def slow() -> str:
                await first_has_ended.wait()
                return "slow"

            def listen(event: Event) -> None:
                if isinstance(event, ToolExecutionEnd):
                    seen.append(is_stored(cp, event.result))
                    first_has_ended.set()

            calls = [ToolCall("c1", "slow"), ToolCall("c2", "fast")]
            agent = make(
                [calls if mode == "parallel" else calls[::-1], "done"],
                tools=[fast, slow],
                checkpointer=cp,
                thread_id="t",
                tool_mode=mode,
            )
            agent.subscribe(listen)
            await agent.prompt("go")
            thread = await cp.load("t")
            assert thread is not None
            results = [m.tool_call_id for m in thread.messages if isinstance(m, ToolResultMessage)]
            assert results == (["c1", "c2"] if mode == "parallel" else ["c2", "c1"])
            assert thread.messages == agent.state.messages

    within(main())
    assert seen == [True, True]
