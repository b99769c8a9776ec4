"""Databases for the tests. What takes `database` or `store` runs once for each kind, and knows none of them.

To add a database: write a class with the same members and add it to `_KINDS`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from byssus.checkpointer import Checkpointer, PostgresCheckpointer, SQLiteCheckpointer
from byssus.store import opening, sharing
from byssus.store.database import Store, Tx
from byssus.store.sqlite import store as sqlite
from tests import postgres

# AgentScope needs another mcp than we do: tests/test_agentscope.py runs these in processes that have it.
collect_ignore = [] if importlib.util.find_spec("agentscope") else ["agentscope"]


class Database(Protocol):
    """One fresh, empty database."""

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

    def __init__(self, directory: Path) -> None:
        self._path = directory / "contract.db"

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


class PostgresSchema:
    system = "postgresql"
    commits_latecomers = False

    def __init__(self, _: Path) -> None:
        self._place = postgres.server_for_tests().fresh_schema()

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
            for table in ("threads", "messages", "tool_calls", "inbox", "partials", "checkpoints")
        ]

    def drop(self) -> None:
        postgres.server_for_tests().drop(self._place)


_KINDS: dict[str, Callable[[Path], Database]] = {"sqlite": SQLiteFile, "postgres": PostgresSchema}


@pytest.fixture(params=_KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    made = _KINDS[request.param](tmp_path)
    yield made
    made.drop()


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    with database.store() as opened:
        yield opened
