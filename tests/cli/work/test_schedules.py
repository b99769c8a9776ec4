"""`byssus schedules`."""

from __future__ import annotations

import json

import pytest

from byssus import UserMessage
from byssus.storage import AgentStorage
from tests.support.commands import Here, command_here
from tests.support.databases import Database


@pytest.fixture
def byssus(capsys: pytest.CaptureFixture[str], database: Database) -> Here:
    with AgentStorage(database.place) as storage:
        storage.append("trip", UserMessage("x"))
    return command_here(capsys, database.place)


def test_a_schedule_is_created_listed_paused_resumed_and_deleted(byssus: Here) -> None:
    assert byssus("schedules").stdout == "There are no schedules; 'create' adds one.\n"
    options = ("--cron", "0 9 * * 1-5", "--zone", "Europe/Oslo", "--thread", "tri", "--missed", "all")
    (head, row) = byssus(
        "schedules", "create", "report", *options, "write", '{"to": "Ann"}', "--utc"
    ).stdout.splitlines()
    assert head.split() == ["SCHEDULE", "TYPE", "TICKS", "MISSED", "STATUS", "NEXT", "LAST", "FOR"]
    assert row.split()[:10] == ["report", "write", "0", "9", "*", "*", "1-5", "Europe/Oslo", "all", "active"]
    assert row.split()[-1] == "trip"
    byssus("schedules", "create", "clean", "sweep", "--every", "90m")
    listed = json.loads(byssus("schedules", "--json").stdout)
    assert [(each["id"], each["thread_id"], each["payload"]) for each in listed] == [
        ("report", "trip", {"to": "Ann"}),
        ("clean", None, {}),
    ]
    assert byssus("schedules", "list", "--limit", 1).stderr == "(the first 1; --limit N shows more)\n"
    paused = byssus("schedules", "pause", "clean").stdout.splitlines()[1].split()
    assert paused == ["clean", "sweep", "every", "90m", "one", "paused"]
    assert json.loads(byssus("schedules", "resume", "clean", "--json").stdout)["status"] == "active"
    assert byssus("schedules", "delete", "clean") == ("", "")
    assert len(json.loads(byssus("schedules", "list", "--json").stdout)) == 1


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["create", "a", "t"], "a schedule needs --cron or --every"),
        (["create", "a", "t", "--cron", "0 25 * * *"], "the hour (field 2) cannot be '25', at character 3"),
        (["create", "a", "t", "--cron", "0 9 * * *", "--zone", "Oslo"], "there is no time zone 'Oslo'"),
        (["create", "a"], "type: byssus schedules create ID TYPE [PAYLOAD]; got a"),
        (["pause", "nothing"], "there is no schedule 'nothing'; 'byssus schedules' lists them"),
        (["nothing"], "type: byssus schedules list; got nothing"),
        (["delete", "a", "--zone", "UTC"], "--zone goes with 'create', not with 'delete'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(byssus: Here, typed: list[str], told: str) -> None:
    assert told in byssus("schedules", *typed, code=1).stderr


def test_a_time_is_a_number_with_a_unit(byssus: Here) -> None:
    assert "must be a time such as 90, 30m, 6h or 1d" in byssus("schedules", "create", "--every", "soon", code=2).stderr
    for typed, seconds in (("90", 90), ("1.5h", 5_400), ("1d", 86_400)):
        made = json.loads(byssus("schedules", "create", "a", "t", "--every", typed, "--json").stdout)
        assert made["every"] == seconds


def test_what_is_created_first_makes_the_database(capsys: pytest.CaptureFixture[str], new_database: Database) -> None:
    byssus = command_here(capsys, new_database.place)
    assert byssus("schedules", code=1).stderr.startswith("byssus: there is no database at ")
    assert byssus("tasks", "create", "write").stdout.endswith("  pending\n")
    assert byssus("schedules", "create", "clean", "sweep", "--every", "90m").stdout != ""
