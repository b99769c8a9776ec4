"""Following a thread with a cursor: everything behind it, once, and then what happens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import aclosing
from typing import Any

import pytest

from byssus import Approve, AssistantMessage, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, keep_tagged
from byssus.errors import CursorUnknown, InputError, StoreNotOpen
from byssus.queries.following import rows as following
from byssus.queries.log import branches, threads
from byssus.storage import AgentStorage
from byssus.threads.encoding import message_row
from byssus.values.following.items import (
    CallAnswered,
    CallEnded,
    CallStarted,
    CallWaiting,
    CaughtUp,
    CheckpointAdded,
    FollowItem,
    InboxHeard,
    InboxPut,
    InboxWithdrawn,
    MessageAdded,
    RunBegan,
    RunEnded,
    ThreadDeleted,
    ThreadRewound,
    TitleChanged,
)
from byssus.values.thread_key import ThreadKey
from tests.support import forked
from tests.support.agents import make
from tests.support.approvals import Deleting, delete
from tests.support.checkpointers import loaded, with_cp
from tests.support.databases import Database
from tests.support.following import Client, Following, told
from tests.support.leases import agent_on

FORK = """
import os, sys
from byssus import UserMessage
from byssus.errors import StoreNotOpen
from byssus.storage import AgentStorage

with AgentStorage(sys.argv[1]) as storage:
    storage.append("t", [UserMessage("one")])
    items = storage.follow("t")
    assert [next(items).type, next(items).type] == ["message", "caught_up"]
    if (child := os.fork()) == 0:
        try:
            next(items)
        except StoreNotOpen as error:
            os._exit("in this process" not in str(error))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    storage.append("t", [UserMessage("two")])
    assert next(items).message.text == "two"
    items.close()
"""
WRITE = """
import asyncio, sys
from byssus import UserMessage
from byssus.checkpointer import checkpointer_for

async def main():
    async with checkpointer_for(sys.argv[1]) as cp:
        for line in sys.stdin:
            await cp.append("t", UserMessage(line.strip()))
            await cp.steer("t", f"steer {line.strip()}")
            await cp.set_title("t", f"title {line.strip()}")

asyncio.run(main())
"""


def said(*texts: str) -> list[UserMessage]:
    return [UserMessage(text) for text in texts]


# --- messages ---------------------------------------------------------------------------------------------------------


def test_it_begins_with_what_is_there_says_so_and_goes_on(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said("one", "two"))
        following = Following(cp)
        await following.until_type("caught_up")
        assert following.types == ["message", "message", "caught_up"]
        await cp.append("t", said("three"))
        await following.until_texts("one", "two", "three")
        assert [item.seq for item in following.of(MessageAdded)] == [1, 2, 3]
        await following.stop()

    with_cp(database, use)


def test_a_cursor_continues_behind_its_item_wherever_the_follower_was_cut(database: Database) -> None:
    @tool
    def look() -> str:
        return "seen"

    async def use(cp: Checkpointer) -> None:
        script: list[Any] = [[ToolCall("1", "look"), ToolCall("2", "look")], "done", "bye"]
        agent = agent_on(cp, script, tools=[look], checkpoint_every="turn")
        await agent.prompt("go")
        await agent.prompt("more")
        items = await told(cp)
        log = (await loaded(cp, "t")).messages
        for number in range(len(items) + 1):
            client = Client().see(items[:number])
            client.see(await told(cp, after=client.cursor))
            assert client.log == log, f"cut behind {items[number - 1] if number else 'nothing'}"
            assert client.twice == []

    with_cp(database, use)


def test_results_of_parallel_tools_come_once_whichever_ends_first(database: Database) -> None:
    let_go = asyncio.Event()

    @tool
    async def slow() -> str:
        await let_go.wait()
        return "slow"

    @tool
    async def quick() -> str:
        return "quick"

    async def use(cp: Checkpointer) -> None:
        following = Following(cp)
        script: list[Any] = [[ToolCall("1", "slow"), ToolCall("2", "quick"), ToolCall("3", "quick")], "done"]
        run = asyncio.create_task(agent_on(cp, script, tools=[slow, quick]).prompt("go"))
        await following.until(lambda: len(following.of(MessageAdded)) == 4)
        before = await following.stop()
        let_go.set()
        await run
        client = Client().see(before)
        client.see(await told(cp, after=client.cursor))
        assert client.log == (await loaded(cp, "t")).messages
        assert client.twice == []

    with_cp(database, use)


def test_a_long_thread_comes_whole_in_order_and_in_short_pages(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage(f"{number}") for number in range(1_500)])
        await cp.append("t", [UserMessage("x" * 40_000) for _ in range(9)])
        items = [item for item in await told(cp) if isinstance(item, MessageAdded)]
        assert [item.seq for item in items] == list(range(1, 1_510))

    with_cp(database, use)


@pytest.mark.parametrize("size", [1, 20_000])
def test_what_was_read_behind_the_place_of_a_slow_tool_is_not_read_again(database: Database, size: int) -> None:
    async def use(cp: Checkpointer) -> None:
        calls = 600 if size == 1 else 40
        reply, place = message_row(AssistantMessage("working")), ThreadKey("", "t")
        head = cp.store.write_now(threads.append, place, [reply], reserve=calls).head
        slots = [(seq, message_row(UserMessage("x" * size))) for seq in range(3, head + 1)]
        cp.store.write_now(threads.fill, place, slots)
        items = await told(cp)  # it never caught up while it read the same page again and again
        assert [item.seq for item in items if isinstance(item, MessageAdded)] == [1, *range(3, head + 1)]
        cp.store.write_now(threads.fill, place, [(2, message_row(UserMessage("late")))])
        last = Client().see(items).cursor
        assert [item.seq for item in await told(cp, after=last) if isinstance(item, MessageAdded)] == [2]

    with_cp(database, use)


@pytest.mark.processes
def test_what_another_process_does_is_told(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        following = Following(cp)
        with forked.Process(["-c", WRITE, database.place], stdin=forked.PIPE) as writer:
            assert writer.stdin is not None
            for number in range(3):
                writer.stdin.write(f"{number}\n")
                writer.stdin.flush()
                await following.until(
                    lambda number=number: (
                        f"title {number}"
                        in [  # type: ignore[misc]
                            item.title for item in following.of(TitleChanged)
                        ]
                    )
                )
            writer.stdin.close()
        assert writer.returncode == 0
        assert following.client.texts == ["0", "1", "2"]
        assert [item.message.text for item in following.of(InboxPut)] == ["steer 0", "steer 1", "steer 2"]
        await following.stop()

    with_cp(database, use)


def test_a_thread_without_an_event_loop_is_followed_too(database: Database) -> None:
    with AgentStorage(database.place) as storage:
        storage.append("t", said("one", "two"))
        items = storage.follow("t")
        heard = [next(items) for _ in range(3)]
        assert [item.type for item in heard] == ["message", "message", "caught_up"]
        storage.append("t", said("three"))
        more = next(items)
        assert isinstance(more, MessageAdded)
        assert more.message.text == "three"
        items.close()  # type: ignore[attr-defined]


# --- tool calls -------------------------------------------------------------------------------------------------------


def test_a_call_is_told_when_it_waits_is_answered_starts_and_ends(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        following = Following(cp)
        agent = agent_on(cp, [[delete("a"), delete("b")], "done"], tools=[deleting.tool])
        assert (await agent.prompt("go")).stop_reason == "waiting"
        await following.until_type("call_waiting", 2)
        assert [item.arguments for item in following.of(CallWaiting)] == [{"path": "a"}, {"path": "b"}]
        waiting = [item for item in await told(cp) if isinstance(item, CaughtUp)]
        assert waiting[0].waiting == ["a", "b"]
        await cp.answer("t", "a", "approve")
        await following.until_type("call_answered")
        await cp.answer("t", "b", "deny")
        await agent.resume()
        await following.until(lambda: "done" in following.client.texts)
        assert {item.call_id for item in following.of(CallAnswered)} == {"a", "b"}
        assert [item.call_id for item in following.of(CallStarted)] == ["a"]
        assert {(item.call_id, item.status) for item in following.of(CallEnded)} == {("a", "done"), ("b", "denied")}
        types = [item.type for item in following.items if getattr(item, "call_id", "") == "a"]
        types = [kind for kind in types if kind != "reply_delta"]
        assert types == ["call_waiting", "call_answered", "call_started", "call_ended"]
        await following.stop()

    with_cp(database, use)


def test_a_question_that_is_put_again_between_two_reads_is_told_again(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, [[delete("a")]], tools=[Deleting().tool])
        await agent.prompt("go")
        items = cp.follow("t")
        while not isinstance(await anext(items), CaughtUp):
            pass
        await cp.answer("t", "a", Approve({"file": "a"}))
        assert (await agent.resume()).stop_reason == "waiting"
        goes_on, again, waits = [await anext(items) for _ in range(3)]
        assert isinstance(goes_on, RunBegan)
        assert isinstance(again, CallWaiting)
        assert "do not fit the tool" in again.question
        assert isinstance(waits, RunEnded)
        await items.aclose()

    with_cp(database, use)


def test_a_client_that_comes_after_an_answer_is_told_first_that_the_run_stopped_to_wait(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, [[delete("a"), delete("b")], "done"], tools=[Deleting().tool])
        await agent.prompt("go")
        await cp.answer("t", "a", "approve")
        story = [item.type for item in await told(cp)]
        assert story == [
            "run_began", "message", "message", "call_waiting", "run_ended", "call_answered", "caught_up",
        ]  # fmt: skip

    with_cp(database, use)


def test_a_call_is_told_to_have_ended_before_its_result_comes(database: Database) -> None:
    @tool
    def look() -> str:
        return "seen"

    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, [[ToolCall("1", "look")], "done"], tools=[look]).prompt("go")
        kinds = [item.type for item in await told(cp)]
        assert kinds[:6] == ["run_began", "message", "message", "call_started", "call_ended", "message"]

    with_cp(database, use)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_is_told_when_it_begins_waits_goes_on_and_ends(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        following = Following(cp)
        agent = agent_on(cp, [[delete("a")], "done", "bye"], tools=[Deleting().tool])
        first = await agent.prompt("go")
        await following.until_type("run_ended")
        await cp.answer("t", "a", "approve")
        assert (await agent.resume()).run_id == first.run_id
        second = await agent.prompt("more")
        await following.until_type("run_ended", 3)
        began = [(item.run_id, item.attempt) for item in following.of(RunBegan)]
        assert began == [(first.run_id, 1), (first.run_id, 2), (second.run_id, 1)]
        ended = [(item.run_id, item.stop_reason) for item in following.of(RunEnded)]
        assert ended == [(first.run_id, "waiting"), (first.run_id, "stop"), (second.run_id, "stop")]
        await following.stop()
        story = [item.type for item in await told(cp) if item.type in ("message", "run_began", "run_ended")]
        assert story == [
            "run_began", "message", "message", "message", "message", "run_ended",
            "run_began", "message", "message", "run_ended",
        ]  # fmt: skip

    with_cp(database, use)


def test_runs_that_a_rewind_left_behind_hide_none_of_those_that_count(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for _ in range(4):
            await agent_on(cp, ["ok"]).prompt("go")
        await cp.rewind("t", to=2)
        kept = [(await agent_on(cp, ["ok"]).prompt("go")).run_id for _ in range(2)]
        row = cp.store.read_now(following.find, ThreadKey("", "t"))
        assert row is not None
        segments = cp.store.read_now(branches.segments_of, row.branch)
        found = cp.store.read_now(following.runs, row.key, segments, first=0, upto=3)
        assert [run.id for run in found if run.branch == row.branch] == kept[:1]
        began = [item.run_id for item in await told(cp) if isinstance(item, RunBegan)]
        assert [run for run in began if run in kept] == kept

    with_cp(database, use)


@pytest.mark.parametrize("how", ["prompt", "rewind to before it", "rewind into it"])
def test_a_run_that_waited_and_is_given_up_is_told_to_have_been_interrupted(database: Database, how: str) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        await cp.append("t", UserMessage("before"))
        waited = await agent_on(cp, [[delete("a")]], tools=[deleting.tool]).prompt("go")
        await cp.answer("t", "a", "deny")
        await cp.append("t", UserMessage("meanwhile"))
        follower = Following(cp)
        await follower.until_type("caught_up")
        cursor = follower.items[-1].cursor
        if how == "prompt":
            await agent_on(cp, ["ok"], tools=[deleting.tool]).prompt("next")
        else:
            await cp.rewind("t", to=1 if "before" in how else 2)
        ends = ["waiting", "interrupted"]
        await follower.until(lambda: _ends_of(waited.run_id, follower.items) == ends)
        await follower.stop()
        if how == "prompt":  # a rewind leaves what is behind it
            assert _ends_of(waited.run_id, await told(cp, after=cursor)) == ["interrupted"]

    with_cp(database, use)


def _ends_of(run_id: str, items: list[FollowItem]) -> list[str | None]:
    return [item.stop_reason for item in items if isinstance(item, RunEnded) and item.run_id == run_id]


def test_a_cursor_from_before_a_rewind_hides_none_of_the_runs_that_came_after_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for _ in range(3):
            await agent_on(cp, ["ok"]).prompt("go")
        before = (await told(cp))[-1].cursor
        await cp.rewind("t", to=2)
        kept = (await agent_on(cp, ["ok"]).prompt("go")).run_id
        items = await told(cp, after=before)
        story = [item.type for item in items if getattr(item, "run_id", "") in (kept, "")]
        assert story == ["rewound", "run_began", "message", "message", "run_ended", "title"]

    with_cp(database, use)


# --- what stands beside the log ---------------------------------------------------------------------------------------


def test_queued_messages_are_told_when_they_come_are_heard_and_are_withdrawn(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        following = Following(cp)
        first = await cp.steer("t", "first")
        second = await cp.follow_up("t", "second")
        await following.until_type("inbox_put", 2)
        await cp.withdraw("t", first)
        await following.until_type("inbox_withdrawn")
        await agent_on(cp, ["ok", "also"]).prompt("go")
        await following.until_type("inbox_heard")
        assert [(item.message_id, item.kind) for item in following.of(InboxPut)] == [
            (first.id, "steer"),
            (second.id, "follow_up"),
        ]
        assert [item.message_id for item in following.of(InboxWithdrawn)] == [first.id]
        assert [item.message_id for item in following.of(InboxHeard)] == [second.id]
        await following.stop()

    with_cp(database, use)


def test_checkpoints_and_titles_are_told(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        following = Following(cp)
        agent = agent_on(cp, ["one", "two"], checkpoint_every="turn")
        await agent.prompt("go")
        await cp.set_title("t", "a trip")
        await following.until_type("title")
        await agent.prompt("on")
        await following.until_type("checkpoint", 2)
        assert [(item.seq, item.step) for item in following.of(CheckpointAdded)] == [(2, 1), (4, 2)]
        assert [item.title for item in following.of(TitleChanged)] == ["a trip"]
        cursor = (await following.stop())[-1].cursor
        assert [item.seq for item in await told(cp) if isinstance(item, CheckpointAdded)] == [2, 4]
        await cp.set_title("t", None)  # who follows again still shows the old one
        assert [item.title for item in await told(cp, after=cursor) if isinstance(item, TitleChanged)] == [""]

    with_cp(database, use)


def test_a_rewind_says_where_the_histories_part(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said("a", "b", "c"))
        following = Following(cp)
        await following.until_texts("a", "b", "c")
        left = following.client.cursor
        await cp.rewind("t", to=1)
        await cp.append("t", said("d", "e"))
        await following.until_texts("a", "d", "e")
        assert [item.seq for item in following.of(ThreadRewound)] == [1]
        items = await told(cp, after=left)
        assert items[0].type == "rewound"
        assert Client().see([*following.items[:3], *items]).texts == ["a", "d", "e"]
        await following.stop()

    with_cp(database, use)


def test_a_fork_has_cursors_of_its_own(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said("a", "b", "c"))
        await cp.fork("t", at=2, new_id="f")
        await cp.append("f", said("d"))
        items = await told(cp, "f")
        assert Client().see(items).texts == ["a", "b", "d"]
        client = Client().see(items[:1])
        assert client.see(await told(cp, "f", after=client.cursor)).texts == ["a", "b", "d"]

    with_cp(database, use)


def test_a_message_that_was_changed_where_a_fork_reads_it_is_told_anew(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("a", id="1"), UserMessage("b", id="2"), UserMessage("c", id="3")])
        await cp.fork("t", new_id="f")
        following = Following(cp)
        await following.until_texts("a", "b", "c")
        await cp.update_message("t", "2", "B")
        await following.until_texts("a", "B", "c")
        assert following.client.log == (await loaded(cp, "t")).messages
        await following.stop()

    with_cp(database, use)


# --- threads that come and go -----------------------------------------------------------------------------------------


def test_a_thread_that_does_not_exist_yet_is_waited_for(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        following, other = Following(cp), Following(cp, "f")
        await asyncio.sleep(0)
        await cp.append("t", said("a"))
        await following.until_texts("a")
        await cp.fork("t", new_id="f")
        await other.until_texts("a")
        await following.stop()
        await other.stop()

    with_cp(database, use)


@pytest.mark.parametrize("how", ["delete_thread", "erase_thread"])
def test_a_thread_that_is_deleted_is_told_and_a_new_one_begins_anew(database: Database, how: str) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said("a", "b"))
        following = Following(cp)
        await following.until_texts("a", "b")
        old = following.client.cursor
        await getattr(cp, how)("t")
        await following.until_type("deleted")
        await cp.append("t", said("c"))
        await following.until_texts("c")
        assert len(following.of(ThreadDeleted)) == 1
        with pytest.raises(CursorUnknown, match="deleted"):
            await told(cp, after=old)
        await following.stop()

    with_cp(database, use)


def test_a_child_that_is_deleted_with_its_parent_is_told(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        child = make(["found"]).as_tool("ask", "Ask")
        await agent_on(cp, [[ToolCall("c", "ask", {"task": "find"})], "ok"], tools=[child]).prompt("go")
        following = Following(cp, "t.ask-1")
        await following.until_texts("find", "found")
        await cp.delete_thread("t")
        await following.until_type("deleted")
        await following.stop()

    with_cp(database, use)


def test_it_ends_with_an_error_when_the_checkpointer_is_closed(database: Database) -> None:
    async def main() -> None:
        cp = await database.checkpointer().open()
        following = Following(cp)
        await cp.append("t", said("a"))
        await following.until_type("caught_up")
        await cp.close()
        with pytest.raises(StoreNotOpen):
            await following.until(lambda: False)

    asyncio.run(main())


@pytest.mark.processes
def test_in_a_forked_child_a_follower_ends_with_an_error_and_goes_on_in_the_parent(database: Database) -> None:
    subprocess.run([sys.executable, "-c", FORK, database.place], check=True, timeout=60)


def test_breaking_out_of_the_loop_ends_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said("one"))
        async with aclosing(cp.follow("t")) as items:
            async for item in items:
                assert isinstance(item, MessageAdded)
                break

    with_cp(database, use)


# --- cursors that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cursor", ["", "garbage", "1", "a-1-1", "000000-1-1-", "000000-99-1.1~", 7, "0" * 5_000, "000000-1-²"]
)
def test_what_is_no_cursor_is_refused_at_once(database: Database, cursor: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said("a"))
        with pytest.raises(CursorUnknown, match="not a cursor that follow") as error:
            cp.follow("t", after=cursor)
        assert (error.value.thread_id, error.value.cursor) == ("t", cursor)

    with_cp(database, use)


def test_a_cursor_of_another_thread_from_the_future_or_of_no_thread_is_an_error(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said("a", "b"))
        await cp.append("u", said("a", "b"))
        cursor = Client().see(await told(cp)).cursor
        assert cursor is not None
        with pytest.raises(CursorUnknown, match="of another thread"):
            await told(cp, "u", after=cursor)
        with pytest.raises(CursorUnknown, match="no such thread"):
            await told(cp, "v", after=cursor)
        mark, branch, upto = cursor.split("-")
        for wrong in (f"{mark}-{branch}-{int(upto) + 1}", f"{mark}-{branch}-1.9", f"{mark}-{branch}-{2**61}"):
            with pytest.raises(CursorUnknown, match="does not reach that far"):
                await told(cp, after=wrong)
        with pytest.raises(CursorUnknown, match="was removed"):
            await told(cp, after=f"{mark}-{int(branch) + 77}-1")
        with pytest.raises(InputError, match="thread id"):
            cp.follow("")

    with_cp(database, use)


def test_a_thread_that_is_brought_back_by_an_import_is_another_one(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said("a", "b"))
        lines = [line async for line in cp.export_thread("t")]
        await cp.append("t", said("c"))
        following = Following(cp)
        await following.until_texts("a", "b", "c")
        cursor = following.client.cursor
        await cp.delete_thread("t")
        await cp.import_from(lines)
        await cp.append("t", said("d"))
        await following.until_type("deleted")
        await following.until_texts("a", "b", "d")
        await following.stop()
        with pytest.raises(CursorUnknown, match="of another thread, or of one that was deleted"):
            await told(cp, after=cursor)

    with_cp(database, use)


def test_a_place_whose_message_was_removed_gets_no_other_one(database: Database) -> None:
    """A put with a changing end continues a branch that was left. It must not be one that was read further."""

    async def use(cp: Checkpointer) -> None:
        await cp.append("t", said("1", "x"))
        for n in (2, 3, 4):
            await cp.rewind("t", to=n - 1)
            await cp.append("t", said(str(n)))
        kept = await agent_on(cp).checkpoint(tags=["kept"])
        await cp.append("t", said("old"))
        client = Client().see(await told(cp))
        assert client.texts == ["1", "2", "3", "4", "old"]
        await cp.rewind("t", to=kept)
        await cp.prune("t", keep_tagged("kept"))
        await cp.append("t", said("status"))
        messages = [*(await loaded(cp, "t")).messages[:4], *said("new", "other status")]
        await cp.put(Checkpoint(CheckpointMetadata("t", "next", 9), messages))
        try:
            client.see(await told(cp, after=client.cursor))
        except CursorUnknown:
            client = Client().see(await told(cp))
        assert client.texts == ["1", "2", "3", "4", "new", "other status"]

    with_cp(database, use)


def test_a_cursor_of_a_branch_that_is_not_kept_is_an_error(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("a", id="1"), UserMessage("b", id="2")])
        await cp.fork("t", new_id="f")
        cursor = Client().see(await told(cp)).cursor
        await cp.update_message("t", "2", "B")
        with pytest.raises(CursorUnknown, match="was removed"):
            await told(cp, after=cursor)

    with_cp(database, use)
