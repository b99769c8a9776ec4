"""A command that the server forks does what a new Python would do: the same output, the same exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from byssus.storage import AgentStorage
from tests.support import forked

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--version"], ""),
        (["nonsense", "\u202e"], ""),
        (["threads", "--json"], ""),
        (["import", "-", "--as", "copy"], "no export\n" * 20_000),
    ],
)
def test_a_forked_command_is_the_same_as_one_of_a_new_python(tmp_path: Path, arguments: list[str], said: str) -> None:
    with AgentStorage(tmp_path / "t.db") as storage:
        storage.create_session(None, "标题", session_id="t")
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONUTF8": "1", "BYSSUS_DB": str(tmp_path / "t.db")}
    new = [sys.executable, "-m", "byssus", *arguments]
    expected = subprocess.run(
        new, env=env, cwd=tmp_path, input=said, capture_output=True, encoding="utf-8", check=False
    )
    done = forked.run(arguments, env=env, cwd=tmp_path, input=said, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_a_forked_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    env = {**os.environ, "BYSSUS_DB": str(tmp_path / "t.db")}
    with AgentStorage(tmp_path / "t.db"), pytest.raises(subprocess.TimeoutExpired):
        forked.run(["show", "t", "--follow"], env=env, cwd=tmp_path, input="", timeout=0.5)
