"""The index for search on Postgres: tsvectors under a GIN index.

Keys are given once, but may appear out of order: rows behind the watermark are indexed as they are seen, and it rises
when no lower one can appear any more. See `engines.py` for what each function promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from byssus.queries.search.kinds import CALL, KINDS, LONG, MESSAGE, SCOPE, Batch, IndexedTable, IndexEntry, Kind
from byssus.store.database import Row, Tx

# What a tsvector holds: positions up to 16,383, 255 of them a token, and a megabyte in all.
_POSITIONS, _REPEATS, _BYTES = 16_000, 250, 250_000
_NEAR = 2_000  # keys that are looked at before GIN is asked
_KEY_COLUMNS = {MESSAGE: "message", CALL: "call"}
_SNAPSHOT = "CAST(CAST(pg_snapshot_{}(pg_current_snapshot()) AS TEXT) AS BIGINT)"


def key_column(kind: str) -> str:
    return _KEY_COLUMNS[kind]


def among(keys: Sequence[int]) -> tuple[str, Any]:
    return "= ANY(CAST(:keys AS BIGINT[]))", list(keys)


def not_indexed(kind: str) -> str:
    # Bounded twice: the planner may go through both tables side by side.
    key = f"w.{_KEY_COLUMNS[kind]}"
    return f"r.key > :upto AND NOT EXISTS (SELECT 1 FROM {KINDS[kind].tokens} w WHERE {key} = r.key AND {key} > :upto)"


# --- asking -----------------------------------------------------------------------------------------------------------


def expression(chains: Sequence[Sequence[str]], scope_keys: Sequence[int] | None) -> str:
    wanted = [f"({' <-> '.join(map(_quoted, chain))})" for chain in chains]
    longest = max((token for chain in chains for token in chain), key=len)
    query = f"({' & '.join(wanted)} | {_quoted(LONG + longest)})"
    either = " | ".join(_quoted(f"{SCOPE}{key}") for key in scope_keys or ())
    return f"{query} & ({either})" if either else query


def _quoted(token: str) -> str:
    return f"'{token}'"


def indexed(
    tx: Tx,
    kind: str,
    expression: str,
    *,
    before: int,
    limit: int,
    select: Callable[[IndexedTable], tuple[list[Row], int | None]],
) -> tuple[list[Row], int | None]:
    keys, end = _found_keys(tx, kind, expression, before, limit)
    if not keys:
        return [], end
    condition, value = among(keys)
    rows, _ = select(IndexedTable(f"{KINDS[kind].table} r", f"r.key {condition}", {"keys": value}))
    return rows, end


def _found_keys(tx: Tx, kind: str, expression: str, before: int, limit: int) -> tuple[list[int], int | None]:
    """The keys that the tokens lead to, highest first; and the key below which there may be more.

    GIN finds all or nothing. What is frequent is found sooner by looking at the newest rows, one by one; so those are
    looked at first.
    """
    key, near = f"w.{_KEY_COLUMNS[kind]}", before - _NEAR
    found = f"FROM {KINDS[kind].tokens} w WHERE w.words @@ CAST(:query AS TSQUERY)"
    end = "ORDER BY 1 DESC LIMIT :limit"
    rows = tx.all(
        f"SELECT DISTINCT {key} {found} AND {key} < :before AND {key} >= :near {end}",
        query=expression,
        before=before,
        near=near,
        limit=limit,
    )
    low = near if near > 1 and len(rows) >= limit // 3 else None
    if low is None and near > 1:  # of a sum there is no other index, neither for the condition nor for the order
        rows += tx.all(
            f"SELECT DISTINCT {key} + 0 {found} AND {key} + 0 < :near {end}",
            query=expression,
            near=near,
            limit=limit - len(rows),
        )
    keys = [each for (each,) in rows]
    return keys, keys[-1] if len(keys) >= limit else low


def shown(thread: Callable[[str], str]) -> tuple[str, list[str]]:
    return f"CROSS JOIN LATERAL ({thread('t.id')}) t", []


# --- indexing ---------------------------------------------------------------------------------------------------------


def hold(tx: Tx, batch: Batch) -> bool:
    held = tx.one(
        "UPDATE indexing SET upto = upto WHERE kind = :kind AND epoch = :epoch AND tokenizer = :tokenizer"
        " RETURNING kind",
        kind=batch.kind,
        epoch=batch.state.epoch,
        tokenizer=batch.state.tokenizer,
    )
    return held is not None


def add(tx: Tx, kind: str, entries: Sequence[IndexEntry]) -> None:
    if entries:
        _add_vectors(tx, kind, entries)
    _advance(tx, kind)


def clear(tx: Tx, about: Kind) -> None:
    tx.run(f"DELETE FROM {about.tokens}")  # not TRUNCATE: a reader of an older state still finds what it says


def _add_vectors(tx: Tx, kind: str, entries: Sequence[IndexEntry]) -> None:
    about, key_column = KINDS[kind], _KEY_COLUMNS[kind]
    tx.run("SET LOCAL work_mem = '64MB'")  # GIN takes what waits in its list in as many passes as this makes it
    # Rows that are taken are not deleted before this is committed; and what is deleted then takes its tokens along.
    rows = tx.all(
        f"SELECT r.key FROM {about.table} r WHERE r.key = ANY(CAST(:keys AS BIGINT[])) FOR KEY SHARE",
        keys=[entry.key for entry in entries],
    )
    alive = {key for (key,) in rows}
    there = [entry for entry in entries if entry.key in alive]
    changed = [{"key": entry.key} for entry in there if entry.ticket is not None]
    tx.many(f"DELETE FROM {about.tokens} WHERE {key_column} = :key", changed)
    vectors = [(entry.key, part, vector) for entry in there for part, vector in enumerate(_vectors(entry))]
    keys, parts, values = zip(*vectors, strict=True) if vectors else ((), (), ())
    tx.run(
        f"INSERT INTO {about.tokens} ({key_column}, part, words)"
        " SELECT v.key, v.part, CAST(v.words AS TSVECTOR) FROM unnest(CAST(:keys AS BIGINT[]),"
        " CAST(:parts AS BIGINT[]), CAST(:vectors AS TEXT[])) AS v (key, part, words) ON CONFLICT DO NOTHING",
        keys=list(keys),
        parts=list(parts),
        vectors=list(values),
    )


def _vectors(entry: IndexEntry) -> list[str]:
    """The tokens as tsvectors: one with positions, or as many as it takes without."""
    scope_key = f"'{SCOPE}{entry.scope_key}'"
    counts = Counter(entry.sequence)
    if len(entry.sequence) <= _POSITIONS and max(counts.values(), default=0) <= _REPEATS:
        positions: dict[str, list[str]] = {}
        for position, token in enumerate(entry.sequence, 1):
            positions.setdefault(token, []).append(str(position))
        vector = " ".join(
            [scope_key, *map(_quoted, entry.singles), *(f"'{token}':{','.join(at)}" for token, at in positions.items())]
        )
        if len(vector.encode()) <= _BYTES:
            return [vector]
    vectors, part, size = [], [scope_key], 0
    for token in (*counts, *entry.singles):
        part.append(_quoted(LONG + token))
        size += len(part[-1].encode())
        if size > _BYTES:
            vectors.append(" ".join(part))
            part, size = [scope_key], 0
    return [*vectors, " ".join(part)]


def _advance(tx: Tx, kind: str) -> None:
    """Raise the watermark as far as no row can appear below it any more.

    A transaction takes its number before it takes a key. So what is below the highest key that can be seen belongs to
    a transaction that has ended, or has a number below the next one: when all those have ended, all of it can be seen.
    """
    table = KINDS[kind].table
    row = tx.one(
        f"SELECT upto, horizon, horizon_key, {_SNAPSHOT.format('xmin')}, {_SNAPSHOT.format('xmax')},"
        f" (SELECT COALESCE(MAX(key), 0) FROM {table}) FROM indexing WHERE kind = :kind",
        kind=kind,
    )
    assert row is not None
    upto, horizon, horizon_key, oldest, following, highest_key = row
    if oldest < horizon <= following:
        return
    if horizon <= following:  # else it comes from another server, and says nothing here
        first = tx.one(f"SELECT r.key FROM {table} r WHERE {not_indexed(kind)} ORDER BY r.key LIMIT 1", upto=upto)
        upto = max(upto, min(horizon_key, first[0] - 1 if first else horizon_key))
    if upto >= horizon_key or horizon > following:
        horizon, horizon_key = following, highest_key
    tx.run(
        "UPDATE indexing SET upto = :upto, horizon = :horizon, horizon_key = :horizon_key WHERE kind = :kind",
        upto=upto,
        horizon=horizon,
        horizon_key=horizon_key,
        kind=kind,
    )
