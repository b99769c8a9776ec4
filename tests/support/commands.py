"""The command `byssus`, in a process of its own or in this one, for the tests that run it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from byssus.cli import main
from tests.support import forked

Command = Callable[..., subprocess.CompletedProcess[str]]

_SLOWLY = """\
import sys
from byssus import cli
from byssus.queries.moving import exporting
from byssus.queries.moving import copying
from byssus.store.database import Store

left = int(sys.argv[1])

def boundary(_):
    global left
    left -= 1
    if left == 0:
        print("commit", flush=True)
        sys.stdin.readline()

{small_pages}
Store.boundary = staticmethod(boundary)
sys.exit(cli.main(sys.argv[2:]))
"""


def command(home: Path, place: str | None = None) -> Command:
    """What runs the command in a person's home directory, on the database that they usually work with."""
    usual = {} if place is None else {"BYSSUS_DB": place}

    def run(*args: object, code: int = 0, input: str | None = None) -> subprocess.CompletedProcess[str]:
        done = forked.run(
            ["-m", "byssus", *map(str, args)],
            env={**os.environ, "HOME": str(home), "PYTHONUTF8": "1", **usual},
            cwd=home,
            input="" if input is None else input,
            timeout=60,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    return run


class Shown(NamedTuple):
    """What a command has printed, on both outputs."""

    stdout: str
    stderr: str


Here = Callable[..., Shown]


def command_here(capsys: pytest.CaptureFixture[str], place: str) -> Here:
    """What runs the command in this process, on a database: nothing is started, so it takes no time."""

    def run(*args: object, code: int = 0) -> Shown:
        capsys.readouterr()
        try:
            ended: object = main([*map(str, args), "--db", place])
        except SystemExit as end:
            ended = end.code
        shown = Shown(*capsys.readouterr())
        assert ended == code, shown
        assert "Traceback" not in shown.stderr
        return shown

    return run


def slow_command(small_pages: str) -> str:
    """A program that is the command, in small pages, and that a test can stop before any commit: it says so, and waits.

    Its arguments are the number of that commit, and then the command's.
    """
    return _SLOWLY.format(small_pages=small_pages)
