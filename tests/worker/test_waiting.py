"""Steps, sleeps and events of tasks that a worker runs: what waits holds no slot, and what is done is not repeated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus.checkpointer import Checkpointer
from byssus.worker import TaskContext, ThreadContext
from tests.support.databases import Database
from tests.support.leases import until, with_two
from tests.support.steps import pass_time
from tests.support.workers import became, quick, task_of


class Doing:
    """What steps have done, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __call__(self, what: str) -> str:
        self.done.append(what)
        return f"{what} is done"


def async_handler(doing: Doing) -> Any:
    async def handler(ctx: TaskContext, payload: Any) -> Any:
        first = await ctx.step("first", doing, "first")
        await ctx.sleep(hours=1)
        value = await ctx.wait_for("approval", timeout=3600)
        return [first, value, await ctx.step("last", doing, what="last")]

    return handler


def plain_handler(doing: Doing) -> Any:
    def handler(ctx: ThreadContext, payload: Any) -> Any:
        first = ctx.step("first", doing, "first")
        ctx.sleep(minutes=59, seconds=60)
        value = ctx.wait_for("approval", timeout=3600)
        return [first, value, ctx.step("last", doing, what="last")]

    return handler


async def waits(cp: Checkpointer, task_id: str, for_what: str | None = None) -> None:
    """Return when the task waits: for an event, or for its time."""

    async def there() -> bool:
        task = await task_of(cp, task_id)
        return task["status"] == "pending" and task["waits_for"] == for_what and task["run_at"] is not None

    await until(there)


@pytest.mark.parametrize("make", [async_handler, plain_handler])
def test_a_task_that_sleeps_and_waits_holds_no_slot_and_goes_on_where_it_was(database: Database, make: Any) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        doing = Doing()
        handlers = {"long": make(doing), "short": lambda ctx, payload: "short"}
        task = (await other.create_task(None, "long", {}))["id"]
        async with quick(cp, handlers, concurrency=1):
            await waits(other, task)
            short = (await other.create_task(None, "short", {}))["id"]
            assert (await became(other, short))["status"] == "completed"
            await pass_time(other)
            await waits(other, task, "approval")
            assert await other.send_event(task, "approval", {"by": "ada"}) is True
            ended = await became(other, task)
        assert (ended["status"], ended["retry_count"]) == ("completed", 0)
        assert ended["result"] == ["first is done", {"by": "ada"}, "last is done"]
        assert doing.done == ["first", "last"]
        assert [(step["kind"], step["name"], step["status"]) for step in await other.task_steps(task)] == [
            ("call", "first", "done"),
            ("sleep", "sleep", "done"),
            ("wait", "approval", "done"),
            ("call", "last", "done"),
        ]

    with_two(database, use)


def test_what_waits_can_be_paused_resumed_and_cancelled(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        doing = Doing()
        task, cancelled = [(await other.create_task(None, "long", {}))["id"] for _ in range(2)]
        async with quick(cp, {"long": async_handler(doing)}):
            for each in (task, cancelled):
                await waits(other, each)
            await other.cancel_task(cancelled)
            await other.pause_task(task)
            await other.send_event(task, "approval", 1)
            await pass_time(other)
            await other.resume_task(task)
            assert (await became(other, task))["result"] == ["first is done", 1, "last is done"]
            assert (await task_of(other, cancelled))["status"] == "cancelled"
        assert doing.done == ["first", "first", "last"]

    with_two(database, use)


def test_a_wait_in_a_task_group_gives_the_task_back_when_its_steps_have_ended(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        doing = Doing()

        async def handler(ctx: TaskContext, payload: Any) -> Any:
            async with asyncio.TaskGroup() as group:
                waits = group.create_task(ctx.wait_for("approval"))
                steps = [group.create_task(ctx.step("part", doing, f"part {n}")) for n in range(3)]
            return [waits.result(), *(step.result() for step in steps)]

        task = (await other.create_task(None, "long", {}, max_retries=0))["id"]
        async with quick(cp, {"long": handler}):
            await until(lambda: doing.done and _waits_for(other, task))
            await other.send_event(task, "approval", 1)
            assert (await became(other, task))["result"] == [1, *(f"part {n} is done" for n in range(3))]
        assert sorted(doing.done) == ["part 0", "part 1", "part 2"]

    with_two(database, use)


async def _waits_for(cp: Checkpointer, task_id: str) -> str | None:
    return (await task_of(cp, task_id))["waits_for"]


def test_a_step_that_may_have_run_fails_the_task_at_once_until_a_person_answers(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        begun, keys = asyncio.Event(), []
        loop = asyncio.get_running_loop()

        async def pay(ctx: TaskContext, amount: int) -> str:
            keys.append(ctx.idempotency_key())
            loop.call_soon_threadsafe(begun.set)
            await asyncio.Event().wait()
            return "never"

        async def handler(ctx: TaskContext, payload: Any) -> Any:
            return await ctx.step("pay", pay, ctx, 10)

        task = (await other.create_task(None, "long", {}))["id"]
        async with quick(cp, {"long": handler}):
            await begun.wait()
        assert (await task_of(other, task))["status"] == "pending"  # the worker has ended, and handed it back
        async with quick(cp, {"long": handler}):
            failed = await became(other, task)
            assert failed["error"] is not None
            assert (failed["status"], failed["error"]["type"], failed["retry_count"]) == ("failed", "StepUnknown", 0)
            await other.send_event(task, "step:pay", {"result": "paid"})
            await other.retry_task(task)
            assert (await became(other, task, "completed"))["result"] == "paid"
        assert keys == [f"{task}:pay"]

    with_two(database, use)


def test_a_step_that_failed_runs_again_with_the_task_and_those_before_it_do_not(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        doing = Doing()

        def fails(what: str) -> str:
            if doing.done.count(what) == 0:
                doing(what)
                raise OSError("away")
            return doing(what)

        async def handler(ctx: TaskContext, payload: Any) -> Any:
            return [await ctx.step("a", doing, "a"), await ctx.step("b", fails, "b")]

        task = (await other.create_task(None, "long", {}))["id"]
        async with quick(cp, {"long": handler}):
            await until(lambda: _has_retried(other, task))
            await pass_time(other)
            assert (await became(other, task))["result"] == ["a is done", "b is done"]
        assert doing.done == ["a", "b", "b"]

    with_two(database, use)


async def _has_retried(cp: Checkpointer, task_id: str) -> bool:
    return (await task_of(cp, task_id))["retry_count"] == 1
