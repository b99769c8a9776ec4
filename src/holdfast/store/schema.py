"""Migrations: numbered `.sql` files, applied in order when a database is opened.

`0002_search.sql` serves every database; where one needs its own, `0002_search.sqlite.sql` and
`0002_search.postgres.sql` stand side by side. `{key}` in a file is the database's type of a growing integer key, and
`TEXT` is text that sorts by its bytes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"(\d{4})_\w+?(?:\.(\w+))?\.sql")


class Migration(NamedTuple):
    number: int
    name: str
    sql: str


def migrations(dialect: str, *, key: str, text: str = "TEXT") -> list[Migration]:
    """All migrations of a database, oldest first."""
    found = []
    for file in (Path(__file__).parent / "migrations").iterdir():
        match = _NAME.fullmatch(file.name)
        if match and match[2] in (None, dialect):
            statements = re.sub(r"\bTEXT\b", text, file.read_text("utf-8").replace("{key}", key))
            found.append(Migration(int(match[1]), file.name, statements))
    return sorted(found)
