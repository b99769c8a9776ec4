"""The standing fuzz: scenes in which files, clocks, servers and processes go wrong, and what must be true after them.

    python -m tests.crash.torture                                   all scenes, for a minute each at most
    python -m tests.crash.torture moves locks --minutes 5           these two, for five minutes together
    python -m tests.crash.torture moves --seed 7 --rounds 100       so many rounds
    python -m tests.crash.torture moves --database sqlite --seed 7 --round 41 --times 20      one round again
    python -m tests.crash.torture --list                            the scenes

A scene is a function of a `random.Random`, a directory and a `Place`. It draws what goes wrong, lets it happen, and
raises if a promise is broken. A round is one call of it, in a process of its own: so nothing is left of it, and one
that hangs is ended, with the stacks of its threads in its log. The seed, the names of scene and database and the
number of the round make the draws. Processes race all the same: a round that is played again may end otherwise.

After a failure the scene's directory stays, and the other scenes are still played. `make test` plays
one round of each.
"""

# ruff: noqa: T201 - it talks to whoever runs it

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.crash import databases
from tests.crash.boundaries import warm
from tests.crash.place import Place
from tests.crash.scenes import SCENES, Scene
from tests.crash.stage.mounts import NOTE
from tests.support import postgres
from tests.support.ramdisk import ramdisk

_ROUND_SECONDS = 600.0  # after which a round hangs, whatever it waits for
_LOG = "log"
_THEIRS = ("notes.txt", "x.db.bak", "x.db-old", "data/x.db")  # files that are not ours, beside the database


class Options(NamedTuple):
    seed: int
    directory: Path
    kinds: tuple[str, ...]
    jobs: int
    seconds: float | None  # for each scene on each database
    rounds: int | None
    only: int | None  # the number of one round
    times: int


class Outcome(NamedTuple):
    """What became of a scene on a database."""

    rounds: int
    failed: list[int]


# --- one round --------------------------------------------------------------------------------------------------------


class Round:
    """A process that plays one round."""

    def __init__(self, name: str, kind: str, number: int, options: Options) -> None:
        self.number = number
        self.directory = options.directory / f"{name}-{kind}-{number}"
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.log = self.directory / _LOG
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(name, kind, random.Random(f"{options.seed} {name} {kind} {number}"))

    def _become(self, name: str, kind: str, chance: random.Random) -> None:
        code = 1
        try:
            os.setsid()  # the runner ends all that is left of a round by its group
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.dump_traceback_later(_ROUND_SECONDS, exit=True)
            logging.getLogger("psycopg").setLevel(logging.CRITICAL)  # it has a word for each connection that is lost
            _play(SCENES[name], kind, chance, self.directory / "play")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def end(self, status: int) -> bool:
        """Tidy up after it; whether all was well."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        is_well = os.waitstatus_to_exitcode(status) == 0
        if is_well:
            shutil.rmtree(self.directory, ignore_errors=True)
        return is_well

    def notes(self) -> set[str]:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return {line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)}


def _play(scene: Scene, kind: str, chance: random.Random, directory: Path) -> None:
    directory.mkdir()
    with databases.made(kind, directory) as place, _untouched(place, chance):
        scene.play(chance, directory, place)


@contextlib.contextmanager
def _untouched(place: Place, chance: random.Random) -> Iterator[None]:
    """Whatever goes wrong, files that are not ours stay as they are."""
    theirs = {Path(place.directory) / name: chance.randbytes(1 + chance.randrange(9000)) for name in _THEIRS}
    for path, content in theirs.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    yield
    for path, content in theirs.items():
        assert path.exists(), f"{path.name} was not ours, and is gone"
        found = hashlib.sha256(path.read_bytes()).digest()
        assert found == hashlib.sha256(content).digest(), f"{path.name} was not ours, and has changed"


# --- rounds of a scene ------------------------------------------------------------------------------------------------


def _numbers(options: Options) -> Iterator[int]:
    if options.only is not None:
        return itertools.repeat(options.only, options.times)
    return iter(range(options.rounds)) if options.rounds is not None else itertools.count()


def play_all(name: str, kind: str, options: Options) -> Outcome:
    """Play rounds until there were enough, the time is over or one has failed."""
    began, played = time.monotonic(), 0
    running: dict[int, Round] = {}
    failed: list[Round] = []
    notes: set[str] = set()
    numbers = _numbers(options)
    print(f"{name} on {kind}: seed {options.seed}, {_amount(options)}", flush=True)
    while True:
        is_over = options.seconds is not None and time.monotonic() - began >= options.seconds and played + len(running)
        while len(running) < options.jobs and not failed and not is_over:
            if (number := next(numbers, None)) is None:
                break
            started = Round(name, kind, number, options)
            running[started.pid] = started
        if not running:
            break
        pid, status = os.wait()
        if pid in running:
            ended = running.pop(pid)
            notes |= ended.notes()
            played += 1
            if not ended.end(status):
                failed.append(ended)
    for text in sorted(notes):
        print(f"  {text}")
    print(f"  {played} rounds, {time.monotonic() - began:.1f} s: {'a promise was broken' if failed else 'all well'}")
    for round_ in failed:
        _report(name, kind, round_, options)
    return Outcome(played, [round_.number for round_ in failed])


def _amount(options: Options) -> str:
    if options.only is not None:
        return f"round {options.only}, {options.times} times"
    return f"{options.rounds} rounds" if options.rounds is not None else f"for {options.seconds:.0f} s"


def _report(name: str, kind: str, failed: Round, options: Options) -> None:
    print(f"  round {failed.number} of {name} on {kind}; the end of {failed.log}:")
    for line in failed.log.read_text(errors="replace").splitlines()[-40:]:
        print(f"    {line[:1000]}")
    again = f"{name} --database {kind} --seed {options.seed} --round {failed.number} --times 20"
    print(f"  again: python -m tests.crash.torture {again}", flush=True)


def torture(names: list[str], options: Options) -> int:
    began = time.monotonic()
    played = [(name, kind) for name in names for kind in options.kinds if kind in SCENES[name].kinds]
    outcomes = {(name, kind): play_all(name, kind, options) for name, kind in played}
    rounds = sum(outcome.rounds for outcome in outcomes.values())
    broken = [f"{name} on {kind}" for (name, kind), outcome in outcomes.items() if outcome.failed]
    verdict = f"promises were broken: {', '.join(broken)}" if broken else "all well"
    took = time.monotonic() - began
    print(f"seed {options.seed}: {rounds} rounds of {len(outcomes)} scenes and databases in {took:.0f} s: {verdict}")
    return 1 if broken or not rounds else 0


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    given = _given()
    if given.list:
        for name, scene in SCENES.items():
            print(f"{name:12} {' and '.join(scene.kinds):20} {(scene.play.__doc__ or '').splitlines()[0]}")
        return 0
    names = list(dict.fromkeys(given.scenes)) or list(SCENES)
    kinds = databases.KINDS if given.database == "both" else (given.database,)
    count = sum(kind in SCENES[name].kinds for name in names for kind in kinds)
    is_timed = given.rounds is None and given.round is None
    directory = given.directory or Path(tempfile.mkdtemp(prefix="byssus-torture-", dir=ramdisk()))
    options = Options(
        given.seed,
        directory,
        kinds,
        given.jobs if given.round is None else 1,
        (given.minutes or count) * 60 / max(count, 1) if is_timed else None,
        given.rounds,
        given.round,
        given.times,
    )
    if "postgres" in kinds and any("postgres" in SCENES[name].kinds for name in names):
        postgres.server_for_tests()  # one for all rounds; each of them connects by itself
    with warm():
        code = torture(names, options)
    if code == 0:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.torture")
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}; all by default")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--minutes", type=float, help="for all of it; by default one for each scene and database")
    parser.add_argument("--rounds", type=int, help="of each scene on each database, instead of a time")
    parser.add_argument("--round", type=int, help="the number of one round, to play it again")
    parser.add_argument("--times", type=int, default=1, help="how often that round is played")
    parser.add_argument("--database", choices=[*databases.KINDS, "both"], default="both")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="rounds at a time")
    parser.add_argument("--directory", type=Path, help="where the files go; a new one by default")
    parser.add_argument("--list", action="store_true", help="tell the scenes and end")
    given = parser.parse_args()
    if unknown := [name for name in given.scenes if name not in SCENES]:
        parser.error(f"there is no scene {unknown[0]!r}; the scenes are {', '.join(SCENES)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
