"""Open tool calls whose tool the agent does not have: they stay as they are, for an agent that has it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from byssus import Agent, Ask, AssistantMessage, Deny, ToolCall, ToolResult, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import AnswerNeeded, StoreFull, ThreadBusy, ToolMissing
from byssus.queries.log import tool_calls
from tests.support.agents import Heard, hooks, make, within
from tests.support.approvals import Deleting, delete, results, statuses
from tests.support.checkpointers import loaded
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, Slow, agent_on, break_query, everything, look, with_two
from tests.support.tool_calls import UNKNOWN, Acting, act, interrupt, ledger
from tests.support.tool_calls import results as lines

Go = Callable[[Agent], Awaitable[Any]]


async def resume(agent: Agent) -> Any:
    return await agent.resume()


async def prompt(agent: Agent) -> Any:
    return await agent.prompt("and now?")


async def stream(agent: Agent) -> Any:
    async with agent.stream() as events:
        async for _ in events:
            pass


each_way = pytest.mark.parametrize("go", [resume, prompt, stream])


async def refused(cp: Checkpointer, go: Go, calls: dict[str, list[str]], **options: Any) -> None:
    """An agent without the tool ends with an error that names the calls, and no row of the database has changed."""
    before = await cp.store.read(everything)
    agent = agent_on(cp, [], **options)
    heard = Heard(agent)
    with pytest.raises(ToolMissing) as raised:
        await go(agent)
    assert raised.value.calls == calls
    assert raised.value.thread_id == "t"
    for name, ids in calls.items():
        assert f"tool {name!r} for call {', '.join(map(repr, ids))}" in str(raised.value)
    assert agent.state.error is raised.value
    assert heard == []
    assert await cp.store.read(everything) == before


async def left_waiting(cp: Checkpointer) -> Deleting:
    deleting = Deleting()
    await agent_on(cp, [[delete("a")]], tools=[deleting.tool]).prompt("go")
    return deleting


# --- the call stays ---------------------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("others", [[], [look]], ids=["no tools", "other tools"])
def test_an_approval_waits_for_an_agent_that_has_the_tool(database: Database, go: Go, others: list[Any]) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = await left_waiting(cp)
        await other.answer("t", "a", "approve")
        await refused(other, go, {"delete": ["a"]}, tools=others)
        assert (await agent_on(other, ["ok"], tools=[deleting.tool, *others]).resume()).text == "ok"
        assert deleting.deleted == ["a"]
        assert await statuses(cp) == {"a": "done"}

    with_two(database, use)


@each_way
def test_a_question_stays_open_and_can_be_answered_afterwards(database: Database, go: Go) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = await left_waiting(cp)
        await refused(other, go, {"delete": ["a"]})
        with pytest.raises(AnswerNeeded):
            await agent_on(other, [], tools=[deleting.tool]).prompt("and now?")
        await other.answer("t", "a", "approve")
        await refused(other, go, {"delete": ["a"]})
        await agent_on(cp, ["ok"], tools=[deleting.tool]).resume()
        assert deleting.deleted == ["a"]

    with_two(database, use)


@each_way
def test_a_call_that_was_never_started_stays_so(database: Database, go: Go) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)
        await interrupt(cp, acting, act(1), act(2), act(3), tool_mode="sequential")
        renamed = Acting(name="do")
        await refused(other, go, {"act": ["c2", "c3"]}, tools=[renamed.tool, look])
        assert renamed.runs == []
        await agent_on(other, ["ok"], tools=[acting.tool]).resume()
        assert await lines(cp) == [UNKNOWN, "tool_result: did 2", "tool_result: did 3"]

    with_two(database, use)


@each_way
def test_the_known_tools_of_such_a_reply_wait_too(database: Database, go: Go) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        first, second = Deleting(name="first"), Deleting(name="second")
        calls = [ToolCall("c1", "first", {"path": "a"}), ToolCall("c2", "second", {"path": "b"})]
        await agent_on(cp, [calls], tools=[first.tool, second.tool]).prompt("go")
        for call in calls:
            await other.answer("t", call.id, "approve")
        await refused(other, go, {"second": ["c2"]}, tools=[first.tool])
        assert first.deleted == []
        await agent_on(other, ["ok"], tools=[first.tool, second.tool]).resume()
        assert (first.deleted, second.deleted) == (["a"], ["b"])

    with_two(database, use)


def test_a_call_of_a_fork_asks_for_its_tool_as_well(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = await left_waiting(cp)
        fork = await cp.fork("t")
        with pytest.raises(ToolMissing, match=f"thread '{fork}' needs tool 'delete' for call 'a'"):
            await agent_on(other, [], fork).resume()
        await other.answer(fork, "a", "approve")
        await agent_on(other, ["ok"], fork, tools=[deleting.tool]).resume()
        assert deleting.deleted == ["a"]
        assert await statuses(cp) == {"a": "waiting"}

    with_two(database, use)


def test_a_thread_that_another_agent_has_finished_meanwhile_goes_on(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = await left_waiting(cp)
        agent = agent_on(other, ["well"])
        await agent.load()
        await cp.answer("t", "a", "approve")
        await agent_on(cp, ["ok"], tools=[deleting.tool]).resume()
        assert (await agent.prompt("and now?")).text == "well"

    with_two(database, use)


def test_a_call_that_was_left_while_the_run_began_stays_too(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread changes between the look at it and the lease; what changed it left an approved call."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        await agent_on(cp, ["hello"]).prompt("hi")
        agent = agent_on(other, [])
        await agent.follow_up("and then?")
        load, changed = agent._journal.history.load, False

        async def change_after(*, again: bool = False) -> None:
            nonlocal changed
            await load(again=again)
            if not changed:
                changed = True
                await agent_on(cp, [[delete("a")]], tools=[deleting.tool]).prompt("go")
                await cp.answer("t", "a", "approve")

        monkeypatch.setattr(agent._journal.history, "load", change_after)
        with pytest.raises(ToolMissing):
            await agent.resume()
        assert await statuses(cp) == {"a": "answered"}
        monkeypatch.undo()
        await agent_on(cp, ["ok", "well"], tools=[deleting.tool]).resume()
        assert deleting.deleted == ["a"]

    with_two(database, use)


@pytest.mark.parametrize("wait", [0, 60])
def test_calls_of_a_run_that_goes_on_elsewhere_are_not_missing_a_tool(database: Database, wait: int) -> None:
    """Two calls run one after the other: while the first one runs, the second was never started."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        calls = [ToolCall("c1", "slow", {}), ToolCall("c2", "slow", {})]
        run = asyncio.create_task(agent_on(cp, [calls, "done"], tools=[slow.tool], tool_mode="sequential").prompt("go"))
        await slow.begun.wait()
        agent = agent_on(other, ["well"], wait=wait)
        waits = asyncio.create_task(agent.prompt("me too"))
        if wait == 0:
            with pytest.raises(ThreadBusy):
                await waits
        slow.let_go.set()
        assert (await run).text == "done"
        if wait:
            assert (await waits).text == "well"

    with_two(database, use)


def test_a_run_that_ends_while_its_thread_is_loaded_is_not_missing_a_tool(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages are read before the ledger: in between, the call has ended."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        run = asyncio.create_task(agent_on(cp, [CALL_SLOW, "done"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        agent = agent_on(other, ["well"])
        ledger = agent._journal.ledger
        refresh, looks = ledger.refresh, 0

        async def refresh_after_the_run() -> None:
            nonlocal looks
            looks += 1
            if looks == 2:  # an open call is looked at twice
                slow.let_go.set()
                await run
            await refresh()

        monkeypatch.setattr(ledger, "refresh", refresh_after_the_run)
        assert (await agent.prompt("me too")).text == "well"

    with_two(database, use)


# --- what needs no tool -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["deny", Deny("no"), ToolResult("done by hand")], ids=["deny", "Deny", "result"])
def test_an_answer_that_needs_no_tool_is_carried_out_without_it(database: Database, answer: Any) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await left_waiting(cp)
        await other.answer("t", "a", answer)
        assert (await agent_on(other, ["ok"]).resume()).text == "ok"
        assert await statuses(cp) == {"a": "done" if isinstance(answer, ToolResult) else "denied"}

    with_two(database, use)


def test_a_call_that_the_model_invents_is_a_result_that_says_so(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        result = await agent_on(cp, [[ToolCall("c1", "lok")], "ok"], tools=[look]).prompt("go")
        assert result.text == "ok"
        assert (await results(cp))[0].text == "There is no tool 'lok'. The tools are: look."

    with_two(database, use)


def test_an_invented_call_behind_one_that_waits_keeps_nobody_from_going_on(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        calls = [delete("a"), ToolCall("c2", "lok")]
        await agent_on(cp, [calls], tools=[deleting.tool], tool_mode="sequential").prompt("go")
        assert await results(cp) == []
        await other.answer("t", "a", "approve")
        assert (await agent_on(other, ["ok"], tools=[deleting.tool]).resume()).text == "ok"
        told = [result.text for result in await results(cp)]
        assert told == ["a is gone", "There is no tool 'lok'. The tools are: delete."]

    with_two(database, use)


def test_an_invented_call_whose_result_could_not_be_stored_gets_one_in_the_next_run(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        break_query(monkeypatch, cp.store, tool_calls.finish)
        with pytest.raises(StoreFull):
            await agent_on(cp, [[ToolCall("c1", "lok")]], tools=[look]).prompt("go")
        monkeypatch.undo()
        assert await results(cp) == []
        assert (await agent_on(other, ["ok"], tools=[look]).resume()).text == "ok"
        assert [result.text for result in await results(cp)] == ["There is no tool 'lok'. The tools are: look."]

    with_two(database, use)


def test_nobody_is_asked_about_a_tool_that_does_not_exist() -> None:
    async def main() -> None:
        middleware = [hooks(before_tool_call=lambda call: Ask("Sure?"))]
        agent = make([[ToolCall("c1", "lok")], "ok"], middleware=middleware, tools=[look])
        assert (await agent.prompt("go")).text == "ok"

    within(main())


# --- calls that were started ------------------------------------------------------------------------------------------


def test_a_started_call_that_nobody_may_repeat_is_unknown_also_without_its_tool(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await interrupt(cp, Acting(hangs=1))
        assert (await agent_on(other, ["ok"], tools=[look]).resume()).text == "ok"
        assert await lines(cp) == [UNKNOWN]
        assert await ledger(cp) == [("c1", "unknown", 1)]

    with_two(database, use)


@each_way
@pytest.mark.parametrize("options", [{"recovery": "retry"}, {"recovery": "ask"}, {"check": lambda context: None}])
def test_a_started_call_waits_for_the_tool_that_knows_what_to_do(
    database: Database, go: Go, options: dict[str, Any]
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, **options)
        await interrupt(cp, acting)
        await refused(other, go, {"act": ["c1"]}, tools=[look])
        assert await ledger(cp) == [("c1", "started", 1)]

    with_two(database, use)


def test_a_call_that_was_interrupted_and_repeated_has_its_key(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        await interrupt(cp, acting)
        await refused(other, resume, {"act": ["c1"]})
        await agent_on(other, ["ok"], tools=[acting.tool]).resume()
        assert await lines(cp) == ["tool_result: did 1"]
        assert len({key for _, key in acting.runs}) == 1

    with_two(database, use)


# --- agents in memory -------------------------------------------------------------------------------------------------


def test_an_agent_in_memory_carries_on_as_before() -> None:
    @tool(approval=True)
    def pay() -> str:
        return "paid"

    async def main() -> None:
        agent = make([[ToolCall("c1", "pay"), ToolCall("c2", "pai")], "ok"], tools=[pay])
        await agent.prompt("go")
        await agent.answer("c1", "approve")
        assert (await agent.resume()).text == "ok"

    asyncio.run(main())


def test_the_reply_notes_which_calls_the_model_invented(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, [[ToolCall("c1", "lok"), ToolCall("c2", "look")], "ok"], tools=[look])
        await agent.prompt("go")
        for messages in (agent.state.messages, (await loaded(other, "t")).messages):
            reply = messages[1]
            assert isinstance(reply, AssistantMessage)
            assert [call.is_invented for call in reply.tool_calls] == [True, False]

    with_two(database, use)
