"""The clock of the database is set while tasks wait for a time: none is lost, none is done twice."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from byssus.checkpointer import Checkpointer
from byssus.values import clock
from byssus.worker import Retry, TaskContext, Worker, worker
from tests.support.databases import Database
from tests.support.leases import DatabaseClock, with_two
from tests.support.workers import task_of

HOUR = timedelta(hours=1)


@pytest.fixture
def time_is(monkeypatch: pytest.MonkeyPatch) -> DatabaseClock:
    monkeypatch.setattr(worker, "_SCAN", 0.01)
    return DatabaseClock(monkeypatch)


def test_a_task_that_waits_for_its_time_waits_longer_if_the_clock_is_set_back_and_runs_once(
    database: Database, time_is: DatabaseClock
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        ran = []

        async def work(ctx: TaskContext, payload: str) -> None:
            ran.append(f"{payload} {ctx.attempt}")
            if payload == "sleep":
                await ctx.sleep(minutes=1)
            elif ctx.attempt == 1:
                raise Retry(after=60)

        names = ["retry", "sleep"]
        tasks = {name: (await cp.create_task(None, "t", name))["id"] for name in names}
        alone = Worker(cp, {"t": work}, concurrency=1)
        await alone.drained()
        for time_is.off in (-HOUR, timedelta(seconds=50)):
            await alone.drained()
            assert ran == ["retry 1", "sleep 1"]
            assert {(await task_of(cp, task))["status"] for task in tasks.values()} == {"pending"}
        for time_is.off in (HOUR, -HOUR):
            await Worker(other, {"t": work}, concurrency=1).drained()
            assert sorted(ran) == ["retry 1", "retry 2", "sleep 1", "sleep 1"]
            found = [await task_of(cp, task) for task in tasks.values()]
            assert [(task["status"], task["retry_count"]) for task in found] == [("completed", 1), ("completed", 0)]

    with_two(database, use)


def test_a_clock_that_is_set_while_a_task_runs_leaves_the_task_to_its_worker(
    database: Database, time_is: DatabaseClock
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        ran = []

        async def work(ctx: TaskContext, payload: Any) -> None:
            ran.append(ctx.attempt)
            for time_is.off in (-HOUR, HOUR, -HOUR):
                await Worker(other, {"t": work}).drained()
                await ctx.progress(0.5)

        task = (await cp.create_task(None, "t", None))["id"]
        await Worker(cp, {"t": work}).drained()
        assert ran == [1]
        assert (await task_of(cp, task))["status"] == "completed"

    with_two(database, use)


def test_a_schedule_uses_each_tick_once_whatever_its_clock_is_set_to(
    database: Database, time_is: DatabaseClock
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        async def ticks_at(seconds: float) -> int:
            time_is.off = timedelta(seconds=seconds)
            for each in (cp, other):
                await Worker(each, {"t": lambda _, __: None}).drained()
            tasks = await cp.list_tasks() or []
            assert {task["status"] for task in tasks} <= {"completed"}
            assert len({task["unique_key"] for task in tasks}) == len(tasks)
            return len(tasks)

        await cp.create_schedule("a", "t", every=600)
        assert await ticks_at(610) == 1
        assert await ticks_at(610 - 3_600) == 1  # set back by an hour: the next tick stays where it is
        assert await ticks_at(1_190) == 1
        assert await ticks_at(1_210) == 2
        assert await ticks_at(-10_000) == 2  # set back by more: it ticks by the new time from now on
        (schedule,) = await cp.schedules()
        assert clock.now() < (schedule["next_at"] or "") <= clock.after(clock.now(), 600)
        assert await ticks_at(-9_000) == 3
        assert await ticks_at(90_000) == 4  # forward: one task for all that was missed

    with_two(database, use)
