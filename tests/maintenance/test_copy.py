"""A copy holds everything that its source does, whatever interrupts it; and nothing else passes for one.

`source` and `target` are places: every test that takes both runs once for each pair of databases. Most scenes take
`other` in place of `target`: each database is the source of one pair and the target of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import apsw
import pytest

from byssus import Ask, AssistantMessage, Deny, Usage, UserMessage
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, checkpointer_for
from byssus.errors import InputError, StoreError, StoreUnusable
from byssus.maintenance.copy import Copied, Progress, copy
from byssus.messages import from_value
from byssus.queries.log import memories, threads
from byssus.queries.log.threads import MessageRow
from byssus.queries.moving import copying as queries
from byssus.queries.moving.tables import TABLES
from byssus.store import opening, sharing
from byssus.store.database import Row, Store, Tx
from byssus.values.thread_key import ThreadKey
from tests.support import forked
from tests.support.approvals import Deleting, delete
from tests.support.databases import DATABASES
from tests.support.exports import fill_tasks
from tests.support.leases import agent_on, claim, lease_of, unfinished, waiting
from tests.support.marks import mark, marked, memory_on, summarize
from tests.support.tool_calls import Acting, act, interrupt


@pytest.fixture(params=DATABASES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "source").mkdir()
    made = DATABASES[request.param](tmp_path / "source")
    yield made.place
    made.drop()


@pytest.fixture(params=DATABASES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database. Its tables are there: to make them takes longer than to copy."""
    (tmp_path / "target").mkdir()
    made = DATABASES[request.param](tmp_path / "target")
    yield made.place
    made.drop()


@pytest.fixture(params=DATABASES)
def new_target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """One that nobody has opened yet: there is no file, and no table."""
    made = DATABASES[request.param](tmp_path, is_made=False)
    yield made.place
    made.drop()


@pytest.fixture
def other(source: str, tmp_path: Path) -> Iterator[str]:
    """An empty database of the kind that the source is not. Its tables are there. One of the two is Postgres.

    Both are open during the test: each look at them would have to connect again.
    """
    (tmp_path / "other").mkdir()
    made = DATABASES["postgres" if source.endswith(".db") else "sqlite"](tmp_path / "other")
    with opened(source), opened(made.place):
        yield made.place
    made.drop()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE_ROWS", 3)


@contextlib.contextmanager
def opened(place: str) -> Iterator[Store]:
    store = opening.open(place)
    try:
        yield store
    finally:
        sharing.release(store)


def use(place: str, what: Callable[[Checkpointer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with checkpointer_for(place) as cp:
            await what(cp)

    asyncio.run(main())


def sql(place: str, *statements: str) -> None:
    def change(tx: Tx) -> None:
        for statement in statements:
            tx.run(statement)

    with opened(place) as store:
        store.write_now(change)


def say(place: str, thread_id: str, *texts: str, namespace: str = "") -> None:
    """Append messages, one commit each."""
    with opened(place) as store:
        for text in texts:
            body = f'{{"role":"user","content":[{{"type":"text","text":"{text}"}}]}}'
            store.write_now(threads.append, ThreadKey(namespace, thread_id), [MessageRow(text, "user", body)])


def everything(place: str) -> dict[str, list[Row]]:
    """Each row of each table, but for a lease's owner and its end."""

    def look(tx: Tx) -> dict[str, list[Row]]:
        return {table.name: tx.all(f"SELECT * FROM {table.name} ORDER BY 1, 2") for table in TABLES}

    with opened(place) as store:
        found = store.read_now(look)
    found["threads"] = [(*row[:10], row[11], *row[13:]) for row in found["threads"]]
    return found


def rows_of(copied: Copied) -> dict[str, int]:
    return {table.name: table.rows for table in copied.tables}


def written(copied: Copied) -> int:
    return sum(table.written for table in copied.tables)


EXTRA = {
    "nan": float("nan"),
    "inf": [float("inf"), float("-inf")],
    "huge": 10**400,
    "big": 2**63,
    "nul": "a\0b",
    "lone": "\ud800",
    "beyond": "𝄞 北京",
    "nested": {"": [None, True, 1.5e-300, {"a": []}]},
}


async def fill(cp: Checkpointer) -> None:
    """Something in every table, most of it as an agent leaves it."""
    await cp.append("plain", [UserMessage("hello \0 \ud800 𝄞"), AssistantMessage("hi"), from_value([1, {"a": "\0"}])])
    await cp.append("plain", from_value({"role": "röle\0\ud800", "content": "a note", "id": "x\0y\udfff"}))
    await cp.save_extra("plain", EXTRA)
    await cp.append("thread \u2028 北京 '\"%s:x", [UserMessage(f"message {n}") for n in range(20)])
    asking = Deleting()
    asked = await agent_on(cp, [[delete("/a"), delete("/b")]], "asking", tools=[asking.tool]).prompt("Delete them.")
    assert asked.stop_reason == "waiting"
    await cp.answer("asking", "/a", "approve")
    both = Deleting(approval=Ask("Both?", approvers=2, expires=1e6, default=Deny("too late")))
    await agent_on(cp, [[delete("/c")]], "two people", tools=[both.tool]).prompt("Delete it.")
    await cp.answer("two people", "/c", "approve", by="ada", source="web")
    done = await agent_on(cp, [[act(1), act(2)], "done"], "done", tools=[Acting().tool]).prompt("go")
    assert done.stop_reason == "stop"
    await interrupt(cp, Acting(hangs=2), act(1), act(2))  # reserved places that nobody has filled
    await cp.steer("t", "not so fast")
    await cp.follow_up("t", "and then?")
    await cp.steer("plain", "nobody drives this one")
    lease = await claim(cp, thread_id="arriving")
    partial = '{"role":"assistant","content":[{"type":"text","text":"Once upon"}],"stop_reason":"aborted"}'
    piece = '[[0,"text",0,"a time"]]'
    await cp.store.write(threads.save_partial, ThreadKey("", "arriving"), partial, by=lease, piece=piece)
    for namespace in ("", "other", "x:y"):
        await cp.store.write(threads.append, ThreadKey(namespace, "plain"), [MessageRow("m", "user", '"hi"')])
    preferences = {"ui": {"theme": "dark"}, "\0": "\ud800"}
    await cp.create_user("Alice 北京", "a@b", 10**6, user_id="alice", preferences=preferences)
    await fill_versions(cp)
    await fill_session(cp)
    await fill_memories(cp)


async def fill_memories(cp: Checkpointer) -> None:
    """Marks and summaries: on a fork that has some of its own, and in a memory."""
    await mark(cp, "plain", [1, 3], "b", "a", "北京", "b")
    await summarize(cp, "plain", "\0 \ud800 𝄞")
    await mark(cp, "versions", [1, 5], "shared")
    await cp.fork("versions", "c3", new_id="marked fork")
    await mark(cp, "marked fork", [2], "own")
    messages = [MessageRow(f"m{n}", "user", f'{{"content":"{n}"}}', 1) for n in range(5)]
    await cp.store.write(memories.add, ThreadKey("alice", "main"), messages, ["hint", "hint"])
    await cp.store.write(memories.delete, ThreadKey("alice", "main"), {"m2"})
    await cp.store.write(memories.summarize, ThreadKey("alice", "main"), '"what was left out"')


async def fill_session(cp: Checkpointer) -> None:
    """What an application keeps: in a session, and of one that it has deleted."""
    await cp.set_price("a model", input=0.1, output=1e-300)
    for name in ("session", "deleted"):
        await cp.create_session("alice", "标题", session_id=name, metadata={"a": [1.5, "\0"]})
        await cp.save_message(name, "user", "hello", token_count=7)
        await cp.append(name, AssistantMessage("hi", model="a model", usage=Usage(input=3, output=4)))
        call = await cp.log_tool_call(name, "look", {"a": "\0"}, [1.5, "\ud800"], 0.1, False, "no")
        await cp.update_tool_call(call, output_data={"b": 2})
        task = await cp.create_task(name, "a type", {"a": "\0"}, priority=-3)
        await cp.update_task_status(task["id"], "failed", ["\ud800"])
    await fill_tasks(cp, "session", "alice")
    await cp.store.write(schedule)
    await cp.consume_quota("alice", 7)
    await cp.pause_session("session")
    await cp.delete_thread("deleted")


def schedule(tx: Tx) -> None:
    for name, thread in (("nightly", "NULL"), ("hourly", "(SELECT key FROM threads WHERE id = 'session')")):
        tx.run(
            "INSERT INTO schedules (id, thread, owner, type, payload, priority, max_retries, cron, every, zone, missed,"
            f" status, next_at, created_at, updated_at) VALUES (:id, {thread}, 'alice', 't', '[]', 0, 3, NULL, 0.5,"
            " 'UTC', 'one', 'active', :now, :now, :now)",
            id=name,
            now=tx.now(),
        )


async def fill_versions(cp: Checkpointer) -> None:
    """Checkpoints, a fork that was rewound and does not show all of them, and the mark of a deleted thread."""
    messages = [UserMessage(f"message {n} 北京") for n in range(5)]
    for step in range(1, 6):
        about = CheckpointMetadata("versions", f"c{step}", step, tags=["\0", "\ud800"], summary="北京")
        await cp.put(Checkpoint(about, messages[:step], EXTRA, {"result": step}, "next"))
    await cp.fork("versions", "c4", new_id="fork", user_id="alice")
    await cp.rewind("fork", "c3")
    await cp.put(Checkpoint(CheckpointMetadata("fork", "c3", 3), [*messages[:2], UserMessage("other")]))
    await cp.delete_before("fork", 2)
    await cp.set_ttl("fork", 30)
    await cp.fork("fork", new_id="gone")
    await cp.delete_thread("gone")


@pytest.fixture
def filled(source: str) -> str:
    use(source, fill)
    return source


# --- what is copied ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 500])
def test_every_row_of_every_table_is_copied_as_it_is(
    filled: str, new_target: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "PAGE_ROWS", rows)
    before = everything(filled)
    assert [name for name, rows in before.items() if not rows] == [], "there is nothing to copy in one of the tables"
    copied = copy(filled, new_target)
    assert everything(new_target) == before == everything(filled)
    assert rows_of(copied) == {name: len(found) for name, found in before.items()}
    assert written(copied) == sum(rows_of(copied).values())
    assert not copied.was_finished


def test_threads_read_the_same_in_the_copy(filled: str, target: str) -> None:
    copy(filled, target)

    async def compare(cp: Checkpointer) -> None:
        async with checkpointer_for(filled) as original:
            listed, there = await cp.threads(), await original.threads()
            running = [info.id for info in there if info.state == "running"]  # a run stays with its database
            assert running == ["arriving"]
            stopped = [info._replace(state="interrupted") if info.id in running else info for info in there]
            assert listed == stopped
            assert len(listed) == 11
            for info in listed:
                ours, theirs = await cp.load(info.id), await original.load(info.id)
                assert repr(ours) == repr(theirs)  # nan is not equal to itself
                assert await cp.tool_calls(info.id) == await original.tool_calls(info.id)
                assert await cp.inbox(info.id) == await original.inbox(info.id)
                assert await cp.tree(info.id) == await original.tree(info.id)
                for each in await cp.list_checkpoints(info.id):
                    ids = each.checkpoint_id, info.id
                    assert repr(await cp.get(*ids)) == repr(await original.get(*ids))
            assert await cp.list_threads() == await original.list_threads()
            assert [each.checkpoint_id for each in await cp.list_checkpoints("fork")] == ["c3", "c2"]
            assert await cp.pending() == await original.pending()

    use(target, compare)


@pytest.mark.processes
def test_a_memory_reads_the_same_in_the_copy_and_goes_on_there(filled: str, other: str) -> None:
    copy(filled, other)

    async def compare(cp: Checkpointer) -> None:
        async with checkpointer_for(filled) as original:
            for name, namespace in (("plain", ""), ("versions", ""), ("marked fork", ""), ("main", "alice")):
                seen = await marked(cp, name, namespace)
                assert seen == await marked(original, name, namespace)
                assert seen[1]
        async with memory_on(other, "main", "alice") as memory:
            found = await memory.get_memory(mark="hint")
            assert [message.content for message in found] == ["what was left out", "0", "1", "3", "4"]
            assert await memory.update_messages_mark("new", "hint", ["m3"]) == 1
            assert await memory.delete_by_mark("new") == 1
            assert await memory.delete(["m4"]) == 1
            assert await memory.size() == 2

    use(other, compare)


def test_a_copy_of_a_copy_has_the_same_hash(filled: str, target: str, tmp_path: Path) -> None:
    first = copy(filled, target)
    second = copy(target, str(tmp_path / "back.db"))
    assert first.sha256 == second.sha256
    assert [table.sha256 for table in first.tables] == [table.sha256 for table in second.tables]
    assert everything(str(tmp_path / "back.db")) == everything(filled)


@pytest.mark.large
@pytest.mark.processes
def test_a_message_of_twenty_megabytes_is_copied(source: str, other: str) -> None:
    say(source, "t", "before", "x" * 20_000_000, "after")
    assert rows_of(copy(source, other))["messages"] == 3
    assert everything(other) == everything(source)


def test_an_empty_database_is_copied(source: str, new_target: str) -> None:
    use(source, lambda cp: asyncio.sleep(0))
    assert set(rows_of(copy(source, new_target)).values()) == {0}
    say(source, "t", "hello")
    assert rows_of(copy(source, new_target))["messages"] == 1  # there is still nothing in the target


def test_a_page_ends_where_its_messages_get_long(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say(source, "t", *(letter * 1000 for letter in "abcdefg"))
    monkeypatch.setattr(queries, "PAGE_BYTES", 2500)
    (messages,) = [table for table in TABLES if table.name == "messages"]
    sizes = []
    with opened(source) as store:
        after = messages.start
        while after != messages.end:
            rows, after = store.read_now(queries.page, messages, after, messages.end)
            sizes.append(len(rows))
    assert sizes == [2, 2, 2, 1]
    monkeypatch.setattr(queries, "PAGE_BYTES", 10)
    with opened(source) as store:
        assert len(store.read_now(queries.page, messages, messages.start, messages.end)[0]) == 1


@pytest.mark.processes
def test_a_run_that_goes_on_in_the_source_is_an_interrupted_one_in_the_copy(source: str, other: str) -> None:
    async def begin(cp: Checkpointer) -> None:
        await claim(cp, "far-away:17", "hello")

    async def look(cp: Checkpointer) -> None:
        lease = await lease_of(cp)
        assert (lease.owner, lease.epoch, lease.until, lease.run) == (None, 1, None, "their-run")
        assert await unfinished(cp) == ["t"]
        assert (await agent_on(cp, ["hello yourself"]).resume()).text == "hello yourself"
        assert (await lease_of(cp)).epoch == 2  # fencing goes on where it was

    use(source, begin)
    copy(source, other)
    use(other, look)

    async def still_driven(cp: Checkpointer) -> None:
        assert (await lease_of(cp)).owner == "far-away:17"
        assert await unfinished(cp) == []

    use(source, still_driven)


@pytest.mark.processes
def test_what_waits_in_the_copy_can_be_answered_and_heard_there(filled: str, other: str) -> None:
    copy(filled, other)
    asking = Deleting()

    async def go_on(cp: Checkpointer) -> None:
        assert [call.call_id for call in await cp.pending()] == ["/b", "/c"]
        (question,) = await cp.pending("two people")
        assert [given.by for given in question.approvals] == ["ada"]
        assert (question.approvers, question.default) == (2, "deny")
        assert await cp.answer("two people", "/c", "approve", by="bob")
        await cp.answer("asking", "/b", "deny")
        result = await agent_on(cp, ["as you wish"], "asking", tools=[asking.tool]).resume()
        assert (result.text, asking.deleted) == ("as you wish", ["/a"])
        assert await waiting(cp, "t") == ["steer: not so fast", "follow_up: and then?"]
        assert await waiting(cp, "plain") == ["steer: nobody drives this one"]

    use(other, go_on)


@pytest.mark.processes
def test_what_is_written_to_the_copy_gets_keys_of_its_own(filled: str, other: str) -> None:
    copy(filled, other)
    before = everything(other)
    use(other, fill_more)
    after = everything(other)
    for name in ("threads", "branches", "messages", "tool_calls", "inbox", "checkpoints"):
        new = {row[0] for row in after[name]} - {row[0] for row in before[name]}
        assert new, name
        assert min(new) > max(row[0] for row in before[name]), name


async def fill_more(cp: Checkpointer) -> None:
    await agent_on(cp, [[act(1)], "done"], "new", tools=[Acting().tool]).prompt("go")
    await cp.steer("new", "hello")
    await cp.put(Checkpoint(CheckpointMetadata("new", "new")))


# --- interruptions ----------------------------------------------------------------------------------------------------

# Its writes are counted before and after each commit, and it dies at one of them.
COPY_AND_DIE = """\
import os, signal, sys
from byssus.maintenance import copy as copying
from byssus.queries.moving import copying as queries
from byssus.store.database import Store

source, target, left = sys.argv[1], sys.argv[2], int(sys.argv[3])

def boundary(_):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

queries.PAGE_ROWS = 1
Store.boundary = staticmethod(boundary)
copying.copy(source, target)
"""


@pytest.mark.processes
def test_killed_at_any_commit_and_run_again_it_ends_equal(filled: str, new_target: str, small_pages: None) -> None:
    for number in (0, 1, 2, 3, 4, 5, 7, 12, 19, 20):
        done = forked.run(["-W", "error", "-c", COPY_AND_DIE, filled, new_target, str(number)])
        assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    missing = {name: len(found) for name, found in everything(filled).items()}
    for name, found in everything(new_target).items():
        missing[name] -= len(found)
    copied = copy(filled, new_target)
    assert 0 < written(copied) == sum(missing.values()) < sum(rows_of(copied).values())  # it skips what is there
    assert everything(new_target) == everything(filled)


class Stop(BaseException):
    pass


def stop_at(step: str, table: str) -> Callable[[Progress], None]:
    def hear(progress: Progress) -> None:
        if (progress.step, progress.table) == (step, table):
            raise Stop

    return hear


@pytest.mark.parametrize(
    ("step", "table"),
    [("copying", "threads"), ("copying", "messages"), ("verifying", "threads"), ("verifying", "inbox")],
)
@pytest.mark.processes
def test_a_copy_that_was_stopped_goes_on_and_takes_what_the_source_wrote_meanwhile(
    filled: str, other: str, small_pages: None, step: str, table: str
) -> None:
    with pytest.raises(Stop):
        copy(filled, other, stop_at(step, table))
    say(filled, "plain", "one more")
    say(filled, "new", "another")
    sql(filled, "DELETE FROM partials", "DELETE FROM inbox")
    copied = copy(filled, other)
    assert 0 < written(copied) < sum(rows_of(copied).values())
    assert everything(other) == everything(filled)


# Threads that go, and others that take their keys, their names, or both: nothing of it may meet a constraint.
GONE = (
    "DELETE FROM segments WHERE branch IN (SELECT key FROM branches WHERE thread = {key})",
    "DELETE FROM messages WHERE branch IN (SELECT key FROM branches WHERE thread = {key})",
    "DELETE FROM tool_calls WHERE thread = {key}",
    "DELETE FROM threads WHERE key = {key}",
)


def forget(place: str, *keys: int) -> None:
    sql(place, *(statement.format(key=key) for key in keys for statement in GONE))


def recreate(place: str) -> None:
    forget(place, 2)
    say(place, "b", "again")


def exchange(place: str) -> None:
    sql(place, *(f"UPDATE threads SET id = '{name}' WHERE id = '{old}'" for name, old in ("?a", "ab", "b?")))


def take_keys(place: str) -> None:
    """Other rows, under the keys that were used before."""
    forget(place, 4, 3, 2)
    say(place, "d", "1", "2")
    say(place, "b", "3")
    sql(
        place,
        "UPDATE messages SET key = key + 1000 WHERE key > 2",
        "UPDATE messages SET key = 1010 - key WHERE key > 1000",
    )


CHANGES: dict[str, Callable[[str], None]] = {
    "more messages": lambda place: say(place, "b", "5", "6", "7", "8"),
    "a new thread": lambda place: say(place, "e", "5"),
    "a message that was changed": lambda place: sql(place, "UPDATE messages SET body = '{}' WHERE key = 3"),
    "a thread that was deleted": lambda place: forget(place, 2),
    "all but one deleted": lambda place: forget(place, 1, 2, 3),
    "everything deleted": lambda place: forget(place, 1, 2, 3, 4),
    "deleted and made anew": recreate,
    "names exchanged": exchange,
    "keys taken by others": take_keys,
    "seqs exchanged": lambda place: sql(
        place,
        "UPDATE messages SET seq = seq + 100 WHERE branch = 1",
        "UPDATE messages SET seq = 104 - seq WHERE branch = 1",
    ),
}


def once(step: str, table: str, act: Callable[[], None]) -> Callable[[Progress], None]:
    """Do something at the first page of a table in a step."""
    steps = [(step, table)]

    def hear(progress: Progress) -> None:
        if steps == [(progress.step, progress.table)]:
            steps.clear()
            act()

    return hear


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("table", ["threads", "messages"])
@pytest.mark.processes
def test_what_the_source_writes_during_the_copy_is_in_it(
    source: str, other: str, small_pages: None, change: str, table: str
) -> None:
    for thread_id in "abcd":
        say(source, thread_id, "1", "2", "3")
    before = everything(source)
    copy(source, other, once("copying", table, lambda: CHANGES[change](source)))
    assert everything(other) == everything(source) != before


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.processes
def test_what_the_source_writes_during_the_verification_is_in_the_copy_whole_or_not_at_all(
    source: str, other: str, small_pages: None, change: str
) -> None:
    for thread_id in "abcd":
        say(source, thread_id, "1", "2", "3")
    before = everything(source)
    copy(source, other, once("verifying", "segments", lambda: CHANGES[change](source)))
    assert before != everything(source)
    assert everything(other) in (before, everything(source))


@pytest.fixture
def unfinished_copy(source: str, other: str) -> Iterator[tuple[Store, int]]:
    """A target with all of its rows and an open mark, and the mark's key."""
    for thread_id in "abcd":
        say(source, thread_id, "1", "2", "3")
    with pytest.raises(Stop):
        copy(source, other, stop_at("verifying", "threads"))
    with opened(other) as store:
        mark = store.read_now(queries.last_mark)
        assert mark is not None
        yield store, mark.key


@pytest.mark.processes
def test_what_the_source_has_deleted_is_gone_after_one_pass(
    source: str, other: str, unfinished_copy: tuple[Store, int]
) -> None:
    forget(source, 1, 2)
    heard: list[Progress] = []
    copy(source, other, heard.append)
    assert everything(other) == everything(source)
    assert [progress.step for progress in heard if progress.table == "threads"] == ["comparing", "copying", "verifying"]


@pytest.mark.parametrize("name", ["threads", "branches"])
@pytest.mark.processes
def test_a_row_stays_while_others_point_to_it(other: str, unfinished_copy: tuple[Store, int], name: str) -> None:
    store, mark = unfinished_copy
    (table,) = [table for table in TABLES if table.name == name]
    before = everything(other)
    store.write_now(queries.make_room, mark, table, table.start, table.end, [])
    after = everything(other)
    names = slice(len(table.key), len(table.key) + len(table.unique))  # of which it makes room for others
    assert [row[: names.start] + row[names.stop :] for row in after.pop(name)] == [
        row[: names.start] + row[names.stop :] for row in before.pop(name)
    ]
    assert after == before


@pytest.mark.processes
def test_a_name_that_another_row_still_has_waits_until_there_is_room(
    other: str, unfinished_copy: tuple[Store, int]
) -> None:
    store, mark = unfinished_copy
    threads_table = TABLES[0]
    page = (mark, threads_table, threads_table.start, threads_table.end)
    first, second, *others = store.read_now(queries.between, *page[1:])
    wanted = [(first[0], *second[1:]), (second[0], *first[1:]), *others]
    store.write_now(queries.put, *page, wanted)
    assert store.read_now(queries.between, *page[1:]) == [first, second, *others]
    store.write_now(queries.make_room, *page, wanted)
    store.write_now(queries.put, *page, wanted)
    assert store.read_now(queries.between, *page[1:]) == wanted


@pytest.mark.processes
def test_a_source_that_is_written_to_all_the_time_is_no_success(source: str, other: str) -> None:
    say(source, "t", "1")

    def hear(progress: Progress) -> None:
        if (progress.step, progress.table) == ("verifying", "threads"):
            say(source, "t", "more")

    with pytest.raises(StoreError, match=r"still differs.*table messages: \d+ rows.*being written to.*run the same"):
        copy(source, other, hear)
    copy(source, other)
    assert everything(other) == everything(source)


# --- verification -----------------------------------------------------------------------------------------------------

DAMAGES = {
    "a flipped byte": ("messages", "UPDATE messages SET body = '{\"x\":1}' WHERE seq = 4"),
    "a number": ("threads", "UPDATE threads SET version = version + 1"),
    "a missing message": ("messages", "DELETE FROM messages WHERE seq = 4"),
    "the last message missing": ("messages", "DELETE FROM messages WHERE seq = 7"),
    "no messages": ("messages", "DELETE FROM messages"),
    "an extra message": (
        "messages",
        "INSERT INTO messages (key, branch, seq, id, role, body, created_at) VALUES (99, 1, 8, '', '', '', '')",
    ),
    "an extra row where the source has none": (
        "inbox",
        "INSERT INTO inbox (thread, kind, id, role, body, created_at) VALUES (1, '', '', '', '', '')",
    ),
    "another segment": ("segments", "UPDATE segments SET upto_seq = 3"),
    "an extra mark": ("marks", "INSERT INTO marks (branch, message, mark) VALUES (1, 1, 'm')"),
    "a summary": ("branches", "UPDATE branches SET summary = '\"s\"'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.processes
def test_a_finished_copy_that_differs_is_told_and_left_alone(
    source: str, other: str, small_pages: None, damage: str
) -> None:
    say(source, "t", *"1234567")
    copy(source, other)
    table, statement = DAMAGES[damage]
    sql(other, statement)
    before = everything(other)
    counts = rf"table {table}: {len(everything(source)[table])} rows in the source, {len(before[table])} in the target"
    with pytest.raises(InputError, match=rf"finished at.*differ.*{counts}; between.*name an empty database"):
        copy(source, other)
    assert everything(other) == before


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.processes
def test_an_unfinished_copy_that_differs_is_made_equal(source: str, other: str, small_pages: None, damage: str) -> None:
    say(source, "t", *"1234567")
    with pytest.raises(Stop):
        copy(source, other, stop_at("verifying", "messages"))
    sql(other, DAMAGES[damage][1])
    copy(source, other)
    assert everything(other) == everything(source)


@pytest.mark.parametrize("damage", [name for name, (table, _) in DAMAGES.items() if table != "threads"])
@pytest.mark.processes
def test_a_copy_that_cannot_be_made_equal_is_never_called_finished(
    source: str, other: str, small_pages: None, damage: str
) -> None:
    say(source, "t", *"1234567")

    def hear(progress: Progress) -> None:
        if (progress.step, progress.table) == ("verifying", "threads"):
            sql(other, DAMAGES[damage][1])

    with pytest.raises(StoreError, match="still differs"):
        copy(source, other, hear)
    with opened(other) as store:
        mark = store.read_now(queries.last_mark)
    assert mark is not None
    assert mark.finished_at is None


@pytest.mark.processes
def test_a_finished_copy_is_compared_and_not_written(filled: str, other: str) -> None:
    first = copy(filled, other)
    again = copy(filled, other)
    assert again.was_finished
    assert written(again) == 0
    assert (again.sha256, rows_of(again)) == (first.sha256, rows_of(first))
    with opened(other) as store:
        rows = store.read_now(lambda tx: tx.all("SELECT source, sha256 FROM copies"))
    assert [row[1] for row in rows] == [first.sha256]


@pytest.mark.processes
def test_when_another_process_has_finished_the_copy_nothing_more_is_written(
    filled: str, other: str, small_pages: None
) -> None:
    def hear(progress: Progress) -> None:
        if (progress.step, progress.table, progress.done) == ("copying", "threads", 3):
            sql(other, "UPDATE copies SET finished_at = 'now'")

    with pytest.raises(StoreError, match="another process has finished"):
        copy(filled, other, hear)
    assert len(everything(other)["threads"]) == 3
    assert everything(other)["messages"] == []


@pytest.mark.processes
def test_the_hash_is_that_of_the_rows_and_not_of_the_pages(
    filled: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = copy(filled, other)
    monkeypatch.setattr(queries, "PAGE_ROWS", 2)
    assert copy(filled, other).sha256 == first.sha256
    sql(filled, "UPDATE messages SET body = '[]' WHERE key = 1")
    sql(other, "UPDATE messages SET body = '[]' WHERE key = 1")
    changed = copy(filled, other)
    assert changed.sha256 != first.sha256
    assert {
        a.name for a, b in zip(first.tables, changed.tables, strict=True) if a != b._replace(written=a.written)
    } == {"messages"}


@pytest.mark.processes
def test_progress_counts_to_its_end(filled: str, other: str, small_pages: None) -> None:
    heard: list[Progress] = []
    copied = copy(filled, other, heard.append)
    steps = list(dict.fromkeys(progress.step for progress in heard))
    assert steps == ["copying", "verifying"]  # where there is nothing, there is nothing to compare
    for step in ("copying", "verifying"):
        (*_, last) = (progress for progress in heard if progress.step == step)
        assert last.done == last.total == sum(rows_of(copied).values())
    done = [progress.done for progress in heard if progress.step == "copying"]
    assert done == sorted(done)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_target_that_somebody_works_with_is_refused_and_left_alone(filled: str, other: str) -> None:
    say(other, "theirs", "hello")
    before = everything(other)
    with opened(other) as store, pytest.raises(InputError, match=rf"{re.escape(store.name)} holds.*an empty database"):
        copy(filled, other)
    assert everything(other) == before


@pytest.mark.processes
def test_an_unfinished_copy_of_another_source_is_refused(filled: str, other: str, tmp_path: Path) -> None:
    say(str(tmp_path / "other.db"), "t", "hello")
    with pytest.raises(Stop):
        copy(filled, other, stop_at("copying", "messages"))
    before = everything(other)
    with pytest.raises(
        InputError, match=r"is an unfinished copy of .*, and not of .*other\.db; name an empty database"
    ):
        copy(str(tmp_path / "other.db"), other)
    assert everything(other) == before


@pytest.mark.processes
def test_an_unfinished_copy_is_no_source(filled: str, other: str, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        copy(filled, other, stop_at("copying", "messages"))
    with pytest.raises(InputError, match="is itself an unfinished copy"):
        copy(other, str(tmp_path / "third.db"))
    assert not (tmp_path / "third.db").exists()


def test_a_database_is_not_copied_into_itself(filled: str) -> None:
    before = everything(filled)
    with pytest.raises(InputError, match="cannot be copied into itself"):
        copy(filled, filled)
    assert everything(filled) == before


def test_a_file_is_not_copied_into_itself_by_another_name(tmp_path: Path) -> None:
    say(str(tmp_path / "a.db"), "t", "hello")
    (tmp_path / "b.db").symlink_to(tmp_path / "a.db")
    with pytest.raises(InputError, match="cannot be copied into itself"):
        copy(str(tmp_path / "a.db"), str(tmp_path / "b.db"))


@pytest.mark.parametrize("name", ["nowhere.db", "folder/nowhere.db", "~nobody-of-that-name/nowhere.db"])
def test_a_source_that_is_not_there_is_an_error_and_nothing_is_made(new_target: str, tmp_path: Path, name: str) -> None:
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"there is no database at .*nowhere\.db"):
        copy(name if name.startswith("~") else str(tmp_path / name), new_target)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_database_in_memory_is_refused(side: str, tmp_path: Path) -> None:
    say(str(tmp_path / "a.db"), "t", "hello")
    with pytest.raises(InputError, match="name a file"):
        copy(*((":memory:", "b.db") if side == "source" else (str(tmp_path / "a.db"), ":memory:")))


@pytest.mark.parametrize("side", ["source", "target"])
def test_another_programs_database_is_refused_and_left_alone(side: str, tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours.db"), tmp_path / "theirs.db"
    say(ours, "t", "hello")
    connection = apsw.Connection(str(theirs))
    connection.execute("CREATE TABLE diary (entry)")
    connection.close()
    before = theirs.read_bytes()
    with pytest.raises(StoreUnusable, match="another program's database"):
        copy(*((str(theirs), ours) if side == "source" else (ours, str(theirs))))
    assert theirs.read_bytes() == before
