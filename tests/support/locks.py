"""A lock that somebody else holds: nothing can be written to the database meanwhile, and everything can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import apsw
import psycopg

from tests.support.databases import Database, PostgresSchema


class Lock(NamedTuple):
    """Taken and released by a connection of its own."""

    take: Callable[[], object]
    release: Callable[[], object]


@contextlib.contextmanager
def foreign_lock(database: Database) -> Iterator[Lock]:
    """A lock that is not taken yet."""
    if isinstance(database, PostgresSchema):
        where = database._place
        statement = f'LOCK TABLE "{where.name}".threads IN EXCLUSIVE MODE'.encode()
        with psycopg.connect(where.dsn) as session:
            yield Lock(lambda: session.execute(statement), session.rollback)
    else:
        with contextlib.closing(apsw.Connection(database.place)) as connection:
            yield Lock(lambda: connection.execute("BEGIN IMMEDIATE"), lambda: connection.execute("ROLLBACK"))
