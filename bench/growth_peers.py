"""What bench/growth.py measures on and against: a database of each kind, and checkpoints the way others make them.

Others store the whole history with each checkpoint: here that is one row of plain SQL, with the same durability.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import psycopg

from bench.measure import scratch
from byssus.checkpointer import Checkpointer, PostgresCheckpointer, SQLiteCheckpointer
from byssus.store.database import Tx
from tests.support import postgres

_WHOLE = "CREATE TABLE whole (thread TEXT, id TEXT, step BIGINT, body TEXT, PRIMARY KEY (thread, id))"
_TABLES = ("threads", "branches", "segments", "messages", "checkpoints", "inherited", "hidden", "tool_calls")
_random = random.Random(6)


def text(size: int) -> str:
    """Text that no database can pack."""
    return _random.randbytes(size).hex()[:size]


def turn() -> list[dict[str, Any]]:
    """A question and an answer of 1 KB each."""
    return [{"role": role, "content": text(1024)} for role in ("user", "assistant")]


def payload(messages: Sequence[Any]) -> int:
    return sum(len(json.dumps(message)) for message in messages)


def rows(tx: Tx) -> int:
    """All rows of all tables that a version of a thread may leave something in."""
    counts = [tx.one(f"SELECT COUNT(*) FROM {table}") for table in _TABLES]
    return sum(row[0] for row in counts if row)


class Database(abc.ABC):
    """Makes new databases, tells their size, and keeps whole histories. Names are the bench's own."""

    @abc.abstractmethod
    def new(self, name: str) -> Checkpointer: ...

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """Bytes on disk, after the checkpointer was closed."""

    def settle(self, name: str) -> None:  # noqa: B027 - SQLite plans without
        """Do what the database does by itself, a while after many rows were added: it learns how many there are."""

    @abc.abstractmethod
    def whole_history(self) -> Callable[[int, list[Any]], None]:
        """What stores a checkpoint with all its messages, durably."""

    @abc.abstractmethod
    def whole_size(self) -> int: ...

    @abc.abstractmethod
    def bodies(self, name: str) -> Callable[[], list[str]]:
        """What reads the messages of a database's only thread, with nothing in between."""


class OnSQLite(Database):
    def __init__(self) -> None:
        self._folder = scratch()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.db"

    def new(self, name: str) -> Checkpointer:
        return SQLiteCheckpointer(self._path(name))

    def size(self, name: str) -> int:
        return sum(path.stat().st_size for path in self._folder.glob(f"{name}.db*"))

    def _connect(self, name: str) -> apsw.Connection:
        connection = apsw.Connection(str(self._path(name)))
        connection.pragma("journal_mode", "wal")
        connection.pragma("synchronous", "FULL")
        return connection

    def whole_history(self) -> Callable[[int, list[Any]], None]:
        connection = self._whole = self._connect("whole")
        connection.execute(_WHOLE)

        def put(step: int, messages: list[Any]) -> None:
            connection.execute("INSERT INTO whole VALUES ('t', ?, ?, ?)", (f"c{step}", step, json.dumps(messages)))

        return put

    def whole_size(self) -> int:
        self._whole.close()
        return self.size("whole")

    def bodies(self, name: str) -> Callable[[], list[str]]:
        connection = self._connect(name)
        return lambda: [
            str(body) for (body,) in connection.execute("SELECT body FROM messages WHERE branch = 1 ORDER BY seq")
        ]


class OnPostgres(Database):
    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._raw = psycopg.connect(dsn)

    def new(self, name: str) -> Checkpointer:
        self._raw.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
        self._raw.commit()
        return PostgresCheckpointer(self._dsn, schema=name)

    def size(self, name: str) -> int:
        row = self._raw.execute(
            "SELECT SUM(pg_total_relation_size(oid)) FROM pg_class"
            " WHERE relkind = 'r' AND relnamespace = %s::regnamespace",
            (name,),
        ).fetchone()
        self._raw.commit()
        assert row is not None
        return int(row[0])

    def settle(self, name: str) -> None:
        tables = ", ".join(f"{name}.{table}" for table in _TABLES)
        self._raw.execute(f"ANALYZE {tables}")
        self._raw.commit()

    def whole_history(self) -> Callable[[int, list[Any]], None]:
        self._raw.execute("DROP SCHEMA IF EXISTS whole CASCADE")
        self._raw.execute("CREATE SCHEMA whole")
        self._raw.execute(_WHOLE.replace("whole", "whole.whole"))
        self._raw.commit()

        def put(step: int, messages: list[Any]) -> None:
            row = (f"c{step}", step, json.dumps(messages))
            self._raw.execute("INSERT INTO whole.whole VALUES ('t', %s, %s, %s)", row)
            self._raw.commit()

        return put

    def whole_size(self) -> int:
        return self.size("whole")

    def bodies(self, name: str) -> Callable[[], list[str]]:
        def read() -> list[str]:
            found = self._raw.execute(f"SELECT body FROM {name}.messages WHERE branch = 1 ORDER BY seq").fetchall()
            self._raw.commit()
            return [body for (body,) in found]

        return read


@contextlib.contextmanager
def database(kind: str) -> Iterator[Database]:
    """`BYSSUS_TEST_POSTGRES` names a server; without it, one is started that syncs to the disk."""
    if kind == "sqlite":
        yield OnSQLite()
        return
    with contextlib.ExitStack() as ends:
        dsn = os.environ.get("BYSSUS_TEST_POSTGRES") or ends.enter_context(postgres.running(fsync="on")).dsn()
        yield OnPostgres(dsn)
