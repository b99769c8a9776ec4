"""The scenes of `python -m tests.crash.torture`, by name. To add one: write the function, and name it here."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.crash.databases import KINDS
from tests.crash.place import Place
from tests.crash.scenes import (
    accidents,
    cancelling,
    clocks,
    disks,
    earlier,
    everything,
    followed,
    hidden,
    imports,
    locks,
    names,
    rolling,
    stepping,
    stopped,
    versions,
    working,
)

Play = Callable[[random.Random, Path, Place], None]

_SQLITE, _POSTGRES = KINDS[:1], KINDS[1:]


class Scene(NamedTuple):
    """What is played, and on which databases."""

    play: Play
    kinds: tuple[str, ...] = KINDS


SCENES: dict[str, Scene] = {
    "imports": Scene(imports.imports),
    "links": Scene(names.links, _SQLITE),
    "mounts": Scene(names.mounts, _SQLITE),
    "moves": Scene(accidents.moves, _SQLITE),
    "damages": Scene(accidents.damages, _SQLITE),
    "small-disk": Scene(disks.small, _SQLITE),
    "full-disk": Scene(disks.full, _SQLITE),
    "read-only": Scene(disks.read_only, _SQLITE),
    "clock": Scene(clocks.clock),
    "hidden": Scene(hidden.hidden),
    "locks": Scene(locks.locks),
    "stopped": Scene(stopped.stopped, _POSTGRES),
    "versions": Scene(versions.versions),
    "cancelling": Scene(cancelling.cancelling),
    "rolling": Scene(rolling.rolling),
    "everything": Scene(everything.everything),
    "followed": Scene(followed.followed),
    "working": Scene(working.working),
    "stepping": Scene(stepping.stepping),
    "kills": Scene(earlier.kills),
    "cuts": Scene(earlier.cuts),
    "tasks": Scene(earlier.tasks),
    "power": Scene(earlier.power, _SQLITE),
    "restarts": Scene(earlier.restarts, _POSTGRES),
}

TESTED_ELSEWHERE = ("stepping", "rolling", "kills", "cuts", "tasks", "power", "restarts")  # test_killed, ...
