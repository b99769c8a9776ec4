"""How every checkpointer is used, whatever the database is: lists, many callers at once, opening and closing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from byssus import UserMessage
from byssus.checkpointer import Checkpointer, ThreadInfo
from byssus.errors import InputError, StoreNotOpen
from tests.support.checkpointers import loaded, texts, with_cp
from tests.support.databases import Database

# --- the list of threads ----------------------------------------------------------------------------------------------


def test_the_thread_that_was_written_last_is_listed_first(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for thread_id in ("a", "b", "c"):
            await cp.append(thread_id, UserMessage("x"))
        assert [info.id for info in await cp.threads()] == ["c", "b", "a"]
        await cp.append("a", [UserMessage("y"), UserMessage("z")])
        assert [info.id for info in await cp.threads()] == ["a", "c", "b"]
        await cp.save_extra("b", {"x": 1})
        assert [info.id for info in await cp.threads()] == ["b", "a", "c"]

    with_cp(database, use)


def test_a_list_tells_how_many_messages_and_when(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("x")] * 3)
        (first,) = await cp.threads()
        await cp.append("t", UserMessage("y"))
        await cp.save_extra("e", {})
        empty, later = await cp.threads()
        assert (first.id, first.message_count, first.created_at) == ("t", 3, first.updated_at)
        assert (later.message_count, later.created_at) == (4, first.created_at)
        assert later.updated_at > first.updated_at
        assert (empty.id, empty.message_count) == ("e", 0)

    with_cp(database, use)


@pytest.mark.large
@pytest.mark.parametrize("by_id", [False, True], ids=["before=ThreadInfo", "before=str"])
def test_a_thousand_threads_are_paged_without_gaps_or_repeats(database: Database, by_id: bool) -> None:
    async def use(cp: Checkpointer) -> None:
        ids = [f"thread {i}" for i in range(1000)]
        await asyncio.gather(*(cp.append(thread_id, UserMessage("x")) for thread_id in ids))
        everything = await cp.threads(limit=5000)
        seen: list[ThreadInfo] = []
        while page := await cp.threads(limit=7, before=(seen[-1].id if by_id else seen[-1]) if seen else None):
            seen += page
        assert seen == everything
        assert sorted(info.id for info in seen) == sorted(ids)
        assert len(await cp.threads()) == 50

    with_cp(database, use)


def test_paging_goes_on_where_it_was_though_threads_are_written_meanwhile(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for i in range(10):
            await cp.append(f"t{i}", UserMessage("x"))
        first = await cp.threads(limit=5)
        await cp.append("new", UserMessage("x"))
        await cp.append(first[-1].id, UserMessage("moves to the top"))
        assert [info.id for info in await cp.threads(before=first[-1])] == ["t4", "t3", "t2", "t1", "t0"]

    with_cp(database, use)


def test_the_limits_of_a_list(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("x"))
        assert await cp.threads(limit=0) == []
        assert len(await cp.threads(limit=1)) == 1
        assert len(await cp.threads(limit=10**6)) == 1
        assert await cp.threads(before="t") == []
        with pytest.raises(InputError, match="-1"):
            await cp.threads(limit=-1)

    with_cp(database, use)


@pytest.mark.parametrize("limit", [2**63, 2.5], ids=str)
def test_a_limit_that_is_no_usable_number_is_an_input_error(database: Database, limit: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("x"))
        with pytest.raises(InputError, match="limit"):
            await cp.threads(limit=limit)

    with_cp(database, use)


def test_to_list_before_an_unknown_thread_is_an_input_error_that_names_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("x"))
        with pytest.raises(InputError, match="'nobody'"):
            await cp.threads(before="nobody")
        for unusable in ("", "\ud800"):
            with pytest.raises(InputError, match="thread id"):
                await cp.threads(before=unusable)

    with_cp(database, use)


# --- at the same time -------------------------------------------------------------------------------------------------


def test_appends_at_the_same_time_lose_nothing_and_stay_together(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        async with database.checkpointer() as other:
            await asyncio.gather(
                *(
                    (cp, other)[call % 2].append("t", [UserMessage(f"{call} {part}") for part in range(1 + call % 5)])
                    for call in range(300)
                )
            )
        seen = await texts(cp, "t")
        order = list(dict.fromkeys(text.split()[0] for text in seen))
        assert seen == [f"{call} {part}" for call in order for part in range(1 + int(call) % 5)]
        assert sorted(map(int, order)) == list(range(300))

    with_cp(database, use)


def test_writes_of_one_task_take_effect_in_its_order(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        writes = [asyncio.ensure_future(cp.append("t", UserMessage(str(i)))) for i in range(200)]
        await asyncio.gather(*writes)
        assert await texts(cp, "t") == [str(i) for i in range(200)]

    with_cp(database, use)


def test_what_one_opener_wrote_the_other_sees_at_once(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        async with database.checkpointer() as other:
            for i in range(20):
                writer, reader = (cp, other) if i % 2 else (other, cp)
                await writer.append("t", UserMessage(str(i)))
                await writer.save_extra("t", {"i": i})
                thread = await loaded(reader, "t")
                assert len(thread.messages) == i + 1
                assert thread.extra == {"i": i}

    with_cp(database, use)


def test_a_cancelled_append_is_settled_when_the_cancellation_arrives(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        expected: list[str] = []
        for call in range(60):
            task = asyncio.ensure_future(cp.append("t", [UserMessage(f"{call} {part}") for part in "abc"]))
            for _ in range(call % 6):  # let it get to different places
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            thread = await cp.load("t")
            stored = [message.text for message in thread.messages] if thread else []
            if len(stored) > len(expected):
                expected += [f"{call} {part}" for part in "abc"]
            assert stored == expected  # all of it or nothing
            expected.append(f"after {call}")
            await cp.append("t", UserMessage(expected[-1]))
            assert await texts(cp, "t") == expected  # and nothing comes late

    with_cp(database, use)


def test_a_time_limit_on_an_append_does_not_leave_it_half_done(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        stored = 0
        for _ in range(20):
            try:
                async with asyncio.timeout(0):
                    await cp.append("t", [UserMessage("a"), UserMessage("b")])
            except TimeoutError:
                pass
            thread = await cp.load("t")
            now = len(thread.messages) if thread else 0
            assert now in (stored, stored + 2)
            stored = now

    with_cp(database, use)


# --- open and close ---------------------------------------------------------------------------------------------------


async def assert_not_open(cp: Checkpointer) -> None:
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: cp.load("t"),
        lambda: cp.append("t", UserMessage("x")),
        lambda: cp.save_extra("t", {}),
        cp.threads,
        lambda: cp.threads(before="t"),
    ]
    for call in calls:
        with pytest.raises(StoreNotOpen, match="async with"):
            await call()
    with pytest.raises(StoreNotOpen, match="async with"):
        _ = cp.store


def test_use_before_opening_is_an_error_that_names_async_with(database: Database) -> None:
    asyncio.run(assert_not_open(database.checkpointer()))


def test_use_after_closing_is_an_error_that_names_async_with(database: Database) -> None:
    async def main() -> None:
        cp = database.checkpointer()
        async with cp:
            await cp.append("t", UserMessage("x"))
        await assert_not_open(cp)

    asyncio.run(main())


def test_close_may_be_called_at_any_time_and_any_number_of_times(database: Database) -> None:
    async def main() -> None:
        cp = database.checkpointer()
        await cp.close()
        await cp.open()
        await asyncio.gather(cp.close(), cp.close())
        await cp.close()
        async with database.checkpointer() as other, database.checkpointer() as third:
            await other.close()
            await other.close()
            await third.append("t", UserMessage("not closed by the others"))
            assert await texts(third, "t") == ["not closed by the others"]

    asyncio.run(main())


def test_a_checkpointer_can_be_opened_again_and_holds_what_it_held(database: Database) -> None:
    async def main() -> None:
        cp = database.checkpointer()
        for i in range(3):
            async with cp:
                await cp.append("t", UserMessage(str(i)))
        async with database.checkpointer() as another:
            assert await texts(another, "t") == ["0", "1", "2"]

    asyncio.run(main())


def test_the_last_of_several_blocks_closes_it(database: Database) -> None:
    async def main() -> None:
        cp = database.checkpointer()
        async with cp:
            async with cp as same:
                assert same is cp
            await cp.append("t", UserMessage("hi"))  # still open

            async def inside(pause: float) -> None:
                async with cp:
                    await asyncio.sleep(pause)
                    await cp.append("t", UserMessage("hi"))

            await asyncio.gather(inside(0), inside(0.05))
            await cp.append("t", UserMessage("hi"))
        with pytest.raises(StoreNotOpen):
            await cp.load("t")
        async with cp:
            await cp.close()
        async with cp:
            thread = await cp.load("t")
            assert thread is not None
            assert len(thread.messages) == 4
        with pytest.raises(StoreNotOpen):
            await cp.load("t")

    asyncio.run(main())


def test_open_returns_the_checkpointer_and_may_be_called_twice(database: Database) -> None:
    async def main() -> None:
        cp = database.checkpointer()
        assert await cp.open() is cp
        assert await cp.open() is cp
        await cp.append("t", UserMessage("x"))
        await cp.close()
        await assert_not_open(cp)

    asyncio.run(main())


def test_close_waits_for_what_was_submitted(database: Database) -> None:
    async def main() -> None:
        cp = await database.checkpointer().open()
        writes = [asyncio.ensure_future(cp.append("t", UserMessage(str(i)))) for i in range(50)]
        await asyncio.sleep(0)  # they are submitted now
        await cp.close()
        await asyncio.gather(*writes)
        async with database.checkpointer() as again:
            assert len(await texts(again, "t")) == 50

    asyncio.run(main())


def test_one_checkpointer_serves_one_event_loop_after_another(database: Database) -> None:
    cp = database.checkpointer()
    asyncio.run(_open(cp))
    for i in range(3):
        asyncio.run(cp.append("t", UserMessage(str(i))))
    assert asyncio.run(texts(cp, "t")) == ["0", "1", "2"]
    asyncio.run(cp.close())


async def _open(cp: Checkpointer) -> None:
    await cp.open()
