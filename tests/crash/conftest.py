"""Databases for the crash tests, and where the tests with made-up disks keep their files.

What takes `place` runs once for each database. Power cuts and failing disks are made below SQLite, and stay with it:
what Postgres does about its own disk is not our promise.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import databases
from tests.crash.place import Place

_SHM = "/dev/shm"  # a few megabytes are enough


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory that is no disk, where there is one: what fails is made up, so real syncs would only take time."""
    if not os.access(_SHM, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=_SHM, prefix="byssus-") as directory:
        yield Path(directory)


@pytest.fixture(params=databases.KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with databases.made(request.param, tmp_path) as there:
        yield there
