"""The index behind search: how far it is, which rows come next, and how they are added.

- An index holds the tokens of rows (see `search/tokens.py`). All rows up to its watermark are indexed. Those behind it
  are candidates of every search, whatever they say: a search never misses what was just written, and no writer waits
  for the index.
- A batch of rows is read and cut into tokens in one transaction and added in another one. `put` adds it if nothing was
  deleted or reset in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from byssus.queries.search import engines
from byssus.queries.search.kinds import CALL, KINDS, Batch, IndexEntry, State, Unindexed
from byssus.store.database import Tx
from byssus.store.jobs import takes_long

_END = 2**62


def state(tx: Tx, kind: str) -> State:
    row = tx.one("SELECT upto, epoch, tokenizer FROM indexing WHERE kind = :kind", kind=kind)
    assert row is not None
    return State(*row)


def lag(tx: Tx, kind: str, upto: int, limit: int = _END) -> int:
    """How many rows are not indexed, or have changed since; counted up to a limit."""
    condition = engines.of(tx).not_indexed(kind)
    row = tx.one(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {KINDS[kind].table} r WHERE {condition} LIMIT :limit) AS waiting",
        upto=upto,
        limit=limit,
    )
    changed = tx.one("SELECT COUNT(*) FROM changed_calls") if kind == CALL else None
    assert row is not None
    return int(row[0]) + (int(changed[0]) if changed else 0)


def count(tx: Tx, kind: str) -> int:
    """How many rows there are."""
    row = tx.one(f"SELECT COUNT(*) FROM {KINDS[kind].table}")
    assert row is not None
    return int(row[0])


def highest(tx: Tx, kind: str) -> int:
    """The highest key, 0 if there is no row: it grows with each row that is written."""
    row = tx.one(f"SELECT COALESCE(MAX(key), 0) FROM {KINDS[kind].table}")
    assert row is not None
    return int(row[0])


def waiting(tx: Tx, kind: str, upto: int, *, rows: int, size: int) -> list[Unindexed]:
    """The next rows to be indexed: so many, and of so many bytes, or one that is larger."""
    about, engine = KINDS[kind], engines.of(tx)
    if kind == CALL and (changed := _changed(tx, rows)):
        return changed
    sizes = tx.all(
        f"SELECT r.key, {about.size} FROM {about.table} r WHERE {engine.not_indexed(kind)} ORDER BY r.key LIMIT :limit",
        upto=upto,
        limit=rows,
    )
    keys: list[int] = []
    for key, bytes_of_row in sizes:
        size -= bytes_of_row
        if keys and size < 0:
            break
        keys.append(key)
    if not keys:
        return []
    condition, value = engine.among(keys)
    found = tx.all(
        f"SELECT r.key, {about.scope_key}, {about.texts} FROM {about.table} r WHERE r.key {condition} ORDER BY r.key",
        keys=value,
    )
    return [Unindexed(key, scope_key, tuple(given)) for key, scope_key, *given in found]


def _changed(tx: Tx, limit: int) -> list[Unindexed]:
    rows = tx.all(
        "SELECT r.key, r.thread, r.arguments, r.output, r.error, x.ticket FROM changed_calls x"
        " JOIN tool_calls r ON r.key = x.call ORDER BY x.call LIMIT :limit",
        limit=limit,
    )
    return [Unindexed(key, thread, tuple(given), ticket) for key, thread, *given, ticket in rows]


def put(tx: Tx, batch: Batch) -> bool:
    """Add a batch to the index; False if it has to be read again, because something was deleted or reset since."""
    engine = engines.of(tx)
    if not engine.hold(tx, batch):
        return False
    engine.add(tx, batch.kind, _current(tx, batch.entries))
    return True


def _current(tx: Tx, entries: Sequence[IndexEntry]) -> list[IndexEntry]:
    """Without the calls that have changed again, or that another process has indexed since."""
    taken = "DELETE FROM changed_calls WHERE call = :key AND ticket = :ticket RETURNING call"
    return [
        entry
        for entry in entries
        if entry.ticket is None or tx.one(taken, key=entry.key, ticket=entry.ticket) is not None
    ]


def reset(tx: Tx) -> None:
    """Mark the index as unusable: the next search or indexing rebuilds it."""
    tx.run("UPDATE indexing SET tokenizer = 0, epoch = epoch + 1")


@takes_long
def discard(tx: Tx) -> None:
    """Empty the index, so that nothing of it stays; the next search or indexing rebuilds it."""
    for about in KINDS.values():
        engines.of(tx).clear(tx, about)
    tx.run("DELETE FROM changed_calls")
    tx.run("UPDATE indexing SET tokenizer = 0, epoch = epoch + 1, upto = 0, horizon = 0, horizon_key = 0")


@takes_long
def empty(tx: Tx, tokenizer: int, kind: str) -> None:
    """Begin an index of another version, if it is not that yet."""
    held = tx.one(
        "UPDATE indexing SET tokenizer = :tokenizer, epoch = epoch + 1, upto = 0, horizon = 0, horizon_key = 0"
        " WHERE kind = :kind AND tokenizer < :tokenizer RETURNING kind",
        kind=kind,
        tokenizer=tokenizer,
    )
    if held is None:
        return
    engines.of(tx).clear(tx, KINDS[kind])
    if kind == CALL:
        tx.run("DELETE FROM changed_calls")
