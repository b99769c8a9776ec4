"""How a commit's outcome reaches the tasks that wait for it, also when one of them ends the program."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
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

PATIENCE = 60  # seconds until a program that hangs is a test that fails
WRITES = 10

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
        env={**os.environ, "PYTHONPATH": str(Path(byssus.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "pending" not in done.stderr
    with database.store() as store:
        assert store.read_now(counted) == before + WRITES


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
