"""A bell wakes one follower that waits, from any OS thread. A ring without a waiter counts for the next wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class Bell:
    """Rung from any OS thread, for one waiter: on an event loop (`wait`), or on a thread that blocks (`wait_now`)."""

    __slots__ = ("_is_rung", "_wake")

    def __init__(self) -> None:
        self._is_rung = False
        self._wake: Callable[[], object] | None = None  # of the waiter

    def ring(self) -> None:
        self._is_rung = True  # before the look: a waiter that begins now checks this afterwards
        if (wake := self._wake) is not None:
            wake()

    async def wait(self) -> None:
        """Wait on the running event loop until it rings."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            self._wake = None
            if asyncio._get_running_loop() is loop:  # None elsewhere, where the public one raises
                _settle(waiter)
            else:
                with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits there
                    loop.call_soon_threadsafe(_settle, waiter)

        self._wake = wake
        try:
            if not self._is_rung:
                await waiter
        finally:
            self._wake = None
            self._is_rung = False

    def wait_now(self) -> None:
        """Block until it rings."""
        event = threading.Event()
        self._wake = event.set
        try:
            if not self._is_rung:
                event.wait()
        finally:
            self._wake = None
            self._is_rung = False


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
