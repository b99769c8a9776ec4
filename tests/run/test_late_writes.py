"""What a run had finished is not thrown away because the database could not be written: it is written later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from byssus import tool
from byssus.checkpointer import Checkpointer, SQLiteCheckpointer
from byssus.errors import InputError, LeaseLost, StoreBusy, StoreFull
from byssus.providers.base import Request
from tests.support import processes
from tests.support.agents import history
from tests.support.databases import Database, SQLiteFile
from tests.support.leases import CALL_SLOW, LOOK, Slow, agent_on, is_free, take_over, unfinished, until, with_two
from tests.support.locks import Lock, foreign_lock
from tests.support.tool_calls import UNKNOWN, ledger

BIG = "x" * 500_000


@pytest.fixture
def file(tmp_path: Path) -> SQLiteFile:
    return SQLiteFile(tmp_path)


def locking(lock: Lock, ran: list[str]) -> Callable[[], str]:
    """A tool under which somebody else takes the write lock."""

    async def look() -> str:
        ran.append("look")
        lock.take()
        return "seen"

    return look  # type: ignore[return-value]


@pytest.mark.parametrize("lease_seconds", [30, 0.5])
@pytest.mark.parametrize("is_closed", [False, True])
def test_the_result_of_a_tool_outlives_a_lock_that_outlasts_the_wait(
    file: SQLiteFile, lease_seconds: float, is_closed: bool
) -> None:
    ran: list[str] = []

    async def main() -> None:
        with foreign_lock(file) as lock:
            cp = await file.checkpointer(busy_timeout=1).open()
            cp.lease_seconds = lease_seconds
            agent = agent_on(cp, [LOOK], tools=[locking(lock, ran)])
            with pytest.raises((StoreBusy, LeaseLost)):
                await agent.prompt("go")
            if is_closed:
                await asyncio.wait_for(cp.close(), 30)
            lock.release()
            async with file.checkpointer() as other:
                await until(lambda: _has_ended(other))
                assert await history(other, "t") == ["user: go", "assistant: ", "tool_result: seen"]
                await until(lambda: unfinished(other))
                assert (await agent_on(other, ["ok"], tools=[locking(lock, ran)]).resume()).text == "ok"
            await cp.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert ran == ["look"]


async def _has_ended(cp: Checkpointer) -> bool:
    return await ledger(cp) == [("c1", "done", 1)]


def test_a_reply_that_was_paid_for_outlives_a_lock_that_outlasts_the_wait(file: SQLiteFile) -> None:
    async def main() -> None:
        with foreign_lock(file) as lock:

            def answer(request: Request) -> str:
                lock.take()
                return "paid for"

            async with file.checkpointer(busy_timeout=0.5) as cp:
                agent = agent_on(cp, [answer, "more"])
                with pytest.raises(StoreBusy):
                    await agent.prompt("go")
                lock.release()
                await until(lambda: _says(cp, ["user: go", "assistant: paid for"]))
                assert (await agent.prompt("and?")).text == "more"
                assert await history(cp, "t") == ["user: go", "assistant: paid for", "user: and?", "assistant: more"]
                assert await is_free(cp)

    asyncio.run(asyncio.wait_for(main(), 60))


async def _says(cp: Checkpointer, lines: list[str]) -> bool:
    return await history(cp, "t") == lines


def test_a_lock_that_ends_within_the_wait_of_the_run_costs_nothing(file: SQLiteFile) -> None:
    async def main() -> None:
        ran: list[str] = []
        with foreign_lock(file) as lock:
            async with file.checkpointer(busy_timeout=60, lease_seconds=1) as cp:
                assert cp.lease_seconds == 80
                run = asyncio.create_task(agent_on(cp, [LOOK, "ok"], tools=[locking(lock, ran)]).prompt("go"))
                await until(lambda: ran)
                await asyncio.wait({run}, timeout=1.5)
                assert not run.done()
                lock.release()
                assert (await run).text == "ok"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_result_for_which_there_was_no_room_is_stored_when_there_is(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        @tool
        async def look() -> str:
            database.fill(cp.store)
            return BIG

        agent = agent_on(cp, [LOOK], tools=[look])
        with pytest.raises(StoreFull):
            await agent.prompt("go")
        assert (await history(other, "t")) == ["user: go", "assistant: "]
        database.free(cp.store)
        await until(lambda: _has_ended(other))
        assert await unfinished(other) == [] or await until(lambda: unfinished(other)) == ["t"]

    with_two(database, use)


def test_a_result_that_comes_too_late_is_told_in_the_log_and_changes_nothing(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        first = asyncio.create_task(agent_on(cp, [CALL_SLOW], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        await take_over(other)
        with caplog.at_level(logging.WARNING, "byssus.agent"):
            slow.let_go.set()
            with pytest.raises(LeaseLost):
                await first
            await until(lambda: "the result of call 'c1' (slow) of thread 't' came too late" in caplog.text)
        assert await history(other, "t") == ["user: go", "assistant: "]
        assert UNKNOWN not in await history(other, "t")

    with_two(database, use)


@pytest.mark.processes
def test_a_program_that_ends_writes_what_it_had_finished(file: SQLiteFile) -> None:
    script = """
        from byssus import Agent, Model, ToolCall
        from byssus.checkpointer import SQLiteCheckpointer
        from byssus.testing import ScriptedProvider

        async def look() -> str:
            print("runs", flush=True)
            sys.stdin.readline()
            return "seen"

        async def main():
            async with SQLiteCheckpointer(sys.argv[1], busy_timeout=0.5) as cp:
                agent = Agent(provider=ScriptedProvider([[ToolCall("c1", "look")]]), model=Model(id="m"), tools=[look],
                    checkpointer=cp, thread_id="t")
                try:
                    await agent.prompt("go")
                except StoreBusy:
                    pass
            print("over", flush=True)

        asyncio.run(main())
    """
    with foreign_lock(file) as lock, processes.started(script, file.place) as child:
        assert child.hear() == "runs"
        lock.take()
        assert child.ask() == "over"
        lock.release()

    async def look_at() -> None:
        async with file.checkpointer() as cp:
            assert await history(cp, "t") == ["user: go", "assistant: ", "tool_result: seen"]

    asyncio.run(look_at())


def test_all_openers_of_a_file_in_a_process_wait_equally_long(file: SQLiteFile) -> None:
    async def main() -> None:
        async with file.checkpointer(busy_timeout=5), file.checkpointer():
            with pytest.raises(InputError, match=r"already open in this process with busy_timeout=5; .* not 6"):
                await file.checkpointer(busy_timeout=6).open()

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [0, -1, True, "5", float("nan"), 1e9], ids=ascii)
def test_a_wait_that_is_no_number_of_seconds_is_an_input_error(seconds: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="busy_timeout must be a number of seconds above 0"):
        SQLiteCheckpointer(tmp_path / "x.db", busy_timeout=seconds)  # type: ignore[arg-type]
