"""`byssus watch` where there is no screen: a table, or JSON, once. And what a board knows of runs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any

import pytest

from byssus import Agent, Model, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpointer
from byssus.cli.watch.board import Board
from byssus.providers.scripted import ScriptedProvider
from byssus.storage import AgentStorage
from tests.support.commands import Here, command_here
from tests.support.databases import Database
from tests.support.screens import screen_of


@pytest.fixture
def byssus(capsys: pytest.CaptureFixture[str], database: Database) -> Here:
    return command_here(capsys, database.place)


@tool(approval=True)
def pay(amount: int) -> str:
    return f"paid {amount}"


@tool
def look() -> str:
    return "nothing is there"


def agent(cp: Checkpointer, thread_id: str, *replies: Any, **options: Any) -> Agent:
    options = {"tools": [pay], **options}
    provider = ScriptedProvider([*replies])
    return Agent(provider=provider, model=Model("m"), checkpointer=cp, thread_id=thread_id, **options)


@pytest.fixture
def waiting(database: Database) -> None:
    """A thread whose run waits for an approval, and one without a live run."""

    async def fill() -> None:
        async with database.checkpointer() as cp:
            await agent(cp, "idle", "Hello.").prompt("hi")
            await agent(cp, "bob", [ToolCall("b1", "pay", {"amount": 70})]).prompt("Pay\x1b[31m it.")

    asyncio.run(fill())


def test_what_waits_is_a_row(waiting: None, byssus: Here) -> None:
    head, row = byssus("watch").stdout.splitlines()
    assert head.split() == ["THREAD", "STATE", "DOES", "WAITING", "TOKENS/MIN", "BEGAN"]
    assert row.split()[:8] == ["bob", "waiting", "waits", "for", "an", "answer", "about", "pay"]
    (shown,) = json.loads(byssus("watch", "--json").stdout)
    assert (shown["thread_id"], shown["state"], shown["waiting"]) == ("bob", "waiting", ["b1"])
    assert shown["title"] == "Pay\x1b[31m it."
    assert byssus("watch", "idle").stdout.splitlines()[1].split()[:4] == ["idle", "idle", "ended:", "stop"]


def test_where_nothing_runs_it_says_so(database: Database, byssus: Here) -> None:
    async def make() -> None:
        async with database.checkpointer():
            pass

    asyncio.run(make())
    for thread in ([], ["nobody"]):
        assert byssus("watch", *thread).stderr == "Nothing runs now, and nothing waits for a person.\n"
    assert byssus("watch", "--json").stdout == "[]\n"


def test_tasks_that_run_are_a_table_of_their_own(waiting: None, database: Database, byssus: Here) -> None:
    with AgentStorage(database.place) as storage:
        for thread in ("bob", None):
            storage.update_task_status(storage.create_task(thread, "fetch", {})["id"], "running")
        storage.create_task(None, "later", {})
    lines = [line.split() for line in byssus("watch").stdout.splitlines()]
    assert [lines[1][0], lines[2]] == ["bob", []]
    assert lines[3] == ["TASK", "THREAD", "PROGRESS"]
    assert [line[:2] for line in lines[4:]] == [["fetch", "bob"], ["fetch", "since"]]
    assert [line.split()[0] for line in byssus("watch", "idle").stdout.splitlines()] == ["THREAD", "idle"]


def test_without_its_extra_a_screen_is_an_error_that_names_it(
    waiting: None, database: Database, monkeypatch: pytest.MonkeyPatch, byssus: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "prompt_toolkit" else find(name)
    )
    screen_of(monkeypatch, term="xterm")
    monkeypatch.setattr("sys.stdin", screen_of(monkeypatch, term="xterm"))
    assert "'byssus watch' needs the extra 'chat'" in byssus("watch", code=1).stderr


def test_a_board_leaves_out_the_calls_of_the_run_before(database: Database) -> None:
    async def use() -> None:
        async with database.checkpointer() as cp, database.checkpointer() as other:
            first = agent(cp, "t", [ToolCall("a1", "look", {})], "Nothing.", tools=[look])
            await first.prompt("Look.")
            await agent(cp, "t", [ToolCall("b1", "pay", {"amount": 70})]).prompt("Pay it.")
            board = Board(other)
            await board.settled()
            told = [entry.text for entry in board.runs["t"].entries]
            assert told == ["Pay it.", 'pay {"amount":70} waits for a person', "ended: waiting"]
            await board.close()

    asyncio.run(use())


def test_a_board_knows_the_run_and_not_what_was_said_before_it(database: Database) -> None:
    async def use() -> None:
        async with database.checkpointer() as cp, database.checkpointer() as other:
            await cp.append("t", [UserMessage(f"old {number}") for number in range(100)])
            made = agent(cp, "t", [ToolCall("b1", "pay", {"amount": 70})], "It is paid.")
            await made.prompt("Pay it.")
            board = Board(other)
            await board.settled()
            keeping = asyncio.create_task(board.keep())
            run = board.runs["t"]
            assert [entry.text for entry in run.entries] == [
                "Pay it.",
                'pay {"amount":70} waits for a person',
                "ended: waiting",
            ]
            assert [call.call_id for call in run.waiting] == ["b1"]
            heard = asyncio.Event()
            board.on_change = lambda: heard.set() if (run.state, run.doing) == ("idle", "ended: stop") else None
            await made.answer("b1", "approve")
            await made.resume()
            await heard.wait()
            later = [entry.text for entry in run.entries][3:]
            assert [
                text for text in later if text != "attempt 2 goes on"
            ] == [  # it may begin and end between two reads
                'pay {"amount":70}',
                "pay: paid 70",
                "It is paid.",
                "ended: stop",
            ]
            assert (run.waiting, board.error) == ([], "")
            keeping.cancel()
            await asyncio.wait([keeping])

    asyncio.run(use())
