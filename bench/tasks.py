"""Tasks that do nothing: how many a second, how soon one starts, and what it costs to claim one of many.

procrastinate is measured on the same Postgres, and huey on SQLite, in the same run: `make bench` installs them.

python -m bench.tasks [--database sqlite|postgres] [--tasks 2000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

import psycopg

from bench.measure import place_of, report, scratch
from bench.tasks_peers import AT_ONCE, QUEUES, RECORD, Queue

PEERS = {"sqlite": "huey", "postgres": "procrastinate"}
PROCESSES = (1, 4)
WAITING = (10, 100_000)
LATENCIES = 200
PAUSE = 0.01  # seconds between two tasks of which the latency is measured
TIME_LIMIT = 120.0
CLAIM = 1.25  # what a task may cost with many waiting ones: the same, on a noisy machine


class Figures(NamedTuple):
    """Of one queue: tasks a second, and the latencies of its tasks in milliseconds."""

    rate: float
    latencies: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=[*PEERS], action="append")
    parser.add_argument("--tasks", type=int, default=2_000, help="of which the rate is measured")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    args = parser.parse_args()
    for database in args.database or PEERS:
        with _places(database) as places:
            asyncio.run(_compare(database, places, args.tasks, args.rounds))


@contextlib.contextmanager
def _places(database: str) -> Iterator[Iterator[str]]:
    """New databases, one after the other."""
    if database == "sqlite":
        folder = scratch()
        yield (str(folder / f"{number}.db") for number in range(1_000))
        return
    with place_of(database) as dsn, contextlib.closing(_new_databases(dsn)) as databases:
        yield databases


def _new_databases(dsn: str) -> Generator[str, None, None]:
    parts = urlsplit(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for number in range(1_000):
            name = f"bench_{os.getpid()}_{number}"
            connection.execute(f"CREATE DATABASE {name}")
            try:
                yield urlunsplit(parts._replace(path=f"/{name}"))
            finally:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def _compare(database: str, places: Iterator[str], tasks: int, rounds: int) -> None:
    print(f"{database}: {AT_ONCE} tasks at a time in each process, {tasks:,} tasks", flush=True)
    peer = PEERS[database]
    for processes in PROCESSES:
        ours, theirs = await _alternate(rounds, ("byssus", peer), places, tasks, 10, processes)
        what = f"{processes} process{'es' * (processes > 1)}"
        figure = f"{ours.rate:,.0f}/s, {peer} {theirs.rate:,.0f}/s"
        _report(peer, f"tasks a second, {what}", figure, ours.rate / theirs.rate, at_least=True)
        for name, of in (("median", statistics.median), ("95 %", _late)):
            mine, other = of(ours.latencies), of(theirs.latencies)
            figure = f"{mine:.1f} ms, {peer} {other:.1f} ms"
            _report(peer, f"create to start, {what}, {name}", figure, mine / other, at_least=False)
    few, many = [await _alternate(rounds, ("byssus", peer), places, tasks, waiting, 1) for waiting in WAITING]
    for name, before, after in zip(("byssus", peer), few, many, strict=True):
        figure = f"{1e6 / after.rate:,.0f} us, {1e6 / before.rate:,.0f} us"
        what = f"{name}: a task with {WAITING[1]:,} waiting, against {WAITING[0]}"
        if name == "byssus":
            report(what, figure, before.rate / after.rate, CLAIM, at_least=False)
        else:
            _print(what, figure, before.rate / after.rate)


def _report(peer: str, what: str, figure: str, ratio: float, *, at_least: bool) -> None:
    """huey has no leases: a task is gone when its worker dies. So it is no bar, and is there to compare with."""
    if peer == "huey":
        _print(what, figure, ratio)
    else:
        report(what, figure, ratio, 1, at_least=at_least)


def _print(what: str, figure: str, ratio: float) -> None:
    print(f"{what:<58} {figure:<34} {ratio:8.2f} x", flush=True)


def _late(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


async def _alternate(
    rounds: int, names: tuple[str, ...], places: Iterator[str], tasks: int, waiting: int, processes: int
) -> list[Figures]:
    """The median rate of each queue, and all latencies; the queues take turns."""
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(await _measure(name, next(places), tasks, waiting, processes))
    return [
        Figures(statistics.median(each.rate for each in figures), [one for each in figures for one in each.latencies])
        for figures in found.values()
    ]


async def _measure(name: str, place: str, tasks: int, waiting: int, processes: int) -> Figures:
    queue = QUEUES[name](place)
    await queue.open()
    try:
        await queue.fill(tasks + waiting)
        async with _workers(queue, processes) as started:
            times = [(await started.get())[0] for _ in range(tasks)]
            rate = (tasks - 1) / (times[-1] - times[0])
            latencies = [] if waiting > 10 else await _latencies(queue, started, waiting)
    finally:
        await queue.close()
    return Figures(rate, latencies)


async def _latencies(queue: Queue, started: asyncio.Queue[tuple[float, int]], left: int) -> list[float]:
    """How long new tasks take to start while the workers have nothing else to do, in milliseconds."""
    for _ in range(left):
        await started.get()
    found = []
    for number in range(LATENCIES):
        await asyncio.sleep(PAUSE)
        created = time.monotonic()
        await queue.create(number)
        found.append((await started.get())[0] - created)
    return [each * 1e3 for each in found]


@contextlib.asynccontextmanager
async def _workers(queue: Queue, processes: int) -> AsyncIterator[asyncio.Queue[tuple[float, int]]]:
    """Processes that work on the queue, and what their handlers tell."""
    reading, writing = os.pipe()
    command = [
        sys.executable,
        "-c",
        "from bench import tasks_peers; tasks_peers.main()",
        queue.name,
        queue.place,
        str(writing),
    ]
    workers = [subprocess.Popen(command, pass_fds=[writing]) for _ in range(processes)]
    os.close(writing)
    started: asyncio.Queue[tuple[float, int]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(reading, _take_in, reading, started)
    try:
        async with asyncio.timeout(TIME_LIMIT):
            yield started
    finally:
        loop.remove_reader(reading)
        for worker in workers:
            worker.kill()
            worker.wait()
        os.close(reading)


def _take_in(pipe: int, started: asyncio.Queue[tuple[float, int]]) -> None:
    """Writes of one record are never cut up, and neither is what a reader gets of them, if its size fits."""
    data = os.read(pipe, RECORD.size * 1_000)
    for record in RECORD.iter_unpack(data):
        started.put_nowait(record)


if __name__ == "__main__":
    main()
