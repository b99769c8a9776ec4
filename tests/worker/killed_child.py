"""A worker that dies by SIGKILL at its n-th commit, before or after it.

    python -m tests.worker.killed_child PLACE DIARY N

The diary is a file to which each step and each tool adds a line when it runs, and the handler when it knows a result.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import checkpointer_for
from byssus.messages import ToolResultMessage
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.worker import StepUnknown, TaskContext, ThreadContext, Worker

PLACE, DIARY, DIES_AT = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def note(line: str) -> None:
    with DIARY.open("a") as file:
        file.write(f"{line}\n")


def act(name: str) -> str:
    note(f"ran {name}")
    return f"{name} is done"


async def steps(ctx: TaskContext, payload: Any) -> Any:
    found = [await ctx.step("first", act, "first", recovery="retry")]
    note("knows first")
    try:
        found.append(await ctx.step("once", act, "once"))
    except StepUnknown:
        found.append("unknown")
    note("knows once")
    await ctx.sleep(hours=1)
    found.append(await ctx.wait_for("approval"))
    found.append(await ctx.step("last", act, "last", recovery="retry"))
    note("knows last")
    return found


def plain(ctx: ThreadContext, payload: Any) -> Any:
    found = ctx.step("plain", act, "plain", recovery="retry")
    note("knows plain")
    return found


@tool
def pay() -> str:
    return act("pay")


@tool(recovery="retry", max_attempts=None)
def look() -> str:
    return act("look")


def answer(request: Request) -> Step:
    """What the model says depends on the conversation alone, so every process goes on with it in the same way."""
    results = sum(isinstance(message, ToolResultMessage) for message in request.messages)
    return ([ToolCall("c1", "pay")], [ToolCall("c2", "look")], "all is done")[results]


def support(thread_id: str, user_id: str | None) -> Agent:
    return Agent(provider=ScriptedProvider([answer] * 9), model=Model("m"), tools=[pay, look])


async def main() -> None:
    async with checkpointer_for(PLACE) as cp:
        reached = 0

        def boundary(_: str) -> None:
            nonlocal reached
            reached += 1
            if reached == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)

        cp.store.boundary = boundary
        async with Worker(cp, {"steps": steps, "plain": plain}, app=support, concurrency=3):
            while any(task["status"] in ("pending", "running") for task in await cp.list_tasks() or []):
                await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main())
