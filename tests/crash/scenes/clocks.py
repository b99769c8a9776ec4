"""The machine's clock jumps, back or forth, by seconds or by years, while runs hold their leases.

All processes of the scene have one clock, which is the real one and an offset in shared memory. It stands where Python
asks for the time, so a Postgres server keeps its own: there, the clients are wrong and the server is right.
"""

from __future__ import annotations

import mmap
import random
import struct
import time
from pathlib import Path

from tests.crash.place import Place
from tests.crash.stage import runs
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import acknowledged, expect, judge

_JUMPS = (1, 29, 31, 61, 3_600, 86_400, 86_400 * 400)


class Clock:
    """A wall clock that can be set; `monotonic` goes on, as it does."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 16)
        self._real = time.time_ns

    def install(self) -> None:
        """In an actor: this is the time now."""
        time.time_ns = lambda: self._real() + self._offset()
        time.time = lambda: time.time_ns() / 1e9

    def jump(self, seconds: float) -> None:
        self._shared[:8] = struct.pack("q", self._offset() + int(seconds * 1e9))

    def _offset(self) -> int:
        offset: int = struct.unpack("q", self._shared[:8])[0]
        return offset


def clock(chance: random.Random, directory: Path, place: Place) -> None:
    """The clock jumps while a run goes on, and again after it was killed."""
    shared = Clock()
    recovery = chance.choice(["never", "retry"])

    async def drive(line: Line) -> None:
        """Prompt; the tool stands still until it is told to go on."""
        shared.install()
        async with place.checkpointer() as cp:
            text = line.told()
            with line.trying(text):
                await runs.agent(line, cp, place, "t", holds=True, recovery=recovery).prompt(text)

    async def meddle(line: Line) -> None:
        """Prompt the same thread each time that a text is read."""
        shared.install()
        async with place.checkpointer() as cp:
            while text := await line.told_soon():
                with line.trying(text):
                    agent = runs.agent(line, cp, place, "t", recovery=recovery)
                    await (agent.resume() if text == "resume" else agent.prompt(text))

    with Actor("driver", drive) as driver, Actor("meddler", meddle) as meddler:
        driver.tell("first")
        driver.hear("began")
        is_ahead = chance.random() < 0.5
        shared.jump((1 if is_ahead else -1) * chance.choice(_JUMPS))
        is_taken = meddler.ask("meddled", "done", "refused")["what"] == "done"
        expect(is_ahead or not is_taken, "a thread was taken from a run that lives, with a clock that went back")
        driver.tell("go on")
        answer = driver.hear("done", "refused")
        lost = answer.get("kind") == "LeaseLost"  # a clock that jumps ahead may end a lease, and the run hears of it
        expect(lost if is_taken else answer["what"] == "done", "two runs had one thread", is_taken, answer)
        driver.finish()
        expect(meddler.ask("second", "done", "refused")["what"] == "done", "a free thread is refused", meddler.said[-1])
        with Actor("killed", drive) as killed:
            killed.tell("third")
            killed.hear("began")
            shared.jump(chance.choice([-1, 1]) * chance.choice(_JUMPS))
            killed.kill()
        shared.jump(chance.choice([-1, 0, 1]) * chance.choice(_JUMPS))
        answer = meddler.ask("resume", "done", "refused")
        expect(answer["what"] == "done", "the run of a dead process is not taken over at once", answer)
        meddler.tell()
        meddler.finish()
    runs.judge_tools(place)
    judge(place, acknowledged([driver, meddler, killed]))
