"""Processes that hand their runs to each other, and what must be true when all runs have ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from byssus.messages import AssistantMessage
from tests.crash.place import Place
from tests.support import forked
from tests.support.processes import SLOW

STEPS = 6  # of each run; as in rolling_child.py
_ROOT = Path(__file__).parents[2]
_PATIENCE = 120  # seconds


class Service:
    """A process of rolling_child.py."""

    def __init__(self, place: Place, scene: str, threads: Sequence[str] = ()) -> None:
        self.process = forked.Process(
            ["-W", "error", "-m", "tests.crash.rolling_child", str(place), scene, *threads],
            stdout=forked.PIPE,
            stderr=forked.PIPE,
        )

    def hear(self, line: str) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        assert said == line, f"it said {said!r} and not {line!r}: {self.process.communicate()}"

    def end(self, number: signal.Signals | None = None) -> int:
        """Its exit code. It complained of nothing but a slow disk."""
        if number is not None:
            self.process.send_signal(number)
        output, complaints = self.process.communicate(timeout=_PATIENCE)
        said = [line for line in (output + complaints).splitlines() if not SLOW.search(line)]
        assert not said, said
        return self.process.wait()


@contextlib.contextmanager
def service(place: Place, scene: str, threads: Sequence[str] = ()) -> Iterator[Service]:
    """A process that is gone in the end, whatever happens."""
    made = Service(place, scene, threads)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def wait(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)
        time.sleep(0.01)


def diary(place: Place) -> list[str]:
    return place.diary.read_text().splitlines() if place.diary.exists() else []


def roll(place: Place, runs: int, processes: int) -> int:
    """Let so many processes leave one after the other, with all runs live; how many hand-overs of runs there were.

    The last process stays until all runs have ended.
    """
    threads = [f"t{number}" for number in range(runs)]
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(service(place, "supervise")) for _ in range(processes - 1)]
        for each in others:
            each.hear("ready")
        leaving = stack.enter_context(service(place, "begin", threads))
        leaving.hear("ready")
        for number, following in enumerate(others):
            _wait_for_steps(place, runs * (number + 1))
            assert leaving.end(signal.SIGTERM) in (143, -signal.SIGTERM)  # the latter if it had no run at that moment
            leaving = following
        _wait_for_steps(place, runs * STEPS)
        wait(lambda: asyncio.run(_is_done(place, runs)), "a run has not ended")
        leaving.end(signal.SIGTERM)
    return asyncio.run(_judge(place, threads))


def _wait_for_steps(place: Place, count: int) -> None:
    wait(lambda: len(diary(place)) >= count, f"{count} steps were not made")


async def _is_done(place: Place, runs: int) -> bool:
    async with place.checkpointer() as cp:
        return len(await cp.threads(runs, state="idle")) == runs


async def _judge(place: Place, threads: Sequence[str]) -> int:
    """Each run ended, no reply was aborted, and each tool ran once."""
    twice = {line: count for line, count in Counter(diary(place)).items() if count > 1}
    assert twice == {}
    assert sorted(diary(place)) == sorted(f"{thread} {step}" for thread in threads for step in range(STEPS))
    handed = 0
    async with place.checkpointer() as cp:
        for name in threads:
            thread = await cp.load(name)
            assert thread is not None
            assert len(thread.messages) == 2 + 2 * STEPS
            assert thread.messages[-1].text == "done"
            replies = [message for message in thread.messages if isinstance(message, AssistantMessage)]
            assert not any(reply.failed for reply in replies)
            assert {(call.status, call.attempts) for call in await cp.tool_calls(name)} == {("done", 1)}
            (run,) = await cp.runs(name)
            assert run.stop_reason == "stop"
            outcomes = [attempt.outcome for attempt in await cp.run_attempts(run.id)]
            assert outcomes[-1] == "ended"
            assert set(outcomes[:-1]) <= {"handed over"}
            handed += len(outcomes) - 1
    return handed
