"""`byssus usage`: figures, the same for programs, and plots on a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from byssus.cli import main
from byssus.storage import AgentStorage
from tests.support.accounts import known
from tests.support.commands import Command, command
from tests.support.databases import Database
from tests.support.screens import screen_of

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


def test_usage_is_told_by_day_model_and_tool(told: Database, byssus: Command) -> None:
    head, _, *tables = byssus("usage", "bob").stdout.splitlines()
    assert head.startswith("2 messages and 15 tokens in 1 thread since ")
    assert any(line.split()[:5] == ["m", "2", "15", "10", "5"] for line in tables)
    assert any(line.split()[:4] == ["look", "2", "1", "21.25"] for line in tables)
    assert byssus("usage").stdout.startswith("4 messages and 35 tokens in 2 threads")


def test_usage_as_json_is_what_the_storage_answers_with_threads_for_sessions(told: Database, byssus: Command) -> None:
    shown = json.loads(byssus("usage", "ann", "--days", 30, "--json").stdout)
    with AgentStorage(told.place) as storage:
        stats = dict(known(storage.get_usage_stats("ann", 30)))
    assert shown.pop("thread_count") == stats.pop("session_count")
    by_thread = [{**row, "session_id": row["thread_id"]} for row in shown.pop("by_thread")]
    for row in by_thread:
        del row["thread_id"]
    assert by_thread == stats.pop("by_session")
    assert shown == stats


def test_a_recount_says_what_differs(told: Database, byssus: Command) -> None:
    assert byssus("usage", "--recount").stdout == "Everything was counted right.\n"
    with told.store() as store:
        store.write_now(lambda tx: tx.run("UPDATE usage SET tokens = tokens + 7 WHERE tokens = 15"))
    assert "bob's" in byssus("usage", "--recount", code=1).stdout
    (problem,) = json.loads(byssus("usage", "--recount", "--json", code=1).stdout)["problems"]
    assert problem["what"] == "usage"


def test_usage_of_nobody_is_an_error(told: Database, byssus: Command) -> None:
    assert "no user 'eve'; 'byssus users' lists them" in byssus("usage", "eve", code=1).stderr


@pytest.mark.parametrize(("encoding", "block"), [("utf-8", "█"), ("ascii", "#")])
def test_on_a_terminal_there_are_plots(
    told: Database, monkeypatch: pytest.MonkeyPatch, encoding: str, block: str
) -> None:
    with AgentStorage(told.place) as storage:
        storage.set_price("m", input=1e6, output=2e6)
        storage.save_message("bob's", "user", "How long?", token_count=5)
    screen = screen_of(monkeypatch, columns=70, encoding=encoding)
    assert main(["usage", "--days", "3", "--no-pager", "--db", told.place]) == 0
    titles = ["TOKENS BY DAY", "COST BY DAY", "TOKENS BY MODEL", "COST BY MODEL", "CALLS BY TOOL", "LATENCY BY TOOL"]
    plots = {
        title: block.splitlines() for block in screen.text.split("\n\n") for title in titles if block.startswith(title)
    }
    assert list(plots) == titles
    assert [len(row.split()) for row in plots["TOKENS BY DAY"][1:]] == [
        2,
        2,
        3,
    ]  # without a bar where nothing was spent
    assert plots["TOKENS BY DAY"][-1].split()[1] == "40"
    assert plots["TOKENS BY DAY"][-1].endswith(block)
    assert plots["COST BY MODEL"][1].split()[:2] == ["m", "5"]
    assert plots["CALLS BY TOOL"][1].startswith("look  2  " + block)
    assert " ms  " in plots["LATENCY BY TOOL"][1]
    assert re.search(r"\nDAY +MESSAGES +TOKENS +INPUT +OUTPUT +CACHE READ +COST\n\d{4}-\d\d-\d\d  ", screen.text)
    assert max(map(len, screen.lines[1:])) <= 70
    assert "\x1b" not in screen.text


def test_in_a_pipe_there_are_plots_only_if_asked_for(told: Database, byssus: Command) -> None:
    assert "TOKENS BY DAY" not in byssus("usage").stdout
    plotted = byssus("usage", "--plot").stdout
    assert "TOKENS BY DAY" in plotted
    assert "\x1b" not in plotted
    assert plotted.endswith(byssus("usage").stdout.partition("\n")[2])
