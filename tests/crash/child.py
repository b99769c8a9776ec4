"""The process that is killed: an agent that tells on stdout what it was told, and stands still where it is asked to.

    python -m tests.crash.child SCENE PLACE

Each line on stdout is JSON and written at once, so whatever the parent has read has happened. The diary is a file to
which each tool adds a line when it runs: the side effect that must not happen twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import Checkpointer
from byssus.events import Event, MessageEnd, StreamEvent, StreamStart, TextDelta, TextStart, ToolExecutionEnd
from byssus.messages import encode
from byssus.providers.base import Provider, Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from tests.crash.place import Place

PLACE = Place.told(sys.argv[2])


def say(what: str, **more: Any) -> None:
    """One line in one write: tools say something on threads of their own."""
    os.write(1, json.dumps({"what": what, **more}).encode() + b"\n")


def stand_still() -> None:
    threading.Event().wait()


def diary(line: str) -> None:
    with PLACE.diary.open("a") as file:
        file.write(line + "\n")


def acknowledge(event: Event) -> None:
    if isinstance(event, MessageEnd):
        say("message_end", role=event.message.role, id=event.message.id)  # type: ignore[union-attr]
    elif isinstance(event, ToolExecutionEnd):
        say("tool_end", call=event.tool_call_id, id=event.result.id)


@tool
def fast() -> str:
    diary("fast")
    return "fast is done"


@tool
def slow() -> str:
    diary("slow")
    say("slow began")
    stand_still()
    return "never"


@tool
async def slow_async() -> str:
    diary("slow_async")
    say("slow began")
    await asyncio.Event().wait()
    return "never"


class Talking:
    """Says a few words and then nothing more."""

    name = "talking"

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        yield TextStart(0)
        yield TextDelta(0, "Hel")
        say("streaming")
        await asyncio.Event().wait()


def agent(cp: Checkpointer, provider: Provider, **options: Any) -> Agent:
    made = Agent(
        provider=provider,
        model=Model("m"),
        tools=[fast, slow, slow_async],
        checkpointer=cp,
        thread_id="t",
        **options,
    )
    made.subscribe(acknowledge)
    return made


async def streaming(cp: Checkpointer, save_partial: float | None) -> None:
    """Hang in mid-stream; if what arrives is saved now and then, say so when it is on disk."""
    made = agent(cp, ScriptedProvider(["hello"]))
    made.state.extra["kept"] = 1
    await made.prompt("one")
    hanging = asyncio.create_task(agent(cp, Talking(), save_partial=save_partial).prompt("two"))
    while save_partial is not None:
        thread = await cp.load("t")
        if thread is not None and thread.partial is not None:
            say("saved", partial=thread.partial.text)
            break
    await hanging


async def tools(cp: Checkpointer, mode: str, *names: str) -> None:
    calls = [ToolCall(f"c{number}", name) for number, name in enumerate(names, 1)]
    await agent(cp, ScriptedProvider([calls]), tool_mode=mode).prompt("go")


async def stopping_at(cp: Checkpointer, number: int) -> None:
    """Stand still in the listener, right behind the number-th message_end."""
    count = 0

    def stop(event: Event) -> None:
        nonlocal count
        if isinstance(event, MessageEnd):
            count += 1
            if count == number:
                say("stopped")
                stand_still()

    made = agent(cp, ScriptedProvider([[ToolCall("c1", "fast"), ToolCall("c2", "fast")], "done", "and more"]))
    made.follow_up("more")
    made.subscribe(stop)
    await made.prompt("go")


async def talking_on(cp: Checkpointer) -> None:
    """Talk without end: the parent kills whenever it likes."""
    script: list[Step] = [[ToolCall("c1", "fast"), ToolCall("c2", "fast")], "done"]
    made = agent(cp, ScriptedProvider(script * 100_000))
    for number in range(100_000):
        await made.prompt(f"prompt {number}")


async def resume(cp: Checkpointer, calls: int) -> None:
    """Resume, which takes so many calls of the model, and prompt once more."""
    answers: list[Step] = ["on we go", "and on", "and further"]
    with ScriptedProvider(answers[: calls + 1]) as provider:
        made = agent(cp, provider)
        result = await made.resume()
        await made.prompt("and now?")
    say(
        "resumed",
        text=result.text,
        sent=[[encode(message) for message in request.messages] for request in provider.requests],
        extra=made.state.extra,
    )


async def main(scene: str) -> None:
    async with PLACE.checkpointer() as cp:
        match scene.split(","):
            case ["streaming", seconds]:
                await streaming(cp, float(seconds) or None)
            case ["tools", mode, *names]:
                await tools(cp, mode, *names)
            case ["stopping", number]:
                await stopping_at(cp, int(number))
            case ["talking"]:
                await talking_on(cp)
            case ["resume", calls]:
                await resume(cp, int(calls))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
