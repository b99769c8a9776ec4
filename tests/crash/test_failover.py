"""The primary dies, and its synchronous standby takes over: a DSN that names both follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import pytest

from byssus import UserMessage
from byssus.checkpointer import PostgresCheckpointer
from byssus.errors import LeaseLost, ThreadBusy
from tests.crash.cutter import name_standby, schema_on, waiting
from tests.crash.postgres_chaos import Plan, failover
from tests.support import postgres
from tests.support.checkpointers import loaded, texts
from tests.support.leases import CALL_SLOW, Slow, agent_on, brief, claim, dead_owner, take_over, unfinished

SEED = 11
SAFE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}


class Pair(NamedTuple):
    primary: postgres.Server
    standby: postgres.Server
    place: postgres.Schema

    def checkpointer(self, **options: Any) -> PostgresCheckpointer:
        return PostgresCheckpointer(self.place.dsn, schema=self.place.name, **options)

    def fail_over(self) -> None:
        self.primary.kill()
        self.standby.promote()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with postgres.running(**SAFE) as primary, primary.standby() as standby:
        yield Pair(primary, standby, schema_on(primary, standby.port, primary.port))


def play(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(limited())


@pytest.mark.parametrize(("threads", "after"), [(20, 10), (60, 400)])
def test_a_failover_under_many_runs_loses_nothing_and_all_of_them_end(threads: int, after: int) -> None:
    plan = Plan(threads=threads, their_threads=8)
    _, wrong = failover(plan, SEED, after, **SAFE)
    assert wrong == [], f"seed {SEED}"


def test_a_run_keeps_its_thread_to_itself_through_a_failover(pair: Pair) -> None:
    async def main() -> None:
        slow = Slow()
        async with pair.checkpointer() as cp:
            agent = agent_on(cp, [CALL_SLOW, "done"], tools=[slow.tool])
            run = asyncio.create_task(agent.prompt("go"))
            await slow.begun.wait()
            await asyncio.to_thread(pair.fail_over)
            for attempt in (agent_on(cp, []).prompt("me too"), cp.append("t", UserMessage("me too"))):
                with pytest.raises(ThreadBusy):
                    await attempt
            assert await cp.unfinished() == []
            slow.let_go.set()
            assert (await run).text == "done"
            assert slow.runs == 1
            after = ["user: go", "assistant: ", "tool_result: slow is done", "assistant: done"]
            assert brief((await loaded(cp, "t")).messages) == after

    play(main)


def test_a_run_whose_thread_was_taken_over_after_the_failover_cannot_write(pair: Pair) -> None:
    async def main() -> None:
        slow = Slow()
        async with pair.checkpointer() as cp:
            run = asyncio.create_task(agent_on(cp, [CALL_SLOW, "done"], tools=[slow.tool]).prompt("go"))
            await slow.begun.wait()
            await asyncio.to_thread(pair.fail_over)
            await take_over(cp, "mine now")
            slow.let_go.set()
            with pytest.raises(LeaseLost):
                await run
            assert await texts(cp, "t") == ["go", "", "mine now"]

    play(main)


def test_a_run_whose_process_died_with_the_primary_is_resumable_on_the_standby(pair: Pair) -> None:
    async def main() -> None:
        async with pair.checkpointer() as cp:
            await claim(cp, dead_owner(cp), "go")
            await asyncio.to_thread(pair.fail_over)
            assert await unfinished(cp) == ["t"]
            assert (await agent_on(cp, ["done"]).resume()).text == "done"
            assert await unfinished(cp) == []
            assert await texts(cp, "t") == ["go", "done"]

    play(main)


def test_a_write_that_the_primary_never_answered_is_there_once_after_the_failover(pair: Pair) -> None:
    async def main() -> None:
        async with pair.checkpointer() as cp:
            await cp.append("t", UserMessage("before"))
            name_standby(pair.primary, "nobody")  # the standby has it, and the primary does not say so
            write = asyncio.create_task(cp.append("t", UserMessage("once")))
            await asyncio.to_thread(postgres.wait_until, lambda: waiting(pair.primary, "SyncRep") == 1, "no COMMIT")
            await asyncio.to_thread(pair.fail_over)
            await write
            assert await texts(cp, "t") == ["before", "once"]

    play(main)


def test_nothing_is_acknowledged_that_the_standby_does_not_have(pair: Pair) -> None:
    async def main() -> None:
        async with pair.checkpointer() as cp:
            await cp.append("t", UserMessage("before"))
            pair.standby.stop("immediate")
            write = asyncio.create_task(cp.append("t", UserMessage("alone")))
            await asyncio.to_thread(postgres.wait_until, lambda: waiting(pair.primary, "SyncRep") == 1, "no COMMIT")
            pair.primary.stop("immediate")  # its answer is lost, and it finds the COMMIT in its log when it comes back
            pair.primary.start()
            await asyncio.to_thread(
                postgres.wait_until, lambda: write.done() or waiting(pair.primary, "SyncRep") > 0, "nothing happens"
            )
            was_acknowledged = write.done()
            pair.primary.kill()
            pair.standby.start()
            pair.standby.promote()
            await write
            assert await texts(cp, "t") == ["before", "alone"], f"acknowledged early: {was_acknowledged}"

    play(main)
