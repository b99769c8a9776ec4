"""What goes wrong between a client and a server has the class and the next step that fit it, on a real server."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import psycopg
import pytest

from byssus.errors import StoreBusy, StoreError, StoreUnreachable, StoreUnusable
from byssus.store.postgres.server import Server as Place
from tests.support import postgres
from tests.support.postgres import Schema, Server, running
from tests.support.stores import PATIENCE, appending, named, opened

pytestmark = pytest.mark.processes

SECRET = "hunter2"


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """A server that asks everybody but the superuser for a password, and takes few connections."""
    with running(max_connections="12", superuser_reserved_connections="3") as made:
        made.execute("CREATE ROLE someone LOGIN PASSWORD 'right'")
        made.execute("CREATE DATABASE mine OWNER someone")
        rules = "host all postgres 127.0.0.1/32 trust\nhost closed all 127.0.0.1/32 reject\n"
        (made.data / "pg_hba.conf").write_text(rules + "host all all 127.0.0.1/32 scram-sha-256\n")
        made.execute("SELECT pg_reload_conf()")
        wrong = made.dsn().replace("postgres@", "someone:wrong@")
        postgres.wait_until(lambda: not comes_in(wrong), "no password is asked for")
        yield made


def comes_in(dsn: str) -> bool:
    with contextlib.suppress(psycopg.OperationalError):
        psycopg.connect(dsn).close()
        return True
    return False


def test_a_refused_login_has_the_class_of_its_reason(strict: Server) -> None:
    someone = strict.dsn("mine").replace("postgres@", "someone:right@")
    Place(someone).prepare().close()
    cases: dict[str, tuple[type[StoreError], str]] = {
        strict.dsn("mine").replace("postgres@", f"someone:{SECRET}@"): (StoreUnusable, "refuses the login"),
        strict.dsn("mine").replace("postgres@", "someone@"): (StoreUnusable, "refuses the login"),
        strict.dsn("mine").replace("postgres@", f"nobody:{SECRET}@"): (StoreUnusable, "refuses the login"),
        strict.dsn("closed"): (StoreUnusable, "create the database"),
        strict.dsn("closed").replace("postgres@", f"someone:{SECRET}@"): (StoreUnusable, "refuses the login"),
        strict.dsn("nowhere"): (StoreUnusable, "create the database"),
        "postgresql://u@127.0.0.1:1/db": (StoreUnreachable, "check that the server runs"),
    }
    for dsn, (kind, step) in cases.items():
        with pytest.raises(StoreError) as caught:
            Place(dsn).prepare()
        assert type(caught.value) is kind, f"{caught.value!r} for {dsn}"
        assert step in str(caught.value)
        assert SECRET not in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_a_refused_login_is_not_tried_again_and_a_full_server_is(strict: Server) -> None:
    place = Schema(strict.dsn("mine").replace("postgres@", "someone:right@"), "byssus")
    with opened(place, patience=0.2, pool_size=2) as store:
        strict.execute("ALTER ROLE someone PASSWORD 'another'")
        strict.execute("SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE usename = 'someone'")
        outcome = store.submit(appending("x")).exception(PATIENCE)
        assert isinstance(outcome, StoreUnusable)
        strict.execute("ALTER ROLE someone PASSWORD 'right'")
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    stack.enter_context(psycopg.connect(place.dsn))
            outcome = store.submit(appending("x")).exception(PATIENCE)
            assert isinstance(outcome, StoreBusy)
            assert "takes no more connections" in str(outcome)
            assert "pool_size" in str(outcome)
            with pytest.raises(StoreBusy, match="takes no more connections"):
                Place(place.dsn).prepare()
        store.write_now(appending("x"))


def test_a_statement_that_takes_longer_than_the_server_allows_is_store_busy(where: Schema) -> None:
    with opened(where, dsn=named(where.dsn, "hurried", statement_timeout="100ms")) as store:
        for submit in (store.submit, store.submit_first, store.submit_read):
            outcome = submit(lambda tx: tx.one("SELECT pg_sleep(20)")).exception(PATIENCE)
            assert isinstance(outcome, StoreBusy)
            assert "statement_timeout" in str(outcome)
        assert store.write_now(appending("x")) == (1, 1)


def test_asking_for_the_reason_leaves_no_file_open(strict: Server) -> None:
    found = []
    for password in ("one", "two", "three"):
        with pytest.raises(StoreUnusable):
            Place(strict.dsn("mine").replace("postgres@", f"someone:{password}@")).prepare()
        gc.collect()
        found.append(len(os.listdir("/dev/fd")))
    assert found[1:] == found[:-1]
