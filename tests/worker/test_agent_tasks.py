"""Agent tasks: the app's agent works on the thread of the task, and no tool runs twice, whatever comes in between."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from byssus import Agent
from byssus.checkpointer import Checkpointer
from byssus.errors import InvalidRequest, Overloaded
from byssus.storage import TaskRow
from tests.support.agents import history, make, sent
from tests.support.approvals import Deleting, delete
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, Slow, agent_on, unfinished, until, with_two
from tests.support.steps import pass_time
from tests.support.tool_calls import Acting, act
from tests.support.workers import became, quick, task_of


class App:
    """A factory of agents; the n-th that it makes has the n-th script."""

    def __init__(self, *scripts: Any, **options: Any) -> None:
        self.scripts = list(scripts)
        self.options = options
        self.made: list[Agent] = []

    def __call__(self, thread_id: str, user_id: str | None) -> Agent:
        self.made.append(make(self.scripts.pop(0), max_retries=0, **self.options))
        return self.made[-1]


async def created(cp: Checkpointer, task_type: str = "agent", payload: Any = None, **options: Any) -> str:
    if await cp.get_session("t") is None:
        await cp.create_session(None, session_id="t")
    task: TaskRow = await cp.create_task("t", task_type, {"prompt": "go"} if payload is None else payload, **options)
    return task["id"]


def test_the_agent_answers_on_the_thread_and_the_task_has_the_result(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await other.create_user("ada", user_id="ada")
        await other.create_session("ada", session_id="t")
        seen = []

        def support(thread_id: str, user_id: str | None) -> Agent:
            seen.append((thread_id, user_id))
            return make(["done"])

        task = await created(other)
        async with quick(cp, app={"support": support}):
            ended = await became(other, task)
        assert ended["status"] == "completed"
        (run,) = await other.runs("t")
        assert ended["result"].pop("usage").keys() >= {"input", "output", "cost"}
        assert ended["result"] == {"text": "done", "run_id": run.id, "stop_reason": "stop"}
        assert (run.request_key, seen) == (f"task:{task}", [("t", "ada")])
        assert await history(other, "t") == ["user: go", "assistant: done"]

    with_two(database, use)


@pytest.mark.parametrize(
    ("session", "payload", "problem"),
    [
        (None, {"prompt": "go"}, "needs a session"),
        ("t", {}, "must be {'prompt': ...}"),
        ("t", "go", "the payload may have the keys 'prompt', 'agent'; got 'go'"),
        ("t", {"prompt": "go", "agent": "sales"}, "has no agent 'sales'"),
        ("t", {"prompt": []}, "got an empty list"),
    ],
)
def test_a_task_that_cannot_be_run_says_why(database: Database, session: Any, payload: Any, problem: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await other.create_session(None, session_id="t")
        retries = 0 if "agent" in payload else 3  # another worker may know that agent
        task = (await other.create_task(session, "agent", payload, max_retries=retries))["id"]
        async with quick(cp, app={"support": App()}):
            ended = await became(other, task)
        assert (ended["status"], ended["retry_count"]) == ("failed", 0)
        assert problem in (ended["error"] or {"message": ""})["message"]
        assert await history(other, "t") == []

    with_two(database, use)


async def begun(acting: Acting) -> None:
    """The tool runs, on the event loop of the handlers."""
    await until(acting.begun.is_set)


def test_a_cancellation_aborts_the_run(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)
        task = await created(other)
        async with quick(cp, app=App([[act(1)]], tools=[acting.tool]), grace=10):
            await begun(acting)
            await other.cancel_task(task)
            assert (await became(other, task))["status"] == "cancelled"
        (run,) = await other.runs("t")
        assert (run.state, run.stop_reason) == ("ended", "aborted")

    with_two(database, use)


def test_a_task_that_was_cancelled_resumes_its_run_when_it_is_tried_again(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)
        task = await created(other)
        async with quick(cp, app=App([[act(1)]], ["on we go"], tools=[acting.tool]), grace=10):
            await begun(acting)
            await other.cancel_task(task)
            await became(other, task)
            await other.retry_task(task)
            assert (await became(other, task, "completed"))["result"]["text"] == "on we go"
        assert (await history(other, "t"))[0::3] == ["user: go", "assistant: on we go"]
        assert len(acting.runs) == 1

    with_two(database, use)


def test_a_pause_hands_the_run_over_and_the_task_goes_on_with_it(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        task = await created(other)
        app = App([[act(1)]], ["done"], tools=[acting.tool])
        async with quick(cp, app=app):
            await begun(acting)
            await other.pause_task(task)
            await became(other, task, "paused")
            assert await unfinished(other) == ["t"]
            await other.resume_task(task)
            ended = await became(other, task)
        assert (ended["status"], ended["result"]["text"], ended["retry_count"]) == ("completed", "done", 0)
        assert await history(other, "t") == ["user: go", "assistant: ", "tool_result: did 1", "assistant: done"]
        assert (len(acting.runs), len(await other.runs("t"))) == (2, 1)

    with_two(database, use)


def test_a_worker_that_ends_hands_the_run_over_after_the_tool_that_runs(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        task = await created(other)
        worker = quick(cp, app=App([CALL_SLOW], tools=[slow.tool]), grace=30)
        async with worker:
            await until(slow.begun.is_set)
            stopping = asyncio.create_task(worker.stop())
            await until(lambda: worker._running == {} or next(iter(worker._running.values())).draining.aborted)
            worker.handler_loop.call(slow.let_go.set)
            await stopping
        handed_back = await task_of(other, task)
        assert (handed_back["status"], handed_back["retry_count"]) == ("pending", 0)
        async with quick(other, app=App(["done"], tools=[slow.tool])):
            assert (await became(other, task))["result"]["text"] == "done"
        assert slow.runs == 1

    with_two(database, use)


def test_a_run_that_waits_for_a_person_holds_no_slot_and_goes_on_with_the_answer(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting()
        app = App([[delete("a")]], [[delete("b")]], ["done"], tools=[deleting.tool])
        task = await created(other)
        async with quick(cp, {"short": lambda ctx, payload: "short"}, app=app, concurrency=1):
            for call in ("a", "b"):
                await until(partial(_asks, other, call))
                await until(lambda: _waits_for(other, task))
                short = await created(other, "short")
                assert (await became(other, short))["status"] == "completed"
                await other.answer("t", call, "approve")
            ended = await became(other, task)
        assert (ended["result"]["text"], ended["retry_count"]) == ("done", 0)
        assert deleting.deleted == ["a", "b"]
        assert [run.state for run in await other.runs("t")] == ["ended"]

    with_two(database, use)


async def _asks(cp: Checkpointer, call: str) -> bool:
    return [pending.call_id for pending in await cp.pending("t")] == [call]


async def _waits_for(cp: Checkpointer, task_id: str) -> bool:
    return (await task_of(cp, task_id))["waits_for"] == "answer"


def test_a_run_that_failed_is_resumed_by_the_retry_of_its_task(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting()
        app = App([[act(1)], Overloaded("too busy")], [Overloaded("still")], ["done"], tools=[acting.tool])
        task = await created(other)
        async with quick(cp, app=app):
            for retries in (1, 2):
                await until(partial(_retried, other, task, retries))
                await pass_time(other)
            assert (await became(other, task))["result"]["text"] == "done"
        assert len(acting.runs) == 1
        assert [line for line in await history(other, "t") if line.startswith("user")] == ["user: go"]

    with_two(database, use)


async def _retried(cp: Checkpointer, task_id: str, times: int) -> bool:
    return (await task_of(cp, task_id))["retry_count"] == times


def test_a_failure_that_lasts_is_not_tried_again(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        task = await created(other)
        async with quick(cp, app=App([InvalidRequest("no such model")])):
            ended = await became(other, task)
        assert (ended["status"], ended["retry_count"]) == ("failed", 0)
        assert "InvalidRequest: no such model" in (ended["error"] or {"message": ""})["message"]

    with_two(database, use)


def test_a_retry_does_not_touch_a_thread_that_has_gone_on_with_another_prompt(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        task = await created(other)
        async with quick(cp, app=App([InvalidRequest("no")], [])):
            await became(other, task)
            await agent_on(other, ["of course"]).prompt("something else")
            await other.retry_task(task)
            ended = await became(other, task)
        assert "has gone on with another prompt since" in (ended["error"] or {"message": ""})["message"]

    with_two(database, use)


def test_a_result_that_was_resumed_and_not_stored_is_read_from_the_thread(database: Database) -> None:
    """The worker died between the end of the run and the end of the task."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        task = await created(other)
        agent = agent_on(other, [InvalidRequest("no"), "done"])
        await agent.prompt("go", key=f"task:{task}")
        await agent.resume()
        async with quick(cp, app=App([])):
            ended = await became(other, task)
        assert (ended["status"], ended["result"]["text"]) == ("completed", "done")

    with_two(database, use)


def test_a_task_whose_thread_is_busy_is_given_back_for_a_moment(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        task = await created(other)
        slow = Slow()
        busy = asyncio.create_task(agent_on(other, [CALL_SLOW, "mine"], tools=[slow.tool]).prompt("first"))
        await slow.begun.wait()
        async with quick(cp, app=App([], ["done"])):
            await until(lambda: _is_given_back(other, task))
            slow.let_go.set()
            await busy
            await pass_time(other)
            ended = await became(other, task)
        assert (ended["result"]["text"], ended["retry_count"]) == ("done", 0)
        assert (await history(other, "t"))[-2:] == ["user: go", "assistant: done"]

    with_two(database, use)


async def _is_given_back(cp: Checkpointer, task_id: str) -> bool:
    task = await task_of(cp, task_id)
    return task["status"] == "pending" and task["run_at"] is not None


# --- summarize and title ----------------------------------------------------------------------------------------------


def _heard(app: App) -> str:
    """What the model of a ready-made task was sent."""
    return "\n".join(sent(app.made[-1]._setup.routes[0].provider))


def test_summaries_and_titles_are_written_beside_the_thread(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await agent_on(other, ["It rains."]).prompt("How is the weather in Oslo?")
        before = await history(other, "t")
        app = App(["The weather was asked for."], ['"Weather in Oslo"\n'], tools=[Acting().tool])
        async with quick(cp, app=app):
            summary = await became(other, await created(other, "summarize", {"instruction": "In a sentence."}))
            assert summary["result"] == {"text": "The weather was asked for."}
            assert "How is the weather in Oslo?" in _heard(app)
            titled = await became(other, await created(other, "title", {}))
            assert titled["result"] == {"text": "Weather in Oslo"}
        (info,) = await other.threads()
        assert (info.title, await history(other, "t")) == ("Weather in Oslo", before)

    with_two(database, use)


def test_a_summary_of_an_empty_session_fails_and_own_handlers_go_first(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        async with quick(cp, {"title": lambda ctx, payload: "mine"}, app=App([])):
            failed = await became(other, await created(other, "summarize"))
            assert "may have the keys 'instruction', 'agent'" in (failed["error"] or {"message": ""})["message"]
            failed = await became(other, await created(other, "summarize", {}))
            assert "has no messages yet" in (failed["error"] or {"message": ""})["message"]
            assert (await became(other, await created(other, "title")))["result"] == "mine"

    with_two(database, use)
