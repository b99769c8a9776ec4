"""Schedules become tasks: each worker looks for the ticks that are due, and whichever is first uses them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from byssus.errors import ByssusError, StoreNotOpen
from byssus.store.database import Store
from byssus.tasks import schedules

_LONGEST = 5.0  # seconds between two looks: another process may have created a schedule, or the clock may have moved
_log = logging.getLogger("byssus.worker")


@contextlib.asynccontextmanager
async def ticking(
    store: Store, ends: Callable[[], bool] = lambda: False, *, first: bool = False
) -> AsyncIterator[None]:
    """Create the tasks of schedules beside the block; with `first`, those of the ticks that are due before it.

    `ends` says whether the worker is to end: then it does not wait until all missed ticks are made up for.
    """
    reported: set[str] = set()
    seconds = await _tick(store, reported, ends) if first else 0.0
    loop = asyncio.create_task(_keep_ticking(store, reported, ends, seconds))
    try:
        yield
    finally:
        loop.cancel()
        await asyncio.wait([loop])
        if not loop.cancelled():
            loop.exception()  # the store was closed, which the worker notices itself


async def _keep_ticking(store: Store, reported: set[str], ends: Callable[[], bool], seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        seconds = await _tick(store, reported, ends)


async def _tick(store: Store, reported: set[str], ends: Callable[[], bool]) -> float:
    """Create the tasks of what is due; the seconds until the next look."""
    try:
        seconds, failed = await schedules.tick(store, ends)
    except StoreNotOpen:
        raise
    except ByssusError as error:  # a database that is away comes back
        _log.warning("schedules tick late: %s", error)
        return _LONGEST
    for name in failed.keys() - reported:
        _log.error("schedule %r cannot tick in this process: %s", name, failed[name])
    reported.clear()
    reported.update(failed)
    return _LONGEST if seconds is None else min(seconds, _LONGEST)
