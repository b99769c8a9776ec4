"""Search on a real database: what is found, of whom, in which order; with all, some or nothing of it indexed."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import textwrap
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from byssus import AssistantMessage, UserMessage
from byssus.accounts import sessions, tool_log, users
from byssus.checkpointer import Checkpointer, SQLiteCheckpointer, checkpointer_for
from byssus.errors import InputError, SearchTimeout
from byssus.maintenance.copy import copy
from byssus.messages import Block, ThinkingContent, ToolCall, ToolResultMessage
from byssus.queries.search import candidates, tsvector
from byssus.queries.search import index as queries
from byssus.queries.search.kinds import CALL, MESSAGE
from byssus.search import index, search, tokens
from byssus.search.index import Indexer
from byssus.storage import SearchHit, SearchOrder
from byssus.store.database import Tx
from tests.support import forked
from tests.support.cases import case
from tests.support.checkpointers import with_cp
from tests.support.databases import Database

Hits = list[SearchHit]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is indexed when is up to the test."""
    monkeypatch.setattr(Indexer, "start", lambda _: None)


async def found(cp: Checkpointer, query: str, **options: Any) -> list[str]:
    """The texts that are found, or the tools."""
    return [hit["content"] for hit in await search.search(cp.store, query, **options)]


async def waiting(cp: Checkpointer) -> int:
    return sum(kind.waiting for kind in (await search.state(cp.store)).values())


async def in_each_state(cp: Checkpointer, check: Callable[[], Awaitable[None]]) -> None:
    """Nothing indexed, some of it, all of it, and by a scan."""
    await search.index(cp.store)
    await cp.store.write(queries.reset)
    await cp.store.write(queries.empty, tokens.VERSION, MESSAGE)
    await cp.store.write(queries.empty, tokens.VERSION, CALL)
    await check()
    await search.index(cp.store, 2)
    await check()
    await search.index(cp.store)
    assert await waiting(cp) == 0
    await check()
    await cp.store.write(lambda tx: tx.run("UPDATE indexing SET tokenizer = 1000"))
    await check()
    await cp.store.write(queries.reset)


@pytest.mark.usefixtures("alone")
def test_messages_are_found_in_any_language_whatever_is_indexed(database: Database) -> None:
    said = ["我买了手机", "東京都に住む", "한국어를 배우다", "He was running", "call hello_world() 100%", "用Python写"]
    asked = {
        "手": 0, "手机": 0, "买了手机": 0, "京都": 1, "住": 1, "국어": 2, "run": 3, "hello_world": 4, "100%": 4,
        "python": 5, "用Python": 5, '"was run"': 3,
    }  # fmt: skip

    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage(text) for text in said])

        async def check() -> None:
            for query, number in asked.items():
                assert await found(cp, query) == [said[number]], query
            for query in ("手壳", "ru", "hello_worlds", "101%", "run -he", '"run was"'):
                assert await found(cp, query) == [], query

        await in_each_state(cp, check)

    with_cp(database, use)


def test_a_hit_says_where_it_is_and_shows_why(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("trip", UserMessage("One needle", id="m1"))
        (hit,) = await search.search(cp.store, "needle")
        created = hit["created_at"]
        assert datetime.now(UTC) - datetime.fromisoformat(created) < timedelta(minutes=5)
        assert hit == {
            "kind": "message",
            "session_id": "trip",
            "message_id": "m1",
            "role": "user",
            "content": "One needle",
            "created_at": created,
            "snippet": "One **needle**",
            "tool_name": None,
            "score": None,
        }
        (hit,) = await search.search(cp.store, "needle", marks=("<", ">"), order="relevance")
        assert hit["snippet"] == "One <needle>"
        assert (hit["score"] or 0) > 0

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_only_what_was_said_is_searched(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        blocks: list[Block] = [ThinkingContent("secret"), ToolCall("c", "tool", {"key": "argument"})]
        await cp.append(
            "t",
            [
                AssistantMessage(blocks, model="gpt", provider="maker"),
                UserMessage('a "quoted"\n\u0000line'),
                {"role": "system", "content": [{"type": "text", "text": "be kind"}], "field": "beside"},
                {"note": "buy milk", "role": "note"},
                ToolResultMessage("c", "look", "outcome", details={"hidden": "details"}),
            ],
        )

        async def check() -> None:
            for query in ("secret", "argument", "key", "gpt", "maker", "role", "user", "text", "beside", "note", "n"):
                assert await found(cp, query) == [], query
            for query in ("quote", "line", "kind", "milk", "outcome"):
                assert len(await found(cp, query)) == 1, query

        await in_each_state(cp, check)

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_the_newest_come_first_in_pages(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for number in range(30):
            await cp.append(f"t{number % 3}", UserMessage(f"word {number}"))

        async def check() -> None:
            newest = [f"word {number}" for number in reversed(range(30))]
            assert await found(cp, "words", limit=100) == newest
            assert await found(cp, "word") == newest[:20]
            assert await found(cp, "word", limit=7, offset=5) == newest[5:12]
            assert await found(cp, "word", limit=7, offset=28) == newest[28:]
            assert await found(cp, "word", limit=7, offset=30) == []
            assert await found(cp, "word", limit=0) == []
            assert await found(cp, "word", limit=10_000) == newest

        await in_each_state(cp, check)

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_pages_of_candidates_are_gone_through_to_the_end(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_PAGES", (3, 4, 5))
    monkeypatch.setattr(tsvector, "_NEAR", 2)
    monkeypatch.setattr(search, "_PAGE_BYTES", 100)

    async def use(cp: Checkpointer) -> None:
        for number in range(40):
            word = "a_b" if number in (2, 20) else "a b"
            await cp.append("t", UserMessage(f"{word} {number} {'x' * number}"))
            if number % 3 == 0:
                await tool_log.log_tool_call(cp.store, "t", "look", {"q": f"a_b {number}"}, None, 0)

        async def check() -> None:
            hits = await search.search(cp.store, "a_b", limit=100)
            messages = [int(hit["content"].split()[1]) for hit in hits if hit["kind"] == "message"]
            calls = [int(hit["content"].split()[1]) for hit in hits if hit["kind"] == "tool_call"]
            assert messages == [20, 2]
            assert calls == list(range(39, -1, -3))
            paged = [await search.search(cp.store, "a_b", limit=4, offset=at) for at in range(0, 16, 4)]
            assert list(itertools.chain(*paged)) == hits
            best = await search.search(cp.store, "a_b", limit=100, order="relevance")
            assert sorted(hit["message_id"] for hit in best) == sorted(hit["message_id"] for hit in hits)

        await in_each_state(cp, check)

    with_cp(database, use)


def test_the_most_relevant_come_first_on_request(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        texts = ["cat " + "x " * 50, "cat cat cat", "one cat", "dog and cat dog dog", "one cat"]
        await cp.append("t", [UserMessage(text, id=str(number)) for number, text in enumerate(texts)])
        hits = await search.search(cp.store, "cat", order="relevance")
        assert [hit["message_id"] for hit in hits] == ["1", "4", "2", "3", "0"]
        assert [hit["score"] for hit in hits] == sorted((hit["score"] or 0 for hit in hits), reverse=True)
        assert [
            hit["message_id"] for hit in await search.search(cp.store, "cat", order="relevance", limit=2, offset=1)
        ] == ["4", "2"]

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_filters_leave_what_they_say(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(cp: Checkpointer) -> None:
        for name in ("a", "b"):
            await users.create_user(cp.store, name, user_id=name)
        for name in ("a1", "a2", "b1"):
            await cp.append(
                name,
                [UserMessage(f"hello {name}"), AssistantMessage(f"hello to {name}")],
            )
            await sessions.update_session(cp.store, name, user_id=name[0])
        await cp.append("a1", ToolResultMessage("c", "look", "hello tool"))
        await cp.append("a1", {"role": "note", "content": "hello note"})
        await tool_log.log_tool_call(cp.store, "b1", "greet", {"say": "hello log"}, None, 1)

        async def check() -> None:
            assert len(await found(cp, "hello")) == 9
            assert await found(cp, "hello", session_id="a2") == ["hello to a2", "hello a2"]
            assert await found(cp, "hello", user_id="b") == ["hello log", "hello to b1", "hello b1"]
            assert await found(cp, "hello", user_id="a", session_id="b1") == []
            assert len(await found(cp, "hello", user_id="a", session_id="a1")) == 4
            assert await found(cp, "hello", role="user") == ["hello b1", "hello a2", "hello a1"]
            assert await found(cp, "hello", role="tool") == ["hello log", "hello tool"]
            assert await found(cp, "hello", role="tool", kinds=["message"]) == ["hello tool"]
            assert await found(cp, "hello", role="note") == ["hello note"]
            assert await found(cp, "hello", kinds=["tool_call"]) == ["hello log"]
            for nobody in ({"session_id": "x"}, {"user_id": "x"}, {"role": "x"}, {"session_id": "a1", "role": "x"}):
                assert await found(cp, "hello", **nobody) == []

        await in_each_state(cp, check)
        monkeypatch.setattr(candidates, "MAX_SCOPES", 1)
        await in_each_state(cp, check)

    with_cp(database, use)


def test_times_are_filters_too(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("first word"))
        await tool_log.log_tool_call(cp.store, "t", "look", {"x": "second word"}, None, 0)
        await cp.append("t", UserMessage("third word"))
        third, _, first = await search.search(cp.store, "word")
        since = datetime.fromisoformat(first["created_at"])
        assert len(await found(cp, "word", since=since, until=third["created_at"])) == 3
        assert await found(cp, "word", since=since + timedelta(microseconds=1)) == ["third word", "second word"]
        assert await found(cp, "word", until=first["created_at"]) == ["first word"]
        assert await found(cp, "word", since=(since + timedelta(days=1)).date().isoformat()) == []
        assert len(await found(cp, "word", until=since.astimezone() + timedelta(hours=1))) == 3

    with_cp(database, use)


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_tool_logs_are_searched_by_their_strings(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("hi"))
        name = await tool_log.log_tool_call(
            cp.store,
            "t",
            "look_up",
            {"city": "上海", "n": [1, {"deep": "value"}]},
            {"found": "answer"},
            5,
            False,
            "it broke",
        )

        async def check() -> None:
            for query in ("上", "上海", "value", "answer", "broke", '"value answer"'):
                (hit,) = await search.search(cp.store, query)
                assert (hit["kind"], hit["role"], hit["tool_name"]) == ("tool_call", "tool", "look_up")
                assert (hit["session_id"], hit["message_id"]) == ("t", name)
                assert hit["content"] == "上海\nvalue\nanswer\nit broke"
            for query in ("city", "deep", "found", "look_up"):
                assert await found(cp, query) == []

        await in_each_state(cp, check)
        await tool_log.update_tool_call(cp.store, name, output_data="another")
        assert await found(cp, "answer") == []
        assert len(await found(cp, "another")) == 1
        await search.index(cp.store)
        assert len(await found(cp, "another")) == 1
        await tool_log.delete_tool_call(cp.store, name)
        assert await found(cp, "another") == []

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_a_row_of_the_ledger_that_changes_is_indexed_again(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("hi"))
        for number in range(3):
            await tool_log.log_tool_call(cp.store, "t", "look", f"old {number}", None, 0)
        await search.index(cp.store)

        def change(number: int, text: str) -> Callable[[Tx], None]:
            return lambda tx: tx.run(
                "UPDATE tool_calls SET arguments = :text WHERE place = :place", text=f'"{text}"', place=number
            )

        await cp.store.write(change(1, "new 1"))
        rows = await cp.store.read(index.next_rows, CALL, 10)
        assert rows is not None
        batch = index.batch_of(rows)
        await cp.store.write(change(1, "newer 1"))  # while it is being indexed
        assert await cp.store.write(queries.put, batch)
        for _ in range(2):
            assert await found(cp, "old") == ["old 2", "old 0"]
            assert await found(cp, "new") == []
            assert await found(cp, "newer") == ["newer 1"]
            assert await search.index(cp.store) in (0, 1)
            assert await waiting(cp) == 0

    with_cp(database, use)


# --- what changes -----------------------------------------------------------------------------------------------------


def test_what_is_deleted_is_not_found(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for indexed in (False, True):
            await cp.append("gone", [UserMessage(f"word {number}") for number in range(3)])
            await tool_log.log_tool_call(cp.store, "gone", "look", "word of a tool", None, 0)
            await cp.append("kept", UserMessage("word kept"))
            if indexed:
                await search.index(cp.store)
            assert len(await found(cp, "word")) == 5 + indexed
            await cp.delete_thread("gone")
            assert await found(cp, "word") == ["word kept"] * (1 + indexed)
            await cp.append("new", UserMessage("another"))  # which may get the key of a row that went
            assert await found(cp, "another") == ["another"] * (1 + indexed)
            assert await found(cp, "word of") == []

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_edits_are_followed(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        store = cp.store
        await sessions.create_session(store, None, session_id="s")
        one = await sessions.save_message(store, "s", "user", "the first 版本")
        two = await sessions.save_message(store, "s", "assistant", "the second 版本")
        await search.index(store)
        await sessions.update_message(store, "s", one, "the changed 内容")
        await sessions.delete_message(store, "s", two)

        async def check() -> None:
            assert await found(cp, "the") == ["the changed 内容"]
            assert await found(cp, "版本") == []
            assert await found(cp, "内") == ["the changed 内容"]

        await check()
        await in_each_state(cp, check)

    with_cp(database, use)


def test_a_rewind_hides_what_it_leaves(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("word one"), UserMessage("word two")])
        await search.index(cp.store)
        await cp.rewind("t", to=1)
        assert await found(cp, "word") == ["word one"]
        await cp.append("t", UserMessage("word three"))
        assert await found(cp, "word", session_id="t") == ["word three", "word one"]

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_a_message_that_forks_share_is_one_hit(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("word one"), UserMessage("word two")])
        await cp.fork("t", 1, new_id="f")
        await cp.append("f", UserMessage("word three"))
        await cp.fork("f", new_id="g")

        async def of(query: str, **options: Any) -> list[tuple[str, str]]:
            return [(hit["session_id"], hit["content"]) for hit in await search.search(cp.store, query, **options)]

        async def check() -> None:
            assert await of("word") == [("f", "word three"), ("t", "word two"), ("t", "word one")]
            assert await of("word", session_id="g") == [("g", "word three"), ("g", "word one")]

        await in_each_state(cp, check)
        await cp.delete_thread("t")
        assert await of("word") == [("f", "word three"), ("f", "word one")]
        await cp.delete_thread("f")
        assert await of("word") == [("g", "word three"), ("g", "word one")]

    with_cp(database, use)


# --- the index --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_long_tail_is_indexed_by_the_search_that_finds_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        assert await found(cp, "word") == []
        await cp.append("t", [UserMessage(f"word {number}") for number in range(1_000)])
        assert len(await found(cp, "word", limit=10_000)) == 1_000
        assert await waiting(cp) == 1_000
        await cp.append("t", UserMessage("one more"))
        assert len(await found(cp, "word", limit=10_000)) == 1_000
        assert await waiting(cp) == 0

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_a_batch_is_not_written_when_its_rows_went_meanwhile(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await search.index(cp.store)
        await found(cp, "x")
        await cp.append("gone", [UserMessage("word one"), UserMessage("word two")])
        rows = await cp.store.read(index.next_rows, MESSAGE, 10)
        assert rows is not None
        batch = index.batch_of(rows)
        assert len(batch.entries) == 2
        await cp.delete_thread("gone")
        await cp.append("new", UserMessage("another"))
        await cp.store.write(queries.put, batch)
        for _ in range(2):
            assert await found(cp, "another") == ["another"]
            assert await found(cp, "word") == []
            assert await search.index(cp.store) in (0, 1)

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_another_version_of_the_tokens_makes_the_index_anew(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("word 一"))
        await tool_log.log_tool_call(cp.store, "t", "look", "word 二", None, 0)
        await search.index(cp.store)
        monkeypatch.setattr(tokens, "VERSION", tokens.VERSION + 1)
        assert await waiting(cp) == 2
        assert await found(cp, "word") == ["word 二", "word 一"]
        assert await waiting(cp) == 0
        assert await found(cp, "word") == ["word 二", "word 一"]
        monkeypatch.undo()  # an older process beside a newer one: it leaves the index alone
        before = await cp.store.read(queries.state, MESSAGE)
        await cp.append("t", UserMessage("word 三"))
        assert await found(cp, "word") == ["word 三", "word 二", "word 一"]
        assert await search.index(cp.store) == 0
        assert await cp.store.read(queries.state, MESSAGE) == before

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_reindexing_begins_anew(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage(f"word {number}") for number in range(5)])
        await search.index(cp.store)
        assert await search.reindex(cp.store) == 5
        assert await waiting(cp) == 0
        assert len(await found(cp, "word")) == 5

    with_cp(database, use)


@pytest.mark.large
@pytest.mark.usefixtures("alone")
def test_long_texts_are_found_by_every_word(database: Database) -> None:
    """Longer than an index can take as one: more words, more places, more bytes."""

    async def use(cp: Checkpointer) -> None:
        many = " ".join(f"n{number}" for number in range(150_000))
        await cp.append("t", [UserMessage(f"{many} needle 针线"), UserMessage("same " * 20_000 + "end")])
        await cp.append("t", [UserMessage("字" * 20_000 + "尾"), UserMessage("plain")])
        await search.index(cp.store)
        assert await waiting(cp) == 0
        for query, count in (
            ("n0", 1), ("n149999", 1), ("n150000", 0), ("needle", 1), ("针", 1), ("针线", 1), ('"n7 n8"', 1),
            ('"n8 n7"', 0), ("same", 1), ('"same end"', 1), ("字尾", 1), ("字", 1), ("字字字字尾", 1), ("plain", 1),
        ):  # fmt: skip
            assert len(await search.search(cp.store, query, session_id="t")) == count, query

    with_cp(database, use)


@pytest.mark.processes
@pytest.mark.usefixtures("alone")
def test_processes_may_index_while_others_write(database: Database) -> None:
    script = """
        import asyncio, sys
        from byssus import UserMessage
        from byssus.search import search as searching
        from byssus.checkpointer import checkpointer_for

        async def main(place, name):
            async with checkpointer_for(place) as cp:
                for number in range(30):
                    await cp.append(f"{name}-{number % 3}", UserMessage(f"word {name} {number}"))
                    if number % 10 == 9:
                        await cp.delete_thread(f"{name}-0")
                    await searching.index(cp.store)

        asyncio.run(main(*sys.argv[1:]))
    """
    children = [forked.Process(["-c", textwrap.dedent(script), database.place, name]) for name in "abc"]
    assert [child.wait(100) for child in children] == [0, 0, 0]

    async def use(cp: Checkpointer) -> None:
        expected = {
            message.text
            for info in await cp.threads()
            for message in (await cp.load(info.id) or pytest.fail()).messages
        }
        assert len(expected) > 40
        assert set(await found(cp, "word", limit=1_000)) == expected
        await search.index(cp.store)
        assert await waiting(cp) == 0
        hits = await found(cp, "word", limit=1_000)
        assert len(hits) == len(expected)
        assert set(hits) == expected
        await search.reindex(cp.store)
        assert await found(cp, "word", limit=1_000) == hits

    with_cp(database, use)


def test_a_copy_is_searched_as_its_source_is(database: Database, tmp_path: Path) -> None:
    target = str(tmp_path / "copy.db")

    async def fill(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage(f"word {number}") for number in range(5)])
        await tool_log.log_tool_call(cp.store, "t", "look", "word of a tool", None, 0)
        await search.index(cp.store)

    async def look() -> Hits:
        async with checkpointer_for(target) as cp:
            return await search.search(cp.store, "word")

    with_cp(database, fill)
    copy(database.place, target)
    assert len(asyncio.run(look())) == 6

    async def compare(cp: Checkpointer) -> None:
        assert await search.search(cp.store, "word") == await asyncio.to_thread(asyncio.run, look())

    with_cp(database, compare)


@pytest.mark.usefixtures("alone")
def test_nothing_of_an_erased_text_is_left_in_the_index(tmp_path: Path) -> None:
    word = secrets.token_hex(16)

    def traces() -> int:  # of its end: FTS5 writes the beginning of a token but once
        return sum(file.read_bytes().count(word[-20:].encode()) for file in tmp_path.iterdir())

    async def main() -> None:
        async with SQLiteCheckpointer(tmp_path / "x.db") as cp:
            await cp.append("kept", [UserMessage(f"word {secrets.token_hex(16)}") for _ in range(50)])
            await cp.append("gone", UserMessage(f"word {word}"))
            await tool_log.log_tool_call(cp.store, "gone", "look", word, None, 0)
            await search.index(cp.store)
            assert traces() > 0
            assert (await cp.erase_thread("gone")).is_gone
            assert traces() == 0
            assert len(await found(cp, "word", limit=100)) == 50
            assert await waiting(cp) == 0

    asyncio.run(main())


@pytest.mark.usefixtures("alone")
def test_a_damaged_message_hides_no_other(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("word one"), UserMessage("word two"), UserMessage("word three")])
        await cp.store.write(lambda tx: tx.run("UPDATE messages SET body = '{no JSON, a word' WHERE seq = 2"))

        async def check() -> None:
            assert await found(cp, "word") == ["word three", "word one"]

        await in_each_state(cp, check)

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_a_full_disk_is_no_hindrance(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        texts = [f"word {'x' * 50} {number}" for number in range(1_500)]
        await cp.append("t", [UserMessage(text) for text in texts])
        database.fill(cp.store)
        try:
            assert await found(cp, "word", limit=10_000) == texts[::-1]
        finally:
            database.free(cp.store)
        assert await found(cp, "word", limit=10_000) == texts[::-1]

    with_cp(database, use)


# --- in the background ------------------------------------------------------------------------------------------------


def test_the_background_indexes_when_nobody_writes(database: Database) -> None:
    with database.store() as store:
        background = Indexer(store)
        assert background.look(store) == 0  # there is nothing
        with_cp(database, lambda cp: cp.append("t", [UserMessage(f"word {number}") for number in range(120)]))
        assert background.look(store) == 0  # somebody has just written
        with_cp(database, lambda cp: cp.append("t", UserMessage("word")))
        assert background.look(store) == 0
        assert background.look(store) >= 121
        assert store.read_now(index._state)["message"].waiting == 0


def test_a_long_backlog_does_not_wait_for_silence(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_BACKLOG", 10)
    with database.store() as store:
        background = Indexer(store)
        for _ in range(4):
            with_cp(database, lambda cp: cp.append("t", [UserMessage(f"word {number}") for number in range(30)]))
            background.look(store)
        assert store.read_now(index._state)["message"].waiting < 100


def test_the_thread_of_the_background_ends_with_the_store(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_LOOK", 0.01)
    with database.store() as store:
        background = index.of(store)
        assert index.of(store) is background
        background.start()
        background.start()
        thread = background._worker
        assert thread is not None
        with_cp(database, lambda cp: cp.append("t", UserMessage("word")))
        while store.read_now(index._state)["message"].waiting:
            pass
    thread.join(30)
    assert not thread.is_alive()


# --- bad input --------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "needs a letter"),
    ("%", {}, "needs a letter"),
    ("_", {}, "needs a letter"),
    ("-x", {}, "needs a letter"),
    (None, {}, "is for text"),
    ("x", {"limit": -1}, "limit"),
    ("x", {"limit": 10_001}, "10,000 at most"),
    ("x", {"limit": "9"}, "limit"),
    ("x", {"limit": True}, "limit"),
    ("x", {"offset": -1}, "offset"),
    ("x", {"order": "random"}, "'newest', 'relevance'"),
    ("x", {"order": None}, "'newest', 'relevance'"),
    ("x", {"kinds": []}, "message, tool_call"),
    ("x", {"kinds": ["row"]}, "message, tool_call"),
    ("x", {"kinds": [["row"]]}, "message, tool_call"),
    ("x", {"role": ""}, "role"),
    ("x", {"role": 7}, "role"),
    ("x", {"user_id": ""}, "user id"),
    ("x", {"user_id": "a\0"}, "user id"),
    ("x", {"session_id": 7}, "session id"),
    ("x", {"session_id": "\ud800"}, "session id"),
    ("x", {"since": "yesterday"}, "since"),
    ("x", {"until": 7}, "until"),
    ("x", {"since": "9999-12-31T23:59:59-23:00"}, "since"),
    ("x", {"marks": "**"}, "marks"),
    ("x", {"marks": ("**",)}, "marks"),
]


def test_what_cannot_be_searched_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for query, options, message in REFUSED:
            with case(query, options), pytest.raises(InputError, match=message):
                await search.search(cp.store, query, **options)

    with_cp(database, use)


@pytest.mark.usefixtures("alone")
def test_sql_and_operators_are_plain_text(database: Database) -> None:
    hostile = [
        "x'; DROP TABLE messages; --", 'x" OR 1=1', "x* NEAR(y)", "x AND NOT y", "x:y ^z", "{x} + y", "x & !y | z",
        "x <-> y", "x\\", "x'", "column:x", "x\ue000\u0031", "x \ue0001", "x (((", "x )", "x %s", "x :name", "x $1",
    ]  # fmt: skip

    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage(text) for text in hostile])

        async def check() -> None:
            for text in hostile:
                assert text in await found(cp, text), text
            for name in hostile:
                for filtered in ({"session_id": name}, {"user_id": name}, {"role": name}):
                    assert await found(cp, "x", **filtered) == []

        await in_each_state(cp, check)

    with_cp(database, use)


def test_a_day_as_the_end_is_all_of_that_day(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("today"))
        (hit,) = await cp.search("today")
        day = datetime.fromisoformat(hit["created_at"]).date()
        for since, until in ((day, day), (day.isoformat(), day.isoformat()), (None, hit["created_at"])):
            assert await cp.search("today", since=since, until=until) == [hit]
        assert await cp.search("today", until=day - timedelta(days=1)) == []
        assert await cp.search("today", since=day + timedelta(days=1)) == []

    with_cp(database, use)


def test_the_order_of_hits_does_not_depend_on_what_is_indexed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Indexer, "start", lambda _: None)

    async def use(cp: Checkpointer) -> None:
        await cp.create_session(None, session_id="s")
        other = await cp.save_message("s", "user", "nothing here")
        await cp.log_tool_call("s", "look", {"q": "apple call"}, None, 1)
        await cp.save_message("s", "user", "apple message")
        await cp.update_message("s", other, "still nothing")  # a new row with an old time
        before = await cp.search("apple")
        assert [hit["kind"] for hit in before] == ["message", "tool_call"]
        await cp.index()
        assert await cp.search("apple") == before

    with_cp(database, use)


# --- long searches ----------------------------------------------------------------------------------------------------

# Half a minute of matching: many excluded phrases, and long texts in which each of them almost is.
LONG_QUERY = "needle " + " ".join(f'-"a a {letter}" -"a a a {letter}"' for letter in "bcdefghijklmnopqrstuvwxy")
LONG_TEXTS = ["needle b c d e f g h i j k l m n o p q r s t u v w x y z " + "a " * 16_000] * 60


@pytest.mark.usefixtures("alone")
def test_long_searches_keep_no_reader_from_others_and_stop_when_they_are_cancelled(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("long", [UserMessage(text) for text in LONG_TEXTS])
        await cp.append("short", [UserMessage("a needle in a haystack")])
        searches = [asyncio.ensure_future(cp.search(LONG_QUERY, session_id="long", limit=1_000)) for _ in range(6)]
        async with asyncio.timeout(20):
            for _ in range(50):
                assert await cp.load("short")
            assert not any(search.done() for search in searches)
            for each in searches:
                each.cancel()
            await asyncio.wait(searches)
            assert [hit["snippet"] for hit in await cp.search("haystack")] == ["a needle in a **haystack**"]
        assert all(search.cancelled() for search in searches)

    with_cp(database, use)


@pytest.mark.parametrize("order", ["newest", "relevance"])
def test_a_search_that_takes_too_long_is_an_error_with_a_name(database: Database, order: SearchOrder) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("a needle")] * 3)
        await cp.append("t", [AssistantMessage([ToolCall("c", "look", {})])])
        with pytest.raises(SearchTimeout, match=r"stopped after 0 s and 0 texts; search in less .*timeout=seconds"):
            await cp.search("needle", order=order, timeout=0)
        with pytest.raises(TimeoutError):
            await cp.find_messages("look", timeout=0)
        assert len(await cp.search("needle", order=order, timeout=None)) == 3

    with_cp(database, use)


@pytest.mark.parametrize("timeout", [-1, "1", True, float("nan")])
def test_a_timeout_is_a_number_of_seconds(database: Database, timeout: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match="timeout must be a number of seconds"):
            await cp.search("needle", timeout=timeout)

    with_cp(database, use)


def test_texts_are_read_a_few_megabytes_at_a_time_and_all_are_found(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_PAGE_BYTES", 1_000)

    async def use(cp: Checkpointer) -> None:
        said = [f"needle {number} " + "x" * (number * 37 % 1_500) for number in range(40)]
        await cp.append("t", [UserMessage(text) for text in said])
        for order in ("newest", "relevance"):
            assert sorted(await found(cp, "needle", order=order, limit=100)) == sorted(said)
        assert await found(cp, "needle", limit=7, offset=20) == said[::-1][20:27]

    with_cp(database, use)


def test_a_hit_is_never_shown_with_the_text_of_another_row(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relevance reads a text twice. Meanwhile its row may be deleted, and its key given to another thread's."""

    async def use(cp: Checkpointer) -> None:
        await cp.append("mine", [UserMessage("my needle")])
        ranked = search._ranked

        def meanwhile(scored: Any) -> Any:
            monkeypatch.setattr(search, "_ranked", ranked)
            asyncio.run(write())
            return ranked(scored)

        async def write() -> None:
            async with database.checkpointer() as other:
                await other.delete_thread("mine")
                await other.append("theirs", [UserMessage("their needle")])

        monkeypatch.setattr(search, "_ranked", meanwhile)
        hits = await cp.search("needle", order="relevance")
        assert hits == []

    with_cp(database, use)
