"""Writing to a thread that a run may drive: immediately, over the lease of a dead owner, or after waiting."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from byssus.errors import ThreadBusy
from byssus.queries.log.leases import NO_EPOCH
from byssus.store import keeper, owners
from byssus.store.operations import Runner

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
_REMEMBERED = 10_000  # leases of others


async def retry_while_driven(store: Runner, attempt: Callable[[int], Awaitable[T]], seconds: float) -> T:
    """Retry the write until no run drives the thread, for at most `seconds`.

    The attempt gets the epoch of a lease that it may write over, because its owner is known to be gone.
    """
    return await retry_while_any_driven(store, lambda dead: attempt(next(iter(dead.values()), NO_EPOCH)), seconds)


async def retry_while_any_driven(
    store: Runner, attempt: Callable[[Mapping[str, int]], Awaitable[T]], seconds: float
) -> T:
    """As `retry_while_driven`, for a write to several threads: the epochs come by the ids of the threads."""
    deadline = time.monotonic() + seconds
    dead: dict[str, int] = {}
    pause = _FIRST_PAUSE
    while True:
        try:
            return await attempt(dead)
        except ThreadBusy as busy:
            left = deadline - time.monotonic()
            if busy.epoch != dead.get(busy.thread_id) and lease_is_dead(store, busy.owner, busy.until):
                dead[busy.thread_id] = busy.epoch
                continue
            if left <= 0:
                raise
        await store.sleep(min(pause, left))
        pause = min(pause * 2, _LONGEST_PAUSE)


def lease_is_dead(store: Runner, owner: str, until: str) -> bool:
    """Whether a lease that has not expired is void: its owner is gone, or has not renewed it in time.

    `until` is its expiry, as it was just read. The clock of that expiry may have been set back, so a lease that was not
    renewed for its whole duration, by the clock of this process, has expired as well.
    """
    return owner_is_gone(store, owner) or _has_stood_still(owner, until)


def owner_is_gone(store: Runner, owner: str) -> bool:
    """Whether the owner's process is known to have ended, or its run in this process has."""
    token = owners.token_of(owner)
    return store.base.presence.has_ended(owner) if token is None else not keeper.is_alive(token)


_seen: dict[str, tuple[str, float]] = {}  # by the owner of a lease: until when it lasts, and since when we see that


def _has_stood_still(owner: str, until: str) -> bool:
    seconds, now = owners.seconds_of(owner), time.monotonic()
    if seconds is None:
        return False
    seen, since = _seen.pop(owner, (until, now))
    if seen != until:
        since = now
    while len(_seen) >= _REMEMBERED:
        del _seen[next(iter(_seen))]
    _seen[owner] = (until, since)
    return now - since > seconds
