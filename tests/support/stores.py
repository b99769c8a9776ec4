"""What the tests of the runner on Postgres share: a store with options of its own, and writes that wait together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from byssus.checkpointer import Durability
from byssus.queries.log import threads
from byssus.queries.log.threads import MessageRow, Position
from byssus.store.database import Store, Tx
from byssus.store.postgres.server import Server
from byssus.store.postgres.store import PostgresStore
from byssus.values.thread_key import ThreadKey
from tests.support.postgres import Schema

PATIENCE = 30  # seconds until a test that hangs is a test that fails

Query = Callable[[Tx], Any]
Place = tuple[int, int]


@contextmanager
def opened(
    place: Schema,
    *,
    dsn: str | None = None,
    listen_dsn: str | None = None,
    durability: Durability = "full",
    **options: Any,
) -> Iterator[PostgresStore]:
    """A store of its own, shared with nobody: it stands for a process."""
    server = Server(dsn or place.dsn, schema=place.name, listen_dsn=listen_dsn)
    store = PostgresStore(server, durability, options.pop("pool_size", 4), connection=server.prepare(), **options)
    try:
        yield store
    finally:
        store.close()


class Gate:
    """A query that holds the writer, so that what is submitted meanwhile waits and is taken as one group."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def query(self, tx: Tx) -> str:
        self.entered.set()
        assert self.opened.wait(PATIENCE)
        return "gate"


def together(store: Store, *queries: Query) -> list[Any]:
    """The outcomes of writes that were all waiting when the writer came to them; an exception is an outcome."""

    async def main() -> list[Any]:
        gate = Gate()
        held = store.write(gate.query)
        await asyncio.to_thread(gate.entered.wait, PATIENCE)
        writes = [store.write(query) for query in queries]
        gate.opened.set()
        done, pending = await asyncio.wait([held, *writes], timeout=PATIENCE)
        assert not pending, f"{len(pending)} of {len(done) + len(pending)} writes never got an outcome"
        outcomes = [write.exception() or write.result() for write in (held, *writes)]
        assert outcomes[0] == "gate"
        return outcomes[1:]

    return asyncio.run(main())


def appending(body: str, thread_id: str = "t") -> Query:
    def query(tx: Tx) -> Place:
        return place(threads.append(tx, ThreadKey("", thread_id), rows(body)))

    return query


def half_done(tx: Tx) -> None:
    """A write that fails when it has written already."""
    threads.append(tx, ThreadKey("", "t"), rows("half"))
    threads.append(tx, ThreadKey("", "other"), rows("half"))
    raise ZeroDivisionError("mine alone")


def place(position: Position) -> Place:
    """The end of a thread and how often it was written."""
    return position.head, position.version


def rows(*bodies: str) -> list[MessageRow]:
    return [MessageRow("id", "user", body) for body in bodies]


def stored(store: Store, thread_id: str = "t") -> list[str]:
    row = store.read_now(threads.find, ThreadKey("", thread_id))
    if row is None:
        return []
    page = store.read_now(threads.page, row.branch, after=0, upto=row.head, limit=10**6)
    return [body for _, body in page]


class Admin:
    """Somebody else at the same server, who may do anything."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)

    def all(self, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement.encode(), params)
        return cursor.fetchall() if cursor.description else []

    def one(self, statement: str, *params: Any) -> Any:
        return self.all(statement, *params)[0][0]

    def sessions(self, application: str, condition: str = "true") -> list[int]:
        """The pids of a client's sessions, as it named itself in its DSN."""
        query = f"SELECT pid FROM pg_stat_activity WHERE application_name = %s AND {condition}"
        return [pid for (pid,) in self.all(query, application)]

    def end(self, *pids: int) -> None:
        for pid in pids:
            self.all("SELECT pg_terminate_backend(%s, 30000)", pid)

    def close(self) -> None:
        self._connection.close()


def named(dsn: str, application: str, **options: str) -> str:
    """The DSN of a client that can be told from others in pg_stat_activity."""
    settings = "".join(f" -c {name}={value}" for name, value in options.items())
    return psycopg.conninfo.make_conninfo(
        dsn, application_name=application, **({"options": settings} if options else {})
    )


class LongRead:
    """A read whose first runs take for ever, unless they are interrupted."""

    _STATEMENT = "SELECT COUNT(*) FROM " + " CROSS JOIN ".join(f"indexing i{number}" for number in range(50))

    def __init__(self, long_runs: int = 10**9) -> None:
        self.begun = threading.Semaphore(0)  # once for each run
        self.runs = 0
        self._long_runs = long_runs

    def query(self, tx: Tx) -> str:
        self.runs += 1
        is_long = self.runs <= self._long_runs
        self.begun.release()
        if is_long:
            tx.one(self._STATEMENT)
        return "done"
