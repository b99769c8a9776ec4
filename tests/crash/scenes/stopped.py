"""A Postgres that hangs without dying: all of its processes are stopped, or some, and go on after a while."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path

from byssus import UserMessage
from tests.crash.cutter import schema_on
from tests.crash.place import Place
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import acknowledged, judge
from tests.support import postgres

_LIMITS = "&answer_seconds=0.6&connect_timeout=2"
_WRITERS = 4


def stopped(chance: random.Random, directory: Path, place: Place) -> None:
    """The server is stopped with SIGSTOP in the middle of things, and goes on."""
    with postgres.running() as server:
        schema = schema_on(server)
        there = Place(place.directory, schema.dsn + _LIMITS, schema.name)
        with Actor("writer", lambda line: _write(line, there, random.Random(chance.random()))) as writer:
            writer.hear("open")
            for _ in range(chance.choice([1, 1, 2])):
                writer.listen_for(chance.choice([0, 0.05, 0.3]))
                _stop_for(server, chance)
                writer.hear("stored")
            writer.tell("over")
            writer.finish()
        tried = {"t": [line["text"] for line in writer.lines("tried")]}
        judge(Place(place.directory, schema.dsn, schema.name), acknowledged([writer]), {**tried, "t0": ["made"]})


def _stop_for(server: postgres.Server, chance: random.Random) -> None:
    seconds = 40.0 if chance.random() < 0.02 else chance.choice([0.2, 0.7, 1.5])
    backends = [pid for pid, parent in postgres.processes().items() if parent == server.pid]
    some = chance.sample(backends, chance.randint(1, len(backends)))
    pids = chance.choice([[server.pid, *backends], some])
    try:
        for pid in pids:
            _send(pid, signal.SIGSTOP)
        time.sleep(seconds)  # for so long it hangs
    finally:
        for pid in pids:
            _send(pid, signal.SIGCONT)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def _write(line: Line, place: Place, chance: random.Random) -> None:
    """Append from several tasks until told that it is over; some wait for as long as they like, others do not."""
    over = asyncio.Event()

    async def write(name: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            text = f"{name}-{number}"
            line.say("tried", text=text)
            with line.trying("append"), contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.choice([None, None, 0.01, 0.5])):
                    await cp.append("t", UserMessage(text))
                    line.say("stored", thread="t", text=text)

    async with place.checkpointer() as cp:
        await cp.append("t0", UserMessage("made"))
        line.say("open")
        writers = [asyncio.create_task(write(name)) for name in range(_WRITERS)]
        await line.told_soon()
        over.set()
        await asyncio.gather(*writers)
