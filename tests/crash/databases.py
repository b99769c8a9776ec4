"""Databases for the crash tests: an empty one of either kind, and what an outsider sees of it.

Whoever looks has a connection of its own and starts no thread, so that it may fork afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import apsw
import psycopg

from byssus.store.database import Tx
from byssus.store.postgres.server import Connection
from byssus.store.postgres.tx import PostgresTx
from byssus.store.sqlite.tx import SQLiteTx
from tests.crash.place import Place
from tests.support import postgres

T = TypeVar("T")

KINDS = ("sqlite", "postgres")


@contextlib.contextmanager
def made(kind: str, directory: Path) -> Iterator[Place]:
    """An empty database of this kind. What is left of it in the end is its directory."""
    if kind == "sqlite":
        yield Place(str(directory))
        return
    schema = postgres.server_for_tests().fresh_schema()
    try:  # its sessions are known by their name: see `settled`
        yield Place(str(directory), f"{schema.dsn}&application_name={schema.name}", schema.name)
    finally:
        postgres.server_for_tests().drop(schema)


def settled(place: Place) -> None:
    """Wait until nobody is connected: the server may still be busy with what a dead process had sent."""
    if place.dsn is None:
        return
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    with psycopg.connect(_as_stranger(place.dsn), autocommit=True) as connection:
        postgres.wait_until(
            lambda: connection.execute(query, [place.schema]).fetchone() == (0,),
            "the server does not let go of the sessions of dead processes",
        )


def asked(place: Place, query: Callable[[Tx], T]) -> T:
    """Run a query, on a database that nobody else writes."""
    if place.dsn is not None:
        with Connection.connect(_as_stranger(place.dsn), autocommit=True) as connection:
            return query(PostgresTx(connection, place.schema))
    with contextlib.closing(apsw.Connection(str(place.file), flags=apsw.SQLITE_OPEN_READWRITE)) as file:
        return query(SQLiteTx(file))


def damage(place: Place) -> list[str]:
    """What is wrong with the database itself. Postgres checks its keys by itself, and nobody kills its processes."""
    if place.dsn is not None:
        return []
    with contextlib.closing(apsw.Connection(str(place.file), flags=apsw.SQLITE_OPEN_READWRITE)) as file:
        verdict = file.pragma("integrity_check")
        return [*([] if verdict == "ok" else [str(verdict)]), *map(str, file.execute("PRAGMA foreign_key_check"))]


def environment(kind: str) -> dict[str, str]:
    """For a process that makes places of this kind by itself: it takes the server that there is."""
    if kind != "postgres":
        return dict(os.environ)
    schema = postgres.server_for_tests().fresh_schema()
    postgres.server_for_tests().drop(schema)
    return {**os.environ, "BYSSUS_TEST_POSTGRES": schema.dsn}


def _as_stranger(dsn: str) -> str:
    return dsn.rpartition("&application_name=")[0]
