"""The end of a command that runs agents: a tool can go on although it was stopped, as a thread does.

Python would wait for it for ever, when it closes the event loop and again when it exits. So such an event loop is
closed last, when all is stored and printed, and after a moment the process ends without the tool.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_PATIENCE = 2.0  # seconds for tools that go on

_open: list[asyncio.Runner] = []


def closed_last(runner: asyncio.Runner) -> asyncio.Runner:
    """Leave it to `close_runners` to close an event loop in which agents run."""
    _open.append(runner)
    return runner


def close_runners(code: int) -> None:
    """Close the event loops. If a tool goes on, or at Ctrl-C, end the process with this exit code."""
    while _open:
        timer = threading.Timer(_PATIENCE, _end, [code])
        timer.daemon = True
        timer.start()
        try:
            _open.pop().close()
        except KeyboardInterrupt:
            _end(code)
        timer.cancel()


def _end(code: int) -> None:
    for output in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or the terminal is gone
            output.flush()
    os._exit(code)
