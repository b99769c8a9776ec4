"""Agent tasks that are given back: until a question of their thread is answered, or for a moment."""

from __future__ import annotations

import asyncio

from byssus import Ask
from byssus.checkpointer import Checkpointer
from byssus.queries.tasks import agents
from byssus.run.outside.supervision import Supervision, TakeOver
from byssus.values import clock
from byssus.values.thread_key import ThreadKey
from tests.support.agents import make
from tests.support.approvals import Deleting, delete
from tests.support.children import ask, research
from tests.support.databases import Database
from tests.support.leases import agent_on, until, with_two
from tests.support.steps import Facts, Held
from tests.support.tool_calls import Acting, act


async def waiting(cp: Checkpointer, thread_id: str = "t") -> Facts:
    """A task of the thread is given back until a question of the thread is answered."""
    task = Held(cp.store, thread_id)
    await cp.store.write(agents.wait_for_answer, ThreadKey("", thread_id), task.id, task.epoch)
    return task.facts()


async def facts(cp: Checkpointer) -> list[tuple[str, str | None, str | None]]:
    return [(task["status"], task["waits_for"], task["run_at"]) for task in await cp.list_tasks() or []]


def test_the_last_answer_that_is_needed_lets_the_task_go_on(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        tool = Deleting(approval=Ask(approvers=2)).tool
        await agent_on(cp, [[delete("a")]], tools=[tool]).prompt("go")
        found = await waiting(cp)
        assert (found.status, found.waits_for, found.lease_until, found.retry_count) == ("pending", "answer", None, 0)
        assert clock.now() < (found.run_at or "") < clock.after(clock.now(), 601)  # it looks again some time
        assert await other.answer("t", "a", "approve", by="ada") is False
        assert (await facts(cp))[0][1] == "answer"
        assert await other.answer("t", "a", "approve", by="bob") is True
        assert await facts(cp) == [("pending", None, None)]

    with_two(database, use)


def test_a_default_answer_lets_the_task_go_on_when_its_time_has_come(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(cp, [[delete("a")]], tools=[Deleting(approval=Ask(expires=60)).tool]).prompt("go")
        (question,) = await cp.pending("t")
        assert (await waiting(cp)).run_at == question.expires_at

    with_two(database, use)


def test_an_answer_that_came_first_leaves_nothing_to_wait_for(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(cp, [[delete("a")]], tools=[Deleting().tool]).prompt("go")
        await other.answer("t", "a", "deny")
        assert (await waiting(cp))[:3] == ("pending", None, None)

    with_two(database, use)


def test_an_answer_to_a_child_lets_the_task_of_its_parent_go_on(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        child = research([[delete("a")]], tools=[Deleting().tool])
        assert (await agent_on(cp, [[ask()]], tools=[child]).prompt("go")).stop_reason == "waiting"
        assert (await waiting(cp)).waits_for == "answer"
        (question,) = await cp.pending()
        assert question.thread_id != "t"
        await other.answer(question.thread_id, "a", "deny")
        assert await facts(cp) == [("pending", None, None)]

    with_two(database, use)


def test_an_answer_reaches_a_paused_task_and_leaves_other_waits_alone(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(cp, [[delete("a")]], tools=[Deleting().tool]).prompt("go")
        await cp.create_session(None, session_id="other")
        for thread_id, waits_for in (("t", "answer"), ("t", "event"), ("other", "answer")):
            Held(cp.store, thread_id).set(status="paused", waits_for=waits_for)
        await other.answer("t", "a", "deny")
        assert await facts(cp) == [("paused", None, None), ("paused", "event", None), ("paused", "answer", None)]

    with_two(database, use)


def test_supervision_leaves_the_run_of_a_paused_task_to_its_task(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cp.create_session(None, session_id="t")
        task = Held(cp.store, "t")
        task.set(status="paused")
        acting = Acting(hangs=1, recovery="retry")
        agent = agent_on(cp, [[act(1)]], tools=[acting.tool])
        run = asyncio.create_task(agent.prompt("go", key=f"task:{task.id}"))
        await acting.begun.wait()
        agent.hand_over(0)
        assert (await run).stop_reason == "handed_over"
        taken: list[TakeOver] = []

        def supervised() -> Supervision:
            return other.supervise(lambda *_: make(["ok"], tools=[acting.tool]), report=taken.append, every=0.02)

        await supervised().drained()
        assert taken == []
        await cp.resume_task(task.id)
        async with supervised():
            await until(lambda: taken)
        assert [each.result.text for each in taken if each.result is not None] == ["ok"]

    with_two(database, use)
