"""`queries/moving/tables.py` says what the databases' own catalogues say: the same tables, columns, types and keys."""

from __future__ import annotations

import re
import types
import typing
from typing import Any, NamedTuple

import pytest

from byssus.checkpointer import Checkpointer
from byssus.maintenance import shapes
from byssus.maintenance.export import export_thread, export_user
from byssus.maintenance.shapes import FORMAT
from byssus.queries.accounts.users import User
from byssus.queries.log.inbox import InboxRow
from byssus.queries.moving import tables
from byssus.queries.moving.copying import Backup, CopyRow
from byssus.queries.moving.tables import LOCAL, TABLES, Column, Number, Table
from byssus.queries.tasks.tasks import Task
from byssus.store.database import Row
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.exports import fill

# Tables that only one kind of database has, and that only its store knows.
OF_ONE_DATABASE = {"message_words", "call_words", "writers", "byssus_schema"}
FTS5 = re.compile(r"(message|call)_words_(config|data|docsize|idx)")
TYPES = dict.fromkeys(typing.get_args(Number), "bigint") | {"flag": "smallint", "amount": "double precision"}


class Found(NamedTuple):
    """A column as a database knows it."""

    name: str
    type: str
    is_optional: bool


CATALOGUE = {
    "sqlite": 'SELECT t.name, c.name, lower(c.type), c."notnull" = 0 AND c.pk = 0 FROM sqlite_schema t'
    " JOIN pragma_table_info(t.name) c WHERE t.type = 'table' ORDER BY t.name, c.cid",
    "postgresql": "SELECT table_name, column_name, data_type, is_nullable = 'YES' FROM information_schema.columns"
    " WHERE table_schema = :schema ORDER BY table_name, ordinal_position",
}


def schema_of(database: Database) -> str:
    return database.place.rpartition("schema=")[2]


def asked(database: Database, statements: dict[str, str], **params: Any) -> list[Row]:
    """What a database answers to its own statement. (On SQLite, there is no schema to name.)"""
    statement = statements[database.system]
    if ":schema" in statement:
        params["schema"] = schema_of(database)
    with database.store() as store:
        return store.read_now(lambda tx: tx.all(statement, **params))


def catalogue(database: Database) -> dict[str, set[Found]]:
    found: dict[str, set[Found]] = {}
    for table, name, kind, is_optional in asked(database, CATALOGUE):
        if table not in OF_ONE_DATABASE and not FTS5.fullmatch(table):
            kind = "bigint" if kind == "integer" else kind  # the type of a key that SQLite gives out
            found.setdefault(table, set()).add(Found(name, kind, bool(is_optional)))
    return found


def declared(table: Table) -> set[Found]:
    return {
        Found(field.name, TYPES.get(field.kind, "text"), field.is_optional) for field in table.fields if field.is_stored
    }


def undeclared(found: dict[str, set[Found]]) -> list[str]:
    """Where a catalogue is not what is declared."""
    known = {table.name: declared(table) for table in TABLES}
    names = {table.name: set(table.columns) for table in LOCAL}
    wrong = sorted(found.keys() ^ (known.keys() | names.keys()))
    wrong += [f"{table}.{column.name}" for table in known for column in sorted(found.get(table, set()) ^ known[table])]
    for table, columns in names.items():
        wrong += [f"{table}.{name}" for name in sorted({column.name for column in found.get(table, set())} ^ columns)]
    return wrong


def alter(database: Database, statement: str, table: str) -> None:
    name = table if database.system == "sqlite" else f'"{schema_of(database)}".{table}'
    with database.store() as store:
        store.write_now(lambda tx: tx.run(statement.format(name)))


def test_a_fresh_database_has_the_declared_columns_and_no_others(database: Database) -> None:
    assert undeclared(catalogue(database)) == []


@pytest.mark.parametrize("table", ["messages", "reservations"])
def test_a_column_that_is_not_declared_is_noticed(database: Database, table: str) -> None:
    alter(database, "ALTER TABLE {} ADD COLUMN forgotten TEXT", table)
    assert undeclared(catalogue(database)) == [f"{table}.forgotten"]


def test_a_table_that_is_not_declared_is_noticed(database: Database) -> None:
    alter(database, "CREATE TABLE {} (key BIGINT)", "forgotten")
    assert undeclared(catalogue(database)) == ["forgotten"]


# --- keys and references ----------------------------------------------------------------------------------------------

NAMES = [table.name for table in TABLES]
KEYS = {  # type of the constraint, its columns, and the table that it references
    "sqlite": "SELECT 'p', name, '' FROM pragma_table_info(:table) WHERE pk > 0 UNION ALL"
    ' SELECT \'f\', "from", "table" FROM pragma_foreign_key_list(:table) UNION ALL'
    " SELECT 'u', c.name, '' FROM pragma_index_list(:table) i JOIN pragma_index_info(i.name) c WHERE i.origin = 'u'",
    "postgresql": "SELECT k.contype, a.attname, COALESCE(f.relname, '') FROM pg_catalog.pg_constraint k"
    " JOIN pg_catalog.pg_class t ON t.oid = k.conrelid JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace"
    " JOIN pg_catalog.pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey)"
    " LEFT JOIN pg_catalog.pg_class f ON f.oid = k.confrelid"
    " WHERE n.nspname = :schema AND t.relname = :table AND k.contype IN ('p', 'f', 'u')",
}


@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_keys_unique_names_and_references_are_the_declared_ones(database: Database, table: Table) -> None:
    found = asked(database, KEYS, table=table.name)
    assert {name for kind, name, _ in found if kind == "p"} == set(table.key)
    assert {name for kind, name, _ in found if kind == "u"} == set(table.unique)
    assert {(name, other) for kind, name, other in found if kind == "f"} == set(table.parents)
    assert bool(table.unique) == bool(table.parked)
    assert all(NAMES.index(parent) < NAMES.index(table.name) for _, parent in table.parents)


@pytest.mark.parametrize("table", LOCAL, ids=[table.name for table in LOCAL])
def test_a_local_table_says_why_it_is_not_copied_and_what_it_references(
    database: Database, table: tables.LocalTable
) -> None:
    found = asked(database, KEYS, table=table.name)
    assert {name for kind, name, _ in found if kind == "p"} == {table.columns[0]}
    assert {(name, other) for kind, name, other in found if kind == "f"} == set(table.parents)
    assert table.reason


# --- where columns go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_every_column_is_copied_and_exported_or_says_why_not(table: Table) -> None:
    stored = [field for field in table.fields if field.is_stored]
    assert set(table.columns) == {field.name for field in stored if not field.not_copied}
    assert table.columns[: len(table.key) + len(table.unique)] == (*table.key, *table.unique)
    assert bool(table.line) != bool(table.not_exported)
    if table.line:
        assert set(table.exported) == {field.name for field in stored if not field.not_exported}


def test_a_line_of_each_kind_has_the_declared_fields_and_json_comes_last(database: Database) -> None:
    seen: dict[str, set[tuple[str, ...]]] = {}

    async def use(cp: Checkpointer) -> None:
        names = await fill(cp)
        lines = [line for name in names async for line in export_thread(cp.store, name)]
        lines += [line async for line in export_user(cp.store, "alice")]
        for line in lines:
            kind, row = shapes.parse(line.encode(), FORMAT)
            if kind in by_line:
                seen.setdefault(kind, set()).add(tuple(sorted(row.keys() - {"format"})))

    by_line = {table.line: table for table in TABLES if table.line}
    with_cp(database, use)
    assert seen == {kind: {tuple(sorted(field.name for field in table.line_fields))} for kind, table in by_line.items()}


def test_every_kind_of_an_exported_column_has_a_check() -> None:
    fields = [field for table in TABLES for field in table.line_fields]
    assert all(field.kind in shapes._JSON_CHECKS for field in fields if field.is_json)
    assert all(field.kind in shapes._CHECKS for field in fields if not field.is_json and field.kind != "choice")
    assert all(bool(field.choices) == (field.kind == "choice") for field in fields)
    used = {field.kind for field in fields}
    assert used >= shapes._JSON_CHECKS.keys() | shapes._CHECKS.keys()


# Types of rows that have the columns of a table, with the fields that are none.
ROWS: list[tuple[type[Any], Table, set[str]]] = [
    (User, tables.USERS, set()),
    (Task, tables.TASKS, {"session_id"}),
    (InboxRow, tables.INBOX, set()),
]


@pytest.mark.parametrize(("row", "table", "others"), ROWS, ids=[row.__name__ for row, _, _ in ROWS])
def test_a_row_type_has_columns_of_its_table_with_their_types(row: type[Any], table: Table, others: set[str]) -> None:
    columns = {field.name: field for field in table.fields if field.is_stored}
    hints = typing.get_type_hints(row)
    assert hints.keys() - others <= columns.keys()
    assert {name: hints[name] for name in hints.keys() - others} == {
        name: python_type(columns[name]) for name in hints.keys() - others
    }


def python_type(column: Column) -> type | types.UnionType:
    plain = {"bigint": int, "smallint": int, "double precision": float}.get(TYPES.get(column.kind, "text"), str)
    return plain | None if column.is_optional else plain


def test_the_row_types_of_local_tables_have_columns_of_theirs() -> None:
    local = {table.name: set(table.columns) for table in LOCAL}
    assert set(CopyRow._fields) < local["copies"]
    assert set(Backup._fields) < local["backups"]
