"""Word of what was committed, between processes: LISTEN and NOTIFY, as a hint and no more.

A commit is announced a moment later, and not in its own transaction: Postgres lets transactions that notify commit
only one after the other. One announcement stands for all commits of that moment, and names their threads. A notified
process reads the database itself, and also reads it from time to time without a notification, so a lost notification
only costs time.

Whether notifications arrive at all is tested: a pooler drops them. Then `version` asks for a read each time.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable

import psycopg

from byssus.store.jobs import NO_THREAD, thread_digest
from byssus.store.postgres.login import Selector
from byssus.store.postgres.server import Connection, Server, abandon
from byssus.values.thread_key import ThreadKey

_GATHER = 0.02  # seconds between two announcements: commits in between share one
_LOOK_ANYWAY = 1.0  # seconds between two looks while words arrive
_LOOK_ALWAYS = 0.1  # and while none do
_ALL_ANYWAY = 2.0  # seconds between two looks at all threads while words arrive
_ANY = "*"  # stands for any thread
_MANY_AT_ONCE = 500  # names in one announcement: they fit into its 8,000 bytes
_MANY = 10_000  # names that are kept
_SILENCE = 5.0  # seconds without a word after which we send one to ourselves
_ANSWER = 1.0  # seconds in which it has to come back
_RECONNECT = 0.5
_log = logging.getLogger("byssus.store")


class News:
    """One worker with one connection that sends and receives. It starts when it is first needed."""

    def __init__(self, server: Server, heard: Callable[[], object]) -> None:
        self._server = server
        self._heard = heard  # called, on the worker, when words of others have arrived
        self._channel = f"byssus {server.schema}"[:63]
        self._received = 0
        self._naming = threading.Lock()
        self._unsaid: set[str] = set()  # what is still to be announced
        self._named: set[str] | None = None  # what others have announced; None: it may be any thread
        self._all_at = 0.0  # when `names` was last answered with: any
        self.is_receiving = False  # whether words arrive
        self._notified_at = 0.0
        self._lock = threading.Lock()
        self._pending = False
        self._worker: threading.Thread | None = None
        self._closing = threading.Event()
        self._connection: Connection | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None

    def announce(self, threads: Iterable[ThreadKey]) -> None:
        """Something was committed. A failure here must not affect the committer."""
        names = {_ANY if thread == NO_THREAD else thread_digest(thread) for thread in threads}
        if not names:
            return
        with self._naming:
            self._unsaid |= names
        if not self._pending:
            self._pending = True
            with contextlib.suppress(OSError, RuntimeError):  # no more files, no more workers: they will look anyway
                self._start()
            self._nudge()

    def version(self) -> Hashable:
        """Another value whenever there may be something new."""
        self._start()
        period = _LOOK_ANYWAY if self.is_receiving else _LOOK_ALWAYS
        return (self._received, int(time.monotonic() / period))

    def names(self) -> set[str] | None:
        """The threads that others have named since the last call; None if it may be any."""
        self._start()
        now = time.monotonic()
        with self._naming:
            names, self._named = self._named, set()
            is_any = names is None or now - self._all_at >= (_ALL_ANYWAY if self.is_receiving else _LOOK_ALWAYS)
            self._all_at = now if is_any else self._all_at
        return None if is_any else names

    def close(self) -> None:
        with self._lock:
            self._closing.set()
        if self._worker is not None:
            self._nudge()
            self._worker.join()
        if self._wake is not None:
            for end in self._wake:
                end.close()

    def abandon(self) -> None:
        """In a child process: the connection is the parent's."""
        self._lock, self._naming = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._closing.set()
        if self._connection is not None:
            abandon(self._connection)
        if self._wake is not None:
            for end in self._wake:
                end.close()

    def _start(self) -> None:
        if self._worker is not None:
            return
        with self._lock:
            if self._worker is None and not self._closing.is_set():
                if self._wake is None:
                    self._wake = socket.socketpair()
                    self._wake[1].setblocking(False)
                worker = threading.Thread(target=self._serve, name="byssus-news", daemon=True)
                worker.start()
                self._worker = worker

    def _nudge(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError, OSError):
                self._wake[1].send(b".")

    # --- on the worker ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                with self._server.connect_to_listen() as self._connection:
                    self._listen(self._connection)
            except (psycopg.Error, OSError) as error:
                _log.debug("no notifications from %r: %s", self._server.name, type(error).__name__)
                self.is_receiving = False
                self._closing.wait(_RECONNECT)
            finally:
                self._connection = None

    def _listen(self, connection: Connection) -> None:
        connection.silence = min(_SILENCE, self._server.answer_seconds)  # nothing here takes long
        connection.execute(f'LISTEN "{self._channel}"'.encode())
        self._received += 1  # for notifications that were missed
        with self._naming:
            self._named = None
        received_at = time.monotonic()
        asked_at: float | None = self._notify(connection)  # when we began to wait for a word
        while not self._closing.is_set():
            now = time.monotonic()
            if words := [(word.pid, word.payload) for word in connection.notifies(timeout=0)]:
                self._received += 1
                self._note(connection, words)
                self.is_receiving, received_at, asked_at = True, now, None
            silent = now - received_at if asked_at is None else now - asked_at
            limit = _SILENCE if asked_at is None else _ANSWER
            if silent < limit and not self._pending:
                self._wait(connection, limit - silent)
            elif self._pending:
                self._closing.wait(max(self._notified_at + _GATHER - now, 0))
                notified_at = self._notify(connection)
                asked_at = notified_at if asked_at is None else asked_at
            else:
                self.is_receiving = self.is_receiving and asked_at is None
                asked_at = self._notify(connection)

    def _note(self, connection: Connection, words: list[tuple[int, str]]) -> None:
        """Keep the names until they are asked for. This process knows its own commits."""
        names = {name for pid, word in words if pid != connection.info.backend_pid for name in word.split()}
        with self._naming:
            if self._named is not None:
                is_any = _ANY in names or len(self._named) + len(names) > _MANY
                self._named = None if is_any else self._named | names
        if names:
            self._heard()

    def _notify(self, connection: Connection) -> float:
        self._pending = False
        with self._naming:
            unsaid, self._unsaid = self._unsaid, set()
        words = _ANY if _ANY in unsaid or len(unsaid) > _MANY_AT_ONCE else " ".join(sorted(unsaid))
        # It need not survive a crash of the server, so it does not wait for the disk.
        connection.execute(
            "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, %s)",
            [self._channel, words],
            prepare=False,
        )
        self._notified_at = time.monotonic()
        return self._notified_at

    def _wait(self, connection: Connection, seconds: float) -> None:
        """Until a notification arrives, or `_nudge` wakes this up."""
        assert self._wake is not None
        wake = self._wake[0]
        with Selector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            if any(key.fileobj is wake for key, _ in selector.select(seconds)):
                wake.recv(4096)
