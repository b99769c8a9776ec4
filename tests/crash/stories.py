"""The long form of test_boundaries: stories with random kills, several in each, in random variations of the scene.

    python -m tests.crash.stories --kills 10000 --seed 7     until so many processes were killed
    python -m tests.crash.stories --seed 7 --story 41        one of those stories again (and again: --times 100)
    python -m tests.crash.stories --plan JSON                a story that is written down
    python -m tests.crash.stories --every                    one story for each write boundary of a run

All of them on both databases, unless one is named with --database. Prints its seed, and stops at the first violation.
What then stays is the directory of that story: the diary of the tools, all that the processes said and the rows at the
end; a SQLite file, too, but no schema in Postgres. Threads race in every process, so the same story may end otherwise
when it is told again.
"""

# ruff: noqa: T201 - it talks to whoever runs it

from __future__ import annotations

import argparse
import itertools
import os
import random
import select
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.crash import databases
from tests.crash.boundaries import Kill, Plan, Story, tell, warm
from tests.crash.boundary_judge import violations
from tests.crash.boundary_scene import Variation
from tests.support import postgres

_PROGRESS = 15.0  # seconds between two lines


class Told(Struct):
    """What became of a story."""

    number: int
    plan: Plan
    kills: dict[str, int]  # how often, by how
    in_recovery: int  # how many of the killed had themselves been recovering
    found: list[str]


def told(number: int, plan: Plan, directory: Path, *, keep: bool = False) -> Told:
    """Tell a story and judge it. Its directory is removed if all is well, unless it shall be kept."""
    shutil.rmtree(directory, ignore_errors=True)
    try:
        story = tell(plan, directory)
        found = violations(directory)
    except Exception:
        return Told(number, plan, {}, 0, [traceback.format_exc()])
    if not found and not keep:
        shutil.rmtree(directory)
    kills = Counter(life.kill.how for life in story.lives if life.was_killed and life.kill)
    return Told(number, plan, dict(kills), _in_recovery(story), found)


def _in_recovery(story: Story) -> int:
    return sum(life.was_killed for life in story.lives[1:])


def drawn(seed: int, number: int, kinds: Sequence[str]) -> Plan:
    """The plan of a story: the same for the same seed, number and kinds of databases."""
    rng = random.Random(f"{seed} {number}")
    variation = Variation(
        tool_mode=rng.choice(["parallel", "parallel", "sequential"]),
        copies=rng.choice([1, 1, 2, 3]),
        steering_mode=rng.choice(["one-at-a-time", "all"]),
        follow_up_mode=rng.choice(["one-at-a-time", "all"]),
        half_done=rng.choice(["not done", "unknown"]),
        recovery=rng.choice(["approve", "approve", "deny", "result"]),
        approval=rng.choice(["approve", "approve", "approve", "deny"]),
        answers_by=rng.choice(["agent", "checkpointer", "tool"]),
        reuses_ids=rng.random() < 0.25,
        is_patient=rng.random() < 0.75,
        save_partial=rng.choice([0.001, 0.001, 0.001, None]),
        durability=rng.choice(["full", "full", "normal"]),
        has_hooks=rng.random() < 0.25,
        prompts_on=rng.random() < 0.25,
        is_noisy=rng.random() < 0.25,
        checkpoint_every=rng.choice([None, "turn", "turn", 2]),
    )
    kills = [_kill(rng) for _ in range(rng.choice([1, 2, 3, 4, 6, 8]))]
    neighbour_dies_at, keeps_zombies = rng.choice([None, None, 1, 2]), rng.random() < 0.25
    return Plan(variation, kills, neighbour_dies_at, keeps_zombies, database=rng.choice(kinds))


def _kill(rng: random.Random) -> Kill:
    how = rng.choices(["boundary", "heard", "after"], [6, 2, 2])[0]
    longest = {"boundary": 110, "heard": 80, "after": 250}[how]
    return Kill(how, rng.randint(1, rng.choice([8, longest // 3, longest])))


# --- workers ----------------------------------------------------------------------------------------------------------


class Worker:
    """A process that tells every so-manieth story, until the pipe to it is closed."""

    def __init__(self, options: argparse.Namespace, place: int, others: list[Worker]) -> None:
        self.hears, speaks = os.pipe()
        listens, self.tells = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                for fd in (self.hears, self.tells, *(fd for other in others for fd in (other.hears, other.tells))):
                    os.close(fd)
                _work(options, place, speaks, listens)
                code = 0
            finally:
                os._exit(code)
        os.close(speaks)
        os.close(listens)
        self._rest = b""

    def hear(self) -> list[Told] | None:
        read = os.read(self.hears, 1 << 20)
        *lines, self._rest = (self._rest + read).split(b"\n")
        return [msgspec.json.decode(line, type=Told) for line in lines] if read else None

    def stop(self) -> None:
        os.close(self.tells)

    def end(self) -> None:
        os.close(self.hears)
        os.waitpid(self.pid, 0)


def _work(options: argparse.Namespace, place: int, speaks: int, listens: int) -> None:
    for number in itertools.count(place, options.jobs):
        if select.select([listens], [], [], 0)[0]:
            return
        result = told(number, drawn(options.seed, number, options.kinds), options.directory / str(number))
        line = msgspec.json.encode(result) + b"\n"
        while line:
            line = line[os.write(speaks, line) :]


def _hear_all(options: argparse.Namespace) -> Iterator[Told]:
    """What the workers have to tell; they are stopped, and waited for, when nobody listens any more."""
    workers: list[Worker] = []
    for place in range(options.jobs):
        workers.append(Worker(options, place, workers))
    try:
        living = {worker.hears: worker for worker in workers}
        while living:
            for fd in select.select(list(living), [], [])[0]:
                results = living[fd].hear()
                if results is None:
                    del living[fd]
                yield from results or ()
    finally:
        for worker in workers:
            worker.stop()
        for worker in workers:
            while worker.hear() is not None:
                continue
            worker.end()


# --- what there is to do ----------------------------------------------------------------------------------------------


def torture(options: argparse.Namespace) -> int:
    print(
        f"seed {options.seed}, {options.kills} kills, on {' and '.join(options.kinds)}, {options.jobs} processes, "
        f"in {options.directory}",
        flush=True,
    )
    began, said = time.monotonic(), time.monotonic()
    kills: Counter[str] = Counter()
    stories = in_recovery = 0
    bad: Told | None = None
    results = _hear_all(options)
    for result in results:
        stories += 1
        kills.update(result.kills)
        in_recovery += result.in_recovery
        if result.found:
            bad = result
        if bad is not None or kills.total() >= options.kills:
            break
        if time.monotonic() - said > _PROGRESS:
            said = time.monotonic()
            print(f"{kills.total()} kills in {stories} stories, {said - began:.0f} s", flush=True)
    results.close()  # type: ignore[attr-defined]
    is_done = kills.total() >= options.kills
    verdict = "a promise was broken" if bad else "all well" if is_done else "the workers are gone"
    print(
        f"seed {options.seed}: {kills.total()} kills ({', '.join(f'{n} {how}' for how, n in sorted(kills.items()))}), "
        f"{in_recovery} of them in recovery, {stories} stories, {time.monotonic() - began:.0f} s: {verdict}"
    )
    if bad is not None:
        arguments = f"--database {options.database} --seed {options.seed} --story {bad.number}"
        _report(bad, options.directory / str(bad.number), arguments)
    return 0 if is_done and bad is None else 1


def every(options: argparse.Namespace, kind: str) -> int:
    """Kill a run at its first boundary, at its second, and so on to the last one of a run that nobody kills.

    Threads race, so a run may end before it comes to the boundary that was meant for it. It is judged all the same.
    """
    began, failed, missed = time.monotonic(), 0, 0
    clean = tell(Plan(options.variation, database=kind), options.directory / kind / "clean")
    last = max(line["boundaries"] for line in clean.lives[-1].said if line["what"] == "left")
    numbers = range(options.first, last + 1, options.step)
    for number in numbers:
        plan = Plan(options.variation, [Kill("boundary", number)], database=kind)
        directory = options.directory / kind / str(number)
        result = told(number, plan, directory)
        missed += not result.kills
        if result.found:
            failed += 1
            _report(result, directory, f"--plan {shlex.quote(msgspec.json.encode(plan).decode())}")
    print(
        f"{kind}: {len(numbers)} of {last} boundaries, {missed} not reached, {failed} with a violation, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


def again(options: argparse.Namespace, plan: Plan) -> int:
    """One story, as often as is asked for, until it goes wrong."""
    for time_ in range(options.times):
        result = told(options.story or 0, plan, options.directory / f"again-{time_}", keep=options.keep)
        if result.found:
            _report(result, options.directory / f"again-{time_}", "the same")
            return 1
    print(f"{options.times} times: all well")
    return 0


def _report(bad: Told, directory: Path, arguments: str) -> None:
    print(f"\nstory {bad.number}, killed by {bad.plan.kills or 'nobody'}:")
    for what in bad.found[:20]:
        print(f"  {what[:2000]}")
    print(f"  plan: {msgspec.json.encode(bad.plan).decode()}")
    print(f"  files: {directory}")
    print(f"  again: python -m tests.crash.stories {arguments} --times 100", flush=True)


def main() -> int:
    options = _options()
    root: Path = options.directory or Path(tempfile.mkdtemp(prefix="byssus-torture-"))
    options.directory = root
    options.kinds = databases.KINDS if options.database == "both" else (options.database,)
    if options.plan is not None:
        options.kinds = (options.plan.database,)
    if "postgres" in options.kinds:
        postgres.server_for_tests()  # one for all workers; each of them connects by itself
    with warm():
        if options.every:
            code = max(every(options, kind) for kind in options.kinds)
        elif options.plan is not None:
            code = again(options, options.plan)
        elif options.story is not None:
            code = again(options, drawn(options.seed, options.story, options.kinds))
        else:
            code = torture(options)
    if code == 0 and not options.keep:
        shutil.rmtree(root)
    return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.stories")
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="stories at a time")
    parser.add_argument("--database", choices=[*databases.KINDS, "both"], default="both")
    parser.add_argument("--directory", type=Path, help="where the files go; a new one by default")
    parser.add_argument("--every", action="store_true", help="each boundary of one variation")
    parser.add_argument("--first", type=int, default=1, help="the boundary with which --every begins")
    parser.add_argument(
        "--step", type=int, default=1, help="and how far it is to the next: odd, or all are of one sort"
    )
    parser.add_argument("--variation", type=lambda text: msgspec.json.decode(text, type=Variation), default=Variation())
    parser.add_argument("--story", type=int, help="the number of a story of the seed")
    parser.add_argument("--plan", type=lambda text: msgspec.json.decode(text, type=Plan), help="JSON, as was printed")
    parser.add_argument("--keep", action="store_true", help="keep the files of a single story also if all is well")
    parser.add_argument("--times", type=int, default=1, help="how often a single story is told")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
