"""Two hundred live runs are handed from process to process by SIGTERM, as in a rolling deployment."""

from __future__ import annotations

import random
from pathlib import Path

from tests.crash.place import Place
from tests.crash.rolling import roll
from tests.crash.stage.judge import expect


def rolling(chance: random.Random, directory: Path, place: Place) -> None:
    """No run is aborted, and no tool runs twice."""
    runs, processes = chance.choice([50, 200, 200]), chance.choice([2, 3, 4])
    expect(roll(place, runs, processes) > 0, "no run was handed over")
