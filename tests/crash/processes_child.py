"""One of several processes on one database. It says on stdout what it was told, and does what it reads on stdin.

    python -m tests.crash.processes_child SCENE NAME PLACE LEASE_SECONDS

It opens the database, says "open", and begins when it reads a line: nobody is late because Python was slow to start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import LeaseLost
from byssus.events import (
    Event,
    MessageEnd,
    StreamDone,
    StreamEvent,
    StreamStart,
    TextDelta,
    TextEnd,
    TextStart,
    ToolCallEnd,
    ToolCallStart,
    ToolExecutionEnd,
)
from byssus.messages import ToolResultMessage
from byssus.providers.base import Provider, Request
from byssus.signals import Signal
from tests.crash.place import Place

NAME = sys.argv[2]


def say(what: str, **more: Any) -> None:
    os.write(1, json.dumps({"what": what, **more}).encode() + b"\n")


async def told() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def acknowledge(event: Event) -> None:
    if isinstance(event, MessageEnd) and event.stored:
        say("message", id=event.message.id)  # type: ignore[union-attr]
    elif isinstance(event, ToolExecutionEnd) and event.stored:
        say("message", id=event.result.id)


@tool
def note(text: str) -> str:
    return f"noted {text}"


@tool
async def stand() -> str:
    say("standing")
    await told()
    return "stood"


class Answers:
    """Asks for two tools, and answers when it has their results; both name the prompt that they belong to."""

    name = "answers"

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        last = request.messages[-1]
        yield StreamStart()
        if isinstance(last, ToolResultMessage):
            text = f"answer to {last.text.removeprefix('noted ')}"
            yield TextStart(0)
            yield TextDelta(0, text)
            yield TextEnd(0)
        else:
            for index in range(2):
                call = ToolCall(f"{last.text} {index}", "note", {"text": last.text})
                yield ToolCallStart(index, call.id, call.name)
                yield ToolCallEnd(index, call)
        yield StreamDone()


class Stands:
    """Begins to talk, and goes on when it is told."""

    name = "stands"

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        yield TextStart(0)
        yield TextDelta(0, "half ")
        say("standing")
        await told()
        yield TextDelta(0, "whole")
        yield TextEnd(0)
        yield StreamDone()


class Asks:
    """Asks for the tool that stands still."""

    name = "asks"

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        yield ToolCallStart(0, "c1", "stand")
        yield ToolCallEnd(0, ToolCall("c1", "stand"))
        yield StreamDone()


def agent(cp: Checkpointer, thread_id: str, provider: Provider) -> Agent:
    made = Agent(
        provider=provider,
        model=Model("m"),
        tools=[note, stand],
        checkpointer=cp,
        thread_id=thread_id,
        wait=100,
        save_partial=0.02,
    )
    made.subscribe(acknowledge)
    return made


async def prompting(cp: Checkpointer, thread_ids: list[str], count: int) -> None:
    """Prompt each of the threads so many times, all threads at once. Whoever loses a lease tries again."""

    async def drive(thread_id: str) -> None:
        made = agent(cp, thread_id, Answers())
        for number in range(count):
            text = f"{NAME}-{thread_id}-{number}"
            try:
                result = await made.prompt(text)
                say("answered", prompt=text, text=result.text, stop_reason=result.stop_reason)
            except LeaseLost:
                say("lost", prompt=text)

    await asyncio.gather(*map(drive, thread_ids))


async def standing(cp: Checkpointer, provider: Provider) -> None:
    made = agent(cp, "t", provider)
    try:
        result = await made.prompt("mine")
        say("ended", stop_reason=result.stop_reason)
    except LeaseLost as error:
        say("lost", text=str(error))


async def committing(cp: Checkpointer) -> None:
    """Prompt, and stand still in the middle of a transaction: right before the commit of the first reply."""
    commits = 0

    def stand_still(where: str) -> None:
        nonlocal commits
        commits += where == "before commit"
        if commits == 2:
            cp.store.boundary = None
            say("standing")
            sys.stdin.readline()

    cp.store.boundary = stand_still
    await standing(cp, Answers())


async def keyed(cp: Checkpointer, where: str, number: int) -> None:
    """Send a prompt that has a key, and kill this process at so many commits; with number 0, let it live."""
    seen = 0

    def kill(now: str) -> None:
        nonlocal seen
        seen += now == where
        if number and seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    cp.store.boundary = kill
    result = await agent(cp, "t", Answers()).prompt("pay", key="order-17")
    say("answered", run=result.run_id, text=result.text, stop_reason=result.stop_reason)


async def main(scene: str) -> None:
    async with Place.told(sys.argv[3]).checkpointer(lease_seconds=float(sys.argv[4])) as cp:
        await cp.threads()
        say("open")
        await told()
        match scene.split(","):
            case ["prompting", count, *thread_ids]:
                await prompting(cp, thread_ids, int(count))
            case ["tool"]:
                await standing(cp, Asks())
            case ["stream"]:
                await standing(cp, Stands())
            case ["commit"]:
                await committing(cp)
            case ["keyed", where, number]:
                await keyed(cp, where, int(number))
    say("closed")


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1]))
    except BaseException as error:
        say("failed", kind=type(error).__name__, text=str(error))
        raise
