"""A check names what is wrong and nothing else; a repair mends what can be made anew, and says what it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest

from byssus import AssistantMessage, Usage, UserMessage
from byssus.accounts import tool_log, usage, users
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata
from byssus.maintenance import check as checking
from byssus.maintenance import repair as repairing
from byssus.queries.log import memories
from byssus.queries.log.threads import MessageRow
from byssus.queries.moving.tables import THREADS
from byssus.queries.versions import deleting
from byssus.search import search
from byssus.storage import AgentStorage, CheckResult, RepairResult
from byssus.store.database import Store
from byssus.store.operations import Blocking, to_the_end
from byssus.store.sqlite import file as sqlite_file
from byssus.values.thread_key import ThreadKey
from tests.support.accounts import known
from tests.support.backups import Writers, opened, rows_in, say
from tests.support.cases import case
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.marks import mark, summarize


def check(store: Store, **options: Any) -> CheckResult:
    return to_the_end(checking.check(Blocking(store), **options))


def repair(store: Store) -> RepairResult:
    return to_the_end(repairing.repair(Blocking(store)))


def recount(store: Store) -> CheckResult:
    return to_the_end(checking.recount(Blocking(store)))


def kinds(found: CheckResult) -> set[str]:
    return {problem["what"] for problem in found["problems"]}


def sql(store: Store, *statements: str) -> None:
    for statement in statements:
        store.write_now(lambda tx, text: tx.run(text), statement)


async def fill(cp: Checkpointer) -> None:
    question, answer = UserMessage("how are you?"), UserMessage("{'role': 'user'}")
    reply = AssistantMessage("fine", model="opus", usage=Usage(100, 20, 3, 4, 0.25))
    unpriced = AssistantMessage("thanks", model="haiku", usage=Usage(10, 2))
    await cp.append("a", [question, reply, answer, unpriced])
    await cp.append("b", [question, {"role": "user", "content": "by the way", "token_count": 7}, {"any": "thing"}])
    for step in (1, 2, 3):
        about = CheckpointMetadata(thread_id="c", checkpoint_id=f"c{step}", step=step)
        await cp.put(Checkpoint(metadata=about, messages=[question, reply, answer][:step]))
    await cp.fork("c", "c2", new_id="d")
    await cp.append("d", [question, reply])
    about = CheckpointMetadata(thread_id="d", checkpoint_id="d9", step=9)
    await cp.put(Checkpoint(metadata=about, messages=[question, answer]))  # on another branch, and the same line
    await cp.rewind("c", "c1")
    await cp.append("c", [reply])
    await mark(cp, "d", [1, 2], "hint", "hint")
    await summarize(cp, "d", "in short")
    await cp.store.write(memories.add, ThreadKey("ann", "e"), [MessageRow("1", "user", '{"content":"hi"}', 1)], ["m"])


@pytest.fixture
def filled(database: Database, store: Store) -> Store:
    runner = Blocking(store)
    to_the_end(usage.set_price(runner, "haiku", input=1.0, output=2.0))

    async def main() -> None:
        async with database.checkpointer() as cp:
            await fill(cp)

    asyncio.run(main())
    to_the_end(users.create_user(runner, "Ann", user_id="ann", preferences={"ui": {"theme": "dark"}, "n": 1}))
    for elapsed in (5.0, 5.1, 80.0):
        to_the_end(tool_log.log_tool_call(runner, "a", "look", {"x": 1}, "there", elapsed, success=elapsed < 50))
    to_the_end(search.index(runner))
    return store


def test_a_database_that_is_right_has_no_problems(filled: Store) -> None:
    before = rows_in(filled)
    found = check(filled)
    assert found["problems"] == []
    assert found["ok"] is True
    assert found["checked"] == {
        "threads": 5,
        "uncounted": 0,
        "branches": len(before["branches"]),
        "checkpoints": len(before["checkpoints"]),
        "marks": 5,
        "users": 1,
        "messages": len(before["messages"]),
    }
    assert rows_in(filled) == before
    assert recount(filled)["ok"]


def test_an_empty_database_has_no_problems(store: Store) -> None:
    assert check(store)["ok"]
    assert repair(store) == {**check(store), "repaired": []}


class Break(NamedTuple):
    statements: tuple[str, ...]
    what: str
    told: str
    also: tuple[str, ...] = ()  # what is wrong as a consequence
    is_repairable: bool = False


A = "(SELECT branch FROM threads WHERE id = 'a')"
BREAKS = {
    "a message count": Break(
        ("UPDATE threads SET message_count = 99 WHERE id = 'a'",),
        "message_count",
        "thread 'a' says that it has 99 messages, and 4 can be read",
        is_repairable=True,
    ),
    "a head": Break(
        ("UPDATE threads SET head = 2 WHERE id = 'a'",),
        "head",
        "the head of thread 'a' is 2, below its last message at 4",
        is_repairable=True,
    ),
    "a message that is gone": Break(
        (f"DELETE FROM messages WHERE branch = {A} AND seq = 1",), "message_count", "3 can be read", ("usage",), True
    ),
    "a branch that is not there": Break(
        ("UPDATE threads SET branch = 999 WHERE id = 'b'",), "branch", "thread 'b' is on branch 999, which does not"
    ),
    "a branch of another thread": Break(
        (f"UPDATE threads SET branch = {A} WHERE id = 'b'",), "branch", "which belongs to the thread with key 1"
    ),
    "a line that is not there": Break(
        ("UPDATE threads SET line = 999 WHERE id = 'b'",), "branch", "thread 'b' is on line 999, which does not exist"
    ),
    "pieces that overlap": Break(
        (
            f"UPDATE segments SET after_seq = 1 WHERE branch = {A}",
            f"INSERT INTO segments (branch, source, after_seq, upto_seq) VALUES ({A}, {A}, 0, 3)",
        ),
        "segments",
        "they overlap",
        ("message_count",),
    ),
    "a piece that is nothing": Break(
        (f"INSERT INTO segments (branch, source, after_seq, upto_seq) VALUES ({A}, {A}, -3, -3)",),
        "segments",
        "after -3 and up to -3: that is nothing",
    ),
    "no open end": Break(
        (f"UPDATE segments SET upto_seq = 4 WHERE branch = {A}",), "segments", "does not end with a piece of its own"
    ),
    "no pieces": Break(
        (f"DELETE FROM segments WHERE branch = {A}",), "segments", "does not end with a piece", ("message_count",)
    ),
    "a checkpoint": Break(
        ("UPDATE checkpoints SET message_count = 77 WHERE id = 'c2'",),
        "checkpoint",
        "checkpoint 'c2' (row 2) is of 77 messages, and 2 can be read",
    ),
    "the latest one": Break(
        ("UPDATE threads SET latest = 3 WHERE id = 'c'",), "latest", "row 3 of", is_repairable=True
    ),
    "no latest one": Break(
        ("UPDATE threads SET latest = NULL, latest_at = NULL WHERE id = 'd'",),
        "latest",
        "row None of None is kept as that",
        is_repairable=True,
    ),
    "a latest one where there is none": Break(
        ("UPDATE threads SET latest = 1, latest_at = 'then' WHERE id = 'b'",),
        "latest",
        "of thread 'b' is row None",
        is_repairable=True,
    ),
    "a message that is no JSON": Break(
        (f"UPDATE messages SET body = '{{\"rol' WHERE branch = {A} AND seq = 1",), "message", "is no JSON: '{\"rol'"
    ),
    "an index of ids that lacks a message": Break(
        ("UPDATE threads SET named = 1 WHERE id = 'a'",), "named", "messages of thread 'a' are looked", (), True
    ),
    "a mark on another thread's message": Break(
        ("UPDATE marks SET message = 1 WHERE mark = 'm'",), "mark", "mark 'm' (row 5) is on message 1, which is not"
    ),
    "a mark of another branch": Break(
        (f"UPDATE marks SET branch = {A} WHERE mark = 'm'",), "mark", "which is not read along branch 1, to which"
    ),
    "tokens": Break(
        ("UPDATE usage SET tokens = tokens + 5 WHERE thread = 1 AND model = 'opus'",),
        "usage",
        "with model 'opus', 1 messages and 132 tokens (100 in, 20 out, 3 and 4 cached) for 0.25 are kept for thread",
        is_repairable=True,
    ),
    "a cost": Break(("UPDATE usage SET cost = cost + 0.001 WHERE model = 'opus'",), "usage", "0.251", (), True),
    "no usage": Break(("DELETE FROM usage",), "usage", "0 messages and 0 tokens", (), True),
    "usage of another day": Break(
        ("UPDATE usage SET day = '2001-01-01' WHERE thread = 1",), "usage", "on 2001-01-01", (), True
    ),
    "calls": Break(("UPDATE tool_usage SET calls = 9",), "tool_usage", "9 calls", is_repairable=True),
    "failures": Break(("UPDATE tool_usage SET failures = 1",), "tool_usage", "1 of which failed", is_repairable=True),
    "milliseconds": Break(("UPDATE tool_usage SET total_ms = 1",), "tool_usage", "in 1 ms", is_repairable=True),
    "no calls": Break(("DELETE FROM tool_usage",), "tool_usage", "0 calls", is_repairable=True),
    "no leaves": Break(
        ("DELETE FROM preferences",), "preferences", "user 'ann' is found by 0 preferences, and has 2", (), True
    ),
    "another leaf": Break(
        ("UPDATE preferences SET value = '2' WHERE value = '1'",), "preferences", "by other preferences", (), True
    ),
    "preferences that are no JSON": Break(
        ("UPDATE users SET preferences = '{\"ui'",), "preferences", "of user 'ann' are no JSON: '{\"ui'"
    ),
    "a quota": Break(("UPDATE users SET quota_used = -5",), "quota", "user 'ann' has used -5 tokens"),
    "an index without a message": Break(
        ("UPDATE indexing SET upto = 3", "DELETE FROM message_words WHERE {message_words} = 2"),
        "index",
        "rows of messages are not",
        (),
        True,
    ),
    "an index without a call": Break(
        ("UPDATE indexing SET upto = 3", "DELETE FROM call_words WHERE {call_words} = 3"),
        "index",
        "should have them: 3",
        (),
        True,
    ),
}


LASTING = "a message that is gone"  # the only one of which something stays


def index_keys(store: Store) -> dict[str, str]:
    """The column of each index for search that holds the keys of its rows."""
    columns = {"sqlite": ("rowid", "rowid"), "postgresql": ("message", "call")}[store.dialect.name]
    return dict(zip(("message_words", "call_words"), columns, strict=True))


def test_what_is_wrong_is_named_and_mended(filled: Store) -> None:
    """Each leaves the database as it was, to the next one."""
    mendable = [name for name, broken in BREAKS.items() if broken.is_repairable and name != LASTING]
    for name in (*mendable, LASTING):
        with case(name):
            right = rows_in(filled)
            found, mended = broken_and_mended(filled, BREAKS[name])
            assert mended["ok"]
            assert mended["problems"] == []
            assert {problem["what"] for problem in mended["repaired"]} == kinds(found)
            assert name == LASTING or without_keys(rows_in(filled)) == without_keys(right)


@pytest.mark.parametrize("name", [name for name, broken in BREAKS.items() if not broken.is_repairable])
def test_what_is_wrong_and_cannot_be_mended_is_named(filled: Store, name: str) -> None:
    _, mended = broken_and_mended(filled, BREAKS[name])
    assert not mended["ok"]
    assert mended["problems"]
    assert mended["repaired"] == []


def broken_and_mended(store: Store, broken: Break) -> tuple[CheckResult, RepairResult]:
    sql(store, *(text.format(**index_keys(store)) if "_words" in text else text for text in broken.statements))
    found = check(store)
    named = [problem for problem in found["problems"] if problem["what"] == broken.what]
    assert not found["ok"]
    assert any(broken.told in problem["detail"] for problem in named), found["problems"]
    assert {problem["repairable"] for problem in named} == {broken.is_repairable}
    assert kinds(found) == {broken.what, *broken.also}
    return found, repair(store)


def without_keys(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Rows that were made anew have other keys, a head that was raised is another version, and nothing is nothing."""
    found = {name: list(several) for name, several in rows.items()}
    found["threads"] = [{**THREADS.values_of(row), "version": 0} for row in rows["threads"]]
    for name in ("usage", "tool_usage", "preferences"):
        found[name] = sorted(row[1:] for row in rows[name] if name != "usage" or row[5])
    found["usage"] = [(*row[:-1], 0) for row in found["usage"]]  # what was priced is looked at elsewhere
    return found


def test_an_index_entry_without_its_row_is_named_and_mended(tmp_path: Path) -> None:
    """Only here can there be one: elsewhere the database itself sees to it."""
    with opened(tmp_path / "live.db") as store:
        say(store, "t", "hello")
        to_the_end(search.index(Blocking(store)))
        sql(store, "INSERT INTO message_words (rowid, words) VALUES (77, 'hello')")
        found = check(store)
        assert [problem["detail"] for problem in found["problems"]] == [
            "the index for search has rows that messages has not: 77"
        ]
        assert repair(store)["ok"]


def test_an_index_that_is_behind_or_not_begun_is_no_problem(store: Store) -> None:
    say(store, "t", "hello")
    assert check(store)["ok"]
    to_the_end(search.index(Blocking(store)))
    say(store, "t", "more")
    assert check(store)["ok"]


REFERENCES = {
    "a thread": ("DELETE FROM threads WHERE id = 'b'", "branches", "has thread 2, and threads has no row 2"),
    "a branch": (f"DELETE FROM branches WHERE key = {A}", "messages", "and branches has no row 1"),
    "a checkpoint": (
        "INSERT INTO hidden (line, checkpoint) VALUES (1, 999)",
        "hidden",
        "checkpoint 999, and checkpoints has no",
    ),
    "a user": ("DELETE FROM users", "preferences", "and users has no row 1"),
    "a marked message": (
        "DELETE FROM messages WHERE key = (SELECT message FROM marks WHERE mark = 'm')",
        "marks",
        "and messages has no row",
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_what_points_to_nothing_is_named(database: Database, filled: Store, name: str) -> None:
    statement, table, told = REFERENCES[name]
    if database.system == "sqlite":
        connection = apsw.Connection(database.place)  # which looks after no reference by itself
        connection.execute(statement)
        connection.close()
    else:
        sql_unchecked(filled, statement)
    found = check(filled, deep=False)
    named = [problem for problem in found["problems"] if problem["what"] == "reference"]
    assert any(problem["where"] == table and told in problem["detail"] for problem in named), found["problems"]
    assert not any(problem["repairable"] for problem in named)


def sql_unchecked(store: Store, statement: str) -> None:
    def query(tx: Any) -> None:
        tx.run("SET LOCAL session_replication_role = 'replica'")
        tx.run(statement)

    store.write_now(query)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "live.db"
    with opened(path) as store:
        for number in range(50):
            say(store, f"t{number}", *("x" * 500 for _ in range(10)))
    sqlite_file.fold(str(path))
    data = bytearray(path.read_bytes())
    for page in range(len(data) // 4096 - 20, len(data) // 4096):
        data[page * 4096 : page * 4096 + 2000] = b"\x07" * 2000
    path.write_bytes(data)
    with opened(path) as store:
        found = check(store)
        assert kinds(found) == {"file"}
        assert not repair(store)["ok"]


def test_a_text_that_is_none_is_named_with_its_thread(tmp_path: Path) -> None:
    with opened(tmp_path / "live.db") as store:
        say(store, "good", "hello")
        say(store, "bad", "hello")
        sql(store, "UPDATE messages SET body = CAST(x'ff22' AS TEXT) WHERE key = 2")
        found = check(store)
        assert [(problem["what"], problem["where"]) for problem in found["problems"]] == [("message", "thread 'bad'")]
        assert not repair(store)["ok"]
        sql(store, "UPDATE threads SET extra = CAST(x'ff22' AS TEXT), latest_at = CAST(x'ff22' AS TEXT)")
        assert kinds(check(store)) == {"file"}


def test_a_database_in_memory_can_be_checked() -> None:
    with opened(":memory:") as store:
        say(store, "t", "hello")
        assert check(store)["ok"]
        sql(store, "UPDATE threads SET message_count = 9")
        assert repair(store)["ok"]


def test_what_was_priced_stays_priced(filled: Store) -> None:
    def priced() -> list[Any]:
        return filled.read_now(lambda tx: tx.all("SELECT thread, model, priced FROM usage WHERE priced > 0"))

    before = priced()
    assert [row[1] for row in before] == ["haiku"]
    sql(filled, "UPDATE usage SET tokens = 1, messages = 7")
    assert repair(filled)["ok"]
    assert priced() == before


def test_what_cannot_be_counted_again_is_left_and_told(filled: Store) -> None:
    sql(filled, "UPDATE usage SET tokens = 1", "UPDATE tool_usage SET calls = 7", "UPDATE branches SET uncounted = 1")
    before = rows_in(filled)
    assert recount(filled)["checked"]["uncounted"] == 5
    assert repair(filled)["repaired"] == []
    assert rows_in(filled) == before


def test_without_deep_messages_are_counted_and_not_read(filled: Store) -> None:
    sql(filled, "UPDATE usage SET tokens = 1", "UPDATE messages SET body = '{' WHERE key = 1")
    found = check(filled, deep=False)
    assert found["ok"]
    assert "messages" not in found["checked"]
    sql(filled, "UPDATE threads SET message_count = 99 WHERE id = 'a'")
    assert kinds(check(filled, deep=False)) == {"message_count"}


def test_a_recount_tells_of_usage_and_of_nothing_else(filled: Store) -> None:
    sql(filled, "UPDATE threads SET message_count = 99", "UPDATE usage SET tokens = 1 WHERE model = 'opus'")
    found = recount(filled)
    assert kinds(found) == {"usage"}
    assert {problem["where"] for problem in found["problems"]} == {"thread 'a'", "thread 'c'", "thread 'd'"}


@pytest.mark.parametrize("to_both", [True, False])
def test_threads_that_are_written_to_meanwhile_are_not_broken(store: Store, to_both: bool) -> None:
    with Writers(store, to_both=to_both) as writers:
        for _ in range(5):
            assert check(store)["problems"] == []
            writers.let_write()


@pytest.mark.parametrize("to_both", [True, False])
def test_threads_are_mended_while_others_write_to_them(store: Store, to_both: bool) -> None:
    with Writers(store, to_both=to_both) as writers:
        sql(store, "UPDATE threads SET message_count = message_count + 1", "UPDATE usage SET messages = messages + 1")
        writers.let_write()
        assert len(repair(store)["repaired"]) == (16 if to_both else 8)
        writers.let_write()
    assert check(store)["problems"] == []


def test_an_open_call_that_a_rewind_has_closed_may_be_counted_or_not(store: Store) -> None:
    say(store, "t", "hello")
    row = (
        "INSERT INTO tool_calls (thread, branch, reply, place, call_id, name, arguments, recovery, idempotency_key,"
        " run, status, attempts, ended_at) VALUES (1, 1, 1, {}, 'c', 'look', '{{}}', 'never', 'k{}', 'r', 'unknown', 1,"
        " '2026-01-01T00:00:00.000000Z')"
    )
    sql(store, row.format(0, 0), row.format(1, 1))
    assert check(store)["ok"]
    sql(
        store,
        "INSERT INTO tool_usage (thread, owner, day, name, bucket, calls, failures, total_ms)"
        " VALUES (1, '', '2026-01-01', 'look', -1, 2, 2, 0)",
    )
    assert check(store)["ok"]
    sql(store, "UPDATE tool_usage SET calls = 3, failures = 3")
    assert kinds(check(store)) == {"tool_usage"}
    assert repair(store)["ok"]
    assert store.read_now(lambda tx: tx.one("SELECT calls, failures FROM tool_usage")) == (2, 2)


def test_a_check_can_be_awaited(database: Database) -> None:
    async def main() -> CheckResult:
        async with database.checkpointer() as cp:
            await fill(cp)
            return await checking.check(cp.store)

    found = asyncio.run(main())
    assert found["problems"] == []


def test_sums_that_know_what_an_unreadable_message_has_cost_are_left_alone(database: Database) -> None:
    with AgentStorage(database.place) as storage:
        session = storage.create_session(None)["id"]
        for number in range(3):
            storage.save_message(session, "user", f"message {number}", token_count=100)
        storage.store.write_now(lambda tx: tx.run("UPDATE messages SET body = '{oops' WHERE seq = 2"))
        assert {problem["what"] for problem in storage.check()["problems"]} == {"message"}
        assert storage.repair()["repaired"] == []
        assert known(storage.get_session(session))["total_tokens"] == 300


def test_a_session_that_is_deleted_meanwhile_is_no_problem(database: Database) -> None:
    class DeletedBetweenTwoReads(Blocking):
        async def read(self, query: Any, /, *args: Any, **kwargs: Any) -> Any:
            if query is checking._look_into:
                self.base.write_now(deleting.discard, ThreadKey("", "s"))
            return await super().read(query, *args, **kwargs)

    with AgentStorage(database.place) as storage:
        storage.create_session(None, session_id="s")
        storage.save_message("s", "user", "hi", token_count=3)
        storage.log_tool_call("s", "look", {}, None, 1.0)
        assert to_the_end(checking.recount(DeletedBetweenTwoReads(storage.store)))["problems"] == []


def test_an_import_that_is_under_way_is_no_problem(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("s", [UserMessage(f"message {number}") for number in range(2_000)])
        lines = [line async for line in cp.export_thread("s")]

        async def slowly() -> AsyncIterator[str]:
            for number, line in enumerate(lines):
                if number in (10, 1_500):
                    assert (await cp.check())["problems"] == []
                yield line

        await cp.import_from(slowly(), as_id="n")
        assert (await cp.check())["problems"] == []

    with_cp(database, use)
