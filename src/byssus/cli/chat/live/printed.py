"""What tools and logs print while the chat is drawn: lines of the transcript, and not marks across the screen."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


class _Printed(io.TextIOBase):
    """Stands in for an output. Whole lines are shown; they may come from any OS thread."""

    def __init__(self, output: TextIO, show: Callable[[str], None]) -> None:
        self._output, self._show = output, show
        self._loop = asyncio.get_running_loop()
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here
        return self._output.encoding

    def isatty(self) -> bool:
        return self._output.isatty()

    def fileno(self) -> int:
        return self._output.fileno()

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this is the end already
                self._loop.call_soon_threadsafe(self._show, line)
        return len(text)

    def finish(self) -> None:
        if self._rest:
            self._output.write(self._rest)


@contextlib.contextmanager
def to_transcript(show: Callable[[str], None]) -> Iterator[None]:
    """Let what this process prints go to the transcript."""
    output, errors = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = printed = _Printed(output, show), _Printed(errors, show)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = output, errors
        for each in printed:
            each.finish()
