"""The index engine of a transaction's database: FTS5 on SQLite, tsvector on Postgres.

Everything in which search differs between the two is in `fts5.py` and `tsvector.py`, which have the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from byssus.queries.search import fts5, tsvector
from byssus.queries.search.kinds import Batch, IndexedTable, IndexEntry, Kind
from byssus.store.database import Row, Tx

Rows = tuple[list[Row], int | None]  # rows by falling key, and the key below which there may be more


class Engine(Protocol):
    def key_column(self, kind: str) -> str:
        """The column of a kind's table of tokens that holds the key of the row."""

    def among(self, keys: Sequence[int]) -> tuple[str, Any]:
        """The condition of a column that is one of these keys, and the value of its parameter `:keys`."""

    def not_indexed(self, kind: str) -> str:
        """The condition of a row `r` that is not indexed, with the watermark as `:upto`."""

    def expression(self, chains: Sequence[Sequence[str]], scope_keys: Sequence[int] | None) -> str:
        """What the index is asked for: all chains, in one of the scopes. Tokens have no quotes in them."""

    def indexed(
        self,
        tx: Tx,
        kind: str,
        expression: str,
        *,
        before: int,
        limit: int,
        select: Callable[[IndexedTable], Rows],
    ) -> Rows:
        """The rows below a key that the index proposes."""

    def shown(self, thread: Callable[[str], str]) -> tuple[str, list[str]]:
        """How a row is joined with the thread that shows it, `t`; `thread` makes the query of one of its columns."""

    def hold(self, tx: Tx, batch: Batch) -> bool:
        """Take the index for a batch; False if something was deleted or reset since the batch was read."""

    def add(self, tx: Tx, kind: str, entries: Sequence[IndexEntry]) -> None:
        """Add entries to the index."""

    def clear(self, tx: Tx, about: Kind) -> None:
        """Remove all entries."""


_ENGINES: dict[str, Engine] = {"sqlite": fts5, "postgresql": tsvector}


def of(tx: Tx) -> Engine:
    return _ENGINES[tx.dialect.name]
