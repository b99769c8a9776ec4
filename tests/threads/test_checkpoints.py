"""Checkpoints: what was put is what comes back, in the order and with the counts that lists promise."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from byssus.checkpointer import Checkpoint, CheckpointBackend, Checkpointer, CheckpointMetadata
from byssus.errors import InputError, NotFound, ThreadBusy
from byssus.messages import AssistantMessage, Message, Note, ToolCall, ToolResultMessage, UserMessage
from byssus.queries.log import threads
from byssus.threads.encoding import message_row
from byssus.values import clock
from byssus.values.thread_key import ThreadKey
from tests.support.cases import case
from tests.support.checkpointers import loaded, texts, with_cp
from tests.support.checkpoints import all_rows, ids, put, said
from tests.support.databases import Database
from tests.support.leases import claim, with_two

HELLO: list[Message] = [UserMessage("hello"), AssistantMessage("hi"), UserMessage("bye")]


# --- put and get ------------------------------------------------------------------------------------------------------


def test_what_was_put_is_what_get_returns(database: Database) -> None:
    made = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
    about = CheckpointMetadata("t", "c7", 7, "c6", made, ["milestone", "b"], "plan agreed")
    checkpoint = Checkpoint(about, list(HELLO), {"plan": [1, {"x": None}]}, {"tool": "ok"}, "review")

    async def check(cp: Checkpointer) -> None:
        assert await cp.put(checkpoint) == "c7"
        assert await cp.get("c7", thread_id="t") == checkpoint
        assert await cp.get_latest("t") == checkpoint
        assert await cp.get("c7") == checkpoint
        assert await cp.list_checkpoints("t") == [about]
        assert await cp.list_threads() == [about]

    with_cp(database, check)


def test_a_checkpoint_needs_no_more_than_a_thread(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        before = clock.now()
        given = Checkpoint(CheckpointMetadata("t"))
        name = await cp.put(given)
        found = await cp.get(name, "t")
        assert found == given
        assert found is not None
        assert (found.metadata.step, found.metadata.tags, found.messages, found.state) == (0, [], [], {})
        assert before <= found.metadata.created_at <= clock.now()
        assert await texts(cp, "t") == []

    with_cp(database, check)


def test_times_are_told_in_utc_whatever_zone_they_came_in(database: Database) -> None:
    noon = datetime(2026, 6, 1, 12, tzinfo=timezone(timedelta(hours=5)))

    async def check(cp: Checkpointer) -> None:
        await cp.put(Checkpoint(CheckpointMetadata("t", "c", created_at=noon)))
        (about,) = await cp.list_checkpoints("t")
        assert about.created_at == "2026-06-01T07:00:00.000000Z"

    with_cp(database, check)


MESSAGES: list[Any] = [
    UserMessage("ours", id="u1", created_at="2026-01-01"),
    {"role": "user", "content": "a dict"},
    {"z": 1, "a": {"role": 7}},
    AssistantMessage([ToolCall("c1", "look", {"n": 1})], "tool_use"),
    ToolResultMessage("c1", "look", "seen", details={"rows": [1]}),
    {"role": "assistant", "content": [{"type": "text", "text": "\0 \ud800 🪸"}], "beyond": math.inf},
    Note({"role": "system", "content": "be nice"}),
    {},
    [],
    "text",
    None,
    17,
    1.5,
    True,
    2**70,
]


def test_dicts_come_back_as_dicts_and_our_messages_as_ours(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c1", 1, MESSAGES)
        found = await cp.get("c1", "t")
        assert found is not None
        assert found.messages == MESSAGES
        assert list(map(type, found.messages)) == list(map(type, MESSAGES))
        assert list(found.messages[2]) == ["z", "a"]
        await put(cp, "t", "c2", 2, found.messages)
        assert len((await loaded(cp, "t")).messages) == len(MESSAGES)

    with_cp(database, check)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_any_json_is_a_message_and_a_state(database: Database) -> None:
    with asyncio.Runner() as runner:
        cp = database.checkpointer(durability="normal")
        runner.run(cp.open())

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(messages=st.lists(JSON, max_size=4), state=JSON, result=JSON)
        def check(messages: list[Any], state: Any, result: Any) -> None:
            runner.run(cp.put(Checkpoint(CheckpointMetadata("t", "c"), messages, state, result)))
            found = runner.run(cp.get("c"))
            assert found is not None
            assert repr((found.messages, found.state, found.tools_result)) == repr((messages, state, result))

        try:
            check()
        finally:
            runner.run(cp.close())


def test_a_history_of_several_pages_is_put_compared_and_read_whole(database: Database) -> None:
    long = [UserMessage(str(number)) for number in range(2_500)]

    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "a", 1, long[:1_000])
        await put(cp, "t", "b", 2, long)
        await put(cp, "t", "c", 3, [*long[:2_000], UserMessage("another")])
        assert await said(cp, "t", "a") == [str(number) for number in range(1_000)]
        assert await said(cp, "t", "b") == [str(number) for number in range(2_500)]
        assert await said(cp, "t", "c") == [*(str(number) for number in range(2_000)), "another"]
        assert await cp.store.read(lambda tx: tx.one("SELECT COUNT(*) FROM messages")) == (2_501,)

    with_cp(database, check)


# --- what a put does to the thread ------------------------------------------------------------------------------------


def test_messages_that_extend_the_thread_append_only_the_tail(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await cp.append("t", HELLO[:1])
        for step in (1, 2, 3):
            await put(cp, "t", f"c{step}", step, HELLO[:step])
            assert (await loaded(cp, "t")).messages == HELLO[:step]
        assert await cp.store.read(lambda tx: tx.one("SELECT COUNT(*) FROM messages")) == (3,)
        assert [len(await said(cp, "t", f"c{step}")) for step in (1, 2, 3)] == [1, 2, 3]

    with_cp(database, check)


def test_messages_that_the_thread_begins_with_leave_it_as_it_is(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await cp.append("t", HELLO)
        await put(cp, "t", "late", 9, HELLO[:1])
        await put(cp, "t", "none", 9, [])
        assert (await loaded(cp, "t")).messages == HELLO
        assert (await said(cp, "t", "late"), await said(cp, "t", "none")) == (["hello"], [])

    with_cp(database, check)


def test_messages_that_diverge_become_a_branch_that_the_thread_goes_over_to(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c1", 1, HELLO)
        await put(cp, "t", "c2", 2, [HELLO[0], UserMessage("instead")])
        assert await texts(cp, "t") == ["hello", "instead"]
        assert await said(cp, "t", "c1") == ["hello", "hi", "bye"]
        assert await ids(cp, "t") == ["c2", "c1"]
        await cp.append("t", UserMessage("on"))
        assert await texts(cp, "t") == ["hello", "instead", "on"]
        assert await said(cp, "t", "c2") == ["hello", "instead"]

    with_cp(database, check)


def test_what_diverges_below_the_highest_step_does_not_move_the_thread(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c5", 5, HELLO)
        await put(cp, "t", "c4", 4, [UserMessage("aside")])
        assert await texts(cp, "t") == ["hello", "hi", "bye"]
        assert await said(cp, "t", "c4") == ["aside"]
        await put(cp, "t", "same", 5, [UserMessage("over")])
        assert await texts(cp, "t") == ["over"]

    with_cp(database, check)


def test_the_replaced_one_does_not_count_and_the_others_do(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c4", 4, HELLO[:1])
        await put(cp, "t", "c5", 5, HELLO)
        await put(cp, "t", "c5", 0, [UserMessage("aside")])
        assert await texts(cp, "t") == ["hello", "hi", "bye"]  # c4 is higher
        await put(cp, "t", "c4", 0, [UserMessage("over")])
        assert await texts(cp, "t") == ["over"]

    with_cp(database, check)


def test_what_a_put_leaves_without_a_name_is_named_outside_the_list(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c1", 1, HELLO[:1])
        await cp.append("t", HELLO[1:])
        await put(cp, "t", "c2", 2, [UserMessage("instead")])
        assert await ids(cp, "t") == ["c2", "c1"]
        tree = await cp.tree("t")
        assert tree is not None
        (left,) = tree.left
        assert left.tags == ["left"]
        assert await said(cp, "t", left.checkpoint_id) == ["hello", "hi", "bye"]
        await put(cp, "t", "c3", 3, [UserMessage("again")])  # what this leaves has a name: c2
        tree = await cp.tree("t")
        assert tree is not None
        assert len(tree.left) == 1

    with_cp(database, check)


@pytest.mark.parametrize(
    ("there", "given", "are_same"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}, True),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": 0}, {"a": False}, False),
        ({"a": None}, {}, False),
        ([1, 2], [2, 1], False),
        ("é", "e\u0301", False),
        ({"role": "user", "content": "x"}, UserMessage("x"), False),
        (UserMessage("x", id="1"), UserMessage("x", id="2"), False),
    ],
)
def test_the_order_of_keys_does_not_matter_and_everything_else_does(
    database: Database, there: Any, given: Any, are_same: bool
) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c1", 1, [there, "end"])
        await put(cp, "t", "c2", 2, [given])
        assert len((await loaded(cp, "t")).messages) == (2 if are_same else 1)
        found = await cp.get("c2", "t")
        assert found is not None
        assert repr(found.messages) == repr([there if are_same else given])

    with_cp(database, check)


# --- the same id ------------------------------------------------------------------------------------------------------


def test_an_id_that_is_put_again_is_replaced_and_nothing_else(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        for step in (1, 2, 3):
            await put(cp, "t", f"c{step}", step, HELLO[:step], state={"step": step})
        again = Checkpoint(CheckpointMetadata("t", "c2", 2, tags=["new"]), HELLO[:2], {"again": True})
        await cp.put(again)
        assert await cp.get("c2", "t") == again
        assert await ids(cp, "t") == ["c3", "c2", "c1"]
        assert [(await cp.get(name, "t")).state for name in ("c1", "c3")] == [{"step": 1}, {"step": 3}]  # type: ignore[union-attr]
        await put(cp, "t", "c2", 9, HELLO)
        assert await ids(cp, "t") == ["c2", "c3", "c1"]

    with_cp(database, check)


def test_messages_that_only_the_replaced_one_led_to_are_gone(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "high", 9, HELLO)
        for number in range(5):
            await put(cp, "t", "aside", 1, [UserMessage(f"draft {number}")])
        assert await said(cp, "t", "aside") == ["draft 4"]
        assert await cp.store.read(lambda tx: tx.one("SELECT COUNT(*) FROM messages")) == (4,)

    with_cp(database, check)


def test_the_same_id_in_another_thread_is_another_checkpoint(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c", 1, HELLO[:1])
        await put(cp, "u", "c", 1, HELLO)
        assert (await said(cp, "t", "c"), await said(cp, "u", "c")) == (["hello"], ["hello", "hi", "bye"])
        with pytest.raises(InputError, match=r"'c' is in more than one thread \('t', 'u'\); pass thread_id="):
            await cp.get("c")
        assert await cp.delete_thread("t") == 1
        found = await cp.get("c")
        assert found is not None
        assert found.metadata.thread_id == "u"

    with_cp(database, check)


# --- lists ------------------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_by_step_and_then_by_the_order_of_their_puts(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        for name, step in (("b", 7), ("a", 100), ("d", 7), ("c", 0), ("e", 2**53 - 1)):
            await put(cp, "t", name, step, [])
        assert await ids(cp, "t") == ["e", "a", "d", "b", "c"]
        assert [about.checkpoint_id for about in await cp.list_checkpoints("t", limit=2, offset=1)] == ["a", "d"]
        assert await cp.list_checkpoints("t", limit=0) == await cp.list_checkpoints("t", offset=5) == []
        latest = await cp.get_latest("t")
        assert latest is not None
        assert latest.metadata.checkpoint_id == "e"

    with_cp(database, check)


def test_a_list_has_a_hundred_checkpoints_and_fifty_threads_unless_told(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        for number in range(103):
            await put(cp, "t", f"c{number}", number, [])
        assert await ids(cp, "t") == [f"c{number}" for number in range(102, 2, -1)]
        assert len(await cp.list_checkpoints("t", offset=100)) == 3
        for number in range(51):
            await put(cp, f"t{number}", "c", 1, [])
        assert len(await cp.list_threads()) == 50
        assert len(await cp.list_threads(limit=100)) == 52

    with_cp(database, check)


def test_threads_are_listed_by_their_latest_checkpoint_the_newest_first(database: Database) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)

    async def check(cp: Checkpointer) -> None:
        for minute, (thread, name, step) in enumerate(
            [("a", "a2", 2), ("b", "b1", 1), ("a", "a1", 1), ("c", "c1", 1), ("b", "b2", 2)]
        ):
            about = CheckpointMetadata(thread, name, step, created_at=start + timedelta(minutes=minute))
            await cp.put(Checkpoint(about))
        await cp.append("plain", HELLO)
        listed = await cp.list_threads()
        assert [about.checkpoint_id for about in listed] == ["b2", "c1", "a2"]
        assert await cp.list_threads(limit=1, offset=1) == listed[1:2]
        assert {info.id for info in await cp.threads()} == {"a", "b", "c", "plain"}

    with_cp(database, check)


def test_a_checkpointer_is_a_backend(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        backend: CheckpointBackend = cp
        assert await backend.put(Checkpoint(CheckpointMetadata("t", "c"))) == "c"
        assert await backend.delete_before("t", 1) == 1
        assert await backend.delete_thread("t") == 0

    with_cp(database, check)


# --- others at the same time ------------------------------------------------------------------------------------------


def test_puts_of_two_processes_are_both_there(database: Database) -> None:
    async def check(cp: Checkpointer, other: Checkpointer) -> None:
        await put(cp, "t", "start", 0, HELLO[:1])
        await other.load("t")
        names = [f"{who}{number}" for who in "ab" for number in range(6)]
        await asyncio.gather(
            *(
                put(each, "t", f"{who}{n}", n, [HELLO[0], UserMessage(f"{who}{n}")])
                for n in range(6)
                for who, each in (("a", cp), ("b", other))
            )
        )
        assert sorted(await ids(cp, "t")) == sorted([*names, "start"])
        for name in names:
            assert await said(other, "t", name) == ["hello", name]

    with_two(database, check)


def test_appends_between_the_comparison_and_the_write_are_never_lost(database: Database) -> None:
    async def check(cp: Checkpointer, other: Checkpointer) -> None:
        await other.append("t", HELLO[0])
        puts = (put(cp, "t", f"c{n}", n, [HELLO[0], UserMessage(f"put {n}")]) for n in range(8))
        appends = (other.append("t", UserMessage(f"append {n}")) for n in range(8))
        await asyncio.gather(*(each for pair in zip(puts, appends, strict=True) for each in pair))
        tree = await cp.tree("t")
        assert tree is not None
        kept = [await said(cp, "t", about.checkpoint_id) for about in (*tree.checkpoints, *tree.left)]
        kept.append(await texts(cp, "t"))
        for number in range(8):
            assert any(f"append {number}" in each for each in kept)

    with_two(database, check)


def test_a_put_into_a_thread_that_somebody_drives_is_thread_busy(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c1", 1, HELLO[:1])
        await claim(cp)
        before = await cp.store.read(all_rows)
        for messages in (HELLO, HELLO[:1], [], [UserMessage("other")]):
            with pytest.raises(ThreadBusy, match="'t'"):
                await put(cp, "t", "c2", 2, messages)
        assert await cp.store.read(all_rows) == before

    with_cp(database, check)


def test_a_checkpoint_of_open_calls_stays_as_it_was_when_results_arrive(database: Database) -> None:
    ask, results = AssistantMessage("ask"), [message_row(UserMessage(f"result {n}")) for n in range(3)]

    async def check(cp: Checkpointer) -> None:
        await cp.store.write(threads.append, ThreadKey("", "t"), [message_row(ask)], reserve=3)
        await cp.store.write(threads.fill, ThreadKey("", "t"), [(3, results[1])])
        await put(cp, "t", "here", 1, [ask, UserMessage("result 1")])
        await put(cp, "t", "before", 2, [ask])
        await put(cp, "t", "behind", 3, [ask, UserMessage("result 1"), UserMessage("on")])
        await cp.store.write(threads.fill, ThreadKey("", "t"), [(2, results[0]), (4, results[2])])
        assert await texts(cp, "t") == ["ask", "result 0", "result 1", "result 2", "on"]
        assert await said(cp, "t", "here") == ["ask", "result 1"]
        assert await said(cp, "t", "before") == ["ask"]
        assert await said(cp, "t", "behind") == ["ask", "result 1", "on"]

    with_cp(database, check)


# --- what is not there, and what is no checkpoint ---------------------------------------------------------------------


def test_what_is_unknown_is_none_empty_or_zero(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await cp.append("t", HELLO)
        for thread in ("t", "unknown"):
            assert await cp.get("c", thread) is None
            assert await cp.get_latest(thread) is None
            assert await cp.list_checkpoints(thread) == []
            assert await cp.delete_before(thread, 5) == 0
            assert await cp.delete_thread(thread) == 0
        assert await cp.get("c") is None
        assert await cp.list_threads() == []
        assert await cp.tree("unknown") is None

    with_cp(database, check)


def test_what_is_unknown_cannot_be_forked_rewound_or_compared(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c", 1, HELLO)
        before = await cp.store.read(all_rows)
        for doing in (cp.fork("unknown"), cp.rewind("unknown", "c"), cp.diff("t", "unknown"), cp.diff("unknown", "t")):
            with pytest.raises(NotFound, match="no thread 'unknown'"):
                await doing
        for doing in (cp.fork("t", "gone"), cp.rewind("t", "gone")):
            with pytest.raises(NotFound, match="'t' has no checkpoint 'gone'"):
                await doing
        for doing in (cp.fork("t", 4), cp.rewind("t", 4)):
            with pytest.raises(NotFound, match="no seq 4: its head is 3"):
                await doing
        assert await cp.store.read(all_rows) == before

    with_cp(database, check)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BAD_METADATA: list[dict[str, Any]] = [
    {"thread_id": ""},
    {"thread_id": None},
    {"thread_id": "a\0b"},
    {"checkpoint_id": ""},
    {"checkpoint_id": 7},
    {"checkpoint_id": "\ud800"},
    {"parent_checkpoint_id": ""},
    {"parent_checkpoint_id": 7},
    {"step": -1},
    {"step": 2**53},
    {"step": 2**70},
    {"step": 1.0},
    {"step": True},
    {"step": "1"},
    {"step": None},
    {"tags": "milestone"},
    {"tags": [1]},
    {"tags": [None]},
    {"tags": {"a": 1}},
    {"tags": None},
    {"summary": 7},
    {"parent_checkpoint_id": "c"},
]
BAD_CONTENT: list[dict[str, Any]] = [
    {"state": {"when": datetime.now(UTC)}},
    {"state": {1: "a key that is no string"}},
    {"state": {"a", "b"}},
    {"state": nested(10_000)},
    {"tools_result": b"bytes"},
    {"next_node": 7},
    {"messages": "hello"},
    {"messages": {"role": "user"}},
    {"messages": None},
    {"messages": [UserMessage("fine"), object()]},
    {"messages": [{"when": datetime.now(UTC)}]},
    {"messages": [nested(10_000)]},
    {"messages": [{1: 2}]},
]


def test_a_put_that_makes_no_sense_is_refused_and_nothing_is_written(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "there", 1, HELLO)
        before = await cp.store.read(all_rows)
        for about, content in [*((wrong, {}) for wrong in BAD_METADATA), *(({}, wrong) for wrong in BAD_CONTENT)]:
            metadata = CheckpointMetadata(**{"thread_id": "t", "checkpoint_id": "c"} | about)
            with case(about, content):
                with pytest.raises(InputError):
                    await cp.put(Checkpoint(metadata, **content))
                assert await cp.store.read(all_rows) == before

    with_cp(database, check)


@pytest.mark.parametrize("when", [7, "yesterday", None])
def test_a_time_that_is_none_is_refused(when: Any) -> None:
    with pytest.raises(InputError, match="created_at must be"):
        CheckpointMetadata("t", created_at=when)


@pytest.mark.parametrize("thing", [None, {}, CheckpointMetadata("t"), Checkpoint({"thread_id": "t"})])  # type: ignore[arg-type]
def test_what_is_no_checkpoint_is_refused(database: Database, thing: Any) -> None:
    async def check(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match="put takes a Checkpoint"):
            await cp.put(thing)

    with_cp(database, check)


def test_a_cycle_of_parents_is_refused_and_nothing_is_written(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "a", 1, HELLO[:1], parent_checkpoint_id="c")  # which is not there yet
        await put(cp, "t", "b", 2, HELLO[:2], parent_checkpoint_id="a")
        before = await cp.store.read(all_rows)
        with pytest.raises(InputError, match="'c' of thread 't' would be its own ancestor: 'c' <- 'b' <- 'a' <- 'c'"):
            await put(cp, "t", "c", 3, HELLO, parent_checkpoint_id="b")
        with pytest.raises(InputError, match="its own ancestor"):
            await put(cp, "t", "a", 3, HELLO, parent_checkpoint_id="b")
        assert await cp.store.read(all_rows) == before
        await put(cp, "u", "c", 3, HELLO, parent_checkpoint_id="b")  # another thread's are other ones
        await put(cp, "t", "a", 1, HELLO[:1])
        await put(cp, "t", "c", 3, HELLO, parent_checkpoint_id="b")

    with_cp(database, check)


@pytest.mark.parametrize("wrong", [-1, 2**53, 2**70, 1.0, True, "5", None])
def test_limits_offsets_and_steps_are_numbers_from_0_up(database: Database, wrong: Any) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "c", 1, [])
        for doing in (
            cp.list_threads(limit=wrong),
            cp.list_threads(offset=wrong),
            cp.list_checkpoints("t", limit=wrong),
            cp.list_checkpoints("t", offset=wrong),
            cp.delete_before("t", wrong),
        ):
            with pytest.raises(InputError, match="must be a number from 0 up"):
                await doing
        assert await ids(cp, "t") == ["c"]
        assert len(await cp.list_checkpoints("t", limit=2**53 - 1)) == 1
        assert await cp.list_checkpoints("t", limit=2**53 - 1, offset=2**53 - 1) == []

    with_cp(database, check)
