"""Runs as rows: written with the commits that a run makes anyway, and right whatever becomes of the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus import ToolCall, UserMessage
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, keep_last
from byssus.errors import InputError, NetworkFailed, NotFound
from byssus.events import AgentStart
from byssus.middleware import Middleware
from byssus.values.results import RunInfo
from tests.support.agents import Heard
from tests.support.approvals import Deleting, delete
from tests.support.checkpointers import with_cp, with_users
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, Slow, agent_on, die, look, with_two
from tests.support.tool_calls import Acting, act, interrupt


async def only_run(cp: Checkpointer, thread_id: str = "t") -> RunInfo:
    (run,) = await cp.runs(thread_id)
    return run


async def outcomes(cp: Checkpointer, run: RunInfo) -> list[tuple[int, str | None]]:
    return [(attempt.number, attempt.outcome) for attempt in await cp.run_attempts(run.id)]


def test_a_prompt_leaves_one_row_that_says_all_about_its_run(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ann")
        await cp.append("t", UserMessage("before"))
        agent = agent_on(cp, [[ToolCall("c1", "look")], "done"], tools=[look], user_id="ann")
        heard = Heard(agent)
        result = await agent.prompt("go")
        run = await only_run(cp)
        assert (run.id, run.thread_id, run.state) == (result.run_id, "t", "ended")
        assert {event.run_id for event in heard.of(AgentStart)} == {run.id}
        assert {record.run_id for record in await cp.tool_calls("t")} == {run.id}
        assert (run.first_seq, run.last_seq, run.stop_reason, run.error) == (2, 5, "stop", None)
        assert (run.cause, run.started_by, run.request_key, run.attempts, run.retries) == ("prompt", "ann", None, 1, 0)
        assert run.began_at < str(run.ended_at)
        (attempt,) = await cp.run_attempts(run.id)
        assert (attempt.number, attempt.outcome, attempt.ended_at) == (1, "ended", run.ended_at)
        assert ":" in attempt.owner
        assert " " not in attempt.owner
        assert await cp.run(run.id) == run

    with_cp(database, use)


def test_runs_are_listed_newest_first_and_page_by_page(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        ids = [(await agent_on(cp, ["ok"], f"t{n % 2}").prompt("go")).run_id for n in range(5)]
        assert [run.id for run in await cp.runs()] == ids[::-1]
        assert [run.id for run in await cp.runs("t0")] == [ids[4], ids[2], ids[0]]
        first = await cp.runs("t0", 1)
        assert [run.id for run in await cp.runs("t0", 10, first[-1])] == [ids[2], ids[0]]
        assert [run.id for run in await cp.runs(before=ids[1])] == [ids[0]]
        assert await cp.runs("unknown") == []
        assert await cp.run("unknown") is None
        assert await cp.run_attempts("unknown") == []

    with_cp(database, use)


@pytest.mark.parametrize(("arguments", "error"), [({"limit": -1}, InputError), ({"before": 5}, InputError)])
def test_a_list_of_runs_refuses_what_it_cannot_use(
    database: Database, arguments: dict[str, Any], error: type[Exception]
) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(error):
            await cp.runs(**arguments)
        with pytest.raises(NotFound, match="no run 'gone'"):
            await cp.runs(before="gone")
        with pytest.raises(InputError, match="a run id must be a string"):
            await cp.run(5)  # type: ignore[arg-type]

    with_cp(database, use)


def test_a_run_that_crashed_and_is_resumed_keeps_its_id_and_gets_another_attempt(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW], tools=[slow.tool])
        running = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        run = await only_run(other)
        assert (run.state, run.ended_at, run.attempts) == ("running", None, 1)
        assert await outcomes(other, run) == [(1, None)]
        await die(cp, agent, running)
        assert (await only_run(other)).state == "interrupted"
        result = await agent_on(other, ["ok"], tools=[slow.tool]).resume()
        again = await only_run(other)
        assert (again.id, result.run_id) == (run.id, run.id)
        assert (again.state, again.stop_reason, again.attempts, again.cause) == ("ended", "stop", 2, "prompt")
        assert (again.first_seq, again.last_seq) == (1, 4)
        assert await outcomes(other, run) == [(1, "lost"), (2, "ended")]
        epochs = [attempt.epoch for attempt in await other.run_attempts(run.id)]
        assert epochs == sorted(set(epochs))

    with_two(database, use)


def test_a_prompt_closes_the_run_that_was_interrupted_before_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await interrupt(cp, Acting(hangs=1), act(1))
        result = await agent_on(cp, ["ok"], tools=[Acting().tool]).prompt("something else")
        new, old = await cp.runs("t")
        assert (new.id, new.stop_reason, new.attempts) == (result.run_id, "stop", 1)
        assert (old.state, old.stop_reason) == ("ended", "interrupted")
        assert await outcomes(cp, old) == [(1, "lost")]

    with_cp(database, use)


def test_a_run_that_waits_for_a_person_has_not_ended_and_goes_on_under_its_id(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        waits = await agent_on(cp, [[delete("/a")]], tools=[deleting.tool]).prompt("go")
        run = await only_run(cp)
        assert (run.id, run.state, run.stop_reason, run.ended_at) == (waits.run_id, "waiting", "waiting", None)
        await cp.answer("t", "/a", "approve")
        run = await only_run(cp)
        assert (run.state, await cp.state("t"), run.ended_at) == ("interrupted", "interrupted", None)
        assert await cp.run(run.id) == run
        result = await agent_on(cp, ["gone"], tools=[deleting.tool]).resume()
        run = await only_run(cp)
        assert (result.run_id, run.state, run.stop_reason) == (waits.run_id, "ended", "stop")
        assert await outcomes(cp, run) == [(1, "waiting"), (2, "ended")]

    with_cp(database, use)


def test_the_same_agent_that_waited_closes_the_old_run_with_its_next_prompt(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("/a")], "ok"], tools=[deleting.tool])
        await agent.prompt("go")
        await agent.answer("/a", "deny")
        await agent.prompt("then do something else")
        new, old = await cp.runs("t")
        assert (new.stop_reason, old.stop_reason) == ("stop", "interrupted")

    with_cp(database, use)


def test_a_failure_is_in_the_row_with_its_kind_and_the_repeated_calls_are_counted(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        fails = NetworkFailed("cut off", retry_after=0)
        result = await agent_on(cp, [fails, fails], max_retries=1).prompt("go")
        run = await only_run(cp)
        assert (run.stop_reason, run.error, run.retries) == ("error", f"NetworkFailed: {result.error}", 1)

    with_cp(database, use)


def test_a_run_that_a_hook_ends_is_closed_as_an_error(database: Database) -> None:
    class Failing(Middleware):
        async def transform_system_prompt(self, *_: Any, **__: Any) -> Any:
            raise ValueError("no")

    async def use(cp: Checkpointer) -> None:
        with pytest.raises(Exception, match="no"):
            await agent_on(cp, ["ok"], middleware=[Failing()]).prompt("go")
        run = await only_run(cp)
        assert (run.state, run.stop_reason) == ("ended", "error")
        assert "no" in str(run.error)

    with_cp(database, use)


def test_an_abort_ends_the_run_as_aborted(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW, "never"], tools=[slow.tool], abort_grace=0)
        running = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        agent.abort()
        assert (await running).stop_reason == "aborted"
        run = await only_run(cp)
        assert (run.state, run.stop_reason) == ("ended", "aborted")

    with_cp(database, use)


def test_a_follow_up_belongs_to_the_run_that_it_keeps_going(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["one", "two"])
        await agent.follow_up("and then?")
        await agent.prompt("go")
        run = await only_run(cp)
        assert (run.first_seq, run.last_seq, run.stop_reason) == (1, 4, "stop")

    with_cp(database, use)


def test_a_rewind_closes_the_run_that_was_interrupted(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("first"))
        await interrupt(cp, Acting(hangs=1), act(1))
        await cp.rewind("t", 1)
        run = await only_run(cp)
        assert (run.state, run.stop_reason) == ("ended", "interrupted")

    with_cp(database, use)


def test_a_fork_has_no_runs_of_its_origin_and_deleting_a_thread_removes_its_own(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        run_id = (await agent_on(cp, ["ok"]).prompt("go")).run_id
        await cp.fork("t", new_id="f")
        assert await cp.runs("f") == []
        await cp.delete_thread("t")
        assert await cp.runs("t") == []
        assert await cp.run(run_id) is None
        assert await cp.run_attempts(run_id) == []
        assert (await cp.check())["ok"]

    with_cp(database, use)


def test_a_prune_of_what_a_rewind_left_forgets_the_branch_of_its_runs(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for step, words in enumerate(["hi", "hello"], 1):  # the second one diverges, onto a branch that is no line
            metadata = CheckpointMetadata("t", f"c{step}", step=step)
            await cp.put(Checkpoint(metadata, [{"role": "user", "content": words}]))
        await agent_on(cp, ["ok"]).prompt("go")
        await cp.rewind("t", "c1")
        await cp.append("t", UserMessage("more"))
        await cp.put(Checkpoint(CheckpointMetadata("t", "c3", step=3), [{"role": "user", "content": "hi"}]))
        left = await only_run(cp)
        assert left.branch is not None
        await cp.prune("t", keep_last(1))
        run = await only_run(cp)
        assert run.branch is None
        assert is_the_same(left, run)
        assert (await cp.check())["ok"]

    with_cp(database, use)


def is_the_same(one: RunInfo, other: RunInfo) -> bool:
    """Whether two runs differ in nothing but the branch."""
    names = [name for name in RunInfo.__struct_fields__ if name != "branch"]
    return all(getattr(one, name) == getattr(other, name) for name in names)
