"""The error output of a child process: it goes to the log, and its last lines into errors about the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from typing import TextIO

log = logging.getLogger("byssus.mcp")

_LINES = 20
_LONGEST_LINE = 2_000
_PATIENCE = 1.0  # seconds to wait for the last lines of a process that has ended


class ErrorOutput:
    """A pipe that is read by its own OS thread. Before it is opened, it has no lines."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._writer: TextIO | None = None
        self._reader: threading.Thread | None = None

    def open(self) -> TextIO:
        """Return the end of the pipe that the process writes to."""
        reading, writing = os.pipe()
        self._writer = os.fdopen(writing, "w")
        self._reader = threading.Thread(target=self._read, args=(reading,), name="byssus-mcp-errors", daemon=True)
        self._reader.start()
        return self._writer

    def started(self) -> None:
        """Close our copy of the writing end, once the process has its own or cannot start: the
        reader would never end.
        """
        if self._writer is not None:
            self._writer.close()

    async def lines(self) -> list[str]:
        """Return the last lines; all of them if the process has ended."""
        if self._reader is not None:
            await asyncio.to_thread(self._reader.join, _PATIENCE)
        return list(self._lines)

    async def last_words(self) -> str:
        """Return the last lines as text to add to an error."""
        lines = await self.lines()
        return "\nits error output ends with:\n  " + "\n  ".join(lines) if lines else ""

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as stream, contextlib.suppress(OSError):
            while line := stream.readline(_LONGEST_LINE):
                self._lines.append(line.rstrip())
                log.info("%s", line.rstrip())
