"""Postgres behind a pooler: the whole life of a thread, and COMMITs whose answers are lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from byssus.errors import StoreError
from byssus.queries.log import listing, threads
from byssus.store.database import Tx
from byssus.store.jobs import Job
from byssus.store.postgres import pool
from byssus.store.postgres.store import PostgresStore
from byssus.values.thread_key import ThreadKey
from tests.support import pooler as pooler_module
from tests.support.pooler import Pooler, pooling
from tests.support.postgres import Schema, Server, running, wait_until
from tests.support.stores import PATIENCE, Admin, appending, named, opened, rows, stored, together

pytestmark = pytest.mark.processes


@pytest.fixture
def pooler(where: Schema) -> Iterator[Pooler]:
    with pooling(where.dsn) as made:
        yield made


@pytest.fixture
def store(where: Schema, pooler: Pooler) -> Iterator[PostgresStore]:
    with opened(where, dsn=pooler.dsn) as made:
        yield made


# --- a lost answer ----------------------------------------------------------------------------------------------------

FAULTS = ["drop_next_commit_answer", "cut_before_commit"]


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_commit_whose_answer_is_lost_happens_once(
    store: PostgresStore, pooler: Pooler, fault: str, is_first: bool, size: int
) -> None:
    expected = []
    if not is_first:
        store.write_now(appending("first"))
        expected = ["first"]
    happened = getattr(pooler, fault)()
    futures = [store.submit(appending(str(i))) for i in range(size)]
    outcomes = [future.result(PATIENCE) for future in futures]
    assert happened.is_set()
    assert stored(store) == [*expected, *map(str, range(size))]
    assert outcomes == [(len(expected) + i + 1,) * 2 for i in range(size)]


def cut_like_pgbouncer(client: Any) -> None:
    """As PgBouncer lets go of a client whose server has gone: with an error of its own, and its own SQLSTATE."""
    client.writer.write(pooler_module._error("server conn crashed?"))
    asyncio.get_running_loop().call_later(0.1, client.writer.close)


CUTS = [pooler_module._Client.cut, cut_like_pgbouncer]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_group_in_which_one_fails_happens_once_though_its_commit_is_not_answered(
    store: PostgresStore, pooler: Pooler, monkeypatch: pytest.MonkeyPatch, fault: str, cut: Any
) -> None:
    monkeypatch.setattr(pooler_module._Client, "cut", cut)
    armed: list[Any] = []

    def fails(tx: Tx) -> None:
        appending("never")(tx)
        if not armed:
            armed.append(getattr(pooler, fault)())
        raise ZeroDivisionError

    before, hears, after = together(store, appending("before"), fails, appending("after"))
    assert armed[0].is_set()
    assert isinstance(hears, ZeroDivisionError)
    assert (before, after) == ((1, 1), (2, 2))
    assert stored(store) == ["before", "after"]


def test_many_commits_whose_answers_are_lost_happen_once_each(store: PostgresStore, pooler: Pooler) -> None:
    for i in range(12):
        happened = pooler.drop_next_commit_answer() if i % 2 else pooler.cut_before_commit()
        futures = [store.submit(threads.append, ThreadKey("", "t"), rows(f"{i} {n}")) for n in range(3)]
        for future in futures:
            future.result(PATIENCE)
        assert happened.is_set()
    assert stored(store) == [f"{i} {n}" for i in range(12) for n in range(3)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_whose_answer_is_lost_is_answered(store: PostgresStore, pooler: Pooler, fault: str) -> None:
    store.write_now(appending("x"))
    happened = getattr(pooler, fault)()
    assert stored(store) == ["x"]
    assert happened.is_set()


def test_everything_that_is_cut_at_once_goes_on(store: PostgresStore, pooler: Pooler) -> None:
    async def main() -> None:
        for i in range(6):
            writes = [store.write(threads.append, ThreadKey("", f"thread {n}"), rows(str(i))) for n in range(12)]
            reads = [store.read(threads.find, ThreadKey("", f"thread {n}")) for n in range(12)]
            await asyncio.to_thread(pooler.cut_all)
            await asyncio.gather(*writes, *reads)

    asyncio.run(main())
    for n in range(12):
        assert stored(store, f"thread {n}") == [str(i) for i in range(6)]


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_commit_to_which_the_pooler_answers_that_the_server_is_gone_happens_once(
    store: PostgresStore, pooler: Pooler, monkeypatch: pytest.MonkeyPatch, fault: str, size: int
) -> None:
    store.write_now(appending("first"))
    monkeypatch.setattr(pooler_module._Client, "cut", cut_like_pgbouncer)
    happened = getattr(pooler, fault)()
    outcomes = together(store, *(appending(str(i)) for i in range(size))) if size > 1 else []
    if size == 1:
        outcomes = [store.write_now(appending("0"))]
    assert happened.is_set()
    assert stored(store) == ["first", *map(str, range(size))]
    assert outcomes == [(i + 2, i + 2) for i in range(size)]


# --- a COMMIT that is still under way ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as made:
        yield made


class Waiting:
    """A server whose commits wait for a standby that is not there."""

    def __init__(self, server: Server) -> None:
        self.place = Schema(server.create(), "byssus")
        self.admin = Admin(named(self.place.dsn, "admin", synchronous_commit="off"))

    def standby(self, name: str) -> None:
        self.admin.all(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
        self.admin.all("SELECT pg_reload_conf()")
        wait_until(lambda: bool(self.admin.one("SHOW synchronous_standby_names") == name), "the setting does not come")

    def sessions(self, condition: str) -> list[int]:
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND "
        return [pid for (pid,) in self.admin.all(query + condition)]


SYNCING, LOCKED = "wait_event = 'SyncRep'", "wait_event_type = 'Lock'"


@pytest.fixture
def slow(server: Server) -> Iterator[Waiting]:
    made = Waiting(server)
    yield made
    made.standby("")
    made.admin.close()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("ending", ["terminated", "answered"])
def test_a_commit_that_is_still_under_way_when_its_connection_is_lost_happens_once(
    slow: Waiting, is_first: bool, size: int, ending: str
) -> None:
    with pooling(slow.place.dsn) as pooler, opened(slow.place, dsn=pooler.dsn) as store:
        before = []
        store.submit_first(appending("first")).result()  # the writer that is meant has not written yet
        if not is_first:
            store.write_now(appending("second"))
            before = ["second"]
        slow.standby("nobody")
        futures = submit_together(store, size)
        wait_until(lambda: bool(slow.sessions(SYNCING)), "no COMMIT waits")
        (committing,) = slow.sessions(SYNCING)
        pooler.cut_all()
        wait_until(lambda: bool(slow.sessions(LOCKED)), "nobody asks what became of it")
        slow.standby("") if ending == "answered" else slow.admin.end(committing)
        slow.standby("")
        for future in futures:
            future.result(PATIENCE)
        assert stored(store) == ["first", *before, *map(str, range(size))]


def submit_together(store: PostgresStore, size: int) -> list[Future[Any]]:
    """So many writes of the writer that serves no thread in particular, as one group."""
    writer = store._writers[hash("") % len(store._writers)]
    jobs: list[Job[Any]] = [Job(appending(str(i)), (), {}, Future()) for i in range(size)]
    writer._group = lambda job: jobs  # type: ignore[method-assign]
    writer.jobs.put(jobs[0])
    writer.start()
    return [job.future for job in jobs if isinstance(job.future, Future)]


@pytest.mark.parametrize("size", [1, 3])
def test_a_commit_that_stays_under_way_for_longer_than_we_wait_is_in_doubt_and_not_repeated(
    slow: Waiting, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setitem(pool.SETTINGS, "lock_timeout", "100ms")
    with pooling(slow.place.dsn) as pooler, opened(slow.place, dsn=pooler.dsn, patience=0.3) as store:
        store.write_now(appending("first"))
        slow.standby("nobody")
        futures = submit_together(store, size)
        wait_until(lambda: bool(slow.sessions(SYNCING)), "no COMMIT waits")
        pooler.cut_all()
        for future in futures:
            outcome = future.exception(PATIENCE)
            assert isinstance(outcome, StoreError)
            assert "look before you repeat it" in str(outcome)
        slow.standby("")
        wait_until(lambda: not slow.sessions(SYNCING), "the COMMIT does not end")
        assert stored(store) == ["first", *map(str, range(size))]


# --- the life of a thread ---------------------------------------------------------------------------------------------


def test_the_store_notices_the_pooler_by_itself_and_relies_on_no_session(store: PostgresStore, pooler: Pooler) -> None:
    for i in range(20):  # often enough for a statement to be prepared
        assert store.write_now(appending(str(i))) == (i + 1, i + 1)
    assert store.pool.has_pooler
    assert stored(store) == [*map(str, range(20))]
    pids = [store.write_now(lambda tx: tx.one("SELECT pg_backend_pid()")) for _ in range(6)]
    assert all(one != other for one, other in itertools.pairwise(pids)), "the pooler does not do what it is for"
    left = store.read_now(lambda tx: tx.all("SELECT name FROM pg_prepared_statements"))
    assert left == []
    assert store.read_now(lambda tx: tx.all("SELECT pid FROM pg_locks WHERE locktype = 'advisory'")) == []


def test_a_store_without_a_pooler_does_not_take_itself_for_one_with(where: Schema) -> None:
    with opened(where) as store:
        for i in range(10):
            store.write_now(appending(str(i)))
        assert not store.pool.has_pooler


@pytest.mark.parametrize("others", [0, 3])
def test_a_pooler_that_passes_the_real_pid_on_is_survived(where: Schema, others: int) -> None:
    """Then prepared statements are lost, or are somebody else's: each client numbers its own from zero."""
    with pooling(where.dsn, backends=3) as pooler:

        def pids() -> Iterator[int]:
            for made_up in itertools.count(1):
                idle = [backend for pool in pooler._pools.values() for backend in pool._idle]
                yield idle[0].connection.info.backend_pid if idle else made_up

        pooler._pids = pids()  # type: ignore[assignment]
        warm(pooler)
        stores = [opened(where, dsn=pooler.dsn, pool_size=2) for _ in range(1 + others)]
        made = [each.__enter__() for each in stores]
        try:
            for i in range(12):
                for n, store in enumerate(made):
                    for name in [f"{n} a", f"{n} b"] if n % 2 else [f"{n} b"]:
                        assert store.write_now(threads.append, ThreadKey("", name), rows(str(i))).head == i + 1
                    assert store.read_now(listing.one, ThreadKey("", f"{n} b")) is not None
                    store.write_now(threads.save_extra, ThreadKey("", f"{n} c"), f'{{"n": {i}}}')
                    assert len(stored(store, f"{n} b")) == i + 1
            assert all(store.pool.has_pooler for store in made)
        finally:
            for each in stores:
                each.__exit__(None, None, None)


def warm(pooler: Pooler) -> None:
    """Let the pooler open its backends."""
    admin = Admin(pooler.dsn)
    for _ in range(4):
        admin.one("SELECT 1")
    admin.close()


def test_a_hundred_clients_of_a_pooler_lose_nothing(where: Schema, pooler: Pooler) -> None:
    async def client(store: PostgresStore, n: int) -> None:
        for i in range(3):
            await store.write(threads.append, ThreadKey("", f"thread {n % 10}"), rows(f"{n} {i}"))
            assert await store.read(threads.find, ThreadKey("", f"thread {n % 10}")) is not None

    async def main(stores: list[PostgresStore]) -> None:
        await asyncio.gather(*(client(store, n) for n, store in enumerate(stores)))

    with ExitStack() as stack:
        stores = [stack.enter_context(opened(where, dsn=pooler.dsn, pool_size=2)) for _ in range(34)]
        asyncio.run(main(stores))
        assert pooler.clients >= 100
        for t in range(10):
            expected = [f"{n} {i}" for n in range(t, 34, 10) for i in range(3)]
            assert sorted(stored(stores[t], f"thread {t}")) == sorted(expected)
