"""Migrations: numbered `.sql` files, applied in order when a database is opened.

`0002_search.sql` serves every database; where one needs its own, `0002_search.sqlite.sql` and
`0002_search.postgres.sql` stand side by side. `{key}` in a file is the database's type of a growing integer key, and
`TEXT` is text that sorts by its bytes.

A process that was left behind by a newer version's migration must not write: its messages would be missing from what
the newer version has added. Opening checks the version, and so does every write transaction, under a lock that a
migration takes first.
"""

from __future__ import annotations

import functools
import os
import re
from typing import NamedTuple

from byssus.errors import StoreUnusable

_NAME = re.compile(r"(\d{4})_\w+?(?:\.(\w+))?\.sql")


class Migration(NamedTuple):
    number: int
    name: str
    sql: str


def check_version(found: int, known: int, name: str) -> None:
    """Refuse a database that a newer byssus has migrated."""
    if found > known:
        raise StoreUnusable(
            f"{name!r} was written by a newer byssus (schema {found}, this one knows {known}); "
            "upgrade byssus to open it"
        )


@functools.cache
def migrations(dialect: str, *, key: str, text: str = "TEXT") -> tuple[Migration, ...]:
    """All migrations of a database, oldest first. Each connection asks for them."""
    found = []
    for file in os.scandir(os.path.join(os.path.dirname(__file__), "migrations")):
        match = _NAME.fullmatch(file.name)
        if match and match[2] in (None, dialect):
            with open(file, encoding="utf-8") as script:
                statements = re.sub(r"\bTEXT\b", text, script.read().replace("{key}", key))
            found.append(Migration(int(match[1]), file.name, statements))
    return tuple(sorted(found))
