"""The runner on SQLite: groups, failures, and what is true when an outcome is delivered."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import pytest

from byssus.checkpointer import Durability
from byssus.errors import ByssusError, InputError, StoreError, StoreFull, StoreNotOpen, StoreUnusable, ThreadMoved
from byssus.queries.log import listing, threads
from byssus.queries.log.threads import Position
from byssus.store import schema, sharing
from byssus.store.database import Tx
from byssus.store.sqlite import store as sqlite
from byssus.store.sqlite.store import SQLiteStore
from byssus.values.thread_key import ThreadKey
from tests.support import processes
from tests.support.stores import PATIENCE, Gate, Place, Query, appending, place, rows, stored, together


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runner.db"


@pytest.fixture
def store(path: Path) -> Iterator[SQLiteStore]:
    opened = sqlite.open_store(path)
    yield opened
    sharing.release(opened)


@pytest.fixture(params=["file", "memory"])
def any_store(request: pytest.FixtureRequest, path: Path) -> Iterator[SQLiteStore]:
    opened = sqlite.open_store(path if request.param == "file" else ":memory:")
    yield opened
    sharing.release(opened)


def wal_commits(path: Path) -> int:
    """How many transactions stand in the WAL. (The WAL carries no locks: it may be opened beside SQLite.)"""
    wal = Path(f"{path}-wal").read_bytes()
    (page_size,) = struct.unpack_from(">I", wal, 8)
    salts = wal[16:24]
    frames = range(32, len(wal), 24 + page_size)
    return sum(wal[at + 8 : at + 16] == salts and wal[at + 4 : at + 8] != bytes(4) for at in frames)


def settings_of(tx: Tx) -> dict[str, Any]:
    names = ("synchronous", "journal_mode", "foreign_keys", "application_id", "user_version")
    return {name: row[0] for name in names if (row := tx.one(f"PRAGMA {name}"))}


# --- groups -----------------------------------------------------------------------------------------------------------


def test_writes_that_wait_together_share_a_commit(store: SQLiteStore, path: Path) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("first"))
    before = wal_commits(path)
    assert together(store, *(appending(str(i)) for i in range(100))) == [(2 + i, 2 + i) for i in range(100)]
    assert 1 <= wal_commits(path) - before <= 20
    assert stored(store) == ["first", *map(str, range(100))]


def test_a_group_has_an_end(store: SQLiteStore, path: Path) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("first"))
    before = wal_commits(path)
    together(store, *(appending(str(i)) for i in range(600)))
    assert wal_commits(path) - before >= 3


def test_a_failing_write_does_not_sink_its_neighbours(any_store: SQLiteStore) -> None:
    def half_done(tx: Tx) -> None:
        threads.append(tx, ThreadKey("", "t"), rows("half"))
        threads.append(tx, ThreadKey("", "other"), rows("half"))
        raise ZeroDivisionError("mine alone")

    def wrong(tx: Tx) -> Position:
        return threads.append(tx, ThreadKey("", "t"), rows("wrong"), expect=17)

    def no_sql(tx: Tx) -> None:
        tx.run("SELEKT 1")

    outcomes = together(any_store, appending("a"), half_done, appending("b"), wrong, no_sql, appending("c"))
    assert outcomes[::2][:2] == [(1, 1), (2, 2)]
    assert outcomes[5] == (3, 3)
    assert isinstance(outcomes[1], ZeroDivisionError)
    assert isinstance(outcomes[3], ThreadMoved)
    assert isinstance(outcomes[4], StoreError)
    assert stored(any_store) == ["a", "b", "c"]
    assert stored(any_store, "other") == []


def roll_back_and_raise(tx: Tx) -> None:
    tx.run("ROLLBACK")
    raise ZeroDivisionError


def roll_back_silently(tx: Tx) -> None:
    tx.run("ROLLBACK")


def insert_or_roll_back(tx: Tx) -> None:
    tx.run(
        "INSERT OR ROLLBACK INTO messages (key, branch, seq, id, role, body, created_at)"
        " SELECT key, branch, seq, id, role, body, created_at FROM messages LIMIT 1"
    )


def release_the_savepoint(tx: Tx) -> None:
    tx.run("RELEASE job")


def roll_back_the_savepoint_away(tx: Tx) -> None:
    tx.run("ROLLBACK TO job")
    tx.run("RELEASE job")
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "culprit",
    [roll_back_and_raise, roll_back_silently, insert_or_roll_back, release_the_savepoint, roll_back_the_savepoint_away],
)
def test_neighbours_of_a_write_that_loses_the_transaction_are_run_again(any_store: SQLiteStore, culprit: Query) -> None:
    any_store.write_now(threads.append, ThreadKey("", "t"), rows("first"))
    runs: list[str] = []

    def noting(body: str) -> Query:
        def query(tx: Tx) -> Place:
            runs.append(body)
            return place(threads.append(tx, ThreadKey("", "t"), rows(body)))

        return query

    before, hears, after, last = together(any_store, noting("before"), culprit, noting("after"), noting("last"))
    assert isinstance(hears, StoreError | ZeroDivisionError)
    assert (before, after, last) == ((2, 2), (3, 3), (4, 4))
    assert stored(any_store) == ["first", "before", "after", "last"]
    assert set(runs) == {"before", "after", "last"}
    assert any_store.write_now(appending("later")) == (5, 5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, RecursionError])
def test_whatever_a_query_raises_the_writer_and_the_readers_live_on(
    any_store: SQLiteStore, error: type[BaseException]
) -> None:
    def query(tx: Tx) -> None:
        raise error

    for _ in range(5):
        with pytest.raises(error):
            any_store.write_now(query)
        with pytest.raises(error):
            any_store.read_now(query)
    any_store.write_now(threads.append, ThreadKey("", "t"), rows("alive"))
    assert stored(any_store) == ["alive"]


# --- no room ----------------------------------------------------------------------------------------------------------


def limit_pages(tx: Tx, more: int) -> None:
    pages = tx.one("PRAGMA page_count")
    assert pages is not None
    tx.one(f"PRAGMA max_page_count = {pages[0] + more}")


def test_a_write_that_finds_no_room_is_store_full_and_the_next_one_with_room_is_fine(
    any_store: SQLiteStore, path: Path
) -> None:
    any_store.write_now(threads.append, ThreadKey("", "t"), rows("first"))
    any_store.write_now(limit_pages, 2)
    with pytest.raises(StoreFull, match="free some disk space"):
        any_store.write_now(threads.append, ThreadKey("", "t"), rows("small", "x" * 100_000))
    assert stored(any_store) == ["first"]
    any_store.write_now(threads.append, ThreadKey("", "t"), rows("small"))
    any_store.write_now(limit_pages, 1000)
    any_store.write_now(threads.append, ThreadKey("", "t"), rows("x" * 100_000))
    assert stored(any_store) == ["first", "small", "x" * 100_000]


def test_only_the_write_that_found_no_room_hears_of_it(any_store: SQLiteStore) -> None:
    any_store.write_now(threads.append, ThreadKey("", "t"), rows("first"))
    any_store.write_now(limit_pages, 10)
    before, big, after = together(any_store, appending("before"), appending("x" * 100_000), appending("after"))
    assert isinstance(big, StoreFull)
    assert (before, after) == ((2, 2), (3, 3))
    assert stored(any_store) == ["first", "before", "after"]


# --- outcomes ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_another_process_sees_a_write_when_its_outcome_arrives(store: SQLiteStore, path: Path) -> None:
    watcher = """
        import apsw
        connection = apsw.Connection(sys.argv[1])
        for _ in sys.stdin:
            print(connection.execute("SELECT count(*) FROM messages").fetchall()[0][0], flush=True)
    """

    async def main(watch: processes.Child) -> None:
        for i in range(1, 51):
            await store.write(threads.append, ThreadKey("", "t"), rows(str(i)))
            assert watch.ask() == str(i)
        await asyncio.gather(*(counted(i) for i in range(51, 101)))

    async def counted(i: int) -> None:
        position = await store.write(threads.append, ThreadKey("", "t"), rows(str(i)))
        assert int(watch.ask()) >= position.head

    with processes.started(watcher, path) as watch:
        asyncio.run(main(watch))
        store.write_now(threads.append, ThreadKey("", "t"), rows("now"))
        assert watch.ask() == "101"


def test_a_cancelled_group_of_writes_settles_before_the_cancellation_arrives(store: SQLiteStore) -> None:
    async def main() -> None:
        gate = Gate()

        async def write() -> None:
            async with asyncio.TaskGroup() as group:
                for i in range(5):
                    group.create_task(one(i))
                await asyncio.gather(
                    *(store.write(threads.append, ThreadKey("", "t"), rows(f"gathered {i}")) for i in range(5))
                )

        async def one(i: int) -> None:
            await store.write(threads.append, ThreadKey("", "t"), rows(f"grouped {i}"))

        held = store.write(gate.query)
        await asyncio.to_thread(gate.entered.wait, PATIENCE)
        task = asyncio.ensure_future(write())
        for _ in range(50):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not task.done()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(stored(store)) == 10
        assert await held == "gate"

    asyncio.run(main())


def test_many_event_loops_and_threads_use_one_store_at_once(any_store: SQLiteStore) -> None:
    async def tasks(name: str) -> None:
        await asyncio.gather(
            *(any_store.write(threads.append, ThreadKey("", "t"), rows(f"{name} {i}")) for i in range(25))
        )
        assert await any_store.read(listing.one, ThreadKey("", "t")) is not None

    def plain(name: str) -> None:
        for i in range(25):
            any_store.write_now(threads.append, ThreadKey("", "t"), rows(f"{name} {i}"))
            assert f"{name} {i}" in stored(any_store)

    with ThreadPoolExecutor(12) as pool:
        loops = [pool.submit(asyncio.run, tasks(f"loop {n}")) for n in range(4)]
        plains = [pool.submit(plain, f"thread {n}") for n in range(8)]
        for future in [*loops, *plains]:
            future.result(PATIENCE)
    names = [*(f"loop {n}" for n in range(4)), *(f"thread {n}" for n in range(8))]
    seen = stored(any_store)
    assert sorted(seen) == sorted(f"{name} {i}" for name in names for i in range(25))
    for name in names:
        own = [body for body in seen if body.startswith(f"{name} ")]
        assert own == [f"{name} {i}" for i in range(25)]


def test_a_read_sees_one_moment_though_writes_go_on(store: SQLiteStore) -> None:
    def twice(tx: Tx) -> tuple[object, object]:
        first = tx.one("SELECT count(*) FROM messages")
        store_from_outside.result(PATIENCE)
        return first, tx.one("SELECT count(*) FROM messages")

    store.write_now(threads.append, ThreadKey("", "t"), rows("a"))
    with ThreadPoolExecutor(1) as pool:
        store_from_outside = pool.submit(store.write_now, threads.append, ThreadKey("", "t"), rows("b"))
        first, second = store.read_now(twice)
    assert first == second
    assert stored(store) == ["a", "b"]


def test_a_read_cannot_write(store: SQLiteStore) -> None:
    with pytest.raises(StoreError):
        store.read_now(threads.append, ThreadKey("", "t"), rows("x"))
    assert stored(store) == []


# --- a query and the store --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["write_now", "read_now"])
@pytest.mark.parametrize("inner", ["write_now", "read_now"])
def test_calling_the_store_from_inside_a_query_raises(any_store: SQLiteStore, outer: str, inner: str) -> None:
    def query(tx: Tx) -> None:
        getattr(any_store, inner)(threads.find, ThreadKey("", "t"))

    with pytest.raises(ByssusError, match="use the transaction"):
        getattr(any_store, outer)(query)
    any_store.write_now(threads.append, ThreadKey("", "t"), rows("alive"))
    assert stored(any_store) == ["alive"]


@pytest.mark.processes
@pytest.mark.parametrize("outer", ["write_now", "read_now"])
@pytest.mark.parametrize("inner", ["write", "read"])
def test_calling_the_store_from_an_event_loop_inside_a_query_raises_and_does_not_deadlock(
    path: Path, outer: str, inner: str
) -> None:
    script = """
        store = sqlite.open_store(sys.argv[1])

        async def call():
            await getattr(store, sys.argv[3])(threads.find, ThreadKey("", "t"))

        def query(tx):
            asyncio.run(call())

        outcomes = []

        def ask():
            for _ in range(5):  # more than there are readers
                try:
                    getattr(store, sys.argv[2])(query)
                except ByssusError as error:
                    outcomes.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(10)
        print(outcomes, flush=True)
        os._exit(0 if len(outcomes) == 5 and "use the transaction" in str(outcomes[0]) else 1)
    """
    processes.run(script, path, outer, inner)


# --- a newer version migrates the file --------------------------------------------------------------------------------


def test_a_group_of_writes_is_refused_when_a_newer_version_has_migrated_the_file(
    store: SQLiteStore, path: Path
) -> None:
    store.write_now(appending("before"))
    newer = apsw.Connection(str(path))
    known = newer.pragma("user_version")
    newer.pragma("user_version", 9999)
    for write in [store.submit(appending(str(number))) for number in range(9)]:
        with pytest.raises(StoreUnusable, match=rf"newer byssus \(schema 9999, this one knows {known}\)"):
            write.result(PATIENCE)
    newer.pragma("user_version", known)  # somebody has restored the backup that was taken before
    newer.close()
    assert store.write_now(appending("after")) == (2, 2)
    assert stored(store) == ["before", "after"]


# --- settings and the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("durability", "synchronous"), [("full", 2), ("normal", 1)])
def test_durability_is_what_sqlite_is_told(path: Path, durability: Durability, synchronous: int) -> None:
    opened = sqlite.open_store(path, durability=durability)
    expected = {
        "synchronous": synchronous,
        "journal_mode": "wal",
        "foreign_keys": 1,
        "application_id": 0x42595353,
        "user_version": schema.migrations("sqlite", key="INTEGER PRIMARY KEY")[-1].number,
    }
    assert opened.write_now(settings_of) == expected
    assert opened.read_now(settings_of) == expected
    sharing.release(opened)


def test_full_durability_is_the_default(store: SQLiteStore) -> None:
    assert store.durability == "full"
    assert store.write_now(settings_of)["synchronous"] == 2


@pytest.mark.parametrize("durability", ["", "FULL", "off", None, 2])
def test_an_unknown_durability_is_an_input_error_and_no_file_is_made(path: Path, durability: Any) -> None:
    with pytest.raises(InputError, match="durability must be one of"):
        sqlite.open_store(path, durability=durability)
    assert not path.exists()


def test_close_finishes_what_was_submitted_and_then_refuses(any_store: SQLiteStore) -> None:
    async def main() -> list[object]:
        gate = Gate()
        held = any_store.write(gate.query)
        writes = [any_store.write(appending(str(i))) for i in range(300)]
        reads = [any_store.read(threads.find, ThreadKey("", "nobody")) for _ in range(20)]
        closing = asyncio.ensure_future(asyncio.to_thread(any_store.close))
        gate.opened.set()
        await closing
        for refused in (any_store.write, any_store.read, any_store.write_now, any_store.read_now):
            with pytest.raises(StoreNotOpen, match="closed"):
                refused(threads.find, ThreadKey("", "t"))
        return list(await asyncio.gather(held, *writes, *reads))

    outcomes = asyncio.run(main())
    assert outcomes == ["gate", *((i + 1, i + 1) for i in range(300)), *[None] * 20]
    any_store.close()


def test_every_thread_hears_that_the_store_is_closed(path: Path) -> None:
    store = sqlite.open_store(path)
    store.write_now(threads.append, ThreadKey("", "t"), rows("x"))
    assert stored(store) == ["x"]
    sharing.release(store)
    with ThreadPoolExecutor(6) as pool:  # some of them may carry the numbers of threads that are gone
        for outcome in [pool.submit(store.write_now, threads.find, ThreadKey("", "t")) for _ in range(12)]:
            assert isinstance(outcome.exception(PATIENCE), StoreNotOpen)


def test_the_last_one_out_leaves_one_file(path: Path) -> None:
    first, second = sqlite.open_store(path), sqlite.open_store(path)
    first.write_now(threads.append, ThreadKey("", "t"), rows("x"))
    sharing.release(first)
    assert stored(second) == ["x"]
    assert Path(f"{path}-wal").exists()
    sharing.release(second)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
