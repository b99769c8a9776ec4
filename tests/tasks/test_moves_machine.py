"""Random moves of people, workers and programs, from two processes: the database and a plain model agree after each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from byssus.checkpointer import Checkpointer
from byssus.errors import IllegalMove
from byssus.queries.tasks import claims
from byssus.queries.tasks.claims import Dead, HeldTask, Wish
from byssus.queries.tasks.tasks import ENDED, STATUSES
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey
from tests.support import forked
from tests.support.databases import Database
from tests.tasks import moves_child

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
EXAMPLES = int(os.environ.get("BYSSUS_EXAMPLES", "10"))
KEY = ThreadKey("", "")
ERROR = '{"type":"E","message":"","trace":""}'
TARGETS = {"pause": "paused", "resume": "pending", "cancel": "cancelled", "retry": "pending"}
LEGAL = {
    "pending": ("pause", "cancel"),
    "running": ("pause", "cancel"),
    "paused": ("resume", "cancel"),
    "failed": ("retry",),
    "cancelled": ("retry",),
    "completed": (),
}
ENDS = ("complete", "fail", "give up", "stop", "suspend")
any_number = st.integers(0, 30)
any_process = st.integers(0, 1)


@dataclass
class Expected:
    """A task as it should be."""

    max_retries: int
    status: str = "pending"
    retries: int = 0
    epoch: int = 0
    asked: str | None = None
    is_leased: bool = False
    is_waiting: bool = False

    def release(self, status: str) -> None:
        self.status, self.asked, self.is_leased = status, None, False

    def stop(self) -> None:
        """A person's word, or back to the queue."""
        self.release({"cancel": "cancelled", "pause": "paused"}.get(self.asked or "", "pending"))

    def fail(self) -> None:
        if self.asked is not None:
            self.stop()
        elif self.retries < self.max_retries:
            self.retries += 1
            self.release("pending")
        else:
            self.release("failed")


class Refused(Exception):
    """The other process has raised IllegalMove."""


class Moves(RuleBasedStateMachine):
    """Tasks beside the model; `held` has all that workers have ever claimed."""

    def __init__(self, cp: Checkpointer, runner: asyncio.Runner, other: forked.Process) -> None:
        super().__init__()
        self.cp, self.runner, self.other = cp, runner, other
        self.model: dict[str, Expected] = {}
        self.held: list[HeldTask] = []

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(doing)

    def call(self, process: int, call: Any, *args: Any, **options: Any) -> Any:
        """Let this process (0) or the other one make a call of `moves_child.done`."""
        if process == 0:
            return self.run(moves_child.done(self.cp, call, args, options))
        assert self.other.stdin is not None
        assert self.other.stdout is not None
        print(moves_child.packed((call, args, options)), file=self.other.stdin, flush=True)
        result, why = moves_child.unpacked(self.other.stdout.readline())
        if why is not None:
            raise Refused(why)
        return result

    def write(self, process: int, query: Any, *args: Any) -> Any:
        return self.call(process, query, *args)

    def teardown(self) -> None:
        def clear(tx: Tx) -> None:
            tx.run("DELETE FROM tasks")

        self.write(0, clear)

    def some(self, number: int) -> tuple[str, Expected]:
        name = sorted(self.model)[number % len(self.model)]
        return name, self.model[name]

    def lease(self, number: int) -> tuple[HeldTask, Expected | None]:
        """A lease that is or was held, and the task if the lease is still good."""
        good = [held for held in self.held if self._is_good(held)]
        some = good if good and number % 3 else self.held
        held = some[number % len(some)]
        return held, self.model[held.id] if held in good else None

    def _is_good(self, held: HeldTask) -> bool:
        task = self.model.get(held.id)
        return task is not None and task.is_leased and task.epoch == held.epoch

    # --- people and programs ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model) < 4)
    @rule(process=any_process, retries=st.integers(0, 1))
    def create(self, process: int, retries: int) -> None:
        made = self.call(process, "create_task", None, "t", None, max_retries=retries)
        self.model[made["id"]] = Expected(retries)

    @precondition(lambda self: self.model)
    @rule(process=any_process, number=any_number, move=st.sampled_from(sorted(TARGETS)))
    def move(self, process: int, number: int, move: str) -> None:
        name, task = self.some(number)
        legal: tuple[str, ...] = LEGAL[task.status]
        if task.is_leased and task.asked is not None:
            legal = ("resume", "cancel", "pause") if task.asked == "pause" else ("cancel",)
        try:
            self.call(process, f"{move}_task", name)
        except (IllegalMove, Refused) as error:
            assert move not in legal, error
            return
        assert move in legal
        if task.is_leased:
            task.asked = None if move == "resume" else move
            return
        task.status = TARGETS[move]
        if move == "retry":
            task.retries = 0
        if move in ("retry", "cancel"):
            task.is_waiting = False

    @precondition(lambda self: self.model)
    @rule(process=any_process, number=any_number, status=st.sampled_from(STATUSES))
    def set_status(self, process: int, number: int, status: Any) -> None:
        name, task = self.some(number)
        self.call(process, "update_task_status", name, status)
        task.retries += status in ("pending", "running") and task.status == "failed"
        task.epoch += task.is_leased
        task.release(status)
        task.is_waiting = False

    @precondition(lambda self: self.model)
    @rule(process=any_process, number=any_number)
    def delete(self, process: int, number: int) -> None:
        name, _ = self.some(number)
        self.call(process, "delete_task", name)
        del self.model[name]

    # --- workers ------------------------------------------------------------------------------------------------------

    @rule(process=any_process, most=st.integers(1, 4))
    def claim(self, process: int, most: int) -> None:
        ready = {name for name, task in self.model.items() if task.status == "pending" and not task.is_waiting}
        claimed = self.write(process, claims.claim, KEY, Wish("nobody", 30, most, None, {}, {}))
        assert len(claimed) == min(most, len(ready))
        for task, _ in claimed:
            assert task.id in ready
            expected = self.model[task.id]
            expected.status, expected.is_leased, expected.asked = "running", True, None
            expected.epoch += 1
            assert task.lease_epoch == expected.epoch
            self.held.append(HeldTask(task.id, task.lease_epoch, 30, "token"))

    @precondition(lambda self: self.held)
    @rule(
        process=any_process, number=any_number, end=st.sampled_from(["complete", "fail", "give up", "stop", "suspend"])
    )
    def end(self, process: int, number: int, end: str) -> None:
        held, task = self.lease(number)
        match end:
            case "complete":
                done = self.write(process, claims.complete, KEY, held, "1")
            case "fail":
                done = self.write(process, claims.fail, KEY, held, ERROR, 0)
            case "give up":
                done = self.write(process, claims.fail, KEY, held, ERROR, None)
            case "stop":
                done = self.write(process, claims.stop, KEY, held)
            case _:
                done = self.write(process, claims.suspend, held.id, held.epoch, None, "event")
        assert done == (task is not None), "a late write was not refused, or a good one was"
        if task is None:
            return
        match end:
            case "complete":
                task.release("completed")
            case "fail":
                task.fail()
            case "give up":
                task.retries, tries = task.max_retries, task.retries
                task.fail()
                task.retries = tries
            case _:
                task.is_waiting = end == "suspend"
                task.stop()

    @precondition(lambda self: self.held)
    @rule(process=any_process, number=any_number)
    def die(self, process: int, number: int) -> None:
        held, task = self.lease(number)
        found = self.write(process, claims.recover, KEY, [Dead(held.id, held.epoch, True, 0)], ERROR)
        assert found == ([] if task is None else [held.id])
        if task is not None:
            task.epoch += 1
            task.fail()

    @precondition(lambda self: self.held)
    @rule(process=any_process, number=any_number)
    def look(self, process: int, number: int) -> None:
        held, task = self.lease(number)
        assert self.write(process, claims.renew, [held]) == ([held] if task is None else [])
        asked = self.write(process, claims.asked, [held])
        assert asked == ([held] if task is not None and task.asked is not None else [])

    # --- both agree ---------------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        found = {task["id"]: task for task in self.run(self.cp.list_tasks(limit=10_000)) or []}
        assert found.keys() == self.model.keys()
        for name, expected in self.model.items():
            task = found[name]
            assert (task["status"], task["retry_count"], task["asked"]) == (
                *(expected.status, expected.retries, expected.asked),
            )
            assert (task["worker"] is not None) == expected.is_leased
            assert (task["waits_for"] is not None) == expected.is_waiting
            assert (task["completed_at"] is not None) == (task["status"] in ENDED)


@pytest.mark.processes
def test_moves_of_people_and_workers_agree_with_a_model(database: Database) -> None:
    arguments = ["-m", "tests.tasks.moves_child", database.place]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with (
        asyncio.Runner() as runner,
        forked.Process(arguments, env=environment, stdin=forked.PIPE, stdout=forked.PIPE) as other,
    ):
        cp = database.checkpointer()
        runner.run(cp.open())

        class Here(Moves):
            def __init__(self) -> None:
                super().__init__(cp, runner, other)

        try:
            run_state_machine_as_test(
                Here,
                settings=settings(
                    max_examples=EXAMPLES,
                    stateful_step_count=40,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(cp.close())
