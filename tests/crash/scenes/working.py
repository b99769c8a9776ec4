"""Workers are killed at their write boundaries and elsewhere, stopped for longer than their lease, and their clock is
set; a Postgres is restarted. All tasks end well all the same, and so do those of a schedule that ticks meanwhile.

What must be true: each task is completed, with the result of an attempt that came to its end; no two workers run a task
at a time, as long as none of them was stopped; each attempt after the first one was counted as a retry; and a tick of
the schedule makes one task.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from byssus.checkpointer import Checkpointer
from byssus.errors import ByssusError, StoreUnreachable
from byssus.values import clock as clock_of
from byssus.worker import TaskContext, ThreadContext, Worker, running, worker
from tests.crash.cutter import schema_on
from tests.crash.place import Place
from tests.crash.scenes.clocks import Clock
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import expect
from tests.support import postgres

_LEASE = 0.6  # seconds
_WORKERS = 3
_AHEAD = (0.5, 2, 61, 86_400)  # seconds: what a clock that goes back does to tasks that wait for a time is known
_PATIENCE = 60.0  # seconds until all tasks must have ended


class Attempt(NamedTuple):
    """What a worker did of a task, by the monotonic clock that all processes of a machine share."""

    worker: int  # its pid
    began: float
    ended: float
    is_whole: bool


def working(chance: random.Random, directory: Path, place: Place) -> None:
    """Workers are killed, stopped and started while they work off the tasks."""
    with _server(place) as (there, server):
        clock = Clock()
        count = chance.randint(12, 30)
        with Actor("asker", lambda line: _ask(line, there, count, random.Random(chance.random()))) as asker:
            asker.hear("asked", silence=_PATIENCE)
            lives = [_worker(there, clock, chance) for _ in range(_WORKERS)]
            try:
                stopped = _all_done(chance, asker, lives, there, clock, server)
                for actor in lives:
                    _end(actor)
            finally:
                for actor in lives:
                    actor.kill()
            asker.tell("")
            asker.finish()
            end = asker.lines("far")[-1]
            expect(len(end["tasks"]) == count + len(end["ticks"]), "tasks were lost or made", count, end)
            _judge_ticks(end["ticks"])
            _judge(end["tasks"], lives, stopped)


def _all_done(
    chance: random.Random, asker: Actor, lives: list[Actor], place: Place, clock: Clock, server: postgres.Server | None
) -> set[int]:
    """Until all tasks are completed, let accidents happen and start another worker for each that has died.

    Returns the workers that were stopped.
    """
    stopped: set[int] = set()
    until, accidents = time.monotonic() + _PATIENCE, chance.randint(4, 10)
    at_work = list(lives)
    while (answer := asker.ask("how far?", "far", "away"))["what"] == "away" or answer["left"] > 0:
        expect(time.monotonic() < until, "tasks do not come to their end", answer)
        for actor in list(at_work):
            actor.listen_for(0.01)
            if _has_ended(actor):
                at_work.remove(actor)
                at_work.append(_worker(place, clock, chance if accidents > 0 else None))
                lives.append(at_work[-1])
        if accidents > 0 and chance.random() < 0.3:
            accidents -= 1
            _accident(chance, at_work, stopped, clock, server)
    return stopped


def _end(actor: Actor) -> None:
    """Ask a worker to end, and hear what it has to say until then."""
    if not _has_ended(actor):
        os.kill(actor.pid, signal.SIGTERM)
    while actor.listen():
        continue


@contextlib.contextmanager
def _server(place: Place) -> Iterator[tuple[Place, postgres.Server | None]]:
    """A server of our own where there is one, to be restarted."""
    if place.dsn is None:
        yield place, None
        return
    with postgres.running() as server:
        schema = schema_on(server)
        yield Place(place.directory, schema.dsn, schema.name), server


def _accident(
    chance: random.Random, workers: list[Actor], stopped: set[int], clock: Clock, server: postgres.Server | None
) -> None:
    actor = chance.choice(workers)
    match chance.choice(["kill", "stop", "clock", "restart"]):
        case "kill":
            os.kill(actor.pid, signal.SIGKILL)
        case "stop":
            stopped.add(actor.pid)
            actor.stand_still()
            time.sleep(chance.choice([0.1, _LEASE * 2.5]))  # for so long it stands still
            actor.go_on()
        case "clock" if server is None:
            clock.jump(chance.choice(_AHEAD))
        case "restart" if server is not None:
            server.stop(chance.choice(["fast", "immediate"]))
            server.start()
        case _:
            pass


def _worker(place: Place, clock: Clock, chance: random.Random | None) -> Actor:
    dies_at = chance.randint(1, 60) if chance is not None and chance.random() < 0.7 else None
    return Actor("worker", lambda line: _work(line, place, clock, dies_at))


async def _work(line: Line, place: Place, clock: Clock, dies_at: int | None) -> None:
    clock.install()
    running._FIRST_BACKOFF = 0.02
    worker._SCAN = 0.1
    passed = 0

    def reach(where: str) -> None:
        nonlocal passed
        passed += 1
        if passed == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(ctx: Any) -> str:
        line.say("began", task=ctx.id, attempt=ctx.attempt, at=time.monotonic())
        return f"{os.getpid()} {ctx.attempt} {time.monotonic()}"

    async def by_steps(ctx: TaskContext, payload: float) -> str:
        token = begin(ctx)
        try:
            for part in (0.25, 0.5, 0.75):
                await asyncio.sleep(payload)
                await ctx.progress(part, f"{part}")
        finally:
            line.say("ended", task=ctx.id, at=time.monotonic(), token=token)
        return token

    def on_a_thread(ctx: ThreadContext, payload: float) -> str:
        token = begin(ctx)
        try:
            time.sleep(payload)
            ctx.checkpoint()
        finally:
            line.say("ended", task=ctx.id, at=time.monotonic(), token=token)
        return token

    handlers: dict[str, Any] = {"steps": by_steps, "thread": on_a_thread}
    async with _opened(place) as cp:
        cp.store.boundary = reach
        with contextlib.suppress(SystemExit):
            await Worker(cp, handlers, concurrency=3, lease_seconds=_LEASE, grace=0.3).run()
    line.say("over")


@contextlib.asynccontextmanager
async def _opened(place: Place) -> AsyncIterator[Checkpointer]:
    """A checkpointer, once the server is there."""
    cp = place.checkpointer()
    while True:
        try:
            await cp.open()
            break
        except StoreUnreachable:
            await asyncio.sleep(0.05)
    try:
        yield cp
    finally:
        await cp.close()


async def _ask(line: Line, place: Place, count: int, chance: random.Random) -> None:
    """Create the tasks, and then say how far they are."""
    async with _opened(place) as cp:
        for _ in range(count):
            kind = chance.choice(["steps", "thread"])
            await cp.create_task(None, kind, chance.choice([0, 0.01, 0.05]), chance.randint(0, 2), max_retries=1_000)
        await cp.create_schedule("each second", "steps", 0, every=1, max_retries=1_000)
        line.say("asked")
        while await line.told_soon():
            try:
                tasks = await cp.list_tasks(limit=100_000) or []
                if all(task["status"] == "completed" for task in tasks) and await cp.schedules():
                    await cp.delete_schedule("each second")
                    tasks = await cp.list_tasks(limit=100_000) or []
            except ByssusError as error:
                line.say("away", why=str(error))
                continue
            left = sum(task["status"] != "completed" for task in tasks)
            found = [[each["id"], each["result"], each["retry_count"]] for each in tasks]
            line.say("far", left=left, tasks=found, ticks=[each["unique_key"] for each in tasks if each["schedule"]])


def _has_ended(actor: Actor) -> bool:
    """Whether the process is gone; it stays to be buried."""
    found = os.waitid(os.P_PID, actor.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    return found is not None


def _judge(tasks: list[Any], workers: list[Actor], stopped: set[int]) -> None:
    for task_id, result, retries in tasks:
        attempts = sorted(_attempts(task_id, workers), key=lambda each: each.began)
        tokens = {line["token"] for actor in workers for line in actor.lines("ended") if line["task"] == task_id}
        expect(result in tokens, "a task has a result that no attempt has returned", result, tokens)
        free = [each for each in attempts if each.worker not in stopped]
        for first, second in itertools.pairwise(free):
            together = first.ended - second.began
            expect(together <= 0, "two workers had one task at a time", task_id, first, second)
        expect(len(attempts) <= retries + 1, "an attempt was not counted", task_id, retries, attempts)


def _judge_ticks(keys: list[str]) -> None:
    """Each tick is a whole number of seconds after the first one, and has made one task."""
    ticks = sorted(key.removeprefix("schedule:each second:") for key in keys)
    expect(len(ticks) == len(set(ticks)), "a tick has made two tasks", ticks)
    between = [clock_of.seconds_between(ticks[0], tick) for tick in ticks]
    expect(all(seconds == round(seconds) for seconds in between), "a task was made at a time that is no tick", ticks)


def _attempts(task_id: str, workers: list[Actor]) -> list[Attempt]:
    found = []
    for actor in workers:
        ends = [line["at"] for line in actor.lines("ended") if line["task"] == task_id]
        for number, line in enumerate(each for each in actor.lines("began") if each["task"] == task_id):
            is_whole = number < len(ends)
            end = ends[number] if is_whole else line["at"]
            found.append(Attempt(actor.pid, line["at"], end, is_whole))
    return found
