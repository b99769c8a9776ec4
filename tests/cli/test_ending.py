"""How the command ends where a tool does not, and when Ctrl-C comes before it has begun."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from byssus import ToolResultMessage, UserMessage
from byssus.checkpointer import SQLiteCheckpointer
from tests.support import forked

pytestmark = pytest.mark.processes

APP = """\
import asyncio, threading
from byssus import Agent, Model, ToolCall, tool
from byssus.providers.scripted import ScriptedProvider

@tool
async def block() -> None:
    print("begun", flush=True)
    await asyncio.to_thread(threading.Event().wait)

@tool
async def deaf() -> None:
    print("begun", flush=True)
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

def factory(thread_id, user_id):
    return Agent(provider=ScriptedProvider([ToolCall("c", thread_id)]), model=Model("m"), tools=[block, deaf])

agents = {"block": lambda *_: factory("block", None), "deaf": lambda *_: factory("deaf", None)}
"""

# A command, the tool that goes on, what stops it, and the exit code.
COMMANDS = (
    (("ask", "go", "--thread"), "block", signal.SIGINT, 130),
    (("chat", "--plain"), "deaf", signal.SIGTERM, 143),
    (("resume",), "block", signal.SIGTERM, 143),
)


def test_a_command_ends_although_a_tool_goes_on(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP, "utf-8")
    db = tmp_path / "a.db"

    async def prepare() -> None:
        async with SQLiteCheckpointer(db) as cp:
            await cp.append("resume", UserMessage("go"))

    async def last(thread_id: str) -> object:
        async with SQLiteCheckpointer(db) as cp:
            thread = await cp.load(thread_id)
            return thread and thread.messages[-1]

    asyncio.run(prepare())
    with ExitStack() as stack:
        running = []
        for command, tool, *_ in COMMANDS:
            typed = [*command, command[0], "--app", "app:agents", "--agent", tool, "--db", str(db)]
            process = forked.Process(
                ["-m", "byssus", *typed],
                cwd=tmp_path,
                env={**os.environ, "HOME": str(tmp_path)},
                stdin=forked.PIPE,
                stdout=forked.PIPE,
                stderr=forked.PIPE,
            )
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in running:  # at the same time: each one waits a moment for its tool
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go" if process is running[1] else "")
            process.stdin.close()
            assert process.stdout.readline() == "begun\n"
        for process, (_, _, number, _) in zip(running, COMMANDS, strict=True):
            process.send_signal(number)
        assert [process.wait(60) for process in running] == [code for *_, code in COMMANDS]
        for process in running:
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
    for command, *_ in COMMANDS:
        assert isinstance(asyncio.run(last(command[0])), ToolResultMessage)


@pytest.mark.parametrize("imported", ["byssus.cli", "byssus.cli.chat.ask"], ids=["the imports", "the parser"])
def test_ctrl_c_at_the_start_is_exit_code_130_and_no_traceback(imported: str) -> None:
    program = f"""
import signal, sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {imported!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from byssus.__main__ import main
sys.argv = ["byssus", "ask", "go"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
