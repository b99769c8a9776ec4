"""`byssus users`."""

from __future__ import annotations

import json

import pytest

from byssus.storage import AgentStorage
from tests.support.commands import Here, command_here
from tests.support.databases import Database


@pytest.fixture
def byssus(capsys: pytest.CaptureFixture[str], database: Database) -> Here:
    return command_here(capsys, database.place)


def test_users_are_listed_with_what_they_have_used(database: Database, byssus: Here) -> None:
    with AgentStorage(database.place) as storage:
        assert byssus("users").stdout == "There are no users; a program adds them.\n"
        storage.create_user("安", "an@example.org", 2_000, user_id="an")
        storage.create_user("Bob", quota_total=None, user_id="bob")
        storage.consume_quota("an", 1_067)
    assert byssus("users").stdout.splitlines() == [
        "USER  NAME  EMAIL            USED  QUOTA",
        "an    安    an@example.org  1,067  2,000",
        "bob   Bob                       0   none",
    ]
    shown = byssus("users", "--limit", 1, "--json")
    assert [(user["id"], user["quota_total"]) for user in json.loads(shown.stdout)] == [("an", 2_000)]
    assert byssus("users", "--limit", 1).stderr == "(the first 1; --limit N shows more)\n"
