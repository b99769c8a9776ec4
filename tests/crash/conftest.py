"""Databases for the crash tests.

What takes `place` runs once for each database. Power cuts and failing disks are made below SQLite, and stay with it:
what Postgres does about its own disk is not our promise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import databases
from tests.crash.place import Place


@pytest.fixture(params=databases.KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with databases.made(request.param, tmp_path) as there:
        yield there
