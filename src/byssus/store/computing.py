"""Python that takes a while: on a few workers of its own, beside the event loop and beside the readers of a store.

What is read from a database is worked on here, after its transaction has ended. So however long that takes, it keeps
no reader from others, pins no snapshot, and delays no fork.

- There are few workers for the whole process, whatever is asked of them: the interpreter runs one thread at a time.
- A caller that is cancelled gets its CancelledError immediately. A call that has not begun is dropped; a running one is
  signalled, and ends at its next check.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
IsDropped = Callable[[], bool]  # whether the caller is gone

_WORKERS = 2  # so that a short call does not wait for a long one
_workers = ThreadPoolExecutor(_WORKERS, "byssus-compute")  # which starts no thread before the first call


def _forget() -> None:
    global _workers  # noqa: PLW0603 - its threads are the parent's
    _workers = ThreadPoolExecutor(_WORKERS, "byssus-compute")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


async def compute(call: Callable[[IsDropped], T]) -> T:
    """Run a call beside the event loop. It is passed a function that tells whether its caller is gone."""
    dropped = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(_workers, call, dropped.is_set)
    except asyncio.CancelledError:
        dropped.set()
        raise
