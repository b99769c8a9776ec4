"""Scenes with modules and tests of their own: kills, cut followers, tasks, power cuts, a server that goes away."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tests.crash import databases, postgres_chaos, stories
from tests.crash.outage import by_kind, outages, points_of, record
from tests.crash.place import Place
from tests.crash.stage.judge import expect
from tests.support import postgres

_ROOT = Path(__file__).parents[3]
_FOLLOWED = "tests/threads/following/test_following_machine.py"
_TASKS = ("tests/tasks/test_moves_machine.py", "tests/worker/test_boundaries.py")
_EXAMPLES = 40  # of a machine; each has fifteen steps or more
_POWER_SCENES = ("crowd", "crowd", "crowd", "failing", "heavy")


def kills(chance: random.Random, directory: Path, place: Place) -> None:
    """A run with tools of all kinds is killed at write boundaries, and so is its recovery (tests.crash.stories)."""
    kind = "sqlite" if place.dsn is None else "postgres"
    plan = stories.drawn(chance.getrandbits(32), 0, (kind,))
    told = stories.told(0, plan, directory / "story", keep=True)
    expect(not told.found, "\n".join([*told.found[:20], f"the plan: {plan}"]))


def cuts(chance: random.Random, directory: Path, place: Place) -> None:
    """A follower is cut anywhere, in any process, between rewinds, forks and deletions (test_following_machine)."""
    _tested(chance, place, _FOLLOWED)


def tasks(chance: random.Random, directory: Path, place: Place) -> None:
    """Moves of tasks from two processes, and a worker that is killed at each of its boundaries."""
    _tested(chance, place, *_TASKS)


def _tested(chance: random.Random, place: Place, *paths: str) -> None:
    """Run these tests with more examples than usual."""
    kind = "sqlite" if place.dsn is None else "postgres"
    environment = databases.environment(kind)
    environment |= {"BYSSUS_EXAMPLES": str(_EXAMPLES), "HYPOTHESIS_PROFILE": "default"}
    seed = f"--hypothesis-seed={chance.getrandbits(32)}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, "-k", kind, seed]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{done.stdout}{done.stderr}\n{seed}")


def power(chance: random.Random, directory: Path, place: Place) -> None:
    """The power fails at many points of a recorded scene (tests.crash.power)."""
    scene, seed = chance.choice(_POWER_SCENES), chance.getrandbits(32)
    log = record(scene, directory / "power", seed)
    points = points_of(log, chance, 150)
    if scene == "heavy":  # its images are big
        points = sorted(chance.sample(points, min(len(points), 40)))
    found = outages(log, points, directory / "power", chance.getrandbits(32), images=3)
    expect(not found, f"{by_kind(found)} of {scene}, whose log is kept", *found[:5])


def restarts(chance: random.Random, directory: Path, place: Place) -> None:
    """Hundreds of runs, on a server that is restarted or fails over (tests.crash.postgres_chaos)."""
    with postgres.running() as server:
        wrong = postgres_chaos.tell(server, chance.getrandbits(32), 0)
    expect(not wrong, "\n".join(wrong[:20]))
