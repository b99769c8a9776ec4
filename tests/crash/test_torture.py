"""One round of each scene of `python -m tests.crash.torture`, with a seed that stays; and the runner itself.

A scene runs in processes that are forked from one without threads, which pytest's is not: so it is started.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import databases
from tests.crash.scenes import SCENES, TESTED_ELSEWHERE
from tests.support.ramdisk import ramdisk

SEED = 1
_ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts, /proc and SIGSTOP as Linux has them")


def torture(*arguments: str, kind: str = "sqlite") -> str:
    command = [sys.executable, "-W", "error", "-m", "tests.crash.torture", *arguments]
    environment = databases.environment(kind)
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def directory() -> Iterator[str]:
    """One that other users can be let into, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir=ramdisk(), ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.parametrize("name", [name for name in SCENES if name not in TESTED_ELSEWHERE])
def test_the_promises_are_kept_in_the_scene(name: str, directory: str) -> None:
    kinds = SCENES[name].kinds
    said = torture(name, "--seed", str(SEED), "--rounds", "1", "--directory", directory, kind=kinds[-1])
    for kind in kinds:
        assert f"{name} on {kind}: seed {SEED}, 1 rounds\n" in said
    summary = rf"seed {SEED}: {len(kinds)} rounds of {len(kinds)} scenes and databases in \d+ s: all well\n$"
    assert re.search(summary, said), said


def test_a_broken_promise_is_told_with_the_command_to_repeat_it(tmp_path: Path) -> None:
    """The runner's own files are touched by somebody else: what a scene must never do."""
    script = (
        "import sys; from tests.crash import scenes, torture\n"
        "def bad(chance, directory, place): (directory / 'notes.txt').write_text('mine')\n"
        "scenes.SCENES['bad'] = scenes.Scene(bad, ('sqlite',))\n"
        "sys.exit(torture.main())"
    )
    arguments = ["bad", "--rounds", "3", "--seed", "7", "--jobs", "1", "--directory", str(tmp_path)]
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "notes.txt was not ours, and has changed" in done.stdout
    assert "again: python -m tests.crash.torture bad --database sqlite --seed 7 --round 0 --times 20" in done.stdout
    assert done.stdout.endswith(": promises were broken: bad on sqlite\n")
    assert (tmp_path / "bad-sqlite-0" / "log").exists()


def test_the_scenes_are_listed_with_a_sentence_each() -> None:
    listed = torture("--list").splitlines()
    assert [line.split()[0] for line in listed] == list(SCENES)
    assert all(len(line.split()) > 6 for line in listed)


def test_an_unknown_scene_is_refused_and_the_others_are_named() -> None:
    command = [sys.executable, "-m", "tests.crash.torture", "flood"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no scene 'flood'; the scenes are imports, links," in done.stderr
