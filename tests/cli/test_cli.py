"""The edge of the command line: help in every position, one line for every error, a page of all commands."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from byssus.cli import main
from byssus.cli.commands import COMMANDS
from byssus.cli.parser import commands_of, parser_for
from byssus.cli.words import in_words
from byssus.errors import ThreadBusy
from tests.support.programs import pipe, program
from tools import cli_page


@pytest.mark.parametrize(
    "typed", [["show", "trip", "-h"], ["-h", "show"], ["show", "-h", "trip"], ["show", "--last", "--help"]]
)
def test_help_works_in_every_position(capsys: pytest.CaptureFixture[str], typed: list[str]) -> None:
    assert main(typed) == 0
    assert capsys.readouterr().out.startswith("usage: byssus show")


def test_help_without_a_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "rewind" in capsys.readouterr().out


def test_no_command_at_all_names_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "byssus: error: which command? 'byssus --help' lists them" in capsys.readouterr().err


def test_a_traceback_is_shown_only_with_debug(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    typed = ["show", "x", "--db", str(tmp_path / "none.db")]
    assert main(typed) == 1
    assert re.fullmatch(r"byssus: there is no database [^\n]+\n", capsys.readouterr().err)
    assert main([*typed, "--debug"]) == main(["--debug", *typed]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_too() -> None:
    assert str(in_words(KeyError("x"))) == "unexpected KeyError: 'x'; run it again with --debug for the traceback"


def test_an_error_at_a_shell_names_a_command_and_no_python_call() -> None:
    busy = str(in_words(ThreadBusy("trip", "host:1", 1, "2026-01-01T00:00:00.000000Z")))
    assert "byssus steer trip TEXT" in busy
    assert "(" not in busy


def test_the_table_of_commands_is_what_the_modules_declare() -> None:
    assert [*commands_of(parser_for())] == [*COMMANDS]
    for name, parser in commands_of(parser_for()).items():
        assert parser.get_default("run").__module__ == COMMANDS[name].module


def test_the_page_of_the_commands_is_made_from_them() -> None:
    page = cli_page.PAGE.read_text("utf-8")
    assert cli_page.with_commands(page) == page, "run: python -m tools.cli_page"
    assert "| [`rewind`](#rewind) | move a thread back to an earlier point |" in page


def test_an_error_that_no_command_reports_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener of an app that fails: the answer is there, and so is the reason."""
    with program(tmp_path, monkeypatch):
        pipe(monkeypatch, "")
        monkeypatch.setattr(logging.getLogger(), "handlers", [])  # the test runner has set up logging
        typed = ["ask", "Why?", "--app", "clerk:deaf", "--db", str(tmp_path / "a.db")]
        assert main(typed) == 0
        out, err = capsys.readouterr()
        assert out == "The answer.\n"
        assert re.fullmatch(
            r"byssus: listener [^\n]+ AttributeError: 'AgentStart' object has no attribute 'tpye'\n", err
        )
        assert main([*typed, "--app", "clerk:agents", "--agent", "failing"]) == 1
        assert capsys.readouterr().err == "byssus: no such model\n"  # once, and not as a warning, too


def test_an_app_that_sets_up_logging_hears_of_errors_there(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with program(tmp_path, monkeypatch):
        pipe(monkeypatch, "")
        assert main(["ask", "Why?", "--app", "clerk:deaf", "--db", str(tmp_path / "a.db")]) == 0
    assert capsys.readouterr().err == ""
    assert "failed on agent_start" in caplog.text


def test_help_names_the_option_for_the_database_and_the_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "100%"))
    assert main(["--help"]) == 0
    told = "".join(capsys.readouterr().out.split())
    assert "--dbDATABASE" in told
    assert f"{tmp_path}/100%/byssus/chat.db" in told


@pytest.mark.parametrize(
    ("typed", "usage", "told"),
    [
        (["thread"], "usage: byssus [", "there is no command 'thread'; did you mean 'threads'?"),
        (["qqqq"], "usage: byssus [", "there is no command 'qqqq'; 'byssus --help' lists them"),
        (["threads", "--limt", "3"], "usage: byssus threads ", "did you mean '--limit'?"),
        (["show", "a", "b"], "usage: byssus show ", "unrecognized arguments: b"),
        (["search", "x", "--again"], "usage: byssus search ", "byssus search -- '\"--again\"'"),
    ],
)
def test_a_wrong_word_shows_the_usage_of_its_command_and_what_was_meant(
    capsys: pytest.CaptureFixture[str], typed: list[str], usage: str, told: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(typed)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(usage)
    assert told in err
