"""Where a database is: the path of a SQLite file, or the DSN of a Postgres database."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from byssus.errors import MissingExtra
from byssus.store.database import Store
from byssus.store.sqlite import file as sqlite_file
from byssus.store.sqlite import store as sqlite

if TYPE_CHECKING:
    from byssus.store.postgres import store as postgres
    from byssus.store.postgres.server import Server

_SCHEMES = ("postgresql://", "postgres://")


def is_dsn(place: object) -> bool:
    return isinstance(place, str) and place.startswith(_SCHEMES)


def open_store(place: str | os.PathLike[str]) -> Store:
    """The store on a path or a DSN. Give it back with `sharing.release`."""
    if isinstance(place, str) and is_dsn(place):
        return open_postgres(postgres_server(place))
    return sqlite.open_store(place)


def open_at(place: str | os.PathLike[str], *, durability: str = "full", **options: Any) -> Store:
    """The same, with what else its openers may say about it."""
    if isinstance(place, str) and is_dsn(place):
        size = options.pop("pool_size", 8)
        return open_postgres(postgres_server(place, **options), durability=durability, pool_size=size)
    return sqlite.open_store(place, durability=durability, **options)


def exists(place: str) -> bool:
    """Whether there is a database of ours, or at least a file. Makes nothing."""
    if is_dsn(place):
        return postgres_server(place).exists()
    try:
        os.stat(sqlite_file.located(place))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


def name(place: str) -> str:
    """The place as people may see it."""
    return postgres_server(place).name if is_dsn(place) else place


def postgres_server(dsn: str, *, schema: str | None = None, listen_dsn: str | None = None) -> Server:
    """What a DSN says, checked. Nothing is connected."""
    try:
        from byssus.store.postgres import server as module  # noqa: PLC0415 - most programs do without psycopg
    except ImportError as error:
        raise MissingExtra("Postgres", "postgres") from error
    return module.Server(dsn, schema=schema, listen_dsn=listen_dsn)


def open_postgres(server: Server, *, durability: str = "full", pool_size: int = 8) -> postgres.PostgresStore:
    """The store on a Postgres database. Give it back with `sharing.release`."""
    from byssus.store.postgres import store as module  # noqa: PLC0415 - as above

    return module.open_store(server, durability=durability, pool_size=pool_size)
