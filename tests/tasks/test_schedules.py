"""Schedules: rows that make tasks at given times, each tick once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from byssus.errors import InputError, NotFound
from byssus.queries.tasks import schedules as queries
from byssus.storage import AgentStorage, ScheduleRow, TaskRow
from byssus.store.database import Tx
from byssus.store.operations import Blocking, to_the_end
from byssus.tasks import schedules, ticks
from byssus.tasks.schedules import Ticked
from byssus.values import clock
from tests.support.databases import Database
from tests.support.processes import started

FAR = "2999-01-01T00:00:00.000000Z"
TICKING = """
from byssus.storage import AgentStorage
from byssus.store.operations import Blocking, to_the_end
from byssus.tasks import schedules

with AgentStorage(sys.argv[1]) as storage:
    print("open", flush=True)
    sys.stdin.readline()
    to_the_end(schedules.tick(Blocking(storage.store)))
    print("done", flush=True)
"""


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        yield opened


def tick(storage: AgentStorage) -> Ticked:
    return to_the_end(schedules.tick(Blocking(storage.store)))


def ago(seconds: float) -> str:
    return clock.after(clock.now(), -seconds)


def change(storage: AgentStorage, name: str, **values: object) -> None:
    """Let time pass: what is due is what is stored."""

    def set_values(tx: Tx) -> None:
        for column, value in values.items():
            tx.run(f"UPDATE schedules SET {column} = :value WHERE id = :id", value=value, id=name)

    storage.store.write_now(set_values)


def made(storage: AgentStorage) -> list[TaskRow]:
    return storage.list_tasks(limit=10_000) or []


def known(storage: AgentStorage, name: str) -> ScheduleRow:
    found = storage.get_schedule(name)
    assert found is not None
    return found


def test_a_schedule_comes_back_with_all_its_keys(storage: AgentStorage) -> None:
    row = storage.create_schedule(
        "report",
        "write",
        {"to": "ann"},
        cron="0  9 * * 1-5",
        zone="Europe/Oslo",
        missed="all",
        priority=2,
        max_retries=1,
    )
    assert row == storage.get_schedule("report")
    assert storage.schedules() == [row]
    assert row.keys() == ScheduleRow.__annotations__.keys()
    assert (row["cron"], row["every"], row["zone"], row["missed"]) == ("0 9 * * 1-5", None, "Europe/Oslo", "all")
    assert (row["type"], row["payload"], row["priority"], row["max_retries"]) == ("write", {"to": "ann"}, 2, 1)
    assert (row["status"], row["last_at"], row["session_id"], row["user_id"]) == ("active", None, None, None)
    assert row["next_at"] == ticks.next_tick(ticks.Rule("0 9 * * 1-5", None, "Europe/Oslo"), row["created_at"])
    assert storage.get_schedule("nothing") is storage.get_schedule("\0") is None


def test_a_tick_makes_one_task(storage: AgentStorage) -> None:
    user = storage.create_user("Ann")["id"]
    session = storage.create_session(user)["id"]
    storage.create_schedule("a", "write", [1], every=60, session_id=session, priority=3, max_retries=0)
    storage.create_schedule("b", "read", every=timedelta(hours=1), user_id=user)
    assert not tick(storage).failed
    assert made(storage) == []
    due_at = ago(5)
    for name in ("a", "b"):
        change(storage, name, next_at=due_at)
    seconds = tick(storage).seconds
    assert seconds is not None
    assert 0 < seconds <= 55
    write, read = made(storage)
    assert (write["type"], write["payload"], write["priority"], write["max_retries"]) == ("write", [1], 3, 0)
    assert (write["session_id"], write["user_id"], write["schedule"]) == (session, user, "a")
    assert (read["type"], read["payload"], read["session_id"], read["user_id"]) == ("read", None, None, user)
    assert write["unique_key"] == f"schedule:a:{due_at}"
    assert (known(storage, "a")["last_at"], known(storage, "a")["next_at"]) == (due_at, clock.after(due_at, 60))
    tick(storage)
    assert len(made(storage)) == 2
    assert [row["id"] for row in storage.schedules(user_id=user)] == ["a", "b"]
    assert storage.schedules(user_id="nobody") == storage.schedules(1, 2) == []


def test_without_schedules_there_is_nothing_to_wait_for(storage: AgentStorage) -> None:
    assert tick(storage) == (None, {})


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("one", 1), ("all", 251)])
def test_missed_ticks_are_dropped_made_up_for_by_one_task_or_all_of_them(
    storage: AgentStorage, missed: Any, count: int
) -> None:
    storage.create_schedule("a", "t", every=400, missed=missed)
    first = ago(400 * 250 + 200)
    change(storage, "a", next_at=first)
    tick(storage)
    keys = [task["unique_key"] for task in made(storage)]
    assert keys == [f"schedule:a:{clock.after(first, 400 * number)}" for number in range(count)]
    row = known(storage, "a")
    assert (row["next_at"] or "") > clock.now()
    assert row["next_at"] == clock.after(first, 400 * 251)
    assert row["last_at"] == (clock.after(first, 400 * (count - 1)) if count else None)


def test_a_tick_on_time_is_not_skipped(storage: AgentStorage) -> None:
    storage.create_schedule("a", "t", every=3_600, missed="skip")
    change(storage, "a", next_at=ago(20))
    tick(storage)
    assert len(made(storage)) == 1


def test_a_schedule_that_is_created_again_keeps_its_next_tick_if_it_ticks_as_before(storage: AgentStorage) -> None:
    storage.create_schedule("a", "t", 1, every=600)
    change(storage, "a", next_at=(due_at := ago(5)))
    again = storage.create_schedule("a", "other", 2, every=600, missed="all")
    assert (again["next_at"], again["type"], again["payload"], again["missed"]) == (due_at, "other", 2, "all")
    assert (storage.create_schedule("a", "t", every=601)["next_at"] or "") > clock.now()
    assert len(storage.schedules()) == 1


def test_a_paused_schedule_does_not_tick_and_makes_up_for_nothing(storage: AgentStorage) -> None:
    storage.create_schedule("a", "t", every=60, missed="all")
    change(storage, "a", next_at=ago(600), last_at=ago(660))
    for _ in range(2):
        paused = storage.pause_schedule("a")
        assert (paused["status"], paused["next_at"]) == ("paused", None)
    assert tick(storage) == (None, {})
    assert storage.create_schedule("a", "t", every=60, missed="all")["status"] == "paused"
    resumed = storage.resume_schedule("a")
    assert resumed["status"] == "active"
    assert clock.now() < (resumed["next_at"] or "") <= clock.after(clock.now(), 60)
    assert storage.resume_schedule("a") == resumed
    tick(storage)
    assert made(storage) == []


def test_a_deleted_schedule_leaves_its_tasks(storage: AgentStorage) -> None:
    storage.create_schedule("a", "t", every=60)
    change(storage, "a", next_at=ago(1))
    tick(storage)
    storage.delete_schedule("a")
    assert storage.schedules() == []
    assert len(made(storage)) == 1


def test_a_schedule_goes_with_its_session_and_its_user(storage: AgentStorage) -> None:
    user = storage.create_user("Ann")["id"]
    session = storage.create_session(None)["id"]
    storage.create_schedule("of session", "t", every=60, session_id=session)
    storage.create_schedule("of user", "t", every=60, user_id=user)
    storage.delete_session(session)
    storage.delete_user(user)
    assert storage.schedules() == []


def test_a_clock_that_was_ahead_stops_no_schedule_and_repeats_no_tick(storage: AgentStorage) -> None:
    storage.create_schedule("a", "t", every=60)
    change(storage, "a", next_at=(due_at := ago(5)))
    tick(storage)
    change(storage, "a", next_at=clock.after(FAR, 60), last_at=FAR)
    tick(storage)
    row = known(storage, "a")
    assert row["last_at"] is None
    assert clock.now() < (row["next_at"] or "") <= clock.after(clock.now(), 60)
    change(storage, "a", next_at=due_at)
    tick(storage)
    assert len(made(storage)) == 1


def test_a_schedule_that_cannot_tick_here_stops_no_other(storage: AgentStorage) -> None:
    for name in ("a", "b", "c"):
        storage.create_schedule(name, "t", cron="* * * * *")
        change(storage, name, next_at=ago(90))
    change(storage, "b", zone="Moon/Sea")
    found = tick(storage)
    assert found.failed.keys() == {"b"}
    assert "there is no time zone 'Moon/Sea'" in str(found.failed["b"])
    assert sorted(task["schedule"] or "" for task in made(storage)) == ["a", "c"]
    assert found.seconds is not None
    assert found.seconds > 0  # it does not look again at once


def test_a_change_beats_the_tick_that_was_read_before_it(storage: AgentStorage) -> None:
    storage.create_schedule("a", "t", every=60)
    change(storage, "a", next_at=ago(5))
    seen = storage.store.read_now(queries.require, "a")
    storage.create_schedule("a", "t", "changed", every=60)
    assert not storage.store.write_now(queries.advance, seen, [], None, FAR)
    tick(storage)
    assert [task["payload"] for task in made(storage)] == ["changed"]


def test_a_worker_that_is_to_end_leaves_missed_ticks_for_later(storage: AgentStorage) -> None:
    storage.create_schedule("a", "t", every=1, missed="all")
    change(storage, "a", next_at=ago(3 * ticks.MOST_AT_ONCE))
    to_the_end(schedules.tick(Blocking(storage.store), lambda: bool(made(storage))))
    assert len(made(storage)) == ticks.MOST_AT_ONCE
    tick(storage)
    assert len(made(storage)) > 3 * ticks.MOST_AT_ONCE


@pytest.mark.processes
def test_workers_of_several_processes_use_each_tick_once(storage: AgentStorage, database: Database) -> None:
    first = ago(60)
    for number in range(3):
        storage.create_schedule(f"s{number}", "t", every=1, missed="all")
        change(storage, f"s{number}", next_at=first)
    before = clock.now()
    with ExitStack() as stack:
        children = [stack.enter_context(started(TICKING, database.place)) for _ in range(3)]
        assert [each.hear() for each in children] == ["open"] * 3
        for each in children:
            each.tell()
        assert [each.hear() for each in children] == ["done"] * 3
    keys = [task["unique_key"] or "" for task in made(storage)]
    assert len(keys) == len(set(keys))
    for number in range(3):
        mine = sorted(key for key in keys if key.startswith(f"schedule:s{number}:"))
        assert mine == [f"schedule:s{number}:{clock.after(first, second)}" for second in range(len(mine))]
        assert len(mine) > clock.seconds_between(first, before)
        assert known(storage, f"s{number}")["next_at"] == clock.after(first, len(mine))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"cron": "0 9 * *"}, "must have 5 fields"),
        ({"cron": None}, "needs either cron="),
        ({"every": 5}, "needs either cron="),
        ({"zone": "Nowhere"}, "there is no time zone"),
        ({"missed": "some"}, "missed must be one of 'skip', 'one', 'all'"),
        ({"task_type": ""}, "at least one character"),
        ({"task_type": "x" * 1_001}, "1,000 bytes of UTF-8 at most"),
        ({"payload": {1, 2}}, "payload cannot be stored as JSON"),
        ({"priority": 2**70}, "priority must be a whole number"),
        ({"max_retries": -1}, "max_retries must be a number from 0 up"),
        ({"schedule_id": ""}, "a schedule id must be a string"),
        ({"schedule_id": "x" * 201}, "200 characters at most, got 201"),
        ({"session_id": "a", "user_id": "b"}, "session_id or user_id, not both"),
    ],
)
def test_what_no_schedule_can_be_is_refused_and_nothing_is_written(
    storage: AgentStorage, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        storage.create_schedule(**{"schedule_id": "a", "task_type": "t", "cron": "0 9 * * *", **given})
    assert storage.schedules() == []


def test_what_does_not_exist_is_named(storage: AgentStorage) -> None:
    writes: list[Callable[[], object]] = [
        lambda: storage.pause_schedule("nothing"),
        lambda: storage.resume_schedule("nothing"),
        lambda: storage.delete_schedule("nothing"),
    ]
    for write in writes:
        with pytest.raises(NotFound, match="there is no schedule 'nothing'"):
            write()
    with pytest.raises(NotFound, match="there is no session 'nothing'"):
        storage.create_schedule("a", "t", every=60, session_id="nothing")
    with pytest.raises(NotFound, match="there is no user 'nothing'"):
        storage.create_schedule("a", "t", every=60, user_id="nothing")
