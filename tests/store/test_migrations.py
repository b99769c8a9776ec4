"""Databases of older versions, and processes with an older version beside newer ones."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import pytest

from byssus import UserMessage
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, SQLiteCheckpointer
from byssus.errors import StoreUnusable
from byssus.store import schema
from byssus.store.database import Store, Tx
from tests.support import processes
from tests.support.checkpointers import texts, with_cp
from tests.support.databases import Database
from tests.support.postgres import wait_until
from tests.support.stores import PATIENCE, appending, stored

OLD = "2026-01-01T00:00:00.000000Z"


def make_old(path: Path, version: int) -> None:
    """A file with one thread, as a version before checkpoints has left it."""
    connection = apsw.Connection(str(path))
    for migration in schema.migrations("sqlite", key="INTEGER PRIMARY KEY"):
        if migration.number <= version:
            connection.execute(migration.sql)
    connection.pragma("user_version", version)
    connection.pragma("application_id", 0x42595353)
    connection.execute(
        "INSERT INTO threads (key, namespace, id, branch, head, version, message_count, extra, created_at, updated_at)"
        " VALUES (1, '', 't', 3, 1, 2, 1, '{}', ?, ?)",
        (OLD, OLD),
    )
    connection.execute("INSERT INTO branches (key, thread) VALUES (3, 1)")
    connection.execute("INSERT INTO segments (branch, source, after_seq, upto_seq) VALUES (3, 3, 0, ?)", (2**62,))
    connection.execute(
        "INSERT INTO messages (branch, seq, id, role, body, created_at) VALUES (3, 1, 'm', 'user', ?, ?)",
        ('{"role":"user","content":[{"type":"text","text":"old"}]}', OLD),
    )
    connection.close()


async def use_checkpoints(cp: Checkpointer, thread_id: str, first: str) -> None:
    """A thread that never had any gets some, is forked and rewound."""
    assert await cp.list_checkpoints(thread_id) == []
    await cp.fork(thread_id, new_id=f"{thread_id} before")
    await cp.put(Checkpoint(CheckpointMetadata(thread_id, "c1", 1), [UserMessage(first)]))
    await cp.put(Checkpoint(CheckpointMetadata(thread_id, "c2", 2), [UserMessage("another")]))
    assert [one.checkpoint_id for one in await cp.list_checkpoints(thread_id)] == ["c2", "c1"]
    await cp.fork(thread_id, at="c1", new_id=f"{thread_id} at c1")
    await cp.rewind(thread_id, to="c1")
    for name in (thread_id, f"{thread_id} before", f"{thread_id} at c1"):
        assert await texts(cp, name) == [first]
        await cp.delete_thread(name)
    assert await cp.load(thread_id) is None


def test_a_database_from_before_checkpoints_has_them_now(tmp_path: Path) -> None:
    async def main(path: Path) -> None:
        async with SQLiteCheckpointer(path) as cp:
            await use_checkpoints(cp, "t", "old")

    for version in (1, 2, 4):
        make_old(tmp_path / f"{version}.db", version)
        asyncio.run(main(tmp_path / f"{version}.db"))


def test_a_thread_that_an_older_process_makes_beside_newer_ones_can_have_them_too(database: Database) -> None:
    """That one knows nothing of lines, and leaves the column as it is."""

    def forget_line(tx: Tx) -> None:
        tx.run("UPDATE threads SET line = 0")

    async def use(cp: Checkpointer) -> None:
        for number in range(3):
            await cp.append(f"t{number}", UserMessage("hi"))
        await cp.store.write(forget_line)
        await use_checkpoints(cp, "t0", "hi")
        await cp.rewind("t1", to=0)
        assert await texts(cp, "t1") == []
        await cp.delete_thread("t2")
        assert await cp.load("t2") is None

    with_cp(database, use)


# --- an older process beside a newer one ------------------------------------------------------------------------------

WRITERS = 4

# The next version: it opens the database, which migrates it, and says how many messages there are, and how many of them
# its new index lacks.
NEXT_VERSION = """
    from byssus.store import opening, schema
    from byssus.store.sqlite import file

    known = schema.migrations

    def migrations(dialect, **types):
        found = known(dialect, **types)
        sql = "CREATE TABLE newer_index (key BIGINT NOT NULL); INSERT INTO newer_index SELECT key FROM messages;"
        return (*found, schema.Migration(found[-1].number + 1, "next.sql", sql))

    schema.migrations = file.migrations = migrations  # before the server module imports it: in a new Python
    store = opening.open(sys.argv[1])
    lacking = "SELECT COUNT(*) FROM messages WHERE key NOT IN (SELECT key FROM newer_index)"
    print(*store.read_now(lambda tx: tx.one(f"SELECT COUNT(*), ({lacking}) FROM messages")))
    sharing.release(store)
"""


def write_until_refused(store: Store, thread_id: str) -> tuple[int, StoreUnusable]:
    for count in range(10**6):
        try:
            store.write_now(appending("x", thread_id))
        except StoreUnusable as error:
            return count, error
    raise AssertionError("it was never refused")


@pytest.mark.processes
def test_an_older_process_under_load_writes_nothing_once_a_newer_one_has_migrated_the_database(
    database: Database,
) -> None:
    threads = [f"t{number}" for number in range(WRITERS)]
    with database.store() as store, ThreadPoolExecutor(WRITERS) as pool:
        writers = [pool.submit(write_until_refused, store, thread_id) for thread_id in threads]
        wait_until(lambda: all(len(stored(store, thread_id)) > 3 for thread_id in threads), "nothing is written")
        processes.run(NEXT_VERSION, database.place, fresh=True)
        outcomes = [writer.result(PATIENCE) for writer in writers]
    acknowledged = sum(count for count, _ in outcomes)
    assert processes.run(NEXT_VERSION, database.place, fresh=True) == f"{acknowledged} 0"
    with pytest.raises(StoreUnusable, match="newer byssus") as opened, database.store():
        pass
    assert {str(error) for _, error in outcomes} == {str(opened.value)}
