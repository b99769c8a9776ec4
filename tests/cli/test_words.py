"""Errors at a shell name the command to type, and never a Python call."""

from __future__ import annotations

import ast
import errno
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import cli
from byssus.cli.words import at_shell, in_words
from byssus.errors import (
    AnswerNeeded,
    InputError,
    LeaseLost,
    NotFound,
    NothingToResume,
    QuotaExceeded,
    SearchTimeout,
    ThreadBusy,
    ThreadInactive,
    ToolMissing,
)
from byssus.storage import AgentStorage
from tests.support.commands import command_here
from tests.support.databases import Database
from tests.support.programs import pipe, program

SOURCE = Path(cli.__file__).parents[1]
CALL = re.compile(r"\b[a-z_]\w*\([^)\s]|\b\w+\(\)|\bcp\.|\bagent\.[a-z]|\bawait |[a-z]=\.\.\.")

# What only a program can pass or do: its errors are read by the person who writes it. A command never gets there.
FOR_PROGRAMS = (
    "accounts/users.py",
    "adapters/",
    "agent.py",
    "apps.py",  # what to write in the app
    "checkpointer.py",
    "memory/",
    "middleware/",
    "providers/base.py",
    "providers/named.py",  # but for the name of a model, which is tried below
    "run/listeners.py",
    "run/memory_journal.py",
    "run/outside/requests.py",  # keys of prompts, which no command passes
    "run/settings.py",
    "signals.py",
    "storage.py",
    "store/operations.py",
    "stream.py",
    "testing.py",
    "threads/checkpoints.py",
    "threads/encoding.py",
    "threads/inbox.py",
    "threads/retention.py",
    "tools/",
    "values/",
    "worker/",
)
BY_CLASS = {"errors.py", "run/loop.py"}  # told anew by the class of the error: see below


def texts(file: Path) -> Iterator[str]:
    """The texts of the errors that a file raises."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Call) and re.search(
            r"(Error|Found|Invalid|Failed|Unusable|Full|Problem)$", _name(node)
        ):
            for part in node.args:
                if isinstance(part, ast.JoinedStr):
                    yield "".join(str(v.value) if isinstance(v, ast.Constant) else "'X'" for v in part.values)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def test_every_error_that_a_command_can_meet_names_no_python_call() -> None:
    files = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
    met = {name: path for name, path in files.items() if not name.startswith(FOR_PROGRAMS) and name not in BY_CLASS}
    told = [(name, at_shell(text)) for name, path in met.items() for text in texts(path)]
    assert len(told) > 200
    assert [(name, text) for name, text in told if CALL.search(text) and "answer_seconds=..." not in text] == []


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (NothingToResume("x"), "byssus chat 'my trip'"),
        (AnswerNeeded("x"), "byssus pending 'my trip'"),
        (ThreadBusy("my trip", "host:1 x", 1, "2026-01-01T00:00:00.000000Z"), "byssus steer 'my trip' TEXT"),
        (ToolMissing("my trip", {"pay": ["c1"]}), "byssus resume 'my trip' --app MODULE:FACTORY"),
        (ThreadInactive("my trip", "paused"), "byssus fork 'my trip'"),
        (LeaseLost("my trip"), "byssus resume 'my trip'"),
        (QuotaExceeded("ann", 10, 3), "'byssus users'"),
        (SearchTimeout(30, 7), "--timeout SECONDS"),
        (NotFound("there is no thread 'x'; threads() lists them"), "'byssus threads' lists"),
    ],
)
def test_an_error_of_a_run_names_the_next_command(error: Exception, step: str) -> None:
    told = str(in_words(error, "my trip"))
    assert step in told
    assert not CALL.search(told), told


def test_an_error_of_the_system_names_the_file_or_the_output() -> None:
    told = str(in_words(PermissionError(errno.EACCES, "Permission denied", "/data/chat.db")))
    assert told.startswith("'/data/chat.db' cannot be used (Permission denied); check")
    full = str(in_words(OSError(errno.ENOSPC, "No space left on device")))
    assert full.startswith("the output cannot be written (No space left on device); free some space")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["ask", "hi", "--app", "clerk:support", "--user", "nobody"],
            "there is no user 'nobody'; 'byssus users' lists",
        ),
        (["ask", "hi", "--app", "clerk:support", "--thread", "off"], "thread 'off' is paused"),
        (["chat", "off", "--app", "clerk:support"], "byssus fork off"),
        (["answer", "trip", "c9", "approve"], "'byssus pending' lists them"),
        (["ask", "hi", "--model", "openai:m"], "set it: export OPENAI_API_KEY=..."),
        (["search", "hi", "--since", "monday"], "--since must be a time such as '2026-01-31' or"),
        (["ask", "hi", "--model", "foo:bar"], "write 'anthropic:<model id>', 'openai:<model id>'"),
    ],
)
def test_what_a_person_meets_is_one_line_without_python(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    with AgentStorage(database.place) as storage:
        storage.create_user("Ann", user_id="ann")
        for name in ("off", "trip"):
            storage.create_session("ann", session_id=name)
        storage.pause_session("off")
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with program(tmp_path, monkeypatch):
        pipe(monkeypatch, "hello\n" if arguments[0] == "chat" else "")
        shown = command_here(capsys, database.place)(*arguments, code=1)
    line = shown.stderr.splitlines()[-1]
    assert told in line
    assert not CALL.search(line), line


def test_a_fork_of_a_paused_thread_goes_on(database: Database) -> None:
    """As the error says."""
    with AgentStorage(database.place) as storage:
        storage.create_user("Ann", user_id="ann")
        storage.create_session("ann", session_id="off")
        storage.save_message("off", "user", "hello")
        storage.pause_session("off")
        fork = storage.fork("off")
        session = storage.get_session(fork)
        assert session is not None
        assert session["status"] == "active"


def test_a_class_without_a_text_of_its_own_stays_as_it_is() -> None:
    error = InputError("limit must be 3")
    assert in_words(error) is error
