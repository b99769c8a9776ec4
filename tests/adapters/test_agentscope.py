"""The tests in the folder agentscope, each file in a process that finds AgentScope and the mcp 1.x that it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.overlay import OVERLAY, STAMP

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "adapters" / "agentscope").glob("test_*.py"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_with_agentscope(file: Path) -> None:
    if not STAMP.exists():
        pytest.fail(f"{OVERLAY} is not complete; install AgentScope for the tests with: make setup", pytrace=False)
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=ROOT,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        timeout=590,
        check=False,
    )
    if done.returncode != 0 or "skipped" in done.stdout:
        pytest.fail(f"{file.name} ended with {done.returncode}:\n{done.stdout}", pytrace=False)


def _environment() -> dict[str, str]:
    """Ours, with the overlay in front. Options and workers of this run are not those of the other one."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = [str(OVERLAY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**ours, "PYTHONPATH": os.pathsep.join(path)}
