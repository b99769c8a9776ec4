"""Disks that are small, full or read-only. They are mounted for the round alone, and are as real as others.

What was acknowledged stays. When there is room again, because somebody deleted something or made room, it goes on, in
the same process and in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

from byssus import UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import StoreFull
from tests.crash import faults
from tests.crash.place import Place
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import acknowledged, expect, judge
from tests.crash.stage.mounts import mount, note, own_mounts, small_disk

_MOST = 20_000  # messages that no disk of a scene has room for


async def _fill(line: Line, cp: Checkpointer, thread: str, size: int, most: int = _MOST) -> bool:
    """Append until there is no room; whether that came."""
    for number in range(most):
        text = f"{thread}-{number} {os.urandom(size // 2).hex()}"
        try:
            await cp.append(thread, UserMessage(text))
        except StoreFull as error:
            line.say("full", text=str(error))
            return True
        line.say("stored", thread=thread, text=text)
    return False


def small(chance: random.Random, directory: Path, place: Place) -> None:
    """A small disk is filled and made empty again, over and over."""
    there = Place(str(directory / "disk"))
    size = chance.choice([2, 3, 5, 8, 10]) * 2**20
    is_mounted = small_disk(Path(there.directory), size)
    if not is_mounted:
        note("no mounts are allowed here: SQLite's limit of pages stands for a small disk")
    weights = [chance.choice([2_000, 20_000, 200_000]) for _ in range(chance.randint(2, 3))]
    ways = [chance.choice(["delete", "erase"]) for _ in weights]

    async def act(line: Line) -> None:
        async with there.checkpointer() as cp:
            if not is_mounted:
                await cp.store.write(lambda tx: tx.one(f"PRAGMA max_page_count = {size // 8192}"))
            for number, (weight, way) in enumerate(zip(weights, ways, strict=True)):
                await cp.append("kept", UserMessage(f"kept-{number}"))
                line.say("stored", thread="kept", text=f"kept-{number}")
                expect(await _fill(line, cp, f"t{number}", weight), "the disk is never full")
                with line.trying(way):
                    await (cp.delete_thread if way == "delete" else cp.erase_thread)(f"t{number}")
                line.say("deleted", thread=f"t{number}")
                await cp.append("kept", UserMessage(f"after-{number}"))  # it can be left by deleting something
                line.say("stored", thread="kept", text=f"after-{number}")
            expect((await cp.check())["ok"], "check is not content on the full disk")

    with Actor("filler", act) as filler:
        filler.finish()
    expect(not filler.lines("refused"), "a full disk cannot be left by deleting", filler.lines("refused")[:1])
    gone = {line["thread"] for line in filler.lines("deleted")}
    told = {thread: texts for thread, texts in acknowledged([filler]).items() if thread not in gone}
    judge(there, told)


def full(chance: random.Random, directory: Path, place: Place) -> None:
    """Somebody else fills the disk, and makes room again."""
    there = Place(str(directory / "disk"))
    is_mounted = small_disk(Path(there.directory), 16 * 2**20)
    if not is_mounted:
        note("no mounts are allowed here: SQLite's system calls say that the disk is full")
    size, rounds = chance.choice([100, 3_000, 30_000]), chance.randint(1, 3)

    async def act(line: Line) -> None:
        with contextlib.ExitStack() as stack:
            fault = None if is_mounted else stack.enter_context(faults.failing_writes(faults.FULL))
            async with there.checkpointer() as cp:
                for number in range(rounds):
                    await _fill(line, cp, f"before-{number}", size, 20)
                    _set_room(Path(there.directory), fault, is_full=True)
                    expect(await _fill(line, cp, f"full-{number}", size), "nobody says that the disk is full")
                    with line.trying("read"):
                        await cp.load(f"before-{number}")
                    _set_room(Path(there.directory), fault, is_full=False)
                    expect(not await _fill(line, cp, f"again-{number}", size, 20), "there is room, and it is not seen")

    async def open_when_full(line: Line) -> None:
        with line.trying("open"):
            async with there.checkpointer() as cp:
                await cp.append("late", UserMessage("late"))
                line.say("stored", thread="late", text="late")

    with Actor("writer", act) as writer:
        writer.finish()
    if is_mounted:
        _set_room(Path(there.directory), None, is_full=True)
    with Actor("latecomer", open_when_full) as latecomer:
        latecomer.finish()
    if is_mounted:
        _set_room(Path(there.directory), None, is_full=False)
    judge(there, acknowledged([writer, latecomer]))


def _set_room(disk: Path, fault: faults.Fault | None, *, is_full: bool) -> None:
    if fault is not None:
        fault.arm(1) if is_full else fault.heal()
        return
    ballast = disk / "ballast"
    if not is_full:
        ballast.unlink()
        return
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    continue


def read_only(chance: random.Random, directory: Path, place: Place) -> None:
    """The disk is read-only: it can be read or is refused by name, and later it goes on."""
    there = Place(str(directory / "disk"))
    Path(there.directory).mkdir()

    async def write(line: Line, text: str) -> None:
        async with there.checkpointer() as cp:
            await cp.append("t", UserMessage(text))
            line.say("stored", thread="t", text=text)

    async def try_all(line: Line) -> None:
        with line.trying("open"):
            async with there.checkpointer() as cp:
                actions: list[tuple[str, Callable[[], object]]] = [
                    ("load", lambda: cp.load("t")),
                    ("append", lambda: cp.append("t", UserMessage("read-only"))),
                    ("check", cp.check),
                    ("search", lambda: cp.search("first")),
                ]
                chance.shuffle(actions)
                for name, action in actions:
                    with line.trying(name):
                        await action()  # type: ignore[misc]

    def in_read_only(line: Line) -> object:
        folder = there.directory
        if own_mounts() and mount("--bind", folder, folder) and mount("-o", "remount,bind,ro", folder):
            line.say("mounted")
            return try_all(line)
        note("no mounts are allowed here: SQLite's system calls say that the disk is read-only")
        with faults.failing_writes(faults.READ_ONLY) as fault:
            fault.arm(0)
            asyncio.run(try_all(line))
        return None

    with Actor("first", lambda line: write(line, "first")) as first:
        is_killed = chance.random() < 0.5
        first.hear("stored")
        if is_killed:
            first.kill()  # so that a WAL is left, perhaps
        else:
            first.finish()
    with Actor("reader", in_read_only) as reader:
        reader.finish()
    expect(not [line for line in reader.lines("done") if line["of"] == "append"], "written to a read-only disk")
    with Actor("last", lambda line: write(line, "last")) as last:
        last.finish()
    judge(there, acknowledged([first, last]))
