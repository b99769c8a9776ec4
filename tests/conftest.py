"""Databases as fixtures. What takes `database` or `store` runs once for each kind, and knows none of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus.store.database import Store
from tests.support import postgres
from tests.support.databases import DATABASES, Database
from tests.support.postgres import Schema
from tests.support.ramdisk import ramdisk
from tests.support.stores import Admin

if (memory := ramdisk()) is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))  # where pytest makes `tmp_path`

# AgentScope needs another mcp than we do: tests/adapters/test_agentscope.py runs these in processes that have it.
collect_ignore = [] if importlib.util.find_spec("agentscope") else ["adapters/agentscope"]


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    made = DATABASES[request.param](tmp_path)
    yield made
    made.drop()


@pytest.fixture(params=DATABASES)
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """One that nobody has opened yet: there is no file, and no table."""
    made = DATABASES[request.param](tmp_path, is_made=False)
    yield made
    made.drop()


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    with database.store() as opened:
        yield opened


@pytest.fixture
def where() -> Iterator[Schema]:
    """A place on a Postgres server, for what is true of Postgres alone."""
    made = postgres.server_for_tests().fresh_schema()
    yield made
    postgres.server_for_tests().drop(made)


@pytest.fixture
def admin(where: Schema) -> Iterator[Admin]:
    made = Admin(where.dsn)
    yield made
    made.close()
