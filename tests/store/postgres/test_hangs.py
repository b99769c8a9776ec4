"""A Postgres that hangs without dying: everything comes back in time, and nothing is lost or written twice."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest

from byssus.errors import InputError, StoreUnreachable
from byssus.queries.log import threads
from byssus.store.database import Tx
from byssus.store.jobs import takes_long
from byssus.store.postgres import server as postgres_server
from byssus.store.postgres.store import PostgresStore
from byssus.values.thread_key import ThreadKey
from tests.support.postgres import Schema, Server, processes, running
from tests.support.stores import PATIENCE, Admin, appending, opened, stored

pytestmark = pytest.mark.processes

LIMITS = "answer_seconds=0.6&connect_timeout=2"  # the least that libpq takes


def limited(dsn: str) -> str:
    return f"{dsn}{'&' if '?' in dsn else '?'}{LIMITS}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that may be stopped."""
    with running() as made:
        yield made


@pytest.fixture
def hanging(server: Server) -> Schema:
    """An empty database on it."""
    return Schema(server.create(), "byssus")


def tell_all(server: Server, number: signal.Signals) -> None:
    """Stop all of a server's processes, or let them go on."""
    children = [pid for pid, parent in processes().items() if parent == server.pid]
    for pid in (server.pid, *children):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def frozen(server: Server) -> Iterator[Callable[[], None]]:
    """Nothing of the server moves, until it is told to. The kernel goes on taking connections and bytes for it."""
    tell_all(server, signal.SIGSTOP)
    try:
        yield lambda: tell_all(server, signal.SIGCONT)
    finally:
        tell_all(server, signal.SIGCONT)


# --- all of the server ------------------------------------------------------------------------------------------------


def test_on_a_server_that_hangs_everything_comes_back_in_time_and_so_does_closing(
    server: Server, hanging: Schema
) -> None:
    async def cancelled(store: PostgresStore) -> None:
        async def append() -> None:
            await store.write(appending("lost"))

        task = asyncio.ensure_future(append())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await append()
        with pytest.raises(asyncio.CancelledError):
            await task

    with opened(hanging, dsn=limited(hanging.dsn), patience=0.5) as store:
        store.write_now(appending("before"))
        store.submit_first(appending("before")).result(PATIENCE)
        assert len(stored(store)) == 2
        with frozen(server):
            futures = [
                store.submit(appending("lost")),
                store.submit_first(appending("lost")),
                store.submit_read(threads.find, ThreadKey("", "t")),
            ]
            asyncio.run(asyncio.wait_for(cancelled(store), PATIENCE))
            for future in futures:
                assert isinstance(future.exception(PATIENCE), StoreUnreachable)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(store.close).result(PATIENCE)
    with opened(hanging) as store:
        assert stored(store)[:2] == ["before", "before"]


@pytest.mark.parametrize("size", [1, 3])
def test_a_commit_that_the_server_did_not_answer_is_settled_when_it_moves_again(
    server: Server, hanging: Schema, size: int
) -> None:
    with opened(hanging, dsn=limited(hanging.dsn)) as store:
        store.write_now(appending("before"))
        connect = store.server.connect

        def wake_and_connect() -> Any:
            tell_all(server, signal.SIGCONT)
            return connect()

        def freeze(boundary: str) -> None:
            if boundary == "before commit":
                store.boundary = None
                store.server.connect = wake_and_connect  # type: ignore[method-assign]
                tell_all(server, signal.SIGSTOP)

        store.boundary = freeze
        try:
            writes = [store.submit(appending("once")) for _ in range(size)]
            assert [write.result(PATIENCE) for write in writes] == [(n + 2, n + 2) for n in range(size)]
        finally:
            tell_all(server, signal.SIGCONT)
        assert stored(store) == ["before", *["once"] * size]


# --- one connection ---------------------------------------------------------------------------------------------------


def test_a_backend_that_is_stopped_costs_a_connection_and_nothing_else(hanging: Schema) -> None:
    with opened(hanging, dsn=limited(hanging.dsn), pool_size=2) as store:
        store.write_now(appending("before"))
        assert stored(store) == ["before"]
        admin = Admin(hanging.dsn)
        backends = [pid for (pid,) in admin.all("SELECT pid FROM pg_stat_activity WHERE application_name = 'byssus'")]
        admin.close()
        assert len(backends) >= 2
        for pid in backends:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert store.write_now(appending("after")) == (2, 2)
            assert stored(store) == ["before", "after"]
        finally:
            for pid in backends:
                os.kill(pid, signal.SIGCONT)


class Relay:
    """Stands between a client and a server. Told to, it swallows all that passes on the connections that it has."""

    def __init__(self, dsn: str) -> None:
        given = psycopg.conninfo.conninfo_to_dict(dsn)
        self._server = (str(given["host"]), int(str(given["port"])))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.dsn = dsn.replace(f"{self._server[0]}:{self._server[1]}", f"127.0.0.1:{self._listening.getsockname()[1]}")
        self._peers: dict[socket.socket, socket.socket] = {}
        self._swallowed: set[socket.socket] = set()
        self.swallows_new = False
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="relay")
        self._thread.start()

    def swallow(self) -> None:
        self._swallowed |= set(self._peers)

    def close(self) -> None:
        self._stop.send(b".")
        self._thread.join()
        for each in (self._listening, self._stop, self._stopped, *self._peers):
            each.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            selector.register(self._stopped, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._stopped:
                        return
                    if key.fileobj is self._listening:
                        self._accept(selector)
                    else:
                        self._pass_on(selector, key.fileobj)  # type: ignore[arg-type]

    def _accept(self, selector: selectors.BaseSelector) -> None:
        client, _ = self._listening.accept()
        server = socket.create_connection(self._server)
        self._peers |= {client: server, server: client}
        for each in (client, server):
            selector.register(each, selectors.EVENT_READ)

    def _pass_on(self, selector: selectors.BaseSelector, source: socket.socket) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(65536)
        if self.swallows_new and b"SELECT" in data:
            self.swallow()
        if source in self._swallowed and data:
            return
        target = self._peers[source]
        with suppress(OSError):
            target.sendall(data) if data else target.shutdown(socket.SHUT_WR)
        if not data:
            selector.unregister(source)


@pytest.fixture
def relay(hanging: Schema) -> Iterator[Relay]:
    made = Relay(hanging.dsn)
    yield made
    made.close()


def test_a_connection_that_swallows_everything_is_replaced_and_nothing_is_written_twice(
    hanging: Schema, relay: Relay
) -> None:
    with opened(hanging, dsn=limited(relay.dsn), pool_size=2) as store:
        store.write_now(appending("first"))
        assert stored(store) == ["first"]
        relay.swallow()
        assert store.write_now(appending("second")) == (2, 2)

        def swallow_the_commit(_: str) -> None:
            store.boundary = None
            relay.swallow()

        store.boundary = swallow_the_commit
        assert store.write_now(appending("third")) == (3, 3)
        assert stored(store) == ["first", "second", "third"]


def test_opening_a_database_that_accepts_connections_and_says_nothing_fails_in_time(
    hanging: Schema, relay: Relay
) -> None:
    relay.swallows_new = True
    place = postgres_server.Server(limited(relay.dsn))
    with pytest.raises(StoreUnreachable, match=r"hangs \(no answer for 0.6 s\).*answer_seconds="):
        place.prepare()


# --- what is allowed to take its time ---------------------------------------------------------------------------------


def sleeping(tx: Tx) -> str:
    tx.one("SELECT pg_sleep(1)")
    return "slept"


@takes_long
def sleeping_long(tx: Tx) -> str:
    return sleeping(tx)


def test_a_query_that_may_take_long_is_waited_for_and_any_other_is_not(where: Schema) -> None:
    with opened(where, dsn=limited(where.dsn), patience=0.1) as store:
        reads = [store.submit_read(query) for query in (sleeping_long, sleeping)]
        writes = [store.submit(sleeping_long)]
        assert [each.result(PATIENCE) for each in (reads[0], *writes)] == ["slept"] * 2
        with pytest.raises(StoreUnreachable, match=r"no answer for 0.6 s.*answer_seconds="):
            reads[1].result(PATIENCE)


def test_a_lock_is_waited_for_less_long_than_an_answer(where: Schema) -> None:
    with opened(where, dsn=limited(where.dsn)) as store:
        assert store.read_now(lambda tx: tx.one("SHOW lock_timeout")) == ("400ms",)


@pytest.mark.parametrize("value", ["0", "-1", "x", "", "nan", "1e9", "inf"])
def test_a_limit_that_is_none_is_an_input_error(value: str) -> None:
    with pytest.raises(InputError, match="answer_seconds"):
        postgres_server.Server(f"postgresql://h/db?answer_seconds={value}")
