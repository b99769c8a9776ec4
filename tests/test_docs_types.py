"""Each Python block of the README and the docs passes `mypy --strict` as it stands, and the types find faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CELL = re.compile(r"^```ipython\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    built = DOCS / "_build"
    return [
        *sorted(ROOT.glob("README*.md")),
        *(page for page in sorted(DOCS.rglob("*.md")) if built not in page.parents),
    ]


def written_as_modules(folder: Path) -> dict[str, str]:
    """Write each block as a module whose line numbers are those of its page; the name of each tells its page."""
    found = {}
    for page in pages():
        text = page.read_text("utf-8")
        where = page.relative_to(ROOT).as_posix()
        for block in PYTHON_BLOCK.finditer(text):
            above = text.count("\n", 0, block.start(1))
            module = f"{re.sub(r'[^a-z0-9]', '_', where.lower())}_{above + 1}.py"
            (folder / module).write_text("\n" * above + block[1], "utf-8")
            found[module] = where
        if cells := CELL.findall(text):  # one function, in which `await` is allowed
            module = f"{re.sub(r'[^a-z0-9]', '_', where.lower())}_cells.py"
            body = "async def cells() -> None:\n" + textwrap.indent("".join(cells), "    ")
            (folder / module).write_text(body, "utf-8")
            found[module] = where
    return found


def mypy(folder: Path, modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Check modules in one run. The cache has a folder of its own: the whole project is checked from other paths."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "docs"), "--no-error-summary", "--no-pretty", *modules]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


PROGRAM = """
from collections.abc import Callable
from typing import Any, Literal, assert_type, cast

from byssus import Agent, Deny, HookContext, Middleware, RunResult, ToolCall, tool
from byssus.checkpointer import Answer, Checkpointer, CheckpointMetadata, FollowItem
from byssus.events import Event
from byssus.signals import Signal
from byssus.storage import AgentStorage, HistoryRow, SearchHit, SessionRow, TaskRow, UserRow
from byssus.stream import EventStream
from byssus.testing import ScriptedProvider, Step
from byssus.tools import Tool


@tool
def look(at: str) -> str:
    return at


@tool
async def go(to: str, days: int = 1) -> None:
    pass


def plain(at: int) -> None:
    pass


tools: list[Tool[..., Any]] = [look, go]
functions: list[Callable[..., Any]] = [look, plain]
steps: list[Step] = [[ToolCall("c1", "look", {})], "Done.", OSError("no network"), lambda _: "Done."]
Agent(provider=ScriptedProvider(steps), model="m", tools=tools)
Agent(model="local", tools=functions)


class Stops(Middleware):
    async def before_tool_call(
        self, call: ToolCall, *, signal: Signal | None = None, context: HookContext | None = None
    ) -> Deny | None:
        return None

    async def should_stop_after_turn(self, message: Any, results: Any, *, signal: Signal | None = None) -> bool:
        return True


class Trip:
    days: int


async def runs(agent: Agent) -> None:
    assert_type(await agent.prompt("a"), RunResult[None])
    assert_type(await agent.prompt("a", output=Trip), RunResult[Trip])
    assert_type(await agent.resume(), RunResult[None])
    assert_type(await agent.resume(output=Trip), RunResult[Trip])
    assert_type(agent.run_sync("a"), RunResult[None])
    assert_type(agent.run_sync("a", output=Trip), RunResult[Trip])
    assert_type(agent.stream("a"), EventStream[None])
    async with agent.stream("a", output=Trip) as events:
        assert_type(events.result, RunResult[Trip])
        assert_type(events.result.output.days, int)
    optional = await agent.prompt("a", output=cast("type[Trip | None]", Trip | None))
    assert_type(optional, RunResult[Trip | None])
    await agent.prompt([{"role": "user", "content": "a"}, b"an image", {"type": "text", "text": "b"}])
    agent.steer({"role": "user", "content": "a"})
    if (await agent.prompt("a")).stop_reason == "stoped":  # fault: no such stop reason
        pass


def follows(item: FollowItem, answer: Answer) -> None:
    if item.type == "run_ended" and item.stop_reason == "stoped":  # fault: no such stop reason
        pass


def listen(event: Event) -> None:
    if event.type == "agent_end":
        assert_type(event.run_id, str)
    if event.type == "agent_ends":  # fault: no such event
        pass


async def reads(cp: Checkpointer, storage: AgentStorage) -> None:
    user = storage.create_user("ann")
    assert_type(user, UserRow)
    assert_type(await cp.get_session("t"), SessionRow | None)
    assert_type(storage.get_conversation_history("t"), list[HistoryRow] | None)
    assert_type(storage.list_tasks(status="failed"), list[TaskRow] | None)
    assert_type(await cp.search("a", order="relevance"), list[SearchHit])
    assert_type(storage.update_session("t")["status"], Literal["active", "paused", "completed", "cancelled"])
    assert_type(CheckpointMetadata("t").created_at, str)
    user["quota"]  # fault: no such key
    storage.search("a", order="best")  # fault: no such order
    storage.save_message("t", "robot", "a")  # fault: no such role
    storage.update_task_status("k", "finished")  # fault: no such status
    Agent(model="local", steering_mode="some")  # fault: no such mode
"""


@pytest.mark.processes
def test_each_python_block_passes_mypy_strict_as_it_stands_and_the_types_find_faults(tmp_path: Path) -> None:
    """One run of mypy for both: nearly all of its time goes into reading the library."""
    page_of = written_as_modules(tmp_path)
    assert len(page_of) > 30
    (tmp_path / "program.py").write_text(PROGRAM, "utf-8")
    done = mypy(tmp_path, [*sorted(page_of), "program.py"])
    lines = done.stdout.splitlines()
    faults = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if "# fault" in line]
    assert [
        int(line.split(":")[1]) for line in lines if line.startswith("program.py:") and ": error:" in line
    ] == faults
    rest = "\n".join(line for line in lines if not line.startswith("program.py:"))
    told = re.sub(r"^([^:\n]+\.py):", lambda name: f"{page_of.get(name[1], name[1])}:", rest, flags=re.MULTILINE)
    assert (told, done.stderr) == ("", ""), f"{told}\n{done.stderr}"
