"""The queries of search: which rows may match, newest first, and how the index behind them is filled.

- An index holds the tokens of rows (see `words.py`), in SQLite as FTS5 and in Postgres as a tsvector. It only gives
  candidates: whoever asks reads their text and decides. So both databases find the same.
- All rows up to the watermark are indexed. Those behind it are candidates, whatever they say: a search never misses
  what was just written, and no writer waits for the index.
- On SQLite nothing behind the watermark is indexed, and a batch is written if nothing was deleted since it was read: a
  deleted row's key may be given to another one. On Postgres keys are given once, but may appear out of order: rows
  behind the watermark are indexed as they are seen, and it rises when no lower one can appear any more.
- A message is shown by each thread whose branch leads past it. It is one candidate, of the thread that it was written
  to if that still shows it, else of the oldest one. A tool call belongs to its thread.
- This is the one file of queries that knows which database it is on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from byssus.store.database import Row, Tx

MESSAGE, CALL = "message", "call"
MAX_SCOPES = 1_000  # branches, or threads, that are asked for by their tokens; more are sorted out afterwards

_END = 2**62
# No word has these: they are for private use.
_SCOPE, _LONG, _TOOL = "\ue000", "\ue001", "\ue002"
# What a tsvector holds: positions up to 16,383, 255 of them a token, and a megabyte in all.
_POSITIONS, _REPEATS, _BYTES = 16_000, 250, 250_000
_NEAR = 2_000  # keys that are looked at before GIN is asked


class Filters(NamedTuple):
    """What a row must be, besides its text. None: anything."""

    user: str | None = None
    session: str | None = None
    roles: tuple[str, ...] | None = None
    since: str | None = None
    until: str | None = None
    namespace: str = ""


class State(NamedTuple):
    """How far the index of a kind has come."""

    upto: int
    epoch: int
    tokenizer: int


class Unindexed(NamedTuple):
    """A row that is to be indexed: its branch or its thread, and what its text is made of."""

    key: int
    scope_key: int
    texts: tuple[str | None, ...]
    ticket: int | None = None  # of a call that has changed


class IndexEntry(NamedTuple):
    """A row as the index takes it."""

    key: int
    scope_key: int
    ticket: int | None
    sequence: list[str]
    singles: list[str]


class Batch(NamedTuple):
    """Rows to be indexed, as of a state; and the key up to which that is all."""

    kind: str
    state: State
    entries: list[IndexEntry]
    upto: int


class Candidate(NamedTuple):
    """A row that may match."""

    key: int
    thread_id: str
    id: str
    role: str
    created_at: str
    tool_name: str | None
    plain: int
    size: int


class _Kind(NamedTuple):
    tokens: str  # the table of its tokens, and there the column of the row's key
    token_key: str
    table: str
    scope_key: str
    texts: str
    size: str
    columns: str


_COLUMNS = {
    MESSAGE: _Kind(
        *("message_words", "message", "messages", "r.branch", "r.body", "octet_length(r.body)"),
        "r.key, t.id, r.id, r.role, r.created_at, NULL, r.plain",
    ),
    CALL: _Kind(
        *("call_words", "call", "tool_calls", "r.thread", "r.arguments, r.output, r.error"),
        "octet_length(r.arguments) + COALESCE(octet_length(r.output), 0) + COALESCE(octet_length(r.error), 0)",
        "r.key, t.id, r.idempotency_key, 'tool', COALESCE(r.started_at, r.asked_at, r.ended_at, ''), r.name, 0",
    ),
}
_CREATED = {MESSAGE: "r.created_at", CALL: "COALESCE(r.started_at, r.asked_at, r.ended_at, '')"}


def tool(name: str) -> str:
    """The token of a message that calls a tool: a name may hold what ends a token, and a digest does not."""
    return _TOOL + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _is_sqlite(system: str) -> bool:
    return system == "sqlite"


# --- asking -----------------------------------------------------------------------------------------------------------


def state(tx: Tx, kind: str) -> State:
    row = tx.one("SELECT upto, epoch, tokenizer FROM indexing WHERE kind = :kind", kind=kind)
    assert row is not None
    return State(*row)


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


def candidates(
    tx: Tx,
    system: str,
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
    before = min(before, highest(tx, kind) + 1)
    if before <= 1:  # which saves the other questions where there are no tools
        return [], None
    found = [_rows(tx, system, kind, filters, _unindexed(system, kind, upto), before=before, limit=limit)]
    if upto is not None:
        query = _query(system, chains, named)
        found.append(_indexed(tx, system, kind, filters, query, before=before, limit=limit))
        if kind == CALL:
            changed = _Source("changed_calls x CROSS JOIN tool_calls r", "r.key = x.call", {})
            found.append(_rows(tx, system, kind, filters, changed, before=before, limit=limit))
    low = max((end for _, end in found if end is not None), default=None)
    unique = {row[0]: Candidate(*row) for rows, _ in found for row in rows if low is None or row[0] >= low}
    return [unique[key] for key in sorted(unique, reverse=True)], low


class _Source(NamedTuple):
    """Where rows come from, with a condition and its values."""

    tables: str
    condition: str
    values: dict[str, Any]
    order: str = "r.key"


_Rows: TypeAlias = tuple[list[Row], int | None]  # and the key below which there may be more


def _rows(tx: Tx, system: str, kind: str, filters: Filters, source: _Source, *, before: int, limit: int) -> _Rows:
    statement = _select(system, kind, filters, source)
    rows = tx.all(statement, before=before, limit=limit, **source.values, **_values(filters))
    return rows, rows[-1][0] if len(rows) >= limit else None


def _unindexed(system: str, kind: str, upto: int | None) -> _Source:
    about = _COLUMNS[kind]
    if upto is None:
        return _Source(f"{about.table} r", "1 = 1", {})
    return _Source(f"{about.table} r", _behind(system, about), {"upto": upto})


def _indexed(tx: Tx, system: str, kind: str, filters: Filters, query: str, *, before: int, limit: int) -> _Rows:
    about = _COLUMNS[kind]
    if _is_sqlite(system):  # CROSS: in this order, or FTS5 would be asked row by row
        condition = f"w.{about.tokens} MATCH :query AND w.rowid < :before AND r.key = w.rowid"
        source = _Source(f"{about.tokens} w CROSS JOIN {about.table} r", condition, {"query": query}, "w.rowid")
        return _rows(tx, system, kind, filters, source, before=before, limit=limit)
    keys, end = _found_keys(tx, kind, query, before, limit)
    source = _Source(f"{about.table} r", "r.key = ANY(CAST(:keys AS BIGINT[]))", {"keys": keys})
    return _rows(tx, system, kind, filters, source, before=before, limit=limit)[0] if keys else [], end


def _found_keys(tx: Tx, kind: str, query: str, before: int, limit: int) -> tuple[list[int], int | None]:
    """The keys that the tokens lead to, highest first; and the key below which there may be more.

    GIN finds all or nothing. What is frequent is found sooner by looking at the newest rows, one by one; so those are
    looked at first.
    """
    about, near = _COLUMNS[kind], before - _NEAR
    found, end = f"FROM {about.tokens} w WHERE w.words @@ CAST(:query AS TSQUERY)", "ORDER BY 1 DESC LIMIT :limit"
    key = f"w.{about.token_key}"
    rows = tx.all(
        f"SELECT DISTINCT {key} {found} AND {key} < :before AND {key} >= :near {end}",
        query=query,
        before=before,
        near=near,
        limit=limit,
    )
    low = near if near > 1 and len(rows) >= limit // 3 else None
    if low is None and near > 1:  # of a sum there is no other index, neither for the condition nor for the order
        rows += tx.all(
            f"SELECT DISTINCT {key} + 0 {found} AND {key} + 0 < :near {end}",
            query=query,
            near=near,
            limit=limit - len(rows),
        )
    keys = [each for (each,) in rows]
    return keys, keys[-1] if len(keys) >= limit else low


def _behind(system: str, about: _Kind) -> str:
    """The condition of a row that is not indexed."""
    if _is_sqlite(system):
        return "r.key > :upto"
    # Bounded twice: the planner may go through both tables side by side.
    key = f"w.{about.token_key}"
    return f"r.key > :upto AND NOT EXISTS (SELECT 1 FROM {about.tokens} w WHERE {key} = r.key AND {key} > :upto)"


def _select(system: str, kind: str, filters: Filters, source: _Source) -> str:
    about, created = _COLUMNS[kind], _CREATED[kind]
    conditions = [source.condition, "r.key < :before"]
    if filters.roles is not None and kind == MESSAGE:
        conditions.append(f"r.role IN ({', '.join(f':role_{number}' for number in range(len(filters.roles)))})")
    if filters.since is not None:
        conditions.append(f"{created} >= :since")
    if filters.until is not None:
        conditions.append(f"{created} <= :until")
    thread = "CROSS JOIN threads t"
    if kind == CALL:
        conditions.append(f"t.key = r.thread AND t.namespace = :namespace{_whose(filters)}")
    elif _is_sqlite(system):
        conditions.append(f"t.key = ({_shown('t.key', filters)})")
    else:
        thread = f"CROSS JOIN LATERAL ({_shown('t.id', filters)}) t"
    return (
        f"SELECT {about.columns}, {about.size} FROM {source.tables} {thread} WHERE {' AND '.join(conditions)}"
        f" ORDER BY {source.order} DESC LIMIT :limit"
    )


def _shown(column: str, filters: Filters) -> str:
    """The thread that shows a message."""
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


def _query(system: str, chains: Sequence[Sequence[str]], named: Sequence[int] | None) -> str:
    """What the index is asked: all chains, in one of the places. Tokens have no quotes in them."""
    marks = [f"{_SCOPE}{scope_key}" for scope_key in named or ()]
    if _is_sqlite(system):
        wanted = [f'"{" ".join(chain)}"' for chain in chains]
        either = " OR ".join(f'"{mark}"' for mark in marks)
        return " AND ".join([*wanted, f"({either})"] if marks else wanted)
    wanted = [f"({' <-> '.join(map(_quoted, chain))})" for chain in chains]
    longest = max((token for chain in chains for token in chain), key=len)
    query = f"({' & '.join(wanted)} | {_quoted(_LONG + longest)})"
    return f"{query} & ({' | '.join(map(_quoted, marks))})" if marks else query


def _quoted(token: str) -> str:
    return f"'{token}'"


def texts(tx: Tx, system: str, kind: str, keys: Sequence[int]) -> dict[int, tuple[str | None, ...]]:
    """What the text of rows is made of."""
    about = _COLUMNS[kind]
    sqlite = _is_sqlite(system)
    among = "IN (SELECT value FROM json_each(:keys))" if sqlite else "= ANY(CAST(:keys AS BIGINT[]))"
    given = json.dumps(list(keys)) if sqlite else list(keys)
    rows = tx.all(f"SELECT r.key, {about.texts} FROM {about.table} r WHERE r.key {among}", keys=given)
    return {row[0]: row[1:] for row in rows}


# --- the index --------------------------------------------------------------------------------------------------------


def lag(tx: Tx, system: str, kind: str, upto: int, limit: int = _END) -> int:
    """How many rows are not indexed, or have changed since; counted up to a limit."""
    about = _COLUMNS[kind]
    row = tx.one(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {about.table} r WHERE {_behind(system, about)} LIMIT :limit) AS waiting",
        upto=upto,
        limit=limit,
    )
    changed = tx.one("SELECT COUNT(*) FROM changed_calls") if kind == CALL else None
    assert row is not None
    return int(row[0]) + (int(changed[0]) if changed else 0)


def count(tx: Tx, kind: str) -> int:
    """How many rows there are."""
    row = tx.one(f"SELECT COUNT(*) FROM {_COLUMNS[kind].table}")
    assert row is not None
    return int(row[0])


def highest(tx: Tx, kind: str) -> int:
    """The highest key, 0 if there is no row: it grows when somebody writes."""
    row = tx.one(f"SELECT COALESCE(MAX(key), 0) FROM {_COLUMNS[kind].table}")
    assert row is not None
    return int(row[0])


def waiting(tx: Tx, system: str, kind: str, upto: int, *, rows: int, size: int) -> list[Unindexed]:
    """The next rows to be indexed: so many, and of so many bytes, or one that is larger."""
    about = _COLUMNS[kind]
    if kind == CALL and (changed := _changed(tx, rows)):
        return changed
    sizes = tx.all(
        f"SELECT r.key, {about.size} FROM {about.table} r WHERE {_behind(system, about)} ORDER BY r.key LIMIT :limit",
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
    sqlite = _is_sqlite(system)
    among = "IN (SELECT value FROM json_each(:keys))" if sqlite else "= ANY(CAST(:keys AS BIGINT[]))"
    found = tx.all(
        f"SELECT r.key, {about.scope_key}, {about.texts} FROM {about.table} r WHERE r.key {among} ORDER BY r.key",
        keys=json.dumps(keys) if sqlite else keys,
    )
    return [Unindexed(key, scope_key, tuple(given)) for key, scope_key, *given in found]


def _changed(tx: Tx, limit: int) -> list[Unindexed]:
    rows = tx.all(
        "SELECT r.key, r.thread, r.arguments, r.output, r.error, x.ticket FROM changed_calls x"
        " JOIN tool_calls r ON r.key = x.call ORDER BY x.call LIMIT :limit",
        limit=limit,
    )
    return [Unindexed(key, thread, tuple(given), ticket) for key, thread, *given, ticket in rows]


def put(tx: Tx, batch: Batch, system: str) -> bool:
    """Add a batch to the index; False if it has to be read again, because something was deleted or reset since."""
    held = tx.one(
        "UPDATE indexing SET upto = CASE WHEN :sqlite = 1 THEN :upto ELSE upto END WHERE kind = :kind"
        " AND epoch = :epoch AND tokenizer = :tokenizer AND (:sqlite = 0 OR upto = :known) RETURNING kind",
        kind=batch.kind,
        upto=batch.upto,
        known=batch.state.upto,
        epoch=batch.state.epoch,
        tokenizer=batch.state.tokenizer,
        sqlite=int(_is_sqlite(system)),
    )
    if held is None:
        return False
    if _is_sqlite(system):
        _add(tx, batch.kind, _current(tx, batch.entries))
    else:
        _add_vectors(tx, batch.kind, _current(tx, batch.entries))
        _advance(tx, system, batch.kind)
    return True


def _current(tx: Tx, entries: Sequence[IndexEntry]) -> list[IndexEntry]:
    """Without the calls that have changed again, or that somebody else has indexed since."""
    taken = "DELETE FROM changed_calls WHERE call = :key AND ticket = :ticket RETURNING call"
    return [
        entry
        for entry in entries
        if entry.ticket is None or tx.one(taken, key=entry.key, ticket=entry.ticket) is not None
    ]


def _add(tx: Tx, kind: str, entries: Sequence[IndexEntry]) -> None:
    tx.many(
        f"INSERT OR REPLACE INTO {_COLUMNS[kind].tokens} (rowid, words) VALUES (:key, :words)",
        [
            {"key": entry.key, "words": " ".join([*entry.sequence, *entry.singles, f"{_SCOPE}{entry.scope_key}"])}
            for entry in entries
        ],
    )


def _add_vectors(tx: Tx, kind: str, entries: Sequence[IndexEntry]) -> None:
    if not entries:
        return
    about = _COLUMNS[kind]
    tx.run("SET LOCAL work_mem = '64MB'")  # GIN takes what waits in its list in as many passes as this makes it
    # Rows that are taken are not deleted before this is committed; and what is deleted then takes its tokens along.
    rows = tx.all(
        f"SELECT r.key FROM {about.table} r WHERE r.key = ANY(CAST(:keys AS BIGINT[])) FOR KEY SHARE",
        keys=[entry.key for entry in entries],
    )
    alive = {key for (key,) in rows}
    there = [entry for entry in entries if entry.key in alive]
    changed = [{"key": entry.key} for entry in there if entry.ticket is not None]
    tx.many(f"DELETE FROM {about.tokens} WHERE {about.token_key} = :key", changed)
    vectors = [(entry.key, part, vector) for entry in there for part, vector in enumerate(_vectors(entry))]
    keys, parts, values = zip(*vectors, strict=True) if vectors else ((), (), ())
    tx.run(
        f"INSERT INTO {about.tokens} ({about.token_key}, part, words)"
        " SELECT v.key, v.part, CAST(v.words AS TSVECTOR) FROM unnest(CAST(:keys AS BIGINT[]),"
        " CAST(:parts AS BIGINT[]), CAST(:vectors AS TEXT[])) AS v (key, part, words) ON CONFLICT DO NOTHING",
        keys=list(keys),
        parts=list(parts),
        vectors=list(values),
    )


def _vectors(entry: IndexEntry) -> list[str]:
    """The tokens as tsvectors: one with positions, or as many as it takes without."""
    scope_key = f"'{_SCOPE}{entry.scope_key}'"
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
        part.append(_quoted(_LONG + token))
        size += len(part[-1].encode())
        if size > _BYTES:
            vectors.append(" ".join(part))
            part, size = [scope_key], 0
    return [*vectors, " ".join(part)]


_SNAPSHOT = "CAST(CAST(pg_snapshot_{}(pg_current_snapshot()) AS TEXT) AS BIGINT)"


def _advance(tx: Tx, system: str, kind: str) -> None:
    """Raise the watermark as far as no row can appear below it any more.

    A transaction takes its number before it takes a key. So what is below the highest key that can be seen belongs to
    a transaction that has ended, or has a number below the next one: when all those have ended, all of it can be seen.
    """
    about = _COLUMNS[kind]
    row = tx.one(
        f"SELECT upto, horizon, horizon_key, {_SNAPSHOT.format('xmin')}, {_SNAPSHOT.format('xmax')},"
        f" (SELECT COALESCE(MAX(key), 0) FROM {about.table}) FROM indexing WHERE kind = :kind",
        kind=kind,
    )
    assert row is not None
    upto, horizon, horizon_key, oldest, following, highest_key = row
    if oldest < horizon <= following:
        return
    if horizon <= following:  # else it comes from another server, and says nothing here
        first = tx.one(
            f"SELECT r.key FROM {about.table} r WHERE {_behind(system, about)} ORDER BY r.key LIMIT 1", upto=upto
        )
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


# What FTS5 has of deleted rows goes when all is written anew. For a connection that erases.
SCRUB = tuple(f"INSERT INTO {about.tokens} ({about.tokens}) VALUES ('optimize')" for about in _COLUMNS.values())


def reset(tx: Tx) -> None:
    """The index is not to be trusted any more: whoever searches or indexes next makes it anew."""
    tx.run("UPDATE indexing SET tokenizer = 0, epoch = epoch + 1")


def empty(tx: Tx, tokenizer: int, kind: str, system: str) -> None:
    """Begin an index of another version, if it is not that yet."""
    held = tx.one(
        "UPDATE indexing SET tokenizer = :tokenizer, epoch = epoch + 1, upto = 0, horizon = 0, horizon_key = 0"
        " WHERE kind = :kind AND tokenizer < :tokenizer RETURNING kind",
        kind=kind,
        tokenizer=tokenizer,
    )
    if held is None:
        return
    index = _COLUMNS[kind].tokens
    if _is_sqlite(system):
        tx.run(f"INSERT INTO {index} ({index}) VALUES ('delete-all')")
    else:  # not TRUNCATE: whoever reads an older state still finds what it says
        tx.run(f"DELETE FROM {index}")
    if kind == CALL:
        tx.run("DELETE FROM changed_calls")
