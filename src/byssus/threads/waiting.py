"""Writing to a thread that a run may drive: at once, over the lease of a dead owner, or after a while."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from byssus.errors import ThreadBusy
from byssus.queries.log.leases import NO_EPOCH
from byssus.store import keeper, owners
from byssus.store.operations import Runner

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1


async def retry_while_driven(store: Runner, attempt: Callable[[int], Awaitable[T]], seconds: float) -> T:
    """Make the attempt until no run drives the thread, for so many seconds at most.

    The attempt gets the epoch of a lease that it may write over, because its owner is known to be gone.
    """
    deadline = time.monotonic() + seconds
    dead_epoch, pause = NO_EPOCH, _FIRST_PAUSE
    while True:
        try:
            return await attempt(dead_epoch)
        except ThreadBusy as busy:
            left = deadline - time.monotonic()
            if busy.epoch != dead_epoch and owner_is_gone(busy.owner):
                dead_epoch = busy.epoch
                continue
            if left <= 0:
                raise
        await store.sleep(min(pause, left))
        pause = min(pause * 2, _LONGEST_PAUSE)


def owner_is_gone(owner: str) -> bool:
    """Whether this owner's lease is of no use any more: its process has ended, or its run in this process has."""
    token = owners.token_of(owner)
    return owners.process_has_ended(owner) if token is None else not keeper.is_alive(token)
