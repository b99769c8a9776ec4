"""`byssus tasks`."""

from __future__ import annotations

import json

import pytest

from byssus import UserMessage
from byssus.storage import AgentStorage
from tests.support.commands import Here, command_here
from tests.support.databases import Database


@pytest.fixture
def byssus(capsys: pytest.CaptureFixture[str], database: Database) -> Here:
    return command_here(capsys, database.place)


@pytest.fixture
def tasks(database: Database) -> list[str]:
    """The ids of a pending task and an urgent one that has failed, of two threads."""
    with AgentStorage(database.place) as storage:
        for thread in ("trip", "other"):
            storage.append(thread, UserMessage("x"))
        pending = storage.create_task("trip", "summarize", {})["id"]
        failed = storage.create_task("other", "总结", {}, 5)["id"]
        storage.update_task_status(failed, "failed")
    return [pending, failed]


def test_tasks_are_listed_by_urgency_status_and_thread(byssus: Here, tasks: list[str]) -> None:
    lines = [line.split() for line in byssus("tasks", "--utc").stdout.splitlines()]
    assert lines[0] == ["TASK", "THREAD", "TYPE", "STATUS", "PRIORITY", "UPDATED"]
    assert lines[1][:5] == [tasks[1], "other", "总结", "failed", "5"]
    assert lines[2][:5] == [tasks[0], "trip", "summarize", "pending", "0"]
    assert lines[2][-1].endswith("Z")
    for options, found in ((["--status", "pending"], 0), (["oth"], 1), (["--limit", 1], 1)):
        assert [task["id"] for task in json.loads(byssus("tasks", *options, "--json").stdout)] == [tasks[found]]
    assert byssus("tasks", "trip", "--status", "failed").stdout == "There are no such tasks.\n"


def test_a_status_or_a_thread_that_there_is_not_is_an_error(byssus: Here, tasks: list[str]) -> None:
    told = (
        "byssus: status must be one of 'pending', 'running', 'paused', 'completed', 'failed', 'cancelled'; got 'done'\n"
    )
    assert byssus("tasks", "--status", "done", code=1).stderr == told
    assert "there is no thread 'nothing'" in byssus("tasks", "nothing", code=1).stderr


def test_without_tasks_the_list_says_so(byssus: Here, database: Database) -> None:
    AgentStorage(database.place).close()
    assert byssus("tasks").stdout == "There are no tasks; a program adds them.\n"
