"""Tasks are cancelled while they write: by asyncio, by anyio, on every event loop that there is.

A cancelled write is there once, or not at all. One that returned is there. While a lock holds all of them up, those who
wait for the end of theirs do not keep the processor busy.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio

from byssus import UserMessage
from byssus.checkpointer import Checkpointer
from tests.crash.place import Place
from tests.crash.scenes.locks import hold
from tests.crash.stage import runs
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import acknowledged, expect, judge

_LOCKED = 0.6  # seconds
_TASKS = 60

Main = Coroutine[Any, Any, None]


def _plain(main: Main) -> None:
    asyncio.run(main)


def _eager(main: Main) -> None:
    async def start() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        await main

    asyncio.run(start())


def _uvloop(main: Main) -> None:
    importlib.import_module("uvloop").run(main)


def _anyio(main: Main) -> None:
    async def start() -> None:
        await main

    anyio.run(start)


def loops() -> dict[str, Callable[[Main], None]]:
    found: dict[str, Callable[[Main], None]] = {"asyncio": _plain, "anyio": _anyio}
    if sys.version_info >= (3, 12):
        found["eager"] = _eager
    if importlib.util.find_spec("uvloop") is not None:
        found["uvloop"] = _uvloop
    return found


def cancelling(chance: random.Random, directory: Path, place: Place) -> None:
    """Writes and runs are cancelled at any moment, also while they wait for a lock."""
    actors = []
    for name, run in loops().items():
        seed = chance.random()
        with (
            Actor(name, lambda line: run(_churn(line, place, name, random.Random(seed)))) as churner,  # noqa: B023
            Actor("holder", lambda line: hold(line, place)) as holder,
        ):
            churner.hear("open")
            churner.hear("churned")
            holder.ask("hold", "held")
            churner.tell("wait")
            churner.hear("waiting")
            churner.listen_for(_LOCKED)
            holder.ask("release", "released")
            used = churner.hear("waited")["cpu"]
            expect(used < 0.6 * _LOCKED, f"{used:.2f} s of CPU in a wait of {_LOCKED:g} s")
            holder.tell()
            churner.finish()
            actors.append(churner)
    tried: dict[str, list[str]] = {}
    for actor in actors:
        for line in actor.lines("tried"):
            tried.setdefault(line["thread"], []).append(line["text"])
    found = judge(place, acknowledged(actors))
    for thread, texts in tried.items():
        twice = [text for text in texts if found.texts.get(thread, []).count(text) > 1]
        expect(not twice, "a cancelled write is there twice", twice)
    runs.judge_tools(place)


async def _churn(line: Line, place: Place, name: str, chance: random.Random) -> None:
    async with place.checkpointer() as cp:
        line.say("open")
        await asyncio.gather(*(_write(line, cp, f"{name}-{number}", chance) for number in range(_TASKS)))
        for number in range(3):
            await _prompt(line, cp, place, f"{name}-run-{number}", chance)
        line.say("churned")
        await line.told_soon()
        await _wait_under_lock(line, cp, name)


async def _write(line: Line, cp: Checkpointer, text: str, chance: random.Random) -> None:
    """Append a message, and perhaps cancel that at once, or soon."""
    thread, seconds = f"t{chance.randrange(4)}", chance.choice([0, 0, 0.0005, 0.002, 0.01, 0.05])
    line.say("tried", thread=thread, text=text)
    with line.trying("append"):
        if await _cancelled(cp.append(thread, UserMessage(text)), chance.choice(_WAYS), seconds):
            return
        line.say("stored", thread=thread, text=text)


async def _prompt(line: Line, cp: Checkpointer, place: Place, thread: str, chance: random.Random) -> None:
    """A run that is cancelled somewhere, and one after it, which finds the thread free."""
    agent = runs.agent(line, cp, place, thread, calls=3)
    with line.trying("prompt"):
        await _cancelled(agent.prompt("first"), chance.choice(_WAYS), chance.choice([0, 0.001, 0.005, 0.02]))
    await runs.agent(line, cp, place, thread, wait=20).prompt("second")


async def _wait_under_lock(line: Line, cp: Checkpointer, name: str) -> None:
    """All writes are held up and all who wait for them are cancelled: they wait for the outcome, and quietly."""
    writes = []
    for number, way in enumerate(_WAYS):
        line.say("tried", thread="held", text=f"{name}-held-{number}")
        write = cp.append("held", UserMessage(f"{name}-held-{number}"))
        writes.append(asyncio.create_task(_cancelled(write, way, 0.05)))
    began = time.process_time()
    line.say("waiting")
    await asyncio.gather(*writes)
    line.say("waited", cpu=time.process_time() - began)


# --- ways to cancel ---------------------------------------------------------------------------------------------------


async def _cancelled(work: Coroutine[Any, Any, Any], way: Callable[..., Any], seconds: float) -> bool:
    """Whether it was cancelled."""
    try:
        await way(work, seconds)
    except (TimeoutError, asyncio.CancelledError):
        return True
    return False


async def _by_task(work: Coroutine[Any, Any, Any], seconds: float) -> None:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(seconds)
    task.cancel()
    await task


async def _by_timeout(work: Coroutine[Any, Any, Any], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await work


async def _by_wait_for(work: Coroutine[Any, Any, Any], seconds: float) -> None:
    await asyncio.wait_for(work, seconds)


async def _by_scope(work: Coroutine[Any, Any, Any], seconds: float) -> None:
    with anyio.fail_after(seconds):
        await work


async def _by_group(work: Coroutine[Any, Any, Any], seconds: float) -> None:
    is_done = False

    async def go_on() -> None:
        nonlocal is_done
        await work
        is_done = True

    async with anyio.create_task_group() as group:
        group.start_soon(go_on)
        await anyio.sleep(seconds)
        group.cancel_scope.cancel()
    if not is_done:
        raise TimeoutError


_WAYS = (_by_task, _by_timeout, _by_wait_for, _by_scope, _by_group)
