"""Interrupted runs are taken over, each once and the newest first; one that ends its process is left alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus import Agent, Ask
from byssus.checkpointer import Checkpointer, TakeOver
from byssus.errors import ByssusError, InputError, ThreadQuarantined
from byssus.providers.scripted import ScriptedProvider
from byssus.run.outside.supervision import MAX_DEATHS, Supervision
from tests.support.agents import make
from tests.support.approvals import Deleting, delete
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, Slow, agent_on, die, until, with_two
from tests.support.tool_calls import Acting, act, interrupt

OFTEN = 0.02  # seconds between two looks


class Taking:
    """A factory of agents that answer, and what was taken over."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.made: list[tuple[str, str | None]] = []
        self.taken: list[TakeOver] = []

    def __call__(self, thread_id: str, user_id: str | None) -> Agent:
        self.made.append((thread_id, user_id))
        return make(["ok"], **self.options)

    def on(self, cp: Checkpointer, **options: Any) -> Supervision:
        return cp.supervise(self, report=self.taken.append, every=OFTEN, **options)

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(each.thread_id, "" if each.result is None else each.result.text) for each in self.taken]


async def leave(cp: Checkpointer, *threads: str, **options: Any) -> None:
    """Interrupt a run in each thread: it is handed over before its model is asked."""
    for thread in threads:
        agent = agent_on(cp, (), thread, **options)
        run = asyncio.create_task(agent.prompt("go"))
        await asyncio.sleep(0)
        agent.hand_over()
        assert (await run).stop_reason == "handed_over"


async def kill(cp: Checkpointer, acting: Acting, times: int) -> None:
    """Let the run of a thread end its process so many times, as far as its ledger and its lease can tell."""
    await interrupt(cp, acting)
    for _ in range(times - 1):
        acting.begun.clear()
        agent = agent_on(cp, tools=[acting.tool])
        run = asyncio.create_task(agent.resume())
        await acting.begun.wait()
        await die(cp, agent, run)


def test_interrupted_runs_are_resumed_the_newest_first(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await leave(cp, "a", "b", "c")
        taking = Taking()
        async with taking.on(other, concurrency=1):
            await until(lambda: len(taking.taken) == 3)
        assert taking.told == [("c", "ok"), ("b", "ok"), ("a", "ok")]
        assert await cp.unfinished() == []

    with_two(database, use)


def test_what_is_interrupted_later_is_resumed_too(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await other.create_user("ada", user_id="ada")
        taking = Taking()
        async with taking.on(other) as supervision:
            await leave(cp, "a", user_id="ada")
            await until(lambda: taking.told == [("a", "ok")])
            assert taking.made == [("a", "ada")]
            assert supervision.running == []

    with_two(database, use)


def test_an_answer_is_carried_out_without_a_call_of_resume(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        deleting = Deleting(approval=Ask(expires=1000))
        await agent_on(cp, [[delete("a")]], "t", tools=[deleting.tool]).prompt("go")
        await agent_on(cp, [[delete("b")]], "late", tools=[deleting.tool]).prompt("go")
        taking = Taking(tools=[deleting.tool])
        async with taking.on(other):
            await cp.answer("t", "a", "approve")
            await until(lambda: taking.told == [("t", "ok")])
            await cp.store.write(
                lambda tx: tx.run("UPDATE tool_calls SET expires_at = asked_at WHERE status = 'waiting'")
            )
            await until(lambda: len(taking.taken) == 2)
        assert deleting.deleted == ["a"]

    with_two(database, use)


def test_two_that_supervise_take_each_thread_once(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        names = [f"t{number}" for number in range(12)]
        await leave(cp, *names)
        one, two = Taking(), Taking()
        async with one.on(cp, concurrency=3), two.on(other, concurrency=3):
            await until(lambda: len(one.taken) + len(two.taken) == len(names))
        assert sorted(one.told + two.told) == sorted((name, "ok") for name in names)
        for name in names:
            assert [message.role for message in (await cp.load(name)).messages] == ["user", "assistant"]  # type: ignore[union-attr]

    with_two(database, use)


def test_at_most_so_many_run_at_once(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await leave(cp, "a", "b", "c")
        acting = Acting(hangs=9)

        def factory(thread_id: str, user_id: str | None) -> Agent:
            return make([[act(1)]], tools=[acting.tool])

        async with other.supervise(factory, concurrency=2, every=OFTEN, grace=0) as supervision:
            await until(lambda: len(acting.runs) == 2)
            assert len(supervision.running) == 2
            for _ in range(5):
                assert await supervision._look() == 0
        assert len(acting.runs) == 2
        assert len(await cp.unfinished()) == 3  # at the end they were handed over

    with_two(database, use)


@pytest.mark.parametrize("failure", ["raises", "no agent", "another thread", "what it waits for is cancelled"])
def test_a_factory_that_fails_for_one_thread_is_reported_and_the_others_go_on(database: Database, failure: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await leave(cp, "bad", "good")
        taken: list[TakeOver] = []

        async def factory(thread_id: str, user_id: str | None) -> Agent:
            if thread_id == "bad" and failure == "raises":
                raise KeyError(thread_id)
            if thread_id == "bad" and failure == "no agent":
                return "agent"  # type: ignore[return-value]
            if thread_id == "bad" and "cancelled" in failure:
                raise asyncio.CancelledError
            return agent_on(other, ["ok"], "good")

        async with other.supervise(factory, report=taken.append, every=OFTEN):
            await until(lambda: {each.thread_id for each in taken} == {"bad", "good"})
        failed = [each for each in taken if each.error is not None]
        assert {each.thread_id for each in failed} == {"bad"}
        kinds = {"raises": KeyError, "what it waits for is cancelled": ByssusError}
        assert isinstance(failed[0].error, kinds.get(failure, InputError))
        assert [each.thread_id for each in taken if each.result is not None] == ["good"]
        assert [info.id for info in await cp.unfinished()] == ["bad"]

    with_two(database, use)


def test_a_report_that_fails_ends_nothing(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await leave(cp, "a", "b")
        taking, reported = Taking(), []

        def report(taken: TakeOver) -> None:
            reported.append(taken.thread_id)
            raise OSError("no")

        async with other.supervise(taking, report=report, every=OFTEN):
            await until(lambda: len(reported) == 2)
        assert "the report of a take-over failed" in caplog.text

    with_two(database, use)


def test_supervision_that_is_cancelled_hands_its_runs_over(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await leave(cp, "t")
        acting = Acting(hangs=1, recovery="retry")
        options: Any = {"tools": [acting.tool]}

        async def supervise() -> None:
            await other.supervise(lambda *_: make([[act(1)]], **options), every=OFTEN, grace=0)

        task = asyncio.create_task(supervise())
        await acting.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [info.id for info in await cp.unfinished()] == ["t"]
        taking = Taking(**options)
        async with taking.on(cp):
            await until(lambda: taking.told == [("t", "ok")])
        assert len(acting.runs) == 2

    with_two(database, use)


def test_supervision_that_ends_does_not_wait_for_a_factory_that_hangs(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await leave(cp, "stuck", "good")
        asked, taken, never = list[str](), list[TakeOver](), asyncio.Event()

        async def factory(thread_id: str, user_id: str | None) -> Agent:
            asked.append(thread_id)
            if thread_id == "stuck":
                await never.wait()
            return make(["ok"])

        async with asyncio.timeout(30), other.supervise(factory, report=taken.append, every=OFTEN):
            await until(lambda: "stuck" in asked and taken)
        assert [each.thread_id for each in taken] == ["good"]
        assert [info.id for info in await cp.unfinished()] == ["stuck"]

    with_two(database, use)


def test_what_is_interrupted_now_can_be_drained(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await leave(cp, "a", "b", "c")
        taking = Taking()
        await taking.on(other, concurrency=2).drained()
        assert sorted(taking.told) == [("a", "ok"), ("b", "ok"), ("c", "ok")]
        await taking.on(other).drained()
        assert len(taking.taken) == 3

    with_two(database, use)


# --- runs that end their process --------------------------------------------------------------------------------------


def test_a_run_that_ended_its_process_three_times_is_quarantined_until_it_is_lifted(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=MAX_DEATHS, recovery="retry", max_attempts=None)
        await kill(cp, acting, MAX_DEATHS)
        taking = Taking(tools=[acting.tool])
        async with taking.on(other):
            await until(lambda: taking.taken)
        assert [(each.thread_id, each.is_quarantined) for each in taking.taken] == [("t", True)]
        assert taking.made == []
        (found,) = await cp.quarantined()
        assert (found.thread_id, found.deaths) == ("t", MAX_DEATHS)
        assert await cp.state("t") == "quarantined"
        assert [info.id for info in await cp.threads(state="quarantined")] == ["t"]
        assert await cp.unfinished() == []
        agent = agent_on(other, ["ok"], tools=[acting.tool])
        for run in (agent.resume(), agent.prompt("are you there?")):
            with pytest.raises(ThreadQuarantined, match=r"thread 't' is quarantined since .*--lift"):
                await run
        assert await cp.lift_quarantine("t")
        assert not await cp.lift_quarantine("t")
        assert (await cp.quarantined(), await cp.state("t")) == ([], "interrupted")
        async with taking.on(other):
            await until(lambda: taking.told[-1] == ("t", "ok"))
        assert len(acting.runs) == MAX_DEATHS + 1

    with_two(database, use)


def test_two_deaths_are_not_enough_and_a_hand_over_is_none(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=5, recovery="retry", max_attempts=None)
        await kill(cp, acting, 2)
        for _ in range(3):
            acting.begun.clear()
            agent = agent_on(cp, tools=[acting.tool])
            run = asyncio.create_task(agent.resume())
            await acting.begun.wait()
            agent.hand_over(0)
            assert (await run).stop_reason == "handed_over"
        taking = Taking(tools=[acting.tool])
        async with taking.on(other):
            await until(lambda: taking.told == [("t", "ok")])

    with_two(database, use)


def test_deaths_are_counted_by_run_and_may_be_unlimited(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=MAX_DEATHS, recovery="retry", max_attempts=None)
        await kill(cp, acting, MAX_DEATHS)
        taking = Taking(tools=[acting.tool])
        async with taking.on(other, max_deaths=None):
            await until(lambda: taking.told == [("t", "ok")])
        await leave(cp, "t", tools=[acting.tool])
        async with taking.on(other, max_deaths=1):  # another run, which ended no process
            await until(lambda: len(taking.taken) == 2)
        assert await cp.quarantined() == []

    with_two(database, use)


def test_on_their_last_attempt_runs_are_taken_one_at_a_time(database: Database) -> None:
    """The process that one run kills takes the others along: they must not be quarantined with it."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await leave(cp, "a", "b")
        await cp.store.write(lambda tx: tx.run("UPDATE run_attempts SET outcome = 'lost'"))
        await leave(cp, "c")
        slow, taken = Slow(), list[TakeOver]()

        def factory(thread_id: str, user_id: str | None) -> Agent:
            return make([CALL_SLOW, "ok"], tools=[slow.tool])

        async with other.supervise(factory, every=OFTEN, max_deaths=2, grace=0, report=taken.append) as supervision:
            await until(lambda: slow.runs == 2)
            assert await supervision._look() == 0
            assert len(supervision._tasks) == 2
            assert "c" in supervision.running
            slow.let_go.set()
            await until(lambda: len(taken) == 3)
        assert [each.result and each.result.text for each in taken] == ["ok"] * 3

    with_two(database, use)


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"concurrency": "many"}, {"every": 0}, {"every": None}, {"max_deaths": 0}, {"grace": -1}],
)
def test_options_that_make_no_sense_are_refused(database: Database, options: dict[str, Any]) -> None:
    cp = database.checkpointer()
    with pytest.raises(InputError, match=next(iter(options))):
        cp.supervise(lambda *_: make(ScriptedProvider([])), **options)
    with pytest.raises(InputError, match="factory must be a function"):
        cp.supervise("agents")  # type: ignore[arg-type]
