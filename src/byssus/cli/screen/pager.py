"""What does not fit on the screen goes through a pager, as in git: `$PAGER`, or `less`.

Output is held back until it is longer than the screen. So a short list, an error and a pipe never start a pager, and
any pager will do. A person who leaves the pager has seen enough: that is no error.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from byssus.cli.screen import terminal
from byssus.cli.screen.table import width

# The commands that print what one reads; others talk, ask or report.
PAGED = {"threads", "users", "tasks", "show", "memory", "unfinished", "pending", "inbox", "checkpoints", "tree", "diff"}
PAGED |= {"run", "runs", "schedules", "search", "usage"}


@contextmanager
def paged(is_wanted: bool) -> Iterator[None]:
    """Let what is printed to a terminal go through the pager, if it is long."""
    command = _command() if is_wanted and terminal.is_screen() else None
    if command is None:
        yield
        return
    page, screen, remarks = _Page(sys.stdout, command), sys.stdout, sys.stderr
    sys.stdout = page
    if remarks is not None and remarks.isatty():  # or it would appear in the middle of the pager's screen
        sys.stderr = page
    try:
        yield
    except BrokenPipeError:
        if not page.was_left:
            raise
    finally:
        sys.stdout, sys.stderr = screen, remarks
        page.finish()


def _command() -> list[str] | None:
    """The pager; None if there is none, or none is wanted (PAGER=cat, or an empty one)."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        command = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:  # quotes that do not match
        return None
    return command if command and command != ["cat"] and shutil.which(command[0]) else None


class _Page(io.TextIOBase):
    """An output that is the screen, until there is more than fits: then it is the pager."""

    def __init__(self, screen: TextIO, command: list[str]) -> None:
        self._screen = screen
        self._command = command
        self._size = shutil.get_terminal_size()
        self._held = ""
        self._rows = 0
        self._pager: subprocess.Popen[bytes] | None = None
        self._to: TextIO | None = None  # where it goes by now; None: it is held back
        self.was_left = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here
        return self._screen.encoding

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._to is None:
            self._held += text
            self._rows += sum(max(0, width(line) - 1) // self._size.columns for line in text.split("\n"))
            self._rows += text.count("\n")
            if self._rows >= self._size.lines:
                self._start()
            return len(text)
        try:
            self._to.write(text)
        except BrokenPipeError:
            self.was_left = self._pager is not None
            raise
        return len(text)

    def flush(self) -> None:
        if self._to is not None:
            try:
                self._to.flush()
            except BrokenPipeError:
                self.was_left = self._pager is not None
                raise

    def close(self) -> None:
        """Do nothing: the screen stays open. Python closes what nobody uses, and 3.13 reports an error then."""

    def _start(self) -> None:
        env = {**os.environ, "LESS": os.environ.get("LESS", "FRX"), "LV": os.environ.get("LV", "-c")}
        try:
            self._pager = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=env)  # noqa: S603 - the person's own
        except OSError:  # it cannot be run: the screen will do
            self._to = self._screen
        else:
            assert self._pager.stdin is not None
            self._to = io.TextIOWrapper(self._pager.stdin, encoding=self.encoding, errors="backslashreplace")
        held, self._held = self._held, ""
        self.write(held)

    def finish(self) -> None:
        """Show what was held back, or wait until the person leaves the pager."""
        to, self._to = self._to, self._screen  # a log handler may have kept this output, and write to it later
        if self._pager is None:
            self._screen.write(self._held)
            return
        assert to is not None
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the key is the pager's: it stops a search there
        try:
            with suppress(BrokenPipeError):
                to.close()
            self._pager.wait()
        finally:
            signal.signal(signal.SIGINT, before)
