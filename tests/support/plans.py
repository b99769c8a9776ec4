"""How a database would find what a query asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from byssus.store.database import Row, Tx


class Explained:
    """A transaction that runs a query, and notes how each statement finds its rows, and with which parameters."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self._explain = "EXPLAIN QUERY PLAN" if tx.dialect.name == "sqlite" else "EXPLAIN"
        self.plans: list[str] = []
        self.parameters: list[dict[str, Any]] = []
        self.now = tx.now

    def all(self, sql: str, /, **params: Any) -> list[Row]:
        self.plans.append("\n".join(str(row[-1]) for row in self._tx.all(f"{self._explain} {sql}", **params)))
        self.parameters.append(params)
        return self._tx.all(sql, **params)

    def run(self, sql: str, /, **params: Any) -> None:
        """What would be written is only explained."""
        self.plans.append("\n".join(str(row[-1]) for row in self._tx.all(f"{self._explain} {sql}", **params)))

    def one(self, sql: str, /, **params: Any) -> Row | None:
        rows = self.all(sql, **params)
        return rows[0] if rows else None


def explained(tx: Tx, query: Callable[..., Any], *args: Any, **kwargs: Any) -> Explained:
    explained = Explained(tx)
    query(explained, *args, **kwargs)
    return explained


def plan_of(tx: Tx, query: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    return "\n".join(explained(tx, query, *args, **kwargs).plans)
