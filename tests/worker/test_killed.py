"""Workers are killed at their commits, one by one: no finished step runs again, and every task ends rightly."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path

import pytest

from byssus.checkpointer import Checkpointer
from tests.support import forked, stepped
from tests.support.agents import history
from tests.support.databases import Database
from tests.support.steps import pass_time
from tests.support.workers import task_of

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


async def live(cp: Checkpointer, database: Database, diary: Path, dies_at: int, waiting: str) -> int:
    """Start a worker and see it to its end; time passes quickly for its tasks meanwhile. Returns its exit code."""
    process = forked.Process(
        ["-m", "tests.worker.killed_child", database.place, str(diary), str(dies_at)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    while (code := process.poll()) is None:
        tasks = await cp.list_tasks("t") or []
        if any(task["run_at"] is not None for task in tasks):
            await pass_time(cp)
        if (await task_of(cp, waiting))["waits_for"] == "approval":
            await cp.send_event(waiting, "approval", "approved")
        await asyncio.sleep(0.02)
    return code


def test_workers_that_are_killed_at_their_commits_lose_nothing_and_repeat_nothing(
    database: Database, tmp_path: Path
) -> None:
    diary = tmp_path / "diary"

    async def main() -> None:
        async with asyncio.timeout(100), database.checkpointer() as cp:
            await cp.create_session(None, session_id="t")
            steps, plain, agent = [
                (await cp.create_task("t", kind, {"prompt": "go"}, max_retries=1000))["id"]
                for kind in ("steps", "plain", "agent")
            ]
            for deaths in itertools.count(1, 3):  # before a commit and after one in turn
                code = await live(cp, database, diary, deaths, steps)
                assert code in (0, -signal.SIGKILL)
                if code == 0:
                    break
            assert deaths > 10
            for task_id in (steps, plain, agent):
                task = await task_of(cp, task_id)
                assert stepped.problem(task["type"], task["status"], task["result"]) is None
            said = await history(cp, "t")
            assert (said.count("user: go"), said[-1]) == (1, "assistant: all is done")
            assert len(await cp.runs("t")) == 1

    asyncio.run(main())
    assert stepped.flaw(diary.read_text().splitlines()) is None


def test_sigterm_hands_the_run_of_an_agent_over_with_the_result_of_its_tool(database: Database, tmp_path: Path) -> None:
    diary = tmp_path / "diary"

    async def main() -> None:
        async with asyncio.timeout(100), database.checkpointer() as cp:
            await cp.create_session(None, session_id="t")
            agent = (await cp.create_task("t", "agent", {"prompt": "go"}, max_retries=0))["id"]
            assert await live(cp, database, diary, 0, agent) == 128 + signal.SIGTERM
            left = await task_of(cp, agent)
            assert (left["status"], left["retry_count"], left["worker"]) == ("pending", 0, None)
            assert (await history(cp, "t"))[-1] == "tool_result: seen"
            assert await live(cp, database, diary, 10**9, agent) == 0
            task = await task_of(cp, agent)
            assert stepped.problem("agent", task["status"], task["result"]) is None
            (run,) = await cp.runs("t")
            assert [attempt.outcome for attempt in await cp.run_attempts(run.id)] == ["handed over", "ended"]

    asyncio.run(main())
    assert diary.read_text().splitlines() == ["ran pay", "ran look"]
