"""The moves of tasks that people ask for, without a worker: which are legal, and what they change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from byssus.errors import IllegalMove
from byssus.storage import AgentStorage, TaskStatus
from tests.support.databases import Database

MOVES = ("pause", "resume", "cancel", "retry")
LEGAL: dict[TaskStatus, dict[str, str]] = {
    "pending": {"pause": "paused", "cancel": "cancelled"},
    "running": {"pause": "paused", "cancel": "cancelled"},  # by a program that sets the status itself
    "paused": {"resume": "pending", "cancel": "cancelled"},
    "completed": {},
    "failed": {"retry": "pending"},
    "cancelled": {"retry": "pending"},
}


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        yield opened


@pytest.mark.parametrize("status", LEGAL)
def test_only_the_legal_moves_are_made(storage: AgentStorage, status: TaskStatus) -> None:
    for move in MOVES:
        task = storage.update_task_status(storage.create_task(None, "t", {})["id"], status)
        if (target := LEGAL[status].get(move)) is not None:
            moved = getattr(storage, f"{move}_task")(task["id"])
            assert moved["status"] == target
            assert (moved["completed_at"] is not None) == (target == "cancelled")
            assert storage.get_task(task["id"]) == moved
            continue
        legal = ", ".join(f"{name}_task" for name in LEGAL[status]) or "none"
        with pytest.raises(IllegalMove, match=f"'{task['id']}' is {status}, and {move}_task .* moves: {legal}$") as no:
            getattr(storage, f"{move}_task")(task["id"])
        assert no.value.legal == list(LEGAL[status])
        assert storage.get_task(task["id"]) == task


def test_a_paused_task_keeps_the_time_that_it_waits_for(storage: AgentStorage) -> None:
    task = storage.create_task(None, "t", {}, run_at="2999-01-01")
    assert storage.pause_task(task["id"])["run_at"] == task["run_at"]
    assert storage.resume_task(task["id"])["run_at"] == task["run_at"]
    assert storage.cancel_task(task["id"])["run_at"] is None


def test_a_person_who_tries_again_begins_a_new_series_of_tries(storage: AgentStorage) -> None:
    task = storage.create_task(None, "t", {}, deadline="2020-01-01")["id"]
    statuses: list[TaskStatus] = ["failed", "running", "failed"]
    for status in statuses:
        storage.update_task_status(task, status)
    again = storage.retry_task(task)
    assert (again["retry_count"], again["deadline"], again["completed_at"]) == (0, None, None)
