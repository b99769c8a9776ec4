"""Tasks of AgentStorage."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from byssus.errors import InputError, NotFound
from byssus.messages import MAX_DEPTH
from byssus.storage import AgentStorage, TaskRow, TaskStatus
from tests.support.accounts import nested
from tests.support.databases import Database

SQL = "'); DROP TABLE tasks; --"
STATUSES = ("pending", "running", "paused", "completed", "failed", "cancelled")
KEYS = {
    "id",
    "session_id",
    "type",
    "status",
    "priority",
    "payload",
    "result",
    "max_retries",
    "retry_count",
    "created_at",
    "updated_at",
    "started_at",
    "completed_at",
    "user_id",
    "error",
    "run_at",
    "deadline",
    "unique_key",
    "parent_id",
    "progress",
    "progress_note",
    "waits_for",
    "asked",
    "schedule",
    "worker",
}


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        yield opened


@pytest.fixture
def session(storage: AgentStorage) -> str:
    made: str = storage.create_session(None)["id"]
    return made


def listed(storage: AgentStorage, *args: Any, **options: Any) -> list[TaskRow]:
    found = storage.list_tasks(*args, **options)
    assert found is not None
    return found


def test_a_task_comes_back_with_all_its_keys(storage: AgentStorage, session: str) -> None:
    made = storage.create_task(session, "summarize", {"pages": [1, 2]}, 5)
    assert made.keys() == KEYS
    assert (made["session_id"], made["type"], made["status"], made["priority"]) == (session, "summarize", "pending", 5)
    assert (made["payload"], made["result"]) == ({"pages": [1, 2]}, None)
    assert (made["max_retries"], made["retry_count"]) == (3, 0)
    assert (made["started_at"], made["completed_at"]) == (None, None)
    assert storage.get_task(made["id"]) == made


def test_tasks_have_ids_of_their_own(storage: AgentStorage, session: str) -> None:
    begin = threading.Barrier(20)

    def make(_: int) -> list[str]:
        begin.wait()
        return [storage.create_task(session, "t", {})["id"] for _ in range(5)]

    with ThreadPoolExecutor(20) as pool:
        made = [name for names in pool.map(make, range(20)) for name in names]
    assert len(set(made)) == 100
    assert {task["id"] for task in listed(storage, session)} == set(made)


def test_the_most_urgent_task_comes_first_and_of_equals_the_oldest(storage: AgentStorage, session: str) -> None:
    other = storage.create_session(None)["id"]
    for n, priority in enumerate((0, 5, -3, 5, 0)):
        storage.create_task(other if n == 4 else session, "t", n, priority)
    assert [task["payload"] for task in listed(storage, session)] == [1, 3, 0, 2]
    assert [task["payload"] for task in listed(storage)] == [1, 3, 0, 4, 2]
    assert [task["payload"] for task in listed(storage, session, None, 2, 1)] == [3, 0]
    assert listed(storage, limit=0) == listed(storage, offset=5) == []
    assert listed(storage, other, "running") == []


def test_a_task_that_runs_and_is_completed_says_when(storage: AgentStorage, session: str) -> None:
    task = storage.create_task(session, "t", {})["id"]
    running = storage.update_task_status(task, "running")
    assert (running["status"], running["completed_at"]) == ("running", None)
    assert running["started_at"] is not None
    done = storage.update_task_status(task, "completed", {"pages": 3})
    assert (done["status"], done["result"], done["started_at"]) == ("completed", {"pages": 3}, running["started_at"])
    assert (done["completed_at"] or "") >= (done["started_at"] or "-")
    assert done["retry_count"] == 0
    assert storage.get_task(task) == done
    assert listed(storage, session, "completed") == [done]
    assert listed(storage, session, "running") == []


@pytest.mark.parametrize(
    ("status", "starts", "ends"),
    [
        ("pending", False, False),
        ("running", True, False),
        ("paused", False, False),
        ("completed", True, True),
        ("failed", True, True),
        ("cancelled", False, True),
    ],
)
def test_a_status_sets_the_times_that_belong_to_it(
    storage: AgentStorage, session: str, status: TaskStatus, starts: bool, ends: bool
) -> None:
    task = storage.update_task_status(storage.create_task(session, "t", {})["id"], status)
    assert task["status"] == status
    assert (task["started_at"] is not None, task["completed_at"] is not None) == (starts, ends)


def test_a_failed_task_that_is_tried_again_counts_its_retries(storage: AgentStorage, session: str) -> None:
    task = storage.create_task(session, "t", {}, max_retries=1)["id"]
    storage.update_task_status(task, "running")
    failed = storage.update_task_status(task, "failed", "no answer")
    assert (failed["retry_count"], failed["result"]) == (0, "no answer")
    again = storage.update_task_status(task, "pending")
    assert (again["retry_count"], again["completed_at"], again["started_at"]) == (1, None, failed["started_at"])
    assert storage.update_task_status(task, "running")["retry_count"] == 1
    storage.update_task_status(task, "failed")
    assert storage.update_task_status(task, "running")["retry_count"] == 2
    assert storage.update_task_status(task, "completed")["retry_count"] == 2


def test_a_result_stays_until_there_is_another_one(storage: AgentStorage, session: str) -> None:
    task = storage.create_task(session, "t", {})["id"]
    assert storage.update_task_status(task, "running", 0)["result"] == 0
    assert storage.update_task_status(task, "paused")["result"] == 0
    assert storage.update_task_status(task, "completed", [])["result"] == []


def test_an_update_changes_what_is_passed_and_nothing_else(storage: AgentStorage, session: str) -> None:
    made = storage.create_task(session, "t", {"a": 1}, 2)
    changed = storage.update_task(made["id"], payload=None, priority=-5)
    assert changed == {**made, "payload": None, "priority": -5, "updated_at": changed["updated_at"]}
    changed = storage.update_task(made["id"], task_type="other", max_retries=0)
    assert (changed["type"], changed["max_retries"], changed["payload"]) == ("other", 0, None)


def test_a_deleted_task_is_gone(storage: AgentStorage, session: str) -> None:
    task, other = (storage.create_task(session, "t", {})["id"] for _ in range(2))
    storage.delete_task(task)
    assert storage.get_task(task) is None
    assert [left["id"] for left in listed(storage, session)] == [other]


@pytest.mark.parametrize("name", ["nothing", SQL])
def test_writing_to_a_task_that_does_not_exist_raises(storage: AgentStorage, session: str, name: str) -> None:
    kept = storage.create_task(session, "t", {})
    writes: list[Callable[[], object]] = [
        lambda: storage.update_task_status(name, "running"),
        lambda: storage.update_task(name, payload={}),
        lambda: storage.delete_task(name),
        functools.partial(storage.pause_task, name),
        functools.partial(storage.cancel_task, name),
        functools.partial(storage.retry_task, name),
    ]
    for write in writes:
        with pytest.raises(NotFound, match="there is no task"):
            write()
    assert listed(storage) == [kept]


@pytest.mark.parametrize("name", ["nothing", "", "\0", "\ud800", SQL])
def test_reading_a_task_that_does_not_exist_answers_none(storage: AgentStorage, session: str, name: str) -> None:
    storage.create_task(session, "t", {})
    assert storage.get_task(name) is None


@pytest.mark.parametrize("status", ["done", "", "RUNNING", "active", None, 5, ["running"], SQL])
def test_a_status_that_does_not_exist_is_refused(storage: AgentStorage, session: str, status: Any) -> None:
    task = storage.create_task(session, "t", {})
    with pytest.raises(InputError, match="status must be one of 'pending', 'running', 'paused', 'completed', 'failed'"):
        storage.update_task_status(task["id"], status)
    if status is not None:
        with pytest.raises(InputError, match="status must be one of"):
            storage.list_tasks(session, status)
    assert storage.get_task(task["id"]) == task


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"task_type": ""}, "at least one character"),
        ({"task_type": None}, "at least one character"),
        ({"task_type": 5}, "type must be a string"),
        ({"task_type": "a\0"}, "NUL"),
        ({"task_type": "x" * 1_001}, "a task's type can have 1,000 bytes of UTF-8 at most, got 1,001"),
        ({"payload": {1, 2}}, "payload cannot be stored as JSON"),
        ({"payload": {"a": b""}}, r"payload\['a'\] cannot be stored as JSON"),
        ({"payload": {1: "a"}}, "the key 1 is no string"),
        ({"priority": 1.5}, "priority must be a whole number"),
        ({"priority": True}, "priority must be a whole number"),
        ({"priority": 2**70}, "priority must be a whole number"),
        ({"priority": -(2**70)}, "priority must be a whole number"),
        ({"max_retries": -1}, "max_retries must be a number from 0 up"),
        ({"max_retries": True}, "max_retries must be a number from 0 up"),
        ({"max_retries": 2**70}, "max_retries must be a number from 0 up"),
        pytest.param({"payload": nested(MAX_DEPTH + 2)}, "nested deeper", id="deep"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_no_task_can_be_is_refused_and_nothing_is_written(
    storage: AgentStorage, session: str, given: dict[str, Any], why: str
) -> None:
    kept = storage.create_task(session, "t", {"a": 1})
    with pytest.raises(InputError, match=why):
        storage.create_task(**{"session_id": session, "task_type": "t", "payload": {}, **given})
    with pytest.raises(InputError, match=why):
        storage.update_task(kept["id"], **given)
    assert listed(storage) == [kept]


@pytest.mark.parametrize(
    "value", [None, 0, "", [], {}, SQL, "a\0\ud800", {"": {"": [2**70, 1.5, True]}}, "x" * 100_000]
)
def test_any_json_is_a_payload_and_a_result(storage: AgentStorage, session: str, value: Any) -> None:
    task = storage.create_task(session, "t", value)
    assert task["payload"] == value
    done = storage.update_task_status(task["id"], "completed", {"in": value})
    assert (done["payload"], done["result"]) == (value, {"in": value})


def test_a_type_has_at_most_a_thousand_bytes(storage: AgentStorage, session: str) -> None:
    assert storage.create_task(session, "型" * 333, {})["type"] == "型" * 333
    with pytest.raises(InputError, match="a task's type"):
        storage.create_task(session, "型" * 334, {})


def test_concurrent_retries_are_all_counted(storage: AgentStorage, session: str) -> None:
    tasks = [storage.create_task(session, "t", {})["id"] for _ in range(4)]
    begin = threading.Barrier(8)

    def work(n: int) -> None:
        begin.wait()
        for _ in range(10):
            for status in ("running", "failed"):
                storage.update_task_status(tasks[n % 4], status)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    for task in listed(storage, session):
        assert task["status"] == "failed"
        assert 9 <= task["retry_count"] <= 19  # two in step may run once between two failures


# --- of no session, later, once, and with a message -------------------------------------------------------------------


def test_a_task_may_belong_to_a_user_or_to_nobody(storage: AgentStorage, session: str) -> None:
    storage.create_user("ann", user_id="ann")
    of_nobody, of_ann = storage.create_task(None, "t", 1), storage.create_task(None, "t", 2, user_id="ann")
    of_session = storage.create_task(storage.create_session("ann")["id"], "t", 3)
    assert (of_nobody["session_id"], of_nobody["user_id"]) == (None, None)
    assert (of_ann["session_id"], of_ann["user_id"]) == (None, "ann")
    assert of_session["user_id"] == "ann"
    assert listed(storage) == [of_nobody, of_ann, of_session]
    assert listed(storage, user_id="ann") == [of_ann, of_session]
    assert listed(storage, session) == []
    with pytest.raises(NotFound, match="there is no user 'bob'"):
        storage.create_task(None, "t", 4, user_id="bob")
    with pytest.raises(InputError, match="session_id or user_id, not both"):
        storage.create_task(session, "t", 4, user_id="ann")


def test_the_user_of_a_task_is_the_user_of_its_session(storage: AgentStorage, session: str) -> None:
    storage.create_user("ann", user_id="ann")
    task = storage.create_task(session, "t", 1)["id"]
    storage.set_user(session, "ann")
    assert [each["id"] for each in listed(storage, user_id="ann")] == [task]
    storage.set_user(session, None)
    assert listed(storage, user_id="ann") == []
    storage.set_user(session, "ann")
    own = storage.create_task(None, "t", 2, user_id="ann")["id"]
    assert [each["id"] for each in listed(storage, user_id="ann")] == [task, own]
    storage.delete_user("ann", sessions="keep")
    assert [(each["id"], each["user_id"]) for each in listed(storage)] == [(task, None)]


def test_lists_of_tasks_are_filtered_and_paged(storage: AgentStorage, session: str) -> None:
    made = [storage.create_task(session, "ab"[n % 2], n, n // 4) for n in range(12)]
    ordered = sorted(made, key=lambda task: -task["priority"])
    assert listed(storage, task_type="a") == [task for task in ordered if task["type"] == "a"]
    pages, last = list[TaskRow](), None
    while page := listed(storage, limit=5, before=last):
        pages += page
        last = page[-1]
    assert pages == ordered
    assert listed(storage, limit=2, before=ordered[0]["id"]) == ordered[1:3]
    before: Any
    for before in ("nothing", 5, {}):
        with pytest.raises(InputError, match=r"before must be|there is no task 'nothing'"):
            storage.list_tasks(before=before)


def test_a_unique_key_queues_one_task(storage: AgentStorage, session: str) -> None:
    made = storage.create_task(session, "t", 1, unique_key="monday")
    assert made["unique_key"] == "monday"
    assert storage.create_task(None, "other", 2, unique_key="monday", message=None) == made
    done = storage.update_task_status(made["id"], "completed")
    assert storage.create_task(session, "t", 1, unique_key="monday", message="again") == done
    assert storage.get_conversation_history(session) == []
    assert listed(storage) == [done]
    storage.delete_task(made["id"])
    assert storage.create_task(session, "t", 3, unique_key="monday")["payload"] == 3


def test_the_same_key_at_the_same_time_queues_one_task(storage: AgentStorage, session: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: storage.create_task(session, "t", n, unique_key="k", message=f"{n}"), range(16)))
    assert len({task["payload"] for task in made}) == len(listed(storage)) == 1
    history = storage.get_conversation_history(session)
    assert [message["content"] for message in history or []] == [str(made[0]["payload"])]


def test_a_task_and_the_message_that_asks_for_it_commit_together(storage: AgentStorage, session: str) -> None:
    task = storage.create_task(session, "t", {}, message="Summarize it, please")
    (message,) = storage.get_conversation_history(session) or []
    assert (message["role"], message["content"]) == ("user", "Summarize it, please")
    storage.create_task(session, "t", {}, message={"role": "system", "content": "note"})
    with pytest.raises(InputError, match="pass a session_id"):
        storage.create_task(None, "t", {}, message="to whom?")
    with pytest.raises(NotFound, match="there is no session 'gone'"):
        storage.create_task("gone", "t", {}, message="hello")
    assert len(storage.get_conversation_history(session) or []) == len(listed(storage)) == 2
    assert listed(storage)[0] == task


def test_a_time_in_the_past_means_now(storage: AgentStorage) -> None:
    assert storage.create_task(None, "t", 1, run_at="2020-01-01")["run_at"] is None
    later = storage.create_task(None, "t", 1, run_at="2999-01-01T02:00:00+02:00", deadline="2999-01-02")
    assert (later["run_at"], later["deadline"]) == ("2999-01-01T00:00:00.000000Z", "2999-01-02T00:00:00.000000Z")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"run_at": "soon"}, "run_at must be a datetime"),
        ({"deadline": 5}, "deadline must be a datetime"),
        ({"unique_key": ""}, "unique_key must be a string with at least one character"),
        ({"unique_key": 5}, "unique_key must be a string"),
        ({"unique_key": "x" * 2_000}, "unique_key can have 1,000 bytes"),
        ({"parent_id": "\0"}, "parent_id cannot contain NUL"),
        ({"user_id": ""}, "user_id must be a string"),
        ({"message": 5}, "a thread holds messages"),
        ({"message": "x", "wait": -1}, "wait must be a number of seconds"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_option_that_no_task_can_have_is_refused(
    storage: AgentStorage, session: str, given: dict[str, Any], why: str
) -> None:
    whose = session if "message" in given else None
    with pytest.raises(InputError, match=why):
        storage.create_task(whose, "t", 1, **given)
    assert listed(storage) == []
