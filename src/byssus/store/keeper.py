"""The keeper of a process's leases: renews them, and hears who wants a run to stop.

It has a thread of its own, so that neither a blocked event loop nor a long queue of writes costs a run its lease. The
thread sleeps while there is nothing to keep.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

from byssus.errors import StoreNotOpen
from byssus.queries.log import leases
from byssus.queries.log.leases import Held
from byssus.store.database import Store

T = TypeVar("T")
LOST, ABORTED = "lease_lost", "aborted"

_LOOK = 0.05  # seconds between two looks at whether somebody wants a run to stop
_BEATS = 4  # renewals in the life of a lease
_AT_ONCE = 64  # renewals in one transaction: their threads cannot be written meanwhile
_PATIENCE = 0.25  # seconds between two looks at whether a lease has run out while the database does not answer
_LINGER = 2.0  # seconds that the thread stays awake without leases: waking it for each run would cost more
_log = logging.getLogger("byssus.store")


class Keeper:
    """Keeps the leases that this process has on one store."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._held: dict[Held, Callable[[str], object]] = {}
        self._renewed: dict[Held, float] = {}
        self._changed = threading.Condition()
        self._awake = False
        self._seen: Hashable = None  # the store's version when we last looked

    def keep(self, lease: Held, tell: Callable[[str], object]) -> None:
        """Renew the lease until it is dropped. `tell` is called, on the keeper's thread, with LOST or ABORTED."""
        with self._changed:
            _alive.add(lease.token)
            self._held[lease] = tell
            self._renewed[lease] = time.monotonic()
            if not self._awake:
                self._awake = True
                threading.Thread(target=self._serve, name="byssus-lease", daemon=True).start()

    def drop(self, lease: Held) -> None:
        """Stop renewing; whether or not the lease could be given back, this process has no use for it."""
        with self._changed:
            self._forget(lease)

    def _forget(self, lease: Held) -> None:
        self._held.pop(lease, None)
        self._renewed.pop(lease, None)
        _alive.discard(lease.token)

    def _serve(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(_LOOK)
            now = time.monotonic()
            with self._changed:
                idle_since = now if self._held else idle_since
                if now - idle_since > _LINGER:
                    self._awake = False
                    return
            store = self._store()
            try:
                if store is not None and self._held:
                    self._look(store)
                    self._beat(store, now)
            except StoreNotOpen:  # closed: nobody can write any more, so there is nothing to keep
                store = None
            except Exception as error:  # noqa: BLE001 - whatever it is, the runs of this process need their keeper
                _log.warning("the leases could not be renewed: %s", type(error).__name__)
                self._give_up()
            if store is None:
                with self._changed:
                    self._awake = False
                return

    def _look(self, store: Store) -> None:
        version = store.version()
        if version != self._seen:
            for lease in self._settled(store.submit_read(leases.aborted, list(self._held))):
                self._tell(lease, ABORTED)
            self._seen = version

    def _beat(self, store: Store, now: float) -> None:
        with self._changed:
            due = [lease for lease, then in self._renewed.items() if now - then > lease.seconds / _BEATS]
        for first in range(0, len(due), _AT_ONCE):
            some = due[first : first + _AT_ONCE]
            lost = self._settled(store.submit_first(leases.renew, some))
            with self._changed:
                self._renewed.update((lease, now) for lease in some if lease in self._renewed)
            for lease in lost:
                self._tell(lease, LOST)

    def _settled(self, future: Future[T]) -> T:
        """The outcome. A database that is away may keep us waiting for longer than a lease lasts."""
        while True:
            try:
                return future.result(timeout=_PATIENCE)
            except TimeoutError:
                if future.done():  # then it is the store's
                    raise
                self._give_up()

    def _give_up(self) -> None:
        """What could not be renewed for as long as it lasts is lost, whoever may have it now."""
        now = time.monotonic()
        with self._changed:
            late = [lease for lease, then in self._renewed.items() if now - then > lease.seconds]
        for lease in late:
            self._tell(lease, LOST)

    def _tell(self, lease: Held, what: str) -> None:
        with self._changed:
            tell = self._held.get(lease)
            if what == LOST:
                self._forget(lease)
        if tell is not None:
            tell(what)


_keepers: weakref.WeakKeyDictionary[Store, Keeper] = weakref.WeakKeyDictionary()
_alive: set[str] = set()  # the tokens of the leases that runs of this process hold or are about to get


def of(store: Store) -> Keeper:
    """The keeper of this store's leases."""
    return _keepers.get(store) or _keepers.setdefault(store, Keeper(store))


def expect(token: str) -> None:
    """A lease with this token is about to be claimed: nobody in this process shall take it for a dead one."""
    _alive.add(token)


def forget(token: str) -> None:
    """The claim came to nothing."""
    _alive.discard(token)


def is_alive(token: str) -> bool:
    """Whether a run of this process has the lease with this token."""
    return token in _alive
