"""Handing a run over: it stops at its next commit and stays unfinished, so that another process goes on with it.

- From the request on, no tool is started and no model is asked, also not again after a failure. Tools that run come to
  their end and their results are stored; a reply that streams comes to its end and is stored. Then the lease is given
  back.
- After the grace period the run is aborted with the reason `HANDED_OVER`. A tool that still runs is left as started,
  and its recovery policy decides, as after a crash. Of a reply that still streams, what has arrived is stored.
- A run that has nothing left to do when it stops has simply ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from byssus.errors import InputError
from byssus.signals import Signal

HANDED_OVER = "handed_over"  # the reason of the signal when the grace period is over
GRACE = 20.0  # seconds; a container usually gets 30 between SIGTERM and SIGKILL


class HandOver:
    """Whether a run was asked to hand its thread over. May be asked from any thread."""

    def __init__(self, signal: Signal) -> None:
        self.is_asked = False
        self.asked = Signal()  # the same, for what waits
        self._signal = signal
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._callbacks: list[Callable[[float], object]] = []

    def ask(self, grace: float) -> None:
        """Stop at the next commit, and at the latest after `grace` seconds."""
        self.is_asked = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the run with it
            self._loop.call_soon_threadsafe(self._begin, grace)

    def _begin(self, grace: float) -> None:
        end = self._loop.time() + grace
        if self._timer is None or end < self._timer.when():  # a later request can only shorten the time
            self.stop()
            self.asked.abort(HANDED_OVER)
            self._timer = self._loop.call_at(end, self._signal.abort, HANDED_OVER)
            for callback in list(self._callbacks):
                callback(grace)

    def on_ask(self, callback: Callable[[float], object]) -> Callable[[], None]:
        """Call back with the seconds that are left when (or if) the run was asked; returns what unregisters it."""
        self._callbacks.append(callback)
        if self._timer is not None:
            callback(max(self._timer.when() - self._loop.time(), 0.0))
        return lambda: self._callbacks.remove(callback)

    def stop(self) -> None:
        """The run is over."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def leaves_calls(self) -> bool:
        """Whether calls that were not started are left to the next run. An abort for another reason declines them."""
        return self.is_asked and self._signal.reason in (None, HANDED_OVER)

    @property
    def is_late(self) -> bool:
        """Whether the grace period is over."""
        return self._signal.reason == HANDED_OVER


def checked_grace(grace: object) -> float:
    if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace < 1e9:
        raise InputError(f"grace must be a number of seconds from 0 up, got {grace!r:.80}")
    return grace


def checked_policy(policy: object) -> bool:
    """Whether SIGTERM hands the runs of an agent over, instead of aborting them."""
    if policy not in ("abort", "hand_over"):
        raise InputError(f"on_sigterm must be 'abort' or 'hand_over', got {policy!r:.80}")
    return policy == "hand_over"
