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
from byssus.worker.ticking import keep_ticking
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
            loops = [asyncio.create_task(keep_ticking(each.store)) for each in (cp, other)]
            while len(ticks := await ticks_of(cp, "a")) < 2:
                await bell.wait()
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)
            hub.of(cp.store).detach(TASKS, bell)
        first = ticks[0].removeprefix("schedule:a:")
        assert ticks == [f"schedule:a:{clock.after(first, number)}" for number in range(len(ticks))]

    asyncio.run(use())
    told = [record.getMessage() for record in caplog.records if record.name == "byssus.worker"]
    assert len(told) == 2  # one for each loop
    assert "schedule 'broken' cannot tick in this process: there is no time zone 'Moon/Sea'" in told[0]


def test_the_loop_ends_with_its_store(database: Database) -> None:
    async def use() -> None:
        async with database.checkpointer() as cp:
            store = cp.store
        with pytest.raises(StoreNotOpen):
            await keep_ticking(store)

    asyncio.run(use())
