"""Several processes on one Postgres database, forks and exits: all of them real."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from typing import Any

import pytest

from byssus.queries.log import threads
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey
from tests.support import processes
from tests.support.postgres import Schema, running, server_for_tests, wait_until
from tests.support.stores import PATIENCE, Admin, named, opened, rows, stored

pytestmark = pytest.mark.processes

OPEN = """
    from byssus.store import opening as places, sharing

    def open_store(dsn=sys.argv[1], schema=sys.argv[2]):
        return places.open(places.postgres_server(dsn, schema=schema), pool_size=2)

"""


def bodies(where: Schema, thread_id: str = "t") -> list[str]:
    with opened(where) as store:
        return [json.loads(body) for body in stored(store, thread_id)]


# --- at once ----------------------------------------------------------------------------------------------------------


def test_twenty_processes_open_an_empty_database_at_once_and_all_write() -> None:
    script = (
        OPEN
        + """
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            store = open_store(line.strip(), "byssus")
            for i in range(3):
                store.write_now(threads.append, ThreadKey("", "t"), rows(f"{sys.argv[1]} {i}"))
            sharing.release(store)
            print("done", flush=True)
        except ByssusError as error:
            print(repr(error), flush=True)
    """
    )
    shared = server_for_tests()
    databases = [shared.fresh_database() for _ in range(2)]  # the moments that matter are short
    with ExitStack() as stack:
        children = [stack.enter_context(processes.started(script, n, "")) for n in range(20)]
        assert [one.hear() for one in children] == ["ready"] * 20
        for dsn in databases:
            for one in children:
                one.tell(dsn)
            assert [one.hear() for one in children] == ["done"] * 20
    for dsn in databases:
        seen = bodies(Schema(dsn, "byssus"))
        assert sorted(seen) == sorted(f"{n} {i}" for n in range(20) for i in range(3))
        for n in range(20):
            assert [body for body in seen if body.startswith(f"{n} ")] == [f"{n} {i}" for i in range(3)]
        shared.drop(dsn)


class Interleaved:
    """A transaction in which somebody else acts between two of its statements."""

    def __init__(self, tx: Tx, at: int, act: Any) -> None:
        self._tx, self._left, self._act = tx, at, act

    def __getattr__(self, name: str) -> Any:
        if name not in {"one", "all", "run", "many"}:
            return getattr(self._tx, name)

        def call(*args: Any, **params: Any) -> Any:
            if self._left == 0:
                self._act()
            self._left -= 1
            return getattr(self._tx, name)(*args, **params)

        return call


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("query", [threads.append, threads.save_extra])
def test_an_append_does_not_mind_what_another_process_commits_between_its_statements(
    where: Schema, admin: Admin, query: Any, at: int
) -> None:
    value: Any = "{}" if query is threads.save_extra else rows('"mine"')
    with opened(where) as one, opened(where, dsn=named(where.dsn, "other")) as two:
        acted: list[Any] = []

        def act() -> None:
            if not acted:
                acted.append(two.submit(threads.append, ThreadKey("", "t"), rows('"theirs"')))
                waits = "wait_event_type = 'Lock'"
                wait_until(lambda: acted[0].done() or bool(admin.sessions("other", waits)), "neither done nor waiting")

        one.write_now(lambda tx: query(Interleaved(tx, at, act), ThreadKey("", "t"), value))
        if acted:
            acted[0].result(PATIENCE)
    assert sorted(bodies(where)) == sorted(
        [*(["theirs"] if acted else []), *(["mine"] if query is threads.append else [])]
    )


def test_two_processes_that_write_the_same_new_threads_both_succeed(where: Schema) -> None:
    script = (
        OPEN
        + """
    store = open_store()
    print("ready", flush=True)
    for line in sys.stdin:
        futures = [store.submit(threads.append, ThreadKey("", f"{line.strip()} {n}"), rows("x")) for n in range(20)]
        print([repr(error) for future in futures if (error := future.exception(30))], flush=True)
    sharing.release(store)
    """
    )
    with ExitStack() as stack:
        children = [stack.enter_context(processes.started(script, *where)) for _ in range(4)]
        assert [one.hear() for one in children] == ["ready"] * 4
        for i in range(10):
            for one in children:
                one.tell(str(i))
            assert [one.hear() for one in children] == ["[]"] * 4


def test_a_process_that_is_stopped_in_the_middle_of_a_write_does_not_keep_others_from_the_thread_for_long(
    where: Schema,
) -> None:
    script = (
        OPEN
        + """
    from byssus.store.postgres import pool
    pool.SETTINGS["idle_in_transaction_session_timeout"] = "300ms"
    store = open_store()

    def stuck(tx):
        threads.append(tx, ThreadKey("", "t"), rows("stopped"))
        print("inside", flush=True)
        sys.stdin.readline()

    store.write_now(stuck)
    print("done", flush=True)
    sharing.release(store)
    """
    )
    with opened(where) as store, processes.started(script, *where) as victim:
        store.write_now(threads.append, ThreadKey("", "t"), rows('"first"'))
        assert victim.hear() == "inside"
        os.kill(victim._process.pid, signal.SIGSTOP)
        try:
            future = store.submit(threads.append, ThreadKey("", "t"), rows('"meanwhile"'))
            assert future.exception(10) is None
        finally:
            os.kill(victim._process.pid, signal.SIGCONT)
            victim.tell()
        assert victim.ask() == "inside"  # it is run again
        assert victim.hear() == "done"
    assert bodies(where) == ["first", "meanwhile", "stopped"]


# --- forks ------------------------------------------------------------------------------------------------------------

FORK = (
    OPEN
    + """
    store = open_store()
    store.write_now(threads.append, ThreadKey("", "t"), rows("parent"))
    assert bodies(store) == ["parent"]
    store.submit_first(threads.append, ThreadKey("", "t"), rows("parent first")).result()
    store.version()
"""
)


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)", "raise SystemExit"])
def test_a_forked_child_can_use_the_database_and_leaves_the_parents_connections_alone(where: Schema, end: str) -> None:
    script = (
        FORK
        + f"""
    import psycopg
    sessions = "SELECT pid FROM pg_stat_activity WHERE application_name = 'forking' ORDER BY pid"
    def ask():
        with psycopg.connect(sys.argv[1].replace("forking", "admin"), autocommit=True) as admin:
            return admin.execute(sessions).fetchall()

    before = ask()
    assert len(before) >= 3
    pid = os.fork()
    if pid == 0:
        try:
            store.write_now(threads.append, ThreadKey("", "t"), rows("never"))
        except StoreNotOpen:
            pass
        else:
            os._exit(3)
        mine = open_store()
        assert mine is not store
        assert bodies(mine) == ["parent", "parent first"]
        mine.write_now(threads.append, ThreadKey("", "t"), rows("child"))
        sharing.release(mine)
        {end}
    assert os.waitpid(pid, 0)[1] == 0
    assert [each for each in ask() if each in before] == before
    store.write_now(threads.append, ThreadKey("", "t"), rows("parent again"))
    assert bodies(store) == ["parent", "parent first", "child", "parent again"]
    sharing.release(store)
    """
    )
    processes.run(script, named(where.dsn, "forking"), where.name)
    assert bodies(where) == ["parent", "parent first", "child", "parent again"]


def test_multiprocessing_with_fork_works_and_the_child_may_simply_end(where: Schema) -> None:
    script = (
        FORK
        + """
    import multiprocessing

    def work(n):
        mine = open_store()
        mine.write_now(threads.append, ThreadKey("", "t"), rows(f"child {n}"))  # and nobody closes it

    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=[n]) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert sorted(bodies(store)) == ["child 0", "child 1", "child 2", "parent", "parent first"]
    """
    )
    processes.run(script, *where)


def test_children_that_are_forked_while_other_threads_use_the_store_get_a_clear_answer(where: Schema) -> None:
    script = (
        OPEN
        + """
    sys.setswitchinterval(1e-6)  # fork in the middle of everything
    store = open_store()
    stop = threading.Event()
    counts = [0] * 4

    def hammer(n):
        while not stop.is_set():
            store.write_now(threads.append, ThreadKey("", f"thread {n}"), rows(str(counts[n])))
            counts[n] += 1

    hammering = [threading.Thread(target=hammer, args=[n]) for n in range(4)]
    for thread in hammering:
        thread.start()
    children = []
    for n in range(20):
        pid = os.fork()
        if pid == 0:
            try:
                store.write_now(threads.find, ThreadKey("", "t"))
            except StoreNotOpen:
                os._exit(0)
            os._exit(1)
        children.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    stop.set()
    for thread in hammering:
        thread.join()
    assert codes == [0] * 20, codes
    for n in range(4):
        assert bodies(store, f"thread {n}") == [str(i) for i in range(counts[n])]
    sharing.release(store)
    """
    )
    processes.run(script, *where, timeout=100)


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "await asyncio.sleep(0)"])
def test_what_was_submitted_is_written_though_the_program_ends(where: Schema, admin: Admin, end: str) -> None:
    script = (
        OPEN
        + f"""
    store = open_store()

    async def main():
        for i in range(200):
            store.write(threads.append, ThreadKey("", "t"), rows(str(i)))
        {end}

    asyncio.run(main())
    """
    )
    processes.run(script, named(where.dsn, "leaving"), where.name, fresh=True)
    assert bodies(where) == [str(i) for i in range(200)]
    wait_until(lambda: not admin.sessions("leaving"), "a connection is left")
    assert admin.one(f'SELECT count(*) FROM "{where.name}".writers') == 0


def test_a_program_whose_server_is_gone_ends_all_the_same_and_says_nothing() -> None:
    script = (
        OPEN
        + """
    from byssus.store.postgres import store as postgres
    postgres.PostgresStore.__init__.__defaults__ = (0.5,)
    store = open_store()
    store.write_now(threads.append, ThreadKey("", "t"), rows("x"))
    store.read_now(threads.find, ThreadKey("", "t"))
    store.version()
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(5):
        store.submit(threads.append, ThreadKey("", f"thread {i}"), rows("never"))
    """
    )
    with running() as server, processes.started(script, server.create(), "byssus", fresh=True) as leaving:
        assert leaving.hear() == "ready"
        server.stop("immediate")
        leaving.tell()


def test_a_program_with_many_open_files_hears_the_news(where: Schema) -> None:
    script = (
        OPEN
        + """
    import resource, time
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    files = [os.dup(0) for _ in range(1100)]
    store = open_store()
    store.write_now(threads.append, ThreadKey("", "t"), rows("x"))
    deadline = time.monotonic() + 5
    while not store.news.is_receiving and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.news.is_receiving
    sharing.release(store)
    """
    )
    processes.run(script, *where)


def test_a_killed_process_keeps_what_was_acknowledged(where: Schema) -> None:
    script = (
        OPEN
        + """
    store = open_store()
    for i in range(30):
        store.write_now(threads.append, ThreadKey("", "t"), rows(str(i)))
    print("written", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), 9)
    """
    )
    with processes.started(script, *where, exit_code=-9) as victim:
        assert victim.hear() == "written"
    assert bodies(where) == [str(i) for i in range(30)]
