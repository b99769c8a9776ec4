"""What a shell completes: commands, options and thread ids. bash itself is asked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from byssus import UserMessage
from byssus.checkpointer import checkpointer_for
from tests.support.commands import command_here

_ASK = """\
byssus() {{ '{python}' -m byssus "$@"; }}
eval "$(byssus completion bash)"
ask() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _byssus; echo "${{COMPREPLY[*]}}"; }}
ask byssus thr
ask byssus show --la
ask byssus show tr
"""


@pytest.mark.processes
def test_bash_completes_commands_options_and_threads(tmp_path: Path) -> None:
    place = str(tmp_path / "chat.db")

    async def fill() -> None:
        async with checkpointer_for(place) as cp:
            for name in ("trip", "trap$(touch owned)", "other"):
                await cp.append(name, UserMessage("hi"))

    asyncio.run(fill())
    done = subprocess.run(
        ["bash", "--norc", "-c", _ASK.format(python=sys.executable)],
        env={**os.environ, "BYSSUS_DB": place, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["threads", "--last", "trip"], done.stderr
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(("shell", "sign"), [("bash", "complete -o"), ("zsh", "bashcompinit"), ("fish", "-l last")])
def test_each_shell_gets_a_script_without_a_database(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str, sign: str
) -> None:
    assert sign in command_here(capsys, str(tmp_path / "none.db"))("completion", shell).stdout
    assert not (tmp_path / "none.db").exists()
