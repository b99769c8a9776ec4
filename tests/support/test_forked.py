"""A program that the server forks does what a new Python would do: the same output, the same exit code."""

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
    done = forked.run(new[1:], env=env, cwd=tmp_path, input=said, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_a_forked_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    env = {**os.environ, "BYSSUS_DB": str(tmp_path / "t.db")}
    with AgentStorage(tmp_path / "t.db"), pytest.raises(subprocess.TimeoutExpired):
        forked.run(["-m", "byssus", "show", "t", "--follow"], env=env, cwd=tmp_path, input="", timeout=0.5)


PROGRAM = """
import inspect, os, sys, warnings
from pathlib import Path
import neighbor

def documented(text: str) -> "Path": ...

print(__name__, sys.argv, os.getcwd(), sys.path[0], os.environ["TOLD"], neighbor.NAME, input())
print(sorted(name for name in globals() if not name.startswith("_")))
print(sys.modules["__main__"].documented is documented, "tests" in sys.modules, len(warnings.filters) > 0)
print(inspect.get_annotations(documented, eval_str=True))
if sys.argv[-1] == "warn":
    warnings.warn("as an error", UserWarning)
if sys.argv[-1] == "drop":
    open("dropped", "w")  # a ResourceWarning, which is printed
sys.exit(f"ended: {sys.argv[-1]}")
"""


@pytest.mark.parametrize("last", ["well", "drop", "warn"])
@pytest.mark.parametrize("option", [[], ["-W", "error"]], ids=["", "error"])
@pytest.mark.parametrize("form", ["text", "file", "module"])
def test_a_forked_program_is_the_same_as_one_of_a_new_python(
    tmp_path: Path, form: str, option: list[str], last: str
) -> None:
    (tmp_path / "beside.py").write_text(PROGRAM, "utf-8")
    (tmp_path / "neighbor.py").write_text("NAME = 'neighbor'", "utf-8")
    env = {**os.environ, "PYTHONUTF8": "1", "TOLD": "told"}
    forms = {"text": ["-c", PROGRAM], "file": [str(tmp_path / "beside.py")], "module": ["-m", "beside"]}
    new = [sys.executable, *option, *forms[form], "first", last]
    expected = subprocess.run(
        new, env=env, cwd=tmp_path, input="a line\n", capture_output=True, encoding="utf-8", check=False
    )
    done = forked.run(new[1:], env=env, cwd=tmp_path, input="a line\n")
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert done.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]
    assert done.returncode == 1


def test_a_forked_process_is_told_and_heard_line_by_line_and_can_be_killed(tmp_path: Path) -> None:
    program = "import sys\nfor line in sys.stdin: print('heard', line, end='', flush=True)\nprint('end')"
    pipe = subprocess.PIPE
    started = [forked.Process(["-c", program], env=os.environ, cwd=tmp_path, stdin=pipe, stdout=pipe) for _ in range(2)]
    with started[0] as one, started[1] as other:
        for process in started:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("you\n")
            process.stdin.flush()
            assert process.stdout.readline() == "heard you\n"
        assert one.poll() is None
        one.kill()
        assert (one.wait(60), one.poll()) == (-9, -9)
        assert other.poll() is None
        assert other.communicate() == ("end\n", "")
    assert other.returncode == 0
