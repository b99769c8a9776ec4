"""Who answers a question, with which arguments, how many people it takes, and what happens when nobody does."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest

from byssus import Agent, Approval, Approve, Ask, Deny, Middleware, Pending, ToolCall, ToolResult, tool
from byssus.checkpointer import Checkpointer, ThreadKey
from byssus.errors import AlreadyAnswered, ArgumentsInvalid, InputError
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.log import answers
from byssus.queries.log.answers import NewAnswer
from byssus.signals import Signal
from byssus.store.database import Tx
from byssus.threads.approvals import ToolCallRecord
from byssus.values.decisions import joined
from tests.support.agents import make, sent
from tests.support.approvals import Deleting, delete, results, statuses
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.leases import agent_on, die, with_two
from tests.support.tool_calls import Acting, act

AT_ONCE = 1e-6  # seconds
TWO = Ask("Both of you?", approvers=2)


class Paying:
    """A tool that needs approval, and what it paid."""

    def __init__(self, **options: Any) -> None:
        self.paid: list[int] = []

        @tool(**{"approval": True, **options})
        def pay(amount: int) -> str:
            self.paid.append(amount)
            return f"paid {amount}"

        self.tool = pay


def pay(amount: int, call_id: str = "c") -> ToolCall:
    return ToolCall(call_id, "pay", {"amount": amount})


async def record(cp: Checkpointer, thread_id: str = "t") -> ToolCallRecord:
    (found,) = await cp.tool_calls(thread_id)
    return found


async def waiting(cp: Checkpointer, paying: Paying, *more: Any, thread_id: str = "t", **options: Any) -> Agent:
    """An agent whose call waits for a person."""
    agent = agent_on(cp, [[pay(5)], *more], thread_id, tools=[paying.tool], **options)
    assert (await agent.prompt("Pay.")).stop_reason == "waiting"
    return agent


async def interrupted_after(cp: Checkpointer, acting: Acting, answer: Any) -> None:
    """Let a run die under a tool that a person has approved."""
    agent = agent_on(cp, [[act(1)]], tools=[acting.tool])
    await agent.prompt("go")
    await cp.answer("t", "c1", answer)
    run = asyncio.create_task(agent.resume())
    await acting.begun.wait()
    await die(cp, agent, run)


# --- who, when and from where -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["checkpointer", "agent"])
def test_the_ledger_keeps_who_answered_when_and_from_where(database: Database, who: str) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = await waiting(cp, Paying(), "ok")
        before = datetime.now(UTC).isoformat()[:10]
        if who == "agent":
            assert await agent.answer("c", "approve", by="ada", source="web")
        else:
            assert await cp.answer("t", "c", "approve", by="ada", source="web")
        found = await record(cp)
        assert (found.status, found.answered_by, found.answered_from) == ("answered", "ada", "web")
        assert (found.answered_at or "")[:10] >= before
        await agent.resume()
        after = await record(cp)
        assert after.status == "done"
        assert (after.answered_by, after.answered_at) == ("ada", found.answered_at)

    with_cp(database, use)


def test_a_second_answer_is_told_who_was_first_and_when(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = await waiting(cp, Paying(), "ok")
        await cp.answer("t", "c", "deny", by="ada", source="cli")
        at = (await record(cp)).answered_at
        first = rf"call 'c' of thread 't'.*ada answered at {at} from cli"
        for status in ("answered", "denied"):
            assert (await record(cp)).status == status
            for answer in (other.answer("t", "c", "approve", by="bob"), agent.answer("c", "approve", by="bob")):
                with pytest.raises(AlreadyAnswered, match=first) as e:
                    await answer
                assert (e.value.by, e.value.at, e.value.source) == ("ada", at, "cli")
            if status == "answered":
                await agent.resume()

    with_two(database, use)


@pytest.mark.parametrize("name", ["", "  ", "x" * 501, "nul \0", 7])
@pytest.mark.parametrize("what", ["by", "source"])
def test_what_names_nobody_is_refused_and_the_question_stays(database: Database, what: str, name: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = await waiting(cp, Paying())
        for answering in (agent.answer("c", "approve", **{what: name}), cp.answer("t", "c", "approve", **{what: name})):
            with pytest.raises(InputError, match=what):
                await answering
        assert await statuses(cp) == {"c": "waiting"}

    with_cp(database, use)


# --- other arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["checkpointer", "agent"])
def test_a_call_runs_with_the_arguments_that_a_person_approved_and_the_ledger_keeps_both(
    database: Database, who: str
) -> None:
    async def use(cp: Checkpointer) -> None:
        paying, provider = Paying(), ScriptedProvider([[pay(500)], "ok"])
        agent = agent_on(cp, provider, tools=[paying.tool])
        await agent.prompt("Pay.")
        answer = Approve(arguments={"amount": 5})
        await (agent.answer("c", answer) if who == "agent" else cp.answer("t", "c", answer))
        assert (await agent.resume()).text == "ok"
        assert paying.paid == [5]
        found = await record(cp)
        assert (found.arguments, found.edited_arguments) == ({"amount": 500}, {"amount": 5})
        assert "other arguments" in sent(provider)[-1]
        assert '{"amount":5}' in sent(provider)[-1]
        assert sent(provider)[-1].endswith("paid 5")

    with_cp(database, use)


def test_an_approval_without_arguments_changes_none(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        paying = Paying()
        agent = await waiting(cp, paying, "ok")
        await cp.answer("t", "c", Approve())
        await agent.resume()
        assert paying.paid == [5]
        assert (await record(cp)).edited_arguments is None
        assert [result.text for result in await results(cp)] == ["paid 5"]

    with_cp(database, use)


def test_an_agent_refuses_arguments_that_do_not_fit_its_tool_and_the_question_stays(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        paying = Paying()
        agent = await waiting(cp, paying)
        fresh = agent_on(other, tools=[paying.tool])  # it has not loaded the thread
        for asked in (agent, fresh):
            for arguments in ({"amount": "many"}, {}, {"sum": 5}):
                with pytest.raises(ArgumentsInvalid, match=r"call 'c'.*amount"):
                    await asked.answer("c", Approve(arguments))
        assert await statuses(cp) == {"c": "waiting"}
        assert await fresh.answer("c", Approve({"amount": 1}))

    with_two(database, use)


def test_arguments_that_do_not_fit_when_they_are_carried_out_put_the_question_again(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        paying = Paying(approval=Ask(expires=1000, default=Deny("too late")))
        agent = await waiting(cp, paying, "ok")
        (first,) = await cp.pending("t")
        await cp.answer("t", "c", Approve({"amount": "many"}), by="ada")  # a process without the tool cannot tell
        assert (await agent.resume()).stop_reason == "waiting"
        (question,) = await cp.pending("t")
        assert (question.expires_at or "") > (first.expires_at or "~")
        assert question.default == "deny"
        assert question.arguments == {"amount": 5}
        assert 'approved with the arguments {"amount":"many"}, which do not fit' in question.question
        assert paying.paid == []
        found = await record(cp)
        assert (found.answered_by, found.edited_arguments) == (None, None)
        await cp.answer("t", "c", "approve")
        assert (await agent.resume()).text == "ok"
        assert paying.paid == [5]

    with_cp(database, use)


def test_a_question_that_is_put_again_has_as_much_time_and_the_same_default(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = await waiting(cp, Paying(approval=Ask(expires=1000, default="approve")), "ok")
        (first,) = await cp.pending("t")
        await cp.answer("t", "c", Approve({"amount": "many"}), by="ada")
        assert (await agent.resume()).stop_reason == "waiting"
        (again,) = await cp.pending("t")
        assert again.default == first.default == "approve"
        assert (again.expires_at or "") > (first.expires_at or "")

    with_cp(database, use)


@pytest.mark.parametrize("arguments", [[1], "5", {1: 2}, {"amount": object()}])
def test_arguments_that_are_no_json_object_are_refused(database: Database, arguments: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = await waiting(cp, Paying())
        for answering in (agent.answer("c", Approve(arguments)), cp.answer("t", "c", Approve(arguments))):
            with pytest.raises(InputError, match="arguments"):
                await answering
        assert await statuses(cp) == {"c": "waiting"}

    with_cp(database, use)


def test_a_retry_after_a_crash_runs_with_the_approved_arguments(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry", approval=True)
        await interrupted_after(cp, acting, Approve({"n": 2}))
        done = agent_on(other, ["ok"], tools=[acting.tool])
        assert (await done.resume()).text == "ok"
        assert [n for n, _ in acting.runs] == [2, 2]
        found = await record(other)
        assert (found.arguments, found.edited_arguments) == ({"n": 1}, {"n": 2})

    with_two(database, use)


# --- several approvers ------------------------------------------------------------------------------------------------


def test_a_call_that_needs_two_people_runs_when_both_have_approved(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        paying = Paying(approval=TWO)
        agent = await waiting(cp, paying, "ok")
        assert await cp.answer("t", "c", "approve", by="ada", source="web") is False
        (question,) = await other.pending()
        assert (question.question, question.approvers) == ("Both of you?", 2)
        ((by, source),) = [(given.by, given.source) for given in question.approvals]
        assert (by, source) == ("ada", "web")
        fresh = agent_on(other, tools=[paying.tool])
        await fresh.load()
        assert fresh.pending == [question]
        assert (await agent.resume()).stop_reason == "waiting"
        assert await agent.answer("c", "approve", by="bob") is True
        assert (await agent.resume()).text == "ok"
        assert paying.paid == [5]
        found = await record(other)
        assert [given.by for given in found.approvals] == ["ada", "bob"]
        assert (found.answered_by, found.approvers) == ("bob", 2)
        assert all(isinstance(given, Approval) for given in found.approvals)

    with_two(database, use)


def test_nobody_approves_twice_and_nobody_approves_without_a_name(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = await waiting(cp, Paying(approval=TWO))
        with pytest.raises(InputError, match=r"needs 2 different people.*by="):
            await cp.answer("t", "c", "approve")
        await cp.answer("t", "c", "approve", by="ada")
        with pytest.raises(AlreadyAnswered, match=r"'ada' has approved call 'c'.*1 of 2") as error:
            await agent.answer("c", Approve(), by="ada")
        assert error.value.by == "ada"
        with pytest.raises(InputError, match="the same arguments"):
            await cp.answer("t", "c", Approve({"amount": 1}), by="bob")
        assert await statuses(cp) == {"c": "waiting"}

    with_cp(database, use)


@pytest.mark.parametrize("answer", ["deny", Deny("no"), ToolResult("done by hand")])
def test_one_denial_is_enough(database: Database, answer: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        paying = Paying(approval=TWO)
        agent = await waiting(cp, paying, "ok")
        await cp.answer("t", "c", "approve", by="ada")
        assert await cp.answer("t", "c", answer, by="bob")
        with pytest.raises(AlreadyAnswered, match="bob answered"):
            await cp.answer("t", "c", "approve", by="eve")
        assert (await agent.resume()).text == "ok"
        assert paying.paid == []

    with_cp(database, use)


def test_of_many_approvals_at_the_same_time_each_counts_once(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        paying = Paying(approval=Ask(approvers=3))
        agent = await waiting(cp, paying, "ok")
        names = ["ada", "ada", "bob", "bob", "eve", "eve", "dan"]
        answers = [(cp, other)[n % 2].answer("t", "c", "approve", by=name) for n, name in enumerate(names)]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        assert (outcomes.count(True), outcomes.count(False)) == (1, 2)
        assert [type(outcome) for outcome in outcomes].count(AlreadyAnswered) == 4
        assert len((await record(cp)).approvals) == 3
        await agent.resume()
        assert paying.paid == [5]

    with_two(database, use)


def test_an_answer_locks_its_thread_before_its_call_as_all_writers_do(database: Database) -> None:
    def statements(tx: Tx) -> list[str]:
        noted = Mock(wraps=tx)
        answers.answer(noted, ThreadKey("", "t"), "c", NewAnswer('{"decision": "deny", "reason": ""}'))
        return [call.args[0] for call in noted.mock_calls if call.args]

    async def use(cp: Checkpointer) -> None:
        await waiting(cp, Paying())
        first, *_ = await cp.store.write(statements)
        assert first.startswith("UPDATE threads")

    with_cp(database, use)


def test_as_many_people_approve_an_interrupted_call_as_a_function_has_demanded(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="ask", approval=lambda _: TWO)
        agent = agent_on(cp, [[act(1)]], tools=[acting.tool])
        await agent.prompt("go")
        for name in ("ada", "bob"):
            await cp.answer("t", "c1", "approve", by=name)
        run = asyncio.create_task(agent.resume())
        await acting.begun.wait()
        await die(cp, agent, run)
        assert (await agent_on(other, [], tools=[acting.tool]).resume()).stop_reason == "waiting"
        (question,) = await other.pending("t")
        assert (question.reason, question.approvers, question.approvals) == ("recovery", 2, [])

    with_two(database, use)


# --- the time is over -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("default", "told", "paid"),
    [
        ("deny", "denied it", []),
        (Deny("too late"), "too late", []),
        ("approve", "paid 5", [5]),
        (Approve(), "paid 5", [5]),
        (ToolResult("nobody was there"), "nobody was there", []),
    ],
)
def test_a_question_that_nobody_answers_in_time_gets_its_default(
    database: Database, default: Any, told: str, paid: list[int]
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        paying = Paying(approval=Ask(expires=AT_ONCE, default=default))
        provider = ScriptedProvider([[pay(5)], "ok"])
        agent = agent_on(cp, provider, tools=[paying.tool])
        result = await agent.prompt("Pay.")
        if result.stop_reason == "waiting":  # the run may have noticed by itself
            assert await other.pending() == []
            assert [info.id for info in await other.unfinished()] == ["t"]  # a service goes on with it
            result = await agent.resume()
        assert result.text == "ok"
        assert told in sent(provider)[-1]
        assert paying.paid == paid
        found = await record(other)
        assert (found.answered_by, found.answered_from, found.answered_at) == (None, "expiry", found.expires_at)

    with_two(database, use)


def test_an_answer_that_comes_too_late_is_told_so(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = await waiting(cp, Paying(approval=Ask(expires=1000)), "ok")
        (question,) = await cp.pending()
        assert question.default == "deny"
        assert (question.expires_at or "") > question.asked_at
        await cp.store.write(lambda tx: tx.run("UPDATE tool_calls SET expires_at = asked_at"))
        assert await cp.pending() == []
        assert await statuses(cp) == {"c": "answered"}
        assert await cp.state("t") == "interrupted"
        for status in ("answered", "denied"):
            assert await statuses(cp) == {"c": status}
            what = r"it is (expired|denied); there was no answer until .* default answer counts"
            with pytest.raises(AlreadyAnswered, match=what) as error:
                await cp.answer("t", "c", "approve", by="ada")
            assert (error.value.by, error.value.source, error.value.at) == (None, "expiry", question.asked_at)
            if status == "answered":
                await agent.resume()

    with_cp(database, use)


def test_an_expired_question_is_carried_out_before_the_next_prompt(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = await waiting(cp, Paying(approval=Ask(expires=1000)), "ok")
        await cp.store.write(lambda tx: tx.run("UPDATE tool_calls SET expires_at = asked_at"))
        assert (await agent.prompt("And now?")).text == "ok"

    with_cp(database, use)


def test_an_interrupted_call_is_never_run_again_by_default(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="ask", approval=Ask(expires=1000, default="approve", question="?"))
        await interrupted_after(cp, acting, "approve")
        assert (await agent_on(other, tools=[acting.tool]).resume()).stop_reason == "waiting"
        (question,) = await other.pending()
        assert (question.reason, question.expires_at, question.default) == ("recovery", None, None)
        with pytest.raises(InputError, match="may have taken effect, so it can only run again with the same arguments"):
            await cp.answer("t", "c1", Approve({"n": 2}))

    with_two(database, use)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"approvers": 0}, "approvers"),
        ({"approvers": True}, "approvers"),
        ({"approvers": 101}, "approvers"),
        ({"expires": 0}, "expires"),
        ({"expires": "soon"}, "expires"),
        ({"default": "perhaps"}, "an answer is"),
        ({"default": Approve({"amount": 1})}, "cannot change the arguments"),
        ({"default": "approve", "approvers": 2, "expires": 1}, "without them"),
        ({"question": 7}, "question"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Ask(**options)


@pytest.mark.parametrize("approval", [None, 2, "yes", Deny("no")])
def test_an_approval_that_is_no_question_is_refused(approval: Any) -> None:
    with pytest.raises(InputError, match="approval must be True, False, Ask"):
        Paying(approval=approval)


def test_of_two_questions_about_one_call_the_stricter_demands_count() -> None:
    soon, late = Ask("a", expires=1), Ask("b", approvers=2, expires=9, default=Deny("x"))
    assert joined(soon, late) == Ask("a", 2, 1, "deny")
    assert joined(Ask(), late) == Ask("b", 2, 9, Deny("x"))
    run, also = Ask("a", expires=1, default="approve"), Ask("b", expires=2, default="approve")
    assert joined(run, also) == Ask("a", 1, 2, "approve")
    assert joined(run, Ask("b")) == Ask("a")
    assert joined(run, late) == Ask("a", 2, 9, Deny("x"))
    assert joined(run, None) == run


def test_a_middleware_cannot_make_a_tool_ask_fewer_people(database: Database) -> None:
    class Careful(Middleware):
        async def before_tool_call(self, call: ToolCall, *, signal: Signal | None = None) -> Ask:
            return Ask(f"Really {call.arguments['amount']}?", expires=60)

    async def use(cp: Checkpointer) -> None:
        await waiting(cp, Paying(approval=TWO), middleware=[Careful()])
        (question,) = await cp.pending()
        assert (question.question, question.approvers, question.default) == ("Really 5?", 2, "deny")

    with_cp(database, use)


# --- one inbox --------------------------------------------------------------------------------------------------------


async def ask_in(cp: Checkpointer, *threads: Any, **options: Any) -> None:
    for thread in threads:
        calls = [delete("a"), delete("b")]
        agent = make([calls], checkpointer=cp, thread_id=thread, tools=[Deleting().tool], **options)
        await agent.prompt("go")


def names(listed: list[Pending]) -> list[tuple[str | None, str]]:
    return [(call.thread_id, call.call_id) for call in listed]


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_of_the_inbox_have_every_question_once_the_oldest_first(database: Database, limit: int) -> None:
    async def use(cp: Checkpointer) -> None:
        await ask_in(cp, "c", "a", "b")
        listed: list[Pending] = []
        page = await cp.pending(limit=limit)
        while page:
            assert len(page) <= limit
            listed += page
            if len(listed) == 2:
                await cp.answer("c", "b", "deny")  # what was listed may be answered before the next page is
            page = await cp.pending(limit=limit, before=page[-1])
        assert names(listed) == [(thread, call) for thread in "cab" for call in "ab"]

    with_cp(database, use)


def test_the_inbox_goes_on_behind_a_question_whose_thread_is_gone(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await ask_in(cp, "x", "y")
        (first, last) = await cp.pending("x")
        await cp.delete_thread("x")
        assert names(await cp.pending(before=last)) == [("y", "a"), ("y", "b")]
        assert names(await cp.pending(before=first)) == [("y", "a"), ("y", "b")]
        assert await cp.pending("x") == []

    with_cp(database, use)


def test_the_inbox_of_a_user_and_of_a_namespace(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for user in ("ada", "bob"):
            await cp.create_user(user, user_id=user)
        await ask_in(cp, "hers", user_id="ada")
        await ask_in(cp, "his", user_id="bob")
        await ask_in(cp, "nobody's", ThreadKey("room", "deep"))
        assert names(await cp.pending(user="ada")) == [("hers", "a"), ("hers", "b")]
        assert {call.user_id for call in await cp.pending()} == {"ada", "bob", None}
        assert await cp.pending(user="eve") == []
        assert {call.thread_id for call in await cp.pending()} == {"hers", "his", "nobody's"}
        assert names(await cp.pending(namespace="room")) == [("deep", "a"), ("deep", "b")]
        everywhere = await cp.pending(namespace=None)
        assert [(call.namespace, call.thread_id) for call in everywhere][-1] == ("room", "deep")
        assert len(everywhere) == 8
        for call in everywhere:
            assert await cp.answer(ThreadKey(call.namespace, call.thread_id or ""), call.call_id, "deny")
        assert await cp.pending(namespace=None) == []

    with_cp(database, use)


@pytest.mark.parametrize(
    "options",
    [{"limit": -1}, {"limit": "all"}, {"before": "a"}, {"before": 3}, {"user": ""}, {"namespace": "\x7ftrash"}],
)
def test_an_inbox_that_cannot_be_listed_is_refused(database: Database, options: dict[str, Any]) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError):
            await cp.pending(**options)

    with_cp(database, use)


# --- forks, exports, and agents in memory -----------------------------------------------------------------------------


def test_a_fork_asks_as_many_people_again_and_has_no_time_limit(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await waiting(cp, Paying(approval=Ask("?", approvers=2, expires=1000)))
        await cp.answer("t", "c", "approve", by="ada")
        await cp.fork("t", new_id="fork")
        (question,) = await cp.pending("fork")
        assert (question.approvers, question.approvals, question.expires_at) == (2, [], None)
        assert await cp.answer("fork", "c", "approve", by="ada") is False

    with_cp(database, use)


@pytest.mark.parametrize("trusted", [True, False])
def test_an_export_keeps_answers_and_an_import_asks_again(database: Database, trusted: bool) -> None:
    async def use(cp: Checkpointer) -> None:
        paying = Paying(approval=Ask("?", expires=1000))
        agent = await waiting(cp, paying, "ok", thread_id="done")
        await cp.answer("done", "c", Approve({"amount": 1}), by="ada", source="web")
        await agent.resume()
        await waiting(cp, paying, thread_id="open")
        answered = await waiting(cp, paying, thread_id="answered")
        await answered.answer("c", Approve({"amount": 2}), by="bob")
        for name in ("done", "open", "answered"):
            lines = [line async for line in cp.export_thread(name)]
            before = await record(cp, name)
            await cp.delete_thread(name)
            await cp.import_from(lines, trusted=trusted)
            after = await record(cp, name)
            if name == "done" or trusted:
                assert after == before
            else:
                assert (after.status, after.answered_by, after.edited_arguments) == ("waiting", None, None)
                assert after.expires_at is None

    with_cp(database, use)


def test_an_agent_in_memory_takes_edits_and_several_approvers() -> None:
    async def main() -> None:
        paying, provider = Paying(approval=TWO), ScriptedProvider([[pay(5)], [pay(7, "d")], "ok"])
        agent = make(provider, tools=[paying.tool])
        await agent.prompt("go")
        with pytest.raises(InputError, match="needs 2 different people"):
            await agent.answer("c", "approve")
        assert await agent.answer("c", "approve", by="ada") is False
        with pytest.raises(AlreadyAnswered, match="'ada' has approved"):
            await agent.answer("c", "approve", by="ada")
        assert [given.by for given in agent.pending[0].approvals] == ["ada"]
        assert await agent.answer("c", "approve", by="bob")
        with pytest.raises(AlreadyAnswered, match="bob answered"):
            await agent.answer("c", "deny", by="eve")
        assert (await agent.resume()).stop_reason == "waiting"
        await agent.answer("d", "deny", by="bob")
        assert (await agent.resume()).text == "ok"
        assert paying.paid == [5]

        edited = Paying()
        agent = make([[pay(500)], "ok"], tools=[edited.tool])
        await agent.prompt("go")
        with pytest.raises(ArgumentsInvalid):
            await agent.answer("c", Approve({"amount": "x"}))
        await agent.answer("c", Approve({"amount": 3}))
        assert (await agent.resume()).text == "ok"
        assert edited.paid == [3]

        late = Paying(approval=Ask(expires=AT_ONCE))
        agent = make([[pay(5)], "ok"], tools=[late.tool])
        result = await agent.prompt("go")
        if result.stop_reason == "waiting":
            with pytest.raises(AlreadyAnswered, match="nobody answered"):
                await agent.answer("c", "approve")
            result = await agent.resume()
        assert (result.text, late.paid) == ("ok", [])

    asyncio.run(main())
