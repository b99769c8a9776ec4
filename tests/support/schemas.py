"""Schemas that hold our tables already: made once by the migrations, then emptied after each test and used again.

To make the tables takes a hundred times as long as to empty them. A schema goes back only if it has the shape that the
migrations gave it: one that a test has changed is dropped. It comes back under another name, so that nobody who still
knows the old one (a thread or a process that a test has left behind) can reach it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import NamedTuple

import psycopg

from byssus.store.postgres.server import Server
from tests.support.postgres import Schema, SharedServer, server_for_tests

_USES = 200  # then it is dropped: rows that were deleted still take room

# Everything that a test may change about tables, as one line each.
_SHAPE = """
SELECT md5(string_agg(line, chr(10) ORDER BY line)) FROM (
  SELECT concat_ws(' ', 'schema', nspowner, nspacl) FROM pg_namespace WHERE nspname = '{schema}'
  UNION ALL
  SELECT concat_ws(' ', 'relation', relname, relkind, relowner, relacl, reloptions, relrowsecurity)
    FROM pg_class WHERE relnamespace = '{schema}'::regnamespace
  UNION ALL
  SELECT concat_ws(' ', 'column', relname, attnum, attname, atttypid, attnotnull, atthasdef, attidentity, attcollation)
    FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
    WHERE relnamespace = '{schema}'::regnamespace AND relkind = 'r' AND attnum > 0
  UNION ALL
  SELECT concat_ws(' ', 'constraint', conname, contype, convalidated)
    FROM pg_constraint WHERE connamespace = '{schema}'::regnamespace
  UNION ALL
  SELECT concat_ws(' ', 'trigger', relname, tgenabled, CASE WHEN tgisinternal THEN '' ELSE tgname END)
    FROM pg_class JOIN pg_trigger ON tgrelid = pg_class.oid WHERE relnamespace = '{schema}'::regnamespace
  UNION ALL
  SELECT concat_ws(' ', 'function', proname, prosrc) FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace
) AS lines (line)
"""


class _Tables(NamedTuple):
    """What the migrations make."""

    template: str  # a schema that is never used: it still holds the rows that the migrations insert
    shape: str
    names: list[str]
    filled: list[str]
    sequences: list[str]
    functions: list[str]


class ReadySchemas:
    def __init__(self, server: SharedServer) -> None:
        self._server = server
        self._free: list[Schema] = []
        self._uses: Counter[Schema] = Counter()

    def take(self) -> Schema:
        """A schema as it is when a new database has just been opened."""
        return self._free.pop() if self._free else self._make()

    def give_back(self, place: Schema) -> None:
        uses = self._uses.pop(place, 0) + 1
        emptied = None
        if uses < _USES and self._shape(place.name) == self._tables.shape:
            with contextlib.suppress(psycopg.errors.InsufficientPrivilege):  # only a superuser may empty it
                emptied = self._empty(place)
        if emptied is None:
            self._server.drop(place)
        else:
            self._free.append(emptied)
            self._uses[emptied] = uses

    def _make(self) -> Schema:
        place = self._server.fresh_schema()
        Server(place.dsn, schema=place.name).prepare().close()
        return place

    @functools.cached_property
    def _tables(self) -> _Tables:
        template = self._make().name
        inside = f"= '{template}'::regnamespace"
        names = self._column(f"SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace {inside}")
        return _Tables(
            template,
            self._shape(template),
            names,
            filled=[name for name in names if self._column(f'SELECT 1 FROM "{template}"."{name}" LIMIT 1')],
            sequences=self._column(f"SELECT relname FROM pg_class WHERE relkind = 'S' AND relnamespace {inside}"),
            functions=self._column(f"SELECT proname FROM pg_proc WHERE pronamespace {inside}"),
        )

    def _shape(self, schema: str) -> str:
        (shape,) = self._column(_SHAPE.format(schema=schema))
        return shape

    def _empty(self, place: Schema) -> Schema:
        tables, schema = self._tables, place.name
        with self._server.connection().transaction():
            self._run(
                "SET LOCAL session_replication_role = replica",  # no trigger runs, and no order is wrong
                *(f'DELETE FROM "{schema}"."{name}"' for name in tables.names),
                *(f'INSERT INTO "{schema}"."{name}" TABLE "{tables.template}"."{name}"' for name in tables.filled),
                f'UPDATE "{schema}".identity SET id = gen_random_uuid()',  # no two databases have the same
                *(f'SELECT setval(\'"{schema}"."{name}"\', 1, false)' for name in tables.sequences),
            )
        renamed = self._server.rename(place)
        self._run(
            *(
                f'ALTER FUNCTION "{renamed.name}"."{name}" SET search_path = "{renamed.name}"'
                for name in tables.functions
            )
        )
        return renamed

    def _run(self, *statements: str) -> None:
        self._server.connection().execute("; ".join(statements).encode())

    def _column(self, query: str) -> list[str]:
        return [row[0] for row in self._server.connection().execute(query.encode())]


@functools.cache
def ready_schemas() -> ReadySchemas:
    return ReadySchemas(server_for_tests())
