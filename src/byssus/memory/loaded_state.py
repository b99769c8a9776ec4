"""A loaded state that is not stored yet. The first awaited call, on any event loop, stores it exactly once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from typing import Any

from byssus.queries.log import memories
from byssus.queries.log.leases import Unleased
from byssus.queries.log.memories import MarkedMessage
from byssus.queries.versions import deleting
from byssus.store.database import Store
from byssus.threads.waiting import retry_while_driven
from byssus.values.thread_key import ThreadKey


class Loaded:
    """The summary of a state, as it is stored, and its messages, if it has any, which replace the current ones."""

    def __init__(self, summary: str, entries: Sequence[MarkedMessage] | None) -> None:
        self.summary = summary
        self.is_stored = False
        self._entries = entries
        self._claiming = threading.Lock()
        self._under_way: Future[None] | None = None

    async def settle(self, store: Store, thread: ThreadKey, *, wait: float) -> None:
        """Store the state, or wait until another caller has stored it."""
        while not self.is_stored:
            with self._claiming:
                other = self._under_way
                if other is None:
                    mine = self._under_way = Future()
                    mine.set_running_or_notify_cancel()  # callers that wait for it cannot cancel it
            if other is not None:
                await asyncio.wrap_future(other)
                continue
            try:
                await self._write(store, thread, wait)
            finally:
                self._under_way = None
                mine.set_result(None)

    async def _write(self, store: Store, thread: ThreadKey, wait: float) -> None:
        written: asyncio.Future[Any] | None = None

        def attempt(dead_epoch: int) -> Awaitable[Any]:
            nonlocal written
            if self._entries is None:
                written = store.write(memories.summarize, thread, self.summary)
            else:
                by = Unleased(dead_epoch)
                written = store.write(memories.replace, thread, self._entries, self.summary, by=by)
            return written

        try:
            await retry_while_driven(store, attempt, wait)
        finally:  # also if the call was cancelled: it has written
            self.is_stored = written is not None and written.done() and written.exception() is None
        if self._entries is not None:
            await collect(store, thread)


async def collect(store: Store, thread: ThreadKey) -> None:
    """Remove messages that nothing reads any more. If this is interrupted, the next call continues."""
    left: list[int] | None = None
    while left is None or left:
        left = (await store.write(deleting.collect, thread, left)).left
