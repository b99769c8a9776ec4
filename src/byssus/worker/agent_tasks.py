"""Agent tasks: the agent of the app works on the task's thread, under the lease of that thread.

- The prompt is sent with a key that is made of the task's id. So after a crash the task joins the run that it had
  begun, or resumes it, and the prompt is stored once. The run can be followed and steered like any other.
- If the run has failed and the task is tried again, the thread is resumed: the prompt is not sent again.
- A pause or the end of the worker hands the run over, and the task goes on with it later. A cancellation aborts it.
- A run that waits for a person gives the task back until the question is answered. If another run drives the thread,
  the task is given back for a moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn, TypedDict

import msgspec

from byssus.agent import Agent
from byssus.apps import App
from byssus.errors import AnswerNeeded, InputError, ProviderError, ThreadBusy
from byssus.queries.log import runs
from byssus.queries.log.runs import RunRow
from byssus.queries.tasks import agents
from byssus.run.children.tool import Above
from byssus.run.outside import requests
from byssus.run.outside.handing_over import HandOver
from byssus.signals import Signal
from byssus.values.prompts import as_prompts
from byssus.values.results import RunResult
from byssus.values.thread_key import ThreadKey
from byssus.worker.context import Attempt, TaskContext
from byssus.worker.outcomes import NoRetry, TaskStopped

_SHARE = 0.75  # of the worker's grace: a run that is handed over stops before its handler is cut off
_BUSY = 2.0  # seconds until a task is tried again whose thread is driven by another run
_RESUMED = ("error", "aborted", "quota_limit")  # stop reasons of a run that a retry resumes
_AFTERWARDS = 100  # runs of a thread that are looked at for those that have resumed a run


class AgentTaskResult(TypedDict):
    """The result of an agent task. `stop_reason` is as in `RunResult`."""

    text: str
    run_id: str
    stop_reason: str
    usage: dict[str, Any]


async def prompt(ctx: TaskContext, app: App, message: Any) -> AgentTaskResult:
    """Let the app's agent answer the message, on the thread of the task."""
    thread_id = session_of(ctx)
    try:
        as_prompts(message)
    except InputError as error:  # before anything is stored
        raise NoRetry(f"the prompt of the task: {error}") from error
    agent = await app.agent(ctx.checkpointer, thread_id, ctx.user_id)
    try:
        with _led(agent, ctx._running):
            result = await _answered(ctx, agent, message)
    except AnswerNeeded:  # a question of an earlier run is open
        _wait_for_answer(ctx, thread_id)
    except ThreadBusy:
        ctx._steps.suspend(agents.give_back, ctx.id, ctx._running.epoch, _BUSY)
    if result.stop_reason == "waiting":
        _wait_for_answer(ctx, thread_id)
    if result.stop_reason == "handed_over" or (result.stop_reason == "aborted" and ctx.cancelled):
        raise TaskStopped
    return _checked(ctx, result)


@contextlib.contextmanager
def _led(agent: Agent, running: Attempt) -> Iterator[None]:
    """Let the task decide when the run of the agent stops, as a run does that has called an agent as a tool.

    Then SIGTERM is a matter of the worker alone.
    """
    signal = Signal()
    handing = HandOver(signal)
    grace = running.grace * _SHARE

    def stop() -> None:
        if running.signal.reason in ("cancel", "deadline"):
            signal.abort()
        else:
            handing.ask(grace if running.signal.reason == "pause" else 0)

    forget_stop = running.signal.on_abort(stop)
    forget_drain = running.draining.on_abort(lambda: handing.ask(grace))
    agent._above = Above(signal, handing)
    try:
        yield
    finally:
        forget_stop()
        forget_drain()
        handing.stop()


def session_of(ctx: TaskContext) -> str:
    if ctx.session_id is None:
        raise NoRetry(f"task {ctx.id!r} of type {ctx.type!r} needs a session: create_task(session_id, ...)")
    return ctx.session_id


def _wait_for_answer(ctx: TaskContext, thread_id: str) -> NoReturn:
    ctx._steps.suspend(agents.wait_for_answer, ThreadKey("", thread_id), ctx.id, ctx._running.epoch)


async def _answered(ctx: TaskContext, agent: Agent, message: Any) -> RunResult[Any]:
    """The result of the run that has the task's key, or of the last one that has resumed it."""
    store, key, thread_key = ctx.checkpointer.store, f"task:{ctx.id}", ThreadKey("", agent.thread_id or "")
    request = requests.request_of(as_prompts(message), key, is_stored=True)
    assert request is not None
    found = await store.read(runs.of_request, thread_key, request)
    first = None if found is None else found.run
    if first is None or not _has_failed(first):
        return await agent.prompt(message, key=key, raise_errors=False)
    last = await _last(ctx, first, thread_key)
    if last.ended_at is not None and not _has_failed(last):  # the worker died before it could store the result
        return await requests.result_of(store, last)
    return await agent.resume(raise_errors=False)


def _has_failed(row: RunRow) -> bool:
    return row.ended_at is not None and row.stop_reason in _RESUMED


async def _last(ctx: TaskContext, first: RunRow, thread_key: ThreadKey) -> RunRow:
    """The last run that has resumed a run, or that run itself."""
    rows = await ctx.checkpointer.store.read(runs.page, thread_key, before=2**62, limit=_AFTERWARDS)
    later = [row for row in rows if row.key > first.key]
    if len(later) == _AFTERWARDS or any(row.cause != "resume" for row in later):
        raise NoRetry(
            f"the run of task {ctx.id!r} has failed ({first.stop_reason}), and thread {thread_key.id!r} has gone "
            "on with another prompt since; create a new task"
        )
    return later[0] if later else first


def _checked(ctx: TaskContext, result: RunResult[Any]) -> AgentTaskResult:
    """The result as it is stored; raises if the run has failed."""
    if isinstance(result.error, ProviderError) and result.error.retryable:
        raise result.error
    if result.error is not None:
        raise NoRetry(f"{type(result.error).__name__}: {result.error}") from result.error
    if result.stop_reason in ("error", "aborted", "interrupted"):
        raise NoRetry(
            f"run {result.run_id!r} of task {ctx.id!r} was {result.stop_reason}, "
            + ("and retry_task resumes it" if result.stop_reason == "aborted" else "because another prompt came")
        )
    return {
        "text": result.text,
        "run_id": result.run_id,
        "stop_reason": result.stop_reason,
        "usage": msgspec.structs.asdict(result.usage),
    }
