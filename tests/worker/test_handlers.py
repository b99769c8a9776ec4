"""Handlers that misbehave: each has a clear outcome on its task, and the worker goes on."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from byssus.checkpointer import Checkpointer
from byssus.storage import TaskRow
from byssus.worker import Retry, TaskContext, TaskStopped, ThreadContext, Worker
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.workers import became, task_of


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def returning(value: Any) -> Any:
    def handler(ctx: ThreadContext, payload: Any) -> Any:
        return value

    return handler


def raising(error: BaseException) -> Any:
    def handler(ctx: ThreadContext, payload: Any) -> Any:
        raise error

    return handler


def as_async(handler: Any) -> Any:
    async def awaited(ctx: TaskContext, payload: Any) -> Any:
        return handler(ctx, payload)

    return awaited


async def ended(cp: Checkpointer, handler: Any, **options: Any) -> TaskRow:
    """How a task with this handler ends, and that the worker runs another one after it."""
    worker = Worker(cp, {"bad": handler, "good": lambda ctx, payload: "good"}, **options)
    bad, good = await cp.create_task(None, "bad", 1, max_retries=0), await cp.create_task(None, "good", 1, -1)
    await worker.drained()
    assert (await task_of(cp, good["id"]))["result"] == "good"
    return await task_of(cp, bad["id"])


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        (raising(SystemExit(3)), "SystemExit", "3"),
        (raising(KeyboardInterrupt()), "KeyboardInterrupt", ""),
        (raising(GeneratorExit()), "GeneratorExit", ""),
        (raising(StopIteration("over")), "StopIteration|RuntimeError", ""),
        (raising(asyncio.CancelledError()), "CancelledError", ""),
        (raising(TaskStopped()), "HandlerStopped", "nobody had asked the task to stop"),
        (raising(Unreadable()), "Unreadable", "<its message cannot be read>"),
        (raising(ValueError("x" * 10**6)), "ValueError", "xxx"),
        (raising(Retry("again", after=0)), "Retry", "again"),
        (returning({1, 2}), "InputError", "the result of the handler cannot be stored as JSON"),
        (returning({"a": [float("nan")]}), "InputError", "NaN"),
        (returning("x" * 2_000), "ResultTooLarge", "the result has 2,002 characters of JSON, and may have 1,000"),
        (lambda ctx: None, "TypeError", "positional argument"),
    ],
    ids=[
        *("exit", "interrupt", "close", "stop", "cancelled", "stopped", "unreadable", "long", "retry", "set", "nan"),
        *("big", "args"),
    ],
)
def test_a_handler_that_fails_in_an_odd_way_fails_its_task(
    database: Database, handler: Any, kind: str, message: str, is_async: bool
) -> None:
    async def use(cp: Checkpointer) -> None:
        found = await ended(cp, as_async(handler) if is_async else handler, max_result=1_000)
        assert found["status"] == "failed"
        assert found["error"] is not None
        assert found["error"]["type"] in kind.split("|")
        assert message in found["error"]["message"]
        assert len(found["error"]["trace"]) <= 20_000

    with_cp(database, use)


def test_a_result_that_cannot_be_stored_is_not_worked_out_again(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        task = await cp.create_task(None, "t", 1, max_retries=5)
        await Worker(cp, {"t": returning(object())}).drained()
        found = await task_of(cp, task["id"])
        assert (found["status"], found["retry_count"]) == ("failed", 0)

    with_cp(database, use)


@pytest.mark.processes
@pytest.mark.parametrize("is_async", [True, False])
def test_the_child_of_a_handler_that_forks_is_no_second_worker(database: Database, is_async: bool) -> None:
    async def use(cp: Checkpointer) -> None:
        children: list[int] = []

        def fork(ctx: ThreadContext, payload: Any) -> int:
            if child := os.fork():
                children.append(child)
            return os.getpid()

        found = await ended(cp, as_async(fork) if is_async else fork)
        assert (found["status"], found["result"]) == ("completed", os.getpid())
        assert os.waitpid(children[0], 0) == (children[0], 0)

    with_cp(database, use)


def test_a_handler_that_never_yields_fails_and_its_neighbours_go_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("byssus.worker.worker._SCAN", 0.05)
    monkeypatch.setattr("byssus.worker.worker._LEAST_SILENCE", 0.1)

    async def use(cp: Checkpointer) -> None:
        over, begun = threading.Event(), threading.Event()

        async def blocks(ctx: TaskContext, payload: Any) -> None:
            over.wait()

        async def sleeps(ctx: TaskContext, payload: Any) -> str:
            if not begun.is_set():
                begun.set()
                await asyncio.Event().wait()
            return "elsewhere"

        async with Worker(cp, {"blocks": blocks, "sleeps": sleeps}, grace=0.1):
            neighbour = await cp.create_task(None, "sleeps", 1)
            await asyncio.to_thread(begun.wait)
            stuck = await cp.create_task(None, "blocks", 1)
            failed = await became(cp, stuck["id"])
            assert failed["error"] is not None
            assert (failed["status"], failed["error"]["type"]) == ("failed", "HandlerStuck")
            assert "make the handler a plain function" in failed["error"]["message"]
            done = await became(cp, neighbour["id"])
            assert (done["result"], done["retry_count"]) == ("elsewhere", 0)
            over.set()

    with_cp(database, use)


def test_a_plain_function_that_never_ends_does_not_keep_the_worker(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("byssus.worker.running.LAST", 0.05)

    async def use(cp: Checkpointer) -> None:
        over = threading.Event()

        def blocks(ctx: ThreadContext, payload: Any) -> str:
            over.wait()
            return "too late"

        task = await cp.create_task(None, "t", 1)
        async with Worker(cp, {"t": blocks}, grace=0.05):
            await became(cp, task["id"], "running")
        assert (await task_of(cp, task["id"]))["status"] == "pending"
        over.set()

    with_cp(database, use)
