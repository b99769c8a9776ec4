"""The scenes of `python -m tests.crash.torture`, by name. To add one: write the function, and name it here."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.crash.databases import KINDS
from tests.crash.place import Place
from tests.crash.scenes import names

Play = Callable[[random.Random, Path, Place], None]

_SQLITE, _POSTGRES = KINDS[:1], KINDS[1:]


class Scene(NamedTuple):
    play: Play
    kinds: tuple[str, ...] = KINDS


SCENES: dict[str, Scene] = {
    "links": Scene(names.links, _SQLITE),
    "mounts": Scene(names.mounts, _SQLITE),
}
