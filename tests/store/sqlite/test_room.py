"""On a small disk the WAL can always be folded, and a full one is left by deleting something."""

from __future__ import annotations

import os
from pathlib import Path

import apsw
import pytest

from byssus.checkpointer import SQLiteCheckpointer
from byssus.errors import StoreFull
from byssus.messages import UserMessage
from tests.support import processes
from tests.support.agents import within

SMALL_DISK = """
    from byssus.checkpointer import *
    from byssus.messages import UserMessage

    logging.disable()  # that an erasure waits for room is a warning, and the result says it too
    directory, size = sys.argv[1], int(sys.argv[2])
    path = os.path.join(directory, "a.db")

    def wal():
        return os.stat(f"{path}-wal").st_size

    async def fill(cp, name):
        count = 0
        while True:
            try:
                await cp.append(name.format(count % 20), UserMessage(f"{count} " + "x" * size))
            except StoreFull as error:
                assert path in str(error)
                return count
            count += 1

    async def counts(cp, *names):
        return [len((await cp.load(name)).messages) for name in names]

    async def main():
        async with SQLiteCheckpointer(path) as cp:
            for number in range(20):
                about = CheckpointMetadata("t7", f"c{number}", number)
                await cp.put(Checkpoint(about, [UserMessage("y" * 2_000)] * number))
            first = await fill(cp, "t{}")
            assert first > 20, first
            before = await counts(cp, "t2", "t3")
            await cp.delete_thread("t0")  # over and over: each of them frees some room
            assert await fill(cp, "more") > 0
            await cp.delete_thread("t1")
            assert (await cp.prune("t7", keep_last(1))).checkpoints
            erased = await cp.erase_thread("t4")
            assert erased.messages > 0
            assert erased.is_gone or "no room to rewrite the files" in erased.note
            assert await fill(cp, "more") > 0
            assert await counts(cp, "t2", "t3") == before
        assert os.listdir(directory) == ["a.db"], os.listdir(directory)  # all of it was folded
        async with SQLiteCheckpointer(path) as cp:
            assert await cp.load("t0") is None
            assert await counts(cp, "t2", "t3") == before
            await cp.delete_thread("t2")
            assert await fill(cp, "again") > 0
            assert (await cp.check())["ok"]

    asyncio.run(main())
"""


@pytest.mark.processes
@pytest.mark.parametrize(("megabytes", "size"), [(3, 2_000), (6, 300), (10, 60_000), (20, 5_000)])
def test_a_small_disk_that_is_full_is_left_by_deleting_something(tmp_path: Path, megabytes: int, size: int) -> None:
    wrapper = processes.with_mounts(f"mount -t tmpfs -o size={megabytes}m tmpfs '{tmp_path}'")
    if wrapper is not None:  # where no mounts are allowed, the test below has to do
        processes.run(SMALL_DISK, tmp_path, size, wrapper=wrapper)


class Disk:
    """A disk of so many bytes, for those who ask how many are free."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory = directory
        self._size = size

    def statvfs(self, path: str) -> os.statvfs_result:
        used = sum(file.stat().st_size for file in self._directory.iterdir())
        free = max(0, self._size - used) // 4096
        return os.statvfs_result((4096, 4096, self._size // 4096, free, free, 0, 0, 0, 0, 255))


def test_a_store_takes_no_more_than_the_disk_has_and_deleting_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 6_000_000
    monkeypatch.setattr(os, "statvfs", Disk(tmp_path, size).statvfs)

    async def fill(cp: SQLiteCheckpointer) -> int:
        count, most = 0, 0
        with pytest.raises(StoreFull, match=r"a\.db"):
            while True:
                await cp.append(f"t{count % 5}", UserMessage("x" * 5_000))
                count += 1
                most = max(most, sum(file.stat().st_size for file in tmp_path.iterdir()))
        assert most <= size
        return count

    async def main() -> None:
        async with SQLiteCheckpointer(tmp_path / "a.db") as cp:
            first = await fill(cp)
            assert first * 5_000 > size // 2, "most of the disk is of use"
            await cp.delete_thread("t0")
            assert await fill(cp) > 0
            monkeypatch.undo()  # somebody has made room
            await cp.append("t1", [UserMessage("x" * 5_000) for _ in range(2_000)])

    within(main())


def test_with_plenty_of_room_nothing_is_limited(tmp_path: Path) -> None:
    async def main() -> None:
        async with SQLiteCheckpointer(tmp_path / "a.db") as cp:
            await cp.append("t", UserMessage("x"))
            limit = await cp.store.write(lambda tx: tx.one("PRAGMA max_page_count"))
            assert limit is not None
            assert limit[0] >= 2**30

    within(main())


def test_a_transaction_that_is_too_large_for_the_disk_leaves_the_room_that_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", Disk(tmp_path, 6_000_000).statvfs)

    async def main() -> None:
        async with SQLiteCheckpointer(tmp_path / "a.db") as cp:
            await cp.append("t", UserMessage("before"))
            with pytest.raises(StoreFull):
                await cp.append("t", [UserMessage("x" * 100_000) for _ in range(100)])
            await cp.append("t", UserMessage("after"))
            thread = await cp.load("t")
            assert thread is not None
            assert [message.text for message in thread.messages] == ["before", "after"]

    within(main())
    connection = apsw.Connection(str(tmp_path / "a.db"))
    assert connection.pragma("integrity_check") == "ok"
    connection.close()
