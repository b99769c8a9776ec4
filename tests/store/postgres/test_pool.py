"""The connections of a store: the first worker goes on with the one that prepared the database."""

from __future__ import annotations

import threading

import pytest

from byssus.store.postgres import pool
from tests.support.postgres import Schema, wait_until
from tests.support.stores import PATIENCE, Admin, appending, named, opened, stored

pytestmark = pytest.mark.processes


def test_the_first_worker_uses_the_connection_that_prepared_the_database(where: Schema, admin: Admin) -> None:
    with opened(where, dsn=named(where.dsn, "first")) as store:
        (prepared,) = admin.sessions("first")
        assert store.read_now(lambda tx: tx.one("SELECT pg_backend_pid(), current_setting('enable_seqscan')")) == (
            prepared,
            "off",
        )
        assert admin.sessions("first") == [prepared]
        assert store.write_now(lambda tx: tx.one("SELECT pg_backend_pid() = :pid", pid=prepared)) == (False,)


def test_a_store_that_was_never_used_leaves_no_connection(where: Schema, admin: Admin) -> None:
    with opened(where, dsn=named(where.dsn, "unused")):
        assert len(admin.sessions("unused")) == 1
    wait_until(lambda: not admin.sessions("unused"), "a connection is left")


def test_a_connection_that_waited_for_long_is_replaced(
    where: Schema, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(where, dsn=named(where.dsn, "late")) as store:
        (prepared,) = admin.sessions("late")
        monkeypatch.setattr(pool, "IDLE_SECONDS", 0.0)
        assert store.read_now(lambda tx: tx.one("SELECT pg_backend_pid() = :pid", pid=prepared)) == (False,)


def test_a_connection_that_was_lost_before_its_first_use_costs_no_write(where: Schema, admin: Admin) -> None:
    with opened(where, dsn=named(where.dsn, "lost")) as store:
        admin.end(*admin.sessions("lost"))
        store.write_now(appending("x"))
        assert stored(store) == ["x"]


def test_reads_one_after_the_other_share_a_connection_and_reads_at_once_do_not(where: Schema, admin: Admin) -> None:
    with opened(where, dsn=named(where.dsn, "reading"), pool_size=6) as store:
        for _ in range(5):
            store.read_now(lambda tx: tx.one("SELECT 1"))
        assert len(admin.sessions("reading")) == 1
        both = threading.Barrier(3)
        reads = [store.submit_read(lambda tx: both.wait(PATIENCE)) for _ in range(3)]
        assert sorted(read.result(PATIENCE) for read in reads) == [0, 1, 2]
