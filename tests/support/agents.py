"""Agents for the tests: providers that hang, sulk and fail, and what an agent tells of its runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from byssus import Agent, Model, tool
from byssus.checkpointer import Checkpointer
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
from byssus.messages import (
    Message,
    ToolCall,
    Usage,
)
from byssus.providers.base import Provider, Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from tests.support.histories import flaws

T = TypeVar("T")
Scene = Callable[[Request, Signal], AsyncIterator[StreamEvent]]


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
        self.over = asyncio.Event()

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
            self.over.set()


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


async def can_go_on(cp: Checkpointer, thread_id: str = "t") -> list[str]:
    """Another agent, as in another process, goes on with the thread; returns what its model was sent."""
    provider = ScriptedProvider(["on we go"])
    result = await make(provider, checkpointer=cp, thread_id=thread_id).prompt("again")
    assert (result.stop_reason, result.text) == ("stop", "on we go")
    assert flaws(provider.requests[0].messages) == []
    return sent(provider)


def hooks(**functions: Any) -> Any:
    """A middleware made of functions."""
    return SimpleNamespace(**functions)


@tool
def look(at: str = "here") -> str:
    return f"seen {at}"
