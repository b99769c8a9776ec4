"""Which rows may match a search, newest first. The index only proposes: the caller reads their text and decides.

- So both databases find the same, whatever their indexes hold.
- Rows that are not indexed yet are candidates too.
- A message is shown by each thread whose branch leads past it. It is one candidate, of the thread that it was written
  to if that still shows it, else of the oldest one. A tool call belongs to its thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from byssus.queries.search import engines, index
from byssus.queries.search.engines import Rows
from byssus.queries.search.kinds import CALL, KINDS, MESSAGE, Candidate, Filters, IndexedTable
from byssus.store.database import Tx

MAX_SCOPES = 1_000  # branches, or threads, that are asked for by their tokens; more are sorted out afterwards

_END = 2**62


def scope_keys(tx: Tx, kind: str, filters: Filters) -> list[int] | None:
    """The branches, or threads, that the filters leave; None if they are all, or too many to be named."""
    if filters.session is None and filters.user is None:
        return None
    column = "s.source" if kind == MESSAGE else "t.key"
    rows = tx.all(
        f"SELECT DISTINCT {column} FROM threads t JOIN segments s ON s.branch = t.branch"
        f" WHERE t.namespace = :namespace{_whose(filters)} LIMIT :limit",
        limit=MAX_SCOPES + 1,
        **_values(filters),
    )
    return [key for (key,) in rows] if len(rows) <= MAX_SCOPES else None


def page(
    tx: Tx,
    kind: str,
    filters: Filters,
    *,
    chains: Sequence[Sequence[str]],
    named: Sequence[int] | None,
    upto: int | None,
    before: int = _END,
    limit: int,
) -> tuple[list[Candidate], int | None]:
    """The next rows below a key that may match, highest key first; and the key to go on below, None at the end.

    `upto` is the watermark; None: there is no index that could be used.
    """
    before = min(before, index.highest(tx, kind) + 1)
    if before <= 1:  # which saves the other questions where there are no tools
        return [], None
    engine, table = engines.of(tx), KINDS[kind].table
    select = functools.partial(_selected, tx, kind, filters, before, limit)
    if upto is None:
        found = [select(IndexedTable(f"{table} r", "1 = 1", {}))]
    else:
        expression = engine.expression(chains, named)
        found = [
            select(IndexedTable(f"{table} r", engine.not_indexed(kind), {"upto": upto})),
            engine.indexed(tx, kind, expression, before=before, limit=limit, select=select),
        ]
        if kind == CALL:
            found.append(select(IndexedTable("changed_calls x CROSS JOIN tool_calls r", "r.key = x.call", {})))
    low = max((end for _, end in found if end is not None), default=None)
    unique = {row[0]: Candidate(*row) for rows, _ in found for row in rows if low is None or row[0] >= low}
    return [unique[key] for key in sorted(unique, reverse=True)], low


def remaining(tx: Tx, kind: str, filters: Filters, rows: Sequence[Candidate]) -> list[Candidate]:
    """Those rows that are still what they were: the key of a deleted one may be another's by now."""
    condition, value = engines.of(tx).among([row.key for row in rows])
    source = IndexedTable(f"{KINDS[kind].table} r", f"r.key {condition}", {"keys": value})
    found, _ = _selected(tx, kind, filters, _END, len(rows), source)
    there = {row.key: row for row in (Candidate(*row) for row in found)}
    return [there[row.key] for row in rows if row.key in there and there[row.key].id == row.id]


def texts(tx: Tx, kind: str, keys: Sequence[int]) -> dict[int, tuple[str | None, ...]]:
    """What the text of rows is made of."""
    about, (condition, value) = KINDS[kind], engines.of(tx).among(keys)
    rows = tx.all(f"SELECT r.key, {about.texts} FROM {about.table} r WHERE r.key {condition}", keys=value)
    return {row[0]: row[1:] for row in rows}


def _selected(tx: Tx, kind: str, filters: Filters, before: int, limit: int, source: IndexedTable) -> Rows:
    statement = _select(tx, kind, filters, source)
    rows = tx.all(statement, before=before, limit=limit, **source.values, **_values(filters))
    return rows, rows[-1][0] if len(rows) >= limit else None


def _select(tx: Tx, kind: str, filters: Filters, source: IndexedTable) -> str:
    about = KINDS[kind]
    conditions = [source.condition, "r.key < :before"]
    if filters.roles is not None and kind == MESSAGE:
        conditions.append(f"r.role IN ({', '.join(f':role_{number}' for number in range(len(filters.roles)))})")
    if filters.since is not None:
        conditions.append(f"{about.created_at} >= :since")
    if filters.until is not None:
        conditions.append(f"{about.created_at} <= :until")
    if kind == CALL:
        thread, more = "CROSS JOIN threads t", [f"t.key = r.thread AND t.namespace = :namespace{_whose(filters)}"]
    else:
        thread, more = engines.of(tx).shown(lambda column: _showing(column, filters))
    return (
        f"SELECT {about.columns}, {about.size} FROM {source.tables} {thread} WHERE {' AND '.join(conditions + more)}"
        f" ORDER BY {source.order} DESC LIMIT :limit"
    )


def _showing(column: str, filters: Filters) -> str:
    """A column of the thread that shows a message."""
    return (
        f"SELECT {column} FROM segments s JOIN branches b ON b.key = s.branch"
        " JOIN threads t ON t.key = b.thread AND t.branch = b.key"
        " WHERE s.source = r.branch AND s.after_seq < r.seq AND s.upto_seq >= r.seq AND t.namespace = :namespace"
        f"{_whose(filters)} ORDER BY"
        " CASE WHEN t.key = (SELECT thread FROM branches WHERE key = r.branch) THEN 0 ELSE 1 END, t.key LIMIT 1"
    )


def _whose(filters: Filters) -> str:
    session = " AND t.id = :session" if filters.session is not None else ""
    return session + (" AND t.owner = :user" if filters.user is not None else "")


def _values(filters: Filters) -> dict[str, Any]:
    given = {name: value for name, value in filters._asdict().items() if value is not None and name != "roles"}
    return given | {f"role_{number}": role for number, role in enumerate(filters.roles or ())}
