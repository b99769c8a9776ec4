"""What a run tells, in which order; and the tools with which the other tests of the agent look at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import pytest

from byssus import Agent, AssistantMessage, Model, ToolCall, ToolContext, ToolResultMessage, UserMessage, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import ProviderError, RateLimited
from byssus.events import (
    AgentEnd,
    AgentStart,
    Event,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    StreamDone,
    StreamEvent,
    StreamStart,
    TextDelta,
    TextEnd,
    TextStart,
    ToolCallEnd,
    ToolCallStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnEnd,
    TurnStart,
)
from byssus.messages import Message, Usage
from byssus.providers.base import Provider, Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from byssus.store.database import Tx
from tests.conftest import Database

T = TypeVar("T")
Scene = Callable[[Request, Signal], AsyncIterator[StreamEvent]]


# --- tools of the tests -----------------------------------------------------------------------------------------------


class Acted:
    """A provider whose calls are acted out, one async generator each: it can hang, sulk and fail wherever it likes."""

    name = "acted"

    def __init__(self, *scenes: Scene) -> None:
        self._scenes = list(scenes)
        self.requests: list[Request] = []

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        return self._scenes[len(self.requests) - 1](request, signal)


def text_events(*words: str) -> list[StreamEvent]:
    return [TextStart(0), *(TextDelta(0, word) for word in words), TextEnd(0)]


def saying(*words: str, then: Exception | None = None, calls: Sequence[ToolCall] = ()) -> Scene:
    """A scene that says the words and asks for the tools, then fails or ends."""

    async def scene(request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        for event in text_events(*words) if words else ():
            yield event
        for index, call in enumerate(calls, 1):
            yield ToolCallStart(index, call.id, call.name)
            yield ToolCallEnd(index, call)
        if then is not None:
            raise then
        yield StreamDone("stop", Usage(1, 1))

    return scene


class Hanging:
    """A scene that says something and then nothing more; `begun` is set when it hangs."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self.begun = asyncio.Event()
        self.closed = False

    async def __call__(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        for event in text_events(*self._words)[:-1] if self._words else ():
            yield event
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.closed = True


class Stubborn:
    """A scene that ignores its cancellation until it is released, and then goes on talking."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.release = asyncio.Event()
        self.dead_epoch = asyncio.Event()

    async def __call__(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        try:
            yield StreamStart()
            yield TextStart(0)
            yield TextDelta(0, "Hel")
            self.begun.set()
            await stubbornly(self.release)
            yield TextDelta(0, "lo")
            yield StreamDone()
        finally:
            self.dead_epoch.set()


async def stubbornly(release: asyncio.Event) -> None:
    while not release.is_set():
        try:
            await release.wait()
        except asyncio.CancelledError:
            continue


def make(script: Iterable[Step] | Provider, **options: Any) -> Agent:
    provider: Any = script if hasattr(script, "stream") else ScriptedProvider(script)
    return Agent(provider=provider, model=options.pop("model", Model("m")), **options)


class Heard(list[Event]):
    """All events of an agent, in order."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        agent.subscribe(self.append)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self if isinstance(event, kind)]

    @property
    def story(self) -> list[str]:
        """The events as short lines; however many updates in a row are one."""
        lines: list[str] = []
        for event in self:
            line = _line(event)
            if not (lines and line == lines[-1] == "message_update"):
                lines.append(line)
        return lines


def _line(event: Event) -> str:
    if isinstance(event, MessageStart | MessageEnd):
        return f"{event.type} {event.message.role}"
    if isinstance(event, ToolExecutionStart | ToolExecutionEnd):
        return f"{event.type} {event.tool_call_id}"
    return event.type


def check_whole(events: Sequence[Event]) -> None:
    """Every start has its end, they nest, and nothing comes before the beginning or after the end of a run."""
    run: list[str] = []
    tools: list[str] = []
    for event in events:
        match event:
            case AgentStart():
                assert not run
                run = ["agent"]
            case TurnStart():
                assert run == ["agent"], run
                run.append("turn")
            case MessageStart():
                assert run[-1] in ("agent", "turn"), run
                assert not tools, tools
                run.append("message")
            case MessageUpdate():
                assert run[-1] == "message", run
            case MessageEnd():
                assert run.pop() == "message"
            case ToolExecutionStart():
                assert run == ["agent", "turn"]
                tools.append(event.tool_call_id)
            case ToolExecutionEnd():
                tools.remove(event.tool_call_id)
            case TurnEnd():
                assert not tools, tools
                assert run.pop() == "turn"
            case AgentEnd():
                assert run == ["agent"], run
                run = []
            case _:
                assert event.tool_call_id in tools
    assert run == []
    assert tools == []


def run_story(*turns: list[str]) -> list[str]:
    return ["agent_start", *(line for turn in turns for line in turn), "agent_end"]


USER = ["message_start user", "message_end user"]
REPLY = ["message_start assistant", "message_update", "message_end assistant"]
RESULT = ["message_start tool_result", "message_end tool_result"]


def executed(*ids: str) -> list[str]:
    return [f"tool_execution_{part} {call_id}" for call_id in ids for part in ("start", "end")]


def bodies(tx: Tx) -> list[str]:
    return [body for (body,) in tx.all("SELECT body FROM messages ORDER BY branch, seq")]


def is_stored(cp: Checkpointer, message: Message) -> bool:
    """Whether a reader beside the writer sees the message."""
    assert not isinstance(message, (dict, type(None)))
    message_id = getattr(message, "id", None)
    row = cp.store.read_now(lambda tx: tx.one("SELECT body FROM messages WHERE id = :id", id=message_id))
    return row is not None


def within(work: Coroutine[Any, Any, T]) -> T:
    """Run it; what hangs is a failed test and not a hung suite."""

    async def guarded() -> T:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(guarded())


def sent(provider: Any, call: int = -1) -> list[str]:
    """What a model was told, in short."""
    return [f"{message.role}: {message.text}" for message in provider.requests[call].messages]


async def history(cp: Checkpointer, thread_id: str) -> list[str]:
    """What a thread holds, in short."""
    thread = await cp.load(thread_id)
    return [f"{message.role}: {message.text}" for message in thread.messages] if thread else []


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
