"""Several processes, full disks, forks and exits: all of them real."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from byssus.errors import StoreBusy
from byssus.queries.log import threads
from byssus.queries.log.threads import MessageRow
from byssus.store import sharing
from byssus.store.sqlite import store as sqlite
from byssus.values.thread_key import ThreadKey
from tests.support import processes

pytestmark = pytest.mark.processes

ROW = [MessageRow("id", "user", '"x"')]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.db"


def bodies(path: Path) -> list[str]:
    """What a process that comes later finds there; it also checks the file."""
    script = """
        store = sqlite.open_store(sys.argv[1])
        assert store.read_now(lambda tx: tx.all("PRAGMA integrity_check")) == [("ok",)]
        for body in bodies(store):
            print(body)
        sharing.release(store)
    """
    return processes.run(script, path).splitlines()


# --- other processes --------------------------------------------------------------------------------------------------

LOCK = """
    import apsw
    connection = apsw.Connection(sys.argv[1])
    for line in sys.stdin:
        connection.execute(line)
        print("done", flush=True)
"""


def test_a_foreign_write_lock_is_store_busy_that_names_the_file_and_the_seconds(path: Path) -> None:
    store = sqlite.open_store(path, busy_seconds=0.25)
    with processes.started(LOCK, path) as other:
        other.ask("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match=rf"{re.escape(str(path))}.* 0\.25 s"):
            store.write_now(threads.append, ThreadKey("", "t"), ROW)
        assert store.read_now(threads.find, ThreadKey("", "t")) is None  # reading goes on
        other.ask("COMMIT")
        store.write_now(threads.append, ThreadKey("", "t"), ROW)
    sharing.release(store)
    assert bodies(path) == ["x"]


def test_a_foreign_lock_that_ends_in_time_is_waited_for(path: Path) -> None:
    store = sqlite.open_store(path)
    with processes.started(LOCK, path) as other:
        for _ in range(10):
            other.ask("BEGIN IMMEDIATE")
            other.tell("COMMIT")
            store.write_now(threads.append, ThreadKey("", "t"), ROW)
            assert other.hear() == "done"
    sharing.release(store)
    assert len(bodies(path)) == 10


def test_a_file_that_cannot_be_opened_for_a_foreign_lock_is_store_busy(path: Path) -> None:
    sharing.release(sqlite.open_store(path))
    with processes.started(LOCK, path) as other:
        other.ask("PRAGMA locking_mode = exclusive")
        other.ask("BEGIN EXCLUSIVE")
        with pytest.raises(StoreBusy, match=rf"{re.escape(str(path))}.* 0\.25 s"):
            sqlite.open_store(path, busy_seconds=0.25)
        other.ask("COMMIT")
    sharing.release(sqlite.open_store(path, busy_seconds=0.25))


def test_twenty_processes_open_a_new_file_at_once_and_all_write(tmp_path: Path) -> None:
    script = """
        print("ready", flush=True)
        for line in sys.stdin:
            try:
                store = sqlite.open_store(line.strip())
                for i in range(3):
                    store.write_now(threads.append, ThreadKey("", "t"), rows(f"{sys.argv[1]} {i}"))
                sharing.release(store)
                print("done", flush=True)
            except StoreError as error:
                print(repr(error), flush=True)
    """
    files = [tmp_path / f"{n}.db" for n in range(12)]  # the moments that matter are short
    with ExitStack() as stack:
        children = [stack.enter_context(processes.started(script, n)) for n in range(20)]
        assert [one.hear() for one in children] == ["ready"] * 20
        for file in files:
            for one in children:
                one.tell(str(file))
            assert [one.hear() for one in children] == ["done"] * 20
    for file in files:
        store = sqlite.open_store(file)
        row = store.read_now(threads.find, ThreadKey("", "t"))
        assert row is not None
        seen = [json.loads(body) for _, body in store.read_now(threads.page, row.branch, after=0, upto=99, limit=99)]
        sharing.release(store)
        assert sorted(seen) == sorted(f"{n} {i}" for n in range(20) for i in range(3))
        for n in range(20):
            assert [body for body in seen if body.startswith(f"{n} ")] == [f"{n} {i}" for i in range(3)]


# --- a full disk ------------------------------------------------------------------------------------------------------

FULL = """
    import resource, signal
    directory, kind = sys.argv[1:]
    os.makedirs(directory, exist_ok=True)
    filler = os.path.join(directory, "filler")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill_up():
        if kind == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, resource.RLIM_INFINITY))
        else:
            with open(filler, "wb", buffering=0) as file:
                file.write(bytes(4_000_000))

    def make_room():
        if kind == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        else:
            os.unlink(filler)

    expected = StoreFull if kind == "tmpfs" else StoreError
    path = os.path.join(directory, "a.db")
    store = sqlite.open_store(path)
    store.write_now(threads.append, ThreadKey("", "t"), rows("first"))
    fill_up()
    acknowledged = ["first"]
    for i in range(10_000):
        body = f"{i} " + "x" * 50_000
        try:
            store.write_now(threads.append, ThreadKey("", "t"), rows(body))
        except StoreError as error:
            assert isinstance(error, expected) and path in str(error), repr(error)
            break
        acknowledged.append(body)
    else:
        raise AssertionError("the disk was never full")
    assert len(acknowledged) > 3
    assert bodies(store) == acknowledged

    async def crowd():  # many at once: whoever got an answer is there, whoever got an error is not
        outcomes = await asyncio.gather(
            *(
                store.write(threads.append, ThreadKey("", "t"), rows(f"{i} " + "y" * (20_000 * (i % 3))))
                for i in range(60)
            ),
            return_exceptions=True,
        )
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, expected), repr(outcome)
            else:
                acknowledged.append(f"{i} " + "y" * (20_000 * (i % 3)))
        assert any(isinstance(outcome, expected) for outcome in outcomes)

    asyncio.run(crowd())
    assert bodies(store) == acknowledged
    sharing.release(store)  # without room to fold the log into the file
    make_room()
    store = sqlite.open_store(path)
    assert bodies(store) == acknowledged
    store.write_now(threads.append, ThreadKey("", "t"), rows("room again"))
    assert bodies(store) == [*acknowledged, "room again"]
    fill_up()
    try:
        while True:
            store.write_now(threads.append, ThreadKey("", "t"), rows("z" * 100_000))
    except expected:
        pass
    make_room()
    store.write_now(threads.append, ThreadKey("", "t"), rows("and without reopening"))
    assert bodies(store)[-1] == "and without reopening"
    assert store.read_now(lambda tx: tx.all("PRAGMA integrity_check")) == [("ok",)]
    sharing.release(store)
"""


def test_a_file_that_may_not_grow_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    processes.run(FULL, tmp_path / "disk", "limit")


def test_a_full_disk_is_store_full_and_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # A file system of its own, which goes with the process. Where that is not allowed, a limit has to do.
    wrapper = processes.with_mounts(f"mount -t tmpfs -o size=6m tmpfs '{disk}'")
    processes.run(FULL, disk, "tmpfs" if wrapper else "limit", wrapper=wrapper or ())


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_cannot_use_what_it_inherited_and_does_not_harm_it(path: Path, end: str) -> None:
    script = f"""
        store, memory = sqlite.open_store(sys.argv[1]), sqlite.open_store(":memory:")
        for each in (store, memory):
            each.write_now(threads.append, ThreadKey("", "t"), rows("before"))
            assert bodies(each) == ["before"]
        pid = os.fork()
        if pid == 0:
            for each in (store, memory):
                for call in (each.write_now, each.read_now):
                    try:
                        call(threads.find, ThreadKey("", "t"))
                    except StoreNotOpen as error:
                        assert "in this process" in str(error), error
                    else:
                        os._exit(1)
                sharing.release(each)
                each.close()
            {end}
        assert os.waitpid(pid, 0)[1] == 0
        for each in (store, memory):
            each.write_now(threads.append, ThreadKey("", "t"), rows("after"))
            assert bodies(each) == ["before", "after"]
            sharing.release(each)
    """
    processes.run(script, path)
    assert bodies(path) == ["before", "after"]


def test_a_forked_child_opens_a_store_of_its_own(path: Path) -> None:
    script = """
        store = sqlite.open_store(sys.argv[1])
        store.write_now(threads.append, ThreadKey("", "t"), rows("parent"))
        pid = os.fork()
        if pid == 0:
            mine = sqlite.open_store(sys.argv[1])
            assert mine is not store
            assert bodies(mine) == ["parent"]
            mine.write_now(threads.append, ThreadKey("", "t"), rows("child"))
            sharing.release(mine)
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        store.write_now(threads.append, ThreadKey("", "t"), rows("parent again"))
        assert bodies(store) == ["parent", "child", "parent again"]
        sharing.release(store)
    """
    processes.run(script, path)
    assert bodies(path) == ["parent", "child", "parent again"]


def test_nothing_that_a_forked_child_was_acknowledged_is_lost_when_the_parent_closes_first(path: Path) -> None:
    script = """
        store = sqlite.open_store(sys.argv[1])
        store.write_now(threads.append, ThreadKey("", "t"), rows("parent"))
        child_wrote, parent_closed = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            mine = sqlite.open_store(sys.argv[1])
            mine.write_now(threads.append, ThreadKey("", "t"), rows("child"))
            os.write(child_wrote[1], b"x")
            os.read(parent_closed[0], 1)
            mine.write_now(threads.append, ThreadKey("", "t"), rows("child again"))
            sharing.release(mine)
            sys.exit(0)
        os.read(child_wrote[0], 1)
        sharing.release(store)
        os.write(parent_closed[1], b"x")
        assert os.waitpid(pid, 0)[1] == 0
    """
    processes.run(script, path)
    assert bodies(path) == ["parent", "child", "child again"]


def test_a_child_that_was_forked_in_the_middle_of_a_write_can_write(path: Path) -> None:
    script = """
        store = sqlite.open_store(sys.argv[1])
        store.write_now(threads.append, ThreadKey("", "t"), rows("first"))
        inside = threading.Event()

        def long_write(tx):
            threads.append(tx, ThreadKey("", "t"), rows("parent"))
            inside.set()
            tx.one("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000)"
                   " SELECT max(i) FROM n")

        writing = threading.Thread(target=store.write_now, args=[long_write])
        writing.start()
        inside.wait()
        pid = os.fork()
        if pid == 0:
            mine = sqlite.open_store(sys.argv[1], busy_seconds=10)
            mine.write_now(threads.append, ThreadKey("", "t"), rows("child"))
            sharing.release(mine)
            os._exit(0)
        writing.join()
        assert os.waitpid(pid, 0)[1] == 0
        assert sorted(bodies(store)) == ["child", "first", "parent"]
        sharing.release(store)
    """
    processes.run(script, path)
    assert sorted(bodies(path)) == ["child", "first", "parent"]


def test_children_that_are_forked_while_other_threads_use_the_store_get_a_clear_answer(path: Path) -> None:
    script = """
        sys.setswitchinterval(1e-6)  # fork in the middle of everything
        store = sqlite.open_store(sys.argv[1])
        stop = threading.Event()

        def hammer():
            while not stop.is_set():
                store.read_now(threads.find, ThreadKey("", "t"))

        hammering = [threading.Thread(target=hammer) for _ in range(4)]
        for thread in hammering:
            thread.start()
        children = []
        for _ in range(60):
            pid = os.fork()
            if pid == 0:
                try:
                    store.write_now(threads.find, ThreadKey("", "t"))
                except StoreNotOpen:
                    os._exit(0)
                os._exit(1)
            children.append(pid)
        stop.set()
        for thread in hammering:
            thread.join()

        def kill_the_rest(*_):
            for pid in children:
                os.kill(pid, 9)

        import signal
        signal.signal(signal.SIGALRM, kill_the_rest)
        signal.alarm(10)
        codes = []
        while children:
            codes.append(os.waitpid(children[0], 0)[1])
            children.pop(0)
        assert codes == [0] * 60, codes
        sharing.release(store)
    """
    processes.run(script, path)


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_program_that_never_closes_ends_cleanly_with_all_that_it_wrote(path: Path) -> None:
    script = """
        store, memory = sqlite.open_store(sys.argv[1]), sqlite.open_store(":memory:")
        memory.write_now(threads.append, ThreadKey("", "t"), rows("x"))
        for i in range(10):
            store.write_now(threads.append, ThreadKey("", "t"), rows(str(i)))
        bodies(store)
    """
    processes.run(script, path, fresh=True)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert bodies(path) == [str(i) for i in range(10)]


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "await asyncio.sleep(0)"])
def test_what_was_submitted_is_written_though_the_program_ends(path: Path, end: str) -> None:
    script = f"""
        store = sqlite.open_store(sys.argv[1])

        async def main():
            for i in range(500):
                store.write(threads.append, ThreadKey("", "t"), rows(str(i)))
            {end}

        asyncio.run(main())
    """
    processes.run(script, path, fresh=True)
    assert bodies(path) == [str(i) for i in range(500)]


def test_a_program_that_is_killed_keeps_what_was_acknowledged(path: Path) -> None:
    script = """
        store = sqlite.open_store(sys.argv[1])
        for i in range(50):
            store.write_now(threads.append, ThreadKey("", "t"), rows(str(i)))
        print("written", flush=True)
        sys.stdin.read()
        os.kill(os.getpid(), 9)
    """
    with processes.started(script, path, exit_code=-9) as victim:
        assert victim.hear() == "written"
    assert bodies(path) == [str(i) for i in range(50)]


def test_a_checkpointer_that_is_never_closed_lets_the_program_end(path: Path) -> None:
    script = """
        from byssus import UserMessage
        from byssus.checkpointer import SQLiteCheckpointer

        async def main():
            cp = await SQLiteCheckpointer(sys.argv[1]).open()
            await cp.append("t", [UserMessage("a"), UserMessage("b")])
            assert len((await cp.load("t")).messages) == 2

        asyncio.run(main())
    """
    processes.run(script, path, fresh=True)
    assert len(bodies(path)) == 2
