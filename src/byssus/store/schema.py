"""Migrations: numbered `.sql` files, applied in order when a database is opened.

`0002_search.sql` serves every database; where one needs its own, `0002_search.sqlite.sql` and
`0002_search.postgres.sql` stand side by side. `{key}` in a file is the database's type of a growing integer key, and
`TEXT` is text that sorts by its bytes.
"""

from __future__ import annotations

import functools
import os
import re
from typing import NamedTuple

_NAME = re.compile(r"(\d{4})_\w+?(?:\.(\w+))?\.sql")


class Migration(NamedTuple):
    number: int
    name: str
    sql: str


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
