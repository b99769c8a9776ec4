"""Runs in which a person must answer: several questions at once, restarts, aborts, limits, and tools that ask again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus import (
    Agent,
    Deny,
    Limits,
    Middleware,
    ToolCall,
    ToolResult,
    tool,
)
from byssus.checkpointer import Checkpointer
from byssus.errors import AnswerNeeded, HookFailed, InputError, StoreFull, ThreadBusy
from byssus.events import ToolExecutionEnd, ToolExecutionStart
from byssus.messages import ToolResultMessage
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.log import tool_calls
from tests.support.agents import Heard, check_whole, history, make, sent, within
from tests.support.approvals import Deleting, delete, ends, look, results, statuses
from tests.support.checkpointers import loaded
from tests.support.databases import Database
from tests.support.leases import Slow, agent_on, break_query, die, is_free, lease_of, take_over, until, with_two

# --- several calls ----------------------------------------------------------------------------------------------------


def test_other_calls_of_the_reply_run_while_one_waits(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        calls = [ToolCall("c1", "look"), delete("a"), ToolCall("c3", "look")]
        agent = agent_on(cp, [calls, "ok"], tools=[deleting.tool, look])
        heard = Heard(agent)
        result = await agent.prompt("go")
        check_whole(heard)
        assert result.stop_reason == "waiting"
        assert await statuses(cp) == {"c1": "done", "a": "waiting", "c3": "done"}
        await other.answer("t", "a", "approve")
        await agent.resume()
        lines = ["tool_result: seen", "tool_result: a is gone", "tool_result: seen"]
        assert (await history(cp, "t"))[2:5] == lines
        assert [f"tool_result: {m.text}" for m in agent.state.messages[2:5]] == lines

    with_two(database, use)


@pytest.mark.parametrize("answer", ["approve", Deny("no")], ids=["approve", "deny"])
@pytest.mark.parametrize("who", ["agent", "other"])
def test_an_answer_that_comes_while_other_calls_still_run_needs_no_second_run(
    database: Database, who: str, answer: Any
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting, slow = Deleting(), Slow()
        agent = agent_on(cp, [[delete("a"), ToolCall("c2", "slow")], "ok"], tools=[deleting.tool, slow.tool])
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await until(lambda: other.pending("t"))
        await (other.answer("t", "a", answer) if who == "other" else agent.answer("a", answer))
        slow.let_go.set()
        assert (await run).text == "ok"
        check_whole(heard)
        assert deleting.deleted == (["a"] if answer == "approve" else [])
        assert len(heard.of(ToolExecutionEnd)) == (2 if answer == "approve" else 1)
        assert [result.tool_call_id for result in await results(cp)] == ["a", "c2"]
        assert await is_free(cp)

    with_two(database, use)


def test_the_history_of_an_agent_is_in_the_order_of_the_thread_though_an_answer_came_late(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting, slow = Deleting(), Slow()
        agent = agent_on(cp, [[delete("a"), ToolCall("c2", "slow")], "ok"], tools=[deleting.tool, slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await until(lambda: other.pending("t"))
        await other.answer("t", "a", "approve")
        slow.let_go.set()
        await run
        assert agent.state.messages == (await loaded(cp, "t")).messages

    with_two(database, use)


def test_questions_of_one_reply_are_answered_one_at_a_time(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        provider = ScriptedProvider([[delete("a"), delete("b"), delete("c")], "ok"])
        agent = agent_on(cp, provider, tools=[deleting.tool])
        await agent.prompt("go")
        for number, call_id in enumerate("bca"):
            assert len(agent.pending) == 3 - number
            await other.answer("t", call_id, "approve" if call_id != "c" else "deny")
            result = await agent.resume()
            assert result.stop_reason == ("waiting" if number < 2 else "stop")
        assert deleting.deleted == ["b", "a"]
        assert [result.tool_call_id for result in await results(cp)] == ["a", "b", "c"]
        assert len(provider.requests) == 2

    with_two(database, use)


def test_sequential_calls_stop_at_the_question_and_the_rest_runs_after_the_answer(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        order: list[str] = []

        @tool
        def note(what: str) -> str:
            order.append(what)
            return what

        calls = [ToolCall("c1", "note", {"what": "1"}), delete("a"), ToolCall("c3", "note", {"what": "3"}), delete("b")]
        options: dict[str, Any] = {"tools": [deleting.tool, note], "tool_mode": "sequential"}
        agent = agent_on(cp, [calls], **options)
        assert (await agent.prompt("go")).stop_reason == "waiting"
        assert (order, deleting.deleted) == (["1"], [])
        assert [question.call_id for question in agent.pending] == ["a"]  # the one behind it is not asked about yet
        await other.answer("t", "a", "approve")
        agent = agent_on(other, **options)
        assert (await agent.resume()).stop_reason == "waiting"
        assert (order, deleting.deleted) == (["1", "3"], ["a"])
        assert [question.call_id for question in agent.pending] == ["b"]
        await agent.answer("b", "deny")
        assert (await agent_on(cp, ["ok"], **options).resume()).text == "ok"
        assert [result.tool_call_id for result in await results(cp)] == ["c1", "a", "c3", "b"]
        assert [result.is_error for result in await results(cp)] == [False, False, False, True]

    with_two(database, use)


def test_a_sequential_agent_whose_first_question_is_open_waits_though_another_was_answered(
    database: Database,
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        await agent_on(cp, [[delete("a"), delete("b")]], tools=[deleting.tool]).prompt("go")
        await other.answer("t", "b", "approve")
        agent = agent_on(other, ["ok"], tools=[deleting.tool], tool_mode="sequential")
        assert (await ends(agent.resume(), agent)).stop_reason == "waiting"
        await other.answer("t", "a", "approve")
        assert (await ends(agent.resume(), agent)).text == "ok"
        assert deleting.deleted == ["a", "b"]

    with_two(database, use)


def test_a_run_whose_hook_failed_ends_though_somebody_has_answered_meanwhile(database: Database) -> None:
    class Checks(Middleware):
        async def after_tool_call(self, call: ToolCall, result: ToolResultMessage, **_: Any) -> None:
            raise ValueError("no")

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting, slow = Deleting(), Slow()
        options: dict[str, Any] = {"tools": [deleting.tool, slow.tool]}
        agent = agent_on(cp, [[delete("a"), ToolCall("c2", "slow")]], middleware=[Checks()], **options)
        run = asyncio.create_task(ends(agent.prompt("go"), agent))
        await slow.begun.wait()
        await until(lambda: other.pending("t"))
        await other.answer("t", "a", "approve")
        slow.let_go.set()
        with pytest.raises(HookFailed):
            await run
        assert [info.id for info in await other.unfinished()] == ["t"]
        assert (await agent_on(other, ["ok"], **options).resume()).text == "ok"
        assert deleting.deleted == ["a"]

    with_two(database, use)


def test_handlers_that_answer_and_resume_at_the_same_time_lose_no_answer(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        async def handle(agent: Agent, call_id: str) -> None:
            await agent.answer(call_id, "approve")
            try:
                await agent.resume()
            except (ThreadBusy, RuntimeError, InputError):  # the other one is at it, or has done it
                await agent.wait_for_idle()

        for number in range(15):
            deleting = Deleting()
            agent = agent_on(cp, [[delete("a"), delete("b"), delete("c")], "ok"], f"t{number}", tools=[deleting.tool])
            await agent.prompt("go")
            await asyncio.gather(*(handle(agent, call_id) for call_id in "abc"))
            if [info.id for info in await cp.unfinished()]:
                await agent.resume()
            assert sorted(deleting.deleted) == ["a", "b", "c"]
            assert await statuses(cp, f"t{number}") == {"a": "done", "b": "done", "c": "done"}

    with_two(database, use)


def test_pending_lists_the_questions_of_one_thread_or_of_all_in_the_order_of_asking(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        assert await cp.pending() == []
        for thread_id in ("z", "a", "m"):
            calls = [delete(f"{thread_id}1"), delete(f"{thread_id}2")]
            await agent_on(cp, [calls], thread_id, tools=[Deleting().tool]).prompt("go")
        everywhere = await other.pending()
        assert [(question.thread_id, question.call_id) for question in everywhere] == [
            (thread_id, f"{thread_id}{number}") for thread_id in ("z", "a", "m") for number in "12"
        ]
        assert await other.pending("a") == everywhere[2:4]
        assert await other.pending("nobody") == []
        await other.answer("a", "a1", "deny")
        assert len(await cp.pending()) == 5
        with pytest.raises(InputError, match="thread id"):
            await cp.pending("")

    with_two(database, use)


# --- restarts, aborts and limits --------------------------------------------------------------------------------------


def test_a_question_outlives_every_process(database: Database) -> None:
    deleting = Deleting()

    async def ask() -> None:
        async with database.checkpointer() as cp:
            await agent_on(cp, [[delete("a")]], tools=[deleting.tool]).prompt("go")

    async def answer() -> None:
        async with database.checkpointer() as cp:
            agent = agent_on(cp, tools=[deleting.tool])
            await agent.load()
            assert [question.call_id for question in agent.pending] == ["a"]
            await agent.answer("a", "approve")

    async def go_on() -> None:
        async with database.checkpointer() as cp:
            agent = agent_on(cp, ["ok"], tools=[deleting.tool])
            await agent.load()
            assert agent.pending == []
            assert (await agent.resume()).text == "ok"

    for step in (ask, answer, go_on):
        asyncio.run(step())
    assert deleting.deleted == ["a"]


def test_a_crash_after_the_answer_and_before_the_tool_runs_it_once(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        slow = Slow(approval=True)
        agent = agent_on(cp, [[ToolCall("s", "slow"), delete("a")]], tools=[deleting.tool, slow.tool])
        await agent.prompt("go")
        await other.answer("t", "s", "approve")
        run = asyncio.create_task(agent.resume())
        await slow.begun.wait()
        await other.answer("t", "a", "approve")
        await die(cp, agent, run)
        assert await statuses(other) == {"s": "started", "a": "answered"}
        assert [info.id for info in await other.unfinished()] == ["t"]
        assert (await agent_on(other, ["ok"], tools=[deleting.tool, slow.tool]).resume()).text == "ok"
        assert deleting.deleted == ["a"]
        assert slow.runs == 1
        assert await statuses(other) == {"s": "unknown", "a": "done"}

    with_two(database, use)


def test_a_run_that_lost_its_thread_does_not_act_upon_an_answer(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting, slow = Deleting(), Slow()
        agent = agent_on(cp, [[delete("a"), ToolCall("c2", "slow")]], tools=[deleting.tool, slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await until(lambda: other.pending("t"))
        await take_over(other)
        await other.answer("t", "a", "approve")
        slow.let_go.set()
        await asyncio.wait([run])
        assert run.exception() is not None
        assert deleting.deleted == []
        assert await statuses(other) == {"a": "answered", "c2": "started"}

    with_two(database, use)


def test_an_aborted_run_leaves_its_question_open(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting, slow = Deleting(), Slow()
        agent = agent_on(cp, [[delete("a"), ToolCall("c2", "slow")], "ok"], tools=[deleting.tool, slow.tool])
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await until(lambda: other.pending("t"))
        agent.abort()
        assert (await run).stop_reason == "aborted"
        check_whole(heard)
        assert await statuses(cp) == {"a": "waiting", "c2": "aborted"}
        assert (await lease_of(cp)).until is None
        with pytest.raises(AnswerNeeded):
            await agent.prompt("hm")
        await agent.answer("a", "approve")
        assert (await agent.resume()).text == "ok"
        assert deleting.deleted == ["a"]

    with_two(database, use)


def test_a_run_that_failed_beside_its_question_is_taken_up_when_that_was_answered(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting, slow = Deleting(), Slow()
        agent = agent_on(cp, [[delete("a"), ToolCall("c2", "slow")]], tools=[deleting.tool, slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await until(lambda: other.pending("t"))
        with monkeypatch.context() as broken:
            break_query(broken, cp.store, tool_calls.finish)
            slow.let_go.set()
            with pytest.raises(StoreFull):
                await run
        assert await other.unfinished() == []
        await other.answer("t", "a", "approve")
        assert [info.id for info in await other.unfinished()] == ["t"]

    with_two(database, use)


def test_limits_count_from_the_answer_on(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")], [delete("b")], "ok"], tools=[deleting.tool], limits=Limits(turns=1))
        assert (await agent.prompt("go")).stop_reason == "waiting"  # rather than the limit: somebody has to answer
        await agent.answer("a", "approve")
        result = await agent.resume()
        assert (result.stop_reason, deleting.deleted) == ("waiting", ["a"])
        await agent.answer("b", "approve")
        result = await agent.resume()
        assert (result.stop_reason, result.text) == ("stop", "ok")
        assert await is_free(cp)

    with_two(database, use)


def test_a_question_comes_before_the_value_that_was_asked_for(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, [[delete("a")], "ok", "17"], tools=[Deleting().tool])
        result = await agent.prompt("how many?", output=int)
        assert (result.stop_reason, result.output, result.error) == ("waiting", None, None)  # type: ignore[comparison-overlap]
        await agent.answer("a", "approve")
        assert (await agent.resume()).text == "ok"
        assert (await agent.prompt("again: how many?", output=int)).output == 17

    with_two(database, use)


def test_a_tool_that_ends_the_run_ends_it_also_after_an_approval(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        @tool(approval=True)
        def finish() -> ToolResult:
            return ToolResult("enough", end_run=True)

        agent = agent_on(cp, [[ToolCall("c1", "finish")], "too much"], tools=[finish])
        await agent.prompt("go")
        await agent.answer("c1", "approve")
        result = await agent.resume()
        assert result.stop_reason == "stopped"
        assert (await history(cp, "t"))[-1] == "tool_result: enough"

    with_two(database, use)


def test_an_approved_tool_may_ask_for_its_hooks_to_see_the_result(database: Database) -> None:
    class Redacts(Middleware):
        async def after_tool_call(self, call: ToolCall, result: ToolResultMessage, **_: Any) -> ToolResultMessage:
            return ToolResultMessage(call.id, call.name, "[redacted]")

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        options: dict[str, Any] = {"tools": [Deleting().tool], "middleware": [Redacts()]}
        await agent_on(cp, [[delete("a")]], **options).prompt("go")
        await other.answer("t", "a", "approve")
        await agent_on(other, ["ok"], **options).resume()
        assert (await results(cp))[0].text == "[redacted]"

    with_two(database, use)


# --- without a checkpointer -------------------------------------------------------------------------------------------


def test_an_agent_in_memory_asks_too() -> None:
    async def main() -> None:
        deleting = Deleting()
        provider = ScriptedProvider([[ToolCall("c1", "look"), delete("a"), delete("b")], "ok", "bye"])
        agent = make(provider, tools=[deleting.tool, look])
        heard = Heard(agent)
        assert (await agent.prompt("go")).stop_reason == "waiting"
        assert [(question.thread_id, question.call_id) for question in agent.pending] == [("", "a"), ("", "b")]
        with pytest.raises(AnswerNeeded, match=r"the agent waits.*delete \('a'\)"):
            await agent.prompt("hello?")
        with pytest.raises(InputError, match="'c' of the agent"):
            await agent.answer("c", "approve")
        await agent.answer("b", "approve")
        assert (await agent.resume()).stop_reason == "waiting"
        assert deleting.deleted == ["b"]
        with pytest.raises(InputError, match="'b' of the agent"):
            await agent.answer("b", "approve")
        await agent.answer("a", Deny("no"))
        assert (await agent.resume()).text == "ok"
        assert (await agent.prompt("thanks")).text == "bye"
        check_whole(heard)
        request = [line for line in sent(provider, 1) if line.startswith("tool_result")]
        denied = "tool_result: A person was asked about this call and denied it: no"
        assert request == ["tool_result: seen", denied, "tool_result: b is gone"]

    within(main())


def test_an_agent_in_memory_goes_on_by_itself_when_the_answer_comes_in_time() -> None:
    async def main() -> None:
        deleting, slow = Deleting(), Slow()
        agent = make([[delete("a"), ToolCall("c2", "slow")], "ok"], tools=[deleting.tool, slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await until(lambda: agent.pending)
        await agent.answer("a", "approve")
        slow.let_go.set()
        assert (await run).text == "ok"
        assert deleting.deleted == ["a"]

    within(main())


def test_an_agent_in_memory_stops_at_the_question_when_its_tools_run_in_turn() -> None:
    async def main() -> None:
        deleting = Deleting()
        calls = [delete("a"), ToolCall("c2", "look")]
        agent = make([calls, "ok"], tools=[deleting.tool, look], tool_mode="sequential")
        heard = Heard(agent)
        await agent.prompt("go")
        assert heard.of(ToolExecutionStart) == []
        await agent.answer("a", "approve")
        assert (await agent.resume()).text == "ok"
        assert [event.tool_call_id for event in heard.of(ToolExecutionStart)] == ["a", "c2"]

    within(main())


# --- interrupted tools that ask ---------------------------------------------------------------------------------------


async def interrupted(cp: Checkpointer, **options: Any) -> Slow:
    """A thread whose run died while the tool `slow` was running."""
    slow = Slow(recovery="ask", **options)
    agent = agent_on(cp, [[ToolCall("s", "slow")]], tools=[slow.tool])
    run = asyncio.create_task(agent.prompt("go"))
    await slow.begun.wait()
    await die(cp, agent, run)
    slow.let_go.set()
    return slow


@pytest.mark.parametrize(
    ("answer", "text", "runs", "status"),
    [
        ("approve", "slow is done", 2, "done"),
        ("deny", "It was interrupted before, and may or may not have taken effect.", 1, "denied"),
        (Deny("I looked"), "may or may not have taken effect: I looked", 1, "denied"),
        (ToolResult("it had worked"), "it had worked", 1, "done"),
    ],
    ids=["approve", "deny", "Deny", "result"],
)
@pytest.mark.parametrize("way", ["resume", "prompt"])
def test_an_interrupted_tool_that_asks_does_what_the_person_says(
    database: Database, way: str, answer: Any, text: str, runs: int, status: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = await interrupted(cp)
        (before,) = await other.tool_calls("t")
        agent = agent_on(other, ["ok"], tools=[slow.tool])
        if way == "resume":
            assert (await agent.resume()).stop_reason == "waiting"
        else:
            with pytest.raises(AnswerNeeded):
                await agent.prompt("hello?")
        assert slow.runs == 1
        (question,) = await cp.pending("t")
        assert (question.reason, question.arguments) == ("recovery", {})
        assert "may or may not have taken effect" in question.question
        assert agent.pending == [question]
        await cp.answer("t", "s", answer)
        assert (await (agent.resume() if way == "resume" else agent.prompt("well then"))).text == "ok"
        assert slow.runs == runs
        (result,) = await results(cp)
        assert text in result.text
        (after,) = await other.tool_calls("t")
        assert (after.status, after.attempts) == (status, runs)
        assert after.idempotency_key == before.idempotency_key
        assert "hello?" not in "".join(await history(cp, "t"))

    with_two(database, use)


def test_a_tool_that_was_approved_and_interrupted_asks_again_and_says_why(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow(recovery="ask", approval=True)
        agent = agent_on(cp, [[ToolCall("s", "slow")]], tools=[slow.tool])
        await agent.prompt("go")
        assert [question.reason for question in agent.pending] == ["approval"]
        await agent.answer("s", "approve")
        run = asyncio.create_task(agent.resume())
        await slow.begun.wait()
        await die(cp, agent, run)
        slow.let_go.set()
        again = agent_on(other, ["ok"], tools=[slow.tool])
        assert (await again.resume()).stop_reason == "waiting"
        assert [question.reason for question in again.pending] == ["recovery"]
        assert slow.runs == 1
        await again.answer("s", "approve")
        assert (await again.resume()).text == "ok"
        assert slow.runs == 2

    with_two(database, use)


def test_an_approval_is_for_one_attempt_of_a_tool_that_must_not_run_twice(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow(approval=True)
        agent = agent_on(cp, [[ToolCall("s", "slow")]], tools=[slow.tool])
        await agent.prompt("go")
        await agent.answer("s", "approve")
        run = asyncio.create_task(agent.resume())
        await slow.begun.wait()
        await die(cp, agent, run)
        assert (await agent_on(other, ["ok"], tools=[slow.tool]).resume()).text == "ok"
        assert slow.runs == 1
        assert "unknown" in (await results(cp))[0].text

    with_two(database, use)


def test_a_reply_after_a_question_is_answered_by_whoever_has_the_thread(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()

        async def answer(request: Request) -> list[ToolCall] | str:
            count = sum(isinstance(message, ToolResultMessage) for message in request.messages)
            return [delete(f"p{count}")] if count < 6 else "ok"

        agents = [agent_on(opener, [answer] * 9, tools=[deleting.tool]) for opener in (cp, other)]
        result = await agents[0].prompt("go")
        for number in range(6):
            assert result.stop_reason == "waiting"
            await (cp, other)[number % 2].answer("t", f"p{number}", "approve")
            result = await agents[(number + 1) % 2].resume()
        assert result.text == "ok"
        assert deleting.deleted == [f"p{number}" for number in range(6)]
        assert len(set(deleting.keys)) == 6

    with_two(database, use)
