"""The process whose power fails: it works as others do, and everything that it writes and is told goes into a log.

    python -m tests.crash.power_scenes SCENE DIRECTORY SEED [DURABILITY]

It ends in good order; the log is what counts. `crowd` has agents and threads that append side by side, checkpoints of
the WAL in between, and a second opening. `heavy` writes so much that the WAL is folded into the file and begun again by
itself. `failing` is a crowd on a disk that now and then fails to sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import apsw

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import Durability, SQLiteCheckpointer
from byssus.errors import ByssusError, StoreError
from byssus.events import Event, MessageEnd, ToolExecutionEnd
from byssus.messages import UserMessage
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.store import owners
from tests.crash.power import Log, Told, recording

DATABASE = "x.db"
SHARED = "shared"
_MODES = (
    apsw.SQLITE_CHECKPOINT_PASSIVE,
    apsw.SQLITE_CHECKPOINT_FULL,
    apsw.SQLITE_CHECKPOINT_RESTART,
    apsw.SQLITE_CHECKPOINT_TRUNCATE,
)


def body(message_id: str, size: int) -> str:
    """A text that tells whether it is whole."""
    return f"{message_id}:{size}:".ljust(size, message_id[-1])


def is_whole(message_id: str, text: str) -> bool:
    return text == body(message_id, int(text.split(":")[1]))


@tool
async def quick(size: int) -> str:
    return "q" * size


@tool
def slow(size: int) -> str:
    return "s" * size


class Scene:
    """What the parts of a scene share."""

    def __init__(self, directory: Path, seed: str, durability: Durability) -> None:
        self.path = directory / DATABASE
        self.seed = seed
        self.durability = durability
        self.log: Log = []
        self.heal: Callable[[], None] = lambda: None

    def checkpointer(self) -> SQLiteCheckpointer:
        return SQLiteCheckpointer(self.path, durability=self.durability)

    # --- threads that append ------------------------------------------------------------------------------------------

    async def append(self, source: str, rounds: int, sizes: tuple[int, ...], *, checkpoints: float) -> None:
        """Append to a thread of its own and to one that others write too, a few messages at a time."""
        rng = random.Random(f"{self.seed} {source}")
        number = 0
        async with self.checkpointer() as cp:
            for _ in range(rounds):
                thread = rng.choice((source, SHARED))
                ids = tuple(f"{source}-{number + i}" for i in range(rng.choice((1, 1, 1, 3))))
                batch = [UserMessage(body(message_id, rng.choice(sizes)), id=message_id) for message_id in ids]
                self.log.append(Told("began", source, thread, ids))
                try:
                    await cp.append(thread, batch)
                except StoreError:
                    continue  # the same ids again: it was not stored, so nobody may find it later beside its successor
                self.log.append(Told("done", source, thread, ids))
                number += len(ids)
                if rng.random() < checkpoints:
                    self.fold(rng.choice(_MODES))

    def fold(self, mode: int) -> None:
        """Checkpoint the WAL by another connection, as a second program might."""
        connection = apsw.Connection(str(self.path))
        try:
            connection.set_busy_timeout(10_000)
            connection.pragma("user_version")  # a connection that has read nothing does not know that there is a WAL
            with contextlib.suppress(apsw.BusyError, apsw.IOError):
                connection.wal_checkpoint(mode=mode)
        finally:
            connection.close()

    # --- agents -------------------------------------------------------------------------------------------------------

    async def talk(self, source: str, rounds: int) -> None:
        calls = [
            ToolCall("c1", "quick", {"size": 10}),
            ToolCall("c2", "slow", {"size": 9_000}),
            ToolCall("c3", "quick"),
        ]
        script: list[Step] = [calls, "done"]
        async with self.checkpointer() as cp:
            agent = Agent(
                provider=ScriptedProvider(script * 10 * rounds),
                model=Model("m"),
                tools=[quick, slow],
                checkpointer=cp,
                thread_id=source,
            )
            agent.subscribe(lambda event: self.hear(source, event))
            for number in range(rounds):
                agent.state.extra["round"] = number
                with contextlib.suppress(ByssusError):  # what counts is what it was told before
                    await agent.prompt(f"prompt {number}")

    def hear(self, source: str, event: Event) -> None:
        if isinstance(event, MessageEnd) and event.stored:
            self.log.append(Told("message", source, source, (str(getattr(event.message, "id", None)),)))
        elif isinstance(event, ToolExecutionEnd) and event.stored:
            self.log.append(Told("result", source, source, (str(event.result.id),)))

    # --- scenes -------------------------------------------------------------------------------------------------------

    def crowd(self) -> None:
        """Each appends on an event loop of its own; they share the store below."""
        sizes = (100, 100, 2_000, 12_000)

        def append(name: str) -> None:
            asyncio.run(self.append(name, 16, sizes, checkpoints=0.2))

        others = [threading.Thread(target=append, args=[name], name=name) for name in ("a", "b", "c")]

        async def main() -> None:
            async with self.checkpointer():
                for other in others:
                    other.start()
                await asyncio.gather(self.talk("agent-1", 3), self.talk("agent-2", 3))
                await asyncio.gather(*(asyncio.to_thread(other.join) for other in others))
                # SQLite ignores a sync that fails while it closes a file; apsw raises what its VFS raised all the same.
                self.heal()

        asyncio.run(main())
        asyncio.run(self.append("late", 5, sizes, checkpoints=0.2))

    def heavy(self) -> None:
        async def main() -> None:
            await asyncio.gather(
                self.append("a", 24, (300_000, 500_000), checkpoints=0),
                self.append("b", 24, (300_000, 5_000), checkpoints=0),
                self.talk("agent-1", 2),
            )

        asyncio.run(main())


def main(scene: str, directory: Path, seed: str, durability: Durability = "full") -> None:
    vars(owners)["_boot"] = lambda: "before-the-outage"  # a machine that lost its power boots again
    made = Scene(directory, seed, durability)
    with recording(made.log) as recorder:
        made.heal = recorder.heal
        if scene == "failing":
            recorder.failing_wal_syncs.update(random.Random(seed).sample(range(4, 90), 25))
        if scene == "heavy":
            made.heavy()
        else:
            made.crowd()
    (directory / "log").write_bytes(pickle.dumps(made.log))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])  # type: ignore[arg-type]
