"""Other processes: what a test wants to know of two processes, it learns from two processes.

They are forked from one that has imported byssus (fork_server.py). A new Python runs those with mounts of their own,
and those of tests about the end of a program or about a child that the test itself buries: they are `fresh`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import byssus
from tests.support import forked

# What a process may complain of on a busy machine.
SLOW = re.compile(r"^\d+ write\(s\) to .* took [\d.]+ s$")

_SOURCE = str(Path(byssus.__file__).parents[1])

# What most of the scripts need.
PRELUDE = """\
import asyncio, json, logging, os, sys, threading, warnings
from byssus.errors import *
from byssus.store import sharing
from byssus.store.sqlite import store as sqlite
from byssus.queries.log import threads
from byssus.queries.log.threads import MessageRow
from byssus.values.thread_key import ThreadKey

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # the forks are on purpose

def rows(*bodies):
    return [MessageRow("id", "user", json.dumps(body)) for body in bodies]

def bodies(store, thread_id="t"):
    row = store.read_now(threads.find, ThreadKey("", thread_id))
    page = store.read_now(threads.page, row.branch, after=0, upto=row.head, limit=10**6) if row else []
    return [json.loads(body) for _, body in page]

"""


def _command(script: str, args: tuple[object, ...]) -> list[str]:
    return ["-W", "error", "-c", PRELUDE + textwrap.dedent(script), *map(str, args)]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": _SOURCE}


def run(script: str, *args: object, wrapper: tuple[str, ...] = (), fresh: bool = False, timeout: float = 60) -> str:
    """Run a script to its end; its output. A failure and anything on its standard error are failures here."""
    command, environment = _command(script, args), _environment()
    if wrapper or fresh:
        done = subprocess.run(
            [*wrapper, sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            check=False,
        )
    else:
        done = forked.run(command, env=environment, cwd=Path.cwd(), timeout=timeout)
    assert (done.returncode, done.stderr) == (0, ""), f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


class Child:
    """A process that answers each line with a line."""

    def __init__(self, process: subprocess.Popen[str] | forked.Process) -> None:
        self._process = process

    def tell(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, line: str = "") -> str:
        self.tell(line)
        return self.hear()


def with_mounts(mounts: str) -> tuple[str, ...] | None:
    """What runs a command with mounts of its own, which go with it; None where that is not allowed."""
    own = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--mount", "--map-root-user")
    wrapper = (*own, "sh", "-c", f'{mounts} && exec "$@"', "sh")
    try:
        is_allowed = subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return None
    return wrapper if is_allowed else None


@contextmanager
def started(script: str, *args: object, exit_code: int = 0, fresh: bool = False) -> Iterator[Child]:
    """A script that runs beside the test; it ends when its standard input does."""
    with _start(_command(script, args), fresh) as process:
        try:
            yield Child(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == exit_code
        finally:
            process.kill()


def _start(command: list[str], fresh: bool) -> subprocess.Popen[str] | forked.Process:
    pipe, environment = subprocess.PIPE, _environment()
    if fresh:
        return subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, text=True, env=environment)
    return forked.Process(command, env=environment, cwd=Path.cwd(), stdin=pipe, stdout=pipe)
