"""A place on a Postgres server for a test, and somebody who looks at it from outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import Schema, server_for_tests
from tests.store.grouping import Admin


@pytest.fixture
def where() -> Iterator[Schema]:
    made = server_for_tests().fresh_schema()
    yield made
    server_for_tests().drop(made)


@pytest.fixture
def admin(where: Schema) -> Iterator[Admin]:
    made = Admin(where.dsn)
    yield made
    made.close()
