"""A real terminal with a program on it."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tests.support import forked

_OWN_THE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A pseudo-terminal with a program on it, driven by what appears there."""

    def __init__(
        self,
        *command: str,
        env: dict[str, str],
        without: Collection[str] = (),
        cwd: Path | None = None,
        new_python: bool = True,
    ) -> None:
        """Start the program. Without `new_python`, it is one for Python, and forked, which saves the start of that."""
        self._master, slave = os.openpty()
        inherited = {name: each for name, each in os.environ.items() if name not in without}
        environment = {**inherited, "TERM": "dumb", **env}
        self.process: subprocess.Popen[bytes] | forked.Process
        if new_python:
            self.process = subprocess.Popen(
                [sys.executable, "-ISc", _OWN_THE_TERMINAL, *command],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
        else:
            self.process = forked.Process(
                command,
                env=environment,
                cwd=cwd or Path.cwd(),
                stdin=slave,
                stdout=slave,
                stderr=slave,
                has_terminal=True,
            )
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern appears, and return all up to its end; what is behind it stays for the next time."""
        while not (found := re.search(pattern, self.screen)):
            ready, _, _ = select.select([self._master], [], [], 60)
            assert ready, f"{pattern!r} did not appear: {self.screen!r}"
            self.screen += os.read(self._master, 65536).decode(errors="replace")
        seen, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return seen

    def wait_for_its_end(self) -> str:
        """All that appears until the program has ended."""
        with suppress(OSError):  # Linux says so when there is nothing left, others return nothing
            while select.select([self._master], [], [], 60)[0] and (more := os.read(self._master, 65536)):
                self.screen += more.decode(errors="replace")
        self.process.wait(60)
        return self.screen

    def press_until_it_ends(self, key: str) -> None:
        """Press the key, and again where it falls between Python's prompt and its wait for input, and is not seen."""
        for _ in range(60):
            with suppress(OSError):  # it has ended, and its terminal with it
                self.type(key)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
                break
        else:
            raise AssertionError(f"{key!r} does not end it: {self.screen!r}")
        with suppress(OSError):  # Linux says so when there is nothing left, others return nothing
            while last := os.read(self._master, 65536):
                self.screen += last.decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
