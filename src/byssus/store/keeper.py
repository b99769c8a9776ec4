"""The keeper of a process's leases: renews them until they are dropped, and notices which ones were asked to stop.

What kind of lease it keeps is up to the two queries that it is given, so runs of threads and anything else that is
leased can have one each. A keeper has a worker of its own, an OS thread, so that neither a blocked event loop nor a
long queue of writes costs a lease. The worker ends when there is nothing left to keep.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from byssus.errors import StoreNotOpen, StoreUnusable
from byssus.store.database import Store, Tx

LOST, ABORTED = "lease_lost", "aborted"

_LOOK = 0.05  # seconds between two looks at whether a lease was asked to stop
_BEATS = 4  # renewals in the life of a lease
_AT_ONCE = 64  # renewals in one transaction: their threads cannot be written meanwhile
_PATIENCE = 0.25  # seconds between two looks at whether a lease has run out while the database does not answer
_LINGER = 2.0  # seconds that the worker stays without leases: starting one for each run would cost more
_log = logging.getLogger("byssus.store")


class KeptLease(Hashable, Protocol):
    """A lease of this process, as far as its keeper has to know it."""

    @property
    def seconds(self) -> float:
        """How long it lasts without a renewal."""

    @property
    def token(self) -> str:
        """What this process knows it by."""


T = TypeVar("T")
L = TypeVar("L", bound=KeptLease)
LeaseQuery = Callable[[Tx, Sequence[L]], list[L]]


class Keeper(Generic[L]):
    """Keeps leases of one kind on one store. `renew` returns those that are lost, `look` those asked to stop."""

    def __init__(self, store: Store, renew: LeaseQuery[L], look: LeaseQuery[L]) -> None:
        self._store = weakref.ref(store)
        self._renew = renew
        self._look_for = look
        self._held: dict[L, Callable[[str], object]] = {}
        self._renewed: dict[L, float] = {}
        self._changed = threading.Condition()
        self._awake = False
        self._seen: Hashable = None  # the store's version when we last looked

    def keep(self, lease: L, notify: Callable[[str], object]) -> None:
        """Renew the lease until it is dropped. `notify` is called, on the keeper's worker, with LOST or ABORTED."""
        with self._changed:
            _alive.add(lease.token)
            self._held[lease] = notify
            self._renewed[lease] = time.monotonic()
            if not self._awake:
                self._awake = True
                threading.Thread(target=self._serve, name="byssus-lease", daemon=True).start()

    def drop(self, lease: L) -> None:
        """Stop renewing; whether or not the lease could be given back, this process has no use for it."""
        with self._changed:
            self._forget(lease)

    @property
    def has_leases(self) -> bool:
        return bool(self._held)

    def _forget(self, lease: L) -> None:
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
            except StoreNotOpen:  # closed: no writes are possible any more, so there is nothing to renew
                store = None
            except StoreUnusable as error:  # the file was moved away: what these runs write is lost
                _log.warning("the leases are lost: %s", error)
                self._lose(list(self._held))
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
            for lease in self._settled(store.submit_read(self._look_for, list(self._held))):
                self._notify(lease, ABORTED)
            self._seen = version

    def _beat(self, store: Store, now: float) -> None:
        with self._changed:
            due = [lease for lease, then in self._renewed.items() if now - then > lease.seconds / _BEATS]
        for first in range(0, len(due), _AT_ONCE):
            some = due[first : first + _AT_ONCE]
            lost = self._settled(store.submit_first(self._renew, some))
            with self._changed:
                self._renewed.update((lease, now) for lease in some if lease in self._renewed)
            for lease in lost:
                self._notify(lease, LOST)

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
        """A lease that could not be renewed before its expiry is lost."""
        now = time.monotonic()
        with self._changed:
            late = [lease for lease, then in self._renewed.items() if now - then > lease.seconds]
        self._lose(late)

    def _lose(self, leases: Sequence[L]) -> None:
        for lease in leases:
            self._notify(lease, LOST)

    def _notify(self, lease: L, what: str) -> None:
        with self._changed:
            notify = self._held.get(lease)
            if what == LOST:
                self._forget(lease)
        if notify is not None:
            notify(what)


_keepers: weakref.WeakKeyDictionary[Store, dict[Any, Keeper[Any]]] = weakref.WeakKeyDictionary()
_alive: set[str] = set()  # the tokens of the leases that runs of this process hold or are about to get


def of(store: Store, renew: LeaseQuery[L], look: LeaseQuery[L]) -> Keeper[L]:
    """The keeper of one kind of lease on this store."""
    keepers = _keepers.setdefault(store, {})
    return keepers.get(renew) or keepers.setdefault(renew, Keeper(store, renew, look))


def has_leases(store: Store) -> bool:
    """Whether runs of this process hold leases on this store."""
    return any(keeper.has_leases for keeper in _keepers.get(store, {}).values())


def expect(token: str) -> None:
    """A lease with this token is about to be claimed: this process must not take it for a dead one."""
    _alive.add(token)


def forget(token: str) -> None:
    """The claim came to nothing."""
    _alive.discard(token)


def is_alive(token: str) -> bool:
    """Whether a run of this process has the lease with this token."""
    return token in _alive
