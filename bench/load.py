"""Loading a thread of 10,000 messages, typed, against SELECT and json.loads; and what the event loop feels of it."""

from __future__ import annotations

import asyncio
import json
import time

from bench.measure import alternate, conversation, raw_append_many, raw_database, report, scratch
from byssus.checkpointer import SQLiteCheckpointer
from byssus.messages import encode

COUNT = 10_000


def main() -> None:
    folder = scratch()
    messages = conversation(COUNT)
    raw = raw_database(folder / "raw.db")
    raw_append_many(raw, "t", [(message.role, encode(message)) for message in messages])
    lags: list[float] = []

    with asyncio.Runner() as runner:
        cp = runner.run(SQLiteCheckpointer(folder / "byssus.db").open())
        runner.run(cp.append("t", messages))

        def raw_time() -> float:
            started = time.perf_counter()
            rows = raw.execute("SELECT body FROM messages WHERE branch = 1 ORDER BY seq").fetchall()
            values = [json.loads(str(body)) for (body,) in rows]
            taken = time.perf_counter() - started
            assert len(values) == COUNT
            return taken

        async def load(watch: bool) -> float:
            watcher = asyncio.create_task(watch_lag(lags)) if watch else None
            await asyncio.sleep(0.01)
            started = time.perf_counter()
            thread = await cp.load("t")
            taken = time.perf_counter() - started
            if watcher is not None:
                watcher.cancel()
            assert thread is not None
            assert thread.messages == messages
            return taken

        base, ours, _ = alternate(
            9, raw_time, lambda: runner.run(load(watch=False)), lambda: runner.run(load(watch=True))
        )
        report(
            f"load {COUNT:,} messages, typed",
            f"{ours * 1e3:.1f} ms, raw {base * 1e3:.1f} ms",
            ours / base,
            1,
            at_least=False,
        )
        lags.sort()
        worst, typical = lags[-1] * 1e3, lags[len(lags) // 2] * 1e3
        print(f"  event-loop lag meanwhile: worst {worst:.1f} ms, median {typical:.2f} ms (bar: under 10 ms)")
        runner.run(cp.close())


async def watch_lag(lags: list[float]) -> None:
    """How much later than asked a one-millisecond sleep ends, again and again."""
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - started - 0.001)


if __name__ == "__main__":
    main()
