"""Handlers in processes: they work, report, stop, are killed, and die."""

from __future__ import annotations

import os

import pytest

from byssus.checkpointer import Checkpointer
from byssus.storage import TaskRow
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.leases import until
from tests.support.process_handlers import work
from tests.support.workers import became, quick, task_of

pytestmark = pytest.mark.processes


async def begun(cp: Checkpointer, task_id: str) -> None:
    async def has_progress() -> bool:
        return (await task_of(cp, task_id))["progress"] == 0.5

    await until(has_progress)


def error_of(task: TaskRow) -> tuple[str, str]:
    assert task["error"] is not None
    return task["error"]["type"], task["error"]["message"]


def test_a_handler_in_a_process_has_the_outcomes_of_any_other(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        worker = quick(cp, concurrency=6)
        worker.task("t", process=True)(work)
        worker.task("local", process=True)(lambda ctx, payload: 1)
        payloads = ("return", "die", "exit", "obey", "hang")
        made = {each: (await cp.create_task(None, "t", each, max_retries=0))["id"] for each in payloads}
        local = await cp.create_task(None, "local", 1, max_retries=0)
        async with worker:
            for payload in ("obey", "hang"):
                await begun(cp, made[payload])
                await cp.pause_task(made[payload])
                assert (await became(cp, made[payload], "paused"))["result"] is None
            done, refused = await became(cp, made["return"]), await became(cp, local["id"])
            died, exited = await became(cp, made["die"]), await became(cp, made["exit"])
        assert error_of(died) == ("ProcessFailed", "the process of the handler ended with the code -9")
        assert error_of(exited) == ("SystemExit", "5")
        assert error_of(refused)[0] == "InputError"
        assert done["result"] is not None, done["error"]
        missing, pid, *others = done["result"]
        assert missing == "ctx.step is not available with process=True; use a plain or an async handler"
        assert pid != os.getpid()
        assert others == [made["return"], 1, f"{made['return']}:x"]

    with_cp(database, use)
