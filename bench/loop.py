"""Persisted prompts with an instant model, against the raw commits that they need; and the cost of a text delta."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from bench.measure import alternate, message, raw_append, raw_database, report, scratch
from holdfast import Agent, Model, ToolCall, clock, tool
from holdfast.checkpointer import SQLiteCheckpointer
from holdfast.events import Event
from holdfast.messages import encode
from holdfast.providers.scripted import ScriptedProvider

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
        self._raw = raw_database(folder / "raw.db")
        self._cp = runner.run(SQLiteCheckpointer(folder / "holdfast.db").open())
        self._round = 0
        self.first: list[float] = []
        self.last: list[float] = []

    def raw_commits(self, count: int) -> float:
        """As many durable commits as a prompt needs: seconds for one prompt."""
        body = encode(message())
        started = time.perf_counter()
        for _ in range(PROMPTS):
            for _ in range(count):
                raw_append(self._raw, "t", "user", body, clock.now())
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


def main() -> None:
    with asyncio.Runner() as runner:
        bench = Bench(scratch(), runner)
        two, five, plain, with_tool, delta = alternate(
            5, lambda: bench.raw_commits(2), lambda: bench.raw_commits(5), bench.plain, bench.with_tool, bench.delta
        )
        show("persisted prompt (2 commits)", plain, two)
        show("persisted prompt with a tool call (5 commits)", with_tool, five)
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


def show(what: str, ours: float, raw: float) -> None:
    report(what, f"{ours * 1e6:.0f} us, raw {raw * 1e6:.0f} us", ours / raw, 2, at_least=False)


if __name__ == "__main__":
    main()
