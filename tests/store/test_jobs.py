"""How a commit's outcome reaches the tasks that wait for it, also when one of them ends the program."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvloop
from anyio._backends._asyncio import CancelScope
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import byssus
from byssus import Agent, Model, ToolCall, telemetry, tool
from byssus.errors import ByssusError
from byssus.providers.scripted import ScriptedProvider
from byssus.store.database import Store, Tx
from byssus.store.jobs import in_worker
from tests.support.databases import Database
from tests.support.stores import Gate

PATIENCE = 60  # seconds until a program that hangs is a test that fails
WRITES = 10
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(byssus.__file__).parents[1])}

# One commit for all of them: the gate holds the writer until each task has submitted its write.
PROGRAM = """
import asyncio, sys, threading
from byssus.store import opening

store = opening.open(sys.argv[1])
entered, opened = threading.Event(), threading.Event()

def gate(tx):
    entered.set()
    assert opened.wait(60)

def count(tx):
    tx.run("UPDATE indexing SET epoch = epoch + 1 WHERE kind = 'message'")

async def write(number):
    await store.write(count)
    if number == 1:
        raise {error}

async def main():
    held = store.write(gate)
    await asyncio.to_thread(entered.wait, 60)
    writes = [asyncio.ensure_future(write(number)) for number in range({writes})]
    await asyncio.sleep(0)
    opened.set()
    await asyncio.wait([held, *writes])

asyncio.run(main())
"""


def counted(tx: Tx) -> int:
    row = tx.one("SELECT epoch FROM indexing WHERE kind = 'message'")
    assert row is not None
    return int(row[0])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "code"), [("SystemExit(7)", 7), ("KeyboardInterrupt", -signal.SIGINT)], ids=["SystemExit", "interrupt"]
)
def test_a_task_that_ends_the_program_right_after_its_commit_does_not_hang_its_neighbours(
    database: Database, error: str, code: int
) -> None:
    with database.store() as store:
        before = store.read_now(counted)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(error=error, writes=WRITES), database.place],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "pending" not in done.stderr
    with database.store() as store:
        assert store.read_now(counted) == before + WRITES


# What a service has that is stopped with SIGTERM: it may arrive anywhere in the event loop.
TERMINATED = """
import asyncio, signal, sys
from byssus.store import opening

store = opening.open(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))

def count(tx):
    tx.run("UPDATE indexing SET epoch = epoch + 1 WHERE kind = 'message'")

async def write():
    while True:
        await store.write(count)

async def main():
    asyncio.get_running_loop().call_later(0.1, lambda: print("busy", flush=True))
    await asyncio.gather(*(write() for _ in range(64)))

asyncio.run(main())
"""


@pytest.mark.processes
def test_a_signal_handler_that_exits_under_load_ends_the_program(database: Database) -> None:
    command = [sys.executable, "-c", TERMINATED, database.place]
    children = [
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "busy\n"
        child.send_signal(signal.SIGTERM)
    for child in children:
        _, errors = child.communicate(timeout=PATIENCE)
        assert child.returncode == 7, errors


# As a signal handler would raise it: at the n-th step that the event loop takes in this module, for each n.
INTERRUPTED = """
import asyncio, itertools, sys, threading
from byssus.store import jobs, opening

store = opening.open(sys.argv[1])

class Exits:
    def __init__(self, steps):
        self.left = steps

    def trace(self, frame, event, _):
        if frame.f_code.co_filename != jobs.__file__:
            return None
        self.left -= 1
        if not self.left:
            sys.settrace(None)
            raise SystemExit(7)
        return self.trace

def count(tx):
    tx.run("UPDATE indexing SET epoch = epoch + 1 WHERE kind = 'message'")

async def write():
    await store.write(count)

async def main(step):
    entered, opened = threading.Event(), threading.Event()
    held = store.write(lambda tx: (entered.set(), opened.wait(60)))
    await asyncio.to_thread(entered.wait, 60)
    writes = asyncio.gather(held, store.write(count), *(write() for _ in range(3)))
    await asyncio.sleep(0)
    sys.settrace(Exits(step).trace)
    opened.set()
    await writes
    sys.settrace(None)

for step in itertools.count(1):
    try:
        asyncio.run(main(step))
        break
    except SystemExit:
        pass
sys.settrace(None)
print(step)
"""


@pytest.mark.processes
def test_an_exit_at_any_step_of_the_delivery_leaves_nobody_waiting(database: Database) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, database.place],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_a_future_of_a_submitted_write_refuses_cancellation_and_that_of_a_read_does_not(store: Store) -> None:
    async def main() -> None:
        write, read, call = store.write(counted), store.read(counted), in_worker(lambda: 7)
        assert [future.cancel() for future in (write, read, call)] == [False, True, False]
        assert await call == 7
        assert await write == await store.read(counted)
        with pytest.raises(asyncio.CancelledError):
            await read

    asyncio.run(main())


def test_what_a_call_beside_the_event_loop_raises_reaches_its_caller() -> None:
    def fail() -> None:
        raise ByssusError("from the worker")

    async def main() -> None:
        with pytest.raises(ByssusError, match="from the worker"):
            await in_worker(fail)

    asyncio.run(main())


# --- cancellation: on each kind of event loop, and from each side -----------------------------------------------------

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
if sys.platform != "win32":
    LOOPS["uvloop"] = uvloop.new_event_loop
if sys.version_info >= (3, 12):

    def eager_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(asyncio.eager_task_factory)
        return loop

    LOOPS["eager"] = eager_loop


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as made:
        yield made


class Held:
    """A write that waits until it is let go, and a note of whether it was done when its task heard how it ended."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.gate = Gate()
        self.was_done: bool | None = None

    async def write(self) -> str:
        future = self._store.write(self.gate.query)
        try:
            return await future
        finally:
            self.was_done = future.done()

    def let_go_soon(self) -> None:
        asyncio.get_running_loop().call_later(0.2, self.gate.opened.set)


async def cancelled_by_task(held: Held) -> None:
    task = asyncio.ensure_future(held.write())
    for _ in range(5):
        await asyncio.sleep(0)
        task.cancel()
    held.let_go_soon()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def cancelled_by_timeout(held: Held) -> None:
    held.let_go_soon()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await held.write()


async def cancelled_by_wait_for(held: Held) -> None:
    held.let_go_soon()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(held.write(), 0.01)


async def cancelled_by_task_group(held: Held) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    held.let_go_soon()
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(held.write())
            group.create_task(fail())
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]


async def cancelled_by_gather(held: Held) -> None:
    gathered = asyncio.gather(held.write(), held.write())
    await asyncio.sleep(0)
    gathered.cancel()
    held.let_go_soon()
    with pytest.raises(asyncio.CancelledError):
        await gathered


async def cancelled_by_anyio(held: Held) -> None:
    held.let_go_soon()
    with anyio.move_on_after(0.01) as scope:
        await held.write()
    assert scope.cancelled_caught
    assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]


async def cancelled_by_anyio_task_group(held: Held) -> None:
    held.let_go_soon()
    async with anyio.create_task_group() as group:
        group.start_soon(held.write)
        await anyio.sleep(0.01)
        group.cancel_scope.cancel()


async def cancelled_by_anyio_and_by_task(held: Held) -> None:
    async def write() -> None:
        with anyio.move_on_after(0.01):
            await held.write()

    task = asyncio.ensure_future(write())
    await asyncio.sleep(0.05)
    task.cancel()
    held.let_go_soon()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "cancelled_by",
    [
        cancelled_by_task,
        cancelled_by_timeout,
        cancelled_by_wait_for,
        cancelled_by_task_group,
        cancelled_by_gather,
        cancelled_by_anyio,
        cancelled_by_anyio_task_group,
        cancelled_by_anyio_and_by_task,
    ],
)
def test_a_write_settles_before_any_cancellation_is_delivered_and_nothing_spins_meanwhile(
    store: Store,
    runner: asyncio.Runner,
    monkeypatch: pytest.MonkeyPatch,
    cancelled_by: Callable[[Held], Coroutine[Any, Any, None]],
) -> None:
    deliveries, deliver = list[object](), CancelScope._deliver_cancellation

    def counting(scope: Any, origin: Any) -> bool:
        deliveries.append(scope)
        return deliver(scope, origin)

    monkeypatch.setattr(CancelScope, "_deliver_cancellation", counting)
    held = Held(store)
    runner.run(cancelled_by(held))
    assert held.was_done is True
    assert len(deliveries) < 30, "anyio cancels it in each round of the event loop"


def test_tasks_that_await_one_write_are_cancelled_one_by_one(store: Store, runner: asyncio.Runner) -> None:
    async def main() -> None:
        gate = Gate()
        write = store.write(gate.query)

        async def wait() -> str:
            return await write

        tasks = [asyncio.ensure_future(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        gate.opened.set()
        first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
        assert (first, third, await write) == ("gate", "gate", "gate")
        assert isinstance(second, asyncio.CancelledError)

    runner.run(main())


def test_a_failure_that_only_a_cancelled_task_waited_for_is_not_reported_as_unseen(
    store: Store, runner: asyncio.Runner
) -> None:
    reports: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        gate = Gate()

        def query(tx: Tx) -> None:
            gate.query(tx)
            raise ZeroDivisionError

        async def write() -> None:
            await store.write(query)

        task = asyncio.ensure_future(write())
        await asyncio.sleep(0)
        task.cancel()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()

    runner.run(main())
    assert reports == []


# --- spans ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    made, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    telemetry.enable(provider)
    yield made
    telemetry.disable()


@tool
async def look() -> str:
    """Look."""
    return "seen"


def test_a_commits_span_ends_before_the_spans_around_it(database: Database, exporter: InMemorySpanExporter) -> None:
    async def main() -> None:
        provider = ScriptedProvider([[ToolCall("c1", "look", {})], "done"])
        async with database.checkpointer() as cp:
            agent = Agent(provider=provider, model=Model("m"), tools=[look], checkpointer=cp, thread_id="trip")
            assert (await agent.prompt("go")).stop_reason == "stop"

    asyncio.run(main())
    spans = {span.context.span_id: span for span in exporter.get_finished_spans() if span.context is not None}
    inner = [(span, spans[span.parent.span_id]) for span in spans.values() if span.parent is not None]
    assert len([span for span, _ in inner if span.name.startswith("commit ")]) >= 4
    assert [f"{span.name} in {parent.name}" for span, parent in inner if ended(span) > ended(parent)] == []


def ended(span: ReadableSpan) -> int:
    assert span.end_time is not None
    return span.end_time
