"""Each Python block of the README and the docs passes `mypy --strict` as it stands, and so do the types of a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    built = DOCS / "_build"
    return [
        *sorted(ROOT.glob("README*.md")),
        *(page for page in sorted(DOCS.rglob("*.md")) if built not in page.parents),
    ]


def written_as_modules(folder: Path) -> dict[str, str]:
    """Write each block as a module whose line numbers are those of its page; the name of each tells its page."""
    found = {}
    for page in pages():
        text = page.read_text("utf-8")
        where = page.relative_to(ROOT).as_posix()
        for block in PYTHON_BLOCK.finditer(text):
            above = text.count("\n", 0, block.start(1))
            module = f"{re.sub(r'[^a-z0-9]', '_', where.lower())}_{above + 1}.py"
            (folder / module).write_text("\n" * above + block[1], "utf-8")
            found[module] = where
    return found


def mypy(folder: Path, modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Check modules in one run. The cache has a folder of its own: the whole project is checked from other paths."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "docs"), "--no-error-summary", "--no-pretty", *modules]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.processes
def test_each_python_block_passes_mypy_strict_as_it_stands(tmp_path: Path) -> None:
    page_of = written_as_modules(tmp_path)
    assert len(page_of) > 30
    done = mypy(tmp_path, sorted(page_of))
    told = re.sub(r"^([^:\n]+\.py):", lambda name: f"{page_of.get(name[1], name[1])}:", done.stdout, flags=re.MULTILINE)
    assert (told, done.stderr, done.returncode) == ("", "", 0), f"{told}\n{done.stderr}"


RUNS = """
from typing import assert_type

from byssus import Agent, RunResult
from byssus.stream import EventStream


class Trip:
    days: int


async def runs(agent: Agent) -> None:
    assert_type(await agent.prompt("a"), RunResult[None])
    assert_type(await agent.prompt("a", output=Trip), RunResult[Trip])
    assert_type(await agent.resume(), RunResult[None])
    assert_type(await agent.resume(output=Trip), RunResult[Trip])
    assert_type(agent.run_sync("a"), RunResult[None])
    assert_type(agent.run_sync("a", output=Trip), RunResult[Trip])
    assert_type(agent.stream("a"), EventStream[None])
    async with agent.stream("a", output=Trip) as events:
        assert_type(events.result, RunResult[Trip])
        assert_type(events.result.output.days, int)
    if (await agent.prompt("a")).stop_reason == "stoped":  # no stop reason: mypy says so
        pass
"""


@pytest.mark.processes
def test_the_result_of_a_run_has_the_type_of_its_output(tmp_path: Path) -> None:
    (tmp_path / "runs.py").write_text(RUNS, "utf-8")
    (told,) = mypy(tmp_path, ["runs.py"]).stdout.splitlines()
    assert "Non-overlapping equality check" in told
    assert "stoped" in told
