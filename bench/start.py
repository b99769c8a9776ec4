"""From a bare interpreter to an open database: import and open, each in a fresh process."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from bench.measure import scratch

CODE = """
import time
started = time.perf_counter()
import asyncio
asyncio_done = time.perf_counter()
from byssus import Agent
from byssus.checkpointer import SQLiteCheckpointer
imported = time.perf_counter()
async def main():
    async with SQLiteCheckpointer({path!r}) as cp:
        opened = time.perf_counter()
        print(asyncio_done - started, imported - asyncio_done, opened - imported)
asyncio.run(main())
"""


def main() -> None:
    folder = scratch()
    for what, name in (("a new file", "{}.db"), ("a file that exists", "same.db")):
        taken = [run(str(folder / name.format(turn))) for turn in range(12)][2:]
        asyncio_, import_, open_ = (statistics.median(column) * 1e3 for column in zip(*taken, strict=True))
        total = asyncio_ + import_ + open_
        print(
            f"import and open, {what}: {total:.0f} ms (asyncio {asyncio_:.0f}, byssus {import_:.0f}, "
            f"open {open_:.0f}; bar: under 80 ms) {'ok' if total < 80 else 'MISSED'}",
            flush=True,
        )


def run(path: str) -> list[float]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", CODE.format(path=path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return [float(part) for part in done.stdout.split()]


if __name__ == "__main__":
    main()
