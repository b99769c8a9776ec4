"""What makes a child's run follow its parent's run.

The parent decides what SIGTERM does: its run is aborted or handed over, and the child's run with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from byssus.run.children.tool import Above
from byssus.run.outside.handing_over import HANDED_OVER, HandOver
from byssus.signals import Signal
from byssus.store.keeper import LOST


class Led(Protocol):
    """A run, as far as it is led."""

    @property
    def signal(self) -> Signal: ...
    @property
    def handing(self) -> HandOver: ...


@contextmanager
def led(run: Led, above: Above) -> Iterator[None]:
    """Abort the run when its parent's run is aborted; hand it over when that is handed over, or has lost its lease."""

    def abort() -> None:
        # With the parent's lease, its run has passed to another process, and the child's run goes with it.
        reason = above.signal.reason or "aborted"
        run.signal.abort(HANDED_OVER if reason == LOST else reason)

    forget_abort = above.signal.on_abort(abort)
    forget_request = above.handing.on_ask(run.handing.ask)
    try:
        yield
    finally:
        forget_abort()
        forget_request()
