"""The signal by which a run learns that it shall stop.

It is set once and from any thread. A tool looks at `aborted` between two steps, or awaits `wait()`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Signal:
    """Set once, by `abort()` or by a limit; `reason` says why."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._reason: str | None = None

    @property
    def aborted(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        return self._reason

    def abort(self, reason: str = "aborted") -> None:
        """Set the signal. The first reason stays."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_abort(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back once when the signal is set (at once if it is); returns a function that takes this back."""
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return lambda: self._forget(callback)
        callback()
        return lambda: None

    async def wait(self) -> None:
        """Return when the signal is set."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        forget = self.on_abort(lambda: loop.call_soon_threadsafe(done.set))
        try:
            await done.wait()
        finally:
            forget()

    def _forget(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
