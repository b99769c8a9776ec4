"""Persisted prompts with an instant model, against the raw commits that they need; and the cost of a text delta.

A prompt has four durable steps: the lease is taken, the question stored, the reply stored, the lease given back. Code
that goes step by step makes a commit of each; byssus makes two of them, because a commit can hold more than one step.
A tool call adds three: the reply that asks for it, its start, and its result.

Raw is plain apsw on one thread, without an event loop, with the rows of the steps. A bare hop is the least that a
program pays whose event loop never waits for a disk: one thread hands a commit to another and is woken when it is done.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.measure import alternate, report, scratch
from bench.raw_run import RawRun
from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import SQLiteCheckpointer
from byssus.events import Event
from byssus.providers.scripted import ScriptedProvider

PROMPTS = 200
TOOL_PROMPTS = 100
DELTAS = 5_000
MODEL = Model("instant")


@tool
async def look() -> str:
    """Look."""
    return "seen"


class Bench:
    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._raw = RawRun(folder / "raw.db")
        self._beside = Beside(RawRun(folder / "beside.db"))
        self._cp = runner.run(SQLiteCheckpointer(folder / "byssus.db").open())
        self._round = 0
        self.first: list[float] = []
        self.last: list[float] = []

    def raw(self, prompt: Callable[[RawRun], None]) -> float:
        """Seconds for what a prompt needs, on one thread."""
        started = time.perf_counter()
        for _ in range(PROMPTS):
            prompt(self._raw)
        return (time.perf_counter() - started) / PROMPTS

    def hops(self) -> float:
        """Seconds for the two commits of a prompt, each made by another thread while the event loop waits."""

        async def run() -> None:
            for _ in range(PROMPTS):
                await self._beside.do(RawRun.ask)
                await self._beside.do(RawRun.reply)

        started = time.perf_counter()
        self._runner.run(run())
        return (time.perf_counter() - started) / PROMPTS

    def prompts(self, agent: Agent, count: int) -> list[float]:
        async def run() -> list[float]:
            taken = []
            for _ in range(count):
                started = time.perf_counter()
                await agent.prompt("x" * 300)
                taken.append(time.perf_counter() - started)
            return taken

        return self._runner.run(run())

    def agent(self, steps: list[object], **options: object) -> Agent:
        self._round += 1
        provider = ScriptedProvider(steps)  # type: ignore[arg-type]
        return Agent(
            provider=provider,
            model=MODEL,
            checkpointer=self._cp,
            thread_id=f"t{self._round}",
            **options,  # type: ignore[arg-type]
        )

    def plain(self) -> float:
        """Seconds for a prompt, and notes what the first and the last ones took."""
        taken = self.prompts(self.agent(["y" * 300] * PROMPTS), PROMPTS)
        self.first.append(statistics.median(taken[5:25]))
        self.last.append(statistics.median(taken[-20:]))
        return sum(taken) / len(taken)

    def with_tool(self) -> float:
        steps: list[object] = [[ToolCall("c1", "look", {})], "y" * 300] * TOOL_PROMPTS
        taken = self.prompts(self.agent(steps, tools=[look]), TOOL_PROMPTS)
        return sum(taken) / len(taken)

    def delta(self) -> float:
        """Seconds for one text delta that reaches a listener."""
        provider = ScriptedProvider(["word " * DELTAS])
        agent = Agent(provider=provider, model=MODEL)
        heard = 0
        times: list[float] = []

        def listener(event: Event) -> None:
            nonlocal heard
            if event.type == "message_update":
                heard += 1
                if event.stream_event.type in ("text_start", "text_end"):
                    times.append(time.perf_counter())

        agent.subscribe(listener)
        self._runner.run(agent.prompt("go"))
        assert heard >= DELTAS
        return (times[1] - times[0]) / DELTAS


class Beside:
    """A thread that does what others hand to it, and nothing else."""

    def __init__(self, raw: RawRun) -> None:
        self._raw = raw
        self._queue: queue.SimpleQueue[tuple[Callable[[RawRun], None], asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def do(self, what: Callable[[RawRun], None]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put((what, done))
        return done

    def _serve(self) -> None:
        while True:
            what, done = self._queue.get()
            what(self._raw)
            done.get_loop().call_soon_threadsafe(done.set_result, None)


def step_by_step(raw: RawRun) -> None:
    raw.take()
    raw.store_question()
    raw.store_reply()
    raw.give_back()


def folded(raw: RawRun) -> None:
    raw.ask()
    raw.reply()


def step_by_step_with_tool(raw: RawRun) -> None:
    raw.take()
    raw.store_question()
    raw.store_reply()
    raw.start_call()
    raw.end_call()
    raw.store_reply()
    raw.give_back()


def folded_with_tool(raw: RawRun) -> None:
    raw.ask()
    raw.store_reply()
    raw.start_call()
    raw.end_call()
    raw.reply()


def main() -> None:
    with asyncio.Runner() as runner:
        bench = Bench(scratch(), runner)
        raws = (step_by_step, folded, step_by_step_with_tool, folded_with_tool)
        four, two, seven, five, hops, plain, with_tool, delta = alternate(
            5, *(lambda raw=raw: bench.raw(raw) for raw in raws), bench.hops, bench.plain, bench.with_tool, bench.delta
        )
        print(f"a persisted prompt: {plain * 1e6:.0f} us; with a tool call: {with_tool * 1e6:.0f} us")
        against("prompt, against the two commits that it makes", plain, two, bar=2)
        against("  against two bare hops with those commits", plain, hops)
        against("  against its four steps committed one by one", plain, four)
        against("with a tool call, against the five commits that it makes", with_tool, five, bar=2)
        against("  against its seven steps committed one by one", with_tool, seven)
        first, last = statistics.median(bench.first), statistics.median(bench.last)
        report(
            "prompt 200 against prompt 1",
            f"{last * 1e6:.0f} us, {first * 1e6:.0f} us",
            last / first,
            1.15,
            at_least=False,
        )
        print(f"  one text delta to one listener: {delta * 1e6:.2f} us (bar: at most 10 us)")
        runner.run(bench._cp.close())


def against(what: str, ours: float, raw: float, *, bar: float | None = None) -> None:
    figure = f"raw {raw * 1e6:.0f} us"
    if bar is None:
        print(f"{what:<58} {figure:<34} {ours / raw:8.2f} x", flush=True)
    else:
        report(what, figure, ours / raw, bar, at_least=False)


if __name__ == "__main__":
    main()
