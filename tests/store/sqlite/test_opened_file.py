"""A database has one name, and the name leads to the file that is open; else nothing is acknowledged."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw
import pytest

from byssus.checkpointer import SQLiteCheckpointer
from byssus.errors import StoreError, StoreUnusable
from byssus.queries.log import threads
from byssus.queries.log.threads import MessageRow
from byssus.store import sharing
from byssus.store.sqlite import opened_file
from byssus.store.sqlite import store as sqlite
from byssus.store.sqlite.store import SQLiteStore
from byssus.values.thread_key import ThreadKey
from tests.support import processes
from tests.support.agents import within
from tests.support.leases import CALL_SLOW, Slow, agent_on

T = ThreadKey("", "t")


@contextmanager
def opened(path: Path, *, read_only: bool = False) -> Iterator[SQLiteStore]:
    store = sqlite.open_store(path, read_only=read_only)
    try:
        yield store
    finally:
        sharing.release(store)


def append(store: SQLiteStore, body: str) -> None:
    store.write_now(threads.append, T, [MessageRow("id", "user", json.dumps(body))])


def bodies(store: SQLiteStore) -> list[str]:
    row = store.read_now(threads.find, T)
    page = store.read_now(threads.page, row.branch, after=0, upto=row.head, limit=10**6) if row else []
    return [json.loads(body) for _, body in page]


def made(path: Path, *messages: str) -> Path:
    with opened(path) as store:
        for message in messages:
            append(store, message)
    return path


# --- one name ---------------------------------------------------------------------------------------------------------


def test_a_file_with_two_hard_links_is_refused_and_both_names_are_told(tmp_path: Path) -> None:
    path = made(tmp_path / "a.db", "one")
    (tmp_path / "other.db").hardlink_to(path)
    for name, other in (("a", "other"), ("other", "a")):
        with pytest.raises(StoreUnusable, match=rf"{name}\.db' has 2 names \(also .*{other}\.db'\).*remove"):
            sqlite.open_store(tmp_path / f"{name}.db")
    (tmp_path / "other.db").unlink()
    with opened(path) as store:
        assert bodies(store) == ["one"]


def test_a_second_name_that_a_file_gets_while_it_is_open_stops_the_writes_until_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    (tmp_path / "elsewhere").mkdir()
    with opened(path) as store:
        append(store, "one")
        (tmp_path / "elsewhere" / "b.db").hardlink_to(path)
        with pytest.raises(StoreUnusable, match=r"a\.db' has 2 names: .*remove"):
            append(store, "two")
        with pytest.raises(StoreUnusable, match="2 names"):
            sqlite.open_store(path)
        assert bodies(store) == ["one"]
        (tmp_path / "elsewhere" / "b.db").unlink()
        append(store, "three")
    with opened(path) as store:
        assert bodies(store) == ["one", "three"]


def test_a_symbolic_link_is_no_second_name(tmp_path: Path) -> None:
    path = made(tmp_path / "a.db", "one")
    (tmp_path / "link.db").symlink_to(path)
    with opened(tmp_path / "link.db") as store:
        append(store, "two")
        assert bodies(store) == ["one", "two"]


def test_a_backup_with_two_names_can_be_restored_but_not_written(tmp_path: Path) -> None:
    async def main() -> None:
        async with SQLiteCheckpointer(tmp_path / "a.db") as cp:
            await cp.append("t", {"role": "user", "content": "kept"})
            await cp.backup(tmp_path / "monday.db")
            (tmp_path / "tuesday.db").hardlink_to(tmp_path / "monday.db")  # as tools that keep many backups do
            with pytest.raises(StoreUnusable, match="2 names"):
                await cp.backup(tmp_path / "monday.db", incremental=True)
        async with SQLiteCheckpointer(tmp_path / "b.db") as cp:
            await cp.restore(tmp_path / "tuesday.db")
            assert len(await cp.threads()) == 1

    within(main())


MOUNTED = """
    directory = sys.argv[1]
    try:
        sqlite.open_store(os.path.join(directory, "app", "chat.db"))
    except StoreUnusable as error:
        print(error)
    store = sqlite.open_store(os.path.join(directory, "chat.db"))  # the other side of the mount, on the host
    print(bodies(store))
    sharing.release(store)
"""


@pytest.mark.processes
def test_a_file_that_is_mounted_by_itself_is_refused_and_the_directory_proposed(tmp_path: Path) -> None:
    path = made(tmp_path / "chat.db", "one")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "chat.db").touch()
    wrapper = processes.with_mounts(f"mount --bind '{path}' '{tmp_path}/app/chat.db'")
    if wrapper is None:  # where no mounts are allowed, the list of mounts has to do
        assert f"{tmp_path}/app/chat.db" in opened_file.mount_points(f"64 43 254:0 /x {tmp_path}/app/chat.db rw - ext4")
        return
    told, seen = processes.run(MOUNTED, tmp_path, wrapper=wrapper).splitlines()
    assert "is a mount point" in told
    assert f"mount its directory instead (docker run -v ./data:{tmp_path}/app)" in told
    assert seen == "['one']"


@pytest.mark.processes
def test_a_directory_that_is_mounted_is_fine(tmp_path: Path) -> None:
    path = made(tmp_path / "data" / "chat.db", "one")
    (tmp_path / "app").mkdir()
    wrapper = processes.with_mounts(f"mount --bind '{path.parent}' '{tmp_path}/app'") or ()
    script = """
        store = sqlite.open_store(sys.argv[1])
        print(bodies(store))
        sharing.release(store)
    """
    there = tmp_path / "app" / "chat.db" if wrapper else path
    assert processes.run(script, there, wrapper=wrapper) == "['one']"


def test_mount_points_are_read_as_linux_writes_them() -> None:
    text = (
        "43 29 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n"
        "63 43 0:39 / /mnt/with\\040space\\011tab\\134back rw,relatime - tmpfs none rw,size=10240k\n"
        "64 43 254:0 /srv/chat.db /app/chat.db rw,relatime master:3 - ext4 /dev/vda rw\n\n"
    )
    assert opened_file.mount_points(text) == {"/", "/mnt/with space\ttab\\back", "/app/chat.db"}


def test_where_there_is_no_list_of_mounts_an_ordinary_file_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path / "a.db")
    monkeypatch.setattr(opened_file, "_MOUNTS", str(tmp_path / "nothing"))
    assert not opened_file.is_mount_point(str(path))


# --- the same file ----------------------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    path.unlink()


def remove_all(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def almost_empty(path: Path) -> None:
    os.truncate(path, 1)  # which SQLite takes for empty


def move(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


def replace(path: Path) -> None:
    shutil.copy(path.with_name("old.db"), path.with_name("new.db"))
    path.with_name("new.db").rename(path)


def move_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def remove_wal(path: Path) -> None:
    Path(f"{path}-wal").unlink()


ACCIDENTS: dict[Callable[[Path], None], str] = {
    remove: r"a\.db' was removed, while it was open; nothing more is written to it.*restore a backup",
    remove_all: r"a\.db' was removed, while it was open",
    empty: r"a\.db' was emptied while it was open; nothing more is written to it.*restore a backup",
    almost_empty: r"a\.db' was emptied while it was open",
    move: r"a\.db' was moved to '.*moved\.db', while it was open.*last ones in '.*a\.db-wal'.*'.*moved\.db-wal'",
    replace: r"a\.db' was replaced by another file: the one that was open is removed",
    move_directory: r"a\.db' was moved to '.*elsewhere/a\.db', while it was open",
    remove_wal: r"a\.db-wal' was removed or replaced while the database was open.*'byssus check'",
}


@pytest.fixture(params=ACCIDENTS, ids=lambda accident: accident.__name__)
def accident(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    chosen: Callable[[Path], None] = request.param
    return chosen


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "place"
    directory.mkdir()
    made(directory / "old.db", "old")
    return directory / "a.db"


def test_nothing_is_acknowledged_that_a_new_opener_would_not_see(place: Path, accident: Callable[[Path], None]) -> None:
    with opened(place) as store:
        append(store, "one")
        accident(place)
        with pytest.raises(StoreUnusable, match=ACCIDENTS[accident]) as first:
            append(store, "lost")
        for again in (lambda: append(store, "lost"), lambda: bodies(store), store.version, store.scrub):
            with pytest.raises(StoreUnusable) as later:
                again()
            assert str(later.value) == str(first.value)
    with suppress(FileExistsError):
        place.parent.mkdir()
    with opened(place) as store:
        assert "lost" not in bodies(store)
        append(store, "found")
        assert bodies(store)[-1] == "found"
    assert not Path(f"{place}-wal").exists()


def test_a_write_during_which_the_file_goes_is_not_acknowledged(place: Path, accident: Callable[[Path], None]) -> None:
    with opened(place) as store:
        append(store, "one")

        def lose_it(moment: str) -> None:
            if moment == "after commit":
                store.boundary = None
                accident(place)

        store.boundary = lose_it
        with pytest.raises(StoreUnusable, match=ACCIDENTS[accident]):
            append(store, "lost")


def test_a_store_that_is_only_read_notices_too(place: Path) -> None:
    made(place, "one")
    with opened(place) as store:
        assert bodies(store) == ["one"]
        replace(place)
        with pytest.raises(StoreUnusable, match="replaced"):
            bodies(store)


def test_a_path_cannot_be_opened_again_while_its_former_file_is_still_open_here(place: Path) -> None:
    """Both would use the same WAL, and in one process no lock keeps them apart."""
    with opened(place) as store:
        append(store, "one")
        replace(place)
        with pytest.raises(StoreUnusable, match="replaced by another file"):
            sqlite.open_store(place)
    Path(f"{place}-wal").unlink()  # it belongs to the file that is gone
    with opened(place) as store:
        assert bodies(store) == ["old"]


def test_a_file_that_was_moved_keeps_all_that_was_acknowledged(place: Path) -> None:
    with opened(place) as store:
        append(store, "one")
        move(place)
        with pytest.raises(StoreUnusable, match="moved"):
            append(store, "lost")
    Path(f"{place}-wal").rename(place.with_name("moved.db-wal"))  # as the error says
    with opened(place.with_name("moved.db")) as store:
        assert bodies(store)[:1] == ["one"]


@pytest.mark.processes
def test_closing_a_store_whose_file_was_replaced_leaves_the_files_of_the_new_one_alone(place: Path) -> None:
    script = """
        store = sqlite.open_store(sys.argv[1])
        store.write_now(threads.append, ThreadKey("", "t"), rows("new"))
        print("written", flush=True)
        sys.stdin.readline()
        store.write_now(threads.append, ThreadKey("", "t"), rows("newer"))
        print(bodies(store), flush=True)
        sharing.release(store)
    """
    with opened(place) as store:
        append(store, "one")
        remove_all(place)
        with processes.started(script, place) as child:
            assert child.hear() == "written"
            with pytest.raises(StoreUnusable):
                append(store, "lost")
            sharing.retain(store)
            sharing.release(store)
            store.close()
            assert Path(f"{place}-wal").exists()
            assert child.ask("go on") == "['new', 'newer']"
    with opened(place) as store:
        assert bodies(store) == ["new", "newer"]


def test_a_run_whose_file_was_moved_ends_soon_and_with_the_reason(place: Path) -> None:
    async def main() -> None:
        async with SQLiteCheckpointer(place) as cp:
            slow = Slow()
            agent = agent_on(cp, [CALL_SLOW], "t", tools=[slow.tool])
            run = asyncio.create_task(agent.prompt("go"))
            await slow.begun.wait()
            move(place)
            with pytest.raises(StoreUnusable, match=r"moved to '.*moved\.db'"):
                await run

    within(main())


@pytest.mark.processes
def test_after_a_fork_the_parent_notices_that_the_file_was_replaced_meanwhile(place: Path) -> None:
    script = """
        import shutil
        path = sys.argv[1]
        store = sqlite.open_store(path)
        store.write_now(threads.append, ThreadKey("", "t"), rows("one"))
        before = store.before_fork
        def closed_and_replaced():  # as somebody else may do between the two
            before()
            os.unlink(path)
            shutil.copy(os.path.join(os.path.dirname(path), "old.db"), path)
        store.before_fork = closed_and_replaced
        import logging
        logging.disable(logging.CRITICAL)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        try:
            store.write_now(threads.append, ThreadKey("", "t"), rows("lost"))
        except StoreUnusable as error:
            print("replaced" in str(error))
        sharing.release(store)
        store = sqlite.open_store(path)
        print(bodies(store))
        sharing.release(store)
    """
    assert processes.run(script, place).splitlines() == ["True", "['old']"]


# --- opening ----------------------------------------------------------------------------------------------------------


class Vanishing(apsw.VFS):
    """A disk on which somebody does something as soon as a database was opened."""

    def __init__(self, accident: Callable[[str], object]) -> None:
        self._accident = accident
        super().__init__("vanishing", "", makedefault=True)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        file = super().xOpen(name, flags)
        if isinstance(name, apsw.URIFilename) and flags[0] & apsw.SQLITE_OPEN_MAIN_DB:
            self._accident(str(name.filename()))
        return file


@contextmanager
def after_each_open(accident: Callable[[str], object]) -> Iterator[None]:
    vfs = Vanishing(accident)
    try:
        yield
    finally:
        vfs.unregister()


def test_a_file_that_vanishes_while_it_is_opened_is_made_again(tmp_path: Path) -> None:
    vanished: list[str] = []

    def vanish(name: str) -> None:
        if not vanished:
            vanished.append(name)
            os.unlink(name)

    with after_each_open(vanish), opened(tmp_path / "a.db") as store:
        append(store, "a")
        assert vanished == [str(tmp_path / "a.db")]
        with opened(tmp_path / "b.db") as other:
            assert other is not store
            append(other, "b")
    with opened(tmp_path / "a.db") as one, opened(tmp_path / "b.db") as two:
        assert (bodies(one), bodies(two)) == (["a"], ["b"])


def test_a_file_that_always_vanishes_is_an_error_and_nobody_elses_store(tmp_path: Path) -> None:
    with after_each_open(os.unlink):
        with pytest.raises(StoreUnusable, match=r"a\.db' was removed or replaced while it was being opened"):
            sqlite.open_store(tmp_path / "a.db")
        with pytest.raises(StoreUnusable, match=r"b\.db"):
            sqlite.open_store(tmp_path / "b.db")
    assert sharing.still_open() == []


def test_many_who_open_and_remove_two_files_never_get_the_other_one(tmp_path: Path) -> None:
    wrong: list[str] = []
    end = threading.Event()

    def sweep() -> None:
        while not end.is_set():
            for name in ("a.db", "b.db"):
                with suppress(OSError):
                    os.unlink(tmp_path / name)

    def work(name: str) -> None:
        for _ in range(20):
            with suppress(StoreError), opened(tmp_path / name) as store:
                if store.path != str(tmp_path / name):
                    wrong.append(f"{name} got {store.path}")

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    workers = [threading.Thread(target=work, args=(name,)) for name in ("a.db", "b.db") * 2]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    end.set()
    sweeper.join()
    assert wrong == []


# --- rights -----------------------------------------------------------------------------------------------------------


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_database_and_what_is_beside_it_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "deeper" / "a.db"
    with opened(path) as store:
        append(store, "one")
        assert {file.name: rights(file) for file in path.parent.iterdir()} == {
            "a.db": 0o600,
            "a.db-wal": 0o600,
            "a.db-shm": 0o600,
        }
    assert (rights(path.parent), rights(path.parent.parent)) == (0o700, 0o700)


@pytest.mark.usefixtures("umask")
def test_a_database_that_is_there_keeps_its_rights(tmp_path: Path) -> None:
    path = made(tmp_path / "a.db", "one")
    path.chmod(0o640)
    with opened(path) as store:
        append(store, "two")
        assert rights(Path(f"{path}-wal")) == 0o640
        store.scrub()
    assert rights(path) == 0o640
