"""A store that is opened when it is first asked for, and given back when it is closed or nobody holds it any more."""

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
from byssus.threads import erasure

T = TypeVar("T")


class _Open(NamedTuple):
    """An open store: in which process, and what releases it when nobody else does."""

    store: Store
    pid: int
    finalizer: weakref.finalize[..., object]


class Handle:
    """The store at one place. `name` is that place, as people may see it and as another process finds it."""

    def __init__(self, name: str, open_store: Callable[[], Store]) -> None:
        self.name = name
        self._open_store = open_store
        self._open: _Open | None = None
        self._is_closed = False
        self._opening = threading.Lock()  # held while the store is opened
        self._changing = threading.Lock()  # never held for long
        self._awaited: asyncio.Future[Store] | None = None

    def known(self) -> Store | None:
        """The store, if it is open. What a child process has inherited is not: it opens its own."""
        known = self._open
        return known.store if known is not None and known.pid == os.getpid() else None

    def anew(self) -> Handle:
        """Another handle on the same place, not open yet."""
        return Handle(self.name, self._open_store)

    async def store(self) -> Store:
        """The store, opened if need be. All who ask meanwhile go on in the order in which they asked."""
        waiting = self._awaited if self._awaited is not None and not self._awaited.done() else None
        if waiting is None and (known := self.known()) is not None:
            return known
        if waiting is None or waiting.get_loop() is not asyncio.get_running_loop():
            self._awaited = waiting = in_worker(self._opened)
        return await waiting

    def _opened(self) -> Store:
        with self._opening:
            if (known := self.known()) is not None:
                return known
            if self._is_closed:
                raise self._closed()
            store = self._open_store()
            try:
                erasure.finish_what_was_left(store)
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

    def reopen(self) -> None:
        """Let it be opened again after it was closed."""
        self._is_closed = False

    def look(self, query: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What a query reads, for whoever cannot await it. The store is not kept open for that."""
        known = self.known()
        if known is not None:
            return known.read_now(query, *args, **kwargs)
        store = self._open_store()
        try:
            return store.read_now(query, *args, **kwargs)
        finally:
            sharing.release(store)

    async def close(self) -> None:
        """Give the store back. Who is just opening it hears that it was closed."""
        store = self._left()
        if store is not None:
            await in_worker(lambda: sharing.release(store))

    def leave(self) -> None:
        """The same, where nobody can wait."""
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
        return StoreNotOpen(f"this memory on {self.name!r} was closed; await memory.open() first, or make another one")
