"""Signals that end a screen in good order: SIGTERM, and SIGHUP from a terminal that goes away."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType


def on_end(leave: Callable[[int], object]) -> None:
    """Call `leave(signal number)` in the running event loop when such a signal comes; once that is closed, nothing.

    These are not the loop's own handlers: those go with the loop, and a SIGHUP that comes a moment after the end of the
    input would kill the process.
    """
    loop = asyncio.get_running_loop()

    def note(number: int, _: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: the program leaves already
            loop.call_soon_threadsafe(leave, number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, note)


def outlive_terminal() -> None:
    """Ignore a SIGHUP that is still on its way: Python takes its handlers away before the process ends."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
