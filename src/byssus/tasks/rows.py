"""The dicts that `AgentStorage` and the checkpointers return for tasks. Times are ISO 8601 UTC text."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from byssus.queries.tasks.schedules import Schedule
from byssus.queries.tasks.steps import StepKind, StepRow, StepStatus
from byssus.queries.tasks.tasks import Asked as Asked  # noqa: PLC0414 - a part of these types
from byssus.queries.tasks.tasks import Task
from byssus.queries.tasks.tasks import TaskStatus as TaskStatus  # noqa: PLC0414 - likewise
from byssus.values.decisions import Recovery

if not TYPE_CHECKING and sys.version_info < (3, 12):
    with contextlib.suppress(ImportError):  # pydantic, and so FastAPI, takes no other one there, and brings it along
        from typing_extensions import TypedDict

Missed: TypeAlias = Literal["skip", "one", "all"]  # ticks that passed while no worker ran
ScheduleStatus: TypeAlias = Literal["active", "paused"]


class ScheduleRow(TypedDict):
    """A schedule, and the tasks that it makes. It ticks by `cron` in a time zone, or `every` so many seconds.

    `next_at` is its next tick, None while it is paused, and `last_at` the last one that made a task.
    """

    id: str
    session_id: str | None
    user_id: str | None
    type: str
    payload: Any
    priority: int
    max_retries: int
    cron: str | None
    every: float | None
    zone: str
    missed: Missed
    status: ScheduleStatus
    next_at: str | None
    last_at: str | None
    created_at: str
    updated_at: str


class TaskError(TypedDict):
    """Why a task failed: the type of the exception, its message, and the end of its trace."""

    type: str
    message: str
    trace: str


class TaskRow(TypedDict):
    """A task. `session_id` and `user_id` are None if it belongs to no session or no user.

    `asked` is what the worker that runs it is asked to do, and `worker` is the process of that worker.
    """

    id: str
    session_id: str | None
    type: str
    status: TaskStatus
    priority: int
    payload: Any
    result: Any
    max_retries: int
    retry_count: int
    created_at: str
    updated_at: str
    started_at: str | None
    completed_at: str | None
    user_id: str | None
    error: TaskError | None
    run_at: str | None
    deadline: str | None
    unique_key: str | None
    parent_id: str | None
    progress: float | None
    progress_note: str | None
    waits_for: str | None
    asked: Asked | None
    schedule: str | None
    worker: str | None


def schedule_row(schedule: Schedule) -> ScheduleRow:
    """A schedule as a dict."""
    return ScheduleRow(
        id=schedule.id,
        session_id=schedule.session_id,
        user_id=schedule.user_id or None,
        type=schedule.type,
        payload=json.loads(schedule.payload),
        priority=schedule.priority,
        max_retries=schedule.max_retries,
        cron=schedule.cron,
        every=schedule.every,
        zone=schedule.zone,
        missed=schedule.missed,  # type: ignore[typeddict-item]
        status=schedule.status,  # type: ignore[typeddict-item]
        next_at=schedule.next_at,
        last_at=schedule.last_at,
        created_at=schedule.created_at,
        updated_at=schedule.updated_at,
    )


class TaskStepRow(TypedDict):
    """A durable step of a task: a call, a sleep, or a wait for an event.

    A call that is `started` is running, or may have run when its worker died. One that is `waiting` asks a person:
    `send_event(task_id, "step:<name>", ...)` answers. `until` is when a sleep is over, or when a wait has failed.
    """

    kind: StepKind
    name: str
    status: StepStatus
    recovery: Recovery | None
    attempts: int
    result: Any
    error: TaskError | None
    until: str | None
    started_at: str
    ended_at: str | None


def task_row(task: Task) -> TaskRow:
    """A task as a dict."""
    return TaskRow(
        id=task.id,
        session_id=task.session_id,
        type=task.type,
        status=task.status,  # type: ignore[typeddict-item]
        priority=task.priority,
        payload=json.loads(task.payload),
        result=None if task.result is None else json.loads(task.result),
        max_retries=task.max_retries,
        retry_count=task.retry_count,
        created_at=task.created_at,
        updated_at=task.updated_at,
        started_at=task.started_at,
        completed_at=task.completed_at,
        user_id=task.owner or None,
        error=None if task.error is None else json.loads(task.error),
        run_at=task.run_at,
        deadline=task.deadline,
        unique_key=task.unique_key,
        parent_id=task.parent,
        progress=task.progress,
        progress_note=task.progress_note,
        waits_for=task.waits_for,
        asked=task.asked,  # type: ignore[typeddict-item]
        schedule=task.schedule,
        worker=None if task.lease_owner is None else task.lease_owner.split(" ", 1)[0],
    )


def step_row(step: StepRow) -> TaskStepRow:
    """A step as a dict."""
    return TaskStepRow(
        kind=step.kind,  # type: ignore[typeddict-item]
        name=step.name,
        status=step.status,  # type: ignore[typeddict-item]
        recovery=step.recovery,  # type: ignore[typeddict-item]
        attempts=step.attempts,
        result=None if step.result is None else json.loads(step.result),
        error=None if step.error is None else json.loads(step.error),
        until=step.until,
        started_at=step.started_at,
        ended_at=step.ended_at,
    )
