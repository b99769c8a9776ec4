"""A memory of 2,000 messages, 10 % of them marked: adding them one by one, and reading all, by a mark and without one.

Next to it, in the same run and at the same durability (WAL, synchronous=FULL): AgentScope's AsyncSQLAlchemyMemory. Both
are measured alone in their database, and beside 50,000 marks of other users. `--messages` and `--foreign` for fewer.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import TEXT, report, scratch

OVERLAY = Path(sys.prefix) / "agentscope"
EVERY = 10  # one message of so many is marked
ROUNDS = 20


class Figures(NamedTuple):
    """Milliseconds: of one add, and of each way of reading."""

    add: float
    everything: float
    marked: float
    unmarked: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000)
    parser.add_argument("--foreign", type=int, default=50_000)
    options = parser.parse_args()
    if importlib.util.find_spec("agentscope") is None:
        again_with_agentscope()
    asyncio.run(compare(options.messages, options.foreign))


def again_with_agentscope() -> None:
    """AgentScope needs another mcp than we do, and lies in a directory of its own."""
    if not OVERLAY.is_dir():
        sys.exit(f"{OVERLAY} is missing: run make setup")
    path = os.pathsep.join([str(OVERLAY), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "bench.memory", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode)


async def compare(messages: int, foreign: int) -> None:
    folder = scratch()
    alone = await ours(folder / "alone.db", messages, 0)
    crowded = await ours(folder / "crowded.db", messages, foreign)
    their_alone = await theirs(folder / "their-alone.db", messages, 0)
    their_crowded = await theirs(folder / "their-crowded.db", messages, foreign)
    beside = f"beside {foreign:,} marks"
    for where, mine, other in (("alone", alone, their_alone), (beside, crowded, their_crowded)):
        for name, bar in (("add", 5.0), ("everything", 1.0), ("marked", 1.0), ("unmarked", 1.0)):
            fast, slow = getattr(mine, name), getattr(other, name)
            report(f"{name}, {where}", f"{fast:.2f} ms, theirs {slow:.2f} ms", slow / fast, bar, at_least=True)
    for name in Figures._fields:
        before, after = getattr(alone, name), getattr(crowded, name)
        report(
            f"{name}, {beside} against alone", f"{after:.2f} ms, {before:.2f} ms", after / before, 1.25, at_least=False
        )


async def ours(path: Path, messages: int, foreign: int) -> Figures:
    from byssus.adapters.agentscope import SQLiteMemory  # noqa: PLC0415 - it needs AgentScope

    for number in range(0, foreign, 500):
        async with SQLiteMemory(path, user_id=f"other-{number}", session_id="main") as memory:
            await memory.add([said(place) for place in range(min(500, foreign - number))], marks="hint")
    async with SQLiteMemory(path, user_id="ann", session_id="main") as memory:
        return await measure(memory, messages)


async def theirs(path: Path, messages: int, foreign: int) -> Figures:
    from agentscope.memory import AsyncSQLAlchemyMemory  # noqa: PLC0415
    from sqlalchemy import event, insert  # noqa: PLC0415
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415

    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")

    event.listen(engine.sync_engine, "connect", durable)
    memory = AsyncSQLAlchemyMemory(engine, session_id="ann-main", user_id="ann")
    await memory.add(said(0))  # which makes the tables
    await memory.clear()
    for number in range(0, foreign, 500):
        other = AsyncSQLAlchemyMemory(engine, session_id=f"other-{number}", user_id=f"other-{number}")
        await other.add(said(0))
        rows = [(f"other-{number}-{place}", said(place)) for place in range(min(500, foreign - number))]
        async with engine.begin() as connection:
            values = [
                {"id": name, "msg": one.to_dict(), "session_id": f"other-{number}", "index": place + 1}
                for place, (name, one) in enumerate(rows)
            ]
            await connection.execute(insert(other.MessageTable), values)
            await connection.execute(
                insert(other.MessageMarkTable), [{"msg_id": name, "mark": "hint"} for name, _ in rows]
            )
        await other.close()
    figures = await measure(memory, messages)
    await memory.close()
    await engine.dispose()
    return figures


def durable(connection: Any, _: object) -> None:
    connection.execute("PRAGMA journal_mode = wal")
    connection.execute("PRAGMA synchronous = FULL")


def said(place: int) -> Any:
    from agentscope.message import Msg  # noqa: PLC0415

    return Msg("user", f"{place} {TEXT}", "user")


async def measure(memory: Any, messages: int) -> Figures:
    started = time.perf_counter()
    for place in range(messages):
        await memory.add(said(place), marks="hint" if place % EVERY == 0 else None)
    took = (time.perf_counter() - started) * 1_000 / messages
    assert await memory.size() == messages
    return Figures(
        took,
        await read(memory.get_memory, messages),
        await read(lambda: memory.get_memory(mark="hint"), messages // EVERY),
        await read(lambda: memory.get_memory(exclude_mark="hint"), messages - messages // EVERY),
    )


async def read(ask: Callable[[], Awaitable[list[Any]]], expected: int) -> float:
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        found = await ask()
        taken.append((time.perf_counter() - started) * 1_000)
        assert len(found) == expected
    return statistics.median(taken)


if __name__ == "__main__":
    main()
