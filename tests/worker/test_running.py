"""A task that runs: paused, cancelled and resumed from any process; lost to another worker; and its worker dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from byssus.checkpointer import Checkpointer, SQLiteCheckpointer
from byssus.errors import IllegalMove, InputError
from byssus.queries.tasks import claims
from byssus.queries.tasks.claims import HeldTask, Wish
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey
from byssus.worker import TaskContext, TaskStopped, ThreadContext, Worker
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.leases import with_two
from tests.support.workers import became, quick, task_of

KEY = ThreadKey("", "")


class Handlers:
    """Handlers that run until they are asked to stop, or for ever; `begun` says that one runs."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.stopped: list[str] = []
        self.left = threading.Event()
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)

    async def obeys(self, ctx: TaskContext, payload: Any) -> str:
        """An async handler with pause points."""
        self.begin()
        if payload == "again":
            return "done"
        try:
            while True:
                await ctx.checkpoint()
                await asyncio.sleep(0.001)
        except TaskStopped:
            self.stopped.append("obeys")
            raise

    def obeys_on_a_thread(self, ctx: ThreadContext, payload: Any) -> str:
        self.begin()
        if payload == "again":
            return "done"
        while not ctx.cancelled:
            self.left.wait(0.001)
        self.stopped.append("obeys")
        ctx.progress(0.5)
        return "this is not reached"

    async def hangs(self, ctx: TaskContext, payload: Any) -> str:
        """An async handler without pause points, which can be cancelled."""
        self.begin()
        if payload == "again":
            return "done"
        await asyncio.Event().wait()
        return "never"

    async def eats(self, ctx: TaskContext, payload: Any) -> str:
        """It catches its cancellation, and returns something."""
        self.begin()
        if payload == "again":
            return "done"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.stopped.append("eaten")
        return "finished nevertheless"

    async def eats_all(self, ctx: TaskContext, payload: Any) -> str:
        """It catches its cancellation, and goes on until the test is over."""
        self.begin()
        if payload == "again":
            return "done"
        while not self.left.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                self.stopped.append("eaten")
        return "too late"

    def ignores(self, ctx: ThreadContext, payload: Any) -> str:
        """A plain function that does not look."""
        self.begin()
        if payload == "again":
            return "done"
        self.left.wait()
        return "too late"


ALL = ["obeys", "obeys_on_a_thread", "hangs", "eats", "eats_all", "ignores"]


@pytest.mark.parametrize("name", ALL)
def test_a_task_is_paused_and_resumed_from_another_process(
    database: Database, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("byssus.worker.running.LAST", 0.1)

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        handlers = Handlers()
        task = await cp.create_task(None, "t", "first")
        async with quick(other, {"t": getattr(handlers, name)}):
            await handlers.begun.wait()
            asked = await cp.pause_task(task["id"])
            assert (asked["status"], asked["asked"]) == ("running", "pause")
            paused = await became(cp, task["id"], "paused", "completed")
            assert (paused["status"], paused["asked"], paused["worker"], paused["completed_at"]) == (
                *("paused", None, None, None),
            )
            with pytest.raises(IllegalMove, match="legal moves: resume_task, cancel_task"):
                await cp.pause_task(task["id"])
            await cp.update_task(task["id"], payload="again")
            assert (await cp.resume_task(task["id"]))["status"] == "pending"
            done = await became(cp, task["id"])
            assert (done["status"], done["result"], done["retry_count"]) == ("completed", "done", 0)
            handlers.left.set()
        assert (await task_of(cp, task["id"]))["result"] == "done"  # and what was left behind has changed nothing

    with_two(database, use)


@pytest.mark.parametrize("name", ALL)
def test_a_running_task_is_cancelled(database: Database, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("byssus.worker.running.LAST", 0.1)

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        handlers = Handlers()
        task = await cp.create_task(None, "t", "first")
        async with quick(other, {"t": getattr(handlers, name)}):
            await handlers.begun.wait()
            await cp.pause_task(task["id"])
            assert (await cp.cancel_task(task["id"]))["asked"] == "cancel"  # which goes before a pause
            ended = await became(cp, task["id"], "paused", "cancelled")
            handlers.left.set()
        if ended["status"] == "paused":  # it was faster than the second word
            ended = await cp.cancel_task(task["id"])
        assert (ended["status"], ended["completed_at"] is not None) == ("cancelled", True)
        assert ended["result"] is None

    with_two(database, use)


def test_a_pause_that_was_taken_back_leaves_the_task_pending(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        task = await cp.create_task(None, "t", None)
        held = await claimed(cp, task["id"])
        await cp.pause_task(task["id"])
        with pytest.raises(IllegalMove, match="legal moves: resume_task, cancel_task"):
            await cp.retry_task(task["id"])
        assert (await cp.resume_task(task["id"]))["asked"] is None
        with pytest.raises(IllegalMove, match="legal moves: pause_task, cancel_task"):
            await cp.resume_task(task["id"])
        assert await cp.store.write(claims.stop, KEY, held)
        assert (await task_of(cp, task["id"]))["status"] == "pending"
        held = await claimed(cp, task["id"])
        await cp.cancel_task(task["id"])
        for move in (cp.pause_task, cp.resume_task):
            with pytest.raises(IllegalMove, match="legal moves: cancel_task"):
                await move(task["id"])
        assert await cp.store.write(claims.fail, KEY, held, "{}", 0)  # a failure does not undo the word of a person
        assert (await task_of(cp, task["id"]))["status"] == "cancelled"

    with_cp(database, use)


async def claimed(cp: Checkpointer, task_id: str, seconds: float = 30, owner: str = "nobody") -> HeldTask:
    """Claim the task as a worker does that then stands still."""
    (each,) = await cp.store.write(claims.claim, KEY, Wish(owner, seconds, 1, None, {}, {}))
    assert each.task.id == task_id
    return HeldTask(task_id, each.task.lease_epoch, seconds, "token")


# --- late writes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken_by", ["status", "recovery", "deletion"])
def test_what_a_worker_writes_late_is_refused(database: Database, taken_by: str) -> None:
    async def use(cp: Checkpointer) -> None:
        task = await cp.create_task(None, "t", None)
        held = await claimed(cp, task["id"], seconds=0 if taken_by == "recovery" else 30)
        if taken_by == "status":
            await cp.update_task_status(task["id"], "pending")
        elif taken_by == "recovery":
            dead = claims.Dead(task["id"], held.epoch, False, 0)
            assert await cp.store.write(claims.recover, KEY, [dead], "{}") == [task["id"]]
            assert await cp.store.write(claims.recover, KEY, [dead], "{}") == []
        else:
            await cp.delete_task(task["id"])
        before = await cp.get_task(task["id"])
        late: list[Callable[[Tx], object]] = [
            lambda tx: claims.complete(tx, KEY, held, "1"),
            lambda tx: claims.fail(tx, KEY, held, "{}", None),
            lambda tx: claims.stop(tx, KEY, held),
            lambda tx: claims.suspend(tx, held.id, held.epoch, 1, None),
            lambda tx: claims.set_progress(tx, KEY, held.id, held.epoch, 0.5, None),
            lambda tx: claims.hold(tx, held.id, held.epoch),
        ]
        for write in late:
            assert not await cp.store.write(write)
        assert await cp.store.write(claims.renew, [held]) == [held]
        assert await cp.get_task(task["id"]) == before

    with_cp(database, use)


def test_a_handler_whose_task_is_lost_stops(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        handlers = Handlers()

        async def work(ctx: TaskContext, payload: None) -> None:
            handlers.begin()
            try:
                while True:
                    await ctx.progress(0.5)
            except TaskStopped:
                handlers.stopped.append("lost")
                raise

        task = await cp.create_task(None, "t", None)
        async with quick(cp, {"t": work}):
            await handlers.begun.wait()
            await cp.update_task_status(task["id"], "completed", "by hand")
        assert handlers.stopped == ["lost"]
        assert (await task_of(cp, task["id"]))["result"] == "by hand"

    with_cp(database, use)


# --- workers that die -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "pause", "cancel"])
@pytest.mark.parametrize("retries", [0, 1])
def test_the_task_of_a_dead_worker_goes_back_and_counts_a_retry(
    database: Database, retries: int, asked: str | None
) -> None:
    async def use(cp: Checkpointer) -> None:
        task = await cp.create_task(None, "t", None, max_retries=retries)
        await claimed(cp, task["id"], seconds=0)
        if asked is not None:
            await getattr(cp, f"{asked}_task")(task["id"])
        async with Worker(cp, {"t": lambda ctx, payload: "done"}):
            found = await became(cp, task["id"], "pending", "failed", "paused", "cancelled")
        expected = {"pause": "paused", "cancel": "cancelled"}.get(asked or "", "pending" if retries else "failed")
        assert found["status"] == expected
        assert (found["retry_count"], found["worker"]) == (retries if asked is None else 0, None)
        assert found["error"] is not None
        assert found["error"]["type"] == "WorkerDied"
        assert (found["run_at"] is not None) == (expected == "pending")

    with_cp(database, use)


def test_a_task_that_a_program_runs_by_itself_is_left_alone(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        task = await cp.create_task(None, "t", None)
        before = await cp.update_task_status(task["id"], "running")
        await Worker(cp, {"t": lambda ctx, payload: "done"}).drained()
        assert await task_of(cp, task["id"]) == before

    with_cp(database, use)


def test_a_lease_that_has_run_out_is_renewed_if_nobody_has_taken_the_task(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        task = await cp.create_task(None, "t", None)
        held = await claimed(cp, task["id"], seconds=0)
        assert await cp.store.write(claims.renew, [held._replace(seconds=30)]) == []
        dead = claims.Dead(task["id"], held.epoch, False, 0)
        assert await cp.store.write(claims.recover, KEY, [dead], "{}") == []
        assert await cp.store.write(claims.complete, KEY, held, "1")

    with_cp(database, use)


def test_a_task_that_ran_when_a_backup_was_taken_is_run_again_in_the_backup(database: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer) -> None:
        task = await cp.create_task(None, "t", None)
        await claimed(cp, task["id"], seconds=0)
        await cp.backup(tmp_path / "backup.db")
        async with SQLiteCheckpointer(tmp_path / "backup.db") as copy:
            assert (await task_of(copy, task["id"]))["worker"] is None
            async with Worker(copy, {"t": lambda ctx, payload: "done"}):
                assert (await became(copy, task["id"], "pending", "completed"))["retry_count"] == 1
        assert (await task_of(cp, task["id"]))["worker"] == "nobody"

    with_cp(database, use)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((2,), "a number from 0 to 1"),
        ((-0.1,), "a number from 0 to 1"),
        ((float("nan"),), "a number from 0 to 1"),
        ((True,), "a number from 0 to 1"),
        ((0.5, 7), "note of a progress must be a string"),
        ((0.5, "\0"), "NUL"),
    ],
    ids=repr,
)
def test_a_progress_that_cannot_be_is_refused(database: Database, given: tuple[Any, ...], why: str) -> None:
    async def use(cp: Checkpointer) -> None:
        async def work(ctx: TaskContext, payload: None) -> str:
            with pytest.raises(InputError, match=why):
                await ctx.progress(*given)
            return repr(ctx)

        task = await cp.create_task(None, "t", None)
        await Worker(cp, {"t": work}).drained()
        assert (await task_of(cp, task["id"]))["result"] == f"TaskContext({task['id']!r}, 't')"

    with_cp(database, use)
