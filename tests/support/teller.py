"""An app for scenes in a terminal: its model does what it is told, and stops where a test wants to look.

tell FILE      streams a file in pieces of seven characters; at each form feed it waits until the file "go" is there
run X          calls a tool that asks for approval
hang           calls a tool that never ends
block          calls a tool whose thread never ends
fail KIND      the key is refused, there is no such model, or no network
say X, or else  is repeated
"""

from __future__ import annotations

from pathlib import Path

PROGRAM = '''
import asyncio, os, threading
from pathlib import Path

from byssus import Agent, Model, ToolCall, tool
from byssus.errors import AuthenticationFailed, InvalidRequest, NetworkFailed
from byssus.events import *
from byssus.messages import Usage, UserMessage

FAILURES = {
    "key": AuthenticationFailed("the key was refused; set TELLER_KEY"),
    "model": InvalidRequest("there is no model 'gpt-99'"),
    "network": NetworkFailed("no connection to api.example.com; check the network"),
}


async def until_go():
    while not os.path.exists("go"):
        await asyncio.sleep(0.01)
    os.unlink("go")


@tool(approval=True)
def run(command: str) -> str:
    """Run a command."""
    return f"ran {command}"


@tool
async def hang() -> str:
    """Never end."""
    await asyncio.sleep(3600)


@tool
async def block() -> str:
    """Never end, even if it is cancelled."""
    await asyncio.to_thread(threading.Event().wait)
    return "never"


class Teller:
    name = "teller"

    async def stream(self, request, signal):
        last = request.messages[-1]
        text = last.text
        word, _, rest = text.partition(" ")
        if not isinstance(last, UserMessage):
            word, rest = "", text
        if word == "fail":
            raise FAILURES[rest]
        yield StreamStart("teller-1")
        if word in ("run", "hang", "block"):
            call = ToolCall(f"c{len(request.messages)}", word, {"command": rest} if rest else {})
            yield ToolCallStart(0, call.id, call.name)
            yield ToolCallEnd(0, call)
            yield StreamDone("tool_use", Usage(10, 5))
            return
        answer = f"You said: {rest if word in ('say', '') else text}."
        if len(text) > 1000:
            answer = f"You said {len(text)} characters."
        if word == "tell":
            answer = Path(rest).read_text("utf-8")
        yield TextStart(0)
        for number, part in enumerate(answer.split("\\f")):
            if number:
                await until_go()
            for start in range(0, len(part), 7):
                yield TextDelta(0, part[start : start + 7])
                await asyncio.sleep(0)
        yield TextEnd(0)
        yield StreamDone("stop", Usage(100, 20, cost=0.01))


def agent(thread_id, user_id):
    return Agent(provider=Teller(), model=Model("teller-1"), tools=[run, hang, block], max_retries=0)
'''


def write_teller(folder: Path) -> str:
    """Write the app; returns its name for --app."""
    (folder / "teller.py").write_text(PROGRAM, "utf-8")
    return "teller:agent"
