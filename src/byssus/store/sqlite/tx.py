"""A transaction on SQLite. Its clock stands still: all that is written in one transaction has the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from byssus.store.database import Dialect, Row
from byssus.store.sqlite.reading import Execute
from byssus.values import clock

DIALECT = Dialect("sqlite", skip_locked="")  # there is one writer: it has taken them all


class SQLiteTx:
    """A transaction on one connection. It fetches all that it asks for, so one cursor is enough."""

    dialect = DIALECT

    def __init__(self, connection: apsw.Connection, execute: Execute | None = None) -> None:
        self._execute = execute or connection.cursor().execute
        self._now: str | None = None
        self._after: dict[float, str] = {}

    def begin(self, statement: str) -> None:
        self._execute(statement)
        self._now = None
        self._after.clear()

    def one(self, sql: str, /, **params: Any) -> Row | None:
        rows = self._execute(sql, params).fetchall()
        return rows[0] if rows else None

    def all(self, sql: str, /, **params: Any) -> list[Row]:
        return self._execute(sql, params).fetchall()

    def run(self, sql: str, /, **params: Any) -> None:
        self._execute(sql, params)

    def many(self, sql: str, rows: Sequence[dict[str, Any]], /) -> None:
        for row in rows:
            self._execute(sql, row)

    def now(self) -> str:
        """The same for all that is written in one transaction."""
        if self._now is None:
            self._now = clock.now()
        return self._now

    def after(self, seconds: float, /) -> str:
        if seconds not in self._after:
            self._after[seconds] = clock.after(self.now(), seconds)
        return self._after[seconds]
