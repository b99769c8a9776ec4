"""`byssus threads` and `byssus rename`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from byssus import AssistantMessage, UserMessage
from byssus.storage import AgentStorage
from tests.support.commands import Here, command_here
from tests.support.databases import Database


@pytest.fixture
def byssus(capsys: pytest.CaptureFixture[str], database: Database) -> Here:
    with AgentStorage(database.place) as storage:
        storage.create_user("Ann", user_id="ann")
        storage.append("older", UserMessage("Where is\nOslo?"))
        storage.append("newer", [UserMessage("北京的天气"), AssistantMessage("晴")])
        storage.set_user("newer", "ann")
    return command_here(capsys, database.place)


def ids(byssus: Here, *options: object) -> list[str]:
    return [thread["id"] for thread in json.loads(byssus("threads", "--json", *options).stdout)]


def test_a_list_has_titles_states_and_times_by_display_width(byssus: Here) -> None:
    head, newer, older = byssus("threads", "--utc").stdout.splitlines()
    assert head == "THREAD  TITLE           STATE  MESSAGES  UPDATED               USER"
    assert newer.endswith("Z  ann")
    assert newer.startswith("newer   北京的天气      idle          2  20")
    assert older.startswith("older   Where is Oslo?  idle          1  20")
    assert older.endswith("Z")
    assert "Z" not in byssus("threads").stdout.splitlines()[1]


def test_json_has_all_that_is_known_of_a_thread(byssus: Here) -> None:
    (newer,) = json.loads(byssus("threads", "--json", "--limit", 1).stdout)
    times = {newer.pop("created_at"), newer.pop("updated_at")}
    assert all("T" in time for time in times)
    assert newer == {
        "id": "newer",
        "message_count": 2,
        "user_id": "ann",
        "state": "idle",
        "title": "北京的天气",
        "first_words": "北京的天气",
        "parent_id": None,
    }


def test_a_list_that_may_go_on_says_so(byssus: Here) -> None:
    assert byssus("threads", "--limit", 2).stderr == "(the last 2; --limit N shows more)\n"
    assert byssus("threads").stderr == ""


def test_filters(byssus: Here) -> None:
    assert ids(byssus, "--user", "an") == ["newer"]
    assert ids(byssus, "--state", "idle") == ["newer", "older"]
    assert ids(byssus, "--title", "OSLO") == ["older"]
    assert ids(byssus, "--title", "天", "--user", "ann", "--state", "idle") == ["newer"]
    assert byssus("threads", "--state", "waiting").stdout == "No thread matches; 'byssus threads' lists them all.\n"


def test_a_thread_is_renamed_and_gets_its_own_title_back(byssus: Here) -> None:
    assert byssus("rename", "old", "Trip to Norway") == ("", "")
    assert ids(byssus, "--title", "norway") == ["older"]
    byssus("rename", "older", "")
    assert ids(byssus, "--title", "norway") == []
    assert "Where is Oslo?" in byssus("threads").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["threads", "--user", "bob"], 1, "byssus: there is no user 'bob' in "),
        (["threads", "--user", "bob"], 1, "; 'byssus users' lists them\n"),
        (["threads", "--state", "busy"], 2, "invalid choice: 'busy'"),
        (["threads", "--title", " "], 1, "byssus: title must be a part of a title"),
        (["rename", "nothing", "x"], 1, "; 'byssus threads' lists them\n"),
        (["rename", "older", "x" * 501], 1, "byssus: title can have 500 characters at most, got 501"),
        (["rename", "older", "a\ud800"], 1, "byssus: title cannot contain NUL or lone surrogates"),
        (["rename", "older"], 2, "TITLE"),
    ],
)
def test_what_cannot_be_meant_is_one_line(byssus: Here, arguments: list[str], code: int, told: str) -> None:
    assert told in byssus(*arguments, code=code).stderr


def test_without_threads_the_next_step_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    AgentStorage(str(tmp_path / "empty.db")).close()
    byssus = command_here(capsys, str(tmp_path / "empty.db"))
    assert byssus("threads").stdout == "There are no threads yet; 'byssus chat' starts one.\n"
