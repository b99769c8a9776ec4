"""An erasure names the backups that were taken before, as long as they may be there."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from byssus import UserMessage
from byssus.checkpointer import Checkpointer, Erased, SQLiteCheckpointer
from byssus.maintenance.backup import backup
from byssus.queries.moving import known_backups
from byssus.queries.moving.known_backups import KnownBackup
from byssus.store import sharing
from byssus.store.database import Tx
from byssus.store.operations import Blocking, to_the_end
from byssus.store.sqlite import store as sqlite
from tests.support.checkpointers import with_cp
from tests.support.databases import Database


async def erase(cp: Checkpointer, name: str = "secret") -> Erased:
    await cp.append(name, UserMessage("to be erased"))
    return await cp.erase_thread(name)


def test_an_erasure_names_the_backups_that_may_still_hold_it_and_what_to_do(database: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer) -> None:
        assert (await erase(cp)).backups == []
        await cp.backup(tmp_path / "monday.db")
        await cp.backup(tmp_path / "tuesday.db")
        await cp.backup(tmp_path / "monday.db", incremental=True)
        erased = await erase(cp)
        assert erased.backups == [str(tmp_path / "monday.db"), str(tmp_path / "tuesday.db")]
        assert "monday.db'" in erased.note
        assert "byssus backup FILE --incremental" in erased.note
        (tmp_path / "monday.db").unlink()
        assert (await erase(cp)).backups == [str(tmp_path / "tuesday.db")]

    with_cp(database, use)


def test_an_erasure_of_a_user_names_them_too(database: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.create_user("Ann", "ann@example.org", user_id="ann")
        await cp.create_session("ann", "trip", session_id="trip")
        await cp.backup(tmp_path / "monday.db")
        assert (await cp.erase_user("ann")).backups == [str(tmp_path / "monday.db")]

    with_cp(database, use)


def test_a_note_stays_short_however_many_there_are(database: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer) -> None:
        for number in range(7):
            await cp.backup(tmp_path / f"{number}.db")
        erased = await erase(cp)
        assert len(erased.backups) == 7
        assert "4.db' and 2 more." in erased.note

    with_cp(database, use)


def test_a_backup_and_what_is_restored_from_it_know_of_no_backups(database: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("hello"))
        await cp.backup(tmp_path / "monday.db")
        await cp.backup(tmp_path / "tuesday.db")
        shutil.copy(tmp_path / "tuesday.db", tmp_path / "used.db")
        async with SQLiteCheckpointer(tmp_path / "used.db") as used:
            assert (await erase(used)).backups == []
        async with SQLiteCheckpointer(tmp_path / "restored.db") as restored:
            await restored.restore(tmp_path / "tuesday.db")
            assert (await erase(restored)).backups == []

    with_cp(database, use)


def add(host: str, path: str, device: str) -> Callable[[Checkpointer], Awaitable[None]]:
    def query(tx: Tx) -> None:
        known_backups.add(tx, KnownBackup(host, path, device))

    async def act(cp: Checkpointer) -> None:
        await cp.store.write(query)

    return act


def test_what_cannot_be_told_to_be_gone_is_named(database: Database, tmp_path: Path) -> None:
    """A disk that is not mounted, and another machine."""

    async def use(cp: Checkpointer) -> None:
        await add(socket.gethostname(), str(tmp_path / "on a disk that is away.db"), "4711")(cp)
        await add(socket.gethostname(), str(tmp_path / "no directory" / "x.db"), "4711")(cp)
        await add("another-machine", "/backups/x.db", "4711")(cp)
        await cp.backup(tmp_path / "monday.db")  # it forgets what is gone, and these are not known to be
        there = "/backups/x.db" if cp.store.base.has_files else "another-machine:/backups/x.db"
        named = ["on a disk that is away.db", "no directory/x.db", there, "monday.db"]
        assert (await erase(cp)).backups == [str(tmp_path / name) if name != there else there for name in named]

    with_cp(database, use)


def test_where_it_cannot_be_recorded_a_backup_is_taken_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = sqlite.open_store(tmp_path / "a.db", busy_seconds=0.1)
    with closing(apsw.Connection(str(tmp_path / "a.db"))) as another:
        another.execute("BEGIN IMMEDIATE")
        made = to_the_end(backup(Blocking(store), tmp_path / "monday.db"))
        another.execute("ROLLBACK")
    assert made["verified"]
    assert "does not know of its backup" in caplog.text
    sharing.release(store)
