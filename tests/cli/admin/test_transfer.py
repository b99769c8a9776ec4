"""`byssus export` and `byssus import`, as a person or a script sees them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from byssus import UserMessage
from byssus.checkpointer import Checkpoint, CheckpointMetadata, SQLiteCheckpointer
from tests.support import forked
from tests.support.commands import Command, command, command_here, slow_command
from tests.support.terminal import Terminal

pytestmark = pytest.mark.processes

SLOWLY = slow_command("exporting.PAGE_ROWS = 2")


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "chat.db"

    async def main() -> None:
        async with SQLiteCheckpointer(path) as cp:
            messages = [UserMessage(f"message {n} 北京 \0 \ud800") for n in range(9)] + [UserMessage("\x9b2J \x1b[2J")]
            await cp.put(Checkpoint(CheckpointMetadata("trip", "c1", 1), messages))
            await cp.create_user("Alice", user_id="alice")
            await cp.fork("trip", new_id="alice's", user_id="alice")
            await cp.fork("alice's", new_id="alice's other", user_id="alice")

    asyncio.run(main())
    return path


@pytest.fixture
def byssus(tmp_path: Path) -> Command:
    return command(tmp_path)


def test_a_thread_goes_through_a_pipe_into_another_database(byssus: Command, db: Path) -> None:
    lines = byssus("export", "trip", "--db", db).stdout
    assert [json.loads(line) for line in lines.split("\n")[:-1]][-1]["end"]["messages"] == 10
    done = byssus("import", "-", "--trusted", "--db", "new.db", input=lines)
    assert (done.stdout, done.stderr) == ("Imported thread trip\n", "")
    assert byssus("export", "trip", "--db", "new.db").stdout == lines
    shown = [byssus("show", "trip", "--json", "--db", path).stdout for path in (db, "new.db")]
    assert shown[0] == shown[1]


def test_all_threads_of_a_user_are_one_page_of_markdown(byssus: Command, db: Path) -> None:
    page = byssus("export", "--user", "alice", "--format", "markdown", "--db", db).stdout
    assert page.count("alice's\n") == page.count("alice's other\n") == 1


def test_all_threads_of_a_user_go_through_a_file(byssus: Command, db: Path, tmp_path: Path) -> None:
    done = byssus("export", "--user", "alice", "-o", "alice.jsonl", "--db", db)
    assert (done.stdout, done.stderr) == ("", "alice.jsonl: 33 lines\n")
    file = tmp_path / "alice.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    done = byssus("import", "alice.jsonl", "--trusted", "--db", "new.db")
    assert (done.stdout, done.stderr) == ("Imported thread alice's\nImported thread alice's other\n", "")
    assert byssus("export", "--user", "alice", "--db", "new.db").stdout == file.read_text("utf-8")


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=oct)
def test_an_export_is_for_its_owner_alone_whatever_the_umask(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], umask: int
) -> None:
    file = tmp_path / ("t" * 255)  # the longest name that a file can have
    before = os.umask(umask)
    try:
        command_here(capsys, str(db))("export", "trip", "-o", file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_export_into_a_pipe_does_not_replace_it(byssus: Command, db: Path, tmp_path: Path) -> None:
    """Nor a device: an export to /dev/null must leave it what it is."""
    lines = byssus("export", "trip", "--db", db).stdout
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        byssus("export", "trip", "-o", "pipe", "--db", db)
        assert reader.communicate()[0] == lines
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert byssus("export", "trip", "-o", "-", "--db", db).stdout == lines
    assert not (tmp_path / "-").exists()


def test_an_export_without_a_standard_output_is_no_mistake_of_ours(db: Path) -> None:
    shell = f"'{sys.executable}' -m byssus export trip --db '{db}' >&-"
    done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_is_there_is_imported_under_another_id(byssus: Command, db: Path) -> None:
    byssus("export", "trip", "-o", "trip.jsonl", "--db", db)
    done = byssus("import", "trip.jsonl", "--db", db, code=1)
    assert re.fullmatch(r"byssus: there is already a thread 'trip'; .*--as\)\n", done.stderr)
    done = byssus("import", "trip.jsonl", "--as", "second trip", "--db", db)
    assert done.stdout == "Imported thread second trip\n"


def test_without_trust_an_import_says_what_it_left_out_and_how_to_get_it(byssus: Command, db: Path) -> None:
    byssus("export", "--user", "alice", "-o", "alice.jsonl", "--db", db)
    done = byssus("import", "alice.jsonl", "--db", "new.db")
    assert done.stdout == "Imported thread alice's\nImported thread alice's other\n"
    left_out = "Left out: users (1), owners (2). If the file is a backup of your own, use --trusted.\n"
    assert done.stderr == left_out
    assert "no user 'alice'" in byssus("export", "--user", "alice", "--db", "new.db", code=1).stderr
    byssus("export", "trip", "-o", "trip.jsonl", "--db", db)
    done = byssus("import", "trip.jsonl", "--as", "hers", "--user", "alice", "--db", db)
    assert (done.stdout, done.stderr) == ("Imported thread hers\n", "")
    assert '"id":"hers","namespace":"","owner":"alice"' in byssus("export", "hers", "--db", db).stdout


def test_nothing_in_an_export_drives_the_terminal(db: Path) -> None:
    tty = Terminal("-m", "byssus", "export", "trip", "--db", str(db), env={}, new_python=False)
    try:
        tty.wait_for(re.escape(r'"text":"\u009b2J \u001b[2J"'))
        tty.wait_for('"sha256"')
        assert tty.process.wait(60) == 0
    finally:
        tty.close()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["export", "nowhere"], "there is no thread 'nowhere'"),
        (["export", "--user", "nobody"], "there is no user 'nobody'"),
        (["export", "trip", "-o", "no/such/folder/file"], "there is no directory 'no/such/folder' for the export"),
        (["import", "nowhere.jsonl"], "there is no file 'nowhere.jsonl'"),
        (["import", "."], "there is no file '.'"),
        (["import", "diary.txt"], "line 1: this is not JSON"),
        (["import", "half.jsonl"], "line 6 is missing: a thread has no end"),
        (["export", "trip", "-o", "/proc/trip.jsonl"], "'/proc/trip.jsonl' cannot be used"),
        (["export", "trip", "-o", "."], "'.' is a directory; name a file in it"),
        (["export", "trip", "-o", "chat.db"], "'chat.db' belongs to a database of byssus; name another"),
        (["export", "trip", "-o", "chat.db-wal"], "'chat.db-wal' belongs to a database of byssus; name another"),
        (["import", "alice.jsonl", "--as", "one"], "these are 2"),
        (["import", "trip.jsonl", "--as", ""], "as_id must be a string with at least one character"),
        (["import", "trip.jsonl", "--as", "new", "--user", "nobody"], "there is no user 'nobody'"),
        (["import", "trip.jsonl", "--user", ""], "a user id must be a string with at least one character"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(
    byssus: Command, db: Path, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    byssus("export", "trip", "-o", "trip.jsonl", "--db", db)
    byssus("export", "--user", "alice", "-o", "alice.jsonl", "--db", db)
    (tmp_path / "diary.txt").write_text("dear diary\n" * 10)
    lines = (tmp_path / "trip.jsonl").read_text("utf-8").split("\n")
    (tmp_path / "half.jsonl").write_text("".join(f"{line}\n" for line in lines[:5]))
    before = sorted(os.listdir(tmp_path)), byssus("threads", "--json", "--db", db).stdout
    done = byssus(*arguments, "--db", db, code=1)
    assert re.fullmatch(r"byssus: [^\n]+\n", done.stderr)
    assert complaint in done.stderr
    assert done.stdout == ""
    assert (sorted(os.listdir(tmp_path)), byssus("threads", "--json", "--db", db).stdout) == before


def test_an_export_that_fails_leaves_the_file_that_was_there(byssus: Command, db: Path, tmp_path: Path) -> None:
    (tmp_path / "trip.jsonl").write_text("what was there")
    byssus("export", "nowhere", "-o", "trip.jsonl", "--db", db, code=1)
    assert (tmp_path / "trip.jsonl").read_text() == "what was there"
    byssus("export", "trip", "-o", "trip.jsonl", "--db", db)
    assert (tmp_path / "trip.jsonl").read_text("utf-8").startswith('{"byssus":"thread"')


def test_ctrl_c_leaves_nothing_of_an_import(byssus: Command, db: Path, tmp_path: Path) -> None:
    byssus("export", "trip", "-o", "trip.jsonl", "--db", db)
    command = ["-c", SLOWLY, "9", "import", str(tmp_path / "trip.jsonl"), "--db", str(tmp_path / "new.db")]
    pipe = forked.PIPE
    with forked.Process(command, env=os.environ, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "commit\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate("\n", timeout=60)
    assert (process.returncode, stdout, stderr) == (130, "", "")
    byssus("copy", "new.db", "empty.db")
    copied = json.loads(byssus("copy", "new.db", "empty.db", "--json").stdout)
    assert {table["rows"] for table in copied["tables"]} == {0}
    assert byssus("import", "trip.jsonl", "--db", "new.db").stdout == "Imported thread trip\n"


@pytest.mark.parametrize("arguments", [["export"], ["export", "trip", "--user", "alice"], ["import"]])
def test_a_wrong_command_line_is_exit_code_2(byssus: Command, arguments: list[str]) -> None:
    assert byssus(*arguments, code=2).stderr.startswith("usage: byssus")
