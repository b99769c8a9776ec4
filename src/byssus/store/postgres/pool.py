"""The connections of a store's workers, and how long to wait for a server that is away.

- A connection is made when a worker needs it, replaced when it was lost, and closed when it has been idle for a while.
- Nothing outlives its transaction on a connection to a pooler. Whether there is one is found out.
"""

from __future__ import annotations

import contextlib
import secrets
import time

import psycopg

from byssus.store.postgres.server import (
    ANSWER_SECONDS,
    Connection,
    Server,
    abandon,
    has_lost_a_statement,
    is_lost,
    is_passing,
    is_refused,
)
from byssus.store.postgres.tx import PostgresTx

IDLE_SECONDS = 60.0  # then a connection is closed: it may be gone without our knowledge
PATIENCE = 30.0  # seconds without a server, or with a deadlock each time, before it is raised to a caller
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_INTERRUPT_SECONDS = 5.0
_PREPARE_AFTER = 3  # runs of a statement
# A lock that a stopped process holds is released before those that wait for it give up.
SETTINGS = {
    "lock_timeout": "30s",
    "idle_in_transaction_session_timeout": "15s",
    "enable_seqscan": "off",  # a plan that was made while a table was small is kept when it has grown
    "jit": "off",  # which the cost of a scan would set off
}


class Pool:
    """What the workers of a store know together about their server."""

    def __init__(self, server: Server, patience: float, connection: Connection | None) -> None:
        self.server = server
        self.patience = patience
        self.has_pooler = False
        self.away_since: float | None = None  # when the server was last found to be away
        self._unused = [] if connection is None else [(connection, time.monotonic())]

    def connect(self) -> Connection:
        """A connection: first the one with which the database was prepared, unless that was long ago; then new ones."""
        connection, since = self._take()
        if connection is not None and time.monotonic() - since > IDLE_SECONDS:
            connection.close()
            connection = None
        return connection or self.server.connect()

    def may_try_again(self, error: BaseException) -> bool:
        """Whether the error is transient."""
        if has_lost_a_statement(error):
            self.has_pooler = True
            return True
        return is_lost(error) or is_passing(error)

    def close(self) -> None:
        connection, _ = self._take()
        if connection is not None:
            connection.close()

    def abandon(self) -> None:
        """In a child process: the connection is the parent's."""
        connection, _ = self._take()
        if connection is not None:
            abandon(connection)

    def _take(self) -> tuple[Connection | None, float]:
        try:
            return self._unused.pop()
        except IndexError:
            return None, 0.0


class WorkerConnection:
    """The connection of one worker."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._connection: Connection | None = None
        self._tx: PostgresTx
        self._settings: list[str] = []  # what each transaction needs on a connection to a pooler

    def begin(self, mode: str, *, answer: float | None) -> PostgresTx:
        """A transaction. It begins on the server when something is asked in it; that is answered in so many seconds."""
        if self._connection is None:
            self._connection = self._connect()
            self._tx = PostgresTx(self._connection, self._pool.server.schema)
        self._connection.silence = answer
        self._tx.begin(mode, *self._settings)
        return self._tx

    def _connect(self) -> Connection:
        connection = self._pool.connect()
        try:
            row = connection.execute("SELECT pg_backend_pid()").fetchone()
            assert row is not None
            settings = dict(SETTINGS)
            if self._pool.server.answer_seconds < ANSWER_SECONDS:
                settings["lock_timeout"] = f"{self._pool.server.answer_seconds * 1000 * 2 // 3:.0f}ms"
            # A pooler introduces itself with a number of its own.
            if row[0] != connection.info.backend_pid:
                self._pool.has_pooler = True
            self._settings = []
            if self._pool.has_pooler:
                self._settings = [f"SET LOCAL {name} = '{value}'" for name, value in settings.items()]
            else:
                connection.execute("; ".join(f"SET {name} = '{value}'" for name, value in settings.items()).encode())
                _prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def interrupt(self) -> None:
        """Ask the server, from another OS thread, to give up the statement that it is at."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.cancel_safe(timeout=_INTERRUPT_SECONDS)

    @property
    def is_broken(self) -> bool:
        return self._connection is None or self._connection.broken or self._connection.closed

    def end(self, error: BaseException | None = None) -> None:
        """Undo what is under way. A connection that may not be fit for the next transaction is closed."""
        if not self.is_broken and (error is None or not (is_lost(error) or has_lost_a_statement(error))):
            with contextlib.suppress(psycopg.Error):
                self._tx.undo("ROLLBACK")
                return
        self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._tx.close()
            with contextlib.suppress(psycopg.Error):
                connection.close()

    def abandon(self) -> None:
        """In a child process: the connection is the parent's."""
        if self._connection is not None:
            abandon(self._connection)


def _prepare(connection: Connection) -> None:
    """Let statements be prepared, under unique names.

    Should there be a pooler after all, one that hides itself, a statement can then be unknown, but not another one.
    """
    if hasattr(connection._prepared, "_prepared_idx"):
        connection._prepared._prepared_idx = secrets.randbits(60)
        connection.prepare_threshold = _PREPARE_AFTER


class Retries:
    """How long to go on trying, and how often. All who wait for a server that is away have waited since it went."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.seconds = pool.patience
        self._since: float | None = None
        self._pause = _FIRST_PAUSE

    def wait(self, error: BaseException) -> None:
        """Wait a little before the next try; raises the error when it has been long enough."""
        now = time.monotonic()
        if is_lost(error):
            self._pool.away_since = self._since = self._pool.away_since or now
        self._since = self._since or now
        if now - self._since >= self.seconds or is_refused(error):
            raise error
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
