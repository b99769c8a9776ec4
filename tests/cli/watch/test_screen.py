"""`byssus watch` in a real terminal window: the runs of another process, and an answer that they act upon."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.databases import Database
from tests.support.processes import Child, started
from tests.support.window import Window

pytestmark = pytest.mark.processes

_RUNS = """
import asyncio, os, sys
from byssus import Agent, Model, TextContent, ToolCall, tool
from byssus.checkpointer import checkpointer_for
from byssus.testing import ScriptedProvider

go_on = asyncio.Event()

@tool(approval=True)
def pay(amount: int) -> str:
    return f"paid {amount}"

@tool
async def ship(place: str) -> str:
    await go_on.wait()
    return f"shipped to {place}"

async def main():
    async with checkpointer_for(sys.argv[1]) as cp:
        def run(thread, *calls):
            provider = ScriptedProvider([[TextContent("I will see to it."), *calls], f"All is done for {thread}."])
            agent = Agent(provider=provider, model=Model("m"), tools=[pay, ship], checkpointer=cp, thread_id=thread)
            return asyncio.create_task(agent.prompt(f"Please do it for {thread}."))
        begun = [run("ann", ToolCall("a1", "ship", {"place": "Bergen"}))]
        while len(await cp.tool_calls("ann")) < 1:
            await asyncio.sleep(0.01)
        begun.append(run("bob", ToolCall("b1", "pay", {"amount": 70}), ToolCall("b2", "ship", {"place": "Oslo"})))
        while len(await cp.tool_calls("bob")) < 2:
            await asyncio.sleep(0.01)
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        go_on.set()
        for result in await asyncio.gather(*begun):
            print(result.text, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def runs(database: Database) -> Iterator[Child]:
    """Two live runs of another process, one of which waits for an approval."""
    with started(_RUNS, database.place) as child:
        assert child.hear() == "begun"
        yield child


def test_two_runs_of_another_process_are_watched_and_one_is_answered(
    runs: Child, database: Database, tmp_path: Path
) -> None:
    with Window("watch", home=tmp_path, env={"BYSSUS_DB": database.place}, columns=100) as window:
        window.wait_for_on_screen("2 live runs, 1 question waiting", "ann", "bob", "runs ship", "[1?] runs ship")
        window.press("down")
        window.wait_for_on_screen("approval of pay:", "amount: 70", "y: approve  n: deny")
        window.press("enter")
        window.wait_for_on_screen("> Please do it for bob.", "I will see to it.", '* ship {"place":"Oslo"}')
        window.resize(40, 20)
        window.wait_until(lambda: "bob: running" in window.rows[0] and len(window.rows[0]) <= 40, "a narrow screen")
        window.press("escape")
        window.wait_for_on_screen("2 live runs, 1 question waiting", "THREAD       STATE    DOES")
        window.type("v")
        window.wait_for_on_screen("amount: 70", "v: back")
        window.type("v")
        window.type("y")
        window.wait_for_on_screen("press y once more to approve pay in bob")
        assert "1 question waiting" in window.screen
        window.type("y")
        window.wait_for_on_screen("approved: pay", "0 questions waiting")
        runs.tell()
        window.wait_for_on_screen("ended: stop")
        window.resize(100, 24)
        window.press("enter")
        window.wait_for_on_screen("pay: paid 70", "ship: shipped to Oslo", "All is done for bob.", "- ended: stop")
        window.type("q")
        assert window.wait_for_its_end() == 0
    assert [runs.hear(), runs.hear()] == ["All is done for ann.", "All is done for bob."]


def test_a_denial_has_a_reason_and_a_thread_of_ones_own_choice_is_followed(
    runs: Child, database: Database, tmp_path: Path
) -> None:
    with Window("watch", "bo", home=tmp_path, env={"BYSSUS_DB": database.place}, columns=40) as window:
        window.wait_for_on_screen("> Please do it for bob.", "approval of pay:")
        assert "esc: all runs" not in window.screen  # there is no list to go back to
        window.type("n")
        window.wait_for_on_screen("Why not?")
        window.press("escape")
        window.wait_until_gone("Why not?")
        window.type("n")
        window.wait_for_on_screen("Why not?")
        window.enter("not q today")
        window.wait_for_on_screen("denied: pay")
        runs.tell()
        window.wait_for_on_screen("not q today", "All is done for bob.")
        window.send(signal.SIGTERM)
        assert window.wait_for_its_end() == 128 + signal.SIGTERM
        assert not window.display.has_private_mode(1049)
    assert [runs.hear(), runs.hear()] == ["All is done for ann.", "All is done for bob."]


def test_a_window_that_closes_ends_it(database: Database, tmp_path: Path) -> None:
    with Window("watch", home=tmp_path, env={"BYSSUS_DB": database.place}) as window:
        window.wait_for_on_screen("Nothing runs now.", "q: quit")
        window.hang_up()
        assert window.wait_for_its_end() == 128 + signal.SIGHUP
