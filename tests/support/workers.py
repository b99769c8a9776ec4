"""Workers for a test, and how far their tasks are."""

from __future__ import annotations

from typing import Any

from byssus.checkpointer import Checkpointer
from byssus.storage import TaskRow
from byssus.worker import Worker
from tests.support.leases import until

ENDED = ("completed", "failed", "cancelled")


async def task_of(cp: Checkpointer, task_id: str) -> TaskRow:
    task = await cp.get_task(task_id)
    assert task is not None
    return task


async def became(cp: Checkpointer, task_id: str, *statuses: str) -> TaskRow:
    """The task, once it has one of these statuses; without any, once it has ended."""

    async def there() -> TaskRow | None:
        task = await task_of(cp, task_id)
        return task if task["status"] in (statuses or ENDED) else None

    found: TaskRow = await until(there)
    return found


def quick(cp: Checkpointer, handlers: Any = None, **options: Any) -> Worker:
    """A worker that gives a handler no time once it is asked to stop."""
    return Worker(cp, handlers, **{"grace": 0.05, **options})
