"""A worker that does one task after the other, and dies by SIGKILL at its n-th boundary: before a commit or after it.

    python -m tests.worker.boundary_child PLACE DIARY N

The diary is a file to which the step adds a line when it runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from byssus.checkpointer import Checkpointer, checkpointer_for
from byssus.worker import Retry, TaskContext, Worker, running, worker
from tests.support.steps import pass_time

HASTE = 0.01  # seconds until the first retry, and between two looks for tasks of dead workers


def handlers(diary: Path) -> dict[str, Callable[..., Any]]:
    def act() -> str:
        with diary.open("a") as file:
            file.write("ran\n")
        return "step"

    async def long(ctx: TaskContext, payload: Any) -> list[Any]:
        await ctx.progress(0.5, "half")
        found = await ctx.step("act", act, recovery="retry")
        if ctx.attempt == 1:
            raise Retry(after=0)
        await ctx.sleep(hours=1)
        return [found, payload]

    async def short(ctx: TaskContext, payload: Any) -> Any:
        return payload

    async def wrong(ctx: TaskContext, payload: Any) -> None:
        raise ValueError(payload)

    return {"long": long, "short": short, "wrong": wrong}


async def to_the_end(cp: Checkpointer, diary: Path) -> None:
    """Do all that there is to do, also what sleeps."""
    alone = Worker(cp, handlers(diary), concurrency=1)
    await alone.drained()
    await pass_time(cp)
    await alone.drained()


async def main(place: str, diary: Path, dies_at: int) -> None:
    running._FIRST_BACKOFF = worker._SCAN = HASTE
    async with checkpointer_for(place) as cp:
        reached = 0

        def boundary(_: str) -> None:
            nonlocal reached
            reached += 1
            if reached == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        cp.store.boundary = boundary
        await to_the_end(cp, diary)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
