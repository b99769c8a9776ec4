"""A process that works on a child thread is killed, or told to end: another goes on, and repeats no finished tool."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import Agent
from byssus.checkpointer import TakeOver
from tests.run.children import program
from tests.support import forked
from tests.support.agents import history
from tests.support.children import CHILD
from tests.support.databases import Database
from tests.support.leases import until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def under_way(database: Database, diary: Path) -> Iterator[forked.Process]:
    """The program, when the second tool of its child runs."""
    command = ["-W", "error", "-m", "tests.run.children.program", database.place, str(diary)]
    process = forked.Process(command, stdin=forked.PIPE, stdout=forked.PIPE)
    try:
        read_until(process, "ready")
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: forked.Process, line: str) -> None:
    assert process.stdout is not None
    for said in process.stdout:
        if line in said:
            return
    raise AssertionError(f"it ended without {line!r}")


def taken_over(database: Database, diary: Path) -> list[str]:
    """Supervise until the interrupted thread was taken over; returns its history."""

    def factory(thread_id: str, user_id: str | None) -> Agent:
        assert thread_id == "t"
        return program.agent(["done"], program.research(["found"], diary))

    async def main() -> list[str]:
        taken: list[TakeOver] = []
        async with asyncio.timeout(60), database.checkpointer() as cp:
            async with cp.supervise(factory, every=0.05, report=taken.append):
                await until(lambda: taken)
            assert [(each.thread_id, each.result and each.result.text) for each in taken] == [("t", "done")]
            assert [info.id for info in await cp.children("t")] == [CHILD]
            assert await history(cp, CHILD) == [
                "user: find it",
                *("assistant: ", "tool_result: the first is done"),
                *("assistant: ", "tool_result: the second is done"),
                "assistant: found",
            ]
            return await history(cp, "t")

    return asyncio.run(main())


DONE = ["user: go", "assistant: ", "tool_result: found", "assistant: done"]


def test_killed_in_the_tool_of_a_child_the_child_goes_on(database: Database, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    with under_way(database, diary) as process:
        process.kill()
        process.wait()
    assert taken_over(database, diary) == DONE
    assert diary.read_text().split() == ["first", "second", "second"]


def test_sigterm_hands_a_child_over_with_its_parent(database: Database, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    with under_way(database, diary) as process:
        process.send_signal(signal.SIGTERM)
        read_until(process, "SIGTERM: the run stops")
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.wait(60) == 143
    assert taken_over(database, diary) == DONE
    assert diary.read_text().split() == ["first", "second"]
