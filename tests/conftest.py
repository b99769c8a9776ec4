"""Databases for the tests. What takes `database` or `store` runs once for each kind, and knows none of them.

To add a database: write a class with the same members and add it to `_KINDS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

import pytest

from holdfast.checkpointer import SQLiteCheckpointer
from holdfast.store import sqlite
from holdfast.store.database import Store

Checkpointer: TypeAlias = SQLiteCheckpointer


class Database(Protocol):
    """One fresh, empty database."""

    def checkpointer(self) -> Checkpointer:
        """A new checkpointer on this database, not open yet. A second one stands for another process."""

    def store(self) -> contextlib.AbstractContextManager[Store]:
        """What runs queries on this database."""


class SQLiteFile:
    def __init__(self, directory: Path) -> None:
        self._path = directory / "contract.db"

    def checkpointer(self) -> Checkpointer:
        return SQLiteCheckpointer(self._path)

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        store = sqlite.open_store(self._path)
        try:
            yield store
        finally:
            sqlite.release(store)


_KINDS: dict[str, Callable[[Path], Database]] = {"sqlite": SQLiteFile}


@pytest.fixture(params=_KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    return _KINDS[request.param](tmp_path)


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    with database.store() as opened:
        yield opened
