"""What operations on a thread of 10, 10,000 and 1,000,000 messages cost: nothing but reading everything may grow.

Each figure is the best of several rounds. The bar compares the longest thread with the one before it, because a short
thread has less than a window to read. Memory is what Python allocates at most during one operation. `--lengths` and
`--rounds` for less; `--database postgres` starts a server, or uses the one that BYSSUS_TEST_POSTGRES names.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import time
import tracemalloc
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from bench.measure import conversation, message, place_of, report
from byssus import Agent, Model, SlidingWindow, TokenBudget, UserMessage
from byssus.checkpointer import Checkpointer, checkpointer_for
from byssus.cli import main as command
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.log import threads
from byssus.store.database import Tx
from byssus.values.following.cursors import Cursor, Seen, thread_mark
from byssus.values.thread_key import ThreadKey

CHUNK, TURN = 10_000, 4
WINDOW = 40
SMALL = 64_000  # bytes: what is less is not compared
Work = Callable[[], Awaitable[object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with place_of(options.database) as place, asyncio.Runner() as runner:
        cp = runner.run(checkpointer_for(place).open())
        taken: dict[str, list[float]] = {}
        held: dict[str, list[int]] = {}
        for length in options.lengths:
            started = time.perf_counter()
            runner.run(fill(cp, length))
            print(f"{length:,} messages, written in {time.perf_counter() - started:.1f} s", flush=True)
            measure(runner, Thread(cp, place, length), options.rounds, taken, held)
        runner.run(cp.close())
    compare(options.lengths, taken, held)


async def fill(cp: Checkpointer, length: int) -> None:
    """A thread of whole turns, written by our own append, with the rows that runs and their tool calls leave behind."""
    name = f"t{length}"
    for start in range(0, length, CHUNK):
        await cp.append(name, conversation(min(CHUNK, length - start)))
    for start in range(1, length - TURN, CHUNK):
        await cp.store.write(_add_runs, ThreadKey("", name), range(start, min(start + CHUNK, length - TURN), TURN))


def _add_runs(tx: Tx, thread_key: ThreadKey, seqs: range) -> None:
    thread = threads.find(tx, thread_key)
    assert thread is not None
    rows = [{"thread": thread.key, "branch": thread.branch, "id": uuid.uuid4().hex, "seq": seq} for seq in seqs]
    then = "'2026-01-01T00:00:00.000000Z'"
    tx.many(
        "INSERT INTO runs (thread, id, branch, first_seq, last_seq, began_at, ended_at, stop_reason, cause, attempts,"
        f" retries) VALUES (:thread, :id, :branch, :seq, :seq + 3, {then}, {then}, 'stop', 'prompt', 1, 0)",
        rows,
    )
    tx.many(
        "INSERT INTO tool_calls (thread, branch, reply, place, call_id, name, arguments, recovery, idempotency_key,"
        " run, status, attempts, started_at, ended_at) VALUES (:thread, :branch, :seq + 1, 0, 'call_1', 'look', '{}',"
        f" 'never', :id, :id, 'done', 1, {then}, {then})",
        rows,
    )


class Thread:
    """The operations on one thread. None of them leaves it longer than it was by more than a few messages a round."""

    def __init__(self, cp: Checkpointer, place: str, length: int) -> None:
        self._cp = cp
        self._place = place
        self._length = length
        self.name = f"t{length}"
        self._kept = self.agent(SlidingWindow(WINDOW), replies=10_000)

    def agent(self, *middleware: object, replies: int = 1, **options: Any) -> Agent:
        provider = ScriptedProvider(["y" * 300] * replies)
        return Agent(
            provider=provider,
            model=Model("instant"),
            checkpointer=self._cp,
            thread_id=self.name,
            middleware=list(middleware),
            **options,
        )

    def operations(self) -> dict[str, Work]:
        return {
            "load the last 40": lambda: self._cp.load(self.name, last=WINDOW),
            "prompt, SlidingWindow(40), new agent": lambda: self.agent(SlidingWindow(WINDOW)).prompt("x" * 300),
            "prompt, TokenBudget(4000), new agent": lambda: self.agent(TokenBudget(4_000)).prompt("x" * 300),
            "prompt, history=40, new agent": lambda: self.agent(history=WINDOW).prompt("x" * 300),
            "prompt, an agent that others overtook": lambda: self._kept.prompt("x" * 300),
            "prompt, the same agent again": lambda: self._kept.prompt("x" * 300),
            "prompt with checkpoint_every=5, new agent": lambda: self.agent(history=40, checkpoint_every=5).prompt("x"),
            "resume, new agent": self.resume,
            "checkpoint": lambda: self.agent(history=WINDOW).checkpoint(),
            "fork, at its head": lambda: self._cp.fork(self.name),
            "fork, in the middle": lambda: self._cp.fork(self.name, self._length // 2),
            "rewind, and back": self.rewind,
            "info": lambda: self._cp.info(self.name),
            "show --last 20": self.show,
            "follow, from near the end": self.follow,
            "prompt with a message's own id, new agent": self.named,
            "the last runs": lambda: self._cp.runs(self.name),
            "timeline of the last run": self.timeline,
        }

    async def resume(self) -> None:
        await self._cp.append(self.name, message())
        await self.agent(history=WINDOW).resume()

    async def rewind(self) -> None:
        before = await self._cp.rewind(self.name, self._length // 2)
        await self._cp.rewind(self.name, before)

    async def show(self) -> None:
        def run() -> None:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert command(["show", self.name, "--last", "20", "--db", self._place]) == 0
            assert "-- " in out.getvalue()

        await asyncio.to_thread(run)

    async def follow(self) -> None:
        """Read the last messages behind a cursor, and then one that is appended."""
        end = await self._cp.load(self.name, last=WINDOW)
        assert end is not None
        mark = thread_mark("", self.name, end.made[1])
        cursor = Cursor(mark, end.position.branch, Seen(end.seqs[0]))
        told, behind = 0, len(end.messages) - 1
        async with contextlib.aclosing(self._cp.follow(self.name, after=str(cursor))) as items:
            async for item in items:
                told += item.type == "message"
                if told == behind:
                    await self._cp.append(self.name, message())
                elif told > behind:
                    break

    async def named(self) -> None:
        await self.agent(history=WINDOW).prompt(UserMessage("x", id=uuid.uuid4().hex))

    async def timeline(self) -> None:
        (run,) = await self._cp.runs(self.name, 1)
        assert await self._cp.timeline(run.id)

    async def everything(self) -> None:
        thread = await self._cp.load(self.name)
        assert thread is not None
        assert len(thread.messages) >= self._length


def measure(
    runner: asyncio.Runner, thread: Thread, rounds: int, taken: dict[str, list[float]], held: dict[str, list[int]]
) -> None:
    """Note the seconds that each operation takes, and what it holds at most."""
    operations = thread.operations()
    times: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(rounds + 1):  # in turns, and the first one only warms up
        for name, work in operations.items():
            started = time.perf_counter()
            runner.run(_awaited(work))
            if turn:
                times[name].append(time.perf_counter() - started)
    for name, work in operations.items():
        taken.setdefault(name, []).append(min(times[name]))
        held.setdefault(name, []).append(peak(runner, work))
    started = time.perf_counter()
    runner.run(thread.everything())
    taken.setdefault(EVERYTHING, []).append(time.perf_counter() - started)


EVERYTHING = "load everything (grows)"


def peak(runner: asyncio.Runner, work: Work) -> int:
    """The bytes that Python has allocated at most during the work."""
    tracemalloc.start()
    try:
        runner.run(_awaited(work))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


async def _awaited(work: Work) -> None:
    await work()


def compare(lengths: list[int], taken: dict[str, list[float]], held: dict[str, list[int]]) -> None:
    print(f"\n{'':<42} {' '.join(f'{length:>22,}' for length in lengths)}")
    for name, seconds in taken.items():
        memory = held.get(name, [0] * len(seconds))
        cells = (f"{time * 1e3:>9.2f} ms {size / 1e3:>6,.0f} kB" for time, size in zip(seconds, memory, strict=True))
        print(f"{name:<42} {' '.join(f'{cell:>22}' for cell in cells)}")
    print()
    if len(lengths) < 2:
        return
    for name, sizes in held.items():
        long, short = taken[name][-1], taken[name][-2]
        report(f"{name}: time", f"{long * 1e3:.2f} ms, {short * 1e3:.2f} ms", long / short, 1.5, at_least=False)
        most, less = (max(size, SMALL) for size in (sizes[-1], sizes[-2]))
        figure = f"{sizes[-1] / 1e3:,.0f} kB, {sizes[-2] / 1e3:,.0f} kB"
        report(f"{name}: memory", figure, most / less, 1.25, at_least=False)


if __name__ == "__main__":
    main()
