"""Workers: which tasks they take, in which order, how often they try, and what they leave when they end."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from byssus.checkpointer import Checkpointer
from byssus.errors import InputError
from byssus.queries.tasks import claims
from byssus.queries.tasks.claims import Wish
from byssus.queries.versions import deleting
from byssus.run import termination
from byssus.store.database import Tx
from byssus.store.jobs import TASKS
from byssus.values import clock
from byssus.values.thread_key import ThreadKey
from byssus.worker import Limit, NoRetry, Retry, TaskContext, ThreadContext, Worker, running
from tests.support.checkpointers import with_cp, with_users
from tests.support.databases import Database
from tests.support.leases import until, with_two
from tests.support.workers import became, quick, task_of


class Doing:
    """A handler that remembers the payloads it was called with."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    async def __call__(self, ctx: TaskContext, payload: Any) -> Any:
        self.done.append(payload)
        return payload


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are tried again without a pause."""
    monkeypatch.setattr(running, "_FIRST_BACKOFF", 0)


def test_handlers_of_each_kind_do_their_tasks(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        worker = Worker(cp)

        @worker.task("async")
        async def one(ctx: TaskContext, payload: list[int]) -> int:
            await ctx.progress(0.5, "half of it")
            assert (ctx.type, ctx.attempt, ctx.session_id, ctx.user_id) == ("async", 1, "s", "ann")
            return sum(payload)

        @worker.task
        def plain(ctx: ThreadContext, payload: str) -> str:
            ctx.progress(0.25)
            assert ctx.idempotency_key("a") == f"{ctx.id}:a"
            return payload.upper()

        await with_users(cp, "ann")
        await cp.create_session("ann", session_id="s")
        first, second = await cp.create_task("s", "async", [1, 2]), await cp.create_task(None, "plain", "北京 x")
        await worker.drained()
        done, other = await task_of(cp, first["id"]), await task_of(cp, second["id"])
        assert (done["status"], done["result"], done["progress"], done["progress_note"]) == (
            *("completed", 3, 1.0, "half of it"),
        )
        assert (other["status"], other["result"], other["worker"], other["error"]) == (
            "completed",
            "北京 X",
            None,
            None,
        )
        assert (done["started_at"] or "~") <= (done["completed_at"] or "")
        assert one is not None

    with_cp(database, use)


def test_a_worker_is_woken_by_a_task(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        doing = Doing()
        async with Worker(other, {"t": doing}) as worker:
            for each in (cp, other):  # of another process, as far as the stores know, and of this one
                task = await each.create_task(None, "t", 1)
                assert (await became(cp, task["id"]))["status"] == "completed"
            later = await cp.create_task(None, "t", 2, run_at="2999-01-01")
            paused = await cp.pause_task((await cp.create_task(None, "t", 3, run_at="2999-01-01"))["id"])
            await cp.update_task_status(later["id"], "pending")  # as it was
            await cp.cancel_task(paused["id"])
            await cp.update_task_status(paused["id"], "pending")
            assert (await became(cp, paused["id"]))["result"] == 3
        assert doing.done == [1, 1, 3]
        assert worker.running == []

    with_two(database, use)


def test_a_claim_wakes_no_worker(database: Database) -> None:
    """Not even the one that makes it, which would look for tasks again and again."""

    async def use(cp: Checkpointer) -> None:
        woken: set[ThreadKey] = set()
        cp.store.on_commit = woken.update
        task = await cp.create_task(None, "t", 1)
        assert TASKS in woken
        woken.clear()
        wish = Wish("nobody", 30, 8, None, {}, {})
        assert [[each.task.id for each in await cp.store.write(claims.claim, TASKS, wish)] for _ in range(2)] == [
            *([task["id"]], []),
        ]
        assert woken == set()

    with_cp(database, use)


def test_a_claim_that_finds_nothing_wakes_no_worker(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        reached: list[str] = []
        await cp.create_task(None, "t", 1)
        cp.store.boundary = reached.append
        await Worker(cp, {"t": Doing()}).drained()
        assert len(reached) <= 30, "it claimed again and again"

    with_cp(database, use)


def test_the_most_urgent_comes_first_and_of_equals_the_oldest(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        doing = Doing()
        for n, (kind, priority) in enumerate([("a", 0), ("b", 5), ("a", -3), ("a", 5), ("b", 0), ("a", 0)]):
            await cp.create_task(None, kind, n, priority)
        await Worker(cp, {"a": doing, "b": doing}, concurrency=1).drained()
        assert doing.done == [1, 3, 0, 4, 5, 2]

    with_cp(database, use)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_users_take_turns(database: Database, concurrency: int) -> None:
    async def use(cp: Checkpointer) -> None:
        doing = Doing()
        await with_users(cp, "ann", "bob", "cy")
        for n in range(9):
            await cp.create_task(None, "t", f"ann {n}", user_id="ann")
        for user in ("bob", "cy", None):
            await cp.create_task(None, "t", f"{user} 0", user_id=user)
        await Worker(cp, {"t": doing}, concurrency=concurrency).drained()
        assert sorted(doing.done[:4]) == ["None 0", "ann 0", "bob 0", "cy 0"]
        assert doing.done[4:] == [f"ann {n}" for n in range(1, 9)]

    with_cp(database, use)


def test_a_task_is_tried_again_until_its_retries_are_used_up(database: Database, at_once: None) -> None:
    async def use(cp: Checkpointer) -> None:
        attempts: list[int] = []

        async def fail(ctx: TaskContext, payload: int) -> str:
            attempts.append(ctx.attempt)
            if len(attempts) == payload:
                return "at last"
            raise ValueError(f"attempt {ctx.attempt} \ud800\0")

        worker = Worker(cp, {"t": fail})
        task = await cp.create_task(None, "t", 0, max_retries=2)
        await worker.drained()
        failed = await task_of(cp, task["id"])
        assert attempts == [1, 2, 3]
        assert (failed["status"], failed["retry_count"]) == ("failed", 2)
        assert failed["error"] is not None
        assert (failed["error"]["type"], failed["error"]["message"]) == ("ValueError", "attempt 3 \ud800\0")
        assert 'raise ValueError(f"attempt' in failed["error"]["trace"]
        attempts.clear()
        await cp.update_task(task["id"], payload=2)
        await cp.retry_task(task["id"])
        await worker.drained()
        done = await task_of(cp, task["id"])
        assert (done["status"], done["result"], done["retry_count"], done["error"]) == ("completed", "at last", 1, None)

    with_cp(database, use)


def test_between_two_attempts_there_is_a_growing_pause(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        async def fail(ctx: TaskContext, payload: float) -> None:
            raise Retry("the service is busy", after=payload) if payload else ValueError

        worker = Worker(cp, {"t": fail})
        usual, asked = await cp.create_task(None, "t", 0), await cp.create_task(None, "t", 3600.0)
        async with worker:
            await until_retried(cp, usual["id"])
            await until_retried(cp, asked["id"])
        for task_id, least, most in ((usual["id"], 0.5, 2), (asked["id"], 3599, 3601)):
            task = await task_of(cp, task_id)
            assert (task["status"], task["run_at"] is not None, task["worker"]) == ("pending", True, None)
            assert task["error"] is not None
            assert least <= clock.seconds_between(task["updated_at"], task["run_at"] or "") <= most
        assert 450 <= running.backoff(500) <= 750

    with_cp(database, use)


async def until_retried(cp: Checkpointer, task_id: str) -> None:
    async def is_retried() -> bool:
        return (await task_of(cp, task_id))["retry_count"] > 0

    await until(is_retried)


def test_an_error_that_allows_no_retry_fails_at_once(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        class Broken(NoRetry, ValueError):
            pass

        def fail(ctx: ThreadContext, payload: None) -> None:
            raise Broken("never again")

        task = await cp.create_task(None, "t", None)
        await Worker(cp, {"t": fail}).drained()
        failed = await task_of(cp, task["id"])
        assert (failed["status"], failed["retry_count"]) == ("failed", 0)
        assert failed["error"] is not None
        assert failed["error"]["type"].endswith("Broken")

    with_cp(database, use)


def test_a_type_without_a_handler_fails_and_the_worker_goes_on(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        doing = Doing()
        strange, known = await cp.create_task(None, "strange", 1, 9), await cp.create_task(None, "t", 2)
        await Worker(cp, {"t": doing}, unknown="leave").drained()
        assert (await task_of(cp, strange["id"]))["status"] == "pending"
        await Worker(cp, {"t": doing}).drained()
        failed = await task_of(cp, strange["id"])
        assert failed["error"] is not None
        assert (failed["status"], failed["error"]["type"]) == ("failed", "UnknownTaskType")
        assert failed["error"]["message"] == "this worker has no handler for tasks of type 'strange'; it has: 't'"
        assert (await task_of(cp, known["id"]))["status"] == "completed"
        assert doing.done == [2]

    with_cp(database, use)


def test_a_task_that_misses_its_deadline_fails(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        late = await cp.create_task(None, "t", None, deadline="2020-01-01", run_at="2999-01-01")
        await Worker(cp, {"t": Doing()}).drained()
        failed = await task_of(cp, late["id"])
        assert failed["error"] is not None
        assert (failed["status"], failed["error"]["type"], failed["started_at"]) == ("failed", "DeadlineMissed", None)

    with_cp(database, use)


def test_a_deadline_stops_a_running_task(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        async def wait(ctx: TaskContext, payload: None) -> None:
            await asyncio.Event().wait()

        def soon(tx: Tx) -> None:
            tx.run("UPDATE tasks SET deadline = :soon", soon=tx.after(0.2))

        task = await cp.create_task(None, "t", None)
        await cp.store.write(soon)
        await quick(cp, {"t": wait}).drained()
        failed = await task_of(cp, task["id"])
        assert failed["error"] is not None
        assert (failed["status"], failed["error"]["type"], failed["retry_count"]) == ("failed", "DeadlineMissed", 0)

    with_cp(database, use)


def test_a_task_is_run_by_one_worker_only(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        doing = Doing()
        for n in range(40):
            await cp.create_task(None, "t", n)
        workers = [Worker(each, {"t": doing}, concurrency=3) for each in (cp, other, cp)]
        await asyncio.gather(*(worker.drained() for worker in workers))
        assert sorted(doing.done) == list(range(40))

    with_two(database, use)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_ends_lets_its_tasks_end(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def work(ctx: TaskContext, payload: None) -> bool:
            loop.call_soon_threadsafe(begun.set)
            while not ctx.draining:
                await asyncio.sleep(0.001)
            return ctx.cancelled

        tasks = [await cp.create_task(None, "t", None) for _ in range(3)]
        async with Worker(cp, {"t": work}, concurrency=2):
            await begun.wait()
        found = [await task_of(cp, task["id"]) for task in tasks]
        assert [task["status"] for task in found] == ["completed", "completed", "pending"]
        assert [task["result"] for task in found] == [False, False, None]

    with_cp(database, use)


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_what_does_not_end_in_time_is_handed_back_without_a_retry(database: Database, kind: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        begun, loop = asyncio.Event(), asyncio.get_running_loop()
        outcomes: list[str] = []

        async def wait(ctx: TaskContext, payload: None) -> None:
            loop.call_soon_threadsafe(begun.set)
            await asyncio.Event().wait()

        def block(ctx: ThreadContext, payload: None) -> None:
            loop.call_soon_threadsafe(begun.set)
            while not ctx.cancelled:
                pass
            outcomes.append("stopped")
            ctx.checkpoint()

        task = await cp.create_task(None, "t", None)
        async with quick(cp, {"t": wait if kind == "async" else block}):
            await begun.wait()
        back = await task_of(cp, task["id"])
        assert (back["status"], back["retry_count"], back["run_at"], back["worker"]) == ("pending", 0, None, None)
        doing = Doing()
        await Worker(other, {"t": doing}).drained()
        assert doing.done == [None]

    with_two(database, use)


def test_sigterm_drains(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "_endings", [])  # no other test of this process is about to end

    async def main() -> None:
        async with database.checkpointer() as cp:

            async def end(ctx: TaskContext, payload: None) -> str:
                os.kill(os.getpid(), signal.SIGTERM)
                while not ctx.draining:
                    await asyncio.sleep(0.001)
                return "in time"

            await cp.create_task(None, "t", None)
            await cp.create_task(None, "t", None)
            await Worker(cp, {"t": end}, concurrency=1).run()

    with pytest.raises(SystemExit) as ended:
        asyncio.run(main())
    assert ended.value.code == 143

    async def look() -> None:
        async with database.checkpointer() as cp:
            found = await cp.list_tasks() or []
            assert [(task["status"], task["result"]) for task in found] == [("completed", "in time"), ("pending", None)]

    asyncio.run(look())


def test_a_worker_whose_caller_is_cancelled_drains(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        worker = Worker(cp, {"t": Doing()})
        running_worker = asyncio.create_task(worker.run())
        task = await cp.create_task(None, "t", 1)
        await became(cp, task["id"])
        running_worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running_worker
        assert worker.running == []
        await worker.drained()  # and it may be used again

    with_cp(database, use)


def test_a_worker_opens_the_database_that_it_is_given(new_database: Database) -> None:
    doing = Doing()

    async def main() -> None:
        worker = Worker(new_database.place, {"t": doing})
        async with worker.checkpointer as cp:
            await cp.create_task(None, "t", 1)
        await worker.drained()

    asyncio.run(main())
    assert doing.done == [1]


def test_a_deleted_session_takes_its_tasks_along(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        doing = Doing()
        await cp.create_session(None, session_id="s")
        await cp.create_task("s", "t", 1)
        kept = await cp.create_task(None, "t", 2)
        await cp.store.write(deleting.discard, ThreadKey("", "s"))  # and its rows are still there
        await Worker(cp, {"t": doing}).drained()
        assert doing.done == [2]
        assert [task["id"] for task in await cp.list_tasks() or []] == [kept["id"]]

    with_cp(database, use)


# --- what no worker can be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"concurrency": 0}, "concurrency must be a number from 1 up"),
        ({"concurrency": True}, "concurrency must be a number from 1 up"),
        ({"grace": -1}, "grace must be a number of seconds"),
        ({"lease_seconds": 0}, "lease_seconds must be a number of seconds"),
        ({"unknown": "ignore"}, "unknown must be one of 'fail', 'leave'"),
        ({"max_result": 0}, "max_result must be a number"),
        ({"limits": {"t": 5}}, "the limit of 't' must be a Limit"),
        ({"handlers": {"": print}}, "at least one character"),
        ({"handlers": {"t": "f"}}, "must be a function of a context and a payload"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_no_worker_can_be_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Worker("x.db", **options)


def test_a_type_has_one_handler() -> None:
    worker = Worker("x.db", {"t": print}, limits={"t": Limit(1)})
    with pytest.raises(InputError, match="there is a handler of 't' already"):
        worker.add("t", print)
    with pytest.raises(InputError, match="process=True is for plain functions"):
        worker.add("u", Doing(), process=True)
