"""Sessions that are paused or cancelled: no run starts on them, and nothing else is in anybody's way."""

from __future__ import annotations

import asyncio

import pytest

from byssus import UserMessage
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata
from byssus.errors import NotFound, ThreadInactive
from byssus.store.database import Row, Tx
from tests.support.accounts import known
from tests.support.agents import Acted, Heard, check_whole, saying
from tests.support.checkpointers import loaded, texts, with_cp, with_users
from tests.support.databases import Database
from tests.support.leases import (
    CALL_SLOW,
    LOOK,
    Slow,
    Streaming,
    agent_on,
    brief,
    die,
    is_free,
    look,
    unfinished,
    until,
    waiting,
    with_two,
)

STATUSES = ["paused", "cancelled"]


async def stop(cp: Checkpointer, status: str, thread_id: str = "t") -> None:
    await (cp.pause_session if status == "paused" else cp.cancel_session)(thread_id)


@pytest.mark.parametrize("status", STATUSES)
def test_no_run_starts_until_the_session_is_active_again(database: Database, status: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, ["one", "two", "three"])
        await agent.prompt("hello")
        await other.append("t", UserMessage("well?"))
        await stop(other, status)
        with pytest.raises(ThreadInactive, match=rf"thread 't' is {status}.*resume_session\('t'\)") as refused:
            await agent.prompt("again")
        assert (refused.value.thread_id, refused.value.status) == ("t", status)
        fresh = agent_on(other, ["never"])
        with pytest.raises(ThreadInactive):
            await fresh.prompt("again")
        with pytest.raises(ThreadInactive):
            await fresh.resume()
        assert await texts(cp, "t") == ["hello", "one", "well?"]
        assert await is_free(cp)
        await other.resume_session("t")
        assert (await agent.prompt("again")).text == "two"

    with_two(database, use)


def test_a_completed_session_is_gone_on_with(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ["one"]).prompt("hello")
        await cp.complete_session("t")
        assert (await agent_on(cp, ["two"]).prompt("again")).text == "two"

    with_cp(database, use)


@pytest.mark.parametrize("status", STATUSES)
def test_nobody_waits_for_a_session_that_somebody_has_stopped(database: Database, status: str) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("hello"))
        await stop(cp, status)
        async with asyncio.timeout(10):
            with pytest.raises(ThreadInactive):
                await agent_on(cp, ["never"], wait=3_600).prompt("hello")
            with pytest.raises(ThreadInactive):
                await agent_on(cp, ["never"], wait=3_600).resume()

    with_cp(database, use)


def test_whoever_waits_for_a_run_hears_that_the_session_was_stopped_meanwhile(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        run = asyncio.create_task(agent_on(cp, [CALL_SLOW, "done"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        waits = asyncio.create_task(agent_on(other, ["never"], wait=60).prompt("me too"))
        await asyncio.sleep(0)
        await cp.pause_session("t")
        slow.let_go.set()
        assert (await run).text == "done"
        with pytest.raises(ThreadInactive):
            await waits
        assert await texts(cp, "t") == ["go", "", "slow is done", "done"]

    with_two(database, use)


@pytest.mark.parametrize("status", STATUSES)
def test_an_interrupted_run_is_listed_when_it_can_be_taken_up(database: Database, status: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow(recovery="retry")
        agent = agent_on(cp, [CALL_SLOW], tools=[slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await die(cp, agent, run)
        assert await unfinished(other) == ["t"]
        await stop(other, status)
        assert await unfinished(other) == []
        with pytest.raises(ThreadInactive):
            await agent_on(other, ["never"], tools=[slow.tool]).resume()
        assert slow.runs == 1
        await other.resume_session("t")
        assert await unfinished(other) == ["t"]
        slow.let_go.set()
        assert (await agent_on(other, ["done"], tools=[slow.tool]).resume()).text == "done"

    with_two(database, use)


# --- a run that was going on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("is_before", [True, False], ids=["said before", "said after"])
def test_a_run_that_goes_on_ends_in_good_order_and_what_was_to_follow_stays(
    database: Database, status: str, is_before: bool
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        reply = Streaming("The ")
        agent = agent_on(cp, Acted(reply, saying("and on")), save_partial=0.005)
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: reply.is_saved(cp))
        if is_before:
            await other.follow_up("t", "and then?")
        await stop(other, status)
        if not is_before:
            await other.follow_up("t", "and then?")
        reply.let_go.set()
        result = await run
        assert (result.text, result.stop_reason) == ("The end", "stop")
        check_whole(heard)
        assert await waiting(cp) == ["follow_up: and then?"]
        assert await texts(cp, "t") == ["go", "The end"]
        assert await is_free(cp)
        assert await unfinished(cp) == []
        await other.resume_session("t")
        assert (await agent.resume()).text == "and on"
        assert await texts(cp, "t") == ["go", "The end", "and then?", "and on"]

    with_two(database, use)


def test_a_run_with_tools_goes_on_to_its_end(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW, LOOK, "done"], tools=[slow.tool, look])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await other.pause_session("t")
        slow.let_go.set()
        assert (await run).text == "done"
        assert brief((await loaded(cp, "t")).messages)[-1] == "assistant: done"
        assert await is_free(cp)

    with_two(database, use)


# --- visitors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", STATUSES)
def test_everybody_else_still_writes_to_it(database: Database, status: str) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("one"))
        await stop(cp, status)
        await cp.append("t", UserMessage("two"))
        await cp.append("t", UserMessage("three"), wait=1)
        await cp.save_extra("t", {"a": 1})
        await cp.save_message("t", "user", "four")
        await cp.steer("t", "wait")
        await cp.put(Checkpoint(CheckpointMetadata("t", "c1", 1), (await loaded(cp, "t")).messages))
        await cp.rewind("t", to=2)
        await cp.fork("t", new_id="fork")
        assert await texts(cp, "t") == ["one", "two"]
        assert (await loaded(cp, "t")).extra == {"a": 1}
        assert await waiting(cp) == ["steer: wait"]
        assert known(await cp.get_session("t"))["status"] == status
        assert (await agent_on(cp, ["hello"], "fork").prompt("hi")).text == "hello"  # a fork begins as active
        await cp.delete_thread("t")

    with_cp(database, use)


# --- users who must exist ---------------------------------------------------------------------------------------------


async def rows(cp: Checkpointer) -> list[list[Row]]:
    def look_at(tx: Tx) -> list[list[Row]]:
        return [tx.all(f"SELECT * FROM {table} ORDER BY 1") for table in ("threads", "branches", "segments", "users")]

    return await cp.store.read(look_at)


def test_a_thread_is_given_to_users_who_exist_alone(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ann")
        await cp.append("t", UserMessage("hello"))
        before = await rows(cp)
        for attempt in (
            lambda: cp.set_user("t", "nobody"),
            lambda: cp.set_user("new", "nobody"),
            lambda: cp.fork("t", new_id="fork", user_id="nobody"),
            lambda: agent_on(cp, ["never"], "new", user_id="nobody").prompt("hi"),
            lambda: agent_on(cp, ["never"], user_id="nobody").prompt("hi"),
        ):
            with pytest.raises(NotFound, match=r"there is no user 'nobody'; create_user\(name, user_id='nobody'\)"):
                await attempt()
        assert await rows(cp) == before
        await cp.set_user("t", "ann")
        await cp.fork("t", new_id="fork")
        assert known(await cp.get_session("fork"))["user_id"] == "ann"
        await cp.set_user("t", None)
        assert known(await cp.get_session("t"))["user_id"] is None

    with_cp(database, use)


def test_a_user_who_was_removed_since_an_agent_was_made_gets_no_thread(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await with_users(cp, "ann")
        agent = agent_on(cp, ["hello", "never"], user_id="ann")
        await agent.prompt("go")
        await other.delete_user("ann", sessions="delete")
        with pytest.raises(NotFound, match="there is no user 'ann'"):
            await agent.prompt("again")
        assert await other.threads() == []

    with_two(database, use)


def test_threads_are_made_while_their_user_is_erased_and_none_is_left_over(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cp.append("origin", UserMessage("hello"))
        for attempt in range(8):
            await with_users(cp, "ann")
            await asyncio.gather(
                *(cp.fork("origin", new_id=f"fork {attempt} {n}", user_id="ann") for n in range(4)),
                *(other.set_user(f"given {attempt} {n}", "ann") for n in range(4)),
                other.erase_user("ann", forks="erase"),
                return_exceptions=True,
            )
            owned = [row for row in (await rows(cp))[0] if "ann" in row]
            assert owned == [] or await cp.get_user("ann") is not None
            await cp.erase_user("ann", forks="erase")

    with_two(database, use)


def test_a_fork_is_called_like_its_origin_and_begins_with_nothing_spent(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ann", "bob")
        await cp.create_session("ann", "a title", "a model", session_id="t", metadata={"a": 1})
        await cp.save_message("t", "user", "hello", token_count=7)
        await cp.create_task("t", "type", {})
        await cp.log_tool_call("t", "look", {}, {}, 1.0)
        await cp.pause_session("t")
        for name, user in (("mine", None), ("theirs", "bob")):
            await cp.fork("t", new_id=name, user_id=user)
            session = await cp.get_session(name)
            assert session is not None
            about = (session["title"], session["model"], session["metadata"], session["status"], session["user_id"])
            assert about == ("a title", "a model", {"a": 1}, "active", user or "ann")
            assert (session["total_tokens"], session["message_count"]) == (0, 1)
            assert await cp.list_tasks(name) == []
            assert await cp.list_tool_calls(name) == []
        stats = await cp.get_usage_stats("bob")
        assert stats is not None
        assert stats["total_tokens"] == 0

    with_cp(database, use)


def test_a_session_that_somebody_made_is_no_place_for_a_fork(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ann", "bob")
        await cp.append("t", UserMessage("hello"))
        await cp.create_session("bob", "", None, session_id="bob's")
        await cp.create_session(None, "titled", None, session_id="titled")
        for name in ("bob's", "titled"):
            with pytest.raises(ValueError, match="there is already a thread"):
                await cp.fork("t", new_id=name, user_id="ann")
        assert known(await cp.get_session("bob's"))["user_id"] == "bob"

    with_cp(database, use)
