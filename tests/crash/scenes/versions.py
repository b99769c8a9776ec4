"""An older version is still running when a newer one migrates the database.

The newer one is this code with one more migration, which adds an index of messages. What an older process writes after
that would be missing there: so it is refused, and what was acknowledged before is in it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from byssus import UserMessage
from byssus.store import schema
from byssus.store.postgres import server
from byssus.store.sqlite import file
from tests.crash.place import Place
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import acknowledged, expect

_MOST = 5_000  # messages that an older process writes to a thread, should nobody refuse them
_ADDED = "CREATE TABLE newer_index (key BIGINT NOT NULL); INSERT INTO newer_index SELECT key FROM messages;"
_LACKING = "SELECT COUNT(*) FROM messages WHERE key NOT IN (SELECT key FROM {}newer_index)"


def become_newer() -> None:
    """In an actor: know one more migration."""
    known: Callable[..., tuple[schema.Migration, ...]] = schema.migrations

    def migrations(dialect: str, **types: Any) -> tuple[schema.Migration, ...]:
        found = known(dialect, **types)
        return (*found, schema.Migration(found[-1].number + 1, "next.sql", _ADDED))

    for module in (schema, file, server):
        vars(module)["migrations"] = migrations


async def write(line: Line, place: Place, name: str, threads: int) -> None:
    """Append from several tasks until that is refused."""

    async def go_on(thread: str) -> None:
        for number in range(_MOST):
            try:
                await cp.append(thread, UserMessage(f"{name}-{number}"))
            except Exception as error:
                with line.trying("append"):
                    raise error
                return
            line.say("stored", thread=thread, text=f"{name}-{number}")

    async with place.checkpointer() as cp:
        line.say("open")
        await line.told_soon()
        await asyncio.gather(*(go_on(f"{name}-t{number}") for number in range(threads)))


def versions(chance: random.Random, directory: Path, place: Place) -> None:
    """A newer version migrates the database under processes of an older one."""

    async def upgrade(line: Line) -> None:
        become_newer()
        line.told()
        with line.trying("open"):
            async with place.checkpointer() as cp:
                line.say("newer")
                line.told()
                lacking = _LACKING.format(f'"{place.schema}".' if place.dsn else "")  # it is not one of our tables
                row = await cp.store.read(lambda tx: tx.one(f"SELECT COUNT(*), ({lacking}) FROM messages"))
                assert row is not None
                texts = {}
                for info in await cp.threads(limit=10**6):
                    thread = await cp.load(info.id)
                    texts[info.id] = [message.text for message in thread.messages] if thread else []
                line.say("found", count=row[0], lacking=row[1], texts=texts)

    async def open_late(line: Line) -> None:
        with line.trying("open"):
            async with place.checkpointer() as cp:
                await cp.append("late", UserMessage("late"))

    count = chance.randint(1, 3)
    olders = [_older(place, f"older{number}", chance.randint(1, 6)) for number in range(count)]  # all make the tables
    try:
        with Actor("newer", upgrade) as newer:
            for older in olders:
                older.hear("open")
                older.tell("go")
            for older in olders:
                older.hear("stored")
            newer.ask("open", "newer")
            for older in olders:
                older.finish()
            with Actor("late", open_late) as late:
                late.finish()
            found = newer.ask("look", "found")
            newer.finish()
    finally:
        for older in olders:
            older.kill()
    for actor in (*olders, late):
        kinds = {line["kind"] for line in actor.lines("refused")}
        expect(kinds == {"StoreUnusable"}, f"{actor.name} was not refused as it should be", kinds)
    told = acknowledged(olders)
    there = {thread: texts for thread, texts in found["texts"].items() if texts}
    expect(there == told, "what is there is not what was acknowledged", {k: len(v) for k, v in there.items()})
    expect(found["lacking"] == 0, f"{found['lacking']} messages of older processes are not in the newer index")


def _older(place: Place, name: str, threads: int) -> Actor:
    return Actor(name, lambda line: write(line, place, name, threads))
