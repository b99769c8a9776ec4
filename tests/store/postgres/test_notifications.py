"""LISTEN and NOTIFY: what makes a process look, and what happens where no word arrives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

from byssus.queries.log import leases, threads
from byssus.queries.log.leases import Claim, Held
from byssus.store import keeper
from byssus.store.postgres import notifications as postgres_news
from byssus.store.postgres.store import PostgresStore
from byssus.values.thread_key import ThreadKey
from tests.support import processes
from tests.support.pooler import pooling
from tests.support.postgres import Schema, Server, running, server_for_tests, wait_until
from tests.support.stores import PATIENCE, Admin, appending, named, opened, rows, stored

pytestmark = pytest.mark.processes


@pytest.fixture
def words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears words looks because of a word, and never because of the time."""
    monkeypatch.setattr(postgres_news, "_LOOK_ANYWAY", 1e9)
    monkeypatch.setattr(postgres_news, "_SILENCE", 1e6)
    monkeypatch.setattr(postgres_news, "_ANSWER", 0.3)


def listening(store: PostgresStore) -> Callable[[], Any]:
    """Start to listen; what tells whether there may be something new since."""
    store.version()
    wait_until(lambda: store.news.is_receiving, "no word arrives")
    return store.version


def settled(version: Callable[[], Any]) -> Any:
    """The version when the last word of before has arrived."""
    seen: list[Any] = [version()]

    def is_quiet() -> bool:
        threading.Event().wait(0.05)
        seen.append(version())
        return bool(seen[-1] == seen[-2])

    wait_until(is_quiet, "it does not become quiet")
    return seen[-1]


# --- where words arrive -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("words_only")
def test_a_commit_of_another_process_is_heard_and_not_waited_for(where: Schema) -> None:
    with opened(where) as one, opened(where) as two:
        version = listening(one)
        for i in range(5):
            before = settled(version)
            two.write_now(appending(str(i)))
            wait_until(lambda before=before: version() != before, "the word does not arrive")  # type: ignore[misc]


@pytest.mark.usefixtures("words_only")
def test_a_commit_of_a_process_that_ends_at_once_is_heard(where: Schema) -> None:
    script = """
        from byssus.store import opening as places, sharing
        store = places.open(sys.argv[1], schema=sys.argv[2])
        store.write_now(threads.append, ThreadKey("", "t"), rows("x"))
        sharing.release(store)
    """
    with opened(where) as store:
        before = settled(listening(store))
        processes.run(script, *where)
        assert stored(store) == ['"x"']
        wait_until_soon(lambda: store.version() != before, "the word of a process that has ended does not arrive")


def wait_until_soon(condition: Callable[[], bool], complaint: str) -> None:
    """As `wait_until`, for what would otherwise never happen."""
    done = threading.Event()
    for _ in range(500):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError(complaint)


@pytest.mark.usefixtures("words_only")
def test_an_abort_by_another_process_is_heard_by_the_keeper(where: Schema) -> None:
    script = """
        from byssus.queries.log import leases
        from byssus.values.thread_key import ThreadKey
        from byssus.store import opening as places, sharing
        store = places.open(sys.argv[1], schema=sys.argv[2])
        for line in sys.stdin:
            print(store.write_now(leases.abort, ThreadKey("", "t")), flush=True)
        sharing.release(store)
    """
    with opened(where) as store, processes.started(script, *where) as other:
        claim = Claim("me", "run", 30.0)
        position = store.write_now(threads.append, ThreadKey("", "t"), rows("x"), by=claim)
        held = Held("t", "", position.epoch, 30.0)
        told: list[str] = []
        keeper.of(store, leases.renew, leases.aborted).keep(held, told.append)
        settled(listening(store))
        looks = count_reads(store)
        assert other.ask() == "me"
        wait_until(lambda: told == [keeper.ABORTED], "the keeper was not told")
        assert looks() < 20, "it looked without having been told"
        keeper.of(store, leases.renew, leases.aborted).drop(held)


def count_reads(store: PostgresStore) -> Callable[[], int]:
    looks: list[Any] = []
    read = store.read_now

    def counted(query: Any, *args: Any, **params: Any) -> Any:
        if query is leases.aborted:
            looks.append(args)
        return read(query, *args, **params)

    store.read_now = counted  # type: ignore[method-assign, assignment]
    return lambda: len(looks)


@pytest.mark.usefixtures("words_only")
def test_a_listener_whose_connection_is_cut_comes_back_and_hears_again(where: Schema, admin: Admin) -> None:
    with opened(where, listen_dsn=named(where.dsn, "listener")) as one, opened(where) as two:
        version = listening(one)
        for _ in range(2):
            before = settled(version)
            (pid,) = admin.sessions("listener")
            admin.end(pid)
            wait_until(lambda before=before: one.version() != before, "what was said meanwhile is not looked for")  # type: ignore[misc]
            wait_until(lambda: bool(admin.sessions("listener")), "it does not come back")
            version = listening(one)
            before = settled(version)
            two.write_now(appending("x"))
            wait_until(lambda before=before: one.version() != before, "the word does not arrive")  # type: ignore[misc]


def test_silence_does_not_count_as_broken(where: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_news, "_SILENCE", 0.02)
    monkeypatch.setattr(postgres_news, "_ANSWER", 0.3)
    with opened(where) as store:
        listening(store)
        heard = store.news._received
        wait_until(
            lambda: store.news._received > heard + 5 or not store.news.is_receiving, "it does not speak to itself"
        )
        assert store.news.is_receiving


def test_a_word_is_said_once_for_many_commits(where: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_news, "_GATHER", 0.5)
    with opened(where) as store:
        version = listening(store)
        settled(version)
        before = store.news._received
        for i in range(100):
            store.submit(appending(str(i)))
        store.write_now(appending("last"))
        settled(version)
        assert store.news._received - before < 60


# --- where none do ----------------------------------------------------------------------------------------------------


def test_behind_a_pooler_there_is_a_look_now_and_then_and_listen_dsn_restores_the_words(where: Schema) -> None:
    with pooling(where.dsn) as pooler:
        with opened(where, dsn=pooler.dsn) as store:
            store.write_now(appending("x"))
            for _ in range(3):
                before = store.version()
                wait_until(lambda before=before: store.version() != before, "nobody looks")  # type: ignore[misc]
            assert not store.news.is_receiving
        with opened(where, dsn=pooler.dsn, listen_dsn=where.dsn) as store:
            listening(store)
            assert store.write_now(appending("y")) == (2, 2)


def test_words_that_are_lost_cost_time_and_nothing_else(where: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_news, "_LOOK_ANYWAY", 0.2)
    with opened(where) as one, opened(where) as two:
        listening(one)
        monkeypatch.setattr(two.news, "announce", lambda threads: None)
        two.write_now(appending("unsaid"))
        before = one.version()
        wait_until(lambda: one.version() != before, "nobody looks without having been told")
        assert stored(one) == ["unsaid"]


@pytest.mark.parametrize("kind", ["refused", "silent", "no such host"])
def test_a_listener_that_reaches_nobody_delays_no_commit_and_no_close(where: Schema, kind: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as hole:  # takes connections and says nothing
        listen_dsn = {
            "refused": "postgresql://127.0.0.1:1/db",
            "silent": f"postgresql://127.0.0.1:{hole.getsockname()[1]}/db?connect_timeout=2",
            "no such host": "postgresql://no-such-host.invalid/db",
        }[kind]
        with opened(where, listen_dsn=listen_dsn) as store:
            futures = [store.submit(appending(str(i))) for i in range(50)]
            assert futures[-1].result(PATIENCE) == (50, 50)
            before = store.version()
            wait_until(lambda: store.version() != before, "nobody looks")
            assert not store.news.is_receiving


def test_a_store_is_closed_while_the_server_is_gone_and_nothing_is_left() -> None:
    before = set(threading.enumerate())
    with running() as server:
        with opened(Schema(server.create(), "byssus"), patience=0.2) as store:
            store.write_now(appending("x"))
            listening(store)
            server.stop("immediate")
            wait_until(lambda: not store.news.is_receiving, "it does not notice that the server is gone")
        assert set(threading.enumerate()) <= before
        assert_starts_again(server)


def assert_starts_again(server: Server) -> None:
    server.start()
    with psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_word_is_about_the_own_schema_only(where: Schema, words_only: None) -> None:
    other = server_for_tests().fresh_schema()
    with opened(where) as one, opened(other) as two:
        version = listening(one)
        listening(two)
        before = settled(version)
        two.write_now(appending("x"))
        settled(two.version)
        assert version() == before
    server_for_tests().drop(other)
