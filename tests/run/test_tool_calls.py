"""The ledger of tool calls: what was begun is known before it runs, and how it ended with its result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus import (
    AssistantMessage,
    Deny,
    Middleware,
    ToolCall,
    ToolContext,
    ToolResult,
    UserMessage,
    tool,
)
from byssus.checkpointer import Checkpointer, ToolCallRecord
from byssus.errors import InputError, StoreFull
from byssus.providers.scripted import Step
from byssus.queries.log import tool_calls
from byssus.store.database import Tx
from byssus.tools import Tool
from tests.support.agents import Heard, check_whole
from tests.support.checkpointers import loaded
from tests.support.databases import Database
from tests.support.leases import agent_on, break_query, die, look, until, with_two
from tests.support.tool_calls import Acting, act, interrupt, ledger, results

# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_the_start_of_a_tool_is_on_disk_before_it_runs(database: Database, kind: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        loop = asyncio.get_running_loop()
        seen: list[ToolCallRecord] = []
        keys: list[str] = []

        async def see() -> None:
            seen.extend(await other.tool_calls("t"))
            assert await results(other) == []

        async def peek_async(n: int, context: ToolContext) -> str:
            keys.append(context.idempotency_key)
            await see()
            return "peeked"

        def peek_plain(n: int, context: ToolContext) -> str:
            keys.append(context.idempotency_key)
            asyncio.run_coroutine_threadsafe(see(), loop).result(10)
            return "peeked"

        function: Any = peek_async if kind == "async" else peek_plain
        peek: Tool[..., Any] = Tool(function, name="peek", recovery="retry")
        agent = agent_on(cp, [[ToolCall("c1", "peek", {"n": 5})], "ok"], tools=[peek])
        result = await agent.prompt("go")
        assert result.text == "ok"
        (record,) = seen
        assert (record.call_id, record.tool_name, record.arguments) == ("c1", "peek", {"n": 5})
        assert (record.status, record.attempts, record.recovery) == ("started", 1, "retry")
        assert (record.idempotency_key, record.run_id) == (keys[0], result.run_id)
        assert record.started_at
        assert (record.ended_at, record.asked_at) == (None, None)
        (after,) = await other.tool_calls("t")
        assert after.ended_at
        assert after == record._replace(status="done", ended_at=after.ended_at)
        assert after.ended_at >= record.started_at

    with_two(database, use)


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_result_and_the_end_of_its_call_appear_at_the_same_moment(database: Database, mode: str) -> None:
    def snapshot(tx: Tx) -> tuple[set[str], set[str]]:
        ended = {row[0] for row in tx.all("SELECT call_id FROM tool_calls WHERE ended_at IS NOT NULL")}
        bodies = tx.all("SELECT body FROM messages WHERE role = 'tool_result'")
        return ended, {f"c{n}" for n in range(25) if any(f'"did {n}"' in body for (body,) in bodies)}

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        seen: list[int] = []

        async def watch() -> None:
            while len(seen) < 1 or seen[-1] < 25:
                ended, stored = await other.store.read(snapshot)
                assert ended == stored
                seen.append(len(ended))

        watching = asyncio.create_task(watch())
        agent = agent_on(cp, [[act(n) for n in range(25)], "ok"], tools=[Acting().tool], tool_mode=mode)
        await agent.prompt("go")
        await watching
        assert seen == sorted(seen)

    with_two(database, use)


def test_what_a_tool_wrote_to_the_extra_is_on_disk_with_its_result(database: Database) -> None:
    """The tool never runs again, so its change must not wait for the end of a run that may not come."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        @tool
        def pay(context: ToolContext) -> str:
            context.extra["paid"] = 5
            return "paid"

        seen: list[Any] = []

        async def answer(request: object) -> str:
            seen.append((await loaded(other, "t")).extra)
            return "ok"

        agent = agent_on(cp, [[ToolCall("c1", "pay")], answer], tools=[pay])
        assert (await agent.prompt("go")).text == "ok"
        assert seen == [{"paid": 5}]
        assert agent.state.extra == (await loaded(other, "t")).extra == {"paid": 5}

    with_two(database, use)


def test_every_way_in_which_a_call_can_end_is_written_down(database: Database) -> None:
    @tool
    def fail() -> str:
        raise ValueError("no")

    @tool
    def excuse() -> ToolResult:
        return ToolResult("sorry", is_error=True)

    @tool(timeout=0.01)
    async def dawdle() -> str:
        await asyncio.Event().wait()
        return "never"

    class Blocks(Middleware):
        async def before_tool_call(self, call: ToolCall, **_: Any) -> Deny | None:
            return Deny("no") if call.id == "blocked" else None

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting()
        calls = [
            ToolCall("done", "look"),
            ToolCall("failed", "fail"),
            ToolCall("excused", "excuse"),
            ToolCall("timed out", "dawdle"),
            ToolCall("wrong", "act", {"n": "x"}),
            ToolCall("malformed", "act", malformed="{n"),
            ToolCall("blocked", "look"),
            ToolCall("unheard of", "nothing"),
        ]
        tools = [look, fail, excuse, dawdle, acting.tool]
        await agent_on(cp, [calls, "ok"], tools=tools, middleware=[Blocks()], tool_mode="sequential").prompt("go")
        statuses = {record.call_id: record.status for record in await other.tool_calls("t")}
        assert statuses == {
            "done": "done",
            "failed": "failed",
            "excused": "failed",
            "timed out": "failed",
            "wrong": "failed",
            "malformed": "failed",
        }  # what was neither begun nor put before a person is not in it
        assert len(await results(cp)) == 8
        assert acting.runs == []

    with_two(database, use)


def test_a_call_that_was_aborted_is_written_down_as_aborted_and_those_behind_it_not_at_all(
    database: Database,
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)
        agent = agent_on(cp, [[act(1), act(2)], "ok"], tools=[acting.tool], tool_mode="sequential")
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        agent.abort()
        await run
        assert await ledger(other) == [("c1", "aborted", 1)]
        assert len(await results(other)) == 2
        await agent.resume()
        assert [n for n, _ in acting.runs] == [1]  # both have their results

    with_two(database, use)


def test_arguments_are_written_down_as_the_tool_gets_them(database: Database) -> None:
    class Edits(Middleware):
        async def before_tool_call(self, call: ToolCall, **_: Any) -> dict[str, Any]:
            return {"n": call.arguments["n"] + 1}

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting()
        await agent_on(cp, [[act(1)], "ok"], tools=[acting.tool], middleware=[Edits(), Edits()]).prompt("go")
        (record,) = await other.tool_calls("t")
        assert (record.arguments, acting.runs[0][0]) == ({"n": 3}, 3)
        reply = (await loaded(cp, "t")).messages[1]
        assert isinstance(reply, AssistantMessage)
        assert reply.tool_calls[0].arguments == {"n": 1}

    with_two(database, use)


@pytest.mark.parametrize("value", ["a\0b", "\ud800", 2**70, 1e308, None, {"deep": [[[{}]]]}], ids=ascii)
def test_any_arguments_come_back_exactly(database: Database, value: Any) -> None:
    got: list[Any] = []

    @tool(recovery="retry")
    def take(value: Any) -> str:
        got.append(value)
        return "taken"

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(cp, [[ToolCall("c1", "take", {"value": value})], "ok"], tools=[take]).prompt("go")
        assert [record.arguments for record in await other.tool_calls("t")] == [{"value": value}]
        assert got == [value]

    with_two(database, use)


def test_a_ledger_of_any_length_is_read_whole_and_in_order(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        assert await cp.tool_calls("nobody") == []
        with pytest.raises(InputError, match="thread id"):
            await cp.tool_calls("")
        acting = Acting()
        await agent_on(cp, [[act(n) for n in range(1_100)], "ok"], tools=[acting.tool]).prompt("go")
        records = await other.tool_calls("t")
        assert [record.call_id for record in records] == [f"c{n}" for n in range(1_100)]
        assert {record.status for record in records} == {"done"}
        assert len({record.idempotency_key for record in records}) == 1_100
        assert (await results(cp))[-1] == "tool_result: did 1099"

    with_two(database, use)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_call_has_one_key_in_each_attempt_and_every_other_call_another_one(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=2, recovery="retry")
        await interrupt(cp, acting)
        for number in (2, 3):
            acting.begun.clear()
            agent = agent_on((cp, other)[number % 2], ["ok"], tools=[acting.tool])
            run = asyncio.create_task(agent.resume())
            await until(lambda run=run: acting.begun.is_set() or run.done())  # type: ignore[misc]
            if number < 3:
                await die(cp, agent, run)
            await asyncio.wait([run])
        assert [n for n, _ in acting.runs] == [1, 1, 1]
        (record,) = await other.tool_calls("t")
        assert (record.status, record.attempts) == ("done", 3)
        assert {key for _, key in acting.runs} == {record.idempotency_key}
        again: list[Step] = [[act(1, "same"), act(1, "same")], [act(1, "same")], "ok"]
        await agent_on(cp, again, tools=[acting.tool]).prompt("and again")
        await agent_on(other, again, "elsewhere", tools=[acting.tool]).prompt("and again")
        assert len({key for _, key in acting.runs}) == 7

    with_two(database, use)


def test_the_key_of_a_reply_without_an_id_is_the_same_in_every_process(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=2, recovery="retry")
        await cp.append("t", [UserMessage("go"), AssistantMessage([act(1), act(2)], "tool_use")])
        agent = agent_on(cp, tools=[acting.tool])
        run = asyncio.create_task(agent.resume())
        await until(lambda: len(acting.runs) == 2)
        await die(cp, agent, run)
        await agent_on(other, ["ok"], tools=[acting.tool]).resume()
        first, second = sorted(acting.runs[:2]), sorted(acting.runs[2:])
        assert first == second
        assert len({key for _, key in first}) == 2

    with_two(database, use)


@pytest.mark.parametrize("where", ["in another thread", "in the same thread"])
def test_calls_of_two_replies_with_one_id_have_different_keys(database: Database, where: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(recovery="retry")
        for number in (1, 2):
            thread_id = f"t{number}" if "another" in where else "t"
            reply = AssistantMessage([act(number)], "tool_use", id="reply-1")
            await cp.append(thread_id, [UserMessage("go"), reply])
            await agent_on(cp, ["ok"], thread_id, tools=[acting.tool]).resume()
        assert len({key for _, key in acting.runs}) == 2

    with_two(database, use)


# --- when the disk fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_tool_whose_start_cannot_be_recorded_does_not_run(
    database: Database, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting()
        options: dict[str, Any] = {"tools": [acting.tool], "tool_mode": mode}
        agent = agent_on(cp, [[act(1), act(2)], "ok"], **options)
        heard = Heard(agent)
        with monkeypatch.context() as broken:
            break_query(broken, cp.store, tool_calls.start)
            with pytest.raises(StoreFull):
                await agent.prompt("go")
        check_whole(heard)
        assert acting.runs == []
        assert await ledger(cp) == []
        assert (await agent.resume()).text == "ok"
        assert sorted(n for n, _ in acting.runs) == [1, 2]
        assert await results(other) == ["tool_result: did 1", "tool_result: did 2"]

    with_two(database, use)


@pytest.mark.parametrize("recovery", ["never", "retry"])
def test_a_result_that_could_not_be_stored_is_not_forgotten_by_its_agent(
    database: Database, monkeypatch: pytest.MonkeyPatch, recovery: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(recovery=recovery)
        agent = agent_on(cp, [[act(1)], "ok"], tools=[acting.tool])
        heard = Heard(agent)
        with monkeypatch.context() as broken:
            break_query(broken, cp.store, tool_calls.finish)
            with pytest.raises(StoreFull):
                await agent.prompt("go")
        check_whole(heard)
        assert (await agent.resume()).text == "ok"
        assert len(acting.runs) == 1
        assert await results(other) == ["tool_result: did 1"]
        assert await ledger(cp) == [("c1", "done", 1)]

    with_two(database, use)


def test_a_result_that_could_not_be_stored_is_stored_before_another_run_goes_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting()
        with monkeypatch.context() as broken:
            break_query(broken, cp.store, tool_calls.finish)
            with pytest.raises(StoreFull):
                await agent_on(cp, [[act(1)], "ok"], tools=[acting.tool]).prompt("go")
        await agent_on(other, ["ok"], tools=[acting.tool]).resume()
        assert await results(other) == ["tool_result: did 1"]
        assert len(acting.runs) == 1

    with_two(database, use)
