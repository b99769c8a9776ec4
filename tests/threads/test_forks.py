"""Forks and rewinds: a shared past, and nothing that shows on the other side."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus.checkpointer import Checkpointer, Difference
from byssus.errors import InputError, NotFound, ThreadBusy
from byssus.messages import AssistantMessage, UserMessage
from byssus.queries.log import threads
from byssus.queries.versions import children, forks
from byssus.threads.encoding import message_row
from byssus.values.thread_key import ThreadKey
from tests.support.checkpointers import loaded, texts, with_cp
from tests.support.checkpoints import all_rows, count, ids, left, put, said
from tests.support.databases import Database
from tests.support.leases import agent_on, claim, with_two
from tests.support.plans import plan_of

WORDS = [UserMessage(text) for text in "abcdefgh"]


async def tell(cp: Checkpointer, thread_id: str = "t", upto: int = 3) -> None:
    """A thread with a checkpoint behind each message."""
    for step in range(1, upto + 1):
        await cp.save_extra(thread_id, {"step": step})
        await put(cp, thread_id, f"c{step}", step, WORDS[:step], state=step)


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "messages", "extra", "checkpoints"),
    [
        (None, "abcd", 3, ["c3", "c2", "c1"]),
        ("c2", "ab", 2, ["c2", "c1"]),
        ("c1", "a", 1, ["c1"]),
        (4, "abcd", 3, ["c3", "c2", "c1"]),
        (2, "ab", 3, ["c2", "c1"]),
        (0, "", 3, []),
    ],
)
def test_a_fork_has_what_there_was_up_to_its_point(
    database: Database, at: str | int | None, messages: str, extra: int, checkpoints: list[str]
) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.append("t", WORDS[3])
        new = await cp.fork("t", at=at)
        assert new != "t"
        assert "".join(await texts(cp, new)) == messages
        assert (await loaded(cp, new)).extra == {"step": extra}
        assert await ids(cp, new) == checkpoints
        for name in checkpoints:
            here, there = await cp.get(name, new), await cp.get(name, "t")
            assert here is not None
            assert there is not None
            assert (here.messages, here.state) == (there.messages, there.state)
            assert here.metadata.thread_id == new
        latest = await cp.get_latest(new)
        assert [latest.metadata.checkpoint_id] == checkpoints[:1] if latest else checkpoints == []

    with_cp(database, check)


def test_writing_to_one_side_never_shows_on_the_other(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.fork("t", new_id="f")
        await cp.append("t", UserMessage("t goes on"))
        await cp.append("f", UserMessage("f goes on"))
        await cp.save_extra("t", {"who": "t"})
        await put(cp, "f", "c2", 2, [UserMessage("replaced on f")])
        await put(cp, "t", "c9", 9, [UserMessage("t diverges")])
        assert await texts(cp, "t") == ["t diverges"]
        assert await texts(cp, "f") == ["a", "b", "c", "f goes on"]
        assert (await loaded(cp, "f")).extra == {"step": 3}
        assert (await said(cp, "t", "c2"), await said(cp, "f", "c2")) == (["a", "b"], ["replaced on f"])
        assert (await ids(cp, "t"), await ids(cp, "f")) == (["c9", "c3", "c2", "c1"], ["c3", "c2", "c1"])

    with_cp(database, check)


def test_removing_on_one_side_never_shows_on_the_other(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.fork("t", new_id="f")
        await cp.fork("f", new_id="g")
        assert await cp.delete_before("t", 3) == 2
        assert await cp.delete_before("g", 2) == 1
        assert [await ids(cp, name) for name in "tfg"] == [["c3"], ["c3", "c2", "c1"], ["c3", "c2"]]
        assert await cp.delete_thread("f") == 3
        assert [await ids(cp, name) for name in "tg"] == [["c3"], ["c3", "c2"]]
        assert await said(cp, "g", "c2") == ["a", "b"]
        assert await cp.delete_thread("t") == 1
        assert (await texts(cp, "g"), await said(cp, "g", "c3")) == (["a", "b", "c"], ["a", "b", "c"])
        assert await cp.delete_thread("g") == 2

    with_cp(database, check)


def test_a_name_that_only_forks_still_show_leads_to_them(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp, upto=1)
        await cp.fork("t", new_id="f")
        found = await cp.get("c1")
        assert found is not None
        assert found.metadata.thread_id == "t"  # there it was made, and it is one checkpoint
        await cp.delete_thread("t")
        found = await cp.get("c1")
        assert found is not None
        assert found.metadata.thread_id == "f"
        await cp.fork("f", new_id="g")
        with pytest.raises(InputError, match="more than one thread"):
            await cp.get("c1")

    with_cp(database, check)


def test_a_fork_writes_a_few_rows_whatever_the_length(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        for name, length in (("short", 2), ("long", 1_500)):
            await put(cp, name, "c1", 1, WORDS[:1])
            await put(cp, name, "c2", 2, [*WORDS[:1], *(UserMessage(str(number)) for number in range(length))])
        grown = []
        for name in ("short", "long"):
            before = await cp.store.read(all_rows)
            await cp.fork(name)
            grown.append([len(b) - len(a) for a, b in zip(before, await cp.store.read(all_rows), strict=True)])
        assert grown[0] == grown[1]
        assert sum(grown[0]) < 10
        assert await cp.store.read(count("messages")) == 3 + 1_501

    with_cp(database, check)


@pytest.mark.large
def test_a_fork_of_a_fork_of_a_fork_reads_all_of_its_past(database: Database) -> None:
    last = 15

    async def check(cp: Checkpointer) -> None:
        await put(cp, "0", "c0", 0, [UserMessage("0")])
        for depth in range(1, last + 1):
            await cp.fork(str(depth - 1), new_id=str(depth))
            await put(cp, str(depth), f"c{depth}", depth, [UserMessage(str(n)) for n in range(depth + 1)])
            await cp.append(str(depth - 1), UserMessage("aside"))
        assert await texts(cp, str(last)) == [str(number) for number in range(last + 1)]
        assert await ids(cp, str(last)) == [f"c{number}" for number in range(last, -1, -1)]
        for depth in range(last):
            await cp.delete_thread(str(depth))
        assert await texts(cp, str(last)) == [str(number) for number in range(last + 1)]
        assert await said(cp, str(last), "c7") == [str(number) for number in range(8)]
        assert await cp.store.read(count("messages")) == last + 1

    with_cp(database, check)


def test_a_seq_is_a_point_also_behind_many_puts_that_each_changed_the_last_message(database: Database) -> None:
    words = [UserMessage(str(number)) for number in range(20)]

    async def check(cp: Checkpointer) -> None:
        for step in range(1, 20):
            await put(cp, "t", f"draft {step}", 2 * step, [*words[:step], UserMessage("draft")])
            await put(cp, "t", f"plain {step}", 2 * step + 1, words[:step])
        for seq in (3, 9, 10, 11, 18):
            new = await cp.fork("t", at=seq)
            assert (await ids(cp, new))[0] == f"plain {seq}"

    with_cp(database, check)


def test_a_thread_is_not_forked_onto_another_one(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await put(cp, "there", "c", 1, [])
        before = await cp.store.read(all_rows)
        for name in ("there", "t"):
            with pytest.raises(InputError, match=f"there is already a thread '{name}'"):
                await cp.fork("t", new_id=name)
        assert await cp.store.read(all_rows) == before

    with_cp(database, check)


@pytest.mark.parametrize("at", [-1, 2**53, 2**70, 1.5, True, b"c1", "", "a\0b", ["c1"]])
def test_what_is_no_point_is_refused(database: Database, at: Any) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        before = await cp.store.read(all_rows)
        for doing in (cp.fork("t", at), cp.rewind("t", at)):
            with pytest.raises(InputError):
                await doing
        assert await cp.store.read(all_rows) == before

    with_cp(database, check)


def test_a_fork_while_calls_are_open_fills_them_for_itself(database: Database) -> None:
    def result(text: str) -> Any:
        return message_row(UserMessage(text))

    async def check(cp: Checkpointer) -> None:
        store = cp.store
        await store.write(threads.append, ThreadKey("", "t"), [message_row(AssistantMessage("ask"))], reserve=2)
        await store.write(threads.fill, ThreadKey("", "t"), [(3, result("second"))])
        await put(cp, "t", "c1", 1, [AssistantMessage("ask"), UserMessage("second")])
        for new, at in (("head", None), ("seq", 3), ("checkpoint", "c1")):
            await cp.fork("t", at, new_id=new)
        await store.write(threads.fill, ThreadKey("", "t"), [(2, result("of t"))])
        await store.write(threads.fill, ThreadKey("", "seq"), [(2, result("of seq"))])
        await store.write(threads.fill, ThreadKey("", "checkpoint"), [(2, result("of checkpoint"))])
        assert await texts(cp, "t") == ["ask", "of t", "second"]
        assert await texts(cp, "head") == ["ask", "second"]
        assert await texts(cp, "seq") == ["ask", "of seq", "second"]
        assert await texts(cp, "checkpoint") == ["ask", "of checkpoint", "second"]
        for name in ("t", "head", "checkpoint"):
            assert await said(cp, name, "c1") == ["ask", "second"]
        await cp.delete_thread("t")
        assert await texts(cp, "seq") == ["ask", "of seq", "second"]
        assert await store.read(lambda tx: tx.one("SELECT 1 FROM messages WHERE body LIKE '%of t%'")) is None

    with_cp(database, check)


def test_an_agent_runs_on_a_fork_as_on_any_thread(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c1", 1, [UserMessage("one"), AssistantMessage("two")])
        new = await cp.fork("t", "c1")
        await agent_on(cp, ["four"], new).prompt("three")
        assert await texts(cp, new) == ["one", "two", "three", "four"]
        assert await texts(cp, "t") == ["one", "two"]
        await agent_on(cp, ["other four"], "t").prompt("other three")
        assert await texts(cp, new) == ["one", "two", "three", "four"]

    with_cp(database, check)


def test_a_thread_that_somebody_drives_can_be_forked_and_not_rewound(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await claim(cp)
        new = await cp.fork("t", "c2")
        assert await texts(cp, new) == ["a", "b"]
        before = await cp.store.read(all_rows)
        with pytest.raises(ThreadBusy, match="'t'"):
            await cp.rewind("t", "c1")
        assert await cp.store.read(all_rows) == before
        await cp.append(new, UserMessage("nobody drives the fork"))

    with_cp(database, check)


def test_forks_of_a_thread_that_is_written_meanwhile_are_whole(database: Database) -> None:
    async def check(cp: Checkpointer, other: Checkpointer) -> None:
        await tell(cp, upto=1)
        await other.load("t")

        async def write() -> None:
            for step in range(2, 8):
                await put(other, "t", f"c{step}", step, WORDS[:step])

        *new, _ = await asyncio.gather(*(cp.fork("t") for _ in range(6)), write())
        for name in new:
            assert name is not None
            length = len(await texts(cp, name))
            assert await ids(cp, name) == [f"c{step}" for step in range(length, 0, -1)]

    with_two(database, check)


# --- rewinds ----------------------------------------------------------------------------------------------------------


def test_a_rewind_goes_back_and_what_came_after_stays_reachable(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp, upto=4)
        assert await cp.rewind("t", to="c2") == "c4"
        assert await texts(cp, "t") == ["a", "b"]
        assert (await loaded(cp, "t")).extra == {"step": 2}
        assert await ids(cp, "t") == ["c2", "c1"]
        latest = await cp.get_latest("t")
        assert latest is not None
        assert latest.metadata.checkpoint_id == "c2"
        assert await left(cp, "t") == ["c3", "c4"]
        assert await said(cp, "t", "c4") == ["a", "b", "c", "d"]
        await cp.append("t", UserMessage("another way"))
        assert await said(cp, "t", "c3") == ["a", "b", "c"]

    with_cp(database, check)


def test_a_rewind_to_what_was_left_brings_its_line_back(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp, upto=4)
        await cp.rewind("t", "c2")
        await put(cp, "t", "d3", 3, [*WORDS[:2], UserMessage("another way")])
        assert await cp.rewind("t", "c3") == "d3"
        assert await texts(cp, "t") == ["a", "b", "c"]
        assert await ids(cp, "t") == ["c3", "c2", "c1"]
        assert sorted(await left(cp, "t")) == ["c4", "d3"]
        assert await cp.rewind("t", "c4") is not None
        assert await ids(cp, "t") == ["c4", "c3", "c2", "c1"]

    with_cp(database, check)


def test_a_rewind_to_where_the_thread_stood_undoes_one(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.append("t", WORDS[3])
        await cp.save_extra("t", {"later": True})
        stood = await cp.rewind("t", "c1")
        assert stood is not None
        assert (await texts(cp, "t"), await ids(cp, "t")) == (["a"], ["c1"])
        await cp.rewind("t", stood)
        assert await texts(cp, "t") == ["a", "b", "c", "d"]
        assert (await loaded(cp, "t")).extra == {"later": True}
        assert await ids(cp, "t") == [stood, "c3", "c2", "c1"]

    with_cp(database, check)


def test_an_extra_that_was_saved_behind_the_checkpoint_is_not_lost(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.save_extra("t", {"later": True})
        stood = await cp.rewind("t", "c1")
        assert stood is not None
        await cp.rewind("t", stood)
        assert (await texts(cp, "t"), (await loaded(cp, "t")).extra) == (["a", "b", "c"], {"later": True})

    with_cp(database, check)


def test_where_the_thread_stood_has_a_name_in_this_thread(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.fork("t", new_id="f")
        await cp.delete_before("t", 9)  # c3 is only there for the fork
        stood = await cp.rewind("t", 1)
        assert stood is not None
        assert await said(cp, "t", stood) == ["a", "b", "c"]
        await cp.delete_thread("f")
        assert await said(cp, "t", stood) == ["a", "b", "c"]

    with_cp(database, check)


def test_where_nothing_was_written_since_a_fork_or_a_rewind_there_is_a_name_already(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.fork("t", new_id="f")
        assert await cp.rewind("f", "c2") == "c3"
        assert await cp.rewind("f", "c1") == "c2"
        await put(cp, "f", "f9", 9, [UserMessage("instead")])
        assert sorted(await left(cp, "f")) == []
        assert await ids(cp, "f") == ["f9", "c1"]

    with_cp(database, check)


def test_a_rewind_from_the_very_beginning_has_a_name_for_that_too(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c0", 0, [])
        await cp.delete_before("t", 1)
        left = await cp.rewind("t", 0)
        assert await said(cp, "t", left) == []

    with_cp(database, check)


@pytest.mark.parametrize(("to", "messages", "checkpoints"), [(0, "", []), (2, "ab", ["c2", "c1"]), (3, "abc", None)])
def test_a_seq_is_a_point_to_rewind_to(
    database: Database, to: int, messages: str, checkpoints: list[str] | None
) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        assert await cp.rewind("t", to) == "c3"
        assert "".join(await texts(cp, "t")) == messages
        assert await ids(cp, "t") == (["c3", "c2", "c1"] if checkpoints is None else checkpoints)

    with_cp(database, check)


def test_the_same_id_on_a_new_line_does_not_destroy_the_one_that_was_left(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.rewind("t", "c1")
        await put(cp, "t", "c2", 2, [WORDS[0], UserMessage("new b")])
        assert await said(cp, "t", "c2") == ["a", "new b"]
        assert sorted(await left(cp, "t")) == ["c2", "c3"]
        await cp.rewind("t", "c3")
        assert await said(cp, "t", "c2") == ["a", "b"]

    with_cp(database, check)


def test_a_rewind_of_a_fork_goes_back_before_the_fork_and_leaves_the_other_alone(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.fork("t", new_id="f")
        await put(cp, "f", "f4", 4, WORDS[:4])
        assert await cp.rewind("f", "c1") == "f4"
        assert (await texts(cp, "f"), await ids(cp, "f")) == (["a"], ["c1"])
        assert (await texts(cp, "t"), await ids(cp, "t")) == (["a", "b", "c"], ["c3", "c2", "c1"])
        assert await cp.rewind("f", "c3") is not None
        assert (await texts(cp, "f"), await ids(cp, "f")) == (["a", "b", "c"], ["c3", "c2", "c1"])

    with_cp(database, check)


# --- trees and differences --------------------------------------------------------------------------------------------


def test_a_tree_shows_threads_forks_and_checkpoints(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.fork("t", "c2", new_id="f")
        await cp.fork("f", 1, new_id="g")
        await put(cp, "f", "f3", 3, [*WORDS[:2], UserMessage("x")], tags=["new"], summary="a try")
        tree = await cp.tree("t")
        assert tree is not None
        assert (tree.forked_from, tree.forked_at, tree.message_count, tree.left) == (None, None, 3, [])
        assert [about.checkpoint_id for about in tree.checkpoints] == ["c1", "c2", "c3"]
        (fork,) = tree.forks
        assert (fork.thread_id, fork.forked_from, fork.forked_at, fork.message_count) == ("f", "t", 2, 3)
        assert [about.checkpoint_id for about in fork.checkpoints] == ["f3"]
        (inner,) = fork.forks
        assert (inner.thread_id, inner.forked_from, inner.forked_at, inner.checkpoints) == ("g", "f", 1, [])
        assert await cp.tree("f") == fork
        assert "message 2 · fork f (3 messages)" in str(tree)

    with_cp(database, check)


def test_a_tree_says_at_which_message_each_checkpoint_is_and_where_what_was_left_parts(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.rewind("t", "c2")
        await put(cp, "t", "d3", 3, [*WORDS[:2], UserMessage("x")])
        await cp.fork("t", new_id="f")
        await cp.rewind("t", "c1")
        tree = await cp.tree("t")
        assert tree is not None
        assert [(about.checkpoint_id, about.seq) for about in tree.checkpoints] == [("c1", 1)]
        later, earlier = tree.left_branches
        assert [(about.checkpoint_id, about.seq) for about in later.checkpoints] == [("c2", 2), ("d3", 3)]
        assert (later.parted_at, later.within, later.forks) == (1, None, ["f"])
        assert [(about.checkpoint_id, about.seq) for about in earlier.checkpoints] == [("c3", 3)]
        assert (earlier.parted_at, earlier.within, earlier.forks) == (2, 0, [])
        assert [about.checkpoint_id for about in tree.left] == ["c3", "c2", "d3"]

    with_cp(database, check)


def test_what_a_deleted_thread_shared_is_in_the_trees_of_its_forks(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        for name, at in (("f", "c2"), ("g", "c3")):
            await cp.fork("t", at, new_id=name)
        await cp.delete_thread("t")
        for name in "fg":
            tree = await cp.tree(name)
            assert tree is not None
            assert tree.forked_from is None
            assert [about.checkpoint_id for about in reversed(tree.checkpoints)] == await ids(cp, name)

    with_cp(database, check)


def test_a_difference_says_where_two_threads_part(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.fork("t", new_id="f")
        assert await cp.diff("t", "f") == await cp.diff("t", "t") == Difference(3, 3, 0, 0)
        await cp.append("f", WORDS[3:5])
        assert await cp.diff("t", "f") == Difference(3, 3, 0, 2)
        await cp.append("t", WORDS[3:4])  # the same words, said twice
        assert await cp.diff("t", "f") == Difference(4, 4, 0, 1)
        await cp.append("t", UserMessage("x"))
        assert await cp.diff("t", "f") == Difference(4, 4, 1, 1)
        await cp.append("u", WORDS[:2])
        assert await cp.diff("f", "u") == Difference(2, 2, 3, 0)
        with pytest.raises(NotFound):
            await cp.diff("t", "nobody")

    with_cp(database, check)


def test_a_fork_and_a_rewind_do_not_read_the_ledger_of_a_long_thread(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("hi"))
        await asyncio.gather(*(cp.log_tool_call("t", "look", {"x": "x" * 200}, "seen", 1.0) for _ in range(200)))
        plans = await cp.store.read(plan_of, children.close_calls, 1)
        assert "tool_calls_open" in plans, plans
        plans = await cp.store.read(plan_of, forks._has_questions, 1, 9)
        assert "tool_calls_asked" in plans, plans

    with_cp(database, use)
