"""A process that cannot see the others (/proc with hidepid, another user) does not take them for dead."""

from __future__ import annotations

import builtins
import importlib
import os
import pkgutil
import pwd
import random
import re
from pathlib import Path
from typing import Any

import byssus
from byssus import UserMessage
from tests.crash.place import Place
from tests.crash.stage import runs
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import acknowledged, expect, judge
from tests.crash.stage.mounts import mount, note, own_mounts

_SOMEBODY = re.compile(r"/proc/\d+/")


def hidden(chance: random.Random, directory: Path, place: Place) -> None:
    """Another user, to whom /proc hides the owner of a run, meets its thread."""
    _open_to_all(directory, place)
    _import_all()  # the other user may not read where Python is
    recovery = chance.choice(["never", "retry"])

    async def make() -> None:
        async with place.checkpointer() as cp:
            await cp.append("t", UserMessage("made"))

    def as_other(line: Line) -> object:
        _become_other()
        return make()

    async def drive(line: Line) -> None:
        async with place.checkpointer() as cp:
            await runs.agent(line, cp, place, "t", holds=True, recovery=recovery).prompt("first")

    async def meddle(line: Line) -> None:
        async with place.checkpointer() as cp:
            while text := await line.told_soon():
                with line.trying(text):
                    if text == "unfinished":
                        line.say("unfinished", threads=[info.id for info in await cp.unfinished()])
                    else:
                        await runs.agent(line, cp, place, "t", recovery=recovery).resume()

    def meddle_unseeing(line: Line) -> object:
        line.say("blind", is_real=_hide_processes())
        return meddle(line)

    with Actor("maker", as_other) as maker:
        maker.finish()
    with Actor("driver", drive) as driver:
        driver.hear("began")
        with Actor("meddler", meddle_unseeing) as meddler:
            if not meddler.hear("blind")["is_real"]:
                note("no mount of /proc with hidepid is allowed here: the look into /proc is refused by the process")
            expect(meddler.ask("unfinished", "unfinished")["threads"] == [], "a run that goes on is called unfinished")
            meddler.hear("done")
            answer = meddler.ask("resume", "done", "refused")
            expect(answer.get("kind") == "ThreadBusy", "a thread was taken from a run that lives", answer)
            if chance.random() < 0.5:
                driver.tell("go on")
                driver.finish()
            else:
                driver.kill()
                answer = meddler.ask("resume", "done", "refused")
                expect(answer["what"] == "done", "the run of a dead process is not taken over at once", answer)
            meddler.tell()
            meddler.finish()
    runs.judge_tools(place)
    judge(place, acknowledged([driver, meddler]))


def _open_to_all(directory: Path, place: Place) -> None:
    """The other user reaches what it shall reach."""
    for folder in (directory, *list(directory.parents)[:2]):
        os.chmod(folder, 0o777)
    place.diary.touch()
    place.diary.chmod(0o666)


def _import_all() -> None:
    for name in (
        "secrets",
        "encodings.idna",
        *(each.name for each in pkgutil.walk_packages(byssus.__path__, "byssus.")),
    ):
        if not name.startswith(("byssus.adapters", "byssus.cli", "byssus.__main__", "byssus.providers")):
            importlib.import_module(name)


def _become_other() -> bool:
    """Be another user, if we may."""
    if os.geteuid() != 0:
        return False
    try:
        other = pwd.getpwnam("nobody")
    except KeyError:
        return False
    os.setgroups([])
    os.setgid(other.pw_gid)
    os.setuid(other.pw_uid)
    return True


def _hide_processes() -> bool:
    """See no process of other users from now on. Where that cannot be mounted, this process looks away: False."""
    if os.geteuid() == 0 and own_mounts() and mount("-t", "proc", "-o", "hidepid=2", "proc", "/proc"):
        driver = os.getppid()
        if _become_other() and not os.path.exists(f"/proc/{driver}"):
            return True
    real = builtins.open

    def blind(file: Any, *args: Any, **options: Any) -> Any:
        if isinstance(file, str) and _SOMEBODY.match(file) and not file.startswith(f"/proc/{os.getpid()}/"):
            raise FileNotFoundError(2, "No such file or directory", file)
        return real(file, *args, **options)

    builtins.open = blind
    return False
