"""Durable appends (synchronous=FULL) through the checkpointer, against raw apsw with a commit for each message.

`--database postgres` does the same against raw psycopg.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time

from bench import append_postgres
from bench.measure import alternate, append_rate, message, raw_append, raw_database, report, scratch
from byssus.checkpointer import SQLiteCheckpointer
from byssus.messages import encode
from byssus.values import clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    append_postgres.main() if parser.parse_args().database == "postgres" else _sqlite()


def _sqlite() -> None:
    folder = scratch()
    said = message()
    raw = raw_database(folder / "raw.db")
    with asyncio.Runner() as runner:
        cp = runner.run(SQLiteCheckpointer(folder / "byssus.db").open())

        rounds = itertools.count()

        def raw_rate() -> float:
            turn = next(rounds)
            started = time.perf_counter()
            for i in range(1_000):
                raw_append(raw, f"{turn}-{i % 64}", "user", encode(said), clock.now())
            return 1_000 / (time.perf_counter() - started)

        base, one, many = alternate(
            7, raw_rate, lambda: runner.run(append_rate(cp, 1, 1_000)), lambda: runner.run(append_rate(cp, 64, 100))
        )
        report("append, 1 at a time", f"{one:,.0f}/s, raw {base:,.0f}/s", one / base, 0.55, at_least=True)
        report("append, 64 at a time", f"{many:,.0f}/s, raw {base:,.0f}/s", many / base, 7, at_least=True)

        async def cost_at(thread: str, count: int) -> float:
            started = time.perf_counter()
            for _ in range(count):
                await cp.append(thread, said)
            return (time.perf_counter() - started) / count * 1e6

        async def grow() -> None:
            for _ in range(100):
                await cp.append("long", [said] * 1_000)

        runner.run(grow())
        early, late = alternate(
            7,
            lambda: runner.run(cost_at(f"short-{time.monotonic_ns()}", 200)),
            lambda: runner.run(cost_at("long", 200)),
        )
        report(
            "append at message 100,000 against message 10",
            f"{late:.0f} us, {early:.0f} us",
            late / early,
            1.15,
            at_least=False,
        )
        runner.run(cp.close())


if __name__ == "__main__":
    main()
