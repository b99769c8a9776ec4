"""Runs in a scene: an agent whose tool writes a diary, which is what can be held against the promises about tools."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from byssus import Agent, Model, ToolCall, ToolContext
from byssus.checkpointer import Checkpointer
from byssus.events import Event, MessageEnd, ToolExecutionEnd
from byssus.messages import AssistantMessage, UserMessage
from byssus.providers.base import Request
from byssus.providers.scripted import Reply, ScriptedProvider
from byssus.tools import Tool
from tests.crash.place import Place
from tests.crash.stage.actors import Line
from tests.crash.stage.judge import expect
from tests.support.histories import flaws

_MANY = 10_000  # steps of a script: each looks at the history, so it does not matter how many there are


def note(place: Place, what: str, key: str) -> None:
    """Write to the diary, in one write: that is the effect which must not happen twice."""
    data = json.dumps({"what": what, "key": key, "pid": os.getpid()}).encode() + b"\n"
    file = os.open(place.diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def diary(place: Place) -> list[dict[str, Any]]:
    if not place.diary.exists():
        return []
    return [json.loads(line) for line in place.diary.read_text().splitlines()]


def begun(place: Place) -> Counter[str]:
    """How often the tool began, by idempotency key."""
    return Counter(entry["key"] for entry in diary(place) if entry["what"] == "began")


def judge_tools(place: Place) -> None:
    """No call whose end was acknowledged has run again."""
    settled: set[str] = set()
    for entry in diary(place):
        if entry["what"] == "settled":
            settled.add(entry["key"])
        expect(entry["what"] != "began" or entry["key"] not in settled, "a tool that had finished ran again", entry)


def agent(line: Line, cp: Checkpointer, place: Place, thread: str, *, calls: int = 1, **options: Any) -> Agent:
    """An agent that calls its tool for each thing that was said, and then answers. With `holds`, the tool says "began"
    and goes on when the actor is told to; if the word is "abort", it aborts its run first."""
    holds, recovery = options.pop("holds", False), options.pop("recovery", "never")

    async def act(context: ToolContext) -> str:
        note(place, "began", context.idempotency_key)
        if holds:
            line.say("began", key=context.idempotency_key)
            if await line.told_soon() == "abort":
                made.abort()
        note(place, "ended", context.idempotency_key)
        return f"did {context.idempotency_key}"

    def reply(request: Request) -> Reply:
        if wrong := flaws(request.messages):
            line.say("odd", problem=f"a model was sent a history that is not valid: {wrong}")
        last = next(message for message in reversed(request.messages) if isinstance(message, UserMessage))
        since = request.messages[request.messages.index(last) :]
        if any(isinstance(message, AssistantMessage) and message.tool_calls for message in since):
            return f"answer to {last.text}"
        return [ToolCall(f"{last.text}/{number}", "act", {}) for number in range(calls)]

    made = Agent(
        provider=ScriptedProvider([reply] * _MANY),
        model=Model("m"),
        tools=[Tool(act, name="act", recovery=recovery)],
        checkpointer=cp,
        thread_id=thread,
        **options,
    )
    made.subscribe(lambda event: _hear(line, place, thread, event))
    return made


def _hear(line: Line, place: Place, thread: str, event: Event) -> None:
    """What is acknowledged: a prompt, an answer, and what the tool did."""
    if isinstance(event, MessageEnd) and event.stored:
        message = event.message
        is_answer = isinstance(message, AssistantMessage) and message.stop_reason == "stop" and message.text
        if isinstance(message, UserMessage) or is_answer:
            line.say("stored", thread=thread, text=message.text)
    elif isinstance(event, ToolExecutionEnd) and event.stored and event.result.text.startswith("did "):
        line.say("stored", thread=thread, text=event.result.text)
        note(place, "settled", event.result.text.removeprefix("did "))
