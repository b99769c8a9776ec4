"""An app for tests of the chat: what its model does is in what it is told.

say a word               streams "You said: say a word."
slow 5                   streams a word every 50 ms, 5 of them
delete a.txt             calls a tool that asks for approval
work                     calls a tool that goes on until the file "go" is there
pay 5                    likewise, and asks a person after a crash
think                    thinks first
code 40                  streams so many lines of code
refuse                   the key is refused
"""

from __future__ import annotations

from pathlib import Path

PROGRAM = '''
import asyncio, os, re

from byssus import Agent, Model, ToolCall, tool
from byssus.errors import AuthenticationFailed
from byssus.events import *
from byssus.messages import TextContent, ToolResultMessage, Usage, UserMessage
from byssus.tools import ToolContext


@tool(approval=True)
def delete(path: str) -> str:
    """Delete a file."""
    return f"{path} is gone"


async def until_go(ctx):
    ctx.update("waiting for go")
    while not os.path.exists("go"):
        await asyncio.sleep(0.01)


@tool
async def work(ctx: ToolContext) -> str:
    """Work until the file go is there."""
    await until_go(ctx)
    return "\\n".join(f"step {number}" for number in range(20))


@tool(recovery="ask")
async def pay(amount: int, ctx: ToolContext) -> str:
    """Pay an amount."""
    await until_go(ctx)
    return f"paid {amount}"


@tool(name="print")
def printing(text: str) -> str:
    """Print a text, which no tool should."""
    print("printed:", text)
    return "done"


TOOLS = {
    "print": lambda rest: {"text": rest},
    "delete": lambda rest: {"path": rest},
    "work": lambda rest: {},
    "pay": lambda rest: {"amount": int(rest)},
}


class Talker:
    name = "talker"

    async def stream(self, request, signal):
        last = request.messages[-1]
        text = last.text if isinstance(last, UserMessage) else ""
        word, _, rest = text.partition(" ")
        yield StreamStart("talker-1")
        if word == "refuse":
            raise AuthenticationFailed("the key was refused; set TALKER_KEY")
        if word in TOOLS:
            call = ToolCall(f"c{len(request.messages)}", word, TOOLS[word](rest))
            yield ToolCallStart(0, call.id, call.name)
            yield ToolCallEnd(0, call)
            yield StreamDone("tool_use", Usage(10, 5))
            return
        if word == "think":
            yield ThinkingStart(0)
            yield ThinkingDelta(0, "first this, then that")
            yield ThinkingEnd(0)
        answer = f"You said: {text}." if text else f"The tool said: {last.text[:20]}."
        pause = 0.0
        if word == "slow":
            answer, pause = " ".join(f"word{number}" for number in range(int(rest))), 0.05
        if word == "code":
            lines = "\\n".join(f"line_{number} = {number}" for number in range(int(rest)))
            answer = f"```python\\n{lines}\\n```\\nThat was all."
        yield TextStart(1)
        for piece in re.findall(r"\\s*\\S+\\s*", answer):
            await asyncio.sleep(pause)
            yield TextDelta(1, piece)
        yield TextEnd(1)
        yield StreamDone("stop", Usage(100, 20, cost=0.01))


def agent(thread_id, user_id):
    return Agent(provider=Talker(), model=Model("talker-1"), tools=[delete, work, pay, printing])
'''


def write_talker(folder: Path) -> str:
    """Write the app; returns its name for --app."""
    (folder / "talker.py").write_text(PROGRAM, "utf-8")
    return "talker:agent"
