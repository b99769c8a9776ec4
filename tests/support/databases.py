"""Databases for the tests: what takes a `Database` runs on each kind, and knows none of them.

To add a database: write a class with the same members and add it to `DATABASES`.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import apsw

from byssus.checkpointer import Checkpointer, PostgresCheckpointer, SQLiteCheckpointer
from byssus.store import opening, sharing
from byssus.store.database import Store, Tx
from byssus.store.sqlite import store as sqlite
from tests.support.postgres import server_for_tests
from tests.support.ramdisk import ramdisk
from tests.support.schemas import ready_schemas


class Database(Protocol):
    """One fresh, empty database: as it is when it has just been opened for the first time, or before that."""

    system: str  # its kind, as OpenTelemetry writes it
    commits_latecomers: bool  # whether a commit takes in what was submitted after the first of its writes had begun

    @property
    def place(self) -> str:
        """What a child process or a command line is told: a path or a DSN."""

    def checkpointer(self, **options: Any) -> Checkpointer:
        """A new checkpointer on this database, not open yet. A second one stands for another process."""

    def store(self) -> contextlib.AbstractContextManager[Store]:
        """What runs queries on this database."""

    def fill(self, store: Store) -> None:
        """From now on there is no room for anything large."""

    def free(self, store: Store) -> None:
        """There is room again."""

    def drop(self) -> None:
        """The test is over."""


class SQLiteFile:
    system = "sqlite"
    commits_latecomers = True

    def __init__(self, directory: Path, *, is_made: bool = True) -> None:
        self._path = directory / "contract.db"
        if is_made:
            self._path.write_bytes(made_file())
            with contextlib.closing(apsw.Connection(str(self._path))) as connection:  # no two databases have the same
                connection.execute("UPDATE identity SET id = ?", [uuid.uuid4().hex])

    @property
    def place(self) -> str:
        return str(self._path)

    def checkpointer(self, **options: Any) -> Checkpointer:
        return SQLiteCheckpointer(self._path, **options)

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        store = sqlite.open_store(self._path)
        try:
            yield store
        finally:
            sharing.release(store)

    def fill(self, store: Store) -> None:
        store.write_now(lambda tx: tx.one("PRAGMA max_page_count = 1"))

    def free(self, store: Store) -> None:
        store.write_now(lambda tx: tx.one("PRAGMA max_page_count = 1073741823"))

    def drop(self) -> None:
        """The directory goes away by itself."""


@functools.cache
def made_file() -> bytes:
    """A file in which the migrations have made the tables."""
    with tempfile.TemporaryDirectory(dir=ramdisk()) as directory:
        path = Path(directory) / "made.db"
        sharing.release(sqlite.open_store(path))
        return path.read_bytes()


class PostgresSchema:
    system = "postgresql"
    commits_latecomers = False

    def __init__(self, _: Path, *, is_made: bool = True) -> None:
        self._is_made = is_made
        self._place = ready_schemas().take() if is_made else server_for_tests().fresh_schema()

    @property
    def place(self) -> str:
        return f"{self._place.dsn}&schema={self._place.name}"

    def checkpointer(self, **options: Any) -> Checkpointer:
        return PostgresCheckpointer(self._place.dsn, schema=self._place.name, **options)

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        store = opening.open(self._place.dsn, schema=self._place.name)
        try:
            yield store
        finally:
            sharing.release(store)

    def fill(self, store: Store) -> None:
        """The server's own disk serves all tests; what it says when that is full, a trigger says for it."""
        function = f'"{self._place.name}".refuse_large()'

        def query(tx: Tx) -> None:
            tx.run(
                f"CREATE OR REPLACE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " IF octet_length(NEW::text) > 50000 THEN RAISE EXCEPTION 'full' USING ERRCODE = 'disk_full'; END IF;"
                " RETURN NEW; END $$"
            )
            for table in self._tables_that_grow():
                tx.run(
                    f"CREATE OR REPLACE TRIGGER full_disk BEFORE INSERT OR UPDATE ON {table}"
                    f" FOR EACH ROW EXECUTE FUNCTION {function}"
                )

        store.write_now(query)

    def free(self, store: Store) -> None:
        def query(tx: Tx) -> None:
            for table in self._tables_that_grow():
                tx.run(f"DROP TRIGGER full_disk ON {table}")

        store.write_now(query)

    def _tables_that_grow(self) -> list[str]:
        return [
            f'"{self._place.name}".{table}'
            for table in ("threads", "messages", "tool_calls", "inbox", "partials", "pieces", "checkpoints")
        ]

    def drop(self) -> None:
        if self._is_made:
            ready_schemas().give_back(self._place)
        else:
            server_for_tests().drop(self._place)


DATABASES: dict[str, Callable[..., Database]] = {"sqlite": SQLiteFile, "postgres": PostgresSchema}
