"""A backup is the database as it was at one moment, or it is not there; and it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from byssus import UserMessage
from byssus.accounts import sessions, tool_log, users
from byssus.checkpointer import SQLiteCheckpointer
from byssus.errors import ByssusError, InputError, StoreCorrupt, StoreFull, StoreUnusable
from byssus.maintenance import backup as backups
from byssus.maintenance import check as checking
from byssus.maintenance import copy as copying
from byssus.maintenance import restore as restoring
from byssus.queries.log import listing, memories, threads
from byssus.queries.log.leases import Claim
from byssus.queries.log.threads import MessageRow
from byssus.queries.moving import copying as queries
from byssus.search import index as search_index
from byssus.search import search as searching
from byssus.storage import AgentStorage, BackupResult, RestoreResult
from byssus.store.database import Row, Store, Tx
from byssus.store.operations import Blocking, to_the_end
from byssus.store.sqlite import file as sqlite_file
from byssus.store.sqlite import store as sqlite
from byssus.threads import erasure, retention
from byssus.values.thread_key import ThreadKey
from tests.crash.faults import FULL, failing_writes
from tests.support import forked
from tests.support.backups import Writers, opened, rows_in, say
from tests.support.databases import Database


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE_ROWS", 7)
    monkeypatch.setattr(sqlite_file, "_BACKUP_PAGES", 5)


def fill(store: Store) -> None:
    for number in range(6):
        say(store, f"thread {number}", *(f"{number}.{place} 北京" for place in range(9)))
    user = to_the_end(users.create_user(Blocking(store), "Ann", preferences={"ui": {"theme": "dark"}}))
    to_the_end(tool_log.log_tool_call(Blocking(store), "thread 1", "look", {"a": 1}, "there", 12.5))
    assert user["name"] == "Ann"
    messages = [MessageRow(f"m{n}", "user", f'{{"content":"{n}"}}', 1) for n in range(3)]
    store.write_now(memories.add, ThreadKey("ann", "main"), messages, ["hint", "a"])
    store.write_now(memories.summarize, ThreadKey("ann", "main"), '"a summary"')


def backup(store: Store, path: Path, **options: Any) -> BackupResult:
    return to_the_end(backups.backup(Blocking(store), path, **options))


def restore(store: Store, path: Path, **options: Any) -> RestoreResult:
    return to_the_end(restoring.restore(Blocking(store), path, **options))


def rows_at(path: Path) -> dict[str, list[Row]]:
    with opened(path) as store:
        return rows_in(store)


def files(folder: Path) -> dict[str, bytes]:
    """What is in a folder, but for a live database, which nobody may open while it is in use."""
    found = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith("contract.db")]
    return {file.name: file.read_bytes() for file in found}


# --- backups ----------------------------------------------------------------------------------------------------------


def test_a_backup_holds_every_row_and_is_one_plain_file(store: Store, tmp_path: Path) -> None:
    fill(store)
    target = tmp_path / "backup.db"
    made = backup(store, target)
    assert set(files(tmp_path)) == {"backup.db"}
    assert target.read_bytes()[18:20] == b"\x01\x01"  # it needs no file beside it
    assert made["path"] == str(target)
    assert made["bytes"] == target.stat().st_size
    assert (made["verified"], made["incremental"]) == (True, False)
    assert made["rows"]["messages"] == 57
    assert rows_at(target) == rows_in(store)


def test_a_backup_is_opened_like_any_database(store: Store, tmp_path: Path) -> None:
    say(store, "trip", "hello")
    backup(store, tmp_path / "backup.db")

    async def main() -> list[Any]:
        async with SQLiteCheckpointer(tmp_path / "backup.db") as cp:
            await cp.append("trip", UserMessage("and more"))
            found = await cp.load("trip")
        assert found is not None
        return list(found.messages)

    assert [message.text for message in asyncio.run(main())] == ["hello", "and more"]


def test_an_empty_database_has_a_backup_too(store: Store, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    made = backup(store, tmp_path / "backup.db", progress=lambda *at: heard.append(at))
    assert sum(made["rows"].values()) == 0
    assert heard[-1][0] == heard[-1][1]
    assert rows_at(tmp_path / "backup.db") == rows_in(store)


def test_a_database_in_memory_has_a_backup_too(tmp_path: Path) -> None:
    with opened(":memory:") as store:
        fill(store)
        backup(store, tmp_path / "backup.db")
        say(store, "thread 1", "later")
        made = backup(store, tmp_path / "backup.db", incremental=True)
        assert made["incremental"]
        assert rows_at(tmp_path / "backup.db") == rows_in(store)


def test_nobody_drives_a_thread_in_a_backup(store: Store, tmp_path: Path) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), [], by=Claim("host-a:1 boot", "run 1", 60.0))
    backup(store, tmp_path / "backup.db")
    with opened(tmp_path / "backup.db") as copy:
        assert copy.read_now(lambda tx: tx.one("SELECT lease_owner, lease_until FROM threads")) == (None, None)
        say(copy, "t", "free")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777], ids=oct)
def test_a_backup_is_for_its_owner_alone_from_its_first_byte_on(store: Store, tmp_path: Path, umask: int) -> None:
    fill(store)
    folder = tmp_path / "backups"
    folder.mkdir()
    seen: set[int] = set()

    def look(*_: int) -> None:
        seen.update(stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir())

    before = os.umask(umask)
    try:
        backup(store, folder / "backup.db", progress=look)
        backup(store, folder / "backup.db", incremental=True, progress=look)
    finally:
        os.umask(before)
    look()
    assert seen == {0o600}


def test_a_copy_and_an_earlier_backup_give_nobody_more_rights(store: Store, tmp_path: Path) -> None:
    fill(store)
    backup(store, tmp_path / "backup.db")
    (tmp_path / "backup.db").chmod(0o640)  # the owner's decision
    backup(store, tmp_path / "backup.db", incremental=True)
    copying.copy(str(tmp_path / "backup.db"), str(tmp_path / "copy.db"))
    rights = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("backup.db", "copy.db")}
    assert rights == {"backup.db": 0o640, "copy.db": 0o600}


# --- what was deleted ------------------------------------------------------------------------------------------------


def say_secrets(store: Store, word: str) -> None:
    """A thread with the word in its messages, small and large, and in the index for search."""
    for number in range(60):
        say(store, "secret", f"{number} {word} {'x' * number * 100}")
        say(store, "kept", f"{number} {'y' * number * 90}")
    to_the_end(search_index.index(Blocking(store)))


def test_a_backup_after_a_deletion_holds_no_byte_of_what_was_deleted(store: Store, tmp_path: Path) -> None:
    say_secrets(store, "needle-3f2a81c0")
    to_the_end(retention.delete_thread(Blocking(store), "secret"))
    backup(store, tmp_path / "backup.db")
    assert b"needle-3f2a81c0" not in (tmp_path / "backup.db").read_bytes()
    assert b"3f2a81c0" not in (tmp_path / "backup.db").read_bytes()  # a word of the index
    with opened(tmp_path / "backup.db") as file:
        assert rows_in(file) == rows_in(store)
        assert to_the_end(checking.check(Blocking(file)))["ok"]
        assert len(to_the_end(searching.search(Blocking(file), "y" * 90))) == 1


@pytest.mark.parametrize("way", ["delete", "erase"])
def test_an_incremental_backup_holds_no_byte_of_what_was_deleted_since(store: Store, tmp_path: Path, way: str) -> None:
    say_secrets(store, "needle-3f2a81c0")
    target = tmp_path / "backup.db"
    backup(store, target)
    assert b"needle-3f2a81c0" in target.read_bytes()
    remove = erasure.erase_thread if way == "erase" else retention.delete_thread
    to_the_end(remove(Blocking(store), "secret"))
    backup(store, target, incremental=True)
    assert b"3f2a81c0" not in target.read_bytes()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("backup.db")] == ["backup.db"]
    assert rows_at(target) == rows_in(store)


def test_an_incremental_backup_holds_no_byte_of_what_was_changed_since(store: Store, tmp_path: Path) -> None:
    say_secrets(store, "needle")
    for text in ("title-3f2a81c0", "harmless"):
        to_the_end(sessions.update_session(Blocking(store), "secret", title=text, metadata={text: text * 500}))
        backup(store, tmp_path / "backup.db", incremental=True)
        assert (b"3f2a81c0" in (tmp_path / "backup.db").read_bytes()) == (text != "harmless")


@pytest.mark.parametrize("incremental", [False, True])
def test_progress_never_goes_back_and_ends_at_its_end(store: Store, tmp_path: Path, incremental: bool) -> None:
    fill(store)
    if incremental:
        backup(store, tmp_path / "backup.db")
        say(store, "thread 2", "more")
    heard: list[tuple[int, int]] = []
    backup(store, tmp_path / "backup.db", incremental=incremental, progress=lambda *at: heard.append(at))
    done = [at for at, _ in heard]
    assert done == sorted(done)
    assert len({total for _, total in heard}) == 1
    assert len(set(done)) > 5
    assert heard[-1][0] == heard[-1][1]


def said(store: Store) -> dict[str, list[str]]:
    def look(tx: Tx) -> dict[str, list[str]]:
        rows = tx.all(
            "SELECT t.id, m.id FROM threads t JOIN messages m ON m.branch = t.branch WHERE t.head > 0"
            " ORDER BY t.id, m.seq"
        )
        return {thread: [message for name, message in rows if name == thread] for thread, _ in rows}

    return store.read_now(look)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_backup_is_of_one_moment_while_others_write(store: Store, tmp_path: Path, incremental: bool) -> None:
    fill(store)
    target = tmp_path / "backup.db"
    if incremental:
        backup(store, target)
    calls: list[int] = []

    def hear(done: int, _: int) -> None:
        calls.append(done)
        if len(calls) <= 12:
            writers.let_write()

    with Writers(store) as writers:
        backup(store, target, incremental=incremental, progress=hear)
    assert len(calls) > 12
    with opened(tmp_path / "restored.db") as restored:
        restore(restored, target)
        there, live = said(restored), said(store)
    for number in range(4):
        one, other = there[f"{number}a"], there[f"{number}b"]
        assert one == other == [str(place + 1) for place in range(len(one))]
        assert 0 < len(one) < len(live[f"{number}a"])


# --- refusals ---------------------------------------------------------------------------------------------------------


def others_database(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE diary (entry)")
    connection.close()


def our_database(path: Path) -> None:
    with opened(path) as store:
        say(store, "theirs", "hello")
    sqlite_file.fold(str(path))


def others_backup(path: Path) -> None:
    with opened(path.with_name("others.db")) as store:
        say(store, "theirs", "hello")
        backup(store, path)


THERE: dict[str, tuple[Callable[[Path], object], type[ByssusError], str]] = {
    "a text file": (lambda path: path.write_text("dear diary\n" * 500), StoreUnusable, "is not a SQLite database"),
    "an empty file": (lambda path: path.touch(), InputError, "is empty, and no earlier backup"),
    "another program's database": (others_database, StoreUnusable, "another program's database"),
    "a database that is no backup": (our_database, InputError, "is a database, and no backup"),
    "a backup of another database": (others_backup, InputError, "is a backup of another database .*others.db"),
}


@pytest.mark.parametrize("what", THERE)
@pytest.mark.parametrize("incremental", [False, True])
def test_what_is_there_is_not_written_over(store: Store, tmp_path: Path, what: str, incremental: bool) -> None:
    fill(store)
    make, kind, told = THERE[what]
    target = tmp_path / "there"
    make(target)
    before = files(tmp_path)
    with pytest.raises(kind if incremental else InputError, match=told if incremental else "does not overwrite"):
        backup(store, target, incremental=incremental)
    after = files(tmp_path)
    assert set(after) == set(before)
    if what != "a database that is no backup" and what != "a backup of another database":
        assert after == before
    elif not incremental:
        assert after["there"] == before["there"]
    else:  # it was opened, to look
        assert len(rows_at(target)["threads"]) == 1


@pytest.mark.parametrize("incremental", [False, True])
def test_the_database_itself_is_no_target(tmp_path: Path, incremental: bool) -> None:
    with opened(tmp_path / "live.db") as store:
        fill(store)
        before = rows_in(store)
        (tmp_path / "other name.db").symlink_to(tmp_path / "live.db")
        for name in ("live.db", "other name.db"):
            with pytest.raises(InputError, match="the database itself" if incremental else "does not overwrite"):
                backup(store, tmp_path / name, incremental=incremental)
        assert rows_in(store) == before


@pytest.mark.parametrize(
    ("path", "kind", "told"),
    [
        ("missing/backup.db", InputError, "there is no directory .*missing"),
        ("folder", StoreUnusable, "is a directory"),
        ("", InputError, "a backup is a file"),
        (":memory:", InputError, "a backup is a file"),
        ("postgresql://localhost/x", InputError, "use 'byssus copy'"),
        ("a\0b", InputError, "a backup is a file"),
        (None, InputError, "a backup is a file"),
        (5, InputError, "a backup is a file"),
    ],
)
def test_a_target_that_cannot_be_is_a_clear_error(
    store: Store, tmp_path: Path, path: Any, kind: type[ByssusError], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(kind, match=told):
        backup(store, path)
    assert files(tmp_path) == {}
    assert not (tmp_path / "missing").exists()


def test_an_unfinished_copy_has_no_backup(store: Store, tmp_path: Path) -> None:
    store.write_now(queries.begin, "somewhere")
    with pytest.raises(InputError, match="is itself an unfinished copy of somewhere"):
        backup(store, tmp_path / "backup.db")
    assert files(tmp_path) == {}


def test_of_two_backups_at_once_into_one_file_one_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    both = threading.Barrier(2)
    publish = backups._publish

    def together(part: str, target: str) -> None:
        both.wait(60)
        publish(part, target)

    monkeypatch.setattr(backups, "_publish", together)
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(backup(store, tmp_path / "backup.db")["verified"])
        except InputError as error:
            outcomes.append(str(error))

    several = [threading.Thread(target=run) for _ in range(2)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert True in outcomes
    assert any("does not overwrite" in str(outcome) for outcome in outcomes)
    assert set(files(tmp_path)) == {"backup.db"}
    assert rows_at(tmp_path / "backup.db") == rows_in(store)


def test_a_file_system_without_links_serves_too(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    fill(store)
    backup(store, tmp_path / "backup.db")
    assert set(files(tmp_path)) == {"backup.db"}
    assert rows_at(tmp_path / "backup.db") == rows_in(store)
    with pytest.raises(InputError, match="does not overwrite"):
        backup(store, tmp_path / "backup.db")


# --- incremental ------------------------------------------------------------------------------------------------------

CHANGES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "a message that was changed": ("UPDATE messages SET body = '{}' WHERE key = 3",),
    "messages that were deleted": ("DELETE FROM messages WHERE key BETWEEN 10 AND 30",),
    "all messages deleted": ("DELETE FROM messages",),
    "names exchanged": (
        "UPDATE threads SET id = 'x' WHERE id = 'thread 1'",
        "UPDATE threads SET id = 'thread 1' WHERE id = 'thread 2'",
        "UPDATE threads SET id = 'thread 2' WHERE id = 'x'",
    ),
    "a thread that is gone": (
        "DELETE FROM messages WHERE branch = 3",
        "DELETE FROM segments WHERE branch = 3",
        "DELETE FROM branches WHERE key = 3",
        "DELETE FROM threads WHERE key = 3",
    ),
    "a user that is gone": ("DELETE FROM users",),
    "a mark that was changed": ("UPDATE marks SET mark = 'new' WHERE key = 2",),
    "a mark that was moved": ("UPDATE marks SET message = 1, branch = 1 WHERE key = 1",),
    "marks that were deleted": ("DELETE FROM marks",),
    "a marked message that is gone": ("DELETE FROM messages WHERE key IN (SELECT message FROM marks)",),
    "a summary": ("UPDATE branches SET summary = '\"new\"' WHERE summary <> ''",),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_incremental_backup_writes_what_differs(store: Store, tmp_path: Path, change: str) -> None:
    fill(store)
    target = tmp_path / "backup.db"
    backup(store, target)

    def act(tx: Tx) -> None:
        for statement in CHANGES[change]:
            tx.run(statement)

    store.write_now(act)
    if change != "nothing":
        say(store, "thread 5", "one more")
    made = backup(store, target, incremental=True)
    assert rows_at(target) == rows_in(store)
    assert made["written"] < 12
    assert (made["written"] == 0) == (change == "nothing")
    again = backup(store, tmp_path / "whole.db")
    assert again["sha256"] == made["sha256"]


def test_an_incremental_backup_without_a_file_is_a_whole_one(store: Store, tmp_path: Path) -> None:
    fill(store)
    assert backup(store, tmp_path / "backup.db", incremental=True)["incremental"] is False
    assert rows_at(tmp_path / "backup.db") == rows_in(store)


def test_an_incremental_backup_stays_one_plain_file(store: Store, tmp_path: Path) -> None:
    fill(store)
    target = tmp_path / "backup.db"
    backup(store, target)
    say(store, "thread 5", "one more")
    backup(store, target, incremental=True)
    assert set(files(tmp_path)) == {"backup.db"}
    assert target.read_bytes()[18:20] == b"\x01\x01"


def test_a_backup_that_somebody_has_worked_with_is_not_written_to(store: Store, tmp_path: Path) -> None:
    fill(store)
    target = tmp_path / "backup.db"
    backup(store, target)
    with opened(target) as used:
        say(used, "mine", "do not lose this")
    before = rows_at(target)
    with pytest.raises(
        InputError, match=r"is not what it was when the backup was taken.*another program has changed it"
    ):
        backup(store, target, incremental=True)
    assert rows_at(target) == before


def test_a_backup_of_a_backup_is_not_taken_for_one_of_the_original(store: Store, tmp_path: Path) -> None:
    fill(store)
    backup(store, tmp_path / "first.db")
    with opened(tmp_path / "first.db") as used:
        say(used, "mine", "do not lose this")
        backup(used, tmp_path / "second.db")
        say(used, "mine", "nor this")
        assert backup(used, tmp_path / "second.db", incremental=True)["incremental"]
    with pytest.raises(InputError, match="is a backup of another database"):
        backup(store, tmp_path / "second.db", incremental=True)


def test_a_restored_database_begins_with_a_backup_of_its_own(store: Store, tmp_path: Path) -> None:
    fill(store)
    backup(store, tmp_path / "backup.db")
    with opened(tmp_path / "restored.db") as restored:
        restore(restored, tmp_path / "backup.db")
        with pytest.raises(InputError, match="is a backup of another database"):
            backup(restored, tmp_path / "backup.db", incremental=True)
        backup(restored, tmp_path / "another.db")
    assert rows_at(tmp_path / "another.db") == rows_in(store)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 4, 15, 40])
def test_a_full_disk_leaves_no_file(store: Store, tmp_path: Path, at: int) -> None:
    fill(store)
    before = rows_in(store)
    with failing_writes(FULL) as fault:
        fault.arm(at)
        with pytest.raises(StoreFull, match="no room left to write"):
            backup(store, tmp_path / "backup.db")
        fault.heal()
    assert files(tmp_path) == {}
    assert rows_in(store) == before
    backup(store, tmp_path / "backup.db")


@pytest.mark.parametrize("at", [1, 3])
def test_a_full_disk_leaves_the_earlier_backup(store: Store, tmp_path: Path, at: int) -> None:
    fill(store)
    target = tmp_path / "backup.db"
    backup(store, target)
    before = rows_in(store)
    say(store, "new", *map(str, range(50)))
    with failing_writes(FULL) as fault:
        fault.arm(at)
        with pytest.raises(StoreFull):
            backup(store, target, incremental=True)
        fault.heal()
    assert rows_at(target) == before
    backup(store, target, incremental=True)
    assert rows_at(target) == rows_in(store)


@pytest.mark.parametrize("share", [0.1, 0.6, 0.9])
@pytest.mark.parametrize("incremental", [False, True])
def test_a_backup_whose_progress_fails_is_not_there(
    store: Store, tmp_path: Path, share: float, incremental: bool
) -> None:
    fill(store)
    target = tmp_path / "backup.db"
    before: dict[str, list[Row]] = {}
    if incremental:
        backup(store, target)
        before = rows_in(store)
        say(store, "new", *map(str, range(50)))

    def fail(done: int, total: int) -> None:
        if done >= share * total:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        backup(store, target, incremental=incremental, progress=fail)
    assert set(files(tmp_path)) == ({"backup.db"} if incremental else set())
    if incremental:
        assert rows_at(target) == before


def test_a_cancelled_backup_stops_and_leaves_nothing(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()
    stop = backups.Meter.stop

    def noticed(meter: backups.Meter) -> None:
        stop(meter)
        stopped.set()

    monkeypatch.setattr(backups.Meter, "stop", noticed)

    async def main() -> None:
        async with database.checkpointer() as cp:
            fill(cp.store)
            begun = asyncio.Event()
            loop = asyncio.get_running_loop()

            def hear(*_: int) -> None:
                loop.call_soon_threadsafe(begun.set)
                assert stopped.wait(60)

            task = asyncio.create_task(backups.backup(cp.store, tmp_path / "backup.db", progress=hear))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert files(tmp_path) == {}

    asyncio.run(main())


CHILD = """\
import sys
from byssus.maintenance import backup as backups
from byssus.store.operations import Blocking, to_the_end
from byssus.queries.moving import copying
from byssus.store import opening as places
from byssus.store.sqlite import file as sqlite_file
from byssus.store.database import Store

place, target, incremental, share = sys.argv[1], sys.argv[2], sys.argv[3] == "True", sys.argv[4]
copying.PAGE_ROWS, sqlite_file._BACKUP_PAGES = 7, 5

def wait():
    print("here", flush=True)
    sys.stdin.readline()

def hear(done, total):
    Store.boundary = staticmethod(boundary)  # from here on: where the backup goes is recorded before
    if share[0].isdigit() and done >= float(share) * total:
        wait()

store = places.open(place)

def boundary(name):
    if name == share:
        wait()

to_the_end(backups.backup(Blocking(store), target, incremental=incremental, progress=hear))
"""


def kill(place: str, target: Path, incremental: bool, share: str) -> None:
    """Kill a backup when so much of it is done, or at a commit."""
    command = ["-c", CHILD, place, str(target), str(incremental), share]
    with forked.Process(command, stdin=forked.PIPE, stdout=forked.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.processes
@pytest.mark.parametrize("share", ["0.1", "0.7", "1.0", "before commit", "after commit"])
def test_a_killed_backup_is_not_there(database: Database, tmp_path: Path, share: str) -> None:
    target = tmp_path / "backup.db"
    with database.store() as store:
        fill(store)
    kill(database.place, target, False, share)
    if share == "1.0":  # which is told when it is there
        assert target.exists()
        return
    assert not target.exists()
    assert all(".unfinished-" in name for name in files(tmp_path))
    with database.store() as store:
        backup(store, target)
        assert rows_at(target) == rows_in(store)


@pytest.mark.processes
@pytest.mark.parametrize("share", ["0.1", "0.4", "0.7", "0.9", "before commit", "after commit"])
def test_a_killed_incremental_backup_is_the_old_one_or_the_new_one(
    database: Database, tmp_path: Path, share: str
) -> None:
    target = tmp_path / "backup.db"
    with database.store() as store:
        fill(store)
        backup(store, target)
        old = rows_in(store)
        say(store, "new", *map(str, range(50)))
        new = rows_in(store)
    kill(database.place, target, True, share)
    assert rows_at(target) == (new if share == "after commit" else old)
    with database.store() as store:
        backup(store, target, incremental=True)
        assert rows_at(target) == new


# --- the way back -----------------------------------------------------------------------------------------------------


def test_what_comes_back_is_what_was_there(database: Database, tmp_path: Path) -> None:
    """From a file into either kind of database; what either kind writes into a file, other tests tell."""
    with opened(tmp_path / "live.db") as live:
        fill(live)
        expected = rows_in(live)
        backup(live, tmp_path / "backup.db")
    heard: list[tuple[int, int]] = []
    before = files(tmp_path)
    with database.store() as store:
        made = restore(store, tmp_path / "backup.db", progress=lambda *at: heard.append(at))
        assert rows_in(store) == expected
        say(store, "thread 1", "it goes on")
    assert made["verified"]
    assert made["taken_at"]
    assert [at for at, _ in heard] == sorted(at for at, _ in heard)
    assert heard[-1][0] == heard[-1][1]
    assert files(tmp_path) == before


def test_a_backup_that_somebody_has_looked_at_comes_back(store: Store, tmp_path: Path) -> None:
    with opened(tmp_path / "live.db") as live:
        fill(live)
        expected = rows_in(live)
        backup(live, tmp_path / "backup.db")
    assert rows_at(tmp_path / "backup.db") == expected  # which opens it as any database
    restore(store, tmp_path / "backup.db")
    assert rows_in(store) == expected
    assert set(files(tmp_path)) == {"live.db", "backup.db"}


def test_a_backup_of_an_older_byssus_comes_back(store: Store, tmp_path: Path) -> None:
    old = Path(__file__).parent.parent.parent / "src/byssus/store/migrations"
    connection = apsw.Connection(str(tmp_path / "old.db"))
    for file in sorted(old.glob("000[1245]*.sql")):
        connection.execute(file.read_text("utf-8").replace("{key}", "INTEGER PRIMARY KEY"))
    connection.execute(
        "INSERT INTO threads (key, namespace, id, branch, head, version, message_count, extra, created_at, updated_at,"
        " line) VALUES (1, '', 't', 1, 0, 0, 0, '{}', 'then', 'then', 1)"
    )
    connection.execute("INSERT INTO branches VALUES (1, 1)")
    connection.execute("INSERT INTO segments VALUES (1, 1, 0, 4611686018427387904)")
    connection.pragma("application_id", sqlite_file.APPLICATION_ID)
    connection.pragma("user_version", 5)
    connection.close()
    restore(store, tmp_path / "old.db")
    say(store, "t", "hello")
    assert said(store) == {"t": ["hello"]}


def test_an_interrupted_run_comes_back_and_its_lease_does_not(database: Database, tmp_path: Path) -> None:
    with opened(tmp_path / "live.db") as live:
        live.write_now(threads.append, ThreadKey("", "t"), [], by=Claim("host-a:1 boot", "run 1", 60.0))
        backup(live, tmp_path / "backup.db")
    with database.store() as store:
        restore(store, tmp_path / "backup.db")
        found = store.read_now(listing.unfinished)
    assert [(row.id, row.facts.owner) for row in found] == [("t", None)]


def test_a_database_that_is_not_empty_is_left_alone(store: Store, tmp_path: Path) -> None:
    with opened(tmp_path / "live.db") as live:
        fill(live)
        backup(live, tmp_path / "backup.db")
    fill(store)
    before = rows_in(store)
    with pytest.raises(InputError, match=r"is not empty \(it holds 7 threads, 1 user\).*a new file, or another schema"):
        restore(store, tmp_path / "backup.db")
    assert rows_in(store) == before


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_an_interrupted_restore_goes_on(store: Store, tmp_path: Path, share: float) -> None:
    with opened(tmp_path / "live.db") as live:
        fill(live)
        expected = rows_in(live)
        backup(live, tmp_path / "backup.db")
        backup(live, tmp_path / "another.db")

    def fail(done: int, total: int) -> None:
        if done >= share * total:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        restore(store, tmp_path / "backup.db", progress=fail)
    with pytest.raises(InputError, match=r"is an unfinished copy of .*backup\.db, and not of .*another\.db"):
        restore(store, tmp_path / "another.db")
    with pytest.raises(InputError, match="is itself an unfinished copy"):
        backup(store, tmp_path / "third.db")
    restore(store, tmp_path / "backup.db")
    assert rows_in(store) == expected


def test_a_backup_that_was_changed_is_not_restored(store: Store, tmp_path: Path) -> None:
    with opened(tmp_path / "live.db") as live:
        fill(live)
        backup(live, tmp_path / "backup.db")
    connection = apsw.Connection(str(tmp_path / "backup.db"))
    connection.execute("UPDATE messages SET body = '{}' WHERE key = 3")
    connection.close()
    with pytest.raises(InputError, match="is not what it was when the backup was taken"):
        restore(store, tmp_path / "backup.db")
    assert store.read_now(queries.is_empty)
    copying.copy(str(tmp_path / "backup.db"), str(tmp_path / "copy.db"))


def test_a_damaged_backup_is_not_restored(store: Store, tmp_path: Path) -> None:
    with opened(tmp_path / "live.db") as live:
        fill(live)
        backup(live, tmp_path / "backup.db")
    connection = apsw.Connection(str(tmp_path / "backup.db"))
    connection.execute("DELETE FROM branches WHERE key = 2")  # nothing keeps other programs from that
    connection.close()
    with pytest.raises(StoreCorrupt, match=r"is damaged .*points to no row of branches"):
        restore(store, tmp_path / "backup.db")
    assert store.read_now(queries.is_empty)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("nowhere.db", InputError, "there is no backup at"),
        ("text", StoreUnusable, "is not a SQLite database"),
        ("theirs", StoreUnusable, "another program's database"),
        ("nothing", InputError, "is empty, and no backup"),
    ],
)
def test_what_is_no_backup_is_not_restored(
    store: Store, tmp_path: Path, name: str, kind: type[ByssusError], told: str
) -> None:
    (tmp_path / "text").write_text("dear diary\n" * 500)
    (tmp_path / "nothing").touch()
    others_database(tmp_path / "theirs")
    before = files(tmp_path)
    with pytest.raises(kind, match=told):
        restore(store, tmp_path / name)
    assert files(tmp_path) == before


def test_a_database_is_not_restored_from_itself(tmp_path: Path) -> None:
    with opened(tmp_path / "live.db") as store, pytest.raises(InputError, match="is the database itself"):
        restore(store, tmp_path / "live.db")


def test_the_backup_of_a_file_begins_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others write after each step; a source that saw that would begin again, and never come to its end."""
    with opened(tmp_path / "live.db") as store:
        assert isinstance(store, sqlite.SQLiteStore)
        fill(store)
        heard: list[tuple[int, int]] = []

        def hear(done: int, total: int) -> None:
            heard.append((done, total))
            say(store, "busy", "x" * 5_000)

        (tmp_path / "pages").touch()
        store.pages_to(str(tmp_path / "pages"), lambda tx: tx.now(), hear)
    pages = heard[0][1]
    assert heard == [(min(5 * step, pages), pages) for step in range(1, len(heard) + 1)]


def test_what_was_deleted_and_made_again_is_no_obstacle_to_an_incremental_backup(
    database: Database, tmp_path: Path
) -> None:
    """Where keys are given again: a row has another parent, and a name another row, than in the backup."""
    with AgentStorage(database.place) as storage:
        for session in ("a", "b", "x"):
            storage.create_session(None, session_id=session)
            storage.save_message(session, "user", "hello")
        storage.log_tool_call("b", "look", {}, None, 1.0)
        storage.create_task("x", "t", {})
        storage.backup(tmp_path / "b.db")
        storage.delete_session("b")
        storage.delete_session("x")
        storage.log_tool_call("a", "look", {}, None, 1.0)
        storage.create_session(None, session_id="x")
        storage.create_task("x", "t", {})
        assert storage.backup(tmp_path / "b.db", incremental=True)["written"] > 0
        calls, tasks = storage.list_tool_calls(), storage.list_tasks()
    with AgentStorage(tmp_path / "b.db") as backup:
        assert (backup.list_tool_calls(), backup.list_tasks()) == (calls, tasks)
        assert backup.check()["ok"]
