"""A worker is killed before and after each of its commits, and another one finds all as it should be.

On Postgres, where the same queries make the same commits, it is killed at each third boundary: before a commit and
after one in turn. With BYSSUS_EXAMPLES in the environment it is each one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path

import pytest

from byssus.checkpointer import Checkpointer
from byssus.store.database import Tx
from byssus.values import clock
from byssus.worker import running, worker
from tests.support import forked
from tests.support.databases import Database
from tests.support.leases import dead_owner
from tests.worker import boundary_child

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
COMMITS = 20  # a worker makes at least so many
EXPECTED = [
    ("long", "completed", ["step", "l"]),
    ("short", "completed", "of a schedule"),
    ("short", "completed", "of the dead"),
    ("wrong", "failed", None),
]


async def begin(cp: Checkpointer) -> str:
    """Leave nothing but the tasks of the story, one of them with a dead worker, and a schedule that is due.

    Returns the id of the task that has a step.
    """
    lost = await cp.create_task(None, "short", "of the dead")
    await cp.create_schedule("due", "short", "of a schedule", every=3_600)
    gone = dead_owner(cp)

    def change(tx: Tx) -> None:
        tx.run("DELETE FROM tasks WHERE id <> :id", id=lost["id"])
        tx.run(
            "UPDATE tasks SET status = 'running', lease_owner = :gone, lease_epoch = 1, lease_until = :later",
            gone=gone,
            later=tx.after(30),
        )
        past = clock.after(clock.now(), -5)
        tx.run("UPDATE schedules SET next_at = :past, last_at = NULL", past=past)

    await cp.store.write(change)
    await cp.create_task(None, "wrong", "on purpose", max_retries=0)
    return (await cp.create_task(None, "long", "l"))["id"]


def test_a_worker_that_is_killed_before_or_after_any_of_its_commits_leaves_nothing_undone_or_done_twice(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_FIRST_BACKOFF", boundary_child.HASTE)
    monkeypatch.setattr(worker, "_SCAN", boundary_child.HASTE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    async def dies(cp: Checkpointer, dies_at: int) -> bool:
        """Whether the worker came to the boundary at which it is killed."""
        diary = tmp_path / str(dies_at)
        diary.touch()
        long = await begin(cp)
        arguments = ["-m", "tests.worker.boundary_child", database.place, str(diary), str(dies_at)]
        code = forked.Process(arguments, cwd=ROOT, env=environment).wait(60)
        assert code in (0, -signal.SIGKILL)
        is_done = [(step["kind"], step["status"]) for step in await cp.task_steps(long)][:1] == [("call", "done")]
        before = diary.read_text().count("ran")
        await boundary_child.to_the_end(cp, diary)
        assert diary.read_text().count("ran") - before == (not is_done), "a finished step ran again, or one never ran"
        tasks = await cp.list_tasks() or []
        assert sorted((task["type"], task["status"], task["result"]) for task in tasks) == EXPECTED, dies_at
        assert [task["result"] for task in tasks if task["schedule"] == "due"] == ["of a schedule"]
        return code != 0

    async def main() -> None:
        async with asyncio.timeout(100), database.checkpointer() as cp:
            step = 3 if database.system == "postgresql" and "BYSSUS_EXAMPLES" not in os.environ else 1
            for deaths in itertools.count(1, step):
                if not await dies(cp, deaths):
                    break
            assert deaths > 2 * COMMITS

    asyncio.run(main())
