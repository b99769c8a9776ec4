"""The status line: what is known of a thread, in the columns that there are."""

from __future__ import annotations

import asyncio

import pytest

from byssus.cli.chat.live.drawn import status
from byssus.cli.chat.live.drawn.drawing import Appearance, Drawer
from byssus.cli.chat.live.drawn.status import Status, ThreadCosts
from byssus.messages import Usage
from byssus.storage import AgentStorage
from tests.support.databases import Database


def _line(columns: int, now: Status) -> str:
    return "".join(segment.text for segment in status.line(Drawer(Appearance(columns, "plain", False)), now))


def test_the_costs_of_a_thread_and_what_its_user_has_left_are_known(database: Database) -> None:
    with AgentStorage(database.place) as storage:
        user = storage.create_user("Ann", quota_total=1_000)
        session = storage.create_session(user["id"], "m")
        storage.save_message(session["id"], "user", "Hello.", token_count=40)
        storage.consume_quota(user["id"], 250)

    async def spent() -> list[ThreadCosts]:
        async with database.checkpointer() as cp:
            return [
                await status.spent_on(cp, *of) for of in ((session["id"], None), ("new", user["id"]), ("new", None))
            ]

    known, new, nobody = asyncio.run(spent())
    assert (known.tokens, known.quota_left) == (40, 750)
    assert (new, nobody) == (ThreadCosts(quota_left=750), ThreadCosts())


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("/home/ann/data/chat.db", "chat.db"),
        ("postgresql://ann:***@db.example.com:5432/chats?schema=byssus", "db.example.com:5432/chats"),
        ("postgresql:///chats?host=db", "/chats"),
    ],
)
def test_a_database_is_named_shortly(name: str, short: str) -> None:
    assert status.database_name(name) == short


def test_the_parts_that_fit_are_shown_the_important_ones_first() -> None:
    now = Status("trip", "openai:m", "", ThreadCosts(12_300, 0.5, 750), Usage(100, 20, cost=0.01), 2, "chat.db")
    parts = ["trip", "openai:m", "2 queued", "turn 120 tok $0.01", "thread 12.3k tok $0.5", "750 tok left", "chat.db"]
    assert _line(120, now) == " \u00b7 ".join(parts)
    assert _line(40, now) == " \u00b7 ".join(parts[:3])
    assert _line(3, now) == "t\u2026"
