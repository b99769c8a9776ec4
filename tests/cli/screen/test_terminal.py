"""Nothing that is stored or typed drives a terminal, whichever command shows it; and JSON stays what it was."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import Agent, AssistantMessage, Model, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, checkpointer_for
from byssus.cli.parser import commands_of, parser_for
from byssus.cli.screen import terminal
from byssus.memory import Msg, SQLiteMemory
from byssus.providers.scripted import ScriptedProvider
from byssus.storage import AgentStorage
from tests.support.commands import command
from tests.support.programs import write_program
from tests.support.terminal import Terminal

pytestmark = pytest.mark.processes

# DEL, C1 (a CSI and a line feed), marks that reorder text, line separators; and what is harmless.
NASTY = "\x7f\x9b2J\x85\u202e\u2066\u061c\u200e\u2028 你好"
DRIVING = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HINTING = re.compile("[\u061c\u200e\u200f\u2028\u2029]")  # in text they are harmless, and some languages need them

# All of them in one process: a start takes longer than a command.
PROGRAM = """
import json, sys
from byssus import cli
for number, arguments in enumerate(json.loads(sys.argv[1])):
    print("=====", number)
    try:
        print("-----", cli.main(arguments))
    except SystemExit as end:
        print("-----", end.code)
"""


@tool(approval=True)
async def delete(path: str) -> str:
    """Delete."""
    return path


async def _fill(cp: Checkpointer) -> None:
    thread = f"t{NASTY}"
    await cp.append(thread, [UserMessage(f"needle {NASTY}"), AssistantMessage(NASTY), {"note": NASTY}])
    await cp.save_extra(thread, {NASTY: NASTY})
    await cp.put(Checkpoint(CheckpointMetadata("c", f"c{NASTY}", tags=[NASTY], summary=NASTY), [{"content": NASTY}]))
    await cp.fork("c", new_id=f"f{NASTY}")
    await cp.append("c", UserMessage(NASTY))
    script = [[ToolCall("call", "delete", {"path": NASTY})]]
    provider = ScriptedProvider(script)
    await Agent(provider=provider, model=Model("m"), tools=[delete], checkpointer=cp, thread_id=f"p{NASTY}").prompt("x")
    await cp.follow_up(f"p{NASTY}", NASTY)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "chat.db"

    async def main() -> None:
        async with checkpointer_for(path) as cp:
            await _fill(cp)
        async with SQLiteMemory(path, user_id=f"m{NASTY}", session_id=f"m{NASTY}") as memory:
            await memory.add(Msg(NASTY, NASTY, "user"), marks=[NASTY])
            await memory.update_compressed_summary(NASTY)

    asyncio.run(main())
    with AgentStorage(path) as storage:
        storage.create_user(NASTY, user_id=f"u{NASTY}")
        storage.create_session(f"u{NASTY}", session_id=f"s{NASTY}", model=NASTY)
        storage.save_message(f"s{NASTY}", "assistant", NASTY, token_count=10)
        storage.log_tool_call(f"s{NASTY}", NASTY, {"a": NASTY}, None, 1.0, success=False, error_message=NASTY)
    return path


def shown(home: Path, db: Path, commands: list[list[str]]) -> list[tuple[str, int]]:
    """What each command shows on a terminal, and its exit code."""
    env = {"BYSSUS_DB": str(db), "PYTHONUTF8": "1", "HOME": str(home)}
    tty = Terminal(sys.executable, "-c", PROGRAM, json.dumps(commands), env=env)
    try:
        screen = tty.wait_for_its_end()
    finally:
        tty.close()
    outputs = re.findall(r"===== \d+\r?\n(.*?)----- (\d+)", screen, re.DOTALL)
    assert len(outputs) == len(commands), screen
    return [(text, int(code)) for text, code in outputs]


def test_json_on_a_terminal_is_escaped_and_the_same_value(tmp_path: Path, db: Path) -> None:
    backup, restored = str(tmp_path / f"backup{NASTY}.db"), str(tmp_path / "restored.db")
    with checkpointer_for(db) as cp:
        run_id = asyncio.run(cp.runs(f"p{NASTY}"))[0].id
    commands = [
        ["threads"],
        ["users"],
        ["show", f"t{NASTY}"],
        ["memory"],
        ["memory", f"m{NASTY}", "--user", f"m{NASTY}"],
        ["pending"],
        ["watch"],
        ["runs"],
        ["run", run_id],
        ["inbox", f"p{NASTY}"],
        ["checkpoints", "c"],
        ["tree", "c"],
        ["search", "needle"],
        ["search", "你好", "--relevance"],
        ["usage"],
        ["usage", f"u{NASTY}"],
        ["backup", backup],
        ["restore", backup, "--db", restored],
        ["copy", str(db), str(tmp_path / f"copy{NASTY}.db")],
    ]
    plain = [
        ["unfinished"],
        ["tasks"],
        ["schedules"],
        ["diff", "c", f"f{NASTY}"],
        ["check"],
        ["doctor"],
        ["where"],
        ["usage", "--recount"],
        ["watch"],
    ]  # without any such text
    parsers = commands_of(parser_for())
    with_json = {name for name, parser in parsers.items() if "--json" in parser.format_help()}
    assert {name for name, *_ in commands + plain} == with_json, "add the new command here"

    outputs = shown(tmp_path, db, [[*arguments, "--json"] for arguments in commands + plain])
    for arguments, (text, code) in zip(commands + plain, outputs, strict=True):
        assert code == 0, (arguments, text)
        assert DRIVING.search(text) is HINTING.search(text) is None, (arguments, text)
        value = json.loads(re.sub(r"^\r.*\r(?={)", "", text))  # behind a bar that is gone
        assert arguments in plain or NASTY in json.dumps(value, ensure_ascii=False), text


def test_an_export_on_a_terminal_is_escaped_and_in_a_pipe_it_is_what_it_was(tmp_path: Path, db: Path) -> None:
    ((text, code),) = shown(tmp_path, db, [["export", f"t{NASTY}"]])
    assert code == 0
    assert DRIVING.search(text) is HINTING.search(text) is None
    piped = command(tmp_path, str(db))("export", f"t{NASTY}").stdout
    assert NASTY in piped
    lines = text.splitlines()
    assert [json.loads(line) for line in lines] == [json.loads(line) for line in piped.removesuffix("\n").split("\n")]


def test_what_is_followed_as_json_is_escaped(tmp_path: Path, db: Path) -> None:
    arguments = [sys.executable, "-m", "byssus", "show", f"t{NASTY}", "--follow", "--json"]
    tty = Terminal(*arguments, env={"BYSSUS_DB": str(db), "PYTHONUTF8": "1", "HOME": str(tmp_path)})
    try:
        tty.wait_for(r'"text":"needle \\u007f\\u009b2J\\u0085')
        tty.press_until_it_ends("\x03")
        assert DRIVING.search(tty.screen) is HINTING.search(tty.screen) is None
    finally:
        tty.close()


def test_every_command_complains_without_driving_the_terminal(tmp_path: Path, db: Path) -> None:
    """Also argparse, which repeats what was typed."""
    parsers = commands_of(parser_for())
    option = f"--{NASTY}".replace(" ", "")  # with a space, it would be no option
    wrong = [[NASTY], *([name, option] for name in parsers), ["threads", "--limit", NASTY]]
    wrong += [["show", NASTY], ["import", NASTY], ["restore", NASTY], ["rewind", NASTY, NASTY], ["export", NASTY]]
    for arguments, (text, code) in zip(wrong, shown(tmp_path, db, wrong), strict=True):
        assert code != 0, arguments
        assert DRIVING.search(text) is None, (arguments, text)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_json_in_any_encoding(tmp_path: Path, db: Path, encoding: str) -> None:
    program = "import sys; from byssus import cli; sys.exit(cli.main(['threads', '--json']))"
    env = {"BYSSUS_DB": str(db), "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding, "HOME": str(tmp_path)}
    tty = Terminal(sys.executable, "-c", program, env=env)
    try:
        screen = tty.wait_for_its_end()
    finally:
        tty.close()
    assert f"t{NASTY}" in {info["id"] for info in json.loads(screen)}
    assert tty.process.returncode == 0


@pytest.fixture
def in_oslo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Oslo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_oslo")
@pytest.mark.parametrize(
    ("stored", "local", "utc"),
    [
        ("2026-01-31T23:30:00.123456Z", "2026-02-01 00:30:00", "2026-01-31 23:30:00Z"),
        ("2026-07-01T08:00:00+02:00", "2026-07-01 08:00:00", "2026-07-01 06:00:00Z"),
        ("2026-07-01 08:00:00", "2026-07-01 08:00:00", "2026-07-01 08:00:00"),
        ("0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00+14:00"),
        ("soon\x9b", "soon\\x9b", "soon\\x9b"),
        ("", "", ""),
    ],
)
def test_times_are_local_unless_utc_is_asked_for(stored: str, local: str, utc: str) -> None:
    assert terminal.when(stored, utc=False) == local
    assert terminal.when(stored, utc=True) == utc


@pytest.mark.parametrize("more", [[], ["--plain"]])
def test_a_chat_without_utf_8_takes_every_language(more: list[str], tmp_path: Path, db: Path) -> None:
    write_program(tmp_path)
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HOME": str(tmp_path), "TERM": "xterm"}
    chat = ("chat", "trip", "--app", "clerk:support", "--db", str(db), *more)
    tty = Terminal(sys.executable, "-m", "byssus", *chat, env={**env, "PYTHONPATH": str(tmp_path)})
    try:
        tty.wait_for("Thread trip: new(.|\n)*[>›] ")
        tty.type("峡湾\r")
        tty.wait_for("The answer")
        tty.press_until_it_ends("\x04")
    finally:
        tty.close()
    with AgentStorage(db) as storage:
        thread = storage.load("trip")
        assert thread is not None
        assert thread.messages[0].text == "峡湾"


def test_a_terminal_without_utf_8_takes_and_shows_every_language(tmp_path: Path, db: Path) -> None:
    """Where the locale knows no UTF-8, what is typed and piped is UTF-8 all the same, and nothing of it is lost."""
    write_program(tmp_path)
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HOME": str(tmp_path)}
    typed = [
        sys.executable,
        "-m",
        "byssus",
        "ask",
        "问题",
        "--thread",
        "旅行",
        "--app",
        "clerk:support",
        "--db",
        str(db),
    ]
    done = subprocess.run(
        typed, env=env, cwd=tmp_path, input="\ufeff峡湾\r\n".encode(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"The answer.\n", b"")
    with AgentStorage(db) as storage:
        thread = storage.load("旅行")
        assert thread is not None
        assert thread.messages[0].text == "问题\n\n峡湾"
    shown = subprocess.run([*typed[:3], "show", "旅行", "--db", str(db)], env=env, capture_output=True, check=False)
    assert rb"\u95ee\u9898" in shown.stdout


def test_piped_text_that_is_no_utf_8_is_what_the_locale_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("café".encode("latin-1")), encoding="latin-1"))
    assert terminal.read_all() == "café"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="ascii"))
    assert terminal.read_all() == "caf\ufffd"
    monkeypatch.setattr(sys, "stdin", None)
    assert terminal.read_all() == ""


@pytest.mark.parametrize("word", ["plain", "旅行", "caf\udce9"])
def test_a_word_that_is_no_utf_8_stays_as_it_was_typed(word: str) -> None:
    assert terminal.typed(word) == word
