"""One store for each database in a process, counted by its users.

Two of them on one SQLite file would break each other's locks, and on Postgres they would only cost connections. What is
still open when the process ends is closed then. A child process inherits nothing: it opens the database again.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import TypeVar

from byssus.store.database import Store

S = TypeVar("S", bound=Store)

_stores: dict[Hashable, Store] = {}
_lock = threading.Lock()
_log = logging.getLogger("byssus.store")


def share(key: Callable[[S | None], Hashable | None], make: Callable[[], S], check: Callable[[S], object]) -> S:
    """The store with this key, created if there is none. The key None is never shared. Return it with `release`.

    The key is asked for without a store, and of a store that was just made: what a path leads to can change meanwhile,
    and a file has no identity before it exists.
    """
    with _lock:
        known = key(None)
        store: S | None = None if known is None else _stores.get(known)  # type: ignore[assignment]
        if store is None:
            store = make()
            made = key(store)
            _stores[id(store) if made is None else made] = store
        else:
            check(store)
        store.users += 1
        return store


def still_open() -> list[Store]:
    """The stores of this process, for a `make` of `share`."""
    return list(_stores.values())


def retain(store: Store) -> None:
    """Be one more user of a store that is open."""
    with _lock:
        store.users += 1


def release(store: Store) -> None:
    """Give a store back; the last one out closes it."""
    with _lock:
        store.users -= 1
        if store.users > 0:
            return
        for key in [key for key, known in _stores.items() if known is store]:
            del _stores[key]
        # Inside the lock: the next caller that opens the same database must not get a half-closed store.
        store.close()


def release_with(owner: object, store: Store) -> weakref.finalize[..., object]:
    """Release a store when its owner is collected, unless what this returns was detached before."""
    finalizer = weakref.finalize(owner, release_aside, store)
    finalizer.atexit = False  # what is open then is closed then anyway
    return finalizer


def release_aside(store: Store) -> None:
    """Release a store without waiting: the garbage collector may run inside what the release would wait for."""
    threading.Thread(target=release, args=(store,), name="byssus-release", daemon=True).start()


def _close_all() -> None:
    for store in list(_stores.values()):
        store.close()


def _before_fork() -> None:
    _lock.acquire()
    for store in _stores.values():
        store.before_fork()


def _after_fork() -> None:
    try:
        for store in _stores.values():
            try:
                store.after_fork()
            except Exception:  # noqa: BLE001 - the other databases have nothing to do with it
                _log.exception("%r could not be opened again after a fork; close it and open it again", store.name)
    finally:
        _lock.release()


def _forget_all() -> None:
    global _lock  # noqa: PLW0603 - the parent's hand is on the other one
    for store in _stores.values():
        store.abandon()
        store.presence.abandon()
    _stores.clear()
    _lock = threading.Lock()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_all)
