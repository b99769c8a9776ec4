"""A worker's loop that turns ticks into tasks."""

from __future__ import annotations

import asyncio

import pytest

from byssus.checkpointer import Checkpointer
from byssus.errors import StoreNotOpen
from byssus.store.database import Tx
from byssus.store.jobs import TASKS
from byssus.threads.following import hub
from byssus.values import clock
from byssus.worker import TaskContext, Worker
from byssus.worker.ticking import ticking
from tests.support.databases import Database


async def ticks_of(cp: Checkpointer, name: str) -> list[str]:
    return [task["unique_key"] or "" for task in await cp.list_tasks() or [] if task["schedule"] == name]


def test_two_loops_use_each_tick_once_and_report_once_what_cannot_tick(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    def break_zone(tx: Tx) -> None:
        past = clock.after(clock.now(), -60)
        tx.run("UPDATE schedules SET zone = 'Moon/Sea', next_at = :past WHERE id = 'broken'", past=past)

    async def use() -> None:
        async with database.checkpointer() as cp, database.checkpointer() as other:
            await cp.create_schedule("broken", "t", cron="* * * * *")
            await cp.store.write(break_zone)
            await cp.create_schedule("a", "t", every=1)
            bell = hub.of(cp.store).attach(TASKS)
            async with ticking(cp.store), ticking(other.store):
                while len(ticks := await ticks_of(cp, "a")) < 2:
                    await bell.wait()
            hub.of(cp.store).detach(TASKS, bell)
        first = ticks[0].removeprefix("schedule:a:")
        assert ticks == [f"schedule:a:{clock.after(first, number)}" for number in range(len(ticks))]

    asyncio.run(use())
    told = [record.getMessage() for record in caplog.records if record.name == "byssus.worker"]
    assert len(told) == 2  # one for each loop
    assert "schedule 'broken' cannot tick in this process: there is no time zone 'Moon/Sea'" in told[0]


def test_a_worker_runs_the_tasks_of_schedules(database: Database) -> None:
    async def use() -> None:
        async with database.checkpointer() as cp:
            session = await cp.create_session(None)
            done = asyncio.Event()

            async def note(ctx: TaskContext, payload: str) -> str:
                done.set()
                return f"{payload} of {ctx.session_id}"

            worker = Worker(cp, {"note": note})
            await cp.create_schedule("a", "note", "tick", every=1, session_id=session["id"])
            async with worker:
                await done.wait()
            (task, *_) = await cp.list_tasks(session["id"], "completed") or []
            assert (task["result"], task["schedule"]) == (f"tick of {session['id']}", "a")

    asyncio.run(use())


def test_ticks_that_are_due_are_used_before_a_worker_looks_for_tasks(database: Database) -> None:
    def move_back(tx: Tx) -> None:
        tx.run("UPDATE schedules SET next_at = :past", past=clock.after(clock.now(), -5))

    async def use() -> None:
        async with database.checkpointer() as cp:
            await cp.create_schedule("a", "note", every=3_600)
            await cp.store.write(move_back)
            await Worker(cp, {"note": lambda _, __: None}).drained()
            assert [task["status"] for task in await cp.list_tasks() or []] == ["completed"]

    asyncio.run(use())


def test_a_database_that_is_closed_ends_the_loop(database: Database) -> None:
    async def use() -> None:
        async with database.checkpointer() as cp:
            store = cp.store
        with pytest.raises(StoreNotOpen):
            async with ticking(store, first=True):
                raise AssertionError

    asyncio.run(use())
