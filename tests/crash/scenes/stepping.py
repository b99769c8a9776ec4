"""Workers die and stand still between the steps of their tasks, in them, and in the runs of their agents.

What must be true: each task is completed with the right result; a step whose result was known never runs again; and a
step or a tool that may not run twice does not, also in a worker that was stopped for longer than its lease. A prompt is
in its thread once.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from byssus.errors import ByssusError
from byssus.worker import Worker, running, worker
from tests.crash.place import Place
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import expect
from tests.support import stepped
from tests.support.agents import history
from tests.support.steps import pass_time

_LEASE = 0.6  # seconds
_WORKERS = 2
_PATIENCE = 60.0  # seconds until all tasks must have ended


def stepping(chance: random.Random, directory: Path, place: Place) -> None:
    """Workers are killed and stopped while they work off tasks with steps."""
    count, accidents = chance.randint(3, 9), chance.randint(4, 12)
    with Actor("asker", lambda line: _ask(line, place, count)) as asker:
        asker.hear("asked")
        at_work = [_worker(place, chance.randint(1, 40)) for _ in range(_WORKERS)]
        workers, stopped = list(at_work), set[int]()
        until = time.monotonic() + _PATIENCE
        try:
            while (answer := asker.ask("how far?", "far"))["left"] > 0:
                expect(time.monotonic() < until, "tasks do not come to their end", answer)
                for actor in list(at_work):
                    actor.listen_for(0.01)
                    if _has_ended(actor):
                        at_work.remove(actor)
                        dies_at = chance.randint(1, 40) if len(workers) < accidents else None
                        at_work.append(_worker(place, dies_at))
                        workers.append(at_work[-1])
                if len(stopped) < accidents / 4 and chance.random() < 0.2:
                    _stop(chance.choice(at_work), stopped, chance.choice([0.1, _LEASE * 2.5]))
        finally:
            for actor in workers:
                actor.kill()
        asker.tell("")
        asker.finish()
        for wrong in asker.lines("wrong"):
            expect(False, "a task has not ended as it should", wrong)
        _judge(workers, stopped)


def _stop(actor: Actor, stopped: set[int], seconds: float) -> None:
    stopped.add(actor.pid)
    actor.stand_still()
    time.sleep(seconds)
    actor.go_on()


def _worker(place: Place, dies_at: int | None) -> Actor:
    return Actor("worker", lambda line: _work(line, place, dies_at))


async def _work(line: Line, place: Place, dies_at: int | None) -> None:
    running._FIRST_BACKOFF = 0.02
    worker._SCAN = 0.1
    passed = 0

    def reach(where: str) -> None:
        nonlocal passed
        passed += 1
        if passed == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def note(of: str, what: str) -> None:
        line.say("noted", of=of, text=what, at=time.monotonic())

    async with place.checkpointer(lease_seconds=_LEASE) as cp:
        cp.store.boundary = reach
        handlers, app = stepped.handlers(note), stepped.app(note)
        await Worker(cp, handlers, app=app, concurrency=3, lease_seconds=_LEASE, grace=0.3).run()


async def _ask(line: Line, place: Place, count: int) -> None:
    """Create the tasks, say how far they are, let their time pass, and send what they wait for."""
    async with place.checkpointer() as cp:
        kinds = [("steps", "plain", "agent")[number % 3] for number in range(count)]
        for number, kind in enumerate(kinds):
            await cp.create_session(None, session_id=f"t{number}")
            await cp.create_task(f"t{number}", kind, {"prompt": "go"}, max_retries=1_000)
        line.say("asked")
        while await line.told_soon():
            tasks = await cp.list_tasks(limit=count) or []
            try:
                if any(task["run_at"] is not None for task in tasks):
                    await pass_time(cp)
                for task in tasks:
                    if task["waits_for"] == "approval":
                        await cp.send_event(task["id"], "approval", "approved")
            except ByssusError as error:  # it has ended meanwhile
                line.say("refused", why=str(error))
            left = [task["id"] for task in tasks if task["status"] not in ("completed", "failed")]
            line.say("far", left=len(left), tasks=left)
        for task in await cp.list_tasks(limit=count) or []:
            if why := stepped.problem(task["type"], task["status"], task["result"]):
                line.say("wrong", task=task["id"], type=task["type"], why=why, error=task["error"])
            said = await history(cp, task["session_id"] or "")
            if task["type"] == "agent" and said.count("user: go") != 1:
                line.say("wrong", task=task["id"], said=said)


def _has_ended(actor: Actor) -> bool:
    """Whether the process is gone; it stays to be buried."""
    return os.waitid(os.P_PID, actor.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _judge(workers: list[Actor], stopped: set[int]) -> None:
    noted = sorted(
        (line["at"], line["of"], line["text"], actor.pid) for actor in workers for line in actor.lines("noted")
    )
    for of in {name for _, name, _, _ in noted}:
        mine = [(text, pid) for _, name, text, pid in noted if name == of]
        for name in stepped.ONCE:
            ran = [text for text, _ in mine if text == f"ran {name}"]
            expect(len(ran) <= 1, "what may not run twice ran twice", of, mine)
        # One that was stopped between the record of a step's start and its function runs it late: that, no one can see.
        flaw = stepped.flaw([text for text, pid in mine if pid not in stopped])
        expect(flaw is None, "a step was repeated", of, flaw, mine)
