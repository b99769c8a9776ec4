"""What was exported comes back as it was, in any database; and nothing else is taken for an export."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from byssus import Agent, AssistantMessage, ToolCall, ToolResultMessage, UserMessage
from byssus.checkpointer import Checkpointer, ToolCallRecord, keep_last
from byssus.errors import InputError, NotFound, StoreError
from byssus.maintenance.export import export_thread, export_user
from byssus.maintenance.import_ import import_from
from byssus.messages import Message, dumps
from byssus.queries.accounts import usage as counting
from byssus.queries.log import threads
from byssus.queries.log.threads import MessageRow
from byssus.queries.moving import exporting as queries
from byssus.queries.moving.tables import TABLES
from byssus.queries.versions import checkpoints, deleting, putting
from byssus.store.database import Row, Tx
from byssus.threads.encoding import message_row
from byssus.values.thread_key import ThreadKey
from tests.support import forked
from tests.support.accounts import known
from tests.support.approvals import Deleting
from tests.support.checkpointers import loaded, texts, with_cp, with_users
from tests.support.databases import DATABASES, Database
from tests.support.exports import PREFERENCES, checkpoint, fill, fill_session, said, sealed
from tests.support.leases import PAST, agent_on, claim, unfinished, with_two
from tests.support.marks import mark, marked, summarize
from tests.support.tool_calls import Acting


@pytest.fixture(params=DATABASES)
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A second database, of either kind."""
    (tmp_path / "other").mkdir()
    made = DATABASES[request.param](tmp_path / "other")
    yield made
    made.drop()


@pytest.fixture
def opposite(database: Database, tmp_path: Path) -> Iterator[Database]:
    """A second database, of the kind that the first one is not: each kind is read once, and written once."""
    (tmp_path / "opposite").mkdir()
    made = DATABASES["postgres" if database.system == "sqlite" else "sqlite"](tmp_path / "opposite")
    yield made
    made.drop()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE_ROWS", 2)


def with_both(
    database: Database, other: Database, use: Callable[[Checkpointer, Checkpointer], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp, other.checkpointer() as there:
            await use(cp, there)

    asyncio.run(main())


async def exported(cp: Checkpointer, thread_id: str = "t") -> list[str]:
    return [line async for line in export_thread(cp.store, thread_id)]


async def exported_user(cp: Checkpointer, user_id: str) -> list[str]:
    return [line async for line in export_user(cp.store, user_id)]


async def bring(cp: Checkpointer, lines: Any, as_id: str | None = None) -> list[str]:
    return await import_from(cp.store, lines, as_id, trusted=True)


async def everything(cp: Checkpointer) -> dict[str, list[Row]]:
    def look(tx: Tx) -> dict[str, list[Row]]:
        return {table.name: tx.all(f"SELECT * FROM {table.name} ORDER BY 1, 2") for table in TABLES}

    return await cp.store.read(look)


async def view(cp: Checkpointer, thread_id: str) -> list[Any]:
    """All that a reader of a thread can see, what its rewinds have left included."""

    def names(tx: Tx) -> list[str]:
        thread = checkpoints.thread_state(tx, ThreadKey("", thread_id))
        assert thread is not None
        lines = checkpoints.lines(tx, thread.key)
        return sorted({row.id for line in lines for row in checkpoints.shown(tx, line)})

    thread = await loaded(cp, thread_id)
    return [
        repr(thread._replace(position=threads.Position(thread.position.head, 0), made=(0, ""))),
        await cp.info(thread_id),
        await cp.list_checkpoints(thread_id),
        [repr(await cp.get(name, thread_id)) for name in await cp.store.read(names)],
        await cp.tool_calls(thread_id),
        await cp.inbox(thread_id),
        await cp.get_session(thread_id),
        await cp.list_tool_calls(thread_id),
        await cp.list_tasks(thread_id),
        await cp.get_session_usage(thread_id),
        await marked(cp, thread_id),
    ]


# --- there and back ---------------------------------------------------------------------------------------------------


def test_every_thread_is_the_same_in_another_database(database: Database, other: Database, small_pages: None) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        for name in await fill(cp):
            lines = await exported(cp, name)
            assert await bring(there, lines) == [name]
            assert await view(there, name) == await view(cp, name)
            assert await exported(there, name) == lines == await exported(cp, name)
        assert {info.id for info in await there.threads()} == {info.id for info in await cp.threads()}
        assert await there.list_threads() == await cp.list_threads()
        assert len(await there.pending()) == len(await cp.pending()) == 1

    with_both(database, other, use)


def test_a_deleted_thread_comes_back_as_it_was(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for name in await fill(cp):
            lines, seen = await exported(cp, name), await view(cp, name)
            await cp.delete_thread(name)
            assert await bring(cp, lines) == [name]
            assert await view(cp, name) == seen
            assert await exported(cp, name) == lines

    with_cp(database, use)


def test_a_fork_keeps_what_it_shows_when_all_else_is_deleted_and_so_does_its_export(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        await cp.delete_thread("o")
        for name in ("f", "g", "early"):
            lines, seen = await exported(cp, name), await view(cp, name)
            assert await bring(cp, lines, as_id="copy") == ["copy"]
            copied = await exported(cp, "copy")
            assert [json.loads(line) for line in copied[1:-1]] == [json.loads(line) for line in lines[1:-1]]
            assert (await view(cp, "copy"))[3] == [each.replace(repr(name), "'copy'") for each in seen[3]]
            await cp.delete_thread("copy")

    with_cp(database, use)


def test_what_is_deleted_after_an_import_leaves_nothing(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        for name in await fill(cp):
            await bring(there, await exported(cp, name))
        for info in await there.threads():
            await there.delete_thread(info.id)
        left = await everything(there)
        assert {name for name, rows in left.items() if rows} == {"floors", "users", "usage", "tool_usage"}
        await there.erase_user("alice")
        left = await everything(there)
        assert {name for name, rows in left.items() if rows} == {"floors"}

    with_both(database, opposite, use)


def test_an_imported_thread_goes_on_like_the_original(database: Database, other: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill(cp)
        await bring(there, await exported(cp, "f"))
        for each in (cp, there):
            await each.rewind("f", "c5")
            await each.append("f", UserMessage("on"))
            await each.put(checkpoint("f", "c2", 12, [*said(5), UserMessage("on"), UserMessage("and on")]))
            await each.fork("f", "c3", new_id="again")
            await each.prune("f", keep_last(2))
        assert await texts(there, "f") == await texts(cp, "f")
        assert await texts(there, "again") == await texts(cp, "again")
        for name in ("f", "again"):
            ours, theirs = await there.list_checkpoints(name), await cp.list_checkpoints(name)
            assert [(each.checkpoint_id, each.step) for each in ours] == [(c.checkpoint_id, c.step) for c in theirs]

    with_both(database, other, use)


def test_questions_are_answered_and_interrupted_runs_resumed_where_they_were_imported(
    database: Database, opposite: Database
) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill(cp)
        for name in ("asking", "t"):
            await bring(there, await exported(cp, name))
        asking = Deleting()
        await there.answer("asking", "/b", "deny")
        result = await agent_on(there, ["as you wish"], "asking", tools=[asking.tool]).resume()
        assert (result.text, asking.deleted) == ("as you wish", ["/a"])
        assert await unfinished(there) == ["t"]
        acting = Acting()
        resumed = await agent_on(there, ["I see", "then this"], "t", tools=[acting.tool]).resume()
        assert (resumed.stop_reason, acting.runs) == ("stop", [])

    with_both(database, opposite, use)


def test_a_question_that_a_rewind_has_left_comes_back_with_it_where_it_was_imported(
    database: Database, opposite: Database
) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill(cp)
        left = await cp.rewind("asking", 1)
        assert left is not None
        lines = await exported(cp, "asking")
        await bring(there, lines)
        assert await view(there, "asking") == await view(cp, "asking")
        assert await there.pending("asking") == []
        for each in (cp, there):
            await each.rewind("asking", left)
        assert [call.call_id for call in await there.pending("asking")] == ["/a", "/b"]
        assert await there.pending("asking") == await cp.pending("asking")

    with_both(database, opposite, use)


def test_a_lease_does_not_travel_and_a_partial_does(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        lease = await claim(cp, "far-away:17", "hello")
        partial = '{"role":"assistant","content":[{"type":"text","text":"Once upon"}],"stop_reason":"aborted"}'
        await cp.store.write(threads.save_partial, ThreadKey("", "t"), partial, by=lease)
        lines = await exported(cp)
        assert not any("far-away" in line for line in lines)
        await bring(there, lines)
        thread = await loaded(there, "t")
        assert thread.partial is not None
        assert (thread.partial.text, thread.run_id) == ("Once upon", "their-run")
        assert await unfinished(there) == ["t"]
        assert await unfinished(cp) == []
        assert await exported(there) == lines
        assert (await agent_on(there, ["hello yourself"]).resume()).text == "hello yourself"

    with_both(database, opposite, use)


@pytest.mark.large
def test_five_thousand_messages_and_checkpoints(database: Database, opposite: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        rows = [MessageRow(f"m{n}", "user", dumps({"role": "user", "content": f"{n} 北京"})) for n in range(5_000)]
        await cp.store.write(threads.append, ThreadKey("", "t"), rows)
        for step in range(1_100):
            await cp.store.write(
                putting.put_here,
                ThreadKey("", "t"),
                checkpoints.NewCheckpointRow(f"c{step}", 0, None, '{"tags":[],"summary":null}', "{}"),
                by=threads.UNLEASED,
            )
        lines = await exported(cp)
        assert len(lines) == 1 + 1 + 5_000 + 1_100 + 1 + 1
        (tmp_path / "t.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        await bring(there, tmp_path / "t.jsonl")
        assert await exported(there) == lines
        assert len((await loaded(there, "t")).messages) == 5_000

    with_both(database, opposite, use)


@pytest.mark.large
def test_a_message_of_twenty_megabytes(database: Database, opposite: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await cp.append("t", [UserMessage("before"), UserMessage("北" * 7_000_000), UserMessage("after")])
        with (tmp_path / "t.jsonl").open("w", encoding="utf-8") as file:
            async for line in export_thread(cp.store, "t"):
                file.write(f"{line}\n")
        assert (tmp_path / "t.jsonl").stat().st_size > 20_000_000
        await bring(there, str(tmp_path / "t.jsonl"))
        assert repr((await loaded(there, "t")).messages) == repr((await loaded(cp, "t")).messages)

    with_both(database, opposite, use)


def test_json_is_kept_to_the_byte(database: Database, other: Database) -> None:
    bodies = [
        '{"a":1, "a":2.50, "b":1E5}',
        ' {"spaces" : [ ] }\t',
        '{"on":\n"two lines"}\r\n',
        '[NaN,-Infinity,1e999,-0,0.1e-7,"\\ud800\\u0000/\\/"]',
        '"北京 \u2028 \x7f \x85"',
        "12345678901234567890123456789",
        "null",
        '{"body":1,"x":",\\"body\\":"}',
        '",\\"body\\":{}"',
    ]

    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        rows = [MessageRow(',"body":', f'"{n},"', body, n % 2) for n, body in enumerate(bodies)]
        await cp.store.write(threads.append, ThreadKey("", "t"), rows, extra='{ "extra":\n[] }')
        lines = await exported(cp)
        for line in lines:
            json.loads(line, parse_constant=pytest.fail)
            assert "\n" not in line
        await bring(there, lines)
        assert (await everything(there))["messages"] == (await everything(cp))["messages"]
        assert (await everything(there))["threads"][0][7] == '{ "extra":\n[] }'

    with_both(database, other, use)


async def do_something(cp: Checkpointer, chance: random.Random, names: list[str], number: int) -> None:
    name = chance.choice(names)
    there = [each.checkpoint_id for each in await cp.list_checkpoints(name)]
    match chance.randrange(11):
        case 0:
            await cp.append(name, UserMessage(f"{number}"))
        case 1 | 2:
            messages: list[Message] = (await loaded(cp, name)).messages
            messages = [*messages[: chance.randrange(len(messages) + 1)], UserMessage(f"put {number}")]
            await cp.put(checkpoint(name, f"c{chance.randrange(9)}", chance.randrange(9), messages))
        case 3:
            names.append(await cp.fork(name, chance.choice([None, 0, 1, *there]), new_id=f"fork {number}"))
        case 4 if there:
            await cp.rewind(name, chance.choice(there))
        case 5:
            await cp.delete_before(name, chance.randrange(5))
        case 6:
            await cp.prune(name, keep_last(chance.randrange(1, 4)))
        case 7 if len(names) > 1:
            names.remove(name)
            await cp.delete_thread(name)
        case 8:
            calls = AssistantMessage([ToolCall("x", "act"), ToolCall("y", "act")], stop_reason="tool_use")
            await cp.store.write(threads.append, ThreadKey("", name), [message_row(calls)], reserve=2)
        case 9:
            seqs = sorted((await marked(cp, name, all_of_them=True))[1])
            await mark(cp, name, seqs[:: chance.randrange(1, 4)], f"m{chance.randrange(3)}", f"{number}")
        case 10:
            await summarize(cp, name, f"summary {number}")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_was_done_to_threads_they_come_back(database: Database, opposite: Database, seed: int) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        chance, names = random.Random(seed), ["t"]
        await cp.append("t", said(2))
        for number in range(40):
            await do_something(cp, chance, names, number)
        for name in names:
            lines = await exported(cp, name)
            await bring(there, lines)
            assert await exported(there, name) == lines
            assert await view(there, name) == await view(cp, name)

    with_both(database, opposite, use)


# --- what is in an export ---------------------------------------------------------------------------------------------


def test_a_fork_takes_nothing_along_that_it_does_not_read(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        reply = AssistantMessage([ToolCall("x", "act"), ToolCall("y", "act")], stop_reason="tool_use")
        await cp.put(checkpoint("o", "shared", 1, said(1)))
        await cp.put(checkpoint("o", "replaced", 2, [*said(1), UserMessage("a branch that needle left")]))
        await cp.put(checkpoint("o", "replaced", 2, [*said(1), UserMessage("seen")]))
        await cp.store.write(threads.append, ThreadKey("", "o"), [message_row(reply)], reserve=2)
        await cp.fork("o", new_id="f")
        await cp.store.write(
            threads.fill, ThreadKey("", "o"), [(4, message_row(ToolResultMessage("x", "act", "needle in the result")))]
        )
        await cp.append("o", UserMessage("needle behind the fork"))
        await cp.put(checkpoint("o", "needle", 5, said(1)))
        await cp.put(checkpoint("o", "shared", 6, [*said(1), UserMessage("needle in a checkpoint")]))
        await cp.fork("f", new_id="needle")
        await mark(cp, "f", [1], "seen")
        for name in ("o", "needle"):
            await mark(cp, name, [1], "needle in a mark")
            await summarize(cp, name, "needle in a summary")
        lines = await exported(cp, "f")
        assert not any("needle" in line for line in lines)
        counts = {"branches": 3, "messages": 3, "marks": 3, "calls": 0, "runs": 0, "checkpoints": 2, "inbox": 0}
        assert json.loads(lines[-1])["end"] == {**counts, "tasks": 0, "usage": 0, "tool_usage": 0}

    with_cp(database, use)


def test_an_export_is_a_snapshot_of_the_thread_whatever_is_written_meanwhile(
    database: Database, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, writer: Checkpointer) -> None:
        for step in range(1, 6):
            await cp.put(checkpoint("t", f"c{step}", step, said(step)))
        await cp.steer("t", "hello")
        before = await exported(cp)
        real = queries._joined

        def write() -> None:
            writer.store.write_now(threads.append, ThreadKey("", "t"), [MessageRow("x", "user", '"meanwhile"')])
            writer.store.write_now(deleting.discard, ThreadKey("", "t"))

        def change_meanwhile(read: Any) -> Any:
            thread = threading.Thread(target=write)  # a query cannot reach the store itself
            thread.start()
            thread.join()
            return real(read)

        monkeypatch.setattr(queries, "_joined", change_meanwhile)
        assert await exported(cp) == before
        with pytest.raises(NotFound, match="there is no thread 't'"):
            await exported(cp)

    with_two(database, use)


@pytest.mark.large
def test_memory_does_not_grow_with_the_thread(database: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer) -> None:
        rows = [MessageRow(f"m{n}", "user", dumps("x" * 10_000)) for n in range(100)]
        peaks = []
        for size in (8, 32):
            for _ in range(size):
                await cp.store.write(threads.append, ThreadKey("", f"{size}"), rows)
            file = tmp_path / f"{size}.jsonl"
            tracemalloc.start()
            with file.open("w") as output:
                async for line in export_thread(cp.store, f"{size}"):
                    output.write(f"{line}\n")
            await bring(cp, file, as_id=f"new {size}")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert peaks[1] < 1.5 * peaks[0]

    with_cp(database, use)


def test_an_unknown_thread_or_user_is_told(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(NotFound, match="there is no thread 'nobody'"):
            await exported(cp, "nobody")
        for user in ("nobody", deleting.TRASH, deleting.IMPORTING):
            with pytest.raises(NotFound, match="there is no user"):
                await exported_user(cp, user)
        for wrong in ("", "a\0b", 7):
            with pytest.raises(InputError, match=r"must be a string|cannot contain NUL"):
                await exported(cp, wrong)  # type: ignore[arg-type]

    with_cp(database, use)


# --- users ------------------------------------------------------------------------------------------------------------


async def fill_user(cp: Checkpointer) -> None:
    await fill(cp)
    await with_users(cp, "bob")
    await cp.fork("f", "c3", new_id="f2")
    await cp.fork("f2", new_id="f3")
    await cp.fork("f3", new_id="bob's", user_id="bob")
    await cp.store.write(threads.append, ThreadKey("alice", "f"), [MessageRow("m", "user", '"hi"')])
    await mark(cp, "f", [1], "of alice", "of alice", namespace="alice")
    await summarize(cp, "f", "alice's own", namespace="alice")
    await fill_session(cp, "deleted")
    await cp.delete_thread("deleted")
    await cp.update_user(
        "alice", name="Alice 北京", email="a@b", quota_total=10**6, quota_used=7, preferences=PREFERENCES
    )


def test_all_threads_of_a_user_come_back_with_their_forks(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill_user(cp)
        lines = await exported_user(cp, "alice")
        assert await bring(there, lines) == ["fork of t", "f", "g", "session", "f2", "f3", "f"]
        assert await exported_user(there, "alice") == lines
        assert await marked(there, "f", "alice") == ('"alice\'s own"', {1: ["of alice", "of alice"]})
        tree = await there.tree("f")
        assert tree is not None
        assert [fork.thread_id for fork in tree.forks] == ["g", "f2"]
        assert [fork.thread_id for fork in tree.forks[1].forks] == ["f3"]
        with pytest.raises(InputError, match="there is already a thread 'fork of t'"):
            await bring(there, lines)

    with_both(database, opposite, use)


def test_a_user_is_imported_whole_or_not_at_all(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill_user(cp)
        lines = await exported_user(cp, "alice")
        ends = [number for number, line in enumerate(lines, 1) if line.startswith('{"end"')]
        begin = next(number for number, line in enumerate(lines) if line.startswith('{"byssus":"thread"'))
        damages: list[tuple[list[str], str]] = [
            (lines[:-1], f"line {len(lines)} is missing: the export of a user has no end"),
            (lines[: ends[1]], f"line {ends[1] + 1} is missing: the export of a user has no end"),
            (lines[: ends[1] - 1], f"line {ends[1]} is missing: a thread has no end"),
            ([*lines[:begin], *lines[ends[0] :]], "6 threads have come, and it should be"),
            ([*lines, lines[1]], "nothing can come behind the end"),
            ([*lines, *lines], "nothing can come behind the end"),
            ([lines[0].replace("alice", "carol"), *lines[1:]], "something in the lines of this user was changed"),
            ([lines[0].replace('"format":6', '"format":7'), *lines[1:]], "line 1: this was exported by a newer"),
            ([*lines[:-1], lines[-1].replace('"forks":[[', '"forks":[[9')], "cannot be a fork of"),
            ([*lines[:-1], lines[-1].replace('"forks":[[', '"forks":["x",[')], "the forks cannot be"),
            ([*lines[begin : ends[0]], *lines], "line \\d+: this is no beginning of a thread"),
            (lines[1:], "line 1: this is no beginning of a thread"),
            ([lines[0], *lines[2:begin], *lines[1:]], r"line \d+: (this is no beginning|nothing can come)"),
            ([lines[0], lines[1], *lines[1:]], "line 3: this is no beginning of a thread"),
            ([*lines[: ends[0]], *lines[1:]], "line \\d+: this is no beginning of a thread"),
        ]
        before = await everything(there)
        for damaged, complaint in damages:
            with pytest.raises(InputError, match=complaint):
                await bring(there, damaged)
            assert await everything(there) == before
        with pytest.raises(InputError, match="as_id='x' is a name for one thread, and these are 7"):
            await bring(there, lines, as_id="x")
        assert await everything(there) == before
        assert len(await bring(there, lines[begin:-1])) == 7  # threads one behind the other are welcome, too

    with_both(database, opposite, use)


async def account(cp: Checkpointer, user_id: str = "alice") -> list[Any]:
    """All that applications see of a user."""
    found = await cp.find_users({"ui": {"theme": "dark"}, "long": "x" * 5_000})
    return [await cp.get_user(user_id), found, await cp.get_usage_stats(user_id, 3_650)]


def test_a_user_comes_back_with_preferences_and_quota_and_what_deleted_threads_had_spent(
    database: Database, opposite: Database
) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill_user(cp)
        lines, seen = await exported_user(cp, "alice"), await account(cp)
        assert len(seen[1]) == 1
        assert seen[2] is not None
        await bring(there, lines)
        assert await account(there) == seen
        assert await exported_user(there, "alice") == lines
        assert (await cp.erase_user("alice", forks="keep")).threads == 7
        assert await cp.get_user("alice") is None
        await bring(cp, lines)
        assert await account(cp) == seen

    with_both(database, opposite, use)


def test_a_user_who_is_there_is_left_alone(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill_user(cp)
        lines = await exported_user(cp, "alice")
        await there.create_user("Another Alice", "c@d", 5, user_id="alice", preferences={"ui": {"theme": "light"}})
        before = await account(there)
        await bring(there, lines)
        after = await account(there)
        assert after[:2] == before[:2]
        of_threads = [await there.get_session_usage(name) for name in ("fork of t", "f", "g", "session", "f2", "f3")]
        total = sum(each["total_tokens"] for each in of_threads if each)
        assert after[2]["total_tokens"] == total > 0
        rows = await everything(there)
        assert [row for table in ("usage", "tool_usage") for row in rows[table] if row[1] == 0] == []

    with_both(database, opposite, use)


def test_whoever_owns_an_imported_thread_exists_from_then_on(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill(cp)
        lines = await exported(cp, "f")
        with pytest.raises(InputError, match=r"line \d+ is missing"):
            await bring(there, lines[:-1])
        assert await there.get_user("alice") is None
        await bring(there, lines)
        user = await there.get_user("alice")
        assert user is not None
        assert (user["name"], user["quota_total"], user["quota_used"]) == ("alice", None, 0)
        assert known(await there.get_session("f"))["user_id"] == "alice"

    with_both(database, opposite, use)


def test_a_user_without_threads_goes_through_an_export_too(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await cp.create_user("Zoe", user_id="zoe", preferences=PREFERENCES)
        lines = await exported_user(cp, "zoe")
        assert len(lines) == 3
        assert await bring(there, lines) == []
        assert await account(there, "zoe") == await account(cp, "zoe")
        assert await exported_user(there, "zoe") == lines
        with pytest.raises(InputError, match="as_id='x' is a name for one thread, and these are 0"):
            await bring(there, lines, as_id="x")

    with_both(database, opposite, use)


HOSTILE_ACCOUNT: dict[str, list[Any]] = {
    "name": [None, 7, "\0", "\ud800"],
    "email": [None, "\0"],
    "quota_total": [-1, 1.0, "1", True, 2**53],
    "quota_used": [-1, None, 1.5, 2**62],
    "created_at": [None, "now"],
    "updated_at": [None, 7],
    "preferences": [None, [], 7, "x"],
    "more": [1],
}


def sealed_user(lines: list[str]) -> list[str]:
    digest = hashlib.sha256("".join(f"{line}\n" for line in lines[:-1]).encode()).hexdigest()
    return [*lines[:-1], dumps({**json.loads(lines[-1]), "sha256": digest})]


def test_nothing_that_is_said_of_a_user_is_taken_for_granted(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.create_user("Zoe", user_id="zoe", preferences=PREFERENCES)
        await fill_session(cp, user="zoe")
        await cp.delete_thread("session")
        lines = await exported_user(cp, "zoe")
        await cp.erase_user("zoe")
        assert sealed_user(lines) == lines
        rows = [json.loads(line) for line in lines]
        cases = [
            ([lines[0], dumps({**rows[1], field: value}), *lines[2:]], "^line 2: ")
            for field, values in HOSTILE_ACCOUNT.items()
            for value in values
        ]
        kinds = [row.get("row") for row in rows]
        for kind in ("usage", "tool_usage", "task"):
            at = kinds.index(kind)
            cases += [
                ([*lines[:at], dumps({**rows[at], field: value}), *lines[at + 1 :]], f"^line {at + 1}: ")
                for field, values in HOSTILE[kind].items()
                for value in values
            ]
            cases.append(([*lines[:at], lines[at], *lines[at:]], f"user 'zoe' has a row of {kind} twice"))
        first = kinds.index("tool_usage")
        cases.append(([*lines[:2], *lines[first:-1], *lines[2:first], lines[-1]], r"^line \d+: this is no beginning"))
        headers: list[dict[str, Any]] = [{"user": user} for user in ("", None, 7, "\0", "\ud800")]
        for header in (*headers, {"more": 1}):
            cases += [([dumps({**rows[0], **header}), *lines[1:]], "^line 1: a user cannot be")]
        cases.append(([lines[0].replace('"format":6', '"format":1'), *lines[1:]], "^line 2: this is no beginning"))
        await refuse(cp, [(sealed_user(damaged), complaint) for damaged, complaint in cases])
        assert await bring(cp, lines) == []

    with_cp(database, use)


# --- what an application keeps in a session ---------------------------------------------------------------------------


def test_beside_the_original_tasks_and_logged_calls_have_ids_of_their_own(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        lines = await exported(cp, "session")
        tasks, calls = await cp.list_tasks("session"), await cp.list_tool_calls("session")
        assert tasks is not None
        assert calls is not None
        await bring(cp, lines, as_id="copy")
        copies, copied_calls = await cp.list_tasks("copy"), await cp.list_tool_calls("copy")
        assert copies is not None
        assert copied_calls is not None
        pairs: list[tuple[Sequence[Any], Sequence[Any]]] = [(copies, tasks), (copied_calls, calls)]
        for ours, theirs in pairs:
            assert {each["id"] for each in ours}.isdisjoint(each["id"] for each in theirs)
            for our, their in zip(ours, theirs, strict=True):
                changed = {"id": our["id"], "session_id": "copy"} | ({"call_id": our["id"]} if "call_id" in our else {})
                assert our == {**their, **changed}
        await cp.delete_task(tasks[0]["id"])
        await cp.delete_tool_call(calls[0]["id"])
        await cp.update_tool_call(calls[1]["id"], output_data="changed")
        assert await cp.list_tasks("copy") == copies
        assert await cp.list_tool_calls("copy") == copied_calls
        await cp.delete_thread("session")
        await bring(cp, lines)  # their ids are free again
        assert (await cp.list_tasks("session"), await cp.list_tool_calls("session")) == (tasks, calls)

    with_cp(database, use)


def test_what_is_arriving_is_nobodys_task_yet_and_nothing_is_left_of_what_was_given_up(
    database: Database, small_pages: None
) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        lines, tasks = await exported(cp, "session"), await cp.list_tasks("session")
        assert tasks
        await cp.delete_thread("session")
        before = await everything(cp)
        seen = []

        async def given() -> AsyncIterator[str]:
            for line in lines:
                if line is lines[-1]:
                    known = [task for task in await cp.list_tasks() or [] if task["session_id"] is not None]
                    seen.append([known, await cp.get_task(tasks[0]["id"])])
                    raise InputError("that is all")
                yield line

        with pytest.raises(InputError, match="that is all"):
            await bring(cp, given())
        assert seen == [[[], None]]
        assert await everything(cp) == before

    with_cp(database, use)


def test_what_was_counted_elsewhere_is_not_counted_again(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill(cp)
        await bring(there, await exported(cp, "session"))
        rows = await everything(there)
        assert {row[2] for row in rows["branches"]} == {1}
        assert await there.store.read(counting.countable, 0, 10) == []
        await there.append("new", UserMessage("hi"))
        assert [each.id for each in await there.store.read(counting.countable, 0, 10)] == ["new"]

    with_both(database, opposite, use)


NEW: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "thread": ("title", "status", "model", "metadata"),
        "call": ("output", "error", "elapsed_ms", "message"),
        "end": ("tasks", "usage", "tool_usage"),
    },
    3: {"branch": ("summary", "quoted"), "end": ("marks",)},
    4: {
        "call": (
            *("answered_by", "answered_from", "answered_at", "expires_at", "approvers", "edited", "fallback"),
            *("edited_quoted", "fallback_quoted"),
        ),
        "end": ("runs",),
    },
    5: {"thread": ("below", "parent_call"), "end": ()},
    6: {
        "task": (
            *("run_at", "deadline", "unique_key", "parent", "schedule", "progress", "progress_note", "waits_for"),
            *("asked", "lease_until", "steps", "error"),
        ),
        "end": (),
    },
}


def as_before(lines: list[str], written: int = 1) -> list[str]:
    """An export of a thread in an earlier format: before sessions (1), before marks (2), or before runs (3)."""
    lacking = [new for since, new in NEW.items() if since > written]
    gone = {1: ("run", "mark", *SESSIONS), 2: ("run", "mark"), 3: ("run",)}[written]
    old: list[str] = []
    for line in lines[:-1]:
        row = json.loads(line)
        kind = row.get("byssus", row.get("row"))
        names = [name for new in lacking for name in new.get(kind, ())]
        if names or kind == "thread":
            row = {name: value for name, value in row.items() if name not in names}
            line = dumps({**row, "format": written} if kind == "thread" else row)
        if kind not in gone:
            old.append(line)
    digest = hashlib.sha256("".join(f"{line}\n" for line in old).encode()).hexdigest()
    names = [name for new in lacking for name in new["end"]]
    counts = {name: count for name, count in json.loads(lines[-1])["end"].items() if name not in names}
    return [*old, dumps({"end": counts, "sha256": digest})]


def unanswered(seen: list[Any]) -> list[Any]:
    """What is seen of a thread, without what came with later formats: the times of answers, and much about tasks."""
    return [[_as_seen_before(each) for each in part] if isinstance(part, list) else part for part in seen]


def _as_seen_before(each: Any) -> Any:
    if isinstance(each, ToolCallRecord):
        return each._replace(answered_at=None)
    if isinstance(each, dict) and "max_retries" in each:
        return {name: value for name, value in each.items() if name not in (*NEW[6]["task"], "parent_id")}
    return each


def test_an_export_from_before_there_were_marks_is_imported_without_any(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        for name in await fill(cp):
            lines = await exported(cp, name)
            old = as_before(lines, 2)
            assert await bring(there, old) == [name]
            assert unanswered(await view(there, name))[:-1] == unanswered(await view(cp, name))[:-1]
            assert await marked(there, name) == ("", {})
            assert as_before(await exported(there, name), 2) == old
        new = await exported(cp, "plain")
        at = next(number for number, line in enumerate(new) if '"row":"mark"' in line)
        old = as_before(new, 2)
        await refuse(
            there,
            [
                ([*old[:at], new[at], *old[at:]], f"^line {at + 1}: a mark cannot come here"),
                (
                    [new[0].replace('"format":6', '"format":2'), *new[1:]],
                    "^line 1: a thread has other fields.*'below'",
                ),
                ([old[0].replace('"format":2', '"format":3'), *old[1:]], "^line 2: there is no 'summary'"),
            ],
        )

    with_both(database, opposite, use)


def test_runs_come_back_with_a_trusted_import_and_as_the_past_with_any_other(
    database: Database, opposite: Database
) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        await fill(cp)
        for name in ("asking", "done", "t"):
            lines = await exported(cp, name)
            assert await bring(there, lines) == [name]
            assert await exported(there, name) == lines
            (had,), (run,) = await cp.runs(name), await there.runs(name)
            assert (run.id, run.state, run.stop_reason) == (had.id, had.state, had.stop_reason)
            before, after = await cp.run_attempts(had.id), await there.run_attempts(had.id)
            assert [(each.owner, each.began_at, each.outcome) for each in after] == [
                (each.owner, each.began_at, each.outcome) for each in before
            ]
            second = f"second {name}"
            await there.import_from(lines, as_id=second)
            (run,) = await there.runs(second)
            assert (run.state, run.ended_at is None, run.request_key) == ("ended", False, None)
            assert run.stop_reason == ("stop" if name == "done" else "interrupted")

    with_both(database, opposite, use)


def test_an_export_from_before_there_were_runs_is_imported_without_any(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        for name in await fill(cp):
            old = as_before(await exported(cp, name), 3)
            assert await bring(there, old) == [name]
            assert await there.runs(name) == []
            assert as_before(await exported(there, name), 3) == old

    with_both(database, opposite, use)


def test_an_export_of_the_version_before_is_imported(database: Database, opposite: Database) -> None:
    async def use(cp: Checkpointer, there: Checkpointer) -> None:
        names = await fill(cp)
        for name in names:
            lines = [line for line in await exported(cp, name) if '"reply":0,' not in line]
            lines = sealed(lines)
            assert await bring(there, as_before(lines)) == [name]
            (thread, info, *ours), (same, had, *theirs) = await view(there, name), await view(cp, name)
            assert thread == same
            # Titles came with the next version, and leases stay where they are.
            assert info == had._replace(title=had.first_words, state=info.state)
            assert ours[:2] == theirs[:2]
            assert await marked(there, name) == ("", {})
            again = await exported(there, name)
            assert as_before(again) == as_before(lines)
            session = await there.get_session(name)
            assert session is not None
            assert (session["title"], session["status"], session["metadata"]) == ("", "active", {})
        old = as_before(await exported(cp, "o"))
        new = await exported(cp, "session")
        task = next(line for line in as_before(new, 2) if '"row":"task"' in line)
        await refuse(
            there,
            [
                ([*old[:-1], task, old[-1]], f"^line {len(old)}: a task cannot come here"),
                ([new[0].replace('"format":6', '"format":1'), *new[1:]], "^line 1: "),
                ([old[0].replace('"format":1', '"format":3'), *old[1:]], "^line 1: "),
            ],
        )

    with_both(database, opposite, use)


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_thread_that_is_there_is_left_alone(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said(2))
        lines = await exported(cp)
        before = await everything(cp)
        with pytest.raises(InputError, match=r"already a thread 't'.*as_id="):
            await bring(cp, lines)
        assert await everything(cp) == before
        assert await bring(cp, (f"{line}\n".encode() for line in lines), as_id="u") == ["u"]
        assert await texts(cp, "u") == await texts(cp, "t")
        for wrong in ("", "a\0b", 7):
            with pytest.raises(InputError, match="as_id"):
                await bring(cp, lines, as_id=wrong)  # type: ignore[arg-type]
        for no_lines in (7, None, [7]):
            with pytest.raises(InputError, match=r"takes the path of a file or lines|must be text"):
                await bring(cp, no_lines)

    with_cp(database, use)


def test_of_many_imports_at_once_one_gets_the_name(database: Database) -> None:
    async def use(cp: Checkpointer, other_cp: Checkpointer) -> None:
        await cp.put(checkpoint("t", "c", 1, said(3)))
        lines = await exported(cp)
        await cp.delete_thread("t")
        tries = [bring(each, lines) for each in (cp, other_cp) * 4]
        tries.append(cp.append("t", UserMessage("faster")))  # type: ignore[arg-type]
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert all(isinstance(error, InputError) and "already a thread" in str(error) for error in errors)
        assert len(errors) in (7, 8)
        found = await everything(cp)
        assert [row[2] for row in found["threads"]] == ["t"]
        assert len(found["branches"]) == 1

    with_two(database, use)


def test_nobody_takes_an_imported_thread_for_the_one_that_they_knew(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent: Agent = agent_on(cp, ["one", "two", "three"])
        await agent.prompt("hello")
        lines = await exported(cp)
        await agent.prompt("again")
        known = await loaded(cp, "t")
        await cp.delete_thread("t")
        await bring(cp, lines)
        assert (await loaded(cp, "t")).position.version > known.position.version
        assert (await agent.prompt("and now?")).text == "three"
        assert await texts(cp, "t") == ["hello", "one", "and now?", "three"]

    with_cp(database, use)


# --- interruptions ----------------------------------------------------------------------------------------------------

IMPORT_AND_DIE = """\
import asyncio, os, signal, sys
from byssus.checkpointer import checkpointer_for
from byssus.store.database import Store
from byssus.queries.moving import importing as queries
from byssus.maintenance.import_ import import_from

place, path, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
from byssus.queries.moving import exporting
exporting.PAGE_ROWS = 2

def boundary(_):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with checkpointer_for(place) as cp:
        Store.boundary = staticmethod(boundary)
        await import_from(cp.store, path, trusted=True)

asyncio.run(main())
"""


async def age_imports(cp: Checkpointer) -> None:
    def change(tx: Tx) -> None:
        tx.run("UPDATE threads SET lease_until = :past WHERE lease_until IS NOT NULL", past=PAST)

    await cp.store.write(change)


@pytest.mark.processes
def test_killed_at_any_commit_it_is_there_whole_or_not_at_all(database: Database, tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"

    async def prepare(cp: Checkpointer) -> None:
        await fill(cp)
        file.write_text("".join(f"{line}\n" for line in await exported(cp, "f")))
        for info in await cp.threads():
            await cp.delete_thread(info.id)

    async def look(cp: Checkpointer) -> None:
        lines = file.read_text().splitlines()
        for boundary in (0, 3, 4, 9, 16, 24, 31):
            command = ["-W", "error", "-c", IMPORT_AND_DIE, database.place, str(file), str(boundary)]
            done = await asyncio.to_thread(forked.run, command)
            assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
            assert await cp.threads() == []
            assert await cp.list_threads() == []
            assert await cp.get("c3") is None
        assert len((await everything(cp))["threads"]) > 5
        await age_imports(cp)
        assert await bring(cp, file) == ["f"]
        assert await exported(cp, "f") == lines
        assert [row[2] for row in (await everything(cp))["threads"]] == ["f"]

    with_cp(database, prepare)
    with_cp(database, look)


def test_an_import_that_is_under_way_is_no_trash_and_one_that_stood_still_is(
    database: Database, small_pages: None
) -> None:
    async def use(cp: Checkpointer, other_cp: Checkpointer) -> None:
        await cp.put(checkpoint("t", "c", 1, said(8)))
        lines = await exported(cp)
        await cp.delete_thread("t")
        goes_on, waits = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[str]:
            for line in lines:
                if line is lines[8]:
                    waits.set()
                    await goes_on.wait()
                yield line

        arriving = asyncio.create_task(bring(cp, slowly()))
        await waits.wait()
        assert await bring(other_cp, lines, as_id="u") == ["u"]
        assert await other_cp.delete_thread("u") == 1
        assert await cp.threads() == []
        goes_on.set()
        assert await arriving == ["t"]
        assert await exported(cp) == lines

        goes_on.clear()
        waits.clear()
        arriving = asyncio.create_task(bring(cp, slowly(), as_id="v"))
        await waits.wait()
        await age_imports(cp)
        await bring(other_cp, lines, as_id="w")
        goes_on.set()
        with pytest.raises(StoreError, match="stood still for more than 600 s and was given up; run it again"):
            await arriving
        assert [row[2] for row in (await everything(cp))["threads"]] == ["t", "w"]

    with_two(database, use)


def test_a_cancelled_import_leaves_nothing(database: Database, small_pages: None) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.put(checkpoint("t", "c", 1, said(8)))
        lines = await exported(cp)
        before = await everything(cp)
        waits = asyncio.Event()

        async def for_ever() -> AsyncIterator[str]:
            for line in lines[:8]:
                yield line
            waits.set()
            await asyncio.Event().wait()

        arriving = asyncio.create_task(bring(cp, for_ever(), as_id="u"))
        await waits.wait()
        arriving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await arriving
        assert await everything(cp) == before

    with_cp(database, use)


# --- what is no export ------------------------------------------------------------------------------------------------


async def refuse(cp: Checkpointer, cases: list[tuple[list[Any], str]]) -> None:
    """Nothing of any of them stays: rows that a next import could clean up are counted at once."""
    before, counts = await everything(cp), await cp.store.read(row_counts)
    for lines, complaint in cases:
        with pytest.raises(InputError, match=complaint):
            await bring(cp, lines)
        assert await cp.store.read(row_counts) == counts, complaint
    assert await everything(cp) == before


def row_counts(tx: Tx) -> list[Row]:
    return tx.all(" UNION ALL ".join(f"SELECT '{table.name}', count(*) FROM {table.name}" for table in TABLES))


def test_lines_that_are_not_as_they_were_exported_are_refused_by_their_number(
    database: Database, small_pages: None
) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        lines = await exported(cp, "f")
        size, text = len(lines), "message 2"
        edited = next(number for number, line in enumerate(lines) if text in line)
        swapped = [*lines[:edited], lines[edited + 1], lines[edited], *lines[edited + 2 :]]
        await cp.delete_thread("f")
        cases: list[tuple[list[Any], str]] = [
            ([], "line 1 is missing: there is nothing to import"),
            (lines[:-1], f"line {size} is missing: a thread has no end"),
            (lines[:3], "line 4 is missing: a thread has no end"),
            (lines[1:], "line 1: this is no beginning of a thread"),
            ([lines[-1]], "line 1: this is no beginning of a thread"),
            ([*lines[:4], *lines[5:]], "line 5: this should be branch 4, and is 5"),
            (
                [*lines[:edited], *lines[edited + 1 :]],
                f"line {size - 1}: thread 'f' is not whole: .*:10,.* should be .*:11",
            ),
            (swapped, f"line {edited + 2}: a message at .* comes behind"),
            ([lines[0], lines[2], lines[1], *lines[3:]], "line 2: this should be branch 1, and is 2"),
            ([*lines[:edited], lines[1], *lines[edited:]], f"line {edited + 1}: this should be|a branch cannot come"),
            ([*lines[:-1], lines[2], lines[-1]], f"line {size}: a branch cannot come here"),
            ([*lines[:5], "", *lines[5:]], "line 6: this is not JSON"),
            ([*lines[:5], lines[5][:40], *lines[6:]], "line 6: this is not JSON"),
            ([*lines[:5], lines[5].encode("utf-16"), *lines[6:]], "line 6: this is not UTF-8"),
            ([*lines[:5], lines[5] + "\ud800", *lines[6:]], "line 6: this is not UTF-8"),
            ([*lines[:5], lines[5] + "\r\n", *lines[6:]], f"line {size}: something in the lines of thread 'f'|line 6"),
            ([line.replace(text, "message X") for line in lines], f"line {size}: something in the lines of thread 'f'"),
            ([*lines[:-1], lines[-1].replace("messages", "massages")], f"line {size}: thread 'f' is not whole"),
            ([*lines[:-1], lines[-1].replace('"sha256"', '"sha"')], f"line {size}: thread 'f' is not whole"),
            ([*lines[:-1], '{"end":{'], f"line {size}: this is not JSON"),
            ([*lines, "x"], f"line {size + 1}: this is not JSON"),
            ([*lines, lines[0]], f"line {size + 2} is missing"),
            (lines + lines, "there is already a thread 'f'"),
            ([lines[0].replace('"format":6', '"format":7'), *lines[1:]], "line 1: .*newer byssus, in format 7"),
            ([lines[0].replace('"format":6', '"format":"6"'), *lines[1:]], "line 1: the format of an export cannot be"),
            (['{"role":"user","content":"hello"}'], "line 1: this is JSON, but no line of an export"),
            (["[1]"], "line 1: this is JSON, but no line of an export"),
            (['{"byssus":"diary","format":1}'], "line 1: this is no beginning of a thread"),
            (["dear diary"], "line 1: this is not JSON"),
            (["[" * 100_000], "line 1: this cannot be read|line 1: this is not JSON"),
            ([b"\x00\x01\x02"], "line 1: this is not JSON"),
        ]
        await refuse(cp, cases)

    with_cp(database, use)


STEP = ["a", "call", "done", "never", 1, "[1]", None, None, "2026-01-01T00:00:00.000000Z", None]
NO_STEP: list[tuple[int, Any]] = [
    *((0, value) for value in (None, 7, "\0")),
    *((1, "run"), (2, "over"), (3, 7), (4, -1), (5, "{"), (5, [1]), (6, "\0"), (7, "now"), (8, None), (9, 7)),
]

HOSTILE: dict[str, dict[str, list[Any]]] = {
    "thread": {
        "id": ["", None, 7, "a\0b", "\ud800"],
        "namespace": [None, "\x7ftrash", "\x7fimport", "\x7f", "\0"],
        "owner": ["", 7, "\ud800"],
        "created_at": [None, "now", "2026-13-01T00:00:00.000000Z", "2026-01-01T00:00:00Z", "~"],
        "updated_at": [7, "٢026-01-01T00:00:00.000000Z"],
        "branch": [0, -1, 99, 1.0, "1", True, None, 2**70],
        "line": [0, 99, None],
        "head": [-1, 2**62, "x", 0],
        "message_count": [-1, 5, 99, 1.5, True],
        "unledgered": [-1, 2**60],
        "run": [7, "\0"],
        "saved_at": ["2026-01-01T00:00:00.000000Z", 7],
        "extra": [[], None, "x", 7],
        "ttl": [{}, {"last": -1, "seconds": 1, "tags": []}, {"last": 1, "seconds": "1", "tags": []}, [1]],
        "partial": [{"role": "user", "content": "hi"}, 7],
        "title": [None, 7, "a\0b", "\ud800"],
        "status": ["sleeping", None, 7, ""],
        "model": [7, "\0"],
        "metadata": [[], None, 7],
    },
    "branch": {
        "number": [0, 2, "1", None],
        "segments": [
            None,
            7,
            [7],
            [[1]],
            [[9, 0, 1]],
            [[1, 0, 0]],
            [[1, 0, 2], [1, 1, 4]],
            [[1, 0, None]],
            [[1, -1, 5]],
            [["1", 0, 5]],
        ],
        "inherited": [None, [[1, 1, 1]], [[1, 1, 1, 1]], [[9, 1, 1, 1]], [[0, None, None, 1]], [[1, None, 1, 1]]],
        "summary": [None, 7, {}, ["x"], True],
    },
    "mark": {
        "branch": [0, 99, None, "1", True],
        "seq": [0, -1, 2**53, "1", None, 7_777],
        "mark": [None, 7, "a\0b", "\ud800", "x" * 501, ["x"]],
    },
    "message": {
        "branch": [0, 99, None, "1"],
        "seq": [0, -1, 2**53, "1", True],
        "id": [None, 7, "a\0b", "\ud800"],
        "role": [None, "\udfff"],
        "plain": [2, True, None, "0"],
        "created_at": [None, "yesterday"],
    },
    "call": {
        "branch": [0, 99],
        "reply": [-1, None],
        "place": [-1, "0"],
        "call_id": [None, "\0"],
        "name": [7],
        "recovery": ["always", None],
        "idempotency_key": [None],
        "run": [None],
        "status": ["waitin", None, 7],
        "reason": ["because", 7],
        "question": [7, "\0"],
        "attempts": [-1, 2**53],
        "asked_at": ["now"],
        "started_at": [7],
        "ended_at": [""],
        "error": [7, "\0", "\ud800"],
        "elapsed_ms": [-1.0, 1, "1", float("nan"), float("inf"), True],
        "message": [7, "\0"],
        "arguments": [[1], "x", 7],
        "answer": [{}, [], {"decision": "result", "result": {"role": "user", "content": "x"}}, {"decision": "deny"}],
    },
    "run": {
        "id": [None, 7, "\0", "\ud800"],
        "branch": [0, 99, "1", True],
        "first_seq": [-1, None],
        "last_seq": [-1, "1"],
        "began_at": [None, "now"],
        "ended_at": ["now", 7],
        "stop_reason": [7, "\0"],
        "error": [7, "\ud800"],
        "cause": [None, 7],
        "started_by": [7],
        "request_key": [7, "a key without a digest", "\0"],
        "request_digest": ["a digest without a key"],
        "attempts": [-1, None],
        "retries": [-1, 1.5],
        "attempted": [None, 7, [7], [["here:1"]], [["here:1", "now", None, None]], [[7, None, None, None]]],
    },
    "checkpoint": {
        "line": [0, 99],
        "id": ["", None, "\0"],
        "step": [-1, 2**53, "1"],
        "version": [0, -1, None, 2**62],
        "parent": ["", 7],
        "branch": [0, 99],
        "seq": [-1, 2**53],
        "message_count": [-1, None],
        "created_at": ["0000-01-01T00:00:00.000000Z", None],
        "hidden": [None, [0], [99], [1, 1], [2, 1], ["1"]],
        "about": [{}, {"tags": [1], "summary": ""}, {"tags": [], "summary": 7}, {"tags": "x", "summary": ""}],
        "body": [[], 7],
        "extra": [[], 7, "x"],
    },
    "inbox": {
        "kind": ["shout", None],
        "id": [None, "\ud800"],
        "role": [7],
        "created_at": ["now"],
        "body": [7, {"role": "assistant", "content": "hi"}, [], {"role": "user"}],
    },
    "task": {
        "id": ["", None, 7, "\0", "\ud800"],
        "type": ["", None, "\0"],
        "status": ["waiting", None, 7],
        "priority": [2**31, -(2**31), 1.0, None, True],
        "max_retries": [-1, None, 2**53],
        "retry_count": [-1, "0"],
        "created_at": [None, "now"],
        "updated_at": [None],
        "started_at": [7],
        "completed_at": ["now"],
        "run_at": ["soon", 7],
        "deadline": ["now"],
        "unique_key": ["", 7],
        "progress": [-1.0, 1, "0.5", float("nan")],
        "waits_for": [7, "\0"],
        "asked": ["stop", 7],
        "lease_until": ["now"],
        "steps": [None, [[]], [STEP[:-1]], *([[*STEP[:n], value, *STEP[n + 1 :]]] for n, value in NO_STEP)],
    },
    "usage": {
        "day": [None, "2026-13-01", "20260101", "today", "2026-01-01T", "٢026-01-01"],
        "model": [None, "x" * 201, "\0", 7],
        "messages": [-1, 1.0, None, True, 2**62],
        "tokens": [-1, None],
        "input": [-1, "0"],
        "output": [None],
        "cache_read": [-1],
        "cache_write": [1.5],
        "cost": [1, None, -1.0, float("nan"), float("inf")],
        "priced": ["0", -0.5],
    },
    "tool_usage": {
        "day": ["yesterday", None],
        "name": [None, "x" * 201, "\ud800"],
        "bucket": [-2, 10**6, 1.0, None, "0", True],
        "calls": [-1, None, 2**62],
        "failures": [-1],
        "total_ms": [-1.0, 1, None, float("inf")],
    },
}

SESSIONS = ("task", "usage", "tool_usage")
GONE = ("id", "segments", "name", "day", "mark", "began_at")


@pytest.mark.large
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_value_is_taken_for_granted(database: Database, kind: str, small_pages: None) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        name = {"call": "asking", "run": "asking", "inbox": "t"}.get(kind, "session" if kind in SESSIONS else "f")
        lines = await exported(cp, name)
        await cp.delete_thread(name)
        assert sealed(lines) == lines
        at = next(n for n, line in enumerate(lines) if f'"row":"{kind}"' in line or f'"byssus":"{kind}"' in line)
        cases: list[tuple[list[Any], str]] = []
        for field, values in HOSTILE[kind].items():
            for value in values:
                row = json.loads(lines[at])
                row.setdefault(field, None)
                row[field] = value
                cases.append((sealed([*lines[:at], dumps(row), *lines[at + 1 :]]), r"^line \d+: "))
        row = json.loads(lines[at])
        cases.append((sealed([*lines[:at], dumps({**row, "more": 1}), *lines[at + 1 :]]), rf"^line {at + 1}: "))
        cases.append(
            (
                sealed(
                    [
                        *lines[:at],
                        dumps({name: row[name] for name in list(row) if name not in GONE}),
                        *lines[at + 1 :],
                    ]
                ),
                rf"^line {at + 1}: ",
            )
        )
        cases.append((sealed([*lines[:at], dumps({**row, "quoted": ["x"]}), *lines[at + 1 :]]), rf"^line {at + 1}: "))
        await refuse(cp, cases)

    with_cp(database, use)


def test_json_that_no_reader_could_take_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said(2))
        lines = await exported(cp)
        await cp.delete_thread("t")
        head, body = lines[2].split(',"body":')
        assert body.endswith("}")
        quoted = head.replace('"created_at"', '"quoted":["body"],"created_at"')
        bodies = ["", "{", "{}{}", "'x'", "[1,]", "9" * 5000, "[" * 2_000 + "]" * 2_000, '{},"body":{}', '"\x01"']
        bodies = [f'{head},"body":{each}}}' for each in bodies]
        texts: list[Any] = ["", "{", "[1,]", '"\ud800"', '"\0"', "\0", {}, None]
        bodies += [f'{quoted},"body":{dumps(each)}}}' for each in texts]
        cases = [([*lines[:2], line, *lines[3:]], "^line 3: ") for line in bodies]
        await refuse(cp, cases)
        fine = [*lines[:2], f'{quoted},"body":{dumps("[ NaN ]")}}}', *lines[3:]]
        assert await bring(cp, sealed(fine)) == ["t"]

    with_cp(database, use)


def test_a_thread_that_is_not_as_its_header_says_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        lines = await exported(cp, "asking")
        await cp.delete_thread("asking")
        calls = [number for number, line in enumerate(lines) if '"row":"call"' in line]
        twice = [*lines[: calls[0]], *(lines[calls[0]] for _ in calls), *lines[calls[-1] + 1 :]]
        fewer = [line for line in lines if '"role":"assistant","plain"' not in line]
        unanswered = [line.split(',"answer":')[0] + "}" if '"answer":' in line else line for line in lines]
        session = await exported(cp, "session")
        await cp.delete_thread("session")
        firsts = {kind: next(n for n, line in enumerate(session) if f'"row":"{kind}"' in line) for kind in SESSIONS}
        doubled = [
            ([*session[:at], session[at], *session[at:]], {"task": "a task"}.get(kind, "a .* usage of a day"))
            for kind, at in firsts.items()
        ]
        logged = [line.replace('"status":"done"', '"status":"started"') for line in session]
        plain = await exported(cp, "plain")
        await cp.delete_thread("plain")
        at = next(number for number, line in enumerate(plain) if '"row":"mark"' in line)
        behind = [*plain[:at], plain[at].replace('"seq":1,', '"seq":9,'), *plain[at:]]
        far = [line.replace('"row":"mark","branch":1,"seq":4', '"row":"mark","branch":1,"seq":5') for line in plain]
        rows = [json.loads(line) for line in lines]
        unasked = [dumps({**row, "question": None}) if row.get("status") == "waiting" else dumps(row) for row in rows]
        cases: list[tuple[list[Any], str]] = [
            (sealed(unanswered), r"^line \d+: a call that is answered has no answer"),
            (sealed(unasked), r"^line \d+: a call that is waiting has no question"),
            (sealed(twice), r"^line \d+: thread 'asking' has a tool call twice"),
            *[(sealed(each), rf"^line \d+: thread 'session' has {what} twice") for each, what in doubled],
            (sealed(logged), r"^line \d+: a call that no reply has asked for cannot be started"),
            (sealed(far), r"^line \d+: thread 'plain' has a mark where there is no message"),
            (sealed(behind), rf"^line {at + 2}: a mark at \(1, 1\) comes behind \(1, 9\)"),
            (sealed(fewer), r"^line \d+: thread 'asking' should have 2 messages, and has 1"),
        ]
        await refuse(cp, cases)

    with_cp(database, use)
