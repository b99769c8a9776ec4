"""prompt(): what can be said, what comes back, and what an agent knows afterwards."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from byssus import (
    Agent,
    AssistantMessage,
    ImageContent,
    Model,
    TextContent,
    ToolCall,
    ToolContext,
    ToolResultMessage,
    Usage,
    UserMessage,
    tool,
)
from byssus.errors import AgentBusy, InputError, Overloaded
from byssus.events import AgentEnd, AgentStart, Event
from byssus.messages import ReplyStop
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from tests.support.agents import Acted, Hanging, Heard, make, saying, sent, within
from tests.support.databases import Database


@tool
def look(at: str = "") -> str:
    return f"saw {at}"


# --- what can be said -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [UserMessage("hi")]),
        (UserMessage("hi"), [UserMessage("hi")]),
        (["a", "b"], [UserMessage("a"), UserMessage("b")]),
        (("a", UserMessage("b")), [UserMessage("a"), UserMessage("b")]),
        (TextContent("a"), [UserMessage("a")]),
        (
            [TextContent("what is this?"), ImageContent("/9j/4A==", "image/jpeg")],
            [UserMessage([TextContent("what is this?"), ImageContent("/9j/4A==", "image/jpeg")])],
        ),
        ([ImageContent("iVBORw0KGgo=")], [UserMessage([ImageContent("iVBORw0KGgo=")])]),
        ("\0 and \ud800", [UserMessage("\0 and \ud800")]),
    ],
)
def test_whatever_can_be_said_reaches_the_model(prompt: Any, expected: list[UserMessage]) -> None:
    provider = ScriptedProvider(["ok"])
    within(make(provider).prompt(prompt))
    assert [m.content for m in provider.requests[0].messages if isinstance(m, UserMessage)] == [
        m.content for m in expected
    ]


def test_dicts_paths_bytes_and_mixed_lists_are_said_as_they_are_meant(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(9)
    (tmp_path / "a.png").write_bytes(png)
    image = ImageContent.from_bytes(png)
    for prompt, expected in [
        ({"role": "user", "content": "hi"}, [[TextContent("hi")]]),
        ({"type": "text", "text": "hi"}, [[TextContent("hi")]]),
        (png, [[image]]),
        (["what?", tmp_path / "a.png"], [[TextContent("what?"), image]]),
        (["what?", {"type": "image", "data": image.data}], [[TextContent("what?"), image]]),
        (["a", UserMessage("b"), "c", png], [[TextContent("a")], [TextContent("b")], [TextContent("c"), image]]),
    ]:
        provider = ScriptedProvider(["ok"])
        within(make(provider).prompt(prompt))  # type: ignore[call-overload]
        assert [message.content for message in provider.requests[0].messages] == expected  # type: ignore[union-attr]


def test_steer_and_follow_up_take_images_and_dicts_too_but_one_message_at_a_time() -> None:
    agent = make(ScriptedProvider(["ok"]))
    receipt = agent.steer(["see", ImageContent("iVBORw0KGgo=")])
    assert receipt.message.content == [TextContent("see"), ImageContent("iVBORw0KGgo=")]
    assert agent.follow_up({"role": "user", "content": "x"}).message.text == "x"
    with pytest.raises(InputError, match=r"steer\(\) takes one message, and got 2"):
        agent.steer(["a", "b"])


def test_a_file_that_is_no_image_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hi")
    for name, told in (("a.txt", "a.txt' is no PNG"), ("none.png", "none.png' cannot be read: No such file")):
        with pytest.raises(InputError, match=told):
            within(make([]).prompt(tmp_path / name))


@pytest.mark.parametrize(
    "prompt", ["", " \n\t", [], (), [""], ["a", ""], UserMessage(""), UserMessage([]), [UserMessage(" ")]]
)
def test_an_empty_prompt_is_refused_before_anything_happens(prompt: Any) -> None:
    agent = make([])
    heard = Heard(agent)
    with pytest.raises(InputError, match="empty"):
        within(agent.prompt(prompt))
    assert heard == []
    assert agent.state.messages == []


@pytest.mark.parametrize(
    "prompt",
    [None, 5, b"bytes", {"role": "user"}, [None], AssistantMessage("x"), ToolResultMessage("c", "t", "x"), object()],
)
def test_what_is_no_prompt_is_refused_by_name(prompt: Any) -> None:
    agent = make([])
    with pytest.raises(InputError, match=r"prompt\(\) takes"):
        within(agent.prompt(prompt))
    assert not agent.state.is_streaming


def test_a_message_keeps_the_id_and_the_time_that_it_was_given() -> None:
    agent = make(["ok"])
    within(agent.prompt(UserMessage("hi", id="mine", created_at="2024-02-29T00:00:00.000000Z")))
    assert agent.state.messages[0] == UserMessage("hi", id="mine", created_at="2024-02-29T00:00:00.000000Z")


def test_every_message_gets_an_id_and_a_time() -> None:
    agent = make([[ToolCall("c1", "look")], "ok"], tools=[look])
    within(agent.prompt("hi"))
    ids = [message.id for message in agent.state.messages]  # type: ignore[union-attr]
    assert len({*ids}) == 4
    assert all(ids)
    assert all(message.created_at for message in agent.state.messages)  # type: ignore[union-attr]


# --- what the model sees ----------------------------------------------------------------------------------------------


def test_a_model_sees_the_system_prompt_the_tools_and_the_whole_conversation() -> None:
    async def main() -> None:
        provider = ScriptedProvider(["a", "b"])
        agent = make(provider, system_prompt="be nice", tools=[look], model=Model("m", max_tokens=5))
        await agent.prompt("one")
        await agent.prompt("two")
        request = provider.requests[1]
        assert (request.system_prompt, request.model) == ("be nice", Model("m", max_tokens=5))
        assert list(request.tools) == [look.spec]
        assert sent(provider) == ["user: one", "assistant: a", "user: two"]

    within(main())


def test_two_agents_do_not_hear_each_other() -> None:
    async def main() -> None:
        first, second = ScriptedProvider(["a"]), ScriptedProvider(["b"])
        await asyncio.gather(make(first).prompt("one"), make(second).prompt("two"))
        assert (sent(first), sent(second)) == (["user: one"], ["user: two"])

    within(main())


# --- what comes back --------------------------------------------------------------------------------------------------


def test_a_result_tells_what_the_run_came_to() -> None:
    async def main() -> None:
        agent = make(
            [
                AssistantMessage([TextContent("let me see"), ToolCall("c1", "look", {"at": "sky"})], usage=Usage(1, 2)),
                AssistantMessage("blue", usage=Usage(10, 20, cost=0.5)),
                "again",
            ],
            tools=[look],
        )
        heard = Heard(agent)
        result = await agent.prompt("what colour?")
        assert (result.text, result.stop_reason, result.error) == ("blue", "stop", None)
        assert result.usage == Usage(11, 22, cost=0.5)
        assert [m.role for m in result.messages] == ["user", "assistant", "tool_result", "assistant"]
        assert result.messages == agent.state.messages
        assert result.run_id == heard.of(AgentStart)[0].run_id == heard.of(AgentEnd)[0].run_id
        result.raise_for_error()
        second = await agent.prompt("and now?")
        assert second.run_id != result.run_id
        assert [m.role for m in second.messages] == ["user", "assistant"]
        assert len(result.messages) == 4

    within(main())


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_stop_reason_is_the_models(reason: ReplyStop) -> None:
    assert within(make([AssistantMessage("x", reason)]).prompt("hi")).stop_reason == reason


def test_the_state_tells_what_the_agent_knows() -> None:
    async def main() -> None:
        seen: list[bool] = []
        agent = make([AssistantMessage("a", usage=Usage(1, 2)), AssistantMessage("b", usage=Usage(3, 4))])
        assert (agent.state.messages, agent.state.extra, agent.state.is_streaming) == ([], {}, False)
        assert (agent.state.error, agent.state.usage) == (None, Usage())
        agent.subscribe(lambda event: seen.append(agent.state.is_streaming))
        await agent.prompt("one")
        assert agent.state.usage == Usage(1, 2)
        await agent.prompt("two")
        assert agent.state.usage == Usage(4, 6)
        assert not agent.state.is_streaming
        assert all(seen)

    within(main())


# --- one run at a time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["prompt", "resume"])
def test_a_second_run_is_refused_with_the_ways_in(way: str) -> None:
    async def main() -> None:
        hanging = Hanging("Hel")
        agent = make(Acted(hanging))
        running = asyncio.create_task(agent.prompt("hi"))
        await hanging.begun.wait()
        with pytest.raises(RuntimeError, match=r"steer.*follow_up.*wait_for_idle") as caught:
            await (agent.prompt("me too") if way == "prompt" else agent.resume())
        assert isinstance(caught.value, AgentBusy)
        agent.abort()
        assert (await running).text == "Hel"
        assert [m.text for m in agent.state.messages] == ["hi", "Hel"]

    within(main())


def test_of_two_prompts_at_once_one_is_refused() -> None:
    async def main() -> None:
        agent = make(["ok"])
        results = await asyncio.gather(agent.prompt("a"), agent.prompt("b"), return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["RunResult", "AgentBusy"]

    within(main())


def test_waiting_while_idle_returns() -> None:
    within(make([]).wait_for_idle())


def test_waiting_ends_when_the_run_does() -> None:
    async def main() -> None:
        hanging = Hanging()
        agent = make(Acted(hanging, saying("ok")))
        running = asyncio.create_task(agent.prompt("hi"))
        await hanging.begun.wait()
        waiting = [asyncio.create_task(agent.wait_for_idle()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        agent.abort()
        await asyncio.gather(*waiting)
        assert not agent.state.is_streaming
        await running

    within(main())


def test_waiting_from_inside_a_tool_is_an_error_that_the_model_sees() -> None:
    async def main() -> None:
        @tool
        async def wait() -> None:
            await agent.wait_for_idle()

        agent = make([[ToolCall("c1", "wait")], "ok"], tools=[wait])
        result = await agent.prompt("go")
        assert result.text == "ok"
        assert "AgentBusy" in result.messages[2].text

    within(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_waiting_from_inside_a_listener_is_an_error(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        caught: list[BaseException] = []

        def plain(event: Event) -> None:
            try:
                agent.wait_for_idle().send(None)
            except AgentBusy as error:
                caught.append(error)

        async def later(event: Event) -> None:
            try:
                await agent.wait_for_idle()
            except AgentBusy as error:
                caught.append(error)

        agent = make(["ok"])
        agent.subscribe(plain if kind == "sync" else later)
        await agent.prompt("go")
        assert caught
        assert "own run" in str(caught[0])

    within(main())
    assert caplog.records == []


def test_one_agent_may_run_inside_anothers_tool() -> None:
    async def main() -> None:
        inner = make(["from within"])

        @tool
        async def ask() -> str:
            text = (await inner.prompt("hi")).text
            await inner.wait_for_idle()
            return text

        agent = make([[ToolCall("c1", "ask")], "ok"], tools=[ask])
        result = await agent.prompt("go")
        assert result.messages[2].text == "from within"

    within(main())


def test_work_that_a_run_started_may_wait_for_the_agent_once_the_run_is_over() -> None:
    async def main() -> None:
        over = asyncio.Event()
        left: list[asyncio.Task[None]] = []

        async def afterwards() -> None:
            await over.wait()
            await agent.wait_for_idle()

        @tool
        async def start() -> None:
            left.append(asyncio.create_task(afterwards()))

        agent = make([[ToolCall("c1", "start")], "ok"], tools=[start])
        await agent.prompt("go")
        over.set()
        await left[0]

    within(main())


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_parallel_tools_run_at_the_same_time(kind: str) -> None:
    """Two tools that wait for each other: one after the other, they would wait for ever."""

    async def main() -> None:
        met = asyncio.Barrier(2)
        barrier = threading.Barrier(2)

        async def later() -> str:
            await met.wait()
            return "met"

        def sync() -> str:
            barrier.wait(20)
            return "met"

        made = tool(name="meet")(later) if kind == "async" else tool(name="meet")(sync)
        agent = make([[ToolCall("c1", "meet"), ToolCall("c2", "meet")], "ok"], tools=[made])
        result = await agent.prompt("go")
        assert [m.text for m in result.messages if isinstance(m, ToolResultMessage)] == ["met", "met"]

    within(main())


def test_sequential_tools_run_one_after_the_other() -> None:
    async def main() -> None:
        running: list[str] = []

        @tool
        async def alone(ctx: ToolContext) -> str:
            assert running == []
            running.append(ctx.tool_call_id)
            for _ in range(3):
                await asyncio.sleep(0)
            running.remove(ctx.tool_call_id)
            return "ok"

        calls = [ToolCall(f"c{number}", "alone") for number in range(3)]
        result = await make([calls, "ok"], tools=[alone], tool_mode="sequential").prompt("go")
        assert [m.text for m in result.messages if isinstance(m, ToolResultMessage)] == ["ok"] * 3

    within(main())


def test_plain_functions_are_tools_too() -> None:
    def plain(x: int) -> int:
        return 2 * x

    agent = make([[ToolCall("c1", "plain", {"x": 4})], "ok"], tools=[plain])
    assert within(agent.prompt("go")).messages[2].text == "8"


def test_a_failing_tool_does_not_end_the_run() -> None:
    @tool
    def fail() -> None:
        raise ValueError("no such city")

    @tool
    def leave() -> None:
        raise SystemExit(1)

    calls = [ToolCall("c1", "fail"), ToolCall("c2", "leave"), ToolCall("c3", "nope"), ToolCall("c4", "look")]
    result = within(make([calls, "ok"], tools=[fail, leave, look]).prompt("go"))
    assert result.text == "ok"
    results = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert [m.is_error for m in results] == [True, True, True, False]
    assert "no such city" in results[0].text


def test_malformed_arguments_are_shown_to_the_model() -> None:
    call = ToolCall("c1", "look", {}, malformed='{"at": ')
    result = within(make([[call], "ok"], tools=[look]).prompt("go"))
    assert "not a JSON object" in result.messages[2].text


def test_a_tool_may_speak_to_its_agent() -> None:
    async def main() -> None:
        @tool
        async def nudge() -> str:
            agent.steer("nudged")
            agent.follow_up("followed")
            return "ok"

        provider = ScriptedProvider([[ToolCall("c1", "nudge")], "one", "two"])
        agent = make(provider, tools=[nudge])
        assert (await agent.prompt("go")).text == "two"
        assert [line for line in sent(provider) if line.startswith("user")] == [
            "user: go",
            "user: nudged",
            "user: followed",
        ]

    within(main())


# --- how an agent is built --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [5, None, {"id": "m"}])
def test_a_model_that_is_none_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="model must be a Model"):
        Agent(provider=ScriptedProvider(), model=model)


@pytest.mark.parametrize("provider", [5, "anthropic", object()])
def test_a_provider_that_is_none_is_refused(provider: Any) -> None:
    with pytest.raises(InputError, match="provider must have a stream"):
        Agent(provider=provider, model=Model("m"))


def test_the_class_of_a_provider_is_refused_before_anything_is_stored() -> None:
    with pytest.raises(InputError, match=r"got the class; write ScriptedProvider\(\.\.\.\)"):
        Agent(provider=ScriptedProvider, model=Model("m"))  # type: ignore[arg-type]


def test_bytes_are_refused_as_bytes_and_not_as_numbers() -> None:
    with pytest.raises(InputError, match=r"prompt\(\) takes text.* these bytes are no PNG, .*b'hi'"):
        within(make([]).prompt(b"hi"))


def test_an_agent_without_a_checkpointer_serves_several_event_loops() -> None:
    agent = make(["a", "b"])
    asyncio.run(agent.prompt("one"))
    assert asyncio.run(agent.prompt("two")).text == "b"
    assert [m.text for m in agent.state.messages] == ["one", "a", "two", "b"]


def test_a_step_of_the_script_may_look_at_the_request() -> None:
    def answer(request: Request) -> str:
        return f"you said {request.messages[-1].text!r}"

    assert within(make([answer]).prompt("hi")).text == "you said 'hi'"


@pytest.mark.parametrize("data", ["", "!", "aGVsbG8=", "iVBORw0KGgo=~"])
def test_an_image_that_is_none_is_refused_before_anything_is_stored(data: str) -> None:
    agent = make([])
    with pytest.raises(InputError, match="image that is none"):
        within(agent.prompt([TextContent("what is this?"), ImageContent(data)]))
    assert agent.state.messages == []


def test_a_tool_that_returns_an_image_that_is_none_gets_an_error_result() -> None:
    @tool
    def look() -> ImageContent:
        return ImageContent("aGVsbG8=")

    result = within(make([[ToolCall("c1", "look")], "ok"], tools=[look]).prompt("go"))
    answer = result.messages[2]
    assert isinstance(answer, ToolResultMessage)
    assert answer.is_error
    assert "image that is none" in answer.text


# --- results as JSON --------------------------------------------------------------------------------------------------


def test_a_result_is_json_with_and_without_an_error_and_with_its_output() -> None:
    agent = make(ScriptedProvider(['{"value": 5}', Overloaded("busy")]), max_retries=0)
    result = within(agent.prompt("a", output=int))
    told = json.loads(result.to_json())
    assert (told["output"], told["error"], told["stop_reason"], len(told["messages"])) == (5, None, "stop", 2)
    failed = within(agent.prompt("b"))
    assert json.loads(failed.to_json())["error"] == {"kind": "Overloaded", "message": "busy"}
    assert str(failed) == "[error: Overloaded: busy]"
    assert failed._repr_markdown_().endswith("Overloaded: busy*")


# --- attach -----------------------------------------------------------------------------------------------------------


def test_an_agent_that_is_attached_keeps_its_thread_as_one_that_was_made_so(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(ScriptedProvider(["a", "b"]), steering_mode="all")
            agent.attach(cp, "trip")
            assert (agent.thread_id, agent.checkpointer) == ("trip", cp)
            await agent.prompt("hi")
            other = make(ScriptedProvider(["c"]))
            other.attach(cp, "trip")
            await other.prompt("again")
            assert [message.role for message in other.state.messages] == ["user", "assistant"] * 2

    within(main())


def test_only_a_new_agent_can_be_attached(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(ScriptedProvider(["a"]))
            await agent.prompt("hi")
            with pytest.raises(InputError, match="has messages already"):
                agent.attach(cp, "trip")
            agent = make(ScriptedProvider([]), checkpointer=cp, thread_id="trip")
            with pytest.raises(InputError, match="has a checkpointer already"):
                agent.attach(cp, "trip")
            agent = make(ScriptedProvider([]))
            with pytest.raises(InputError, match="id"):
                agent.attach(cp, "")
            assert (agent.thread_id, agent.checkpointer) == (None, None)

    within(main())
