"""The command line, as people and scripts meet it: real processes, real pipes, a real terminal."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from byssus import checkpointer
from byssus.cli import main
from byssus.cli.chat import chat
from byssus.cli.screen import terminal
from byssus.messages import (
    AssistantMessage,
    Failure,
    ImageContent,
    Message,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UserMessage,
    from_value,
)
from tests.support import forked
from tests.support.approvals import Deleting
from tests.support.databases import Database
from tests.support.leases import agent_on
from tests.support.programs import pipe
from tests.support.terminal import Terminal

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
BYSSUS = [sys.executable, "-m", "byssus"]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A file that is not there yet, for what is about files."""
    return tmp_path / "chat.db"


@pytest.fixture
def on_file(tmp_path: Path, db: Path) -> Command:
    def run(*args: str, say: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(tmp_path), "BYSSUS_DB": str(db), "PYTHONUTF8": "1", **variables}
        return forked.run(["-m", "byssus", *args], env=env, cwd=ROOT, input=say, timeout=100)

    return run


@pytest.fixture
def new_python(tmp_path: Path, database: Database) -> Command:
    """The command as a person starts it, with a Python of its own: the others save its start."""

    def run(*args: str, say: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(tmp_path), "BYSSUS_DB": database.place, "PYTHONUTF8": "1", **variables}
        return subprocess.run(
            [*BYSSUS, *args], input=say, env=env, capture_output=True, encoding="utf-8", check=False, timeout=100
        )

    return run


@pytest.fixture
def byssus(on_file: Command, database: Database) -> Command:
    return functools.partial(on_file, BYSSUS_DB=database.place)


def fill(database: Database, thread_id: str, *messages: Message) -> None:
    async def main() -> None:
        async with database.checkpointer() as checkpointer:
            await checkpointer.append(thread_id, list(messages))

    asyncio.run(main())


def fails(run: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr that names the thing, nothing else, and exit code 1."""
    assert run.returncode == 1
    assert re.fullmatch(r"byssus: [^\n]+\n", run.stderr), run.stderr
    assert all(word in run.stderr for word in words), run.stderr


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_piped_chat_answers_and_the_next_process_goes_on(new_python: Command) -> None:
    first = new_python("chat", say="Say hello.\n")
    assert first.returncode == 0
    thread, note, switch = first.stderr.splitlines()
    assert thread == "Thread main: new."
    assert "small embedded model" in note
    assert switch.startswith("For a real one: ANTHROPIC_API_KEY=... ")  # the SDK is installed here
    assert switch.endswith(" chat --provider anthropic")
    assert first.stdout.strip()  # the reply, and nothing else
    assert "> " not in first.stdout[:2]

    second = new_python("chat", say="\n   \nAnd goodbye.")
    assert second.returncode == 0
    assert second.stderr.startswith("Thread main: 2 messages so far.\n")

    shown = json.loads(new_python("show", "main", "--json").stdout)
    assert [message["role"] for message in shown["messages"]] == ["user", "assistant"] * 2
    assert shown["messages"][2]["content"] == [{"type": "text", "text": "\n   \nAnd goodbye."}]


def test_piped_text_is_one_prompt(byssus: Command) -> None:
    assert byssus("chat", say="+ one\n\n- two\n").returncode == 0
    shown = json.loads(byssus("show", "main", "--json").stdout)
    assert [message["role"] for message in shown["messages"]] == ["user", "assistant"]
    assert shown["messages"][0]["content"] == [{"type": "text", "text": "+ one\n\n- two"}]


def test_another_thread_starts_blank(byssus: Command, database: Database) -> None:
    fill(database, "main", UserMessage("hello"), AssistantMessage("hi"))
    assert byssus("chat", "trip").stderr.startswith("Thread trip: new.\n")


def test_without_a_path_the_chat_lives_in_the_users_data_directory(on_file: Command, tmp_path: Path) -> None:
    assert on_file("chat", BYSSUS_DB="", XDG_DATA_HOME=str(tmp_path / "data")).returncode == 0
    (path,) = tmp_path.rglob("chat.db")
    assert path.parent.name == "byssus"


def test_the_option_wins_over_the_variable(on_file: Command, tmp_path: Path, db: Path) -> None:
    assert on_file("chat", "--db", str(tmp_path / "new" / "other.db")).returncode == 0
    assert (tmp_path / "new" / "other.db").exists()
    assert not db.exists()


def test_the_database_may_be_named_before_the_command(on_file: Command, tmp_path: Path) -> None:
    there = tmp_path / "there.db"
    assert on_file("--db", str(there), "chat").returncode == 0
    assert there.exists()
    listed = on_file("threads", "--db", str(there)).stdout
    assert on_file("--db", str(there), "threads").stdout == listed
    assert on_file("--db", str(tmp_path / "other.db"), "threads", "--db", str(there)).stdout == listed


def test_a_command_that_works_on_no_database_says_so(on_file: Command) -> None:
    done = on_file("--db", "x.db", "copy", "a.db", "b.db")
    assert done.returncode == 2
    assert "takes no --db, got 'x.db'" in done.stderr


def test_a_reply_that_fails_is_one_line_and_an_exit_code(byssus: Command, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    run = byssus("chat", "--model", str(broken), say="hello\nagain\n")
    assert run.returncode == 1
    assert [line.startswith("byssus: ") for line in run.stderr.splitlines()[3:]] == [True]
    fails(byssus("chat", "--model", "/nowhere.gguf"), "/nowhere.gguf")


def test_a_chat_leaves_an_approved_call_to_the_program_that_has_the_tool(byssus: Command, database: Database) -> None:
    async def main() -> list[str]:
        async with database.checkpointer() as cp:
            tool = Deleting().tool
            await agent_on(cp, [[ToolCall("c1", "delete", {"path": "a"})]], "main", tools=[tool]).prompt("go")
            await cp.answer("main", "c1", "approve")
            run = byssus("chat", say="hello\n")
            assert run.returncode == 1
            interrupted, line = run.stderr.splitlines()[3:]
            assert interrupted.endswith("To finish it first: byssus resume main")
            assert line.startswith("byssus: thread 'main' needs tool 'delete' for call 'c1'")
            return [record.status for record in await cp.tool_calls("main")]

    assert asyncio.run(main()) == ["answered"]


@pytest.mark.parametrize(
    ("term", "missing", "draws"),
    [("xterm", None, True), ("dumb", None, False), (None, None, False), ("xterm", "prompt_toolkit", False)],
)
def test_the_chat_draws_where_the_terminal_can_and_its_extra_is_installed(
    monkeypatch: pytest.MonkeyPatch, term: str | None, missing: str | None, draws: bool
) -> None:
    find, (keys, screen) = importlib.util.find_spec, os.openpty()
    with open(keys, "r+b", buffering=0), open(screen) as stdin, open(os.dup(screen), "w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
        monkeypatch.delenv("TERM", raising=False)
        if term is not None:
            monkeypatch.setenv("TERM", term)
        assert chat._can_draw() is draws
        monkeypatch.undo()


def test_a_chat_without_the_key_that_it_needs_says_so(byssus: Command) -> None:
    run = byssus("chat", "--provider", "anthropic", say="hello\n", ANTHROPIC_API_KEY="", ANTHROPIC_AUTH_TOKEN="")
    fails(run, "ANTHROPIC_API_KEY")
    assert run.stdout == ""


def test_undecodable_input_is_no_crash(byssus: Command, tmp_path: Path, database: Database) -> None:
    env = {**os.environ, "BYSSUS_DB": database.place, "PYTHONUTF8": "1"}
    run = subprocess.run([*BYSSUS, "chat"], input=b"\xff\xfe\n", env=env, capture_output=True, check=False)
    assert run.returncode == 0
    assert b"Traceback" not in run.stderr


CHAT = [*BYSSUS, "chat", "--system", "Write at least a thousand words."]
# What make does: it waits for the chat in the same group of processes, and a Ctrl-C that reaches it ends it.
WAITING_PARENT = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))", *CHAT]


@pytest.fixture
def tty(database: Database, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    new = getattr(request, "param", None)
    terminal = Terminal(*(new or CHAT[1:]), env={"BYSSUS_DB": database.place}, new_python=new is not None)
    yield terminal
    terminal.close()


@pytest.mark.parametrize("tty", [CHAT, WAITING_PARENT], ids=["alone", "below make"], indirect=True)
def test_ctrl_c_stops_the_reply_and_keeps_the_chat(tty: Terminal, byssus: Command) -> None:
    tty.wait_for(r"Ctrl-D leaves\.\s+> ")
    for place in ("sea", "moon"):
        tty.type(f"Tell a very long story about the {place}.\n")
        tty.wait_for(rf"about the {place}\.\s+\w")
        tty.type("\x03")
        tty.wait_for(r"\[stopped\]\s+> ")
    tty.press_until_it_ends("\x04")
    assert tty.process.returncode == 0
    shown = json.loads(byssus("show", "main", "--json").stdout)
    assert [message["role"] for message in shown["messages"]] == ["user", "assistant"] * 2


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_ctrl_c_and_ctrl_d_at_the_prompt_leave_in_peace(tty: Terminal, key: str) -> None:
    tty.wait_for(r"Ctrl-D leaves\.\s+> ")
    tty.press_until_it_ends(key)
    assert tty.process.returncode == 0
    assert "Traceback" not in tty.screen


def test_pasted_lines_are_one_prompt(database: Database, byssus: Command) -> None:
    tty = Terminal(*CHAT[1:], "--plain", env={"BYSSUS_DB": database.place, "TERM": "xterm"}, new_python=False)
    try:
        tty.wait_for(r"Ctrl-D leaves\.\s+(\x1b\[\?2004h)?> ")
        tty.type("\x1b[200~Tell a long story\nabout the sea.\x1b[201~\r")
        tty.wait_for(r"about the sea\.[\s\S]*\x1b\[\?2004l\s+\w")  # the line was taken, and the reply has begun
        tty.type("\x03")
        tty.wait_for(r"\[stopped\]\s+\x1b\[\?2004h> ")
        tty.press_until_it_ends("\x04")
    finally:
        tty.close()
    shown = json.loads(byssus("show", "main", "--json").stdout)
    assert [message["content"][0]["text"] for message in shown["messages"] if message["role"] == "user"] == [
        "Tell a long story\nabout the sea."
    ]


def test_sigterm_ends_a_reply_in_good_order_and_the_chat_with_143(tty: Terminal, byssus: Command) -> None:
    tty.wait_for(r"Ctrl-D leaves\.\s+> ")
    tty.type("Tell a very long story about the sea.\n")
    tty.wait_for(r"about the sea\.\s+\w")
    tty.process.terminate()
    assert tty.process.wait(60) == 143
    shown = json.loads(byssus("show", "main", "--json").stdout)
    assert [message["role"] for message in shown["messages"]] == ["user", "assistant"]
    assert shown["messages"][1]["stop_reason"] == "aborted"
    assert shown["messages"][1]["content"][0]["text"]


def terminate(process: subprocess.Popen[Any] | forked.Process) -> int:
    """Send SIGTERM, and again where it falls before Python's wait for input, and is not seen; the exit code."""
    for _ in range(60):
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1)
    raise AssertionError("SIGTERM does not end it")


def test_sigterm_at_the_prompt_leaves_with_143(tty: Terminal) -> None:
    tty.wait_for(r"Ctrl-D leaves\.\s+> ")
    assert terminate(tty.process) == 143


def test_sigterm_leaves_a_piped_chat_that_waits_for_a_line_with_143(database: Database) -> None:
    command = [*CHAT, "--db", database.place]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"Thread main: new.\n"
        assert terminate(process) == 143
        assert b"Traceback" not in process.stderr.read()


TERMINATED_TWICE = """
import atexit, os, signal, sys
from byssus.cli import main
from byssus.cli.chat import chat

class Stdin:
    def isatty(self):
        return False

    def read(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return ""

sys.stdin = Stdin()
atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # the last moment of a process that leaves
sys.exit(main(["chat", "--db", sys.argv[1]]))
"""


def test_a_second_sigterm_while_a_chat_leaves_does_not_change_the_exit_code(database: Database) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED_TWICE, database.place], capture_output=True, text=True, check=False
    )
    assert done.returncode == 143
    assert "Traceback" not in done.stderr


# --- threads and show -------------------------------------------------------------------------------------------------


def test_an_empty_database_has_no_threads(byssus: Command, database: Database) -> None:
    fill(database, "main")
    assert byssus("threads").stdout.startswith("There are no threads yet")
    assert json.loads(byssus("threads", "--json").stdout) == []


def test_show_tells_every_kind_of_message(byssus: Command, database: Database) -> None:
    fill(
        database,
        "all",
        UserMessage([ImageContent(data="aGk="), *UserMessage("look\r\nhere").content]),
        AssistantMessage(
            [ThinkingContent("hm"), ToolCall(id="1", name="clock", arguments={"zone": "UTC"})], "tool_use"
        ),
        ToolResultMessage("1", "clock", "no such zone", is_error=True),
        AssistantMessage("so", "error", error=Failure("Overloaded", "too busy")),
        from_value({"role": "system", "content": "a note"}),
        from_value([1, 2]),
    )
    run = byssus("show", "all")
    assert (run.returncode, run.stderr) == (0, "")
    text = re.sub(r", \d{4}-[^\n,]+", "", run.stdout)
    assert text == (
        "-- user\n[image, image/png]\nlook\nhere\n\n"
        '-- assistant\n[thinking] hm\n[calls clock with {"zone":"UTC"}]\n\n'
        "-- tool_result, clock (failed)\nno such zone\n\n"
        "-- assistant, error: too busy\nso\n\n"
        "-- system\na note\n\n"
        "-- note\n[1,2]\n\n"
    )


def test_stored_text_cannot_drive_the_terminal(byssus: Command, database: Database) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b2J\rfake\u202etxt\x00"
    fill(
        database,
        "a\x1b[31m\nb",
        UserMessage(evil),
        ToolResultMessage("1", f"tool{evil}", evil),
        AssistantMessage(evil, "error", error=Failure("X", evil)),
        from_value({"role": f"role{evil}", "content": evil}),
    )
    outputs = [
        byssus("threads").stdout,
        byssus("threads", "--json").stdout,
        byssus("show", "a\x1b[31m\nb").stdout,
        byssus("show", "a\x1b[31m\nb", "--json").stdout,
        byssus("show", f"no{evil[:-1]}").stderr,
    ]
    for output in outputs:
        assert output
        assert not re.search(r"[^\n -~]", output.replace("\t", " ")), output
    assert "\\x1b[2J" in outputs[2]


def test_an_output_that_cannot_show_a_character_shows_its_number(new_python: Command, database: Database) -> None:
    fill(database, "main", UserMessage("你好 \ud800"))
    run = new_python("show", "main", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert (run.returncode, run.stderr) == (0, "")
    assert "\\u4f60\\u597d \\ud800" in run.stdout


def test_a_reader_that_goes_away_is_no_error(byssus: Command, database: Database) -> None:
    fill(database, "main", *(UserMessage("many words " * 1000) for _ in range(50)))
    shell = f"'{sys.executable}' -m byssus show main --db '{database.place}' | head -1"
    run = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=False)
    assert run.stdout.startswith("-- user")
    assert run.stderr == ""


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["threads"], ["show", "main"]])
def test_looking_makes_no_database(on_file: Command, new_database: Database, command: list[str]) -> None:
    fails(on_file(*command, BYSSUS_DB=new_database.place), "there is no database at", "byssus chat")
    assert not checkpointer.exists(new_database.place)


def test_an_unknown_thread_is_named(byssus: Command, database: Database) -> None:
    fill(database, "main", UserMessage("hello"))
    fails(byssus("show", "trip"), "'trip'", "byssus threads")


@pytest.mark.parametrize("command", [["chat"], ["threads"], ["show", "main"]])
def test_a_file_that_is_no_database_is_refused_and_left_alone(on_file: Command, db: Path, command: list[str]) -> None:
    db.write_text("no database, but my diary\n" * 100)
    fails(on_file(*command, say="hello\n"), str(db))
    assert db.read_text() == "no database, but my diary\n" * 100


@pytest.mark.parametrize(
    "args",
    [[], ["nonsense"], ["show"], ["threads", "--limit", "0"], ["threads", "--limit", "x"], ["chat", "--provider", "x"]],
)
def test_a_wrong_command_line_is_exit_code_2(on_file: Command, args: list[str]) -> None:
    run = on_file(*args)
    assert run.returncode == 2
    assert run.stderr.startswith("usage: byssus")


def test_a_long_error_stays_on_one_line() -> None:
    assert terminal.line("a\nb\tc\x1bd") == "a b c\\x1bd"


def test_the_hint_at_a_real_model_works_without_the_sdk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["byssus"])
    typed = ["chat", "my trip", "--db", str(tmp_path / "a.db")]

    def hint() -> str:
        pipe(monkeypatch, "")
        assert main(typed) == 0
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("For a real one")]
        return line

    monkeypatch.chdir(tmp_path)
    assert f"{sys.executable} -m pip install anthropic, then ANTHROPIC_API_KEY=... " in hint()
    assert hint().endswith(f" chat 'my trip' --provider anthropic --db {tmp_path}/a.db")
    typed[1] = "trip"
    (tmp_path / "src" / "byssus").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert hint().endswith(f'make chat ARGS="trip --provider anthropic --db {tmp_path}/a.db"')
