"""Long output on a terminal goes through a pager; short output, a pipe and an error never do."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from byssus import cli
from byssus.cli.screen.pager import paged as through_the_pager
from byssus.storage import AgentStorage
from tests.support.databases import Database
from tests.support.screens import screen_of
from tests.support.terminal import Terminal

pytestmark = pytest.mark.processes

TO_FILE = "sh -c 'cat > paged.txt'"


@pytest.fixture
def threads(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """Ten threads, in a directory where a pager may write."""
    with AgentStorage(database.place) as storage:
        for number in range(10):
            storage.append(f"trip-{number}", {"role": "user", "content": "我想去挪威"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGER", TO_FILE)
    return database


def paged(folder: Path) -> str | None:
    file = folder / "paged.txt"
    return file.read_text("utf-8") if file.exists() else None


def test_what_is_longer_than_the_screen_goes_through_the_pager(
    threads: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = screen_of(monkeypatch, term="xterm", rows=10)
    monkeypatch.setattr(sys, "stderr", screen_of(monkeypatch, term="xterm", rows=10))
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.main(["threads", "--limit", "10", "--db", threads.place]) == 0
    assert screen.text == ""
    lines = (paged(tmp_path) or "").splitlines()
    assert lines[0].startswith("\x1b[1mTHREAD")  # a person reads it: styles and widths are those of the terminal
    assert len(lines) == 12
    assert lines[-1] == "(the last 10; --limit N shows more)"  # not in the middle of the pager's screen


@pytest.mark.parametrize(
    ("rows", "term", "pager", "options"),
    [
        (1000, "xterm", TO_FILE, []),
        (5, "dumb", TO_FILE, []),
        (5, "xterm", "cat", []),
        (5, "xterm", "", []),
        (5, "xterm", "no-such-pager", []),
        (5, "xterm", "'", []),
        (5, "xterm", TO_FILE, ["--no-pager"]),
    ],
    ids=["it fits", "a dumb terminal", "cat", "none", "unknown", "broken", "not wanted"],
)
def test_else_it_goes_to_the_screen(
    threads: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    term: str,
    pager: str,
    options: list[str],
) -> None:
    screen = screen_of(monkeypatch, term=term, rows=rows)
    monkeypatch.setenv("PAGER", pager)
    assert cli.main(["threads", *options, "--db", threads.place]) == 0
    assert len(screen.lines) == 11
    assert paged(tmp_path) is None


@pytest.mark.parametrize("lines", [1, 100], ids=["it fits", "it is long"])
def test_afterwards_the_screen_is_there_for_what_is_printed_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGER", TO_FILE)
    screen = screen_of(monkeypatch, term="xterm", rows=10)
    with through_the_pager(True):
        page = sys.stdout
        page.write("hello\n" * lines + "\n")
    assert (paged(tmp_path) is None) is (lines == 1)
    print("late", file=page)
    assert screen.lines[-1] == "late"
    screen.close()
    page.close()  # as Python does when nothing refers to it any more; from 3.13 on it reports an error of that


def test_a_pipe_and_an_error_have_no_pager(
    threads: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LINES", "5")
    assert cli.main(["threads", "--db", threads.place]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 11
    screen = screen_of(monkeypatch, term="xterm", rows=5)
    assert cli.main(["show", "nobody", "--db", threads.place]) == 1
    assert (screen.text, paged(tmp_path)) == ("", None)


def test_a_person_who_leaves_the_pager_has_seen_enough(
    threads: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with AgentStorage(threads.place) as storage:
        for _ in range(100):
            storage.append("long", {"role": "user", "content": "many words " * 1_000})
    monkeypatch.setenv("PAGER", "true")
    screen_of(monkeypatch, term="xterm", rows=5)
    assert cli.main(["show", "long", "--db", threads.place]) == 0
    assert capsys.readouterr().err == ""
    assert sys.stdout.isatty()  # the screen is back


def test_the_pager_is_less_and_a_ctrl_c_belongs_to_it(threads: Database, tmp_path: Path) -> None:
    less = tmp_path / "less"  # stands in for it, and says what it was given
    less.write_text(
        '#!/bin/sh\ntrap "" INT\necho "less $LESS"; sed -n 1p; cat > /dev/null; echo ready; read x < /dev/tty\n'
    )
    less.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "TERM": "xterm",
        "LINES": "5",
        "COLUMNS": "80",
        "HOME": str(tmp_path),
    }
    command, without = ["-m", "byssus", "threads", "--db", threads.place], ("PAGER", "LESS")
    tty = Terminal(*command, env=env, without=without, new_python=False)
    try:
        assert re.search(r"less FRX\s+\S*THREAD", tty.wait_for("ready"))
        tty.process.send_signal(signal.SIGINT)
        tty.type("\n")
        tty.wait_for_its_end()
        assert tty.process.returncode == 0  # it has waited for its pager, which has the terminal
    finally:
        tty.close()
