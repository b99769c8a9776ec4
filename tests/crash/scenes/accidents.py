"""Something happens to the files of a database that is open: they are moved, replaced, removed, cut or garbled.

What was acknowledged before may be gone with the file, for that is what somebody has done. What is acknowledged after
that is seen by whoever opens the path next, or it is not acknowledged. And bytes that were changed in the file are
named as damage by whoever opens or checks it, if they did any.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from byssus import UserMessage
from tests.crash.place import Place
from tests.crash.stage.actors import Actor, Line, apart
from tests.crash.stage.judge import expect, judge_texts, look

Accident = Callable[[random.Random, Path], None]


async def write(line: Line, place: Place, before: int, size: int) -> None:
    """Append some messages; and when told, many more, until they are refused a few times."""
    with line.trying("all"):
        async with place.checkpointer() as cp:
            for number in range(before):
                await cp.append("t", UserMessage(f"before-{number} {'x' * size}"))
            line.say("ready")
            more = int(await line.told_soon())
            for number in range(more):
                text = f"after-{number} {'y' * size}"
                with line.trying("append"):
                    await cp.append("t", UserMessage(text))
                    line.say("stored", thread="t", text=text)
            with line.trying("read"):
                await cp.load("t")
            with line.trying("check"):
                await cp.check()
    line.say("closed")


# --- accidents --------------------------------------------------------------------------------------------------------


def _remove(_: random.Random, path: Path) -> None:
    path.unlink()


def _remove_all(_: random.Random, path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _remove_beside(chance: random.Random, path: Path) -> None:
    Path(f"{path}{chance.choice(['-wal', '-shm'])}").unlink(missing_ok=True)


def _move(_: random.Random, path: Path) -> None:
    path.rename(path.with_name("moved.db"))


def _move_all(_: random.Random, path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(f"{path.name}{suffix}").rename(path.with_name(f"moved.db{suffix}"))


def _move_directory(_: random.Random, path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.mkdir()


def _replace(_: random.Random, path: Path) -> None:
    shutil.copy(path.with_name("old.db"), path.with_name("new.db"))
    path.with_name("new.db").rename(path)


def _link(_: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("old.db"))


def _put_directory(_: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def _copy_over(_: random.Random, path: Path) -> None:
    """As `cp old.db chat.db` does it: the same file with other bytes."""
    shutil.copyfile(path.with_name("old.db"), path)


def _cut(chance: random.Random, path: Path) -> None:
    os.truncate(path, chance.choice([0, 1, 100, 4096, chance.randrange(path.stat().st_size)]))


def _cut_wal(chance: random.Random, path: Path) -> None:
    wal = Path(f"{path}-wal")
    os.truncate(wal, chance.choice([0, 1, 32, chance.randrange(wal.stat().st_size)]))


def _garble(chance: random.Random, path: Path) -> None:
    target = Path(f"{path}{chance.choice(['', '', '-wal', '-shm'])}")
    with target.open("r+b") as file:
        for _ in range(chance.choice([1, 5, 50])):
            file.seek(chance.randrange(target.stat().st_size))
            file.write(chance.randbytes(chance.choice([1, 8, 500])))


TO_NAMES: tuple[Accident, ...] = (
    _remove,
    _remove_all,
    _remove_beside,
    _move,
    _move_all,
    _move_directory,
    _replace,
    _link,
    _put_directory,
)
TO_BYTES: tuple[Accident, ...] = (_copy_over, _cut, _cut_wal, _garble)


# --- scenes -----------------------------------------------------------------------------------------------------------


def moves(chance: random.Random, directory: Path, place: Place) -> None:
    """The file is removed, moved or replaced while a store has it open."""
    for accident in chance.sample(TO_NAMES, len(TO_NAMES)):
        here = _place(directory, accident)
        line = _suffer(chance, here, accident)
        later = {"t": [said["text"] for said in line.lines("stored")]}
        found = look(here)
        expect(later["t"] == [] or not found.damage, "acknowledged, and the database is damaged", found.damage)
        judge_texts(found, later)


def damages(chance: random.Random, directory: Path, place: Place) -> None:
    """Bytes of an open file are cut off or overwritten: it is named, or it has done no harm."""
    for accident in TO_BYTES:
        here = _place(directory, accident)
        line = _suffer(chance, here, accident)
        found = look(here)
        if not found.damage and accident is not _garble:  # a byte of a text is changed, and nobody can tell
            judge_texts(found, {"t": [said["text"] for said in line.lines("stored")]})


def _place(directory: Path, accident: Accident) -> Place:
    """A directory with a database of somebody else, which is made once."""
    there = Place(str(directory / accident.__name__.strip("_") / "db"))
    made = Place(str(directory / "made"))
    if not made.file.exists():
        Path(made.directory).mkdir()

        async def make() -> None:
            async with made.checkpointer() as cp:
                for number in range(3):
                    await cp.append("old", UserMessage(f"old-{number}"))

        apart(make)
    Path(there.directory).mkdir(parents=True)
    shutil.copy(made.file, Path(there.directory) / "old.db")
    return there


def _suffer(chance: random.Random, place: Place, accident: Accident) -> Actor:
    before, size = chance.choice([0, 1, 40]), chance.choice([1, 3000])
    with Actor(accident.__name__.strip("_"), lambda line: write(line, place, before, size)) as writer:
        writer.hear("ready")
        accident(chance, place.file)
        writer.tell(str(chance.choice([1, 5, 60])))
        writer.hear("closed")
        return writer.finish()
