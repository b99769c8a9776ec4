"""The runner on Postgres: groups, failures, and what is true when an outcome is delivered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from byssus.errors import ByssusError, StoreError, StoreNotOpen, ThreadMoved
from byssus.queries.log import threads
from byssus.queries.log.threads import Position
from byssus.store.database import Tx
from byssus.store.postgres import store as postgres
from byssus.store.postgres.store import PostgresStore
from byssus.values.thread_key import ThreadKey
from tests.support.postgres import Schema, wait_until
from tests.support.stores import (
    PATIENCE,
    Admin,
    Gate,
    Place,
    Query,
    appending,
    half_done,
    named,
    opened,
    rows,
    stored,
    together,
)

pytestmark = pytest.mark.processes


@pytest.fixture
def store(where: Schema) -> Iterator[PostgresStore]:
    with opened(where) as made:
        yield made


# --- groups -----------------------------------------------------------------------------------------------------------


def transactions(store: PostgresStore) -> int:
    """How many transactions have stored what there is."""
    row = store.read_now(lambda tx: tx.one("SELECT count(DISTINCT xmin::text) FROM messages"))
    assert row is not None
    return int(row[0])


def test_writes_that_wait_together_share_a_commit_and_a_group_has_an_end(store: PostgresStore) -> None:
    assert together(store, *(appending(str(i)) for i in range(300))) == [(1 + i, 1 + i) for i in range(300)]
    assert 4 <= transactions(store) <= 20
    assert stored(store) == [*map(str, range(300))]


def insert_twice(tx: Tx) -> Place:
    """A statement that fails at the server, and whose answer is only asked for by whoever comes next."""
    tx.run("INSERT INTO partials (thread, body, saved_at) SELECT key, '', '' FROM threads")
    tx.run("INSERT INTO partials (thread, body, saved_at) SELECT key, '', '' FROM threads")
    return (17, 17)


def insert_many_twice(tx: Tx) -> None:
    key = tx.one("SELECT key FROM threads")
    assert key is not None
    tx.many("INSERT INTO partials (thread, body, saved_at) VALUES (:key, '', '')", [{"key": key[0]}] * 3)


def wrong_version(tx: Tx) -> Position:
    return threads.append(tx, ThreadKey("", "t"), rows("wrong"), expect=17)


def no_sql(tx: Tx) -> None:
    tx.run("SELEKT 1")


def missing_parameter(tx: Tx) -> None:
    tx.run("UPDATE threads SET extra = :extra")


def too_big(tx: Tx) -> None:
    tx.run("UPDATE threads SET head = :head", head=2**70)


def not_text(tx: Tx) -> None:
    threads.append(tx, ThreadKey("", "t"), rows("before"))
    threads.append(tx, ThreadKey("", "t"), rows("a\0b"))


CULPRITS: list[tuple[Query, type[BaseException]]] = [
    (insert_twice, StoreError),
    (insert_many_twice, StoreError),
    (half_done, ZeroDivisionError),
    (wrong_version, ThreadMoved),
    (no_sql, StoreError),
    (missing_parameter, StoreError),
    (too_big, StoreError),
    (not_text, StoreError),
]


@pytest.mark.parametrize(("culprit", "error"), CULPRITS)
def test_a_failing_write_hears_of_it_and_does_not_sink_its_neighbours(
    store: PostgresStore, culprit: Query, error: type[BaseException]
) -> None:
    store.write_now(appending("first"))
    alone = together(store, culprit)
    before, hears, after = together(store, appending("before"), culprit, appending("after"))
    assert [type(outcome) for outcome in (*alone, hears)] == [type(hears)] * 2
    assert isinstance(hears, error), repr(hears)
    assert (before, after) == ((2, 2), (3, 3))
    assert stored(store) == ["first", "before", "after"]
    assert stored(store, "other") == []


def test_many_failing_writes_in_one_group_each_hear_their_own_error(store: PostgresStore) -> None:
    store.write_now(appending("first"))
    outcomes = together(store, *(query for culprit, _ in CULPRITS for query in (culprit, appending("fine"))))
    for (_, error), outcome in zip(CULPRITS, outcomes[::2], strict=True):
        assert isinstance(outcome, error)
    assert stored(store) == ["first", *["fine"] * len(CULPRITS)]


def test_a_query_that_swallows_an_error_of_the_database_does_not_sink_its_neighbours(store: PostgresStore) -> None:
    def swallowing(tx: Tx) -> None:
        try:
            tx.all("SELEKT 1")
        except Exception:
            return

    before, hears, after = together(store, appending("before"), swallowing, appending("after"))
    assert (before, after) == ((1, 1), (2, 2))
    assert hears is None or isinstance(hears, StoreError)
    assert stored(store) == ["before", "after"]


def roll_back_and_raise(tx: Tx) -> None:
    tx.run("ROLLBACK")
    raise ZeroDivisionError


def roll_back_silently(tx: Tx) -> None:
    tx.run("ROLLBACK")


def commit_silently(tx: Tx) -> None:
    tx.run("COMMIT")


@pytest.mark.parametrize("culprit", [roll_back_and_raise, roll_back_silently, commit_silently])
def test_neighbours_of_a_write_that_ends_the_transaction_lose_nothing(store: PostgresStore, culprit: Query) -> None:
    store.write_now(appending("first"))
    before, hears, after = together(store, appending("before"), culprit, appending("after"))
    assert isinstance(hears, StoreError | ZeroDivisionError)
    assert (before, after) == ((2, 2), (3, 3))
    assert stored(store) == ["first", "before", "after"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, RecursionError])
def test_whatever_a_query_raises_the_writer_and_the_readers_live_on(
    store: PostgresStore, error: type[BaseException]
) -> None:
    def query(tx: Tx) -> None:
        raise error

    for _ in range(3):
        with pytest.raises(error):
            store.write_now(query)
        with pytest.raises(error):
            store.read_now(query)
    store.write_now(appending("alive"))
    assert stored(store) == ["alive"]


# --- outcomes ---------------------------------------------------------------------------------------------------------


def test_others_see_a_write_when_its_outcome_arrives(store: PostgresStore, where: Schema, admin: Admin) -> None:
    seen: list[int] = []
    for i in range(20):
        future = store.submit(threads.append, ThreadKey("", f"thread {i % 3}"), rows(str(i)))
        future.add_done_callback(lambda _: seen.append(admin.one(f'SELECT count(*) FROM "{where.name}".messages')))
        future.result(PATIENCE)
    store.write_now(appending("now"))  # the callbacks of an earlier one have run when its writer goes on
    assert all(count >= n for n, count in enumerate(seen, 1))


def test_writes_of_one_thread_happen_in_the_order_of_their_submission_however_submitted(store: PostgresStore) -> None:
    async def mixed(name: str) -> None:
        pending: list[Any] = []
        for i in range(30):
            if i % 3 == 0:
                pending.append(
                    asyncio.wrap_future(store.submit(threads.append, ThreadKey("", "t"), rows(f"{name} {i}")))
                )
            elif i % 7 == 1:
                store.write_now(threads.append, ThreadKey("", "t"), rows(f"{name} {i}"))
            else:
                pending.append(store.write(threads.append, ThreadKey("", "t"), rows(f"{name} {i}")))
        await asyncio.gather(*pending)

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(asyncio.run, mixed(f"loop {n}")) for n in range(6)]:
            future.result(PATIENCE)
    seen = stored(store)
    assert len(seen) == 180
    for n in range(6):
        assert [body for body in seen if body.startswith(f"loop {n} ")] == [f"loop {n} {i}" for i in range(30)]


def test_a_read_sees_one_moment_though_writes_go_on(store: PostgresStore) -> None:
    entered = threading.Event()

    def twice(tx: Tx) -> tuple[object, object]:
        first = tx.one("SELECT count(*) FROM messages")
        entered.set()
        outside.result(PATIENCE)
        return first, tx.one("SELECT count(*) FROM messages")

    store.write_now(appending("a"))
    with ThreadPoolExecutor(1) as pool:
        outside = pool.submit(lambda: (entered.wait(PATIENCE), store.write_now(appending("b"))))
        first, second = store.read_now(twice)
    assert first == second == (1,)
    assert stored(store) == ["a", "b"]


def test_a_read_cannot_write_and_is_told_so_at_once(store: PostgresStore) -> None:
    runs: list[str] = []

    def query(tx: Tx) -> None:
        runs.append("run")
        assert len(runs) == 1, "it was tried again, as if it could go better"
        threads.append(tx, ThreadKey("", "t"), rows("x"))

    with pytest.raises(StoreError, match="read-only"):
        store.read_now(query)
    assert stored(store) == []


# --- a query and the store --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["submit", "submit_read", "submit_first"])
@pytest.mark.parametrize("inner", ["write_now", "read_now", "submit", "submit_first"])
def test_calling_the_store_from_inside_a_query_raises(store: PostgresStore, outer: str, inner: str) -> None:
    def query(tx: Tx) -> None:
        getattr(store, inner)(threads.find, ThreadKey("", "t"))

    with pytest.raises(ByssusError, match="use the transaction"):
        getattr(store, outer)(query).result()
    store.write_now(appending("alive"))
    assert stored(store) == ["alive"]


def test_an_urgent_write_overtakes_a_long_queue(store: PostgresStore) -> None:
    gate = Gate()
    held = store.submit(gate.query)
    queued = [store.submit(appending(str(i))) for i in range(200)]
    assert gate.entered.wait(PATIENCE)
    assert store.submit_first(appending("urgent")).result() == (1, 1)
    assert not any(future.done() for future in (held, *queued))
    gate.opened.set()
    assert queued[-1].result(PATIENCE) == (201, 201)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_close_finishes_what_was_submitted_and_then_refuses(store: PostgresStore) -> None:
    async def main() -> list[object]:
        gate = Gate()
        held = store.write(gate.query)
        writes = [store.write(appending(str(i))) for i in range(150)]
        reads = [store.read(threads.find, ThreadKey("", "nobody")) for _ in range(20)]
        closing = asyncio.ensure_future(asyncio.to_thread(store.close))
        gate.opened.set()
        await closing
        for refused in (store.write, store.read, store.write_now, store.read_now, store.submit, store.submit_first):
            with pytest.raises(StoreNotOpen, match="closed"):
                refused(threads.find, ThreadKey("", "t"))
        with pytest.raises(StoreNotOpen, match="closed"):
            store.version()
        return list(await asyncio.gather(held, *writes, *reads))

    outcomes = asyncio.run(main())
    assert outcomes == ["gate", *((i + 1, i + 1) for i in range(150)), *[None] * 20]
    store.close()


def test_connections_are_few_and_gone_after_close_and_so_is_every_thread(where: Schema, admin: Admin) -> None:
    before = set(threading.enumerate())
    with opened(where, dsn=named(where.dsn, "few"), pool_size=4) as store:

        async def crowd() -> None:
            writes = [store.write(threads.append, ThreadKey("", f"thread {i}"), rows("x")) for i in range(100)]
            reads = [store.read(threads.find, ThreadKey("", f"thread {i}")) for i in range(100)]
            await asyncio.gather(*writes, *reads, asyncio.wrap_future(store.submit_first(appending("first"))))
            store.version()

        asyncio.run(crowd())
        wait_until(lambda: len(admin.sessions("few")) == 6, "not four workers, one for leases and one for news")
        assert 1 <= admin.one(f'SELECT count(*) FROM "{where.name}".writers') <= 3
    wait_until(lambda: not admin.sessions("few"), "a connection is left")
    wait_until(lambda: set(threading.enumerate()) <= before, "a thread is left")
    assert admin.one(f'SELECT count(*) FROM "{where.name}".writers') == 0


def test_idle_connections_are_given_back_and_made_again(
    where: Schema, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "IDLE_SECONDS", 0.05)
    with opened(where, dsn=named(where.dsn, "idle")) as store:
        for i in range(3):
            store.write_now(appending(str(i)))
            assert stored(store)[-1] == str(i)
            wait_until(lambda: len(admin.sessions("idle")) <= 1, "more than the one that listens is left")


def test_rows_of_writers_that_died_long_ago_are_removed(where: Schema, admin: Admin) -> None:
    with opened(where) as store:
        store.write_now(appending("x"))
        for i, age in enumerate(["3 days", "1 minute"]):
            admin.all(f"INSERT INTO \"{where.name}\".writers VALUES (%s, 1, now() - interval '{age}')", f"dead {i}")
    assert admin.all(f'SELECT id FROM "{where.name}".writers') == [("dead 1",)]


def test_percent_signs_colons_and_names_in_values_are_left_alone(store: PostgresStore) -> None:
    odd = ["%s", "%(id)s", "%%", ":id", "::text", ":now", "a FROM threads", "\\", "\\x00", "'; DROP TABLE threads; --"]
    for text in odd:
        store.write_now(threads.append, ThreadKey("", text), rows(text, f"{{{text}}}"))
    for text in odd:
        assert stored(store, text) == [text, f"{{{text}}}"]
    answer = store.write_now(lambda tx: tx.one("SELECT :text::text, :now > '2020', '%'", text=":now", now=tx.now()))
    assert answer == (":now", True, "%")
