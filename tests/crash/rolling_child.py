"""A service that supervises runs: python -m tests.crash.rolling_child PLACE SCENE [RUNS]

It says "ready" and goes on until it is told to end. Tools write what they do into the diary, before they do it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import Checkpointer, TakeOver
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider, Step
from tests.crash.place import Place

STEPS = 6
OFTEN = 0.1  # seconds between two looks

PLACE = Place.told(sys.argv[1])


def note(line: str) -> None:
    file = os.open(PLACE.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


@tool
async def work(thread: str, step: int) -> str:
    """Note it, and take a moment."""
    note(f"{thread} {step}")
    await asyncio.sleep(0.2)  # the work itself
    return f"did {step}"


@tool(recovery="retry", max_attempts=None)
async def die() -> str:
    """End the process, as a bug in an extension or a lack of memory does."""
    note("dies")
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def script(request: Request) -> Step:
    """The next step of a thread, by what its history has."""
    thread = request.messages[0].text
    done = sum(message.role == "tool_result" for message in request.messages)
    if thread == "deadly":
        return [ToolCall("die", "die", {})]
    return "done" if done == STEPS else [ToolCall(f"s{done}", "work", {"thread": thread, "step": done})]


def agent_for(thread_id: str, user_id: str | None) -> Agent:
    return Agent(
        provider=ScriptedProvider([script] * (STEPS + 1)),
        model=Model("m"),
        tools=[work, die],
        on_sigterm="hand_over",
    )


async def prompt(cp: Checkpointer, thread_id: str) -> None:
    agent = agent_for(thread_id, None)
    agent.attach(cp, thread_id)
    await agent.prompt(thread_id)


def report(taken: TakeOver) -> None:
    if taken.is_quarantined:
        say(f"quarantined {taken.thread_id}")
    elif taken.error is not None:
        say(f"failed {taken.thread_id}: {taken.error}")


async def main() -> None:
    scene, threads = sys.argv[2], sys.argv[3:]
    async with PLACE.checkpointer() as cp:
        if scene == "begin":
            say("ready")
            await asyncio.gather(*(prompt(cp, thread) for thread in threads))
        async with cp.supervise(agent_for, concurrency=1_000, every=OFTEN, report=report):
            if scene == "supervise":
                say("ready")
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
