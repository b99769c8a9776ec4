"""The queries of a copy: pages of a table, read in the order of its key, compared, and made equal.

- `tables.py` names every table and column that a copy carries, and what it leaves behind.
- A page is a range of keys, with a limit to its rows and to its bytes: memory does not grow with the table, nor with
  the size of its messages.
- A page is written in one transaction, which first takes the row of the copy in `copies`: when that is closed, nothing
  of a copy is written any more.
- The source may be written to between any two pages. What does not fit for that reason (a row without its parent, a
  unique name that another row still has) is passed over; the next comparison finds it. So no statement here can
  fail for what the source holds.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from byssus.errors import StoreError
from byssus.queries.moving import known_backups
from byssus.queries.moving.tables import KEYS, TABLES, Key, Table
from byssus.queries.search import index
from byssus.store.database import Row, Tx
from byssus.store.jobs import takes_long
from byssus.values import clock

PAGE_ROWS = 500
PAGE_BYTES = 4_000_000

_encoder = msgspec.json.Encoder()


# --- reading ----------------------------------------------------------------------------------------------------------


def page(tx: Tx, table: Table, after: Key, upto: Key) -> tuple[list[Row], Key]:
    """The next rows of a range, and the key up to which they are all that there is."""
    # Sizes first: five hundred messages may be a kilobyte or ten gigabytes. No value is fetched for its size.
    size = " + ".join(f"COALESCE(octet_length({name}), 0)" for name in table.long) or "0"
    sizes = tx.all(
        f"SELECT {', '.join(table.key)}, {size} FROM {table.name} WHERE {_range(table)} LIMIT :limit",
        limit=PAGE_ROWS,
        **_bounds(table, after, upto),
    )
    count = total = 0
    for *_, bytes_of_row in sizes:
        total += bytes_of_row
        if count and total > PAGE_BYTES:
            break
        count += 1
    is_last = count == len(sizes) < PAGE_ROWS
    reached = upto if is_last else table.key_of(sizes[count - 1])
    return between(tx, table, after, reached), reached


def between(tx: Tx, table: Table, after: Key, upto: Key, limit: int = 2**31) -> list[Row]:
    """The rows of a range, in the order of their key."""
    return tx.all(
        f"SELECT {', '.join(table.columns)} FROM {table.name} WHERE {_range(table)} LIMIT :limit",
        limit=limit,
        **_bounds(table, after, upto),
    )


@takes_long
def count(tx: Tx, table: Table) -> int:
    row = tx.one(f"SELECT COUNT(*) FROM {table.name}")
    assert row is not None
    return int(row[0])


def encoded(rows: Sequence[Row]) -> bytes:
    """Rows as bytes that are the same on any database: a line of JSON each, which is unambiguous and fast."""
    return _encoder.encode_lines(rows)


class Digest:
    """The rows of a table, counted, and a sha256 over them: the same for the same rows, in pages of any size."""

    def __init__(self, table: Table) -> None:
        self._hash = hashlib.sha256(encoded([(table.name, *table.columns)]))
        self.rows = 0

    def add(self, rows: int, lines: bytes) -> None:
        self.rows += rows
        self._hash.update(lines)

    def value(self) -> str:
        return self._hash.hexdigest()


def combined(digests: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def shape() -> str:
    """A hash over what a digest is over: where that differs, digests cannot be compared."""
    return combined(Digest(table).value() for table in TABLES)


# --- writing ----------------------------------------------------------------------------------------------------------


def put(tx: Tx, mark: int, table: Table, after: Key, upto: Key, rows: Sequence[Row]) -> int:
    """Add the rows that a range does not have and change those that differ; returns how many that were."""
    _hold(tx, mark)
    there = {table.key_of(row): row for row in between(tx, table, after, upto)}
    new = [table.values_of(row) for row in rows if table.key_of(row) not in there]
    changed = [table.values_of(row) for row in rows if there.get(table.key_of(row), row) != row]
    tx.many(_statements(table).insert, new)
    tx.many(_statements(table).change, changed)
    return len(new) + len(changed)


def make_room(tx: Tx, mark: int, table: Table, after: Key, upto: Key, rows: Sequence[Row]) -> int:
    """Delete what a range has and these rows do not, and take the names from those that are to have others.

    Returns how many rows that were.
    """
    _hold(tx, mark)
    surplus = _surplus(table, rows, between(tx, table, after, upto))
    keys = {table.key_of(row) for row in rows}
    tx.many(_statements(table).delete, [table.values_of(row) for row in surplus if table.key_of(row) not in keys])
    if table.parked:  # also from those that cannot go yet, because a row whose key was given again points to them
        tx.many(_statements(table).park, [table.values_of(row) for row in surplus])
    return len(surplus)


def needs_room(table: Table, rows: Sequence[Row], theirs: Sequence[Row]) -> bool:
    """Whether there is something in the way of these rows."""
    return bool(_surplus(table, rows, theirs))


def _surplus(table: Table, rows: Sequence[Row], theirs: Sequence[Row]) -> list[Row]:
    wanted = {table.names_of(row) for row in rows}
    return [row for row in theirs if table.names_of(row) not in wanted]


# --- the mark ---------------------------------------------------------------------------------------------------------


class CopyRow(NamedTuple):
    """A copy that was begun in a database."""

    key: int
    source: str
    began_at: str
    finished_at: str | None


def last_mark(tx: Tx) -> CopyRow | None:
    row = tx.one("SELECT key, source, began_at, finished_at FROM copies ORDER BY key DESC LIMIT 1")
    return CopyRow(*row) if row else None


def is_empty(tx: Tx) -> bool:
    return all(tx.one(f"SELECT 1 FROM {table.name} LIMIT 1") is None for table in TABLES)


@takes_long
def counts(tx: Tx) -> dict[str, int]:
    """How many rows each table has."""
    return {table.name: count(tx, table) for table in TABLES}


def begin(tx: Tx, source: str) -> CopyRow | None:
    """The mark of the copy into this database: of one that is under way, or of a new one if there is nothing here.

    It is closed if all that is here is a finished copy, and None if it is anything else.
    """
    mark = last_mark(tx)
    if (mark is not None and mark.finished_at is None) or not is_empty(tx):
        return mark
    row = tx.one(
        "INSERT INTO copies (source, began_at, written_at) VALUES (:source, :now, :now)"
        " RETURNING key, source, began_at, finished_at",
        source=source,
        now=tx.now(),
    )
    assert row is not None
    return CopyRow(*row)


def finish(tx: Tx, sha256: str) -> None:
    """Close the copy: every mark of it, should two processes have begun it at once."""
    tx.run(
        "UPDATE copies SET finished_at = :now, sha256 = :digest WHERE finished_at IS NULL", now=tx.now(), digest=sha256
    )
    index.reset(tx)  # rows came with keys of their own, and some were changed


def reopen(tx: Tx, source: str) -> int:
    """The mark under which rows are changed from now on, in this transaction."""
    tx.run("DELETE FROM copies")
    row = tx.one(
        "INSERT INTO copies (source, began_at, written_at) VALUES (:source, :now, :now) RETURNING key",
        source=source,
        now=tx.now(),
    )
    assert row is not None
    return int(row[0])


def _hold(tx: Tx, mark: int) -> None:
    """Take the mark's row: who closes it waits for this page, and no page is written behind that."""
    row = tx.one(
        "UPDATE copies SET written_at = :now WHERE key = :mark AND finished_at IS NULL RETURNING key",
        now=tx.now(),
        mark=mark,
    )
    if row is None:
        raise StoreError("another process has finished this copy in the meantime; run it again to verify the target")


# --- backups ----------------------------------------------------------------------------------------------------------


class Backup(NamedTuple):
    """That a database is a backup: of which one, when it was taken, and what it held then."""

    database: str
    source: str
    taken_at: str
    shape: str
    sha256: str


def identity(tx: Tx) -> str:
    """What no other database has."""
    row = tx.one("SELECT id FROM identity WHERE key = 1")
    assert row is not None
    return str(row[0])


def backup_mark(tx: Tx) -> Backup | None:
    row = tx.one("SELECT database, source, taken_at, shape, sha256 FROM backups WHERE key = 1")
    return Backup(*row) if row else None


def mark_backup(tx: Tx, database: str, source: str, sha256: str) -> None:
    """Record which database this is a backup of, and release every lease. The file is a database of its own.

    It has no index for search, which would keep words of messages that are not there any more.
    """
    index.discard(tx)
    known_backups.forget_all(tx)
    tx.run("UPDATE threads SET lease_owner = NULL, lease_until = NULL WHERE lease_owner IS NOT NULL")
    tx.run("UPDATE tasks SET lease_owner = NULL WHERE lease_owner IS NOT NULL")
    tx.run("DELETE FROM reservations")
    # A backup that is used as a database has an identity of its own: its backups are not backups of the original.
    tx.run("UPDATE identity SET id = :id WHERE key = 1 AND id = :database", id=clock.new_id(), database=database)
    tx.run("DELETE FROM backups")
    tx.run(
        "INSERT INTO backups (key, database, source, taken_at, shape, sha256)"
        " VALUES (1, :database, :source, :now, :shape, :sha256)",
        database=database,
        source=source,
        shape=shape(),
        sha256=sha256,
        now=tx.now(),
    )


# --- statements -------------------------------------------------------------------------------------------------------


class _Statements(NamedTuple):
    insert: str
    change: str
    park: str
    delete: str


@functools.cache
def _statements(table: Table) -> _Statements:
    """What writes to a table, where no constraint is in the way."""
    name, columns = table.name, ", ".join(table.columns)
    values = ", ".join(f":{column}" for column in table.columns)
    changes = ", ".join(f"{column} = :{column}" for column in table.columns if column not in table.key)
    here = " AND ".join(f"{column} = :{column}" for column in table.key)
    # What has no parent needs none to be there.
    parents = [
        f"(CAST(:{column} AS BIGINT) IS NULL OR EXISTS (SELECT 1 FROM {parent} WHERE {KEYS[parent]} = :{column}))"
        for column, parent in table.parents
    ]
    same = " AND ".join(f"other.{column} = :{column}" for column in table.unique)
    namesakes = [f"NOT EXISTS (SELECT 1 FROM {name} AS other WHERE {same} AND other.key <> :key)"] if same else []
    children = [(child.name, column) for child in TABLES for column, parent in child.parents if parent == name]
    childless = [f"NOT EXISTS (SELECT 1 FROM {child} WHERE {column} = :{KEYS[name]})" for child, column in children]
    return _Statements(
        insert=f"INSERT INTO {name} ({columns}) SELECT {values} WHERE {' AND '.join(parents) or '1 = 1'}"
        " ON CONFLICT DO NOTHING",
        change=f"UPDATE {name} SET {changes} WHERE {' AND '.join([here, *parents, *namesakes])}",
        park=f"UPDATE {name} SET {table.parked} WHERE {here}",
        delete=f"DELETE FROM {name} WHERE {' AND '.join([here, *childless])}",
    )


def _range(table: Table) -> str:
    """The condition of a range, and its order."""
    key = ", ".join(table.key)
    after, upto = (", ".join(f":{side}_{column}" for column in table.key) for side in ("after", "upto"))
    return f"({key}) > ({after}) AND ({key}) <= ({upto}) ORDER BY {key}"


def _bounds(table: Table, after: Key, upto: Key) -> dict[str, Any]:
    sides = (("after", after), ("upto", upto))
    return {f"{side}_{column}": value for side, key in sides for column, value in zip(table.key, key, strict=True)}
