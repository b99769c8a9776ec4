"""Where the tests with made-up disks keep their files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_SHM = "/dev/shm"  # a few megabytes are enough


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory that is no disk, where there is one: what fails is made up, so real syncs would only take time."""
    if not os.access(_SHM, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=_SHM, prefix="holdfast-") as directory:
        yield Path(directory)
