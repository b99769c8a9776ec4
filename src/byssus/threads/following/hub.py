"""The hub of a process and a store: one look at the database for all followers, instead of one for each.

- A commit of this process rings the bells of its threads' followers at once: the store says which threads it is about.
- Commits of other processes are looked for by one worker, an OS thread. Where they come with the names of their
  threads, the followers of these are rung. Where they do not, one query finds the threads whose stamp has changed.
- A follower that is rung reads for itself, when it has time. So nothing is queued for it: a slow one costs no memory.
- Workers that wait for tasks have a bell, too (`TASKS`). It rings after each commit that may have made one ready.
- Replies that arrive in this process are kept here for its followers, as far as they were published.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable
from typing import NamedTuple

from byssus.errors import StoreError, StoreNotOpen
from byssus.queries.following import rows as following
from byssus.store.bell import Bell
from byssus.store.database import Store
from byssus.store.jobs import NO_THREAD, TASKS, thread_digest
from byssus.values.following.growth import Growth
from byssus.values.thread_key import ThreadKey

_LOOK = 0.02  # seconds between two looks at whether other processes have committed
_LOOK_FOR_TASKS = 0.05  # and if nobody but workers wants to know
_LOOK_ANYWAY = 0.25  # and if the other processes tell us
_EFFORT = 10  # a look at all threads is followed by a pause that is so many times as long
_LONGEST_PAUSE = 0.05  # seconds: on a busy machine a look takes longer than it costs
_LINGER = 2.0  # seconds that the worker stays without followers
_WATCHED = 30.0  # seconds for which a note of a follower is valid
_AWAY = 0.5  # seconds until the next look while the database does not answer
_log = logging.getLogger("byssus.store")


class LiveReply(NamedTuple):
    """A reply that arrives in this process, as far as it was published. `id` is that of its message."""

    id: str
    growth: Growth


class Hub:
    """Rings the bells of followers when their threads may have changed."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self.live: dict[ThreadKey, LiveReply] = {}
        self.here: set[ThreadKey] = set()  # threads with a run in this process: its replies need not be saved for us
        self._noted: dict[ThreadKey, float] = {}  # when it was noted last that a thread is watched from here
        self._bells: dict[ThreadKey, list[Bell]] = {}
        self._digests: dict[str, set[ThreadKey]] = {}
        # As the last look at all threads found them; None: there was no such thread.
        self._stamps: dict[ThreadKey, tuple[int, int] | None] = {}
        self._changed = threading.Lock()
        self._is_awake = False
        self._woken = threading.Event()  # there is something to look at
        self._is_due = False  # whether any thread may have changed since the last look at all of them

    def attach(self, thread_key: ThreadKey) -> Bell:
        """A bell that rings whenever the thread may have changed. `detach` it in the end."""
        bell = Bell()
        with self._changed:
            self._bells.setdefault(thread_key, []).append(bell)
            self._digests.setdefault(thread_digest(thread_key), set()).add(thread_key)
            store = self._store()
            if not self._is_awake and store is not None:
                store.on_commit = self.committed
                store.on_news = self._woken.set
                self._start()
        return bell

    def _start(self) -> None:
        try:
            threading.Thread(target=self._serve, name="byssus-hub", daemon=True).start()
        except RuntimeError as error:  # no more workers: the next follower tries again
            _log.warning("followers learn late of what other processes write: %s", error)
        else:
            self._is_awake = True

    def detach(self, thread_key: ThreadKey, bell: Bell) -> None:
        with self._changed:
            bells = self._bells.get(thread_key, [])
            if bell in bells:
                bells.remove(bell)
            if not bells:
                self._bells.pop(thread_key, None)
                self._stamps.pop(thread_key, None)
                self._noted.pop(thread_key, None)
                same = self._digests.get(thread_digest(thread_key), set())
                same.discard(thread_key)
                if not same:
                    self._digests.pop(thread_digest(thread_key), None)

    def committed(self, threads: Iterable[ThreadKey]) -> None:
        """This process has committed something about these threads."""
        for thread_key in threads:
            if thread_key == NO_THREAD:
                self._is_due = True  # a look tells which
                self._woken.set()
            self.ring(thread_key)

    def note_watching(self, thread_key: ThreadKey) -> None:
        """Tell the process that drives the thread that a follower here watches it, at intervals."""
        now, store = time.monotonic(), self._store()
        if store is not None and now - self._noted.get(thread_key, 0.0) > _WATCHED / 3:
            self._noted[thread_key] = now
            with contextlib.suppress(StoreError):
                store.submit(following.note_watching, thread_key, _WATCHED)

    def ring(self, thread_key: ThreadKey) -> None:
        """The thread may have changed, or a reply of it has grown."""
        for bell in tuple(self._bells.get(thread_key, ())):
            bell.ring()

    def reply_ended(self, thread_key: ThreadKey, live: list[LiveReply]) -> None:
        """A reply, if there is one, arrives no longer."""
        if live:
            if self.live.get(thread_key) is live[0]:
                del self.live[thread_key]
            live.clear()
            self.ring(thread_key)

    # --- on the worker ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        idle_since, not_before, looked_at = time.monotonic(), 0.0, 0.0
        while True:
            if self._woken.wait(self._pause()):
                self._woken.clear()
                time.sleep(max(looked_at + _LOOK - time.monotonic(), 0))  # many commits in a moment are one
            now = looked_at = time.monotonic()
            with self._changed:
                idle_since = now if self._bells else idle_since
                if now - idle_since > _LINGER:
                    self._is_awake = False
                    return
            try:
                if self._ring_named():
                    self._is_due = True
                if self._is_due and now >= not_before:
                    self._look()
                    took = time.monotonic() - now
                    not_before = now + took + min(took * _EFFORT, _LONGEST_PAUSE)
            except StoreNotOpen:
                self._end()
                return
            except Exception as error:  # noqa: BLE001 - no files are left, for example; followers that read will say so
                _log.debug("followers could not be woken for what is new: %s", type(error).__name__)
                self._is_due, not_before = True, now + _AWAY

    def _pause(self) -> float:
        """The seconds until the next look."""
        store = self._store()
        if store is not None and store.is_told and not self._is_due:
            return _LOOK_ANYWAY
        return _LOOK_FOR_TASKS if self._bells.keys() <= {TASKS} else _LOOK

    def _open_store(self) -> Store:
        store = self._store()
        if store is None:
            raise StoreNotOpen("the store is gone")
        return store

    def _ring_named(self) -> bool:
        """Ring for the threads that others have named; whether any other may have changed."""
        names = self._open_store().changed_elsewhere()
        for thread_key in [key for name in names or () for key in tuple(self._digests.get(name, ()))]:
            self.ring(thread_key)
        return names is None

    def _look(self) -> None:
        """Find the threads that have changed since the last look, or that were not looked at before."""
        before, names = self._stamps, [thread_key for thread_key in self._bells if thread_key != TASKS]
        self._is_due = False  # before the read: what is committed meanwhile may not be in it
        self.ring(TASKS)  # a worker looks for itself
        if not names:
            return
        found = self._open_store().submit_read(following.stamps, names).result()
        self._stamps = {thread_key: found.get(thread_key) for thread_key in names}
        for thread_key, stamp in self._stamps.items():
            if thread_key not in before or before[thread_key] != stamp:
                self.ring(thread_key)

    def _end(self) -> None:
        """The store was closed: a follower that reads now raises that."""
        with self._changed:
            self._is_awake = False
        for thread_key in list(self._bells):
            self.ring(thread_key)


_of: weakref.WeakKeyDictionary[Store, Hub] = weakref.WeakKeyDictionary()


def of(store: Store) -> Hub:
    """The hub of this store."""
    return _of.get(store) or _of.setdefault(store, Hub(store))


def _leave_to_the_parent() -> None:
    """In a child: no worker rings here. A follower that came along reads, and raises that its store is not usable."""
    for hub in list(_of.values()):
        for bells in list(hub._bells.values()):
            for bell in bells:
                bell.ring()
    _of.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
