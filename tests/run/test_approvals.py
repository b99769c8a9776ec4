"""Tool calls that wait for a person: the question is stored, anybody may answer it, and what runs is what was shown."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest

from byssus import (
    Agent,
    Ask,
    Deny,
    Middleware,
    Pending,
    TextContent,
    ToolCall,
    ToolResult,
    UserMessage,
    tool,
)
from byssus.checkpointer import Checkpointer
from byssus.errors import AlreadyAnswered, AnswerNeeded, InputError, NotFound
from byssus.events import ToolExecutionStart
from byssus.messages import ImageContent
from byssus.middleware import HookContext
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from byssus.storage import AgentStorage
from tests.support.agents import Heard, check_whole, history, make, sent
from tests.support.approvals import Deleting, delete, ends, look, results, statuses
from tests.support.cases import case
from tests.support.checkpointers import loaded
from tests.support.databases import Database
from tests.support.leases import Slow, agent_on, everything, is_free, lease_of, with_two

# --- the question -----------------------------------------------------------------------------------------------------


def test_a_tool_that_needs_approval_does_not_run_and_its_run_ends_waiting(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")]], tools=[deleting.tool])
        heard = Heard(agent)
        result = await agent.prompt("tidy up")
        check_whole(heard)
        assert result.stop_reason == "waiting"
        assert deleting.deleted == []
        assert heard.of(ToolExecutionStart) == []
        (question,) = agent.pending
        asked_at = question.asked_at
        assert question == Pending("t", "a", "delete", {"path": "a"}, "approval", "", asked_at)
        assert asked_at
        (stored,) = await other.pending("t")
        assert (stored.call_id, stored.arguments, stored.reason) == ("a", {"path": "a"}, "approval")
        lease = await lease_of(cp)
        assert (lease.owner, lease.until) == (None, None)
        assert lease.run is not None
        assert await statuses(other) == {"a": "waiting"}
        assert await results(other) == []

    with_two(database, use)


@pytest.mark.parametrize("opener", ["same agent", "new agent"])
@pytest.mark.parametrize(
    ("answer", "text", "status", "is_error"),
    [
        ("approve", "a is gone", "done", False),
        ("deny", "A person was asked about this call and denied it.", "denied", True),
        (Deny("it is mine"), "A person was asked about this call and denied it: it is mine", "denied", True),
        (ToolResult("done by hand"), "done by hand", "done", False),
        (ToolResult("it burnt", is_error=True), "it burnt", "failed", True),
        (ToolResult({"rows": [1, 2]}), '{"rows":[1,2]}', "done", False),
        (ToolResult([TextContent("one"), TextContent(" two")]), "one two", "done", False),
        (ToolResult("nasty \0 \ud800"), "nasty \0 \ud800", "done", False),
    ],
    ids=["approve", "deny", "Deny", "result", "error", "json", "blocks", "nasty"],
)
def test_an_answer_becomes_the_result_that_the_model_reads(
    database: Database, answer: Any, text: str, status: str, is_error: bool, opener: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        provider = ScriptedProvider([[delete("a")], "ok"])
        agent = agent_on(cp, provider, tools=[deleting.tool])
        await agent.prompt("tidy up")
        await other.answer("t", "a", answer)
        assert await other.pending() == []
        if opener == "new agent":
            provider = ScriptedProvider(["ok"])
            agent = agent_on(other, provider, tools=[deleting.tool])
        heard = Heard(agent)
        result = await agent.resume()
        check_whole(heard)
        assert (result.text, result.stop_reason) == ("ok", "stop")
        assert agent.pending == []
        (stored,) = await results(cp)
        assert (stored.text, stored.is_error) == (text, is_error)
        assert (stored.tool_call_id, stored.tool_name) == ("a", "delete")
        assert deleting.deleted == (["a"] if answer == "approve" else [])
        assert await statuses(cp) == {"a": status}
        assert sent(provider)[-1] == f"tool_result: {text}"
        assert await is_free(cp)

    with_two(database, use)


def test_an_answer_may_end_the_run(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, [[delete("a")], "ok"], tools=[Deleting().tool])
        await agent.prompt("tidy up")
        await agent.answer("a", ToolResult("I did it all", end_run=True))
        assert (await agent.resume()).stop_reason == "stopped"

    with_two(database, use)


def test_details_of_an_answer_are_kept(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, [[delete("a")], "ok"], tools=[Deleting().tool])
        await agent.prompt("tidy up")
        await agent.answer("a", ToolResult("by hand", details={"who": ["Ada"]}))
        assert agent.pending == []
        await agent.resume()
        assert (await results(cp))[0].details == {"who": ["Ada"]}

    with_two(database, use)


def test_a_prompt_after_the_answer_acts_upon_it_first(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        provider = ScriptedProvider([[delete("a")], "ok"])
        agent = agent_on(cp, provider, tools=[deleting.tool])
        await agent.prompt("tidy up")
        await agent.answer("a", "approve")
        await agent.prompt("and quickly")
        assert sent(provider) == ["user: tidy up", "assistant: ", "tool_result: a is gone", "user: and quickly"]
        assert await history(other, "t") == [*sent(provider), "assistant: ok"]

    with_two(database, use)


@pytest.mark.parametrize("knows", ["asked itself", "loaded it", "is new", "knows an older state"])
def test_a_prompt_while_a_person_must_answer_says_so_and_stores_nothing(database: Database, knows: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        early = agent_on(other, ["hi"], tools=[deleting.tool])
        await early.prompt("before")
        asking = agent_on(cp, [[delete("a"), delete("b")]], tools=[deleting.tool])
        await asking.prompt("tidy up")
        agent = {
            "asked itself": asking,
            "knows an older state": early,
            "loaded it": agent_on(other, tools=[deleting.tool]),
            "is new": agent_on(other, tools=[deleting.tool]),
        }[knows]
        if knows == "loaded it":
            await agent.load()
            assert [question.call_id for question in agent.pending] == ["a", "b"]
        heard = Heard(agent)
        before = (await loaded(cp, "t")).messages
        for _ in range(2):
            with pytest.raises(AnswerNeeded, match=r"thread 't'.*delete \('a'\), delete \('b'\).*answer"):
                await agent.prompt("are you there?")
        check_whole(heard)
        assert (await loaded(cp, "t")).messages == before
        assert [question.call_id for question in await cp.pending("t")] == ["a", "b"]
        assert (await lease_of(cp)).until is None
        await other.answer("t", "a", "deny")
        with pytest.raises(AnswerNeeded, match=r"delete \('b'\)"):
            await agent.prompt("are you there?")
        await other.answer("t", "b", "deny")
        assert [info.id for info in await other.unfinished()] == ["t"]
        assert (await agent_on(other, ["fine"], tools=[deleting.tool]).prompt("now?")).text == "fine"

    with_two(database, use)


def test_to_resume_before_the_answer_waits_on(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        provider = ScriptedProvider([[delete("a")], "ok"])
        agent = agent_on(cp, provider, tools=[deleting.tool])
        await agent.prompt("tidy up")
        for opener in (agent, agent_on(other, tools=[deleting.tool]), agent):
            heard = Heard(opener)
            assert (await opener.resume()).stop_reason == "waiting"
            check_whole(heard)
            assert [question.call_id for question in opener.pending] == ["a"]
        assert len(provider.requests) == 1
        assert await statuses(cp) == {"a": "waiting"}
        assert await other.unfinished() == []

    with_two(database, use)


def test_messages_that_wait_are_heard_after_the_answer(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")], "ok", "right"], tools=[deleting.tool])
        await other.follow_up("t", "and then?")
        assert (await agent.prompt("tidy up")).stop_reason == "waiting"
        assert len(await other.inbox("t")) == 1
        await agent.answer("a", "approve")
        await agent.resume()
        lines = ["user: tidy up", "assistant: ", "tool_result: a is gone", "assistant: ok", "user: and then?"]
        assert await history(cp, "t") == [*lines, "assistant: right"]

    with_two(database, use)


def test_whoever_writes_to_a_thread_that_waits_does_not_come_between_the_call_and_its_result(
    database: Database,
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        await agent_on(cp, [[delete("a"), delete("b")]], tools=[deleting.tool]).prompt("tidy up")
        await other.append("t", UserMessage("hello?"))
        for call_id in "ab":
            await other.answer("t", call_id, "approve")
        provider = ScriptedProvider(["ok"])
        await agent_on(other, provider, tools=[deleting.tool]).resume()
        lines = ["user: tidy up", "assistant: ", "tool_result: a is gone", "tool_result: b is gone", "user: hello?"]
        assert sent(provider) == lines
        assert await history(cp, "t") == [*lines, "assistant: ok"]

    with_two(database, use)


# --- questions of middleware ------------------------------------------------------------------------------------------


class Says(Middleware):
    """A middleware that has an opinion about each call."""

    def __init__(self, *opinions: Any) -> None:
        self.opinions = list(opinions)
        self.seen: list[dict[str, Any]] = []

    async def before_tool_call(self, call: ToolCall, **_: Any) -> Any:
        self.seen.append(call.arguments)
        return self.opinions[0] if len(self.opinions) == 1 else self.opinions.pop(0)


ASK, DENY = Ask("Really?"), Deny("never")


def test_a_middleware_asks_with_a_question_of_its_own(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting(approval=False)
        middleware = [Says(None), Says(ASK), Says(Ask("Are you sure?"))]
        agent = agent_on(cp, [[delete("a")], "ok"], tools=[deleting.tool], middleware=middleware)
        assert (await agent.prompt("go")).stop_reason == "waiting"
        assert [(question.question, question.reason) for question in agent.pending] == [("Really?", "approval")]
        await agent.answer("a", "approve")
        await agent.resume()
        assert deleting.deleted == ["a"]
        assert [len(item.seen) for item in middleware] == [1, 1, 1]  # what was approved is not asked about again

    with_two(database, use)


@pytest.mark.parametrize("opinions", [[ASK, DENY], [DENY, ASK], [ASK, None, DENY, ASK]], ids=str)
@pytest.mark.parametrize("approval", [False, True])
def test_a_denial_of_any_middleware_overrules_every_question(
    database: Database, opinions: list[Any], approval: bool
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting(approval=approval)
        middleware = [Says(opinion) for opinion in opinions]
        agent = agent_on(cp, [[delete("a")], "ok"], tools=[deleting.tool], middleware=middleware)
        assert (await agent.prompt("go")).text == "ok"
        assert (await results(cp))[0].text == "This call was blocked: never"
        assert deleting.deleted == []
        assert await other.pending() == []

    with_two(database, use)


@pytest.mark.parametrize("opinions", [[ASK, {"path": "b"}], [{"path": "b"}, ASK]], ids=str)
@pytest.mark.parametrize("opener", ["same agent", "new agent", "new agent with other middleware"])
def test_what_runs_is_what_the_person_saw(database: Database, opinions: list[Any], opener: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting(approval=False)
        options: dict[str, Any] = {"tools": [deleting.tool], "middleware": [Says(item) for item in opinions]}
        agent = agent_on(cp, [[delete("a")], "ok"], **options)
        await agent.prompt("go")
        (question,) = await other.pending("t")
        assert question.arguments == {"path": "b"}
        await other.answer("t", "a", "approve")
        if opener != "same agent":
            if "other" in opener:
                options["middleware"] = [Says({"path": "c"})]
            agent = agent_on(other, ["ok"], **options)
        heard = Heard(agent)
        await agent.resume()
        assert deleting.deleted == ["b"]
        assert [event.arguments for event in heard.of(ToolExecutionStart)] == [{"path": "b"}]
        (record,) = await cp.tool_calls("t")
        assert record.arguments == {"path": "b"}
        reply = (await loaded(cp, "t")).messages[1]
        assert "'a'" in repr(reply)  # what the model wrote stays as it is

    with_two(database, use)


def test_arguments_that_a_middleware_has_mended_are_what_runs_after_the_approval(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        broken = ToolCall("a", "delete", malformed="{path: a")
        agent = agent_on(cp, [[broken], "ok"], tools=[deleting.tool], middleware=[Says({"path": "a"})])
        await agent.prompt("go")
        assert [question.arguments for question in agent.pending] == [{"path": "a"}]
        await agent.answer("a", "approve")
        await agent.resume()
        assert deleting.deleted == ["a"]

    with_two(database, use)


def test_a_call_without_arguments_that_a_middleware_has_mended_runs_after_the_approval(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        asking = Slow(approval=True)
        asking.let_go.set()
        broken = ToolCall("a", "slow", malformed="{")
        agent = agent_on(cp, [[broken], "ok"], tools=[asking.tool], middleware=[Says({})])
        await agent.prompt("go")
        await agent.answer("a", "approve")
        await agent.resume()
        assert asking.runs == 1

    with_two(database, use)


@pytest.mark.parametrize("value", [{1, 2}, datetime(2026, 1, 1), {1: "a"}, b"x"], ids=repr)
def test_a_middleware_may_pass_a_tool_what_is_no_json_and_a_person_sees_it_in_words(
    database: Database, value: Any
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        got: list[Any] = []

        @tool
        def take(value: Any) -> str:
            got.append(value)
            return "taken"

        calls = [ToolCall("a", "take", {"value": 0})]
        edits = Says({"value": value})
        assert (await agent_on(cp, [calls, "ok"], tools=[take], middleware=[edits]).prompt("go")).text == "ok"
        assert got == [value]
        asking = agent_on(cp, [calls, "ok"], tools=[take], middleware=[edits, Says(ASK)])
        assert (await asking.prompt("go")).stop_reason == "waiting"
        (question,) = await other.pending("t")
        await other.answer("t", "a", "approve")
        assert (await asking.resume()).text == "ok"
        assert got[1:] == [question.arguments["value"]]  # what runs is what the person saw
        assert [record.status for record in await cp.tool_calls("t")] == ["done", "done"]

    with_two(database, use)


def test_what_a_hook_wrote_to_the_extra_is_stored_with_the_question(database: Database) -> None:
    class Counts(Middleware):
        async def before_tool_call(
            self, call: ToolCall, *, signal: Signal | None = None, context: HookContext | None = None
        ) -> Ask:
            assert context is not None
            context.extra["asked"] = context.extra.get("asked", 0) + 1
            return ASK

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        options: dict[str, Any] = {"tools": [Deleting().tool], "middleware": [Counts()]}
        await agent_on(cp, [[delete("a")]], **options).prompt("go")
        assert (await loaded(other, "t")).extra == {"asked": 1}
        await other.answer("t", "a", "approve")
        await agent_on(other, ["ok"], **options).resume()
        assert (await loaded(cp, "t")).extra == {"asked": 1}

    with_two(database, use)


# --- answers ----------------------------------------------------------------------------------------------------------


BAD_ANSWERS: dict[str, Any] = {
    "nothing": None,
    "a yes": True,
    "no": "no",
    "another case": "Approve",
    "empty": "",
    "a question": Ask("?"),
    "a dict": {"decision": "approve"},
    "a result without JSON": ToolResult(object()),
    "details without JSON": ToolResult("x", details=object()),
    "keys that are no strings": ToolResult({1: 2}),
}


@pytest.mark.parametrize("who", ["agent", "checkpointer", "memory agent"])
def test_what_is_no_answer_is_refused_and_the_question_stays(database: Database, who: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        script: list[Step] = [[delete("a")], "ok"]
        tools = [Deleting().tool]
        agent = make(script, tools=tools) if who == "memory agent" else agent_on(cp, script, tools=tools)
        await agent.prompt("go")
        for name, answer in BAD_ANSWERS.items():
            with case(name):
                with pytest.raises(InputError):
                    await (other.answer("t", "a", answer) if who == "checkpointer" else _bad(agent, answer))
                assert len(agent.pending) == 1
        await agent.answer("a", "deny")
        assert (await agent.resume()).text == "ok"

    with_two(database, use)


async def _bad(agent: Agent, answer: Any) -> None:
    await agent.answer("a", answer)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Deny(object()), id="a reason that is no text"),  # type: ignore[arg-type]
        pytest.param(ToolResult("x", is_error=1), id="is_error=1"),  # type: ignore[arg-type]
        pytest.param(ToolResult("x", is_error="no"), id="is_error='no'"),  # type: ignore[arg-type]
        pytest.param(ToolResult([ImageContent("no image")]), id="an image that is none"),
    ],
)
def test_an_answer_is_refused_or_can_be_carried_out(database: Database, answer: Any) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, [[delete("a")], "ok"], tools=[Deleting().tool])
        await agent.prompt("go")
        try:
            await agent.answer("a", answer)
        except InputError:
            assert len(agent.pending) == 1
            return
        assert (await agent.resume()).text == "ok"
        assert "no image" not in repr(await results(cp))  # a service would refuse it for ever

    with_two(database, use)


def test_only_the_first_answer_counts(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")], "ok"], tools=[deleting.tool])
        await agent.prompt("go")
        await other.answer("t", "a", "deny")
        for status in ("answered", "denied"):
            with pytest.raises(InputError, match=rf"call 'a' of thread 't' .*{status}"):
                await cp.answer("t", "a", "approve")
            if status == "answered":
                await agent.resume()
        assert deleting.deleted == []

    with_two(database, use)


def test_of_answers_at_the_same_time_one_counts(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")], "ok"], tools=[deleting.tool])
        await agent.prompt("go")
        answers = [opener.answer("t", "a", word) for opener in (cp, other) for word in ("approve", "deny")]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes].count(AlreadyAnswered) == 3
        assert outcomes.count(True) == 1
        await agent.resume()
        assert len(await results(cp)) == 1

    with_two(database, use)


@pytest.mark.parametrize("call_id", ["b", "", "a\0", "\ud800", "'; --"], ids=ascii)
def test_an_answer_to_a_call_that_nobody_asked_about_is_refused_by_name(database: Database, call_id: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, [[delete("a")]], tools=[Deleting().tool])
        await agent.prompt("go")
        before = await cp.store.read(everything)
        with pytest.raises(NotFound, match="is unknown and does not wait for an answer"):
            await agent.answer(call_id, "approve")
        with pytest.raises(NotFound, match="there is no thread 'elsewhere'"):
            await other.answer("elsewhere", "a", "approve")
        assert await cp.store.read(everything) == before

    with_two(database, use)


@pytest.mark.parametrize("call_id", [None, 5, b"a"])
def test_what_names_no_call_is_an_input_error(database: Database, call_id: Any) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(cp, [[delete("a")]], tools=[Deleting().tool]).prompt("go")
        with pytest.raises(InputError, match="named by its id"):
            await cp.answer("t", call_id, "approve")

    with_two(database, use)


def test_a_call_that_ran_without_a_question_cannot_be_answered(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(cp, [[ToolCall("c1", "look")], "ok"], tools=[look]).prompt("go")
        with pytest.raises(InputError, match="it is done"):
            await other.answer("t", "c1", "deny")

    with_two(database, use)


def test_a_strange_call_id_can_be_answered(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        for number, call_id in enumerate(["a\0b", "\ud800", "汉", "x" * 10_000]):
            agent = agent_on(cp, [[delete("p", call_id)], "ok"], f"t{number}", tools=[deleting.tool])
            await agent.prompt("go")
            (question,) = await other.pending(f"t{number}")
            await other.answer(f"t{number}", (question.call_id, call_id)[number % 2], "approve")
            assert (await agent.resume()).text == "ok"
            assert (await results(cp, f"t{number}"))[0].tool_call_id == call_id
        assert len(deleting.deleted) == 4

    with_two(database, use)


def test_two_calls_with_one_id_are_asked_about_and_answered_one_after_the_other(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a", "x"), delete("b", "x")], "ok"], tools=[deleting.tool])
        await agent.prompt("go")
        assert [(question.call_id, question.arguments) for question in agent.pending] == [
            ("x", {"path": "a"}),
            ("x", {"path": "b"}),
        ]
        await agent.answer("x", "deny")
        assert [question.arguments for question in agent.pending] == [{"path": "b"}]
        assert [question.arguments for question in await other.pending("t")] == [{"path": "b"}]
        await other.answer("t", "x", "approve")
        with pytest.raises(InputError):
            await other.answer("t", "x", "approve")
        await agent.resume()
        assert deleting.deleted == ["b"]
        assert [result.is_error for result in await results(cp)] == [True, False]

    with_two(database, use)


def test_of_two_calls_with_one_id_the_one_that_was_answered_first_is_not_run_again(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting(recovery="retry")

        @tool(name="look")
        def look_here(path: str) -> str:
            return f"{path} seen"

        calls = [delete("a", "x"), ToolCall("x", "look", {"path": "b"})]
        agent = agent_on(cp, [calls, "ok"], tools=[deleting.tool, look_here])
        assert (await agent.prompt("go")).stop_reason == "waiting"
        await other.answer("t", "x", "approve")
        assert (await ends(agent.resume(), agent)).text == "ok"
        assert deleting.deleted == ["a"]
        assert [result.text for result in await results(cp)] == ["a is gone", "b seen"]

    with_two(database, use)


def test_an_answer_that_is_mistyped_is_refused_by_type_checkers_and_at_run_time(database: Database) -> None:
    with AgentStorage(database.place) as storage, pytest.raises(InputError, match="an answer is"):
        storage.answer("t", "c", "aprove")  # type: ignore[arg-type]  # a test: unused ignores are errors
