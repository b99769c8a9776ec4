"""A worker that dies by SIGKILL at its n-th commit, before or after it.

    python -m tests.worker.killed_child PLACE DIARY N

The diary is a file to which each step and each tool adds a line when it runs, and the handler when it knows a result.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from byssus.checkpointer import checkpointer_for
from byssus.worker import Worker
from tests.support import stepped

PLACE, DIARY, DIES_AT = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def note(_: str, line: str) -> None:
    with DIARY.open("a") as file:
        file.write(f"{line}\n")


async def main() -> None:
    async with checkpointer_for(PLACE) as cp:
        reached = 0

        def boundary(_: str) -> None:
            nonlocal reached
            reached += 1
            if reached == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)

        cp.store.boundary = boundary
        async with Worker(cp, stepped.handlers(note), app=stepped.app(note), concurrency=3):
            while any(task["status"] in ("pending", "running") for task in await cp.list_tasks() or []):
                await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main())
