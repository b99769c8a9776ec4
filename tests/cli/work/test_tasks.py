"""`byssus tasks`."""

from __future__ import annotations

import json

import pytest

from byssus import UserMessage
from byssus.storage import AgentStorage
from byssus.store.database import Tx
from tests.support.commands import Here, command_here
from tests.support.databases import Database

ERROR = {"type": "ValueError", "message": "no\x1b[2Jpage", "trace": "Traceback\n  File 'a.py'\nValueError: no page"}


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


def set_columns(database: Database, task: str, **values: object) -> None:
    """What a worker would write."""

    def write(tx: Tx) -> None:
        for column, value in values.items():
            tx.run(f"UPDATE tasks SET {column} = :value WHERE id = :id", value=value, id=task)

    with AgentStorage(database.place) as storage:
        storage.store.write_now(write)


# --- list -------------------------------------------------------------------------------------------------------------


def test_tasks_are_listed_by_urgency_status_and_thread(byssus: Here, tasks: list[str]) -> None:
    lines = [line.split() for line in byssus("tasks", "--utc").stdout.splitlines()]
    assert lines[0] == ["TASK", "THREAD", "TYPE", "STATUS", "PRIORITY", "UPDATED", "NOTE"]
    assert lines[1][:5] == [tasks[1], "other", "总结", "failed", "5"]
    assert lines[2][:5] == [tasks[0], "trip", "summarize", "pending", "0"]
    assert lines[2][-1].endswith("Z")
    for options, found in (
        (["--status", "pending"], 0),
        (["oth"], 1),
        (["list", "oth"], 1),
        (["--limit", 1], 1),
        (["--limit", 1, "list"], 1),
        (["--type", "summarize"], 0),
    ):
        assert [task["id"] for task in json.loads(byssus("tasks", *options, "--json").stdout)] == [tasks[found]]
    assert byssus("tasks", "trip", "--status", "failed").stdout == "There are no such tasks.\n"


def test_a_list_tells_what_a_task_waits_for_and_how_far_it_is(
    byssus: Here, database: Database, tasks: list[str]
) -> None:
    def note() -> str:
        row = byssus("tasks", "trip", "--utc").stdout.splitlines()[1]
        return row.split("Z", 1)[1].strip()

    assert note() == ""
    for values, told in (
        ({"run_at": "2999-01-01T00:00:00.000000Z"}, "not before 2999-01-01 00:00:00Z"),
        ({"waits_for": "approval"}, "waits for approval"),
        ({"progress": 0.5, "progress_note": "fetched"}, "[#####     ]  50% fetched"),
        ({"asked": "cancel"}, "asked to cancel"),
        ({"error": json.dumps(ERROR), "status": "pending", "retry_count": 1}, "try 2: ValueError: no\\x1b[2Jpage"),
    ):
        set_columns(database, tasks[0], run_at=None, waits_for=None, status="running")
        set_columns(database, tasks[0], **({"status": "pending", **values} if "progress" not in values else values))
        assert note() == told


def test_a_status_or_a_thread_that_there_is_not_is_an_error(byssus: Here, tasks: list[str]) -> None:
    told = (
        "byssus: status must be one of 'pending', 'running', 'paused', 'completed', 'failed', 'cancelled'; got 'done'\n"
    )
    assert byssus("tasks", "--status", "done", code=1).stderr == told
    assert "there is no thread 'nothing'" in byssus("tasks", "nothing", code=1).stderr


def test_without_tasks_the_list_says_so(byssus: Here, database: Database) -> None:
    AgentStorage(database.place).close()
    assert byssus("tasks").stdout == "There are no tasks; 'byssus tasks create' adds one.\n"


# --- show -------------------------------------------------------------------------------------------------------------


def test_all_of_a_task_is_shown_with_its_steps_and_its_trace(
    byssus: Here, database: Database, tasks: list[str]
) -> None:
    set_columns(database, tasks[1], error=json.dumps(ERROR), progress=1.0, retry_count=3)
    with AgentStorage(database.place) as storage:
        storage.store.write_now(_add_steps, tasks[1])
    lines = byssus("tasks", "show", tasks[1], "--utc").stdout.splitlines()
    assert lines[0] == f"task {tasks[1]}"
    facts = dict(line.split(": ", 1) for line in lines[1 : lines.index("")])
    assert [facts["type"].strip(), facts["status"].strip(), facts["thread"].strip()] == ["总结", "failed", "other"]
    assert facts["retries"].strip() == "3 of 3"
    assert facts["progress"].strip() == "[##########] 100%"
    assert facts["error"].strip() == "ValueError: no\\x1b[2Jpage"
    assert "  File 'a.py'" in lines
    head, first, second = lines[-3:]
    assert head.split() == ["STEP", "KIND", "STATUS", "TRIES", "BEGAN", "ENDED", "RESULT"]
    assert first.split()[:4] == ["fetch", "call", "done", "2"]
    assert first.endswith("[3]")
    assert second.split() == [
        "sleep",
        "sleep",
        "waiting",
        "1",
        *["2026-01-01", "00:00:00Z", "until", "2026-01-04", "00:00:00Z"],
    ]
    shown = json.loads(byssus("tasks", "show", tasks[1][:20], "--json").stdout)
    assert (shown["thread_id"], shown["error"], len(shown["steps"])) == ("other", ERROR, 2)


def _add_steps(tx: Tx, task: str) -> None:
    insert = (
        "INSERT INTO task_steps (task, name, kind, status, attempts, result, until, started_at)"
        " SELECT key, '{}', '{}', '{}', {}, {}, {}, '2026-01-01T00:00:00.000000Z' FROM tasks WHERE id = :id"
    )
    tx.run(insert.format("fetch", "call", "done", 2, "'[3]'", "NULL"), id=task)
    tx.run(insert.format("sleep", "sleep", "waiting", 1, "NULL", "'2026-01-04T00:00:00.000000Z'"), id=task)


# --- create and move --------------------------------------------------------------------------------------------------


def test_a_task_is_created_with_a_message_and_moved(byssus: Here, database: Database, tasks: list[str]) -> None:
    options = ("--thread", "tri", "--message", "Do it.", "--key", "once", "--max-retries", 0, "--priority", 7)
    typed = ("tasks", "create", *options, "fetch", '{"page": 5}', "--at", "2999-01-01")
    (made,) = json.loads(byssus(*typed, "--json").stdout)
    assert (made["thread_id"], made["type"], made["payload"]) == ("trip", "fetch", {"page": 5})
    assert (made["priority"], made["max_retries"], made["run_at"]) == (7, 0, "2999-01-01T00:00:00.000000Z")
    assert byssus(*typed).stdout == f"{made['id']}  pending\n"
    with AgentStorage(database.place) as storage:
        history = storage.get_conversation_history("trip") or []
    assert [row["content"] for row in history] == ["x", "Do it."]
    for verb, status in (("pause", "paused"), ("resume", "pending"), ("cancel", "cancelled"), ("retry", "pending")):
        assert byssus("tasks", verb, made["id"]).stdout == f"{made['id']}  {status}\n"


def test_a_move_that_is_not_possible_keeps_no_other_task(byssus: Here, tasks: list[str]) -> None:
    shown = byssus("tasks", "cancel", *tasks[::-1], code=1)
    assert shown.stdout == f"{tasks[0]}  cancelled\n"
    assert f"task '{tasks[1]}' is failed, and cancel is not possible; legal moves: retry\n" in shown.stderr


def test_an_event_is_sent_to_a_task(byssus: Here, tasks: list[str]) -> None:
    shown = byssus("tasks", "send", tasks[0], "approval", '{"by": "Ann"}')
    assert shown.stderr == "Recorded. The task does not wait for it yet: its next wait for it ends at once.\n"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["shwo", "x"], "there is no 'byssus tasks shwo'; did you mean 'show'?"),
        (["a", "b"], "there is no 'byssus tasks a'; type one of list, show, create"),
        (["show"], "type: byssus tasks show ID; got nothing"),
        (["show", "a", "b"], "type: byssus tasks show ID; got a b"),
        (["cancel"], "type: byssus tasks cancel ID; got nothing"),
        (["show", "nothing"], "there is no task 'nothing'"),
        (["retry", "nothing"], "there is no task 'nothing'"),
        (["send", "nothing", "approval"], "there is no task 'nothing'"),
        (["create", "t", "{"], "the payload must be JSON, for example"),
        (["create", "t", "--thread", "nothing"], "there is no thread 'nothing'"),
        (["create", "t", "--at", "soon"], "run_at must be a datetime or a text such as"),
        (["show", "x", "--limit", "5"], "--limit goes with 'list', not with 'show'"),
        (["--priority", "5"], "--priority goes with 'create', not with 'list'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(
    byssus: Here, tasks: list[str], typed: list[str], told: str
) -> None:
    assert told in byssus("tasks", *typed, code=1).stderr
