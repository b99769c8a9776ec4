"""Schedules become tasks: each worker looks for the ticks that are due, and whichever is first uses them."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

from byssus.errors import ByssusError, StoreNotOpen
from byssus.store.database import Store
from byssus.tasks import schedules

_LONGEST = 5.0  # seconds between two looks: another process may have created a schedule, or the clock may have moved
_log = logging.getLogger("byssus.worker")


async def keep_ticking(store: Store) -> NoReturn:
    """Create the tasks of schedules until this is cancelled, or the store is closed."""
    told: set[str] = set()
    while True:
        seconds: float | None = None
        try:
            seconds, failed = await schedules.tick(store)
            for name in failed.keys() - told:
                _log.error("schedule %r cannot tick in this process: %s", name, failed[name])
            told = {*failed}
        except StoreNotOpen:
            raise
        except ByssusError as error:  # a database that is away comes back
            _log.warning("schedules tick late: %s", error)
        await asyncio.sleep(_LONGEST if seconds is None else min(seconds, _LONGEST))
