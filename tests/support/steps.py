"""Tasks that a worker holds, for tests of steps that need no worker."""

from __future__ import annotations

from typing import Any, NamedTuple

from byssus.checkpointer import Checkpointer
from byssus.queries.tasks import steps
from byssus.queries.tasks.steps import StepName
from byssus.store.database import Row, Store, Tx
from byssus.store.jobs import TASKS, about_tasks
from byssus.store.operations import Blocking, Runner, to_the_end
from byssus.tasks import tasks
from byssus.tasks.rows import TaskStepRow
from byssus.tasks.steps import send_event, task_steps
from byssus.values.thread_key import ThreadKey
from byssus.worker.steps import Perform, Steps, Suspension, perform_beside

PAST = "2000-01-01T00:00:00.000000Z"


class Facts(NamedTuple):
    """What of a task's row a wait changes."""

    status: str
    waits_for: str | None
    run_at: str | None
    lease_until: str | None
    retry_count: int


class Run(Steps):
    """The steps of an attempt at a task, and what a worker would know of it."""

    def __init__(self, task_id: str, epoch: int, runner: Runner, perform: Perform) -> None:
        super().__init__(task_id, self, runner, perform, max_result=1000)
        self.epoch = epoch
        self.suspension: Suspension | None = None
        self.must_stop = self.is_lost = False

    def lose(self) -> None:
        self.is_lost = True


class Held:
    """A task, and the epoch of the lease under which it is held."""

    def __init__(self, store: Store, session_id: str | None = None) -> None:
        self.store = store
        self.id: str = to_the_end(tasks.create_task(Blocking(store), session_id, "steps", {}))["id"]
        self.epoch = 0
        self.take()

    def take(self) -> int:
        """Take the task, as a worker does that finds it ready, or whose holder has died."""

        def query(tx: Tx) -> int:
            row = tx.one(
                "UPDATE tasks SET status = 'running', waits_for = NULL, run_at = NULL, lease_owner = 'me',"
                " lease_until = :until, lease_epoch = lease_epoch + 1 WHERE id = :id RETURNING lease_epoch",
                id=self.id,
                until=tx.after(3600),
            )
            assert row is not None
            return int(row[0])

        self.epoch = self.store.write_now(query)
        return self.epoch

    def run(self, runner: Runner | None = None, perform: Perform = perform_beside) -> Run:
        """The steps of a new run of the handler, as after a crash of the one before."""
        return Run(self.id, self.take(), runner or self.store, perform)

    def give_back(self, run: Run) -> Facts:
        """What a worker does when the handler has been unwound."""
        assert run.suspension is not None
        self.store.write_now(run.suspension.query, *run.suspension.args)
        return self.facts()

    def set(self, **columns: object) -> None:
        sets = ", ".join(f"{column} = :{column}" for column in columns)
        self.store.write_now(lambda tx: tx.run(f"UPDATE tasks SET {sets} WHERE id = :id", id=self.id, **columns))

    def pass_time(self) -> None:
        """All sleeps and time limits are over."""
        self.store.write_now(_pass_time, TASKS)

    def suspend(self, *waits: StepName) -> Facts:
        self.store.write_now(steps.suspend, self.id, self.epoch, waits)
        return self.facts()

    def send(self, name: str, value: Any = None) -> bool:
        return to_the_end(send_event(Blocking(self.store), self.id, name, value))

    def facts(self) -> Facts:
        def query(tx: Tx) -> Row | None:
            return tx.one(f"SELECT {', '.join(Facts._fields)} FROM tasks WHERE id = :id", id=self.id)

        row = self.store.read_now(query)
        assert row is not None
        return Facts(*row)

    def steps(self) -> list[TaskStepRow]:
        return to_the_end(task_steps(Blocking(self.store), self.id))

    def story(self) -> list[str]:
        """The steps in short."""
        return [f"{step['kind']} {step['name']}: {step['status']}" for step in self.steps()]


async def pass_time(cp: Checkpointer) -> None:
    """All sleeps and time limits are over, and so is the time until the next attempt."""
    await cp.store.write(_pass_time, TASKS)


@about_tasks
def _pass_time(tx: Tx, _: ThreadKey) -> None:
    tx.run("UPDATE task_steps SET until = :past WHERE until IS NOT NULL", past=PAST)
    tx.run("UPDATE tasks SET run_at = :past WHERE run_at IS NOT NULL", past=PAST)
