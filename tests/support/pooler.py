"""A pooler in transaction mode between a client and Postgres, as PgBouncer is: only stricter, and able to fail.

It speaks the wire protocol as far as it must. A client has a server connection (a backend) from the first message of a
transaction until the server is idle again, and has a different one for its next transaction, each time. So nothing of a
session lives on: no SET, LISTEN, prepared statement, advisory lock or temporary table. As with PgBouncer the backends
are not reset, so such things may turn up in somebody else's transaction; the parameters in `_TRACKED` follow their
client, notifications reach nobody, and startup parameters beyond those are refused.

One event loop in one thread does everything. Between the look at a client's backend and the write to it nothing is
awaited, so the answer that releases the backend cannot come in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import psycopg
from psycopg.conninfo import make_conninfo

_TRACKED = (
    "application_name",
    "client_encoding",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "standard_conforming_strings",
)
_REPORTED = (
    *_TRACKED,
    *("server_version", "server_encoding", "integer_datetimes", "is_superuser", "session_authorization"),
    *("default_transaction_read_only", "in_hot_standby"),
)
_PROTOCOL = 3 << 16
_CANCEL, _SSL, _GSS = 80877102, 80877103, 80877104
_COMMIT = re.compile(rb"(^|;)\s*COMMIT\b", re.IGNORECASE)
_GONE = (ConnectionError, asyncio.IncompleteReadError)  # how a stream says that its other end is


class Refused(Exception):
    """What the client is told before it is sent away."""


@dataclass(eq=False)
class _Backend:
    """One connection to the server. libpq opened it, so any authentication works; we read and write its socket."""

    pool: _Pool
    connection: psycopg.Connection
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    parameters: dict[str, str]
    client: _Client | None = None
    pump: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Leave the pool. What was not committed, the server rolls back."""
        self.pool.remove(self)
        self.writer.transport.abort()
        self.connection.close()


@dataclass(eq=False)
class _Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    parameters: dict[str, str] = field(default_factory=dict)
    pool: _Pool | None = None
    backend: _Backend | None = None
    last: _Backend | None = None
    expected: int = 0  # ReadyForQuery messages that are still to come
    unheard: int = 0  # of those, at the front: answers to what we asked ourselves
    open_batch: bool = False  # whether something was sent after the last Sync
    statements: dict[bytes, bytes] = field(default_factory=dict)
    portals: dict[bytes, bytes] = field(default_factory=dict)
    held: list[bytes] | None = None  # answers kept back, as that to a COMMIT is to be lost

    def cut(self) -> None:
        self.writer.transport.abort()

    def send(self, message: bytes) -> None:
        if self.held is None:
            self.writer.write(message)
        else:
            self.held.append(message)

    def catch_up(self) -> None:
        """Send what was kept back: the COMMIT failed, or somebody else's answer was lost first."""
        if self.held is not None:
            self.writer.write(b"".join(self.held))
            self.held = None

    def commits(self, kind: bytes, body: bytes) -> bool:
        """Whether this message makes the server commit. Follows what the extended protocol gives names to."""
        if kind == b"Q":
            return _COMMIT.search(body) is not None
        names = body.split(b"\0", 2)
        if kind == b"P":
            self.statements[names[0]] = names[1]
        elif kind == b"B":
            self.portals[names[0]] = self.statements.get(names[1], b"")
        return kind == b"E" and _COMMIT.search(self.portals.get(names[0], b"")) is not None


@dataclass
class _Faults:
    """What is to go wrong, until it does."""

    drop: threading.Event | None = None
    cut: threading.Event | None = None


class _Pool:
    """The backends of one database and user."""

    def __init__(self, conninfo: str, least: int, most: int, faults: _Faults) -> None:
        self._conninfo, self._least, self._most = conninfo, least, most
        self.faults = faults
        self._all: list[_Backend] = []
        self._idle: list[_Backend] = []  # the longest idle first
        self._opening = 0
        self._freed = asyncio.Event()
        self._reported: dict[str, str] = {}

    async def acquire(self, client: _Client) -> _Backend:
        """A backend for a transaction: never the one that the client had for its last."""
        while True:
            count = len(self._all) + self._opening
            others = [backend for backend in self._idle if backend is not client.last]
            if others and count >= self._least:
                self._idle.remove(others[0])
                return others[0]
            if count < self._most:
                return await self._open()
            self._freed.clear()
            await self._freed.wait()

    def release(self, backend: _Backend) -> None:
        self._idle.append(backend)
        self._freed.set()

    def remove(self, backend: _Backend) -> None:
        for backends in (self._all, self._idle):
            with contextlib.suppress(ValueError):
                backends.remove(backend)
        self._freed.set()

    async def greet(self) -> dict[str, str]:
        """What the server reports of itself to a new client."""
        if not self._reported:
            self.release(await self._open())
        return dict(self._reported)

    async def close(self) -> None:
        while self._opening:
            self._freed.clear()
            await self._freed.wait()
        pumps = [backend.pump for backend in self._all if backend.pump]
        for backend in list(self._all):
            backend.close()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _open(self) -> _Backend:
        self._opening += 1
        try:
            connection = await asyncio.to_thread(lambda: psycopg.connect(self._conninfo))
            reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=os.dup(connection.fileno())))
        except psycopg.OperationalError as error:
            raise Refused(f"server login failed: {error}") from error
        finally:
            self._opening -= 1
            self._freed.set()
        values = {name: connection.pgconn.parameter_status(name.encode()) for name in _REPORTED}
        parameters = {name: value.decode() for name, value in values.items() if value is not None}
        self._reported = parameters
        backend = _Backend(self, connection, reader, writer, dict(parameters))
        self._all.append(backend)
        backend.pump = asyncio.create_task(_answers(backend))
        return backend


class Pooler:
    """What `pooling` gives: the DSN for clients, and faults to order. A hook is for the next COMMIT of any client."""

    def __init__(self, dsn: str, least: int, most: int) -> None:
        with psycopg.connect(dsn) as connection:
            self._user, self._database = connection.info.user, connection.info.dbname
        self._conninfo = make_conninfo(dsn, sslmode="disable", gssencmode="disable")
        self._limits = (least, most)
        self._pools: dict[tuple[str, str], _Pool] = {}
        self._clients: dict[tuple[int, int], _Client] = {}
        self._pids = itertools.count(1)
        self._faults = _Faults()
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    @property
    def dsn(self) -> str:
        return f"postgresql://{self._user}@127.0.0.1:{self._port}/{self._database}"

    @property
    def clients(self) -> int:
        """How many are connected."""
        return len(self._clients)

    def drop_next_commit_answer(self) -> threading.Event:
        """Let the next COMMIT succeed, and cut the client's connection instead of telling it. Set once that is done."""
        self._faults.drop = happened = threading.Event()
        return happened

    def cut_before_commit(self) -> threading.Event:
        """Cut the connection of the next client that wants to COMMIT, unheard by the server. Set once that is done."""
        self._faults.cut = happened = threading.Event()
        return happened

    def cut_all(self) -> None:
        """Cut the connections of all clients, now. Open transactions are rolled back."""

        async def cut() -> None:
            for client in self._clients.values():
                client.cut()

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(cut(), self._loop).result()

    async def serve(self, ready: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=500)
        self._port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._end.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for client in list(self._clients.values()):
            client.cut()
        for pool in self._pools.values():
            await pool.close()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def stop(self) -> None:
        assert self._loop is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(reader, writer)
        key = (next(self._pids), secrets.randbits(31))
        try:
            if await self._welcome(client, key):
                self._clients[key] = client
                await self._messages(client)
        except Refused as refusal:
            writer.write(_error(str(refusal)))
        except _GONE:
            pass
        finally:
            self._clients.pop(key, None)
            if client.backend is not None:
                client.backend.close()
            writer.close()
            with contextlib.suppress(*_GONE):
                await writer.wait_closed()

    async def _welcome(self, client: _Client, key: tuple[int, int]) -> bool:
        """Answer the startup of a client. False if it only came to cancel something."""
        while True:
            length, code = struct.unpack("!ii", await client.reader.readexactly(8))
            body = await client.reader.readexactly(length - 8)
            if code not in {_SSL, _GSS}:
                break
            client.writer.write(b"N")
        if code == _CANCEL:
            target = self._clients.get(struct.unpack("!ii", body[:8]))
            if target is not None and target.backend is not None:
                await asyncio.to_thread(target.backend.connection.cancel_safe)
            return False
        if code != _PROTOCOL:
            raise Refused(f"unsupported protocol version: {code >> 16}.{code & 0xFFFF}")
        words = [word.decode() for word in body.split(b"\0")]
        asked = dict(zip(words[:-2:2], words[1:-1:2], strict=False))
        client.pool = self._pool(asked.pop("user"), asked.pop("database", self._database))
        names = {name.lower(): name for name in _TRACKED}
        for name in asked:
            if name.lower() not in names:
                raise Refused(f"unsupported startup parameter: {name}")
        told = await client.pool.greet() | {names[name.lower()]: value for name, value in asked.items()}
        client.parameters = {name: told[name] for name in _TRACKED if name in told}
        statuses = [_message(b"S", f"{name}\0{value}\0".encode()) for name, value in told.items()]
        identity = _message(b"K", struct.pack("!ii", *key))
        client.writer.write(b"".join([_message(b"R", bytes(4)), *statuses, identity, _message(b"Z", b"I")]))
        return True

    def _pool(self, user: str, database: str) -> _Pool:
        if (user, database) not in self._pools:
            conninfo = make_conninfo(self._conninfo, user=user, dbname=database)
            self._pools[user, database] = _Pool(conninfo, *self._limits, self._faults)
        return self._pools[user, database]

    async def _messages(self, client: _Client) -> None:
        """Pass on what the client sends, until it leaves."""
        assert client.pool is not None
        while True:
            kind, body = await _receive(client.reader)
            if kind == b"X":
                return
            if client.backend is None:
                _assign(client, await client.pool.acquire(client))
            backend = client.backend
            assert backend is not None
            if client.commits(kind, body) and self._fails(client):
                return
            client.open_batch = kind not in {b"Q", b"S", b"F"}
            client.expected += not client.open_batch
            backend.writer.write(_message(kind, body))
            await backend.writer.drain()

    def _fails(self, client: _Client) -> bool:
        """Whether the COMMIT is not to reach the server. If its answer is to be lost, we begin to keep answers back."""
        if self._faults.cut is not None:
            happened, self._faults.cut = self._faults.cut, None
            assert client.backend is not None
            client.backend.close()
            client.cut()
            happened.set()
            return True
        if self._faults.drop is not None:
            client.held = []
        return False


def _assign(client: _Client, backend: _Backend) -> None:
    """Give the client the backend, and the backend the client's parameters, ahead of whatever it is about to send."""
    client.backend = client.last = backend
    backend.client = client
    wanted = {name: value for name, value in client.parameters.items() if backend.parameters.get(name) != value}
    if wanted:
        quoted = ["SET {} = '{}'".format(name, value.replace("'", "''")) for name, value in wanted.items()]
        backend.writer.write(_message(b"Q", ";".join(quoted).encode() + b"\0"))
        client.expected += 1
        client.unheard += 1


async def _answers(backend: _Backend) -> None:
    """Pass on what the server sends to whom it concerns, as long as the backend lives."""
    try:
        while True:
            kind, body = await _receive(backend.reader)
            client = backend.client
            if kind == b"S":
                _note(backend, body)
            if client is not None and kind != b"A":
                _answer(backend, client, kind, body)
                with contextlib.suppress(*_GONE):  # a client that is gone is noticed where it is read from
                    await client.writer.drain()
    except _GONE:
        pass
    finally:
        backend.close()
        if backend.client is not None:
            backend.client.backend = None
            backend.client.catch_up()
            backend.client.writer.close()


def _note(backend: _Backend, body: bytes) -> None:
    name, value = (word.decode() for word in body.split(b"\0")[:2])
    backend.parameters[name] = value
    if backend.client is not None and name in _TRACKED:
        backend.client.parameters[name] = value


def _answer(backend: _Backend, client: _Client, kind: bytes, body: bytes) -> None:
    ready = kind == b"Z"
    client.expected -= ready
    if client.unheard:
        client.unheard -= ready
        if kind != b"E":
            return
    client.send(_message(kind, body))
    faults = backend.pool.faults
    if client.held is not None and faults.drop is not None and kind == b"C" and body.startswith(b"COMMIT"):
        happened, faults.drop = faults.drop, None
        client.held.clear()
        client.cut()
        happened.set()
    if ready and not client.expected and not client.open_batch:
        client.catch_up()
        if body == b"I":
            backend.client = client.backend = None
            backend.pool.release(backend)


async def _receive(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    kind, length = struct.unpack("!ci", await reader.readexactly(5))
    return kind, await reader.readexactly(length - 4)


def _message(kind: bytes, body: bytes) -> bytes:
    return struct.pack("!ci", kind, len(body) + 4) + body


def _error(text: str) -> bytes:
    fields = [b"SFATAL", b"VFATAL", b"C08P01", b"M" + text.encode()]
    return _message(b"E", b"\0".join(fields) + b"\0\0")


@contextlib.contextmanager
def pooling(dsn: str, backends: int = 3, most: int = 20) -> Iterator[Pooler]:
    """A pooler before the server of this DSN, with so many backends and, if all are taken, more up to a limit."""
    assert backends >= 2, "with one backend, no transaction could have another than the one before"
    pooler = Pooler(dsn, backends, most)
    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(pooler.serve(ready)), name="pooler")
    thread.start()
    ready.wait()
    try:
        yield pooler
    finally:
        pooler.stop()
        thread.join()
