"""A worker that dies by SIGKILL at its n-th commit, before or after it; or that gets SIGTERM under a tool of its agent.

    python -m tests.worker.killed_child PLACE DIARY N
    python -m tests.worker.killed_child PLACE DIARY 0

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
    if DIES_AT == 0 and line == "ran look":
        os.kill(os.getpid(), signal.SIGTERM)


async def main() -> None:
    async with checkpointer_for(PLACE) as cp:
        reached = 0

        def boundary(_: str) -> None:
            nonlocal reached
            reached += 1
            if reached == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)

        cp.store.boundary = boundary
        worker = Worker(cp, stepped.handlers(note), app=stepped.app(note), concurrency=3)
        if DIES_AT == 0:
            await worker.run()
        async with worker:
            while any(task["status"] in ("pending", "running") for task in await cp.list_tasks() or []):
                await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main())
