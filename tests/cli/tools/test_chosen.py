"""`--tools`: ready-made tools for the model of `ask`, `chat` and `resume`, and what a crash in one of them leads to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import ToolCall, cli
from byssus.checkpointer import SQLiteCheckpointer
from byssus.cli.tools.chosen import Tools
from byssus.cli.tools.names import GROUPS, groups_of
from tests.support import forked
from tests.support.commands import command
from tests.support.databases import Database
from tests.support.postgres import wait_until
from tests.support.programs import pipe, program
from tests.support.wire import OpenAI, Server

MODEL = ("--model", "openai:gpt-x")


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with program(tmp_path, monkeypatch):
        pipe(monkeypatch, "")
        yield


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        yield server


def test_each_group_makes_the_tools_that_it_names(tmp_path: Path) -> None:
    made = Tools(tuple(GROUPS), str(tmp_path)).made(SQLiteCheckpointer(tmp_path / "a.db"), None)
    assert [tool.name for tool in made] == [name for names in GROUPS.values() for name in names]
    assert groups_of(["edit_file", "shell"]) == ["files", "shell"]
    assert groups_of(["shell", "pay"]) == []


def test_a_model_uses_the_tools_that_were_chosen(
    database: Database, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("Bergen")
    calls = [ToolCall("1", "read_file", {"path": "a.txt"}), ToolCall("2", "read_file", {"path": "../clerk.py"})]
    server.script(OpenAI.answer(*calls), OpenAI.answer("It says Bergen."))
    tools = ("--tools", "files, time,files", "--folder", str(tmp_path / "notes"))
    assert cli.main(["ask", "Look.", *MODEL, *tools, "--db", database.place]) == 0
    assert capsys.readouterr().out == "It says Bergen.\n"
    first, second = (request.body for request in server.requests)
    assert [tool["function"]["name"] for tool in first["tools"]] == [*GROUPS["files"], *GROUPS["time"]]
    told = [message["content"] for message in second["messages"] if message["role"] == "tool"]
    assert told[0].endswith("\nBergen")
    assert "has '..'" in told[1]


def test_pending_shows_the_difference_that_a_write_would_make(
    database: Database, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script(OpenAI.answer(ToolCall("1", "write_file", {"path": "a.txt", "content": "one\ntwo\x1b[2J\n"})))
    assert cli.main(["ask", "Write.", "--thread", "t", *MODEL, "--tools", "files", "--db", database.place]) == 1
    capsys.readouterr()
    assert cli.main(["pending", "--db", database.place]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("t  1  approval: write_file with {")
    assert head.endswith("Make the file a.txt? 2 lines added, 0 removed.")
    assert rows == ["    @@ -0,0 +1,2 @@", "    +one", "    +two\\x1b[2J"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([*MODEL, "--tools", "file"], ["--tools has no 'file'", "files, shell, time, threads"]),
        ([*MODEL, "--tools", "web"], ["--tools has no 'web'; there are files, shell, time, threads"]),
        ([*MODEL, "--tools", "files", "--folder", "nowhere"], ["folder 'nowhere' does not exist"]),
        ([*MODEL, "--tools", "time", "--folder", "."], ["--folder is where files and shell work"]),
        (["--model", "local", "--tools", "time"], ["the local model is too small to use tools"]),
        (["--app", "clerk:support", "--tools", "time"], ["chooses its tools itself; leave out --tools"]),
    ],
)
def test_a_wrong_choice_is_one_line(
    server: Server, capsys: pytest.CaptureFixture[str], more: list[str], words: list[str]
) -> None:
    assert cli.main(["ask", "Why?", *more]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert server.requests == []


@pytest.mark.processes
def test_after_a_kill_in_the_middle_of_a_command_a_person_is_asked(
    database: Database, server: Server, tmp_path: Path
) -> None:
    byssus = command(tmp_path, database.place)
    tools = (*MODEL, "--tools", "shell")
    server.script(
        OpenAI.answer(ToolCall("c1", "shell", {"command": "echo $$ >> pids; sleep 600"})),
        OpenAI.answer("It may have run."),
    )
    assert "waits for a person" in byssus("ask", "Run it.", "--thread", "t", *tools, code=1).stderr
    question = byssus("pending").stdout
    assert 'shell with {"command":"echo $$ >> pids; sleep 600","folder":' in question
    assert "Run this command?" in question
    assert byssus("answer", "t", "c1", "approve").stderr.endswith("byssus resume t --tools shell\n")
    killed = forked.Process(["-m", "byssus", "resume", "t", *tools, "--db", database.place], cwd=Path.cwd())
    pids = tmp_path / "pids"
    wait_until(lambda: pids.is_file() and pids.read_text().endswith("\n"), "the command does not begin")
    killed.kill()
    killed.wait()

    assert "byssus resume t --tools shell" in byssus("resume", "t", *MODEL, code=1).stderr
    assert byssus("resume", "t", *tools).stdout == "t  waits for a person: byssus pending lists the questions\n"
    question = "This call was interrupted: it may or may not have taken effect. Shall it run again?"
    assert "t  c1  recovery: shell with" in byssus("pending").stdout
    assert question in byssus("pending").stdout
    byssus("answer", "t", "c1", "deny", "Once is enough.")
    assert byssus("resume", "t", *tools).stdout == "t  finished  It may have run.\n"
    assert pids.read_text().count("\n") == 1
    assert "Once is enough." in server.requests[1].body["messages"][-1]["content"]
    os.killpg(int(pids.read_text()), signal.SIGKILL)  # what was started lives on when byssus is killed
