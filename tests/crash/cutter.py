"""A wire between clients and a server, for breaking; places on that server, and who waits there for what."""

from __future__ import annotations

import asyncio
import random
import threading
import uuid

import psycopg

from tests.support import postgres


class Cutter:
    """A wire between clients and a server that breaks at any byte, in either direction, and at answers to a COMMIT."""

    def __init__(self, port: int, chance: random.Random, anywhere: float, at_commits: float) -> None:
        self._target, self._chance = port, chance
        self._anywhere, self._at_commits = anywhere, at_commits
        self.is_sharp = False
        self.cuts = self.lost_answers = 0
        self._clients: set[asyncio.StreamWriter] = set()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), name="cutter")

    def __enter__(self) -> Cutter:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    def cut_all(self) -> None:
        """Cut all connections, now."""

        async def cut() -> None:
            for writer in self._clients:
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(cut(), self._loop).result()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=500)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        for writer in self._clients:
            writer.transport.abort()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        self._clients.add(writer)
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._target)
            ends.append(ours)
            pumps = {
                asyncio.ensure_future(self._pump(reader, ours, answers=False)),
                asyncio.ensure_future(self._pump(theirs, writer, answers=True)),
            }
            _, left = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in left:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass
        finally:
            self._clients.discard(writer)
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await reader.read(1 << 16):
            if self.is_sharp and answers and b"COMMIT\0" in data and self._chance.random() < self._at_commits:
                self.lost_answers += 1
                return
            if self.is_sharp and self._chance.random() < self._anywhere:
                self.cuts += 1
                writer.write(data[: self._chance.randrange(len(data) + 1)])
                return
            writer.write(data)
            await writer.drain()


def schema_on(server: postgres.Server, *ports: int) -> postgres.Schema:
    """A new schema, reached over these ports."""
    name = f"chaos_{uuid.uuid4().hex[:12]}"
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports or (server.port,))
    return postgres.Schema(f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write", name)


def number(server: postgres.Server, query: str) -> int:
    """What a query for a number gives."""
    with psycopg.connect(server.dsn()) as connection:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])


def connections(server: postgres.Server) -> int:
    """How many connections byssus has there."""
    return number(server, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'byssus'")


def name_standby(server: postgres.Server, name: str) -> None:
    """Let each COMMIT wait for this standby, which need not be there; an empty name sets free those that wait."""
    (server.data / "standbys.conf").write_text(f"synchronous_standby_names = '{name}'\n")
    server.execute("SELECT pg_reload_conf()")
    query = f"SELECT (current_setting('synchronous_standby_names') = '{name}')::int"
    postgres.wait_until(lambda: number(server, query) == 1, "the setting does not change")


def waiting(server: postgres.Server, event: str) -> int:
    """How many of our connections wait for it: SyncRep for a standby, transactionid for another transaction's end."""
    query = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'byssus' AND wait_event = '{event}'"
    return number(server, query)
