"""Commands run with approval, in a process group that ends with them, and see no more than they are given."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from byssus import Agent, Model, ToolCall, ToolResultMessage
from byssus.events import ToolExecutionUpdate
from byssus.providers.scripted import ScriptedProvider
from byssus.tools.ready import shell
from byssus.tools.ready.shell import PASSED_ON
from tests.support.cases import case
from tests.support.postgres import wait_until
from tests.support.tools import run

pytestmark = pytest.mark.processes


def done(folder: Path, command: str, **arguments: Any) -> ToolResultMessage:
    (made,) = shell(folder)
    return run(made, command=command, **arguments)


def members(group: int) -> list[int]:
    """The processes of a group that have not ended. A zombie has, and so it is not among them."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, number, state in rows if int(number) == group and not state.startswith("Z")]


def pid_in(file: Path) -> int:
    """The number that a command writes to a file when it has come so far."""
    wait_until(lambda: file.is_file() and file.read_text().endswith("\n"), f"nothing wrote {file.name}")
    return int(file.read_text())


def test_the_output_and_the_exit_code_are_the_result(tmp_path: Path) -> None:
    result = done(tmp_path, "echo out; echo err >&2; pwd")
    assert result.text == f"out\nerr\n{tmp_path.resolve()}\n[exit code 0]"
    assert not result.is_error
    assert result.details["exit_code"] == 0
    result = done(tmp_path, "exit 7")
    assert (result.text, result.is_error) == ("[exit code 7]", True)
    assert done(tmp_path, "kill -SEGV $$").text == "[killed by signal 11: segmentation fault]"
    assert "nowhere: not found" in done(tmp_path, "nowhere").text
    (made,) = shell(tmp_path)
    assert "this call is for the folder '/'" in run(made, command="true", folder="/").text
    for command in ("", "  ", "a\0b"):
        assert "a command must be text" in done(tmp_path, command).text


def test_a_command_sees_the_variables_of_a_list_and_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("TERM", "xterm-256color")
    seen = dict(line.split("=", 1) for line in done(tmp_path, "env").text.splitlines()[:-1])
    fixed = {"TERM", "NO_COLOR", "PAGER", "GIT_PAGER", "GIT_TERMINAL_PROMPT"}
    assert set(seen) - {"PWD", "SHLVL", "_", "OLDPWD"} == (set(PASSED_ON) & set(os.environ)) | fixed
    assert (seen["LC_ALL"], seen["TERM"]) == ("C", "dumb")
    (given,) = shell(tmp_path, env={"TOKEN": "abc"})
    assert "TOKEN=abc" in run(given, command="env").text


def test_there_is_no_input_and_no_terminal(tmp_path: Path) -> None:
    assert done(tmp_path, "cat; echo end").text == "end\n[exit code 0]"
    assert done(tmp_path, "exec < /dev/tty").is_error
    assert done(tmp_path, 'test "$(ps -o pgid= -p $$ | tr -d " ")" = $$').text == "[exit code 0]"


def test_of_much_output_the_head_and_the_tail_are_kept(tmp_path: Path) -> None:
    result = done(tmp_path, "echo first; head -c 50000000 /dev/zero | tr '\\0' x; printf '\\nlast\\0\\377'")
    assert result.text.startswith("first\nxxx")
    assert result.text.endswith("xxx\nlast��\n[exit code 0]")
    assert "bytes left out ...]" in result.text
    assert len(result.text) < 33_000
    assert result.details["bytes"] == 50_000_013


ENDLESS = {
    "hangs": "echo begun; sleep 600",
    "ignores SIGTERM": "trap '' TERM HUP INT; echo begun; while :; do sleep 600; done",
    "closes its output": "echo begun; exec >&- 2>&-; sleep 600",
    "stops": "echo begun; kill -STOP $$",
    "forks": "for i in 1 2 3 4 5 6 7 8; do (trap '' TERM; sleep 600) & done; echo begun; wait",
}


def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    def try_it(name: str) -> None:
        with case(name):
            (tmp_path / name).mkdir()
            is_killed_in_time(tmp_path / name, ENDLESS[name])

    with ThreadPoolExecutor(len(ENDLESS)) as pool:  # they mostly wait
        assert len(list(pool.map(try_it, ENDLESS))) == len(ENDLESS)


def test_a_command_that_prints_for_ever_is_killed(tmp_path: Path) -> None:
    is_killed_in_time(tmp_path, "echo begun; yes")


def is_killed_in_time(folder: Path, command: str) -> None:
    result = done(folder, f"echo $$ > group; {command}", seconds=1)
    assert result.is_error
    assert result.text.startswith("begun")
    assert result.text.endswith("[killed after 1 s: it may have taken effect in part]")
    assert result.details["timed_out"]
    group = pid_in(folder / "group")
    wait_until(lambda: not members(group), f"{command} goes on")


def test_nothing_goes_on_in_the_background(tmp_path: Path) -> None:
    result = done(tmp_path, "echo $$ > group; sleep 600 & echo begun")
    assert result.text == "begun\n[exit code 0]"
    group = pid_in(tmp_path / "group")
    wait_until(lambda: not members(group), "it goes on")


def test_a_process_that_leaves_the_group_does_not_hold_the_result_back(tmp_path: Path) -> None:
    result = done(
        tmp_path, "setsid sh -c 'echo $$ > pid; sleep 600' & while ! test -s pid; do sleep 0.05; done; echo ok"
    )
    assert result.text == "ok\n[exit code 0]"
    os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)


def asking(folder: Path, command: str) -> Agent:
    provider = ScriptedProvider([[ToolCall("1", "shell", {"command": command})], "Done."])
    return Agent(provider=provider, model=Model("m"), tools=shell(folder))


async def approved(agent: Agent, folder: Path) -> asyncio.Task[Any]:
    assert (await agent.prompt("go")).stop_reason == "waiting"
    (question,) = agent.pending
    assert question.question == "Run this command?"
    assert question.arguments["folder"] == str(folder.resolve())
    await agent.answer("1", "approve")
    return asyncio.create_task(agent.resume())


def test_the_output_is_reported_while_it_runs(tmp_path: Path) -> None:
    async def use() -> None:
        agent = asking(tmp_path, "echo one; cat fifo; echo three")
        os.mkfifo(tmp_path / "fifo")
        heard: list[str] = []
        begun = asyncio.Event()

        def hear(event: object) -> None:
            if isinstance(event, ToolExecutionUpdate):
                heard.append(event.update)
                begun.set()

        agent.subscribe(hear)
        resumed = await approved(agent, tmp_path)
        await begun.wait()
        assert heard == ["one\n"]
        (tmp_path / "fifo").write_text("two\n")
        result = await resumed
        assert "".join(heard) == "one\ntwo\nthree\n"
        assert result.messages[0].text == "one\ntwo\nthree\n[exit code 0]"

    asyncio.run(use())


def test_output_that_comes_soon_after_an_update_is_reported_too(tmp_path: Path) -> None:
    async def use() -> None:
        agent = asking(tmp_path, "echo one; sleep 0.06; echo two; cat fifo")
        os.mkfifo(tmp_path / "fifo")
        two = asyncio.Event()
        agent.subscribe(lambda event: two.set() if "two" in str(getattr(event, "update", "")) else None)
        resumed = await approved(agent, tmp_path)
        await asyncio.wait([resumed, waiting := asyncio.create_task(two.wait())], return_when="FIRST_COMPLETED")
        assert waiting.done()
        (tmp_path / "fifo").write_text("three\n")
        await resumed

    asyncio.run(use())


@pytest.mark.parametrize("command", ["sleep 600", "trap '' TERM; sleep 600; sleep 600"])
def test_an_abort_ends_the_command(tmp_path: Path, command: str) -> None:
    async def use() -> None:
        agent = asking(tmp_path, f"echo $$ > group; {command}")
        resumed = await approved(agent, tmp_path)
        group = await asyncio.to_thread(pid_in, tmp_path / "group")
        agent.abort()
        assert (await resumed).stop_reason == "aborted"
        await asyncio.to_thread(wait_until, lambda: not members(group), "it goes on")

    asyncio.run(use())
