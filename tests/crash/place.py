"""Where the database of a crash test is, in words that another process can be told. `databases` makes such places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from byssus.checkpointer import Checkpointer, checkpointer_for


class Place(Struct, frozen=True):
    """A directory for files, with the database in it; or beside it, if there is a DSN."""

    directory: str
    dsn: str | None = None
    schema: str = ""

    @staticmethod
    def told(text: str) -> Place:
        """What was `str(place)` elsewhere."""
        return msgspec.json.decode(text, type=Place)

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def file(self) -> Path:
        assert self.dsn is None, "Postgres has no file"
        return Path(self.directory) / "x.db"

    @property
    def diary(self) -> Path:
        """Where tools write down what they do."""
        return Path(self.directory) / "diary"

    def checkpointer(self, **options: Any) -> Checkpointer:
        """A new one, not open yet."""
        if self.dsn is None:
            return checkpointer_for(self.file, **options)
        return checkpointer_for(self.dsn, schema=self.schema, **options)
