"""`byssus search`: what is told to people, and what to programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from byssus.cli.screen import terminal
from byssus.storage import AgentStorage
from tests.support.commands import Command, command, command_here
from tests.support.databases import Database

pytestmark = pytest.mark.processes


@pytest.fixture
def byssus(tmp_path: Path, database: Database) -> Command:
    return command(tmp_path, database.place)


@pytest.fixture
def told(database: Database) -> Database:
    """Ann asks about Beijing twice, and Bob about Oslo; a tool was called, and failed once."""
    with AgentStorage(database.place) as storage:
        for name, texts in (
            ("ann", ["北京的天气怎么样?", "the weather in 北京, again"]),
            ("bob", ["Is it raining in Oslo?"]),
        ):
            storage.create_user(name, user_id=name)
            storage.create_session(name, session_id=f"{name}'s", model="m")
            for text in texts:
                storage.save_message(f"{name}'s", "user", text, token_count=10)
        storage.save_message("bob's", "assistant", "It rains.", token_count=5)
        storage.log_tool_call("bob's", "look", {"where": "Oslo"}, {"sky": "grey"}, 12.5)
        storage.log_tool_call("bob's", "look", {"where": "Bergen"}, None, 30.0, success=False, error_message="no sky")
    return database


def test_a_search_shows_where_it_was_said_the_newest_first(told: Database, byssus: Command) -> None:
    lines = byssus("search", "北京").stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["THREAD", "ann's", "ann's"]
    assert lines[0].split() == ["THREAD", "TIME", "ROLE", "TEXT"]
    assert lines[1].endswith("user  the weather in **北京**, again")
    assert lines[2].endswith("user  **北京**的天气怎么样?")


def test_filters_and_limits_of_a_search(told: Database, byssus: Command) -> None:
    assert byssus("search", "weather", "--user", "bob").stdout == ""
    assert len(byssus("search", "北京", "--limit", 1).stdout.splitlines()) == 2
    assert "--limit N shows more" in byssus("search", "北京", "--limit", 1).stderr
    assert "assistant  It **rains**." in byssus("search", "raining", "--role", "assistant").stdout
    assert len(byssus("search", "oslo", "--thread", "bob's").stdout.splitlines()) == 3
    assert byssus("search", "oslo", "--since", "2100-01-01").stderr == "Nothing was found.\n"
    assert "there is no user 'nobody'" in byssus("search", "oslo", "--user", "nobody", code=1).stderr
    assert "there is no thread 'nowhere'" in byssus("search", "oslo", "--thread", "nowhere", code=1).stderr


def test_phrases_and_excluded_words_are_typed_as_they_are(told: Database, byssus: Command) -> None:
    assert len(byssus("search", "in weather").stdout.splitlines()) == 2
    assert byssus("search", '"in weather"').stdout == ""
    assert len(byssus("search", '"weather in"').stdout.splitlines()) == 2
    assert len(byssus("search", "北京", "-again").stdout.splitlines()) == 2
    assert len(byssus("search", "北京 -again").stdout.splitlines()) == 2
    assert len(byssus("search", "-again", "--limit", 5, "北京").stdout.splitlines()) == 2
    assert "quote it after --: byssus search -- '\"-again\"'" in byssus("search", "-again", code=1).stderr
    assert byssus("search", "--", '"-again"').stderr == "Nothing was found.\n"  # as it stands, with the dash
    assert "unrecognized arguments: --again" in byssus("search", "北京", "--again", code=2).stderr


def test_a_search_as_json_has_all_that_a_hit_has(told: Database, byssus: Command) -> None:
    (tool, message) = json.loads(byssus("search", "oslo", "--json").stdout)
    assert (tool["kind"], tool["role"], tool["tool_name"]) == ("tool_call", "tool", "look")
    assert (message["kind"], message["thread_id"], message["content"]) == (
        "message",
        "bob's",
        "Is it raining in Oslo?",
    )
    assert message["snippet"] == "Is it raining in **Oslo**?"


def test_a_search_for_nothing_is_refused(told: Database, byssus: Command) -> None:
    for words in ("", "%", "-weather"):
        assert byssus("search", "--", words, code=1).stderr.startswith("byssus: ")


def test_times_are_local_or_utc_and_a_thread_is_a_thread_in_json(
    told: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    byssus = command_here(capsys, told.place)
    (hit,) = json.loads(byssus("search", "raining", "--role", "user", "--json").stdout)
    assert hit["thread_id"] == "bob's"
    assert "session_id" not in hit
    for options, utc in (((), False), (("--utc",), True)):
        _, line = byssus("search", "raining", "--role", "user", *options).stdout.splitlines()
        assert f"  {terminal.when(hit['created_at'], utc)}  " in line
    usage = json.loads(byssus("usage", "--json").stdout)
    assert usage["thread_count"] == 2
    assert {row["thread_id"] for row in usage["by_thread"]} == {"ann's", "bob's"}
    assert not any("session" in name for name in usage)
