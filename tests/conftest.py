"""Databases for the tests. What takes `database` or `store` runs once for each kind, and knows none of them.

To add a database: write a class with the same members and add it to `_KINDS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from holdfast.checkpointer import Checkpointer, PostgresCheckpointer, SQLiteCheckpointer
from holdfast.store import places, sharing, sqlite
from holdfast.store.database import Store
from tests import postgres


class Database(Protocol):
    """One fresh, empty database."""

    def checkpointer(self, **options: Any) -> Checkpointer:
        """A new checkpointer on this database, not open yet. A second one stands for another process."""

    def store(self) -> contextlib.AbstractContextManager[Store]:
        """What runs queries on this database."""

    def drop(self) -> None:
        """The test is over."""


class SQLiteFile:
    def __init__(self, directory: Path) -> None:
        self._path = directory / "contract.db"

    def checkpointer(self, **options: Any) -> Checkpointer:
        return SQLiteCheckpointer(self._path, **options)

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        store = sqlite.open_store(self._path)
        try:
            yield store
        finally:
            sharing.release(store)

    def drop(self) -> None:
        """The directory goes away by itself."""


class PostgresSchema:
    def __init__(self, _: Path) -> None:
        self._place = postgres.server_for_tests().fresh_schema()

    def checkpointer(self, **options: Any) -> Checkpointer:
        return PostgresCheckpointer(self._place.dsn, schema=self._place.name, **options)

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        store = places.open_postgres(places.postgres_server(self._place.dsn, schema=self._place.name))
        try:
            yield store
        finally:
            sharing.release(store)

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
