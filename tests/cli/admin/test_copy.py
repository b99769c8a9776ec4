"""`byssus copy`, as people and scripts meet it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import pytest

from byssus import UserMessage
from byssus.checkpointer import SQLiteCheckpointer
from tests.support import forked
from tests.support.commands import Command, command, slow_command
from tests.support.terminal import Terminal

pytestmark = pytest.mark.processes

SLOWLY = slow_command("copying.PAGE_ROWS = 5")


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "chat.db"

    async def main() -> None:
        async with SQLiteCheckpointer(path) as cp:
            for thread in range(3):
                await cp.append(f"thread {thread}", [UserMessage(f"message {n}") for n in range(10)])

    asyncio.run(main())
    return path


@pytest.fixture
def byssus(tmp_path: Path) -> Command:
    return command(tmp_path)


def test_it_tells_what_it_copied_and_that_it_is_the_same(byssus: Command, db: Path, tmp_path: Path) -> None:
    done = byssus("copy", db, "new folder/backup.db")
    first, *tables, last = done.stdout.splitlines()
    assert first == f"The copy of {db} in {tmp_path}/new folder/backup.db is complete."
    assert {tuple(line.split()) for line in tables} == {
        ("threads", "3"),
        ("branches", "3"),
        ("segments", "3"),
        ("messages", "30"),
        ("marks", "0"),
        ("tool_calls", "0"),
        ("inbox", "0"),
        ("partials", "0"),
        ("pieces", "0"),
        ("approvals", "0"),
        ("runs", "0"),
        ("run_attempts", "0"),
        ("checkpoints", "0"),
        ("inherited", "0"),
        ("hidden", "0"),
        ("floors", "0"),
        ("users", "0"),
        ("preferences", "0"),
        ("tasks", "0"),
        ("task_steps", "0"),
        ("schedules", "0"),
        ("usage", "3"),
        ("tool_usage", "0"),
        ("prices", "0"),
    }
    assert re.fullmatch(r"Verified: both hold the same 42 rows, sha256 [0-9a-f]{64}", last)
    assert done.stderr == ""  # nobody watches
    listed = [byssus("threads", "--json", "--db", path).stdout for path in (db, tmp_path / "new folder" / "backup.db")]
    assert listed[0] == listed[1]


def test_a_script_gets_json(byssus: Command, db: Path, tmp_path: Path) -> None:
    copied = json.loads(byssus("copy", "chat.db", "backup.db", "--json").stdout)
    assert (copied["source"], copied["target"]) == (str(db), str(tmp_path / "backup.db"))
    tables = {table["name"]: table for table in copied["tables"]}
    assert (tables["messages"]["rows"], tables["messages"]["written"]) == (30, 30)
    assert copied["was_finished"] is False
    again = json.loads(byssus("copy", "chat.db", "backup.db", "--json").stdout)
    assert again["was_finished"] is True
    assert again["sha256"] == copied["sha256"]


def test_a_finished_copy_is_only_verified(byssus: Command, db: Path) -> None:
    byssus("copy", db, "backup.db")
    assert "was a finished copy already: nothing was written." in byssus("copy", db, "backup.db").stdout


def slowly(commits: int, *args: object) -> forked.Process:
    command, pipe = ["-c", SLOWLY, str(commits), *map(str, args)], forked.PIPE
    return forked.Process(command, env=os.environ, cwd=Path.cwd(), stdin=pipe, stdout=pipe, stderr=pipe)


def test_ctrl_c_keeps_what_was_copied_and_says_how_to_go_on(byssus: Command, db: Path, tmp_path: Path) -> None:
    with slowly(9, "copy", db, tmp_path / "backup.db") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "commit\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate("\n", timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "Stopped. What was copied is kept: run the same command again to go on.\n"
    done = byssus("copy", db, "backup.db")
    assert re.search(r"is complete: \d\d rows were written, the others were there already\.\n", done.stdout)
    assert "both hold the same 42 rows" in done.stdout


def test_a_person_sees_a_bar_that_goes_away(db: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "backup.db")
    tty = Terminal("-c", SLOWLY, "-1", "copy", str(db), target, env={}, new_python=False)
    try:
        tty.wait_for(r"\r(comparing|copying  ) \[#* *\] +\d+%  \d+ of \d+ rows \(\w+\)")
        tty.wait_for(r"\r +\rThe copy of [^\r]+ is complete\.")
        tty.wait_for("Verified")
        assert tty.process.wait(60) == 0
    finally:
        tty.close()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.db", "backup.db"], "there is no database at nowhere.db"),
        (["chat.db", "chat.db"], "cannot be copied into itself"),
        (["chat.db", "./chat.db"], "cannot be copied into itself"),
        (["chat.db", "used.db"], "name an empty database"),
        (["chat.db", "diary.txt"], "is not a SQLite database"),
        (["chat.db", ":memory:"], "name a file"),
    ],
)
def test_what_cannot_be_copied_is_one_line_and_exit_code_1(
    byssus: Command, db: Path, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    (tmp_path / "used.db").write_bytes(db.read_bytes())
    (tmp_path / "diary.txt").write_text("dear diary\n" * 1000)
    done = byssus("copy", *arguments, code=1)
    assert re.fullmatch(r"byssus: [^\n]+\n", done.stderr)
    assert complaint in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "backup.db").exists()
    assert not (tmp_path / "nowhere.db").exists()


def test_a_copy_that_differs_is_exit_code_1(byssus: Command, db: Path, tmp_path: Path) -> None:
    byssus("copy", db, "backup.db")

    async def main() -> None:
        async with SQLiteCheckpointer(tmp_path / "backup.db") as cp:
            await cp.append("thread 1", UserMessage("one more"))

    asyncio.run(main())
    done = byssus("copy", db, "backup.db", "--json", code=1)
    assert done.stdout == ""
    assert "table threads: 3 rows in the source, 3 in the target; between the beginning and the end" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["chat.db"], ["a", "b", "--nonsense"]])
def test_a_wrong_command_line_is_exit_code_2(byssus: Command, arguments: list[str]) -> None:
    assert byssus("copy", *arguments, code=2).stderr.startswith("usage: byssus")
