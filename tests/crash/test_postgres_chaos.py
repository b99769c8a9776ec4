"""A Postgres that goes away in the middle of things, and comes back: nothing is lost, and nothing happens twice.

`python -m tests.crash.postgres_chaos` is the long form.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from byssus import UserMessage
from byssus.checkpointer import PostgresCheckpointer
from tests.crash.cutter import Cutter, connections, name_standby, schema_on, waiting
from tests.crash.postgres_chaos import Plan, Restarts, cutting, judge, play
from tests.support import postgres
from tests.support.checkpointers import texts
from tests.support.pooler import pooling

SEED = 7


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    """A server of our own: nobody else's tests want it to go away."""
    with postgres.running() as started:
        yield started


def test_many_runs_survive_a_server_that_is_restarted_again_and_again(server: postgres.Server) -> None:
    restarts = Restarts(server, random.Random(SEED), every=250)
    diary, wrong = play(schema_on(server), Plan(threads=120), SEED, restarts)
    assert wrong == [], f"seed {SEED}"
    assert restarts.count > 1, f"seed {SEED}: {diary.count} acknowledged"


def test_a_wire_that_breaks_anywhere_loses_and_repeats_nothing(server: postgres.Server) -> None:
    plan = Plan(threads=40, processes=0, killed=0, writers=8)
    with Cutter(server.port, random.Random(SEED), anywhere=0.01, at_commits=0) as cutter:
        _, wrong = play(schema_on(server, cutter.port), plan, SEED, cutting(cutter))
    assert wrong == [], f"seed {SEED}"
    assert cutter.cuts > 10


def test_a_write_whose_answer_alone_was_lost_is_there_once(server: postgres.Server) -> None:
    plan = Plan(threads=40, processes=0, killed=0, writers=8)
    with Cutter(server.port, random.Random(SEED), anywhere=0, at_commits=0.1) as cutter:
        _, wrong = play(schema_on(server, cutter.port), plan, SEED, cutting(cutter))
    assert wrong == [], f"seed {SEED}"
    assert cutter.lost_answers > 10


def test_behind_a_pooler_a_server_that_is_restarted_loses_and_repeats_nothing(server: postgres.Server) -> None:
    restarts = Restarts(server, random.Random(SEED), every=150)
    with pooling(server.dsn()) as pooler:
        place = schema_on(server, int(conninfo_to_dict(pooler.dsn)["port"] or 0))
        _, wrong = play(place, Plan(threads=40, processes=0, killed=0), SEED, restarts)
    assert wrong == [], f"seed {SEED}"
    assert restarts.count > 1, f"seed {SEED}"


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_commit_that_is_under_way_when_the_wire_breaks_is_waited_for_and_not_repeated(
    server: postgres.Server, earlier: int
) -> None:
    async def main(cutter: Cutter) -> list[str]:
        place = schema_on(server, cutter.port)
        async with asyncio.timeout(60), PostgresCheckpointer(place.dsn, schema=place.name) as cp:
            for number in range(earlier):
                await cp.append("t", UserMessage(f"earlier {number}"))
            name_standby(server, "nobody")
            try:
                write = asyncio.create_task(cp.append("t", UserMessage("once")))
                await asyncio.to_thread(postgres.wait_until, lambda: waiting(server, "SyncRep") == 1, "no COMMIT")
                cutter.cut_all()
                await asyncio.to_thread(postgres.wait_until, lambda: waiting(server, "transactionid") == 1, "no look")
            finally:
                name_standby(server, "")
            await write
            return await texts(cp, "t")

    with Cutter(server.port, random.Random(SEED), anywhere=0, at_commits=0) as cutter:
        assert asyncio.run(main(cutter)) == [*(f"earlier {number}" for number in range(earlier)), "once"]


def test_after_the_chaos_no_connection_and_no_thread_is_left(server: postgres.Server) -> None:
    before = set(threading.enumerate())
    restarts = Restarts(server, random.Random(SEED), every=50)
    _, wrong = play(schema_on(server), Plan(threads=30, shared=0, processes=0, killed=0), SEED, restarts)
    assert wrong == [], f"seed {SEED}"
    ours = {"byssus-read", "byssus-write", "byssus-write-first", "byssus-news"}
    assert [thread.name for thread in {*threading.enumerate()} - before if thread.name in ours] == []
    postgres.wait_until(lambda: connections(server) == 0, "connections are left")


# --- the judge --------------------------------------------------------------------------------------------------------

FIRST = "key = (SELECT min(key) FROM {0} WHERE role = '{1}')"
TAMPERING = {
    "a message is gone": ["DELETE FROM messages WHERE " + FIRST.format("messages", "user")],
    "a result is gone": ["DELETE FROM messages WHERE " + FIRST.format("messages", "tool_result")],
    "a message is there twice": [
        "INSERT INTO messages (branch, seq, id, role, body, created_at)"
        " SELECT branch, seq + 100, id, role, body, created_at FROM messages ORDER BY key LIMIT 1",
        "UPDATE threads SET head = head + 100,"
        " message_count = (SELECT count(*) FROM messages WHERE branch = threads.branch)",
    ],
    "an append changed places with the next": [
        "UPDATE messages SET seq = -seq WHERE seq < 3 AND branch = (SELECT branch FROM threads WHERE id = 'written-0')",
        "UPDATE messages SET seq = 3 + seq WHERE seq < 0",
    ],
    "a run has not ended": ["UPDATE threads SET run = 'r' WHERE id = 'own-0'"],
    "a call has not ended": ["UPDATE tool_calls SET ended_at = NULL"],
    "a call was never begun": ["DELETE FROM tool_calls"],
}


def judged(server: postgres.Server, tampering: list[str], again: str = "") -> list[str]:
    """What the judge says when nobody disturbed the scene, but these statements were run after it."""
    place = schema_on(server)
    plan = Plan(threads=2, shared=1, writers=1, appends=3, spoken=0, processes=0, killed=0)
    diary, wrong = play(place, plan, SEED, lambda _: None)
    assert wrong == [], f"seed {SEED}"
    with psycopg.connect(server.dsn(), options=f"-c search_path={place.name}") as connection:
        for statement in tampering:
            connection.execute(statement.encode())
    if again == "tool":
        diary.runs[min(diary.ended)] += 1

    async def look() -> list[str]:
        async with PostgresCheckpointer(place.dsn, schema=place.name) as cp:
            return await judge(cp, diary)

    return asyncio.run(look())


@pytest.mark.parametrize("what", TAMPERING)
def test_the_judge_notices_when(server: postgres.Server, what: str) -> None:
    assert judged(server, TAMPERING[what]) != []


def test_the_judge_notices_when_a_tool_ran_again(server: postgres.Server) -> None:
    assert judged(server, [], again="tool") != []
