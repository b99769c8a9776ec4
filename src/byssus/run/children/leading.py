"""What makes a child's run follow its parent's run.

The parent decides what SIGTERM does: its run is aborted or handed over, and the child's run with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from byssus.run.children.tool import Above
from byssus.run.outside.handing_over import HandOver
from byssus.signals import Signal


class Led(Protocol):
    """A run, as far as it is led."""

    @property
    def signal(self) -> Signal: ...
    @property
    def handing(self) -> HandOver: ...


@contextmanager
def led(run: Led, above: Above) -> Iterator[None]:
    """Abort the run when its parent's run is aborted, for the same reason; hand it over when that is handed over."""
    forget_abort = above.signal.on_abort(lambda: run.signal.abort(above.signal.reason or "aborted"))
    forget_request = above.handing.on_ask(run.handing.ask)
    try:
        yield
    finally:
        forget_abort()
        forget_request()
