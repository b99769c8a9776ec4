"""An open checkpointer for a test, and what is in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, Thread
from byssus.messages import encode
from tests.support.databases import Database


def with_cp(database: Database, use: Callable[[Checkpointer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await use(cp)

    asyncio.run(main())


async def with_users(cp: Checkpointer, *names: str) -> None:
    """Make users of whom their ids are all that matters."""
    for name in names:
        await cp.create_user(name, user_id=name)


async def loaded(cp: Checkpointer, thread_id: str) -> Thread:
    thread = await cp.load(thread_id)
    assert thread is not None
    return thread


async def texts(cp: Checkpointer, thread_id: str) -> list[str]:
    return [message.text for message in (await loaded(cp, thread_id)).messages]


async def fill_trip(cp: Checkpointer) -> None:
    """The thread "trip": six messages, and a checkpoint behind each second one."""
    said = [{"role": "user", "content": f"message {number}"} for number in range(1, 7)]
    for step in (1, 2, 3):
        tags = ["plan", "agreed"] if step == 2 else []
        metadata = CheckpointMetadata("trip", f"c{step}", step=step, tags=tags, summary=f"step {step}")
        await cp.put(Checkpoint(metadata, said[: 2 * step]))


async def content(cp: Checkpointer) -> str:
    """All that the database holds of a thread, in one text."""
    thread = await cp.load("t")
    assert thread is not None
    return "\n".join([*map(encode, thread.messages), str(thread.extra)])
