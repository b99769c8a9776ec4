# ruff: noqa: T201 - its output is for a person
"""The long form of test_power_loss: new scenes, and for each of them outages at every sync and at many other points.

    python -m tests.crash.torture_power --rounds 20 --seed 7

Prints its seed; ends with 1 if something was found. A scene has threads and is never the same twice, so what fails is
kept: the database as the outage left it, and the log, from which the same outages can be made again.
"""

from __future__ import annotations

import argparse
import pickle
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.outage import Finding, by_kind, outages, points_of, record
from tests.crash.power import Log

SCENES = ("crowd", "crowd", "crowd", "failing", "heavy")


def main() -> int:
    options = _options()
    directory = Path(tempfile.mkdtemp(prefix="byssus-power-"))
    began, tried, findings = time.monotonic(), 0, list[Finding]()
    print(f"seed {options.seed}, {options.rounds} rounds, in {directory}", flush=True)
    for number in range(options.first, options.first + options.rounds):
        scene = SCENES[number % len(SCENES)]
        place = directory / f"{number}-{scene}"
        log = _log(options.replay, scene, place, options.seed + number)
        rng = random.Random(f"{options.seed} {number}")
        points = points_of(log, rng, options.more)
        if scene == "heavy":  # its images are big
            points = sorted(rng.sample(points, min(len(points), 40)))
        found = outages(log, points, place, rng.getrandbits(32), images=options.images)
        tried += len(points) * options.images
        findings += found
        print(f"round {number}: {scene}, {len(points)} points, {by_kind(found) or 'all well'}", flush=True)
        for finding in found[:5]:
            print(f"  at {finding.point}: {finding.kind}: {finding.what[:300]}", flush=True)
        if found:
            print(
                f"  again: --seed {options.seed} --first {number} --rounds 1 --replay {options.replay or place / 'log'}"
            )
        else:
            shutil.rmtree(place, ignore_errors=True)
    took = time.monotonic() - began
    print(f"seed {options.seed}: {tried} outages in {took:.0f} s: {by_kind(findings) or 'all well'}")
    if not findings:
        shutil.rmtree(directory)
    return 1 if findings else 0


def _log(replay: Path | None, scene: str, place: Path, seed: int) -> Log:
    if replay is None:
        return record(scene, place, seed)
    log: Log = pickle.loads(replay.read_bytes())
    return log


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.torture_power")
    parser.add_argument("--rounds", type=int, default=10, help="scenes to record")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--images", type=int, default=3, help="outages at each point")
    parser.add_argument("--more", type=int, default=150, help="points beside those at the syncs")
    parser.add_argument("--replay", type=Path, help="a log that was kept, in place of new scenes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
