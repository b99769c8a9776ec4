"""Child threads: an agent is a tool of another one, and each call of it is durable on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from byssus import Agent, Limits, ToolCall, ToolContext, UserMessage, tool
from byssus.checkpointer import Checkpointer, TakeOver
from byssus.errors import AnswerNeeded, InputError, InvalidRequest, LeaseLost, NetworkFailed, ThreadBusy, ToolMissing
from byssus.events import MessageEnd, ToolExecutionEnd, ToolExecutionUpdate, from_json
from byssus.messages import AssistantMessage, TextContent, ToolResultMessage, Usage, dumps
from byssus.providers.base import Request
from byssus.providers.history import UNKNOWN_OUTCOME
from byssus.providers.scripted import ScriptedProvider
from tests.support.agents import Acted, Hanging, Heard, check_whole, history, hooks, make, sent, within
from tests.support.approvals import Deleting, delete
from tests.support.children import CHILD, ask, ids, research
from tests.support.databases import Database
from tests.support.leases import (
    CALL_SLOW,
    Slow,
    agent_on,
    break_writes,
    die,
    expire,
    lease_of,
    take_over,
    until,
    with_two,
)
from tests.support.tool_calls import Acting, act, ledger

SOON = 60.0  # seconds: no test waits for it


class Finishing(Acting):
    """A tool that hangs in one of its runs, and not in the ones before."""

    def __init__(self, hangs_in: int, **options: Any) -> None:
        super().__init__(hangs=0, **options)
        self._in = hangs_in

    async def _run(self, n: int, context: ToolContext) -> str:
        if len(self.runs) == self._in - 1:
            self._hangs = self._in
        return await super()._run(n, context)


def results(agent: Agent) -> list[str]:
    return [message.text for message in agent.state.messages if isinstance(message, ToolResultMessage)]


# --- a call -----------------------------------------------------------------------------------------------------------


def test_a_call_works_on_a_thread_of_its_own_for_the_same_user(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cp.create_user("Ada", user_id="ada", quota_total=100_000)
        reply = AssistantMessage([TextContent("42")], usage=Usage(700, 300))
        agent = agent_on(cp, [[ask()], "It is 42."], tools=[research([reply])], user_id="ada")
        result = await agent.prompt("go")
        assert result.text == "It is 42."
        assert result.usage.total == 0  # the child's usage is its own
        message = result.messages[2]
        assert isinstance(message, ToolResultMessage)
        (run,) = await other.runs(CHILD)
        assert message.details == {"thread_id": CHILD, "run_id": run.id, "stop_reason": "stop"}
        assert (run.state, run.stop_reason, run.started_by) == ("ended", "stop", "ada")
        assert await history(other, CHILD) == ["user: find it", "assistant: 42"]
        (child,) = await other.children("t")
        assert (child.id, child.parent_id, child.user_id, child.state) == (CHILD, "t", "ada", "idle")
        assert (await other.get_user("ada"))["quota_used"] == 1_000  # type: ignore[index]
        assert [info.id for info in await other.threads()] == ["t"]
        assert [row["id"] for row in await other.list_user_sessions("ada") or ()] == ["t"]
        assert await ids(other) == ["t", CHILD]

    with_two(database, use)


def test_parallel_calls_of_one_agent_do_not_meet(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        def answer(request: Any) -> str:
            return f"about {request.messages[-1].text}"

        tools = [research([answer, answer, answer], system_prompt="Search.")]
        agent = agent_on(cp, [[ask("a", "1"), ask("b", "2"), ask("c", "3")], "done"], tools=tools)
        heard = Heard(agent)
        await agent.prompt("go")
        check_whole(heard)
        assert results(agent) == ["about a", "about b", "about c"]
        names = [child.id for child in await other.children("t")]
        assert names == ["t.research-1", "t.research-2", "t.research-3"]
        assert sorted([(await history(other, name))[0] for name in names]) == ["user: a", "user: b", "user: c"]

    with_two(database, use)


def test_the_events_of_a_child_are_progress_of_the_call() -> None:
    agent = make([[ask()], "done"], tools=[research(["so it is"])])
    heard = Heard(agent)
    within(agent.prompt("go"))
    check_whole(heard)
    updates = heard.of(ToolExecutionUpdate)
    assert {update.tool_call_id for update in updates} == {"r1"}
    events = [from_json(dumps(update.update["event"])) for update in updates]
    assert events[0].type == "agent_start"
    assert [event.message.text for event in events if isinstance(event, MessageEnd)] == ["find it", "so it is"]
    assert events[-1].type == "agent_end"


def test_an_answer_of_a_type_is_given_to_the_model_as_json(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        tools = [research(['{"city": "Oslo", "days": 3}'], output=dict[str, Any])]
        agent = agent_on(cp, [[ask()], "done"], tools=tools)
        await agent.prompt("go")
        assert results(agent) == ['{"city":"Oslo","days":3}']

    with_two(database, use)


@pytest.mark.parametrize(
    ("script", "options", "told"),
    [
        ([InvalidRequest("no such model")], {}, "The agent failed: InvalidRequest: no such model"),
        ([[act(1)]], {"limits": Limits(turns=1)}, "The agent stopped at its limit of turns before it had finished."),
        ([KeyError("city")], {}, "The agent failed: ProviderError:"),
    ],
)
def test_a_failure_of_a_child_is_a_result_that_the_model_reads(
    script: list[Any], options: dict[str, Any], told: str
) -> None:
    agent = make([[ask()], "Then not."], tools=[research(script, tools=[Acting().tool], **options)])
    assert within(agent.prompt("go")).text == "Then not."
    message = agent.state.messages[2]
    assert isinstance(message, ToolResultMessage)
    assert message.is_error
    assert message.text.startswith(told)


def test_a_quota_that_is_exhausted_is_told_to_the_parent(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cp.create_user("Ada", user_id="ada", quota_total=50_000)
        greedy: list[Any] = [AssistantMessage([act(1)], usage=Usage(60_000, 0)), "never"]
        tools = [research(greedy, tools=[Acting().tool])]
        result = await agent_on(cp, [[ask()], "never"], tools=tools, user_id="ada").prompt("go")
        assert result.stop_reason == "quota_limit"  # the parent has nothing left either
        assert "QuotaExceeded" in result.messages[2].text
        (run,) = await other.runs(CHILD)
        assert run.stop_reason == "quota_limit"

    with_two(database, use)


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_crash_in_a_childs_tool_goes_on_in_the_child(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Finishing(2, recovery="retry")
        child = research([[act(1)], [act(2)]], tools=[acting.tool])
        agent = agent_on(cp, [[ask()]], tools=[child])
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        await die(cp, agent, run)
        assert [info.id for info in await other.unfinished()] == ["t"]  # the child goes on with its parent
        provider = ScriptedProvider(["found"])
        again = agent_on(other, ["done"], tools=[research(provider, tools=[acting.tool])])
        assert (await again.resume()).text == "done"
        assert results(again) == ["found"]
        assert [n for n, _ in acting.runs] == [1, 2, 2]
        assert acting.runs[1] == acting.runs[2]  # with the same idempotency key
        assert sent(provider)[-1] == "tool_result: did 2"
        assert await ids(other) == ["t", CHILD]
        assert await ledger(other) == [("r1", "done", 2)]
        (run_of_child,) = await other.runs(CHILD)
        assert (run_of_child.attempts, run_of_child.stop_reason) == (2, "stop")

    with_two(database, use)


def test_a_child_that_had_ended_is_not_run_again(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        begun = asyncio.Event()

        async def hang(call: ToolCall, result: ToolResultMessage) -> None:  # before the result is committed
            begun.set()
            await asyncio.Event().wait()

        agent = agent_on(cp, [[ask()]], tools=[research(["found"])], middleware=[hooks(after_tool_call=hang)])
        run = asyncio.create_task(agent.prompt("go"))
        await begun.wait()
        await die(cp, agent, run)
        again = agent_on(other, ["done"], tools=[research([])])  # which has nothing to say
        assert (await again.resume()).text == "done"
        assert results(again) == ["found"]
        assert [run.attempts for run in await other.runs(CHILD)] == [1]

    with_two(database, use)


def test_a_parent_that_loses_its_lease_leaves_its_child_to_the_next_process(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        hanging = Hanging("so")
        cp.lease_seconds = 0.2  # which is when the lease is looked at
        agent = agent_on(cp, [[ask()]], tools=[research(Acted(hanging))])
        run = asyncio.create_task(agent.prompt("go"))
        await hanging.begun.wait()
        await take_over(other)
        with pytest.raises(LeaseLost):
            await run
        (info,) = await other.runs(CHILD)
        assert (info.state, info.error) == ("interrupted", None)
        await expire(other)
        again = agent_on(other, ["done"], tools=[research(["found"])])
        assert (await again.resume()).text == "done"
        assert results(again) == ["found"]
        assert await ids(other) == ["t", CHILD]

    with_two(database, use)


def test_a_crash_at_any_write_leaves_what_the_next_process_brings_to_the_same_end(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(call: ToolCall, *more: ToolCall) -> list[Any]:
        def answer(request: Request) -> Any:
            last = request.messages[-1]
            return [call, *more] if isinstance(last, UserMessage) else f"after {last.text}"

        return [answer] * 9

    async def crashed(cp: Checkpointer, other: Checkpointer, after: int) -> bool:
        """Let all writes fail but the first ones, and another process go on. False: nothing had failed."""
        acting, name, writes = Acting(recovery="retry"), f"t{after}", itertools.count()

        def agent(cp: Checkpointer) -> Agent:
            tools = [research(answers(act(1)), tools=[acting.tool])]
            return agent_on(cp, answers(ask("a", "1"), ask("b", "2")), name, tools=tools)

        with monkeypatch.context() as patch:
            break_writes(patch, cp.store, lambda query, options: next(writes) >= after)
            one = agent(cp)
            failed = (await asyncio.gather(one.prompt("go"), return_exceptions=True))[0]
        await die(cp, one)
        two = agent(other)
        if isinstance(failed, BaseException):
            resumed = await other.load(name) is not None
            result = await (two.resume() if resumed else two.prompt("go"))
            assert (result.text, result.stop_reason) == ("after after did 1", "stop")
        found = ["user: go", "assistant: ", *["tool_result: after did 1"] * 2, "assistant: after after did 1"]
        assert await history(other, name) == found
        children = [child.id for child in await other.children(name)]
        assert children == [f"{name}.research-1", f"{name}.research-2"]
        attempts = 0
        for child in children:
            assert (await history(other, child))[1:] == ["assistant: ", "tool_result: did 1", "assistant: after did 1"]
            (record,) = await other.tool_calls(child)
            assert record.status == "done"
            attempts += record.attempts
        assert len(acting.runs) <= attempts
        return isinstance(failed, BaseException)

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        after = 0
        while await crashed(cp, other, after):
            after += 1
        assert after >= 15

    with_two(database, use)


def test_a_child_that_lacks_a_tool_leaves_the_call_open(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        agent = agent_on(cp, [[ask()]], tools=[research([[act(1)]], tools=[acting.tool])])
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        await die(cp, agent, run)
        with pytest.raises(ToolMissing):
            await agent_on(other, tools=[research([])]).resume()
        good = agent_on(other, ["done"], tools=[research(["found"], tools=[acting.tool])])
        assert (await good.resume()).text == "done"

    with_two(database, use)


def test_a_fork_keeps_results_and_never_runs_an_open_child(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        agent = agent_on(
            cp, [[ask("a", "1")], [ask("b", "2")]], tools=[research(["found", [act(1)]], tools=[acting.tool])]
        )
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        await die(cp, agent, run)
        await other.fork("t", new_id="f")
        fork = agent_on(other, ["done"], "f", tools=[research([])])
        assert (await fork.resume()).text == "done"
        assert results(fork) == ["found", UNKNOWN_OUTCOME]
        assert await other.children("f") == []
        assert len(await other.children("t")) == 2

    with_two(database, use)


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_an_abort_of_the_parent_aborts_the_child(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)
        inner = make([[act(1)]], tools=[acting.tool]).as_tool("inner")
        middle = research([[ToolCall("i1", "inner", {"task": "x"})]], tools=[inner])
        agent = agent_on(cp, [[ask()]], tools=[middle])
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        assert await other.abort("t")
        assert (await run).stop_reason == "aborted"
        check_whole(heard)
        for name in ("t", CHILD, f"{CHILD}.inner-1"):
            (info,) = await other.runs(name)
            assert (info.state, info.stop_reason) == ("ended", "aborted")
            assert (await lease_of(other, name)).owner is None
        assert await ledger(other) == [("r1", "aborted", 1)]

    with_two(database, use)


def test_an_abort_of_the_child_alone_is_a_result(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)
        agent = agent_on(cp, [[ask()], "Then not."], tools=[research([[act(1)]], tools=[acting.tool])])
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        assert await other.abort(CHILD)
        assert (await run).text == "Then not."
        assert results(agent) == ["The agent was aborted before it had finished."]

    with_two(database, use)


@pytest.mark.parametrize("grace", [SOON, 0])
def test_a_hand_over_hands_the_child_over_too(database: Database, grace: float) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting, gate = Acting(hangs=1, recovery="retry"), asyncio.Event()
        begun = asyncio.Event()

        @tool(recovery="retry")
        async def wait_for(what: str) -> str:
            begun.set()
            await gate.wait()
            return f"{what} came"

        inside = [ToolCall("w1", "wait_for", {"what": "rain"})]
        agent = agent_on(cp, [[ask()]], tools=[research([inside], tools=[wait_for])])
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await begun.wait()
        agent.hand_over(grace)
        if grace:
            gate.set()
        result = await run
        gate.set()
        assert (result.stop_reason, acting.runs) == ("handed_over", [])
        check_whole(heard)
        (end,) = heard.of(ToolExecutionEnd)
        assert (end.stored, end.result.text) == (False, "This call goes on in another process.")
        for name in ("t", CHILD):
            (info,) = await other.runs(name)
            assert info.state == "interrupted"
        assert [info.id for info in await other.unfinished()] == ["t"]
        again = agent_on(other, ["done"], tools=[research(["found"], tools=[wait_for])])
        assert (await again.resume()).text == "done"
        assert results(again) == ["found"]
        called = [(record.status, record.attempts) for record in await other.tool_calls(CHILD)]
        assert called == [("done", 1 if grace else 2)]

    with_two(database, use)


# --- questions --------------------------------------------------------------------------------------------------------


def test_a_question_in_a_child_lets_the_parent_wait_and_an_answer_resumes_both(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[ask()]], tools=[research([[delete("a")]], tools=[deleting.tool])])
        heard = Heard(agent)
        assert (await agent.prompt("go")).stop_reason == "waiting"
        check_whole(heard)
        assert [(call.thread_id, call.call_id) for call in agent.pending] == [(CHILD, "a")]
        assert await other.pending() == await other.pending("t") == agent.pending
        assert [await other.state(name) for name in ("t", CHILD)] == ["waiting", "waiting"]
        assert await other.unfinished() == []
        with pytest.raises(AnswerNeeded, match=CHILD):
            await agent_on(other, tools=[research([], tools=[deleting.tool])]).prompt("and now?")
        taken: list[TakeOver] = []

        def factory(thread_id: str, user_id: str | None) -> Agent:
            return make(["done"], tools=[research(["gone"], tools=[deleting.tool])])

        async with other.supervise(factory, every=0.02, report=taken.append):
            await cp.answer(CHILD, "a", "approve")
            await until(lambda: taken)
        assert [(each.thread_id, each.result and each.result.text) for each in taken] == [("t", "done")]
        assert deleting.deleted == ["a"]
        assert (await history(other, "t"))[2] == "tool_result: gone"
        assert len(await other.runs(CHILD)) == 1
        (run,) = await other.runs("t")  # the prompt that was refused has begun none
        (called,) = [step.text for step in await other.timeline(run.id) if step.kind == "tool_call"]
        assert called.endswith("; its thread was resumed")  # and its outcome was never unknown

    with_two(database, use)


@pytest.mark.parametrize("asks", ["the thread", "its child"])
@pytest.mark.parametrize("runs", ["nothing", "another call"])
def test_an_abort_ends_a_run_and_no_wait_for_a_person(database: Database, asks: str, runs: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting, slow, is_child = Deleting(), Slow(), asks == "its child"
        question = ask() if is_child else delete("a")

        def tools(*script: Any) -> list[Any]:
            return [research(script, tools=[deleting.tool]), deleting.tool, slow.tool]

        agent = agent_on(
            cp, [[question, *CALL_SLOW] if runs == "another call" else [question]], tools=tools([delete("a")])
        )
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: other.pending("t"))
        if runs == "another call":
            await slow.begun.wait()
            assert await other.abort("t") is True
            assert (await run).stop_reason == "aborted"
        else:
            assert (await run).stop_reason == "waiting"
        pending = await other.pending("t")
        assert [(call.thread_id, call.call_id) for call in pending] == [(CHILD if is_child else "t", "a")]
        for name in {"t", pending[0].thread_id}:
            assert await other.state(name) == "waiting"
            assert await other.abort(name) is False
        assert await other.pending("t") == pending
        await other.answer(pending[0].thread_id, "a", "deny")
        assert (await agent_on(other, ["done"], tools=tools("gave up")).resume()).text == "done"
        assert deleting.deleted == []

    with_two(database, use)


def test_an_agent_answers_for_its_children(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()

        def tools() -> list[Any]:
            return [research([[delete("a")], "gone"], tools=[deleting.tool])]

        await agent_on(cp, [[ask()]], tools=tools()).prompt("go")
        async with agent_on(other, ["done"], tools=[research(["gone"], tools=[deleting.tool])]) as agent:
            assert [call.thread_id for call in agent.pending] == [CHILD]
            assert await agent.answer("a", "approve", by="ada")
            assert agent.pending == []
            assert (await agent.resume()).text == "done"
        assert [record.answered_by for record in await cp.tool_calls(CHILD)] == ["ada"]

        memory = make([[ask()], "done"], tools=tools())
        assert (await memory.prompt("go")).stop_reason == "waiting"
        assert [call.call_id for call in memory.pending] == ["a"]
        await memory.answer("a", "approve")
        assert (await memory.resume()).text == "done"
        assert deleting.deleted == ["a", "a"]

    with_two(database, use)


def test_an_answer_while_other_calls_run_is_carried_out_at_once(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting, acting, gate = Deleting(), Acting(), asyncio.Event()

        @tool
        async def wait() -> str:
            await gate.wait()
            return "waited"

        tools = [research([[delete("a")], "gone"], tools=[deleting.tool]), wait, acting.tool]
        agent = agent_on(cp, [[ask(), ToolCall("w1", "wait")], "done"], tools=tools)
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: other.pending(CHILD))
        await other.answer(CHILD, "a", "approve")
        gate.set()
        assert (await run).text == "done"
        assert results(agent) == ["gone", "waited"]

    with_two(database, use)


def test_a_rewind_leaves_an_open_child_behind(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        await agent_on(cp, [[ask()]], tools=[research([[delete("a")]], tools=[deleting.tool])]).prompt("go")
        await other.rewind("t", 0)
        assert await other.pending() == []
        assert [await other.state(name) for name in ("t", CHILD)] == ["idle", "idle"]
        with pytest.raises(InputError, match="left"):
            await other.answer(CHILD, "a", "approve")
        assert (await agent_on(other, ["anew"]).prompt("again")).text == "anew"

    with_two(database, use)


def test_a_rewind_of_a_child_is_no_other_prompt_to_its_parent(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        await agent_on(cp, [[ask()]], tools=[research([[delete("a")]], tools=[deleting.tool])]).prompt("go")
        await other.rewind(CHILD, 0)
        agent = agent_on(other, ["done"], tools=[research([], tools=[deleting.tool])])
        assert (await agent.resume()).text == "done"
        assert results(agent) == ["The agent was left before it had finished."]

    with_two(database, use)


# --- limits and bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stored", [True, False])
def test_depth_and_number_are_limited(database: Database, is_stored: bool) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        where: dict[str, Any] = {"checkpointer": cp, "thread_id": "t"} if is_stored else {}
        agent, called = make(["at the bottom"]), "at the bottom"
        for _ in range(3):
            agent, called = (
                make([[ask(called)], lambda request: request.messages[-1].text], tools=[agent.as_tool("research")]),
                "down",
            )
        top = make([[ask("down")], "done"], tools=[agent.as_tool("research")], limits=Limits(depth=2), **where)
        await top.prompt("go")
        assert results(top) == ["This call was not started: it is 2 threads deep already, and limits.depth is 2."]
        many = make(
            [[ask("a", "1"), ask("b", "2"), ask("c", "3")], "done"],
            tools=[research(["found"] * 3)],
            limits=Limits(children=2),
            tool_mode="sequential",
            **({**where, "thread_id": "many"} if is_stored else {}),
        )
        await many.prompt("go")
        refused = "This call was not started: the run has begun 2 child threads already, which is its limits.children."
        assert results(many) == ["found", "found", refused]

    with_two(database, use)


def test_what_cannot_be_a_tool_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        for wrong in ("", "no spaces", 7):
            with pytest.raises(InputError, match="name"):
                make([]).as_tool(wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="checkpointer or a user_id of its own"):
            agent_on(cp).as_tool("research")
        with pytest.raises(InputError, match="checkpointer or a user_id of its own"):
            make([], user_id="ada").as_tool("research")
        with pytest.raises(InputError, match="limit on depth"):
            Limits(depth=0)
        agent = make([[ToolCall("1", "research", {"question": "?"})], "done"], tools=[research([])])
        await agent.prompt("go")
        assert results(agent)[0].startswith("Invalid arguments: ")

    with_two(database, use)


def test_a_tool_can_be_called_by_a_program() -> None:
    assert within(research(["found"])("find it")) == "found"
    with pytest.raises(NetworkFailed):
        within(research([NetworkFailed("gone")], max_retries=0)("find it"))


def test_a_child_that_a_person_drives_is_waited_for(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        agent = agent_on(cp, [[ask()]], tools=[research([[act(1)]], tools=[acting.tool])])
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        await die(cp, agent, run)
        hanging = Hanging("so")
        person = agent_on(cp, Acted(hanging), CHILD, tools=[acting.tool])
        driving = asyncio.create_task(person.resume())
        await hanging.begun.wait()
        again = agent_on(other, ["Then not."], tools=[research([], tools=[acting.tool])])
        resumed = asyncio.create_task(again.resume())
        await until(lambda: again.state.is_streaming)
        with pytest.raises(ThreadBusy):
            await other.append(CHILD, [UserMessage("me too")])
        person.abort()
        await driving
        assert (await resumed).text == "Then not."
        assert results(again) == ["The agent was aborted before it had finished. It said: so"]

    with_two(database, use)
