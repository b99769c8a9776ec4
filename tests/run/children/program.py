"""A program with a child thread under way: python -m tests.run.children.program DATABASE DIARY

The child's second tool says "ready" and then waits for a line on stdin. The diary gets a line for each run of a tool.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import checkpointer_for
from byssus.providers.scripted import ScriptedProvider
from byssus.tools import Tool


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def tools(diary: Path, *, waits: bool) -> list[Tool[..., Any]]:
    def note(line: str) -> None:
        with diary.open("a") as file:
            file.write(f"{line}\n")

    @tool
    def first() -> str:
        note("first")
        return "the first is done"

    @tool(recovery="retry")
    async def second() -> str:
        note("second")
        if waits:
            say("ready")
            await asyncio.to_thread(sys.stdin.readline)
        return "the second is done"

    return [first, second]


def agent(script: list[Any], tool_of_agent: Tool[..., Any], **options: Any) -> Agent:
    return Agent(provider=ScriptedProvider(script), model=Model("m"), tools=[tool_of_agent], **options)


def research(script: list[Any], diary: Path, *, waits: bool = False) -> Tool[[str], Any]:
    child = Agent(provider=ScriptedProvider(script), model=Model("m"), tools=tools(diary, waits=waits))
    return child.as_tool("research")


async def main(place: str, diary: Path) -> None:
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger("byssus").addHandler(handler)
    logging.getLogger("byssus").setLevel("INFO")
    script = [[ToolCall("f1", "first")], [ToolCall("s1", "second")]]
    async with checkpointer_for(place) as cp:
        child = research(script, diary, waits=True)
        call = ToolCall("r1", "research", {"task": "find it"})
        parent = agent([[call]], child, checkpointer=cp, thread_id="t", on_sigterm="hand_over")
        await parent.prompt("go")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
