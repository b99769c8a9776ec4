"""Followers: what 2,000 idle ones cost, and how long a commit takes to reach one, in the same process and in another.

python -m bench.follow [--database postgres]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.measure import place_of
from byssus import UserMessage
from byssus.checkpointer import Checkpointer, MessageAdded, checkpointer_for

FOLLOWERS = 2_000
IDLE_SECONDS = 5.0
COMMITS = 300

WRITER = """
import asyncio, sys, time
from byssus import UserMessage
from byssus.checkpointer import checkpointer_for

async def main():
    async with checkpointer_for(sys.argv[1]) as cp:
        for number in range(int(sys.argv[2])):
            await cp.append("there", UserMessage("x"))
            print(time.time(), flush=True)
            await asyncio.sleep(0.01)

asyncio.run(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    with place_of(parser.parse_args().database) as place:
        asyncio.run(_main(place))


async def _main(place: str) -> None:
    async with checkpointer_for(place) as cp:
        await _idle(cp)
        await _here(cp)
        await _there(cp, place)


async def _idle(cp: Checkpointer) -> None:
    for first in range(0, FOLLOWERS, 100):
        await asyncio.gather(*(cp.append(f"t{n}", UserMessage("x")) for n in range(first, first + 100)))
    gc.collect()
    before = _resident()
    caught_up = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(_follow(cp, f"t{number}", caught_up)) for number in range(FOLLOWERS)]
    for _ in tasks:
        await caught_up.acquire()
    gc.collect()
    each = (_resident() - before) / FOLLOWERS / 1e3
    await asyncio.sleep(3)  # the first look at all threads reads each of them once more
    began, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(IDLE_SECONDS)
    share = (time.process_time() - used) / (time.perf_counter() - began) * 100
    print(f"  {FOLLOWERS:,} idle followers: {share:.2f} % of a core (bar: 3), {each:.1f} kB each (bar: 25)")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _follow(cp: Checkpointer, thread_id: str, caught_up: asyncio.Semaphore) -> None:
    async for item in cp.follow(thread_id):
        if item.type == "caught_up":
            caught_up.release()


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _here(cp: Checkpointer) -> None:
    heard: asyncio.Queue[float] = asyncio.Queue()
    task = asyncio.create_task(_note(cp, "here", heard))
    delays = []
    for _ in range(COMMITS):
        await cp.append("here", UserMessage("x"))
        committed = time.time()
        delays.append(await heard.get() - committed)
        await asyncio.sleep(0.005)
    task.cancel()
    _report("in the same process", delays, 30)


async def _there(cp: Checkpointer, place: str) -> None:
    heard: asyncio.Queue[float] = asyncio.Queue()
    task = asyncio.create_task(_note(cp, "there", heard))
    command = [sys.executable, "-c", WRITER, place, str(COMMITS)]
    writer = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    said, _ = await writer.communicate()
    delays = [await heard.get() - float(line) for line in said.split()]
    task.cancel()
    _report("in another process", delays, 150)


async def _note(cp: Checkpointer, thread_id: str, heard: asyncio.Queue[float]) -> None:
    async for item in cp.follow(thread_id):
        if isinstance(item, MessageAdded):
            heard.put_nowait(time.time())


def _report(where: str, delays: list[float], bar: int) -> None:
    delays = sorted(max(delay, 0.0) for delay in delays)
    middle, late = delays[len(delays) // 2] * 1e3, delays[int(len(delays) * 0.99)] * 1e3
    print(f"  commit to follower, {where}: median {middle:.1f} ms, p99 {late:.1f} ms (bar: {bar})")


if __name__ == "__main__":
    main()
