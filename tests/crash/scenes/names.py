"""One file, two names: another process reaches it through a hard link, or through a mount of the file itself."""

from __future__ import annotations

import os
import random
from pathlib import Path

from byssus import UserMessage
from tests.crash.place import Place
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import acknowledged, judge
from tests.crash.stage.mounts import mount, note, own_mounts


async def write(line: Line, place: Place, name: str) -> None:
    """Open the database when told, and append so many messages each time that a number is read."""
    count = 0
    while (number := await line.told_soon()).isdigit():
        with line.trying("write"):
            async with place.checkpointer() as cp:
                for _ in range(int(number)):
                    count += 1
                    await cp.append("t", UserMessage(f"{name}-{count}"))
                    line.say("stored", thread="t", text=f"{name}-{count}")


async def keep_writing(line: Line, place: Place, name: str) -> None:
    """The same with one checkpointer, which stays open: a refused message is not the end."""
    count = 0
    async with place.checkpointer() as cp:
        line.say("open")
        while (number := await line.told_soon()).isdigit():
            with line.trying("write"):
                for _ in range(int(number)):
                    count += 1
                    await cp.append("t", UserMessage(f"{name}-{count}"))
                    line.say("stored", thread="t", text=f"{name}-{count}")


def links(chance: random.Random, directory: Path, place: Place) -> None:
    """Two processes write one file through two hard links."""
    elsewhere = chance.choice([directory, directory / "elsewhere"])
    elsewhere.mkdir(exist_ok=True)
    other = Place(str(elsewhere / "b"))
    Path(other.directory).mkdir()
    with (
        Actor("first", lambda line: keep_writing(line, place, "first")) as first,
        Actor("second", lambda line: write(line, other, "second")) as second,
    ):
        first.hear("open")
        if chance.random() < 0.5:
            first.ask("3", "done")
        os.link(place.file, other.file)
        writers = [first, second, second, first]
        chance.shuffle(writers)
        for writer in writers:
            writer.ask(str(chance.randint(1, 30)), "done", "refused")
        other.file.unlink()
        first.ask("3", "done")
        for writer in (first, second):
            writer.tell("over")
            writer.finish()
    judge(place, acknowledged([first, second]))


def mounts(chance: random.Random, directory: Path, place: Place) -> None:
    """A container has the file, or its directory, mounted; its host writes at the same time."""
    is_file = chance.random() < 0.7
    there = Place(str(directory / "app"))
    Path(there.directory).mkdir()
    if is_file:
        there.file.touch()

    def contained(line: Line) -> object:
        what, where = (place.file, there.file) if is_file else (directory, there.directory)
        is_mounted = own_mounts() and mount("--bind", what, where)
        line.say("mounted", is_mounted=is_mounted)
        if not is_mounted:
            return None
        return write(line, there, "contained")

    with Actor("host", lambda line: keep_writing(line, place, "host")) as host:
        host.hear("open")
        with Actor("contained", contained) as guest:
            if not guest.hear("mounted")["is_mounted"]:
                note("no mounts are allowed here: a hard link stands for the mounted file")
                guest.finish()
                there.file.unlink(missing_ok=True)
                os.link(place.file, there.file)
                guest = Actor("linked", lambda line: write(line, there, "contained"))
            with guest:
                for _ in range(chance.randint(1, 3)):
                    host.tell(str(chance.randint(1, 40)))
                    guest.ask(str(chance.randint(1, 40)), "done", "refused")
                    host.hear("done", "refused")
                guest.tell("over")
                guest.finish()
        if there.file.exists() and there.file.samefile(place.file):
            there.file.unlink()
        host.ask("3", "done")
        host.tell("over")
        host.finish()
    judge(place, acknowledged([host, guest]))
