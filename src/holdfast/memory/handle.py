"""A store that is opened when it is first asked for, and given back when it is closed or nobody holds it any more."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from holdfast import erasing
from holdfast.errors import StoreNotOpen
from holdfast.store import sharing
from holdfast.store.database import Store, in_thread


class _Open(NamedTuple):
    """An open store: in which process, and what releases it when nobody else does."""

    store: Store
    pid: int
    finalizer: weakref.finalize[..., object]


class Handle:
    """Whoever asks for the store passes how it is opened: a handle does not keep its owner alive."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._is_closed = False
        self._opening = threading.Lock()  # held while the store is opened
        self._changing = threading.Lock()  # never held for long
        self._awaited: asyncio.Future[Store] | None = None

    def known(self) -> Store | None:
        """The store, if it is open. What a child process has inherited is not: it opens its own."""
        known = self._open
        return known.store if known is not None and known.pid == os.getpid() else None

    async def store(self, open_store: Callable[[], Store], name: str) -> Store:
        """The store, opened if need be. All who ask meanwhile go on in the order in which they asked."""
        waiting = self._awaited if self._awaited is not None and not self._awaited.done() else None
        if waiting is None and (known := self.known()) is not None:
            return known
        if waiting is None or waiting.get_loop() is not asyncio.get_running_loop():
            self._awaited = waiting = in_thread(lambda: self._opened(open_store, name))
        return await waiting

    def _opened(self, open_store: Callable[[], Store], name: str) -> Store:
        with self._opening:
            if (known := self.known()) is not None:
                return known
            if self._is_closed:
                raise _closed(name)
            store = open_store()
            try:
                erasing.finish_what_was_left(store)
                self._keep(store, name)
            except BaseException:
                sharing.release(store)
                raise
            return store

    def _keep(self, store: Store, name: str) -> None:
        with self._changing:
            if self._is_closed:  # meanwhile
                raise _closed(name)
            if self._open is not None:  # inherited, and of no use here
                self._open.finalizer.detach()
            self._open = _Open(store, os.getpid(), sharing.release_with(self, store))

    def reopen(self) -> None:
        """Let it be opened again after it was closed."""
        self._is_closed = False

    async def close(self) -> None:
        with self._changing:
            self._is_closed = True
        store = self._left()
        if store is not None:
            await in_thread(lambda: sharing.release(store))

    def leave(self) -> None:
        """Give the store back without waiting: another one will be opened."""
        store = self._left()
        if store is not None:
            sharing.release_aside(store)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _left(self) -> Store | None:
        """The store that is to be released, now that it is no longer this one's."""
        with self._changing:
            was_open, self._open = self._open, None
        if was_open is None or was_open.finalizer.detach() is None or was_open.pid != os.getpid():
            return None
        return was_open.store


def _closed(name: str) -> StoreNotOpen:
    return StoreNotOpen(f"this memory on {name!r} was closed; await memory.open() first, or make another one")
