"""`byssus resume`: what was interrupted is finished, a line each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import AssistantMessage, UserMessage, cli
from tests.support.databases import Database
from tests.support.programs import pipe, program

APP = ("--app", "clerk:support")


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with program(tmp_path, monkeypatch):
        pipe(monkeypatch, "")
        yield


def fill(database: Database, thread_id: str, *messages: UserMessage | AssistantMessage) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await cp.append(thread_id, list(messages))

    asyncio.run(main())


def test_a_named_thread_goes_on_with_its_last_question(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    fill(database, "trip", UserMessage("Where?"))
    assert cli.main(["resume", "trip", *APP, "--db", database.place]) == 0
    assert capsys.readouterr() == ("trip  finished  The answer.\n", "")


def test_a_thread_with_nothing_to_resume_names_the_command_that_goes_on(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(database, "trip", UserMessage("Where?"), AssistantMessage("There."))
    assert cli.main(["resume", "trip", *APP, "--db", database.place]) == 1
    assert capsys.readouterr().err == "byssus: thread 'trip' has nothing to resume; go on with it: byssus chat trip\n"


def test_a_thread_that_fails_is_named(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    fill(database, "trip", UserMessage("Where?"))
    app = ("--app", "clerk:agents", "--agent", "failing")
    assert cli.main(["resume", "trip", *app, "--db", database.place]) == 1
    assert "'trip'" in capsys.readouterr().err


def test_without_an_interrupted_thread_there_is_nothing_to_do(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["resume", *APP, "--db", database.place]) == 0
    assert capsys.readouterr() == ("", "No run was interrupted.\n")


def test_an_unknown_thread_is_named(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", "nobody", *APP, "--db", database.place]) == 1
    assert "there is no thread 'nobody'" in capsys.readouterr().err


def quarantine(database: Database, thread_id: str) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            change = "UPDATE threads SET quarantined_at = updated_at, run = 'r' WHERE id = :id"
            await cp.store.write(lambda tx: tx.run(change, id=thread_id))

    asyncio.run(main())


def test_a_quarantined_thread_is_left_alone_until_it_is_lifted(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(database, "trip", UserMessage("Where?"))
    quarantine(database, "trip")
    assert cli.main(["resume", *APP, "--db", database.place]) == 0
    assert "Thread 'trip' is quarantined and left alone; 'byssus resume trip --lift'" in capsys.readouterr().err
    assert cli.main(["resume", "trip", *APP, "--db", database.place]) == 1
    assert "thread 'trip' is quarantined since" in capsys.readouterr().err
    assert cli.main(["threads", "--state", "quarantined", "--db", database.place]) == 0
    assert "quarantined" in capsys.readouterr().out
    assert cli.main(["show", "trip", "--db", database.place]) == 0
    assert "This thread is quarantined" in capsys.readouterr().out
    assert cli.main(["resume", "trip", "--lift", *APP, "--db", database.place]) == 0
    assert capsys.readouterr() == ("trip  finished  The answer.\n", "")


def test_only_a_named_thread_can_be_lifted(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", "--lift", *APP, "--db", database.place]) == 1
    assert "--lift needs the thread" in capsys.readouterr().err
