"""What goes wrong on Postgres and passes: deadlocks, lost connections, a restart. And what does not pass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from byssus.checkpointer import Durability
from byssus.errors import StoreBusy, StoreError, StoreUnreachable, StoreUnusable
from byssus.queries.log import threads
from byssus.store.database import Tx
from byssus.store.jobs import NO_THREAD
from byssus.store.postgres import pool
from byssus.store.postgres.store import PostgresStore
from byssus.values.thread_key import ThreadKey
from tests.support.pooler import pooling
from tests.support.postgres import Schema, Server, running, wait_until
from tests.support.stores import PATIENCE, Admin, Gate, Query, appending, named, opened, rows, stored, together

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that may be restarted."""
    with running() as made:
        yield made


@pytest.fixture
def fragile(server: Server) -> Schema:
    """An empty database on it."""
    return Schema(server.create(), "byssus")


# --- what is tried again ----------------------------------------------------------------------------------------------


def test_a_deadlock_is_tried_again_and_nobody_hears_of_it(where: Schema, admin: Admin) -> None:
    with opened(where, dsn=named(where.dsn, "locked", deadlock_timeout="50ms")) as store:
        for name in ("a", "b", "c"):
            store.write_now(threads.append, ThreadKey("", name), rows("first"))
        lock = f'SELECT 1 FROM "{where.name}".threads WHERE id = %s FOR UPDATE'
        with psycopg.connect(named(where.dsn, "stranger", deadlock_timeout="1h")) as stranger:
            stranger.execute(lock.encode(), ["b"])
            with ThreadPoolExecutor(1) as pool:
                queries = [appending("next", name) for name in ("a", "b", "c")]
                outcomes = pool.submit(together, store, *queries)
                waits = "wait_event_type = 'Lock'"
                wait_until(lambda: bool(admin.sessions("locked", waits)), "nobody waits for the row")
                stranger.execute(lock.encode(), ["a"])
                stranger.commit()
                assert outcomes.result(PATIENCE) == [(2, 2)] * 3
        assert [stored(store, name) for name in ("a", "b", "c")] == [["first", "next"]] * 3


def test_two_stores_that_write_many_threads_at_once_lock_nobody_out(where: Schema) -> None:
    names = [f"thread {n}" for n in range(12)]

    async def writing(store: PostgresStore, name: str, order: list[str]) -> None:
        for i in range(5):
            await asyncio.gather(
                *(store.write(threads.append, ThreadKey("", each), rows(f"{name} {i}")) for each in order)
            )

    with opened(where) as one, opened(where) as two, ThreadPoolExecutor(2) as pool:
        for future in [
            pool.submit(asyncio.run, writing(one, "one", names)),
            pool.submit(asyncio.run, writing(two, "two", names[::-1])),
        ]:
            future.result(PATIENCE)
        for name in names:
            seen = stored(one, name)
            assert [body for body in seen if body.startswith("one")] == [f"one {i}" for i in range(5)]
            assert [body for body in seen if body.startswith("two")] == [f"two {i}" for i in range(5)]


class Failing:
    """Fails on its first runs, after it has written something; a repeated run must not remember that."""

    def __init__(self, statement: str, times: int = 2) -> None:
        self._statement = statement
        self._left = times

    def query(self, tx: Tx) -> Any:
        outcome = appending("mine")(tx)
        if self._left:
            self._left -= 1
            tx.run(self._statement)
        return outcome


RAISING = ["40001", "40P01", "57P01", "57P02", "57P05", "08006", "08003", "08000", "25P03", "53300"]


@pytest.mark.parametrize("state", RAISING)
def test_what_passes_by_itself_is_tried_again_and_nobody_hears_of_it(where: Schema, state: str) -> None:
    with opened(where) as store:
        statement = f"DO $$ BEGIN RAISE SQLSTATE '{state}'; END $$"
        assert store.write_now(Failing(statement).query) == (1, 1)
        outcomes = together(store, appending("before"), Failing(statement).query, appending("after"))
        assert outcomes == [(2, 2), (3, 3), (4, 4)]
        assert stored(store) == ["mine", "before", "mine", "after"]


KILL = "SELECT pg_terminate_backend(pg_backend_pid())"


@pytest.mark.parametrize("size", [1, 3])
def test_a_connection_that_is_cut_in_the_middle_of_a_group_costs_nobody_anything(where: Schema, size: int) -> None:
    with opened(where) as store:
        store.write_now(appending("first"))
        others = [appending(str(i)) for i in range(size - 1)]
        outcomes = together(store, *others, Failing(KILL).query, *others)
        assert outcomes == [(2 + i, 2 + i) for i in range(len(outcomes))]
        assert len(stored(store)) == 1 + len(outcomes)


def test_a_connection_that_is_cut_between_two_statements_costs_nobody_anything(where: Schema, admin: Admin) -> None:
    with opened(where) as store:
        runs: list[int] = []

        def query(tx: Tx) -> Any:
            outcome = appending("once")(tx)
            pid = tx.one("SELECT pg_backend_pid()")
            assert pid is not None
            runs.append(pid[0])
            if len(runs) < 3:
                admin.end(pid[0])
            return outcome

        assert store.write_now(query) == (1, 1)
        runs.clear()

        def read(tx: Tx) -> Any:
            pid = tx.one("SELECT pg_backend_pid()")
            assert pid is not None
            runs.append(pid[0])
            if len(runs) < 3:
                admin.end(pid[0])
            return tx.one("SELECT 2")

        assert store.read_now(read) == (2,)
        assert stored(store) == ["once"]


def test_connections_that_are_cut_while_idle_are_made_anew(where: Schema, admin: Admin) -> None:
    with opened(where, dsn=named(where.dsn, "idle")) as store:
        for i in range(3):
            for name in ("a", "b", "c", "d"):
                store.write_now(threads.append, ThreadKey("", name), rows(str(i)))
            assert stored(store, "a") == [str(n) for n in range(i + 1)]
            store.submit_first(appending("urgent")).result()
            admin.end(*admin.sessions("idle"))
        assert len(stored(store)) == 3


def test_a_restart_in_the_middle_of_everything_loses_and_doubles_nothing(server: Server, fragile: Schema) -> None:
    stop = threading.Event()

    def hammer(store: PostgresStore, name: str) -> int:
        count = 0
        while not stop.is_set():
            store.write_now(threads.append, ThreadKey("", name), rows(str(count)))
            count += 1
            assert len(stored(store, name)) == count
        return count

    with opened(fragile) as store, ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(hammer, store, f"thread {n}") for n in range(6)]
        for mode in ("immediate", "fast"):
            seen = len(stored(store, "thread 0"))
            wait_until(lambda seen=seen: len(stored(store, "thread 0")) > seen + 3, "nothing is written")  # type: ignore[misc]
            server.stop(mode)
            server.start()
        stop.set()
        for n, future in enumerate(futures):
            count = future.result(PATIENCE)
            assert stored(store, f"thread {n}") == [str(i) for i in range(count)]


# --- what does not pass -----------------------------------------------------------------------------------------------


def test_a_lock_that_a_stranger_holds_for_too_long_is_store_busy_for_whoever_needs_it(
    where: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pool.SETTINGS, "lock_timeout", "200ms")
    with opened(where) as store, psycopg.connect(where.dsn) as stranger:
        store.write_now(threads.append, ThreadKey("", "locked"), rows("first"))
        stranger.execute(f"SELECT 1 FROM \"{where.name}\".threads WHERE id = 'locked' FOR UPDATE".encode())
        before, hears, after = together(store, appending("a"), appending("x", "locked"), appending("b"))
        assert isinstance(hears, StoreBusy)
        assert store.name in str(hears)
        assert (before, after) == ((1, 1), (2, 2))
        stranger.rollback()
        assert store.write_now(appending("y", "locked")) == (2, 2)


def test_a_server_that_stays_away_is_store_unreachable_and_is_found_again_when_it_is_back(
    server: Server, fragile: Schema
) -> None:
    with opened(fragile, patience=0.3) as store:
        store.write_now(appending("before"))
        server.stop()
        outcomes = [store.submit(appending(str(i))).exception(PATIENCE) for i in range(2)]
        with pytest.raises(StoreUnreachable, match="cannot connect to"):
            store.read_now(threads.find, ThreadKey("", "t"))
        server.start()
        for outcome in outcomes:
            assert isinstance(outcome, StoreUnreachable)
            assert store.name in str(outcome)
            assert len(str(outcome).splitlines()) == 1
        assert store.write_now(appending("after")) == (2, 2)
        assert stored(store) == ["before", "after"]


def test_all_that_waits_for_a_server_that_stays_away_shares_one_patience(
    where: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(pool.time, "sleep", waited.append)  # type: ignore[attr-defined]
    with opened(where, patience=0.05, pool_size=2) as store:

        def refuse() -> Any:
            threading.Event().wait(0.01)
            raise psycopg.OperationalError("it is not there")

        store.pool.close()  # the connection that nobody has used yet
        monkeypatch.setattr(store.server, "connect", refuse)
        reads = [store.submit(appending(str(i))) for i in range(3)]
        futures = [threading.Thread(target=failing_read, args=(store,)) for _ in range(30)]
        for thread in futures:
            thread.start()
        for thread in futures:
            thread.join(PATIENCE)
        assert all(isinstance(future.exception(PATIENCE), StoreUnreachable) for future in reads)
        assert len(waited) < 60, "each of those that waited began to wait anew when it was its turn"


def failing_read(store: PostgresStore) -> None:
    with pytest.raises(StoreUnreachable):
        store.read_now(threads.find, ThreadKey("", "t"))


def test_a_commit_in_doubt_says_so_when_the_server_stays_away(where: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise psycopg.OperationalError("it is not there")

    for size in (1, 3):
        with pooling(where.dsn) as pooler, opened(where, dsn=pooler.dsn, patience=0.1) as store:
            store.write_now(appending("first"))
            store.boundary = lambda at, server=store.server: (
                monkeypatch.setattr(server, "connect", refuse) if at == "before commit" else None
            )
            pooler.drop_next_commit_answer()
            futures = [store.submit(appending("in doubt")) for _ in range(size)]
            for future in futures[:1]:
                outcome = future.exception(PATIENCE)
                assert isinstance(outcome, StoreUnreachable)
                assert "whether the write is stored; look before you repeat it" in str(outcome)
            monkeypatch.undo()


# --- a newer version migrates the tables ------------------------------------------------------------------------------

MIGRATE = 'UPDATE "{}".byssus_schema SET version = 9999'


@pytest.mark.parametrize("size", [1, 3])
def test_a_write_that_waited_for_a_migration_is_refused(where: Schema, admin: Admin, size: int) -> None:
    dsn = named(where.dsn, "old", deadlock_timeout="1h")
    with opened(where, dsn=dsn) as store, psycopg.connect(where.dsn) as newer:
        store.write_now(appending("before"))
        newer.execute(f'LOCK TABLE "{where.name}".writers IN ACCESS EXCLUSIVE MODE'.encode())
        writes = [store.submit(appending("x", f"thread {number}")) for number in range(size)]
        waits = "wait_event_type = 'Lock'"
        wait_until(lambda: bool(admin.sessions("old", waits)), "nobody waits for the migration")
        newer.execute(MIGRATE.format(where.name).encode())
        newer.commit()
        for write in writes:
            with pytest.raises(StoreUnusable, match=r"newer byssus \(schema 9999, this one knows"):
                write.result(PATIENCE)
        assert stored(store) == ["before"]
        assert stored(store, "thread 0") == []


def test_a_migration_waits_for_the_writes_that_are_under_way(where: Schema, admin: Admin) -> None:
    gate = Gate()
    with opened(where) as store, ThreadPoolExecutor(2) as pool:
        store.write_now(appending("before"))
        held = pool.submit(store.write_now, lambda tx: (appending("under way")(tx), gate.query(tx)))
        assert gate.entered.wait(PATIENCE)
        with psycopg.connect(named(where.dsn, "newer")) as newer:
            lock = f'LOCK TABLE "{where.name}".writers IN ACCESS EXCLUSIVE MODE'.encode()
            waiting = pool.submit(newer.execute, lock)
            wait_until(lambda: bool(admin.sessions("newer", "wait_event_type = 'Lock'")), "it does not wait")
            gate.opened.set()
            held.result(PATIENCE)
            waiting.result(PATIENCE)
            newer.rollback()
        assert stored(store) == ["before", "under way"]


def test_a_commit_in_doubt_is_settled_also_when_the_tables_were_migrated_meanwhile(where: Schema, admin: Admin) -> None:
    with pooling(where.dsn) as pooler, opened(where, dsn=pooler.dsn) as store:
        store.write_now(appending("first"))
        store.boundary = lambda at: at == "before commit" and pooler.drop_next_commit_answer()
        connect = store.server.connect

        def migrated_before(*args: Any) -> Any:
            admin.all(MIGRATE.format(where.name))
            return connect(*args)

        store.server.connect = migrated_before  # type: ignore[method-assign]
        assert store.write_now(appending("committed")) == (2, 2)
        store.boundary = None
        with pytest.raises(StoreUnusable, match="newer byssus"):
            store.write_now(appending("too late"))
        assert stored(store) == ["first", "committed"]


# --- news must not matter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("what", ["socketpair", "thread"])
def test_a_commit_that_cannot_be_announced_is_a_commit_all_the_same(
    where: Schema, monkeypatch: pytest.MonkeyPatch, size: int, what: str
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(24, "Too many open files") if what == "socketpair" else RuntimeError("can't start new thread")

    with opened(where) as store:
        store._writers[hash(NO_THREAD) % len(store._writers)].start()
        with monkeypatch.context() as patched:
            start = "socket.socketpair" if what == "socketpair" else "threading.Thread.start"
            patched.setattr(f"byssus.store.postgres.notifications.{start}", fail)
            futures = [store.submit(appending("once")) for _ in range(size)]
            outcomes: list[Any] = [future.exception(PATIENCE) or future.result() for future in futures]
        assert outcomes == [(i + 1, i + 1) for i in range(size)]
        assert stored(store) == ["once"] * size


# --- what the server is told ------------------------------------------------------------------------------------------


def settings_of(tx: Tx) -> dict[str, str]:
    names = ("lock_timeout", "idle_in_transaction_session_timeout", "synchronous_commit")
    return {name: row[0] for name in names if (row := tx.one("SELECT current_setting(:name)", name=name))}


def durability_of(tx: Tx) -> str:
    return settings_of(tx)["synchronous_commit"]


@pytest.fixture(params=["direct", "pooled"])
def through(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("default", "durability", "expected"),
    [
        ("off", "full", "on"),
        ("local", "full", "on"),
        ("remote_write", "full", "on"),
        ("on", "full", "on"),
        ("remote_apply", "full", "remote_apply"),
        ("on", "normal", "off"),
    ],
)
def test_every_transaction_is_as_durable_as_was_asked_and_ends_in_time(
    server: Server, through: str, default: str, durability: Durability, expected: str
) -> None:
    place = Schema(server.create(), "byssus")
    name = psycopg.conninfo.conninfo_to_dict(place.dsn)["dbname"]
    server.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = {default}')
    with pooling(place.dsn) as pooler:
        dsn = pooler.dsn if through == "pooled" else place.dsn
        with opened(place, dsn=dsn, durability=durability) as store:
            for _ in range(5):
                for ask in (store.submit, store.submit_first, store.submit_read):
                    found = ask(settings_of).result()
                    if ask == store.submit_read:  # which writes nothing
                        del found["synchronous_commit"]
                    assert found == {
                        "lock_timeout": "30s",
                        "idle_in_transaction_session_timeout": "15s",
                        **({} if ask == store.submit_read else {"synchronous_commit": expected}),
                    }
            assert store.pool.has_pooler is (through == "pooled")


def test_settings_that_change_on_a_live_server_make_no_write_less_durable(server: Server, through: str) -> None:
    place = Schema(server.create(), "byssus")
    observer = Admin(place.dsn)
    with pooling(place.dsn) as pooler:
        dsn = pooler.dsn if through == "pooled" else place.dsn
        with opened(place, dsn=dsn, pool_size=2) as store, opened(place, dsn=dsn, durability="normal") as normal:
            for setting, expected in [("off", "on"), ("remote_write", "on"), ("remote_apply", "remote_apply")]:
                store.write_now(appending("its connection is there before the setting changes"))
                observer.all(f"ALTER SYSTEM SET synchronous_commit = {setting}")
                observer.all("SELECT pg_reload_conf()")
                wait_until(lambda now=setting: observer.one("SHOW synchronous_commit") == now, "not reloaded")  # type: ignore[misc]
                for _ in range(5):
                    assert store.write_now(durability_of) == expected
                    assert normal.write_now(durability_of) == "off"
    observer.all("ALTER SYSTEM RESET synchronous_commit")
    observer.all("SELECT pg_reload_conf()")
    observer.close()


def test_a_session_that_is_stuck_in_a_transaction_is_ended_and_its_locks_are_free(
    where: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pool.SETTINGS, "idle_in_transaction_session_timeout", "100ms")
    monkeypatch.setitem(pool.SETTINGS, "lock_timeout", "5s")
    stuck, free = threading.Event(), threading.Event()
    runs: list[str] = []

    def query(tx: Tx) -> Any:
        outcome = appending("stuck")(tx)
        runs.append("run")
        if len(runs) == 1:
            stuck.set()
            assert free.wait(PATIENCE)
        return outcome

    with opened(where) as one, opened(where) as two, ThreadPoolExecutor(1) as other:
        two.write_now(appending("first"))
        held = other.submit(one.write_now, query)
        assert stuck.wait(PATIENCE)
        assert two.write_now(appending("meanwhile")) == (2, 2)  # waits for the row, and gets it
        free.set()
        assert held.result(PATIENCE) == (3, 3)
        assert stored(two) == ["first", "meanwhile", "stuck"]
    assert len(runs) == 2


def test_an_error_is_one_line_that_names_the_database(where: Schema) -> None:
    culprits: list[Query] = [
        lambda tx: tx.run("SELEKT 1"),
        lambda tx: tx.run("SELECT * FROM nowhere"),
        lambda tx: tx.run("DO $$ BEGIN RAISE EXCEPTION 'two\nlines'; END $$"),
    ]
    with opened(where) as store:
        for culprit in culprits:
            with pytest.raises(StoreError) as caught:
                store.write_now(culprit)
            assert store.name in str(caught.value)
            assert len(str(caught.value).splitlines()) == 1
