"""Pruning, deleting and erasing from the command line: what is asked, what is told, and that it is gone."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import Agent, Model
from byssus.checkpointer import SQLiteCheckpointer
from byssus.providers.scripted import ScriptedProvider
from tests.support.checkpointers import fill_trip
from tests.support.commands import Command, command
from tests.support.databases import Database
from tests.support.terminal import Terminal

pytestmark = pytest.mark.processes


@pytest.fixture
def byssus(tmp_path: Path, database: Database) -> Command:
    return command(tmp_path, database.place)


@pytest.fixture
def trip(database: Database) -> Database:
    """A thread "trip" with three checkpoints, of which "other" shares the first two; and one that belongs to Ann."""

    async def main() -> None:
        async with database.checkpointer() as cp:
            await fill_trip(cp)
            await cp.fork("trip", "c2", new_id="other")
            await cp.create_user("Ann", user_id="ann")
            provider = ScriptedProvider(["hello"])
            agent = Agent(provider=provider, model=Model("m"), checkpointer=cp, thread_id="ann's", user_id="ann")
            await agent.prompt("hi")

    asyncio.run(main())
    return database


def threads(database: Database) -> set[str]:
    async def main() -> set[str]:
        async with database.checkpointer() as cp:
            return {info.id for info in await cp.threads()}

    return asyncio.run(main())


def checkpoints(database: Database, thread_id: str) -> list[str]:
    async def main() -> list[str]:
        async with database.checkpointer() as cp:
            return [each.checkpoint_id for each in await cp.list_checkpoints(thread_id)]

    return asyncio.run(main())


# --- prune ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep-last", "1"], ["c3"]),
        (["--keep-tagged", "plan", "nothing"], ["c2"]),
        (["--keep-last", "1", "--keep-tagged", "agreed"], ["c3", "c2"]),
        (["--keep-days", "0.5"], ["c3", "c2", "c1"]),
    ],
)
def test_a_prune_keeps_what_any_option_keeps(
    byssus: Command, trip: Database, options: list[str], kept: list[str]
) -> None:
    gone = sorted({"c1", "c2", "c3"} - set(kept))
    counted = "1 checkpoint" if len(gone) == 1 else f"{len(gone)} checkpoints"
    told = byssus("prune", "trip", *options).stdout
    assert told == "".join([f"Removed {counted} and 0 messages.\n", *(f"  {name}\n" for name in gone)])
    assert checkpoints(trip, "trip") == kept
    assert checkpoints(trip, "other") == ["c2", "c1"]


def test_a_prune_removes_messages_that_nothing_leads_to_any_more(byssus: Command, trip: Database) -> None:
    byssus("rewind", "trip", "c2")
    assert byssus("prune", "trip", "--keep-last", "5").stdout == "Removed 1 checkpoint and 2 messages.\n  c3\n"


def test_without_a_thread_those_with_a_time_to_live_are_pruned(byssus: Command, trip: Database) -> None:
    assert byssus("prune").stdout == "Removed 0 checkpoints and 0 messages.\n"

    async def main() -> None:
        async with trip.checkpointer() as cp:
            await cp.set_ttl("trip", 1e-9)

    asyncio.run(main())
    assert byssus("prune").stdout.startswith("Removed 2 checkpoints and 0 messages.\n")
    assert checkpoints(trip, "trip") == ["c3"]


# --- delete and erase -------------------------------------------------------------------------------------------------


def test_a_deleted_thread_is_gone_and_its_fork_is_not(byssus: Command, trip: Database) -> None:
    told = byssus("delete", "trip", "--yes").stdout
    assert told == "Deleted thread trip with 6 messages and 3 checkpoints.\n"
    assert threads(trip) == {"other", "ann's"}
    assert len(json.loads(byssus("show", "other", "--json").stdout)["messages"]) == 4


@pytest.mark.parametrize(("forks", "left"), [("keep", {"other", "ann's"}), ("erase", {"ann's"})])
def test_an_erasure_says_what_went_and_where_copies_may_be(
    byssus: Command, trip: Database, forks: str, left: set[str]
) -> None:
    counts, note = byssus("erase", "trip", "--forks", forks, "--yes").stdout.splitlines()
    if forks == "keep":
        assert counts == "Erased 1 thread, 3 checkpoints and 2 messages."
    else:
        assert counts == "Erased 2 threads, 5 checkpoints and 6 messages."
    assert "ackups" in note
    assert threads(trip) == left


def test_all_threads_of_a_user_are_erased(byssus: Command, trip: Database) -> None:
    told = byssus("erase", "--user", "ann", "--yes").stdout
    assert told.startswith("Erased 1 thread, 0 checkpoints and 2 messages.\n")
    assert threads(trip) == {"trip", "other"}


def test_an_erasure_names_the_backups_that_may_still_hold_it(byssus: Command, trip: Database, tmp_path: Path) -> None:
    byssus("backup", str(tmp_path / "monday.db"))
    told = byssus("erase", "--user", "ann", "--yes").stdout
    assert f"Known backups that may still hold it: '{tmp_path / 'monday.db'}'. Delete them, or bring them up" in told
    byssus("backup", str(tmp_path / "monday.db"), "--incremental")


def test_no_byte_of_an_erased_thread_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"

    async def main() -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("needle-in-the-id", [{"role": "user", "content": "needle-in-a-message"}])
            await cp.append("other", [{"role": "user", "content": "hay"}])

    asyncio.run(main())
    command = [sys.executable, "-m", "byssus", "erase", "needle-in-the-id", "--yes", "--db", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert b"needle" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"hay" in path.read_bytes()


# --- what is asked first ----------------------------------------------------------------------------------------------

REMOVALS = [["delete", "trip"], ["erase", "trip", "--forks", "keep"], ["erase", "--user", "ann"]]


@pytest.fixture(params=REMOVALS, ids=" ".join)
def removal(request: pytest.FixtureRequest) -> list[str]:
    command: list[str] = request.param
    return command


@pytest.fixture
def tty(trip: Database, removal: list[str]) -> Iterator[Terminal]:
    terminal = Terminal("-m", "byssus", *removal, env={"BYSSUS_DB": trip.place}, new_python=False)
    yield terminal
    terminal.close()


def test_a_person_types_the_id_to_go_on(tty: Terminal, trip: Database, removal: list[str]) -> None:
    name = "ann" if "--user" in removal else "trip"
    tty.wait_for(r"This (deletes|erases) [^\r]+\. Type the id to go on: ")
    tty.type(f"{name}\n")
    tty.wait_for("(Deleted|Erased) ")
    assert tty.process.wait(60) == 0
    assert len(threads(trip)) == 2


@pytest.mark.parametrize("removal", [["delete", "trip"]], indirect=True)
@pytest.mark.parametrize("typed", ["y\n", "\n", "trip \n", "\x04"], ids=["yes", "nothing", "a space more", "Ctrl-D"])
def test_any_other_word_removes_nothing(tty: Terminal, trip: Database, typed: str) -> None:
    tty.wait_for("Type the id to go on: ")
    tty.type(typed)
    tty.wait_for(r"byssus: '[^']*' is not '\w+': nothing was removed")
    assert tty.process.wait(60) == 1
    assert threads(trip) == {"trip", "other", "ann's"}


@pytest.mark.parametrize("removal", [["delete", "trip"]], indirect=True)
def test_ctrl_c_at_the_question_removes_nothing(tty: Terminal, trip: Database) -> None:
    tty.wait_for("Type the id to go on: ")
    tty.press_until_it_ends("\x03")
    assert tty.process.returncode in (130, -signal.SIGINT)  # if it was pressed again while the program was leaving
    assert threads(trip) == {"trip", "other", "ann's"}


def test_without_a_terminal_a_script_must_say_yes(byssus: Command, trip: Database, removal: list[str]) -> None:
    done = byssus(*removal, code=1)
    assert re.fullmatch(
        r"byssus: this (deletes|erases) [^\n]+ no terminal to ask at; pass --yes to go on\n", done.stderr
    )
    assert threads(trip) == {"trip", "other", "ann's"}


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["prune", "trip"], "what is kept? byssus prune THREAD --keep-last N"),
        (["prune", "--keep-last", "3"], "which thread?"),
        (["prune", "--keep-tagged", "plan", "trip"], "which thread?"),
        (["prune", "trip", "--keep-days", "-1"], "days above 0"),
        (["prune", "trip", "--keep-days", "nan"], "days above 0"),
        (["prune", "nobody", "--keep-last", "1"], "there is no thread 'nobody'"),
        (["delete", "nobody", "--yes"], "there is no thread 'nobody'"),
        (["erase", "nobody", "--yes"], "there is no thread 'nobody'"),
        (["erase", "--user", "nobody", "--yes"], "there is nothing of user 'nobody'"),
        (["erase", "trip", "--yes"], "shares its past with 1 fork ('other'): pass --forks keep"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_removes_nothing(
    byssus: Command, trip: Database, arguments: list[str], complaint: str
) -> None:
    done = byssus(*arguments, code=1)
    assert complaint in done.stderr
    assert re.fullmatch(r"byssus: [^\n]+\n", done.stderr)
    assert threads(trip) == {"trip", "other", "ann's"}
    assert checkpoints(trip, "trip") == ["c3", "c2", "c1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["delete"],
        ["erase"],
        ["erase", "trip", "--user", "ann"],
        ["erase", "trip", "--forks", "x"],
        ["prune", "t", "--keep-last", "0"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(byssus: Command, arguments: list[str]) -> None:
    assert byssus(*arguments, code=2).stderr.startswith("usage: byssus")


@pytest.mark.parametrize("arguments", [["prune"], ["delete", "trip", "--yes"], ["erase", "--user", "ann"]])
def test_removing_makes_no_database(tmp_path: Path, new_database: Database, arguments: list[str]) -> None:
    byssus = command(tmp_path, new_database.place)
    assert "there is no database at" in byssus(*arguments, code=1).stderr
