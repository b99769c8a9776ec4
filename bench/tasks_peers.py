"""What bench/tasks.py measures: queues of tasks that do nothing, ours and those of others, behind one interface.

A handler writes when it began and which task it is to a pipe: 16 bytes, the same for each queue. So what is measured is
the way from `create` to the first line of a handler, across any number of processes.

- procrastinate runs on the same Postgres server, with as many jobs at a time for each process.
- huey runs on a SQLite file with fsync, and threads. It polls, and a task whose worker dies is lost.
"""

from __future__ import annotations

import abc
import asyncio
import os
import struct
import sys
import time
from typing import Any

import huey
import procrastinate

from byssus.checkpointer import checkpointer_for
from byssus.worker import TaskContext, Worker

RECORD = struct.Struct("dq")  # when a task began, by the clock that all processes share, and its number
AT_ONCE = 8  # tasks of a process
_GROUP = 500  # creations under way at a time


def _note(number: int) -> None:
    os.write(int(sys.argv[3]), RECORD.pack(time.monotonic(), number))


class Queue(abc.ABC):
    """A queue at a place. `name` is how a worker is told of it."""

    name: str

    def __init__(self, place: str) -> None:
        self.place = place

    @abc.abstractmethod
    async def open(self) -> None: ...

    @abc.abstractmethod
    async def create(self, number: int) -> None:
        """Create a task, durably."""

    @abc.abstractmethod
    async def fill(self, count: int) -> None:
        """Create many tasks, the fastest way that there is."""

    @abc.abstractmethod
    async def close(self) -> None: ...

    @abc.abstractmethod
    def work(self) -> None:
        """Run tasks for ever."""


class Ours(Queue):
    name = "byssus"

    async def open(self) -> None:
        self._cp = await checkpointer_for(self.place).open()

    async def create(self, number: int) -> None:
        await self._cp.create_task(None, "noop", number)

    async def fill(self, count: int) -> None:
        for first in range(0, count, _GROUP):
            await asyncio.gather(*(self.create(number) for number in range(first, min(first + _GROUP, count))))

    async def close(self) -> None:
        await self._cp.close()

    def work(self) -> None:
        worker = Worker(self.place, concurrency=AT_ONCE)

        @worker.task("noop")
        async def noop(_: TaskContext, number: int) -> None:
            _note(number)

        asyncio.run(worker.run())


class Procrastinate(Queue):
    name = "procrastinate"

    def __init__(self, place: str) -> None:
        super().__init__(place)
        connector = procrastinate.PsycopgConnector(conninfo=place)
        self._app: Any = procrastinate.App(connector=connector)

        async def noop(number: int) -> None:
            _note(number)

        self._noop: Any = self._app.task(name="noop")(noop)

    async def open(self) -> None:
        await self._app.open_async()
        if not await self._app.check_connection_async():
            await self._app.schema_manager.apply_schema_async()

    async def create(self, number: int) -> None:
        await self._noop.defer_async(number=number)

    async def fill(self, count: int) -> None:
        for first in range(0, count, _GROUP):
            numbers = range(first, min(first + _GROUP, count))
            await self._noop.batch_defer_async(*({"number": number} for number in numbers))

    async def close(self) -> None:
        await self._app.close_async()

    def work(self) -> None:
        async def main() -> None:
            async with self._app.open_async():
                await self._app.run_worker_async(concurrency=AT_ONCE)

        asyncio.run(main())


class Huey(Queue):
    name = "huey"

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self._huey: Any = huey.SqliteHuey(filename=place, fsync=True, results=False, timeout=30)

        def noop(number: int) -> None:
            _note(number)

        self._noop: Any = self._huey.task()(noop)

    async def open(self) -> None:
        pass

    async def create(self, number: int) -> None:
        self._noop(number)

    async def fill(self, count: int) -> None:
        storage = self._huey.storage
        with storage.db(commit=True) as cursor:
            for number in range(count):
                data = self._huey.serialize_task(self._noop.s(number))
                cursor.execute("insert into task (queue, data, priority) values (?, ?, 0)", (storage.name, data))

    async def close(self) -> None:
        self._huey.storage.close()

    def work(self) -> None:
        self._huey.create_consumer(workers=AT_ONCE, periodic=False, initial_delay=0.01, max_delay=0.05).run()


QUEUES: dict[str, type[Queue]] = {each.name: each for each in (Ours, Procrastinate, Huey)}


def main() -> None:
    """A worker: its arguments are the name of the queue, the place, and the descriptor of the pipe."""
    QUEUES[sys.argv[1]](sys.argv[2]).work()
