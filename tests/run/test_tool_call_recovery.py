"""What becomes of calls that were begun and have no result: what their tool says, whoever stored their reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from byssus import (
    AssistantMessage,
    Done,
    Middleware,
    NotDone,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    Unknown,
    UserMessage,
)
from byssus.checkpointer import Checkpointer, SQLiteCheckpointer
from byssus.errors import InputError
from byssus.messages import encode
from byssus.providers.history import open_calls
from byssus.providers.scripted import ScriptedProvider
from byssus.store import schema
from tests.support.agents import Heard, check_whole, history, sent, within
from tests.support.checkpointers import loaded
from tests.support.databases import Database
from tests.support.histories import flaws
from tests.support.leases import Slow, agent_on, die, is_free, until, with_two
from tests.support.tool_calls import UNKNOWN, Acting, act, interrupt, ledger, results

# --- what an interrupted call comes to --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["resume", "prompt"])
def test_a_call_that_may_have_run_is_never_run_again_unless_its_tool_says_so(database: Database, way: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)
        await interrupt(cp, acting)
        assert await ledger(other) == [("c1", "started", 1)]
        provider = ScriptedProvider(["ok"])
        agent = agent_on(other, provider, tools=[acting.tool])
        heard = Heard(agent)
        await (agent.resume() if way == "resume" else agent.prompt("and now?"))
        check_whole(heard)
        assert sent(provider)[:3] == ["user: go", "assistant: ", UNKNOWN]
        assert len(acting.runs) == 1
        assert await ledger(cp) == [("c1", "unknown", 1)]
        assert await is_free(cp)

    with_two(database, use)


def test_a_call_that_is_retried_gets_the_arguments_of_its_first_attempt(database: Database) -> None:
    class Edits(Middleware):
        def __init__(self, n: int) -> None:
            self._n = n

        async def before_tool_call(self, call: ToolCall, **_: Any) -> dict[str, Any]:
            return {"n": self._n}

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        await interrupt(cp, acting, act(1), middleware=[Edits(2)])
        await agent_on(other, ["ok"], tools=[acting.tool], middleware=[Edits(3)]).resume()
        assert [n for n, _ in acting.runs] == [2, 2]
        assert [record.arguments for record in await cp.tool_calls("t")] == [{"n": 2}]

    with_two(database, use)


async def _unknown_async(context: ToolContext) -> Unknown:
    await asyncio.sleep(0)
    return Unknown()


async def _done_async(context: ToolContext) -> Done:
    await asyncio.sleep(0)
    return Done(f"it was {context.arguments['n']}")


def _raises(context: ToolContext) -> Done:
    raise OSError("the service is down")


async def _hangs(context: ToolContext) -> Done:
    await asyncio.Event().wait()
    return Done()


CHECKS: dict[str, tuple[Callable[[ToolContext], Any], str, str, int]] = {
    "done": (lambda context: Done("it was"), "tool_result: it was", "done", 1),
    "done, async": (_done_async, "tool_result: it was 1", "done", 1),
    "done without a result": (lambda context: Done(), "tool_result: (no output)", "done", 1),
    "done, and wrong": (lambda context: Done(ToolResult("no", is_error=True)), "tool_result: no", "failed", 1),
    "not done": (lambda context: NotDone(), "tool_result: did 1", "done", 2),
    "unknown": (lambda context: Unknown(), UNKNOWN, "unknown", 1),
    "unknown, async": (_unknown_async, UNKNOWN, "unknown", 1),
    "raises": (_raises, UNKNOWN, "unknown", 1),
    "nothing": (lambda context: None, UNKNOWN, "unknown", 1),
    "nonsense": (lambda context: "done", UNKNOWN, "unknown", 1),
    "a class": (lambda context: NotDone, UNKNOWN, "unknown", 1),
    "too slow": (_hangs, UNKNOWN, "unknown", 1),
}


@pytest.mark.parametrize("answer", CHECKS)
def test_a_call_that_can_be_checked_comes_to_what_the_check_says(database: Database, answer: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        function, text, status, attempts = CHECKS[answer]
        asked: list[ToolContext] = []

        def check(context: ToolContext) -> Any:
            asked.append(context)
            return function(context)

        acting = Acting(hangs=1, recovery="check", check=check, timeout=0.3)
        acting.tool._timeout = None  # only the check has a limit
        await interrupt(cp, acting)
        acting.tool._timeout = 0.3
        assert (await agent_on(other, ["ok"], tools=[acting.tool]).resume()).text == "ok"
        assert await results(cp) == [text]
        assert await ledger(cp) == [("c1", status, attempts)]
        assert len(acting.runs) == attempts
        (context,) = asked
        assert (context.tool_call_id, context.tool_name, context.thread_id) == ("c1", "act", "t")
        assert context.arguments == {"n": 1}
        assert {key for _, key in acting.runs} == {context.idempotency_key}

    with_two(database, use)


def test_what_a_check_answers_passes_the_hooks_as_the_result_of_the_tool_would(database: Database) -> None:
    class Redacts(Middleware):
        async def after_tool_call(self, call: ToolCall, result: ToolResultMessage, **_: Any) -> ToolResultMessage:
            return ToolResultMessage(call.id, call.name, "[redacted]")

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, check=lambda context: Done("a secret"))
        await interrupt(cp, acting)
        await agent_on(other, ["ok"], tools=[acting.tool], middleware=[Redacts()]).resume()
        assert await results(cp) == ["tool_result: [redacted]"]

    with_two(database, use)


def test_an_abort_during_a_check_leaves_the_call_open(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        checking = asyncio.Event()

        async def check(context: ToolContext) -> Done:
            checking.set()
            await asyncio.Event().wait()
            return Done()

        acting = Acting(hangs=1, check=check)
        await interrupt(cp, acting)
        agent = agent_on(other, tools=[acting.tool])
        run = asyncio.create_task(agent.resume())
        await checking.wait()
        agent.abort()
        assert (await run).stop_reason == "aborted"
        assert await ledger(cp) == [("c1", "started", 1)]
        assert [info.id for info in await cp.unfinished()] == ["t"]
        again = Acting(check=lambda context: NotDone())
        assert (await agent_on(cp, ["ok"], tools=[again.tool]).resume()).text == "ok"
        assert await results(cp) == ["tool_result: did 1"]

    with_two(database, use)


def test_a_call_that_was_never_started_is_run(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)
        await interrupt(cp, acting, act(1), act(2), act(3), tool_mode="sequential")
        assert await ledger(cp) == [("c1", "started", 1)]
        await agent_on(other, ["ok"], tools=[acting.tool]).resume()
        assert await results(cp) == [UNKNOWN, "tool_result: did 2", "tool_result: did 3"]
        assert [n for n, _ in acting.runs] == [1, 2, 3]

    with_two(database, use)


@pytest.mark.parametrize("recovery", ["never", "retry"])
@pytest.mark.parametrize("finished", [0, 1, 2])
def test_a_call_that_has_ended_is_not_run_again_wherever_it_stands(
    database: Database, finished: int, recovery: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow, acting = Slow(recovery=recovery), Acting(recovery=recovery)
        calls = [ToolCall(f"s{n}", "slow") for n in range(3)]
        calls[finished] = act(7)
        agent = agent_on(cp, [calls], tools=[slow.tool, acting.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: _has_result(other))
        await until(lambda: slow.runs == 2)
        await die(cp, agent, run)
        slow.let_go.set()
        provider = ScriptedProvider(["ok"])
        await agent_on(other, provider, tools=[slow.tool, acting.tool]).resume()
        expected = [UNKNOWN if recovery == "never" else "tool_result: slow is done"] * 3
        expected[finished] = "tool_result: did 7"
        assert await results(cp) == expected
        assert sent(provider)[2:] == expected
        assert len(acting.runs) == 1
        assert slow.runs == (2 if recovery == "never" else 4)

    with_two(database, use)


async def _has_result(cp: Checkpointer) -> bool:
    return await cp.load("t") is not None and bool(await results(cp))


def test_of_two_calls_with_one_id_the_one_that_has_ended_is_not_run_again(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow, acting = Slow(recovery="retry"), Acting(recovery="retry")
        agent = agent_on(cp, [[ToolCall("x", "slow"), act(7, "x")]], tools=[slow.tool, acting.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: _has_result(other))
        await slow.begun.wait()
        await die(cp, agent, run)
        slow.let_go.set()
        await agent_on(other, ["ok"], tools=[slow.tool, acting.tool]).resume()
        assert await results(cp) == ["tool_result: slow is done", "tool_result: did 7"]
        assert len(acting.runs) == 1
        assert await ledger(cp) == [("x", "done", 2), ("x", "done", 1)]

    with_two(database, use)


def test_what_somebody_wrote_behind_an_interrupted_call_stays_behind_its_result(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        await interrupt(cp, acting, act(1), act(2), tool_mode="sequential")
        await other.append("t", UserMessage("hello?"))
        provider = ScriptedProvider(["ok"])
        await agent_on(other, provider, tools=[acting.tool]).resume()
        lines = ["user: go", "assistant: ", "tool_result: did 1", "tool_result: did 2", "user: hello?"]
        assert sent(provider) == lines
        assert await history(cp, "t") == [*lines, "assistant: ok"]

    with_two(database, use)


# --- replies that no agent stored -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text", "runs"),
    [
        ({}, UNKNOWN, 0),
        ({"recovery": "retry"}, "tool_result: did 1", 1),
        ({"check": lambda context: NotDone()}, "tool_result: did 1", 1),
        ({"check": lambda context: Done("it was")}, "tool_result: it was", 0),
    ],
    ids=["never", "retry", "not done", "done"],
)
@pytest.mark.parametrize("way", ["resume", "prompt"])
def test_a_call_of_a_reply_that_no_agent_stored_may_have_run(
    database: Database, way: str, options: dict[str, Any], text: str, runs: int
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(**options)
        await other.append("t", [UserMessage("go"), AssistantMessage([act(1)], "tool_use")])
        agent = agent_on(cp, ["ok"], tools=[acting.tool])
        await (agent.resume() if way == "resume" else agent.prompt("well?"))
        assert await results(cp) == [text]
        assert len(acting.runs) == runs

    with_two(database, use)


def test_a_call_of_a_reply_that_no_agent_stored_is_asked_about_where_the_tool_asks(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(recovery="ask")
        await other.append("t", [UserMessage("go"), AssistantMessage([act(1)], "tool_use")])
        agent = agent_on(cp, ["ok"], tools=[acting.tool])
        assert (await agent.resume()).stop_reason == "waiting"
        assert [(question.reason, question.call_id) for question in agent.pending] == [("recovery", "c1")]
        await agent.answer("c1", "approve")
        assert (await agent.resume()).text == "ok"
        assert len(acting.runs) == 1

    with_two(database, use)


def test_what_is_known_of_a_foreign_reply_does_not_grow_when_its_first_call_is_settled(database: Database) -> None:
    """A crash in the middle of recovering it leaves the others as doubtful as they were."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, name="hang", recovery="retry")
        never = Acting()
        calls = [ToolCall("c1", "hang", {"n": 1}), act(2), act(3)]
        await other.append("t", [UserMessage("go"), AssistantMessage(calls, "tool_use")])
        tools = [acting.tool, never.tool]
        agent = agent_on(cp, tools=tools, tool_mode="sequential")
        run = asyncio.create_task(agent.resume())
        await acting.begun.wait()
        await die(cp, agent, run)
        await agent_on(other, ["ok"], tools=tools, tool_mode="sequential").resume()
        assert await results(cp) == ["tool_result: did 1", UNKNOWN, UNKNOWN]
        assert never.runs == []

    with_two(database, use)


def test_only_the_calls_of_a_foreign_reply_that_have_no_result_are_open(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        reply = AssistantMessage([act(1), act(2), act(3)], "tool_use")
        await other.append("t", [UserMessage("go"), reply, ToolResultMessage("c2", "act", "mine")])
        acting = Acting()
        provider = ScriptedProvider(["ok"])
        await agent_on(cp, provider, tools=[acting.tool]).resume()
        assert sent(provider) == ["user: go", "assistant: ", UNKNOWN, "tool_result: mine", UNKNOWN]
        assert acting.runs == []
        assert not open_calls((await loaded(cp, "t")).messages)

    with_two(database, use)


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param([UserMessage("hello?")], id="a message"),
        pytest.param([ToolResultMessage("c3", "act", "mine")], id="a result"),
    ],
)
def test_a_foreign_reply_with_something_behind_it_is_mended_at_once(database: Database, behind: list[Any]) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        reply = AssistantMessage([act(1), act(2), act(3)], "tool_use")
        await other.append("t", [UserMessage("go"), reply, *behind])
        provider = ScriptedProvider(["ok"])
        assert (await agent_on(cp, provider, tools=[Acting().tool]).resume()).text == "ok"
        assert flaws(provider.requests[0].messages) == []

    with_two(database, use)


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_open_calls_in_the_middle_of_a_foreign_history_are_not_run(database: Database, mode: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(recovery="retry")
        asks = AssistantMessage([act(1)], "tool_use")
        await other.append("t", [UserMessage("go"), asks, UserMessage("hm"), AssistantMessage("so"), UserMessage("?")])
        provider = ScriptedProvider(["ok"])
        await agent_on(cp, provider, tools=[acting.tool], tool_mode=mode).resume()
        assert acting.runs == []
        assert flaws(provider.requests[0].messages) == []

    with_two(database, use)


# --- databases from before the ledger ---------------------------------------------------------------------------------


def make_schema_1(path: Path, messages: list[Any], reserved: int) -> None:
    """A database as the first version left it: with a thread, and places for the results of its last reply.

    Only SQLite files are that old: Postgres had the ledger from its first day.
    """
    first = schema.migrations("sqlite", key="INTEGER PRIMARY KEY")[0]
    assert first.number == 1
    connection = apsw.Connection(str(path))
    connection.execute(first.sql)
    connection.pragma("user_version", 1)
    connection.pragma("application_id", 0x42595353)
    now = "2026-01-01T00:00:00.000000Z"
    connection.execute(
        "INSERT INTO threads (key, namespace, id, branch, head, version, message_count, extra, created_at, updated_at)"
        " VALUES (1, '', 't', 1, ?, 2, ?, '{\"kept\":1}', ?, ?)",
        (len(messages) + reserved, len(messages), now, now),
    )
    connection.execute("INSERT INTO branches (key, thread) VALUES (1, 1)")
    connection.execute("INSERT INTO segments (branch, source, after_seq, upto_seq) VALUES (1, 1, 0, ?)", (2**62,))
    for seq, message in enumerate(messages, 1):
        connection.execute(
            "INSERT INTO messages (branch, seq, id, role, body, created_at) VALUES (1, ?, ?, ?, ?, ?)",
            (seq, f"m{seq}", message.role, encode(message), now),
        )
    connection.close()


@pytest.mark.parametrize("recovery", ["never", "retry"])
@pytest.mark.parametrize("reserved", [0, 2], ids=["without places", "with places"])
def test_the_open_calls_of_an_older_database_may_have_run_under_a_key_that_nobody_knows(
    tmp_path: Path, reserved: int, recovery: str
) -> None:
    path = tmp_path / "old.db"
    make_schema_1(path, [UserMessage("go"), AssistantMessage([act(1), act(2)], "tool_use")], reserved)

    async def main() -> None:
        async with SQLiteCheckpointer(path) as cp, SQLiteCheckpointer(path) as other:
            assert await cp.unfinished() == []
            assert await cp.tool_calls("t") == []
            assert (await loaded(cp, "t")).extra == {"kept": 1}
            acting = Acting(recovery=recovery)
            agent = agent_on(cp, [[act(3)], "ok"], tools=[acting.tool])
            assert (await agent.resume()).text == "ok"
            assert (await results(other))[:2] == [UNKNOWN, UNKNOWN]
            assert [n for n, _ in acting.runs] == [3]  # what is new is known
            assert [status for _, status, _ in await ledger(other)][-1] == "done"
            assert await other.unfinished() == []

    within(main())


def test_an_older_database_is_brought_up_to_date_once_and_keeps_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    make_schema_1(path, [UserMessage("go"), AssistantMessage("ok")], 0)

    async def main() -> None:
        for number in range(2):
            async with SQLiteCheckpointer(path) as cp:
                assert (await history(cp, "t"))[:2] == ["user: go", "assistant: ok"]
                await agent_on(cp, [[act(1)], "more"], tools=[Acting().tool]).prompt("and?")
                assert len(await cp.tool_calls("t")) == number + 1

    within(main())


# --- a call that is interrupted again and again -----------------------------------------------------------------------


@pytest.mark.parametrize("recovery", ["retry", "check"])
def test_a_call_that_is_interrupted_each_time_is_not_retried_for_ever_but_asked_about(
    database: Database, recovery: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        check = (lambda context: NotDone()) if recovery == "check" else None
        acting = Acting(hangs=4, recovery=recovery, check=check)
        await interrupt(cp, acting)
        for _ in range(2):
            await _interrupt_again(cp, acting)
        assert await ledger(other) == [("c1", "started", 3)]
        agent = agent_on(other, ["ok"], tools=[acting.tool])
        assert (await agent.resume()).stop_reason == "waiting"
        (asked,) = agent.pending
        assert (asked.call_id, asked.reason, "3 times" in asked.question) == ("c1", "recovery", True)
        await other.answer("t", "c1", "approve")
        await _interrupt_again(cp, acting)  # and it is interrupted a fourth time
        assert (await agent.resume()).stop_reason == "waiting"
        assert "4 times" in agent.pending[0].question
        await other.answer("t", "c1", "approve")
        assert (await agent.resume()).text == "ok"
        assert await ledger(cp) == [("c1", "done", 5)]
        assert len({key for _, key in acting.runs}) == 1

    with_two(database, use)


async def _interrupt_again(cp: Checkpointer, acting: Acting) -> None:
    acting.begun.clear()
    agent = agent_on(cp, [], tools=[acting.tool])
    run = asyncio.create_task(agent.resume())
    await acting.begun.wait()
    await die(cp, agent, run)


@pytest.mark.parametrize(("limit", "hangs"), [(1, 1), (None, 5)])
def test_how_often_a_call_is_retried_is_the_tools_to_say(database: Database, limit: int | None, hangs: int) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=hangs, recovery="retry", max_attempts=limit)
        await interrupt(cp, acting)
        for _ in range(hangs - 1):
            await _interrupt_again(cp, acting)
        result = await agent_on(other, ["ok"], tools=[acting.tool]).resume()
        assert (result.stop_reason, len(acting.runs)) == (("waiting", 1) if limit else ("stop", 6))

    with_two(database, use)


@pytest.mark.parametrize("limit", [0, -1, True, "3", 1.5], ids=ascii)
def test_a_number_of_attempts_that_is_none_is_an_input_error(limit: Any) -> None:
    with pytest.raises(InputError, match="max_attempts must be a number from 1 up"):
        Acting(recovery="retry", max_attempts=limit)
