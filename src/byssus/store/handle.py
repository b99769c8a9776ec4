"""A store that is opened when it is first asked for, and released when its handle is closed or collected.

Every surface has one: coroutines await `store()` and `close()`, plain code calls `opened()` and `close_now()`. A child
process inherits no open store; its handle opens the database again.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from byssus.errors import StoreNotOpen
from byssus.store import sharing
from byssus.store.database import Store
from byssus.store.jobs import in_worker

T = TypeVar("T")


class _Open(NamedTuple):
    """An open store: in which process, and what releases it with its handle."""

    store: Store
    pid: int
    finalizer: weakref.finalize[..., object]


class Handle:
    """The store at one place. `name` is that place, as people may see it and as another process finds it.

    `on_open` is called, beside the event loop, with a store that was just opened; should it fail, the store is
    released. `if_closed` is what an error says about a handle that was closed.
    """

    def __init__(
        self,
        name: str,
        open_store: Callable[[], Store],
        *,
        on_open: Callable[[Store], object],
        if_closed: str,
    ) -> None:
        self.name = name
        self._open_store = open_store
        self._on_open = on_open
        self._if_closed = if_closed
        self._open: _Open | None = None
        self._is_closed = False
        self._opening = threading.Lock()  # held while the store is opened
        self._changing = threading.Lock()  # never held for long
        self._awaited: asyncio.Future[Store] | None = None

    def known(self) -> Store | None:
        """The store, if it is open. What a child process has inherited is not: it opens its own."""
        known = self._open
        return known.store if known is not None and known.pid == os.getpid() else None

    def required(self) -> Store:
        """The store, which must be open in this process."""
        known = self.known()
        if known is None:
            raise self._closed()
        return known

    def anew(self) -> Handle:
        """Another handle on the same place, not open yet."""
        return Handle(self.name, self._open_store, on_open=self._on_open, if_closed=self._if_closed)

    async def store(self) -> Store:
        """The store, opened if need be. All who ask meanwhile go on in the order in which they asked."""
        waiting = self._awaited if self._awaited is not None and not self._awaited.done() else None
        if waiting is None and (known := self.known()) is not None:
            return known
        if waiting is None or waiting.get_loop() is not asyncio.get_running_loop():
            self._awaited = waiting = in_worker(self.opened)
        return await waiting

    def opened(self) -> Store:
        """The store, opened if need be. Blocks."""
        if (known := self.known()) is not None:
            return known
        with self._opening:
            if (known := self.known()) is not None:
                return known
            if self._is_closed:
                raise self._closed()
            store = self._open_store()
            try:
                self._on_open(store)
                self._keep(store)
            except BaseException:
                sharing.release(store)
                raise
            return store

    def _keep(self, store: Store) -> None:
        with self._changing:
            if self._is_closed:  # meanwhile
                raise self._closed()
            if self._open is not None:  # inherited, and of no use here
                self._open.finalizer.detach()
            self._open = _Open(store, os.getpid(), sharing.release_with(self, store))

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, and not opened again."""
        return self._is_closed

    def reopen(self) -> None:
        """Let it be opened again after it was closed."""
        self._is_closed = False

    def look(self, query: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a read and block until it is done. The store is not kept open for that."""
        known = self.known()
        if known is not None:
            return known.read_now(query, *args, **kwargs)
        store = self._open_store()
        try:
            return store.read_now(query, *args, **kwargs)
        finally:
            sharing.release(store)

    async def close(self) -> None:
        """Release the store. A caller that is just opening it gets an error."""
        store = self._left()
        if store is not None:
            await in_worker(lambda: sharing.release(store))

    def close_now(self) -> None:
        """Release the store. Blocks."""
        store = self._left()
        if store is not None:
            sharing.release(store)

    def leave(self) -> None:
        """Release the store without waiting for it."""
        store = self._left()
        if store is not None:
            sharing.release_aside(store)

    def _left(self) -> Store | None:
        """The store that is to be released, now that it is no longer this one's."""
        with self._changing:
            self._is_closed = True
            was_open, self._open = self._open, None
        if was_open is None or was_open.finalizer.detach() is None or was_open.pid != os.getpid():
            return None
        return was_open.store

    def _closed(self) -> StoreNotOpen:
        return StoreNotOpen(self._if_closed)
