"""One way to open a database: by the path of a SQLite file, or by the DSN of a Postgres database.

store = opening.open("chat.db")
store = opening.open("postgresql://server/app", pool_size=4)
...
sharing.release(store)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from byssus.errors import MissingExtra
from byssus.store.database import Durability, Store
from byssus.store.sqlite import file as sqlite_file
from byssus.store.sqlite import store as sqlite
from byssus.values import places

if TYPE_CHECKING:
    from byssus.store.postgres.server import Server

Place: TypeAlias = "str | os.PathLike[str] | Server"  # a path, a DSN, or a DSN that was checked


def is_dsn(place: object) -> TypeGuard[str]:
    """Whether Postgres is meant."""
    return places.postgres_dsn(place) is not None


def open(place: Place, *, durability: Durability = "full", **options: Any) -> Store:  # noqa: A001 - opening.open(...)
    """The store on a database, made and migrated if need be. Give it back with `sharing.release`.

    Options are those of the database: `busy_seconds` and `read_only` for a file; `pool_size` for a server, and
    `schema` and `listen_dsn` with a DSN that was not checked before.
    """
    if is_dsn(place):
        place = postgres_server(place, **{key: options.pop(key) for key in ("schema", "listen_dsn") if key in options})
    if isinstance(place, str | bytes | os.PathLike):  # which says what it takes
        return sqlite.open_store(place, durability=durability, **options)
    from byssus.store.postgres import store as postgres  # noqa: PLC0415 - most programs do without psycopg

    return postgres.open_store(place, durability=durability, **options)


def exists(place: str) -> bool:
    """Whether there is a database of ours, or at least a file. Makes nothing."""
    if is_dsn(place):
        return postgres_server(place).exists()
    try:
        os.stat(sqlite_file.located(sqlite_file.check_path(place)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


def name(place: str) -> str:
    """The place as people may see it."""
    return postgres_server(place).name if is_dsn(place) else places.redacted(str(place))


def postgres_server(dsn: str, *, schema: str | None = None, listen_dsn: str | None = None) -> Server:
    """What a DSN says, checked. Nothing is connected."""
    try:
        from byssus.store.postgres import server as module  # noqa: PLC0415 - as above
    except ImportError as error:
        raise MissingExtra("Postgres", "postgres") from error
    return module.Server(dsn, schema=schema, listen_dsn=listen_dsn)
