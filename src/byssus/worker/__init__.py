"""Workers: programs that run the tasks of a database, on one machine or on many.

worker = Worker("chat.db")

@worker.task("summarize")
async def summarize(ctx: TaskContext, payload: dict) -> str: ...

asyncio.run(worker.run())
"""

from __future__ import annotations

from byssus.worker.context import TaskContext, ThreadContext
from byssus.worker.limits import Limit
from byssus.worker.outcomes import (
    DeadlineMissed,
    HandlerStuck,
    NoRetry,
    ProcessFailed,
    ResultTooLarge,
    Retry,
    TaskStopped,
    UnknownTaskType,
    WorkerDied,
)
from byssus.worker.processes import ProcessContext
from byssus.worker.steps import StepResultInvalid, StepUnknown
from byssus.worker.worker import Worker

__all__ = [
    "DeadlineMissed",
    "HandlerStuck",
    "Limit",
    "NoRetry",
    "ProcessContext",
    "ProcessFailed",
    "ResultTooLarge",
    "Retry",
    "StepResultInvalid",
    "StepUnknown",
    "TaskContext",
    "TaskStopped",
    "ThreadContext",
    "UnknownTaskType",
    "Worker",
    "WorkerDied",
]
