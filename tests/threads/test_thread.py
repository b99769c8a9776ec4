"""Loading a thread: all of it, or pages from its end, which cost the same however long it is."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byssus import AssistantMessage, UserMessage
from byssus.checkpointer import Checkpointer, Thread
from byssus.errors import InputError
from byssus.queries.log import threads
from byssus.queries.log.branches import Point, last_reply
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey
from tests.support.checkpointers import loaded, with_cp
from tests.support.databases import Database
from tests.support.plans import explained
from tests.support.quick import examples


def said(*numbers: int) -> list[UserMessage]:
    return [UserMessage(str(number)) for number in numbers]


def ids(tx: Tx, thread: Thread) -> list[str]:
    """The ids by which the messages of a thread can be deleted."""
    known = (threads.message_id(tx, thread.position.branch, seq) for seq in thread.seqs)
    return [name for name in known if name is not None]


def shown(thread: Thread | None) -> list[int]:
    assert thread is not None
    return [int(message.text) for message in thread.messages]


def test_the_end_of_a_thread_is_loaded_page_by_page(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said(*range(1, 11)))
        await cp.save_extra("t", {"a": 1})
        page = await cp.load("t", last=4)
        assert page is not None
        assert (shown(page), page.seqs, page.has_earlier) == ([7, 8, 9, 10], [7, 8, 9, 10], True)
        assert (page.extra, page.message_count) == ({"a": 1}, 10)
        page = await cp.load("t", last=4, before=7)
        assert page is not None
        assert (shown(page), page.has_earlier) == ([3, 4, 5, 6], True)
        page = await cp.load("t", last=4, before=3)
        assert page is not None
        assert (shown(page), page.has_earlier) == ([1, 2], False)
        assert shown(await cp.load("t", before=4)) == [1, 2, 3]
        assert shown(await cp.load("t", last=99, before=99)) == [*range(1, 11)]
        assert shown(await cp.load("t", before=1)) == []
        whole = await loaded(cp, "t")
        assert (len(whole.messages), whole.has_earlier, whole.message_count) == (10, False, 10)
        assert await cp.load("unknown", last=1) is None

    with_cp(database, use)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1", 2**53])
@pytest.mark.parametrize("name", ["last", "before"])
def test_a_page_that_is_none_is_refused(database: Database, name: str, value: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said(1))
        with pytest.raises(InputError, match=f"{name} must be a number from 1 up"):
            await cp.load("t", **{name: value})

    with_cp(database, use)


def test_pages_are_longer_than_a_read_if_they_are_asked_to_be(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said(*range(2_345)))
        for last in (999, 1_000, 1_001, 2_000, 2_344):
            page = await cp.load("t", last=last)
            assert shown(page) == [*range(2_345 - last, 2_345)]
            assert page is not None
            assert page.has_earlier
        assert shown(await cp.load("t", last=2_345)) == [*range(2_345)]

    with_cp(database, use)


def test_pages_of_forks_with_holes_are_the_end_of_what_is_loaded(database: Database) -> None:
    names = itertools.count()

    with asyncio.Runner() as runner:
        cp = runner.run(database.checkpointer().open())

        @settings(max_examples=examples(40), deadline=None)
        @given(st.lists(st.tuples(st.sampled_from("afrd"), st.integers(0, 30)), max_size=12), st.integers(1, 12))
        def check(changes: list[tuple[str, int]], last: int) -> None:
            runner.run(compare(changes, last))

        async def compare(changes: list[tuple[str, int]], last: int) -> None:
            thread = f"t{next(names)}"
            for kind, number in [("a", 5), *changes]:
                before = await loaded(cp, thread) if kind != "a" else None
                if kind == "a":
                    await cp.append(thread, [{"id": f"m{next(names)}", "role": "user", "content": "x"}] * (number // 3))
                    await cp.append(thread, said(next(names)))
                elif before is not None and kind == "f":
                    thread = await cp.fork(thread, number % (before.position.head + 1))
                elif before is not None and kind == "r":
                    await cp.rewind(thread, number % (before.position.head + 1))
                elif before is not None and before.messages:
                    known = await cp.store.read(ids, before)
                    await cp.delete_message(thread, known[number % len(known)])
            whole = await loaded(cp, thread)
            found: list[int] = []
            page: Thread | None = await cp.load(thread, last=last)
            while page is not None:
                assert len(page.messages) == min(last, len(whole.seqs) - len(found))
                found = [*page.seqs, *found]
                assert page.has_earlier == (len(found) < len(whole.seqs))
                page = await cp.load(thread, last=last, before=found[0]) if page.has_earlier else None
            assert found == [*whole.seqs]
            assert len(found) == whole.message_count

        check()
        runner.run(cp.close())


def test_a_page_is_a_seek_from_the_end_and_not_a_scan(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [*said(*range(3_000)), AssistantMessage("4")])
        await cp.fork("t", 2_000, new_id="fork")
        await cp.append("fork", said(*range(1_000)))
        for name in ("t", "fork"):
            row = await cp.store.read(threads.find, ThreadKey("", name))
            assert row is not None
            back = {"before": row.head + 1, "limit": 40}
            on = {"after": 1_500, "upto": row.head, "limit": 40}
            pages = [
                await cp.store.read(explained, threads.page_before, row.branch, **back),
                await cp.store.read(explained, threads.page, row.branch, **on),
            ]
            for page in pages:
                assert len(page.plans) == 1
                assert page.parameters[0]["upto"] - page.parameters[0]["after"] == 40
                plan = page.plans[0]
                # With a handful of segments, any index of theirs costs Postgres the same.
                assert "segments_" in plan, plan
                assert "messages_branch_seq_key" in plan or "(branch=? AND seq>? AND seq<?)" in plan, plan
                assert "SCAN" not in plan.upper().replace("INDEX SCAN", "").replace("HEAP SCAN", ""), plan
        reply = await cp.store.read(lambda tx: explained(tx, last_reply, Point(1, 3_001, 3_001)))
        assert len(reply.plans) == 1
        assert reply.parameters[0]["upto"] - reply.parameters[0]["after"] == 64

    with_cp(database, use)
