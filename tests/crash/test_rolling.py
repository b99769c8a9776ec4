"""Real processes: runs that are handed from one to the next, and a run that ends each process which takes it up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import databases
from tests.crash.place import Place
from tests.crash.rolling import diary, roll, service

pytestmark = pytest.mark.processes


@pytest.fixture(params=databases.KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with databases.made(request.param, tmp_path) as made:
        yield made


def test_runs_that_are_handed_over_by_sigterm_are_not_aborted_and_run_no_tool_twice(place: Place) -> None:
    assert roll(place, runs=20, processes=2) > 0


def test_a_run_that_kills_its_process_three_times_is_quarantined(place: Place) -> None:
    for scene in ("begin", "supervise", "supervise"):
        with service(place, scene, ["deadly"]) as deadly:
            deadly.hear("ready")
            assert deadly.end() == -signal.SIGKILL
    with service(place, "supervise") as careful:
        careful.hear("ready")
        careful.hear("quarantined deadly")
    assert diary(place) == ["dies"] * 3
    asyncio.run(check_quarantine(place))


async def check_quarantine(place: Place) -> None:
    async with place.checkpointer() as cp:
        (found,) = await cp.quarantined()
        assert (found.thread_id, found.deaths) == ("deadly", 3)
        assert await cp.state("deadly") == "quarantined"
