"""How a store stands still while its process forks: no transaction may be under way, and none may begin."""

from __future__ import annotations

import threading
from collections.abc import Callable

_HURRY_SECONDS = 0.05


class Pauses:
    """Lets a store be stopped between two pieces of work: `with pauses:` is such a piece."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._paused = False

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            self._working += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._working -= 1
            if self._paused:
                self._changed.notify_all()

    def pause(self, hurry: Callable[[], object]) -> None:
        """Wait until nothing is under way, and keep it so. `hurry` interrupts what can be run again."""
        with self._changed:
            self._paused = True
            while self._working:
                hurry()  # again and again: what has just begun to work may not be what was interrupted
                self._changed.wait(_HURRY_SECONDS)

    def go_on(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()
