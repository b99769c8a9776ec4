"""`byssus worker`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus.storage import AgentStorage
from tests.support import forked
from tests.support.commands import Here, command_here
from tests.support.databases import Database
from tests.support.postgres import wait_until
from tests.support.programs import program

JOBS = """\
import os
from byssus.worker import TaskContext, Worker

worker = Worker(os.environ["PLACE"])

@worker.task("greet")
async def greet(ctx: TaskContext, payload):
    return f"Hello, {payload['name']}!"

@worker.task("wait")
async def wait(ctx: TaskContext, payload):
    while not ctx.draining:
        await asyncio.sleep(0.01)
    return "drained"

import asyncio
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Database) -> Iterator[None]:
    """The module `jobs` in the current directory, with a worker on the database."""
    with program(tmp_path, monkeypatch):
        (tmp_path / "jobs.py").write_text(JOBS, "utf-8")
        monkeypatch.setenv("PLACE", database.place)
        yield
    sys.modules.pop("jobs", None)


@pytest.fixture
def byssus(capsys: pytest.CaptureFixture[str], database: Database) -> Here:
    return command_here(capsys, database.place)


def test_a_worker_runs_what_is_ready(byssus: Here, database: Database, jobs: None) -> None:
    with AgentStorage(database.place) as storage:
        ids = [storage.create_task(None, name, {"name": "Ann"})["id"] for name in ("greet", "unknown")]
        told = byssus("worker", "--app", "jobs:worker", "--until-idle").stderr
        greeted, unknown = (storage.get_task(each) for each in ids)
    assert "This worker knows 2 types of tasks (greet, wait) and works on " in told
    assert greeted is not None
    assert (greeted["status"], greeted["result"]) == ("completed", "Hello, Ann!")
    assert unknown is not None
    assert unknown["status"] == "failed"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ([], "which tasks can it run? name a Worker or an app: byssus worker --app shop.jobs:worker"),
        (["--app", "jobs:nothing"], "there is no 'nothing' in"),
        (["--app", "nothing:worker"], "the app's module 'nothing'"),
        (["--app", "jobs:JOBS"], "there is no 'JOBS'"),
        (["--app", "jobs:os"], "must be a function or a dict of functions"),
        (["--app", "jobs:worker", "--concurrency", "2"], "a Worker, which knows its own concurrency; leave out"),
    ],
)
def test_what_is_no_worker_is_refused(byssus: Here, jobs: None, typed: list[str], told: str) -> None:
    assert told in byssus("worker", *typed, code=1).stderr


def test_a_worker_of_another_database_is_refused(
    capsys: pytest.CaptureFixture[str], jobs: None, tmp_path: Path
) -> None:
    other = command_here(capsys, str(tmp_path / "other.db"))
    assert "leave out --db" in other("worker", "--app", "jobs:worker", code=1).stderr


@pytest.mark.processes
def test_a_worker_that_is_terminated_lets_its_task_end(database: Database, jobs: None, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "BYSSUS_DB": database.place}
    with AgentStorage(database.place) as storage:
        task = storage.create_task(None, "wait", {})["id"]
        command = ["-m", "byssus", "worker", "--app", "jobs:worker"]
        with forked.Process(command, env=environment, cwd=tmp_path) as worker:
            wait_until(lambda: storage.list_tasks(status="running") != [], "the task does not run")
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 143
        row = storage.get_task(task)
    assert row is not None
    assert (row["status"], row["result"]) == ("completed", "drained")


@pytest.mark.parametrize(("app", "payload"), [("support", {}), ("agents", {"agent": "support"})])
def test_an_app_runs_agent_tasks(
    byssus: Here, database: Database, jobs: None, app: str, payload: dict[str, str]
) -> None:
    with AgentStorage(database.place) as storage:
        session = storage.create_session(None, model="m")["id"]
        task = storage.create_task(session, "agent", {"prompt": "Why?", **payload})["id"]
        told = byssus("worker", "--app", f"clerk:{app}", "--until-idle").stderr
        row = storage.get_task(task)
    assert "3 types of tasks (agent, summarize, title)" in told
    assert row is not None
    assert (row["status"], row["result"]["text"]) == ("completed", "The answer.")
