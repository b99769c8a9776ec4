"""Word of what was committed, between processes: LISTEN and NOTIFY, as a hint and no more.

A commit is announced a moment later, and not in its own transaction: Postgres lets transactions that notify commit
only one after the other. One announcement stands for all commits of that moment. Whoever is told looks for himself,
and looks now and then without having been told, so a word that was lost costs time and nothing else.

Whether words arrive at all is tried out: a pooler swallows them. Then `version` asks for a look each time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Hashable

import psycopg

from holdfast.store.postgres_server import Connection, Server

_GATHER = 0.01  # seconds in which commits share an announcement
_LOOK_ANYWAY = 1.0  # seconds between two looks while words arrive
_LOOK_ALWAYS = 0.1  # and while none do
_SILENCE = 5.0  # seconds without a word after which we send one to ourselves
_ANSWER = 1.0  # seconds in which it has to come back
_RECONNECT = 0.5
_log = logging.getLogger("holdfast.store")


class News:
    """One thread with one connection that tells and hears. It begins to work when it is first needed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._channel = f"holdfast {server.schema}"[:63]
        self._heard = 0
        self._is_heard = False  # whether words arrive
        self._lock = threading.Lock()
        self._pending = False
        self._thread: threading.Thread | None = None
        self._open = True
        self._connection: Connection | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None

    def announce(self) -> None:
        """Something was committed."""
        if not self._pending:
            self._pending = True
            self._start()
            self._nudge()

    def version(self) -> Hashable:
        """Another value whenever there may be something new."""
        self._start()
        period = _LOOK_ANYWAY if self._is_heard else _LOOK_ALWAYS
        return (self._heard, int(time.monotonic() / period))

    def close(self) -> None:
        with self._lock:
            self._open = False
        if self._thread is not None:
            self._nudge()
            self._thread.join()
        if self._wake is not None:
            for end in self._wake:
                end.close()

    def abandon(self) -> None:
        """In a child process: the connection is the parent's."""
        self._lock = threading.Lock()
        self._open = False
        if self._connection is not None:
            _inherited.append(self._connection)
            with contextlib.suppress(psycopg.Error, OSError):
                os.close(self._connection.fileno())
        if self._wake is not None:
            for end in self._wake:
                end.close()

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and self._open:
                self._wake = socket.socketpair()
                self._wake[1].setblocking(False)
                self._thread = threading.Thread(target=self._serve, name="holdfast-news", daemon=True)
                self._thread.start()

    def _nudge(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError, OSError):
                self._wake[1].send(b".")

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while self._open:
            try:
                with self._server.connect_to_listen() as self._connection:
                    self._listen(self._connection)
            except psycopg.Error as error:
                _log.debug("no notifications from %r: %s", self._server.name, type(error).__name__)
                self._connection, self._is_heard = None, False
                self._wait(None, _RECONNECT)
        self._connection = None

    def _listen(self, connection: Connection) -> None:
        connection.execute(f'LISTEN "{self._channel}"'.encode())
        self._heard += 1  # whatever was said while nobody listened
        self._tell(connection)
        asked: float | None = time.monotonic()
        while self._open:
            self._wait(connection, _ANSWER if asked else _SILENCE)
            if self._pending:
                time.sleep(_GATHER)
                self._tell(connection)
            now = time.monotonic()
            if any(True for _ in connection.notifies(timeout=0)):
                self._heard += 1
                self._is_heard, asked = True, None
            elif asked is None:
                self._tell(connection)
                asked = now
            elif now - asked > _ANSWER:
                self._is_heard, asked = False, now
                self._tell(connection)

    def _tell(self, connection: Connection) -> None:
        self._pending = False
        # It need not survive a crash of the server, so it does not wait for the disk.
        connection.execute(
            "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, '')", [self._channel], prepare=False
        )

    def _wait(self, connection: Connection | None, seconds: float) -> None:
        assert self._wake is not None
        wake = self._wake[0]
        watched = [wake.fileno()] if connection is None else [wake.fileno(), connection.fileno()]
        ready, _, _ = select.select(watched, [], [], seconds)
        if wake.fileno() in ready:
            wake.recv(4096)


_inherited: list[Connection] = []
