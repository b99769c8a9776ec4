"""The start of an id stands for the whole one, if it is the only one that begins so; what removes wants the whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from byssus import Agent, Model, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata
from byssus.cli.ids import chosen
from byssus.errors import InputError
from byssus.providers.scripted import ScriptedProvider
from byssus.storage import AgentStorage
from tests.support.commands import Here, command_here
from tests.support.databases import Database


@pytest.fixture
def byssus(capsys: pytest.CaptureFixture[str], database: Database) -> Here:
    return command_here(capsys, database.place)


def fill(database: Database, work: Callable[[Checkpointer], Awaitable[object]]) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await work(cp)

    asyncio.run(main())


@pytest.fixture
def trips(database: Database) -> Database:
    async def make(cp: Checkpointer) -> None:
        for name in ("trip", "trip-home", "北京-1", "100%_done"):
            await cp.append(name, UserMessage(f"about {name}"))

    fill(database, make)
    return database


def test_a_whole_id_means_itself_and_a_start_the_only_one_that_has_it() -> None:
    assert chosen("trip", ["trip", "trip-home"], "threads") == "trip"
    assert chosen("trip-", ["trip", "trip-home"], "threads") == "trip-home"
    assert chosen("x", ["trip"], "threads") == "x"
    many = [f"t{number}" for number in range(9)]
    with pytest.raises(InputError, match=r"'t' could be any of these calls: 't0', 't1', 't2', 't3', 't4', \.\.\.; "):
        chosen("t", many, "calls")


@pytest.mark.parametrize(
    ("typed", "meant"), [("trip", "trip"), ("trip-", "trip-home"), ("北", "北京-1"), ("100%", "100%_done")]
)
def test_a_thread_is_found_by_the_start_of_its_id(trips: Database, byssus: Here, typed: str, meant: str) -> None:
    assert json.loads(byssus("show", typed, "--json").stdout)["id"] == meant


def test_what_could_be_several_is_an_error_that_names_them(trips: Database, byssus: Here) -> None:
    told = byssus("show", "tr", code=1).stderr
    assert told == "byssus: 'tr' could be any of these threads: 'trip', 'trip-home'; type more of the id\n"


@pytest.mark.parametrize("typed", ["_", "%", "TRIP-", "rip"])
def test_only_the_very_start_counts(trips: Database, byssus: Here, typed: str) -> None:
    assert f"there is no thread {typed!r} in " in byssus("show", typed, code=1).stderr


def test_an_id_that_is_nearly_right_is_named(trips: Database, byssus: Here) -> None:
    told = byssus("show", "tripp-home", code=1).stderr
    assert told.endswith("; did you mean 'trip-home'? 'byssus threads' lists them\n")
    assert "did you mean" not in byssus("show", "qqq", code=1).stderr


def test_an_export_and_a_difference_take_the_start_of_an_id(trips: Database, byssus: Here) -> None:
    assert '"trip-home"' in byssus("export", "trip-").stdout
    assert byssus("diff", "trip", "trip-").stdout.startswith("trip and trip-home share 0 messages")
    assert "trip-home" in byssus("search", "about", "--thread", "trip-").stdout


@pytest.mark.parametrize(
    "command", [["delete", "trip-", "--yes"], ["erase", "trip-", "--yes"], ["prune", "trip-", "--keep-last", "1"]]
)
def test_what_removes_wants_the_whole_id_and_names_what_begins_like_it(
    trips: Database, byssus: Here, command: list[str]
) -> None:
    told = byssus(*command, code=1).stderr
    assert told.endswith("; this command needs the whole id: 'trip-home'\n")
    assert "trip-home" in byssus("threads").stdout


def test_a_checkpoint_is_found_by_the_start_of_its_id_also_if_a_rewind_has_left_it(
    database: Database, byssus: Here
) -> None:
    async def make(cp: Checkpointer) -> None:
        for step, name in enumerate(("aa-1", "bb-1", "bb-2")):
            messages = [{"role": "user", "content": f"{number}"} for number in range(step + 1)]
            await cp.put(Checkpoint(CheckpointMetadata("t", name, step=step), messages))

    fill(database, make)
    assert byssus("rewind", "t", "aa").stdout.startswith("Thread t has 1 message now.")
    assert byssus("rewind", "t", "bb-2").stdout.startswith("Thread t has 3 messages now.")
    assert byssus("fork", "t", "--at", "a", "--as", "u").stdout == "u\n"
    told = byssus("rewind", "t", "bb", code=1).stderr
    assert "'bb' could be any of these checkpoints: 'bb-1', 'bb-2'" in told


@tool(approval=True)
async def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def test_a_call_and_a_waiting_message_are_found_by_the_start_of_their_ids(database: Database, byssus: Here) -> None:
    async def make(cp: Checkpointer) -> None:
        provider = ScriptedProvider([[ToolCall("call_123", "pay", {"amount": 5}), ToolCall("call_9", "pay")]])
        agent = Agent(provider=provider, model=Model("m"), tools=[pay], checkpointer=cp, thread_id="shop")
        await agent.prompt("buy it")

    fill(database, make)
    assert "could be any of these calls" in byssus("answer", "sh", "call", "approve", code=1).stderr
    byssus("answer", "sh", "call_1", "approve")
    assert [call["call_id"] for call in json.loads(byssus("pending", "shop", "--json").stdout)] == ["call_9"]
    sent = byssus("steer", "sh", "hurry").stdout.strip()
    byssus("withdraw", "sh", sent[:-2])
    assert json.loads(byssus("inbox", "shop", "--json").stdout) == []


def test_a_user_is_found_by_the_start_of_its_id(database: Database, byssus: Here) -> None:
    with AgentStorage(database.place) as storage:
        for name in ("anna", "annika"):
            storage.create_user(name, user_id=name)
            storage.create_session(name, session_id=f"{name}-1")
            storage.save_message(f"{name}-1", "user", f"hello from {name}")
    assert json.loads(byssus("usage", "anni", "--json").stdout)["thread_count"] == 1
    assert byssus("search", "hello", "--user", "anni").stdout.splitlines()[1].startswith("annika-1")
    assert '"annika-1"' in byssus("export", "--user", "anni").stdout
    assert "could be any of these users: 'anna', 'annika'" in byssus("usage", "ann", code=1).stderr
    assert "there is no user 'eve'; 'byssus users' lists them" in byssus("usage", "eve", code=1).stderr
    assert "annika" in byssus("threads").stdout  # and nothing was erased by half a name
    assert "nothing of user 'anni'" in byssus("erase", "--user", "anni", "--yes", code=1).stderr
