"""A reader of a SQLite file: runs one query at a time on a snapshot, and can be stopped from another thread.

- A statement is interrupted, and none begins once the reader was stopped. An interrupt never hits the next query.
- A query that gives way is also stopped by a fork of the process. It can be run again: a query does nothing but SQL.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol

import apsw

from byssus.store.jobs import Job

Execute = Callable[..., apsw.Cursor]

_LOOK_STEPS = 250_000  # of SQLite: tens of milliseconds, so that hardly a read waits for the lock of the interpreter


class ReadTx(Protocol):
    def begin(self, statement: str) -> None: ...


class Reader:
    """A connection, and the job that it runs. `make_tx` makes its transaction from what executes a statement."""

    def __init__(self, connection: apsw.Connection, make_tx: Callable[[Execute], ReadTx]) -> None:
        self._connection = connection
        self._execute = connection.cursor().execute
        self._tx = make_tx(self._execute_unless_stopped)
        self._changing = threading.Lock()
        self._job: Job[Any] | None = None
        self._gives_way = False
        self._is_stopped = False
        # SQLite forgets an interrupt that comes just before a statement begins, so each one looks now and then, too.
        connection.set_progress_handler(lambda: self._is_stopped, _LOOK_STEPS)

    def run(self, job: Job[Any], *, gives_way: bool) -> None:
        """Run the query of a job. Raises InterruptError if it was stopped."""
        with self._changing:
            self._job, self._gives_way, self._is_stopped = job, gives_way, False
        try:
            if not job.begin(lambda: self._stop(job)):
                raise apsw.InterruptError("its caller has stopped waiting")
            self._tx.begin("BEGIN")
            job.run(self._tx)
        finally:
            job.end()
            with self._changing:
                self._job = None
            with contextlib.suppress(apsw.Error):  # it has not begun, or a disk error has ended it
                self._execute("ROLLBACK")

    def give_way(self) -> None:
        """Stop the query that is being run, if it gives way."""
        job = self._job
        if job is not None and self._gives_way:
            self._stop(job)

    def _stop(self, job: Job[Any]) -> None:
        with self._changing:
            if self._job is job:
                self._is_stopped = True
                self._connection.interrupt()

    def _execute_unless_stopped(self, sql: str, params: Any = None) -> apsw.Cursor:
        if self._is_stopped:
            raise apsw.InterruptError("stopped between two statements")
        return self._execute(sql, params)
