"""Late writes: results that a run could not store are written as soon as the database is writable again.

The result of a tool that ran and a reply that was paid for are not lost because another process holds the write lock,
the disk is full or the server is unreachable. The run ends with that error. Its results are kept here, in memory, and
retried until they are written, until another run has taken the thread (then it is too late, which is logged), or until
the process ends. Each query here is idempotent: it raises `ThreadMoved` if it was already committed.

The store stays open while a write is waiting. At exit, the program waits a few seconds for it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from byssus.errors import LeaseLost, StoreBusy, StoreFull, StoreNotOpen, StoreUnreachable, ThreadMoved
from byssus.store import sharing
from byssus.store.database import Store
from byssus.values.thread_key import ThreadKey

TRANSIENT = (StoreBusy, StoreFull, StoreUnreachable)  # transient: a later attempt can succeed
_TOO_LATE = (LeaseLost, ThreadMoved)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts
_AT_EXIT = 10.0  # seconds for which the end of the program waits
_log = logging.getLogger("byssus.agent")


class LateWrite(NamedTuple):
    """A waiting write. `what` names what it stores, for the log."""

    what: str
    thread: ThreadKey
    query: Callable[..., Any]
    arguments: dict[str, Any]


class LateWrites:
    """The writes that wait for one store."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._waiting: list[LateWrite] = []
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None

    def add(self, write: LateWrite) -> None:
        """Write in the background as soon as that is possible."""
        store = self._store()
        assert store is not None
        with self._changed:
            self._waiting.append(write)
            if self._worker is None:
                sharing.retain(store)
                self._worker = threading.Thread(target=self._serve, args=(store,), name="byssus-late", daemon=True)
                self._worker.start()

    def has(self, thread: ThreadKey) -> bool:
        return any(write.thread == thread for write in self._waiting)

    async def catch_up(self, thread: ThreadKey) -> None:
        """Write what waits for a thread before its next run; raises the error if that fails."""
        store = self._store()
        for write in [write for write in self._waiting if write.thread == thread]:
            assert store is not None
            with contextlib.suppress(*_TOO_LATE):  # the worker was faster, or logs it
                await store.write(write.query, write.thread, **write.arguments)
                self._drop(write)

    def wait(self, deadline: float) -> None:
        """Wait until all is written, for a limited time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, max(0.0, deadline - time.monotonic()))

    def _serve(self, store: Store) -> None:
        pause = _FIRST_PAUSE
        while writes := self._next():
            try:
                attempts = [(write, store.submit(write.query, write.thread, **write.arguments)) for write in writes]
            except StoreNotOpen:  # the program ends
                attempts = []
                for write in writes:
                    _log.error("%s of thread %r is lost: the database was closed", write.what, write.thread.id)
                    self._drop(write)
            settled = [self._is_settled(write, outcome) for write, outcome in attempts]
            if not all(settled):
                time.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        sharing.release(store)

    def _next(self) -> list[LateWrite]:
        with self._changed:
            if not self._waiting:
                self._worker = None
            return list(self._waiting)

    def _is_settled(self, write: LateWrite, outcome: Future[Any]) -> bool:
        what, thread_id = write.what, write.thread.id
        try:
            outcome.result()
            _log.info("%s of thread %r could not be written in time, and is written now", what, thread_id)
        except TRANSIENT:
            return False
        except _TOO_LATE:
            if write in self._waiting:
                _log.warning("%s of thread %r came too late: the thread has moved on without it", what, thread_id)
        except Exception:  # noqa: BLE001 - the others wait for their turn
            _log.exception("%s of thread %r could not be written", what, thread_id)
        self._drop(write)
        return True

    def _drop(self, write: LateWrite) -> None:
        with self._changed:
            self._waiting = [waiting for waiting in self._waiting if waiting is not write]
            self._changed.notify_all()


_of: weakref.WeakKeyDictionary[Store, LateWrites] = weakref.WeakKeyDictionary()


def of(store: Store) -> LateWrites:
    """The writes that wait for this store."""
    return _of.get(store) or _of.setdefault(store, LateWrites(store))


def _wait_for_all() -> None:
    deadline = time.monotonic() + _AT_EXIT
    for late in list(_of.values()):
        late.wait(deadline)


atexit.register(_wait_for_all)  # before the stores are closed: what was registered last is called first
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_of.clear)
