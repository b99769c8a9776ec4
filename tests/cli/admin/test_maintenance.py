"""`byssus backup|restore|check`, as people and scripts meet them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import apsw
import pytest

from byssus import UserMessage
from byssus.checkpointer import SQLiteCheckpointer
from byssus.cli.screen.terminal import ProgressBar
from tests.support.commands import Command, command

pytestmark = pytest.mark.processes


def append(path: Path, thread: str, *texts: str) -> None:
    async def main() -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append(thread, [UserMessage(text) for text in texts])

    asyncio.run(main())


@pytest.fixture
def db(tmp_path: Path) -> Path:
    for number in range(3):
        append(tmp_path / "chat.db", f"thread {number}", "one", "two")
    return tmp_path / "chat.db"


@pytest.fixture
def byssus(db: Path, tmp_path: Path) -> Command:
    return command(tmp_path, str(db))


def sql(path: Path, statement: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(statement)
    connection.close()


def test_a_backup_tells_what_it_holds_and_comes_back(byssus: Command, tmp_path: Path) -> None:
    done = byssus("backup", "backup.db")
    first, *tables, last = done.stdout.splitlines()
    assert first == f"The backup in {tmp_path}/backup.db is complete."
    assert ("messages", "6") in {tuple(line.split()) for line in tables}
    assert re.fullmatch(r"Verified: 18 rows, [\d,]+ bytes, sha256 [0-9a-f]{64}", last)
    assert done.stderr == ""  # nobody watches
    done = byssus("restore", "backup.db", "--db", "new.db")
    assert re.match(rf"The backup {tmp_path}/backup\.db, taken at \S+, is restored in \S*new\.db\.\n", done.stdout)
    listed = [byssus("threads", "--json", "--db", name).stdout for name in ("chat.db", "new.db")]
    assert listed[0] == listed[1]


def test_an_earlier_backup_is_brought_up_to_date_when_that_is_asked_for(byssus: Command, db: Path) -> None:
    byssus("backup", "backup.db")
    append(db, "thread 1", "three")
    refused = byssus("backup", "backup.db", code=1)
    assert re.fullmatch(r"byssus: there is a file .* does not overwrite.*--incremental.*\n", refused.stderr)
    assert "is up to date: 3 rows written." in byssus("backup", "backup.db", "--incremental").stdout
    made = json.loads(byssus("backup", "backup.db", "--incremental", "--json").stdout)
    assert (made["incremental"], made["written"], made["rows"]["messages"]) == (True, 0, 7)


def test_a_script_gets_json(byssus: Command, tmp_path: Path) -> None:
    made = json.loads(byssus("backup", "backup.db", "--json").stdout)
    assert (made["path"], made["verified"], made["rows"]["threads"]) == (str(tmp_path / "backup.db"), True, 3)
    back = json.loads(byssus("restore", "backup.db", "--db", "new.db", "--json").stdout)
    assert back["sha256"] == made["sha256"]
    assert json.loads(byssus("check", "--json").stdout)["ok"] is True


def test_a_database_that_is_right_is_exit_code_0(byssus: Command) -> None:
    assert byssus("check").stdout == "Checked 3 threads, 6 messages, 0 checkpoints: all is well.\n"


def test_what_is_wrong_is_exit_code_1_until_it_is_mended(byssus: Command, db: Path) -> None:
    sql(db, "UPDATE threads SET message_count = 9 WHERE id = 'thread 1'")
    done = byssus("check", code=1)
    assert done.stdout.splitlines() == [
        "wrong     message_count: thread 'thread 1' says that it has 9 messages, and 2 can be read",
        "Checked 3 threads, 6 messages, 0 checkpoints: 1 problem; --repair can mend 1 of them.",
    ]
    assert json.loads(byssus("check", "--json", code=1).stdout)["problems"][0]["what"] == "message_count"
    assert byssus("check", "--repair").stdout.startswith("repaired  message_count: thread 'thread 1'")
    assert "all is well" in byssus("check").stdout


def test_what_cannot_be_mended_stays_exit_code_1(byssus: Command, db: Path) -> None:
    sql(db, "UPDATE messages SET body = '{' WHERE key = 1")
    done = byssus("check", "--repair", code=1)
    assert "wrong     message: message 1 of thread 'thread 0' is no JSON: '{'" in done.stdout
    assert "1 problem; a backup may still have what is lost." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["backup", "chat.db"], "does not overwrite"),
        (["backup", "chat.db", "--incremental"], "is the database itself"),
        (["backup", "missing/backup.db"], "there is no directory"),
        (["backup", "backup.db", "--db", "nowhere.db"], "nowhere.db"),
        (["restore", "nowhere.db", "--db", "new.db"], "there is no backup at 'nowhere.db'"),
        (["restore", "diary.txt", "--db", "new.db"], "is not a SQLite database"),
        (["restore", "used.db"], "is not empty (it holds 3 threads)"),
        (["check", "--db", "nowhere.db"], "nowhere.db"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(
    byssus: Command, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    append(tmp_path / "used.db", "theirs", "hello")
    (tmp_path / "diary.txt").write_text("dear diary\n" * 1000)
    done = byssus(*arguments, code=1)
    assert re.fullmatch(r"byssus: [^\n]+\n", done.stderr)
    assert complaint in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "backup.db").exists()
    assert not (tmp_path / "nowhere.db").exists()


def test_the_bar_fits_into_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = ProgressBar()
    bar.show("copying", 5, 0, "  5 of 0 rows")
    bar.show("copying", 6, 10)  # too soon
    bar.clear()
    assert [len(line) for line in capsys.readouterr().err.split("\r")] == [0, 19, 19, 0]


@pytest.mark.parametrize("arguments", [["backup"], ["restore"], ["check", "--nonsense"]])
def test_a_wrong_command_line_is_exit_code_2(byssus: Command, arguments: list[str]) -> None:
    assert byssus(*arguments, code=2).stderr.startswith("usage: byssus")
