"""The caller of an aborted run does not wait for a database that does not answer.

An aborted run still records how it ended. While another process holds the write lock, or a server hangs, that may take
long. The caller gets its result after a second; the run continues in the background until all is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from byssus.signals import Signal, shielded

_PATIENCE = 1.0  # seconds for which an aborted run may wait for one write
_LOOK = 0.1  # seconds between two checks


class Leaving:
    """Sets `ended` when the run was aborted and has waited for the database for too long."""

    def __init__(self, signal: Signal, waiting_since: Callable[[], float | None], ended: asyncio.Future[None]) -> None:
        self._waiting_since = waiting_since
        self._ended = ended
        self._aborted_at = 0.0
        self._loop = asyncio.get_running_loop()
        self.stop = signal.on_abort(self._on_abort)

    async def until_ended(self, run: asyncio.Task[Any]) -> None:
        """Wait until an aborted run has ended or is left, whatever cancels the waiting: that comes soon.

        It waits for a future of its own: the one before was cancelled with the caller.
        """
        self._ended = left = self._loop.create_future()
        if self._aborted_at:
            self._look()
        waits: set[asyncio.Future[Any]] = {run, left}
        with shielded():
            while not run.done() and not left.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def _on_abort(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the run with it
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._aborted_at = time.monotonic()
        self._look()

    def _look(self) -> None:
        if self._ended.done():
            return
        since = self._waiting_since()
        if since is not None and time.monotonic() - max(since, self._aborted_at) > _PATIENCE:
            self._ended.set_result(None)
        else:
            self._loop.call_later(_LOOK, self._look)
