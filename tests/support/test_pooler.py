"""The pooler is only worth something if it takes away what a real one takes away, and fails as it was told to."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import psycopg
import pytest

from tests.support import postgres
from tests.support.pooler import Pooler, pooling

pytestmark = pytest.mark.processes


@pytest.fixture
def dsn() -> Iterator[str]:
    shared = postgres.server_for_tests()
    made = shared.fresh_database()
    yield made
    shared.drop(made)


@pytest.fixture
def pooler(dsn: str) -> Iterator[Pooler]:
    with pooling(dsn) as running:
        yield running


def backend(connection: psycopg.Connection) -> int:
    return int(one(connection, "SELECT pg_backend_pid()"))


def one(connection: psycopg.Connection, query: str) -> str:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return str(row[0])


def plain(pooler: Pooler) -> psycopg.Connection:
    """A client as a pooler wants it: no prepared statements of its own accord."""
    return psycopg.connect(pooler.dsn, autocommit=True, prepare_threshold=None)


def test_a_client_has_one_backend_during_a_transaction_and_another_for_the_next(pooler: Pooler) -> None:
    with plain(pooler) as connection:
        seen = []
        for _ in range(7):
            with connection.transaction():
                first, second = backend(connection), backend(connection)
            assert first == second
            seen.append(first)
        assert all(before != after for before, after in itertools.pairwise(seen))
        assert len(set(seen)) == 3


def test_each_client_changes_its_backend_also_when_several_take_turns(pooler: Pooler) -> None:
    with plain(pooler) as a, plain(pooler) as b, plain(pooler) as c:
        rounds = [[backend(client) for client in (a, b, c)] for _ in range(5)]
    for before, after in itertools.pairwise(rounds):
        assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_transaction_is_one_through_the_pooler(pooler: Pooler, end: str) -> None:
    with plain(pooler) as connection, plain(pooler) as other:
        connection.execute("CREATE TABLE things (id int)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO things VALUES (1)")
        assert one(other, "SELECT count(*) FROM things") == "0"
        connection.execute(end.encode())
        assert one(other, "SELECT count(*) FROM things") == ("1" if end == "COMMIT" else "0")


def test_a_setting_of_the_session_is_lost_and_one_of_the_transaction_works(pooler: Pooler) -> None:
    with plain(pooler) as connection:
        connection.execute("SET lock_timeout = '77s'")
        assert one(connection, "SHOW lock_timeout") == "0"
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '78s'")
            assert one(connection, "SHOW lock_timeout") == "78s"


def test_the_parameters_of_the_startup_follow_their_client(pooler: Pooler) -> None:
    with (
        psycopg.connect(pooler.dsn, autocommit=True, application_name="it's me") as connection,
        plain(pooler) as other,
    ):
        for _ in range(4):
            assert one(connection, "SHOW application_name") == "it's me"
            assert one(other, "SHOW application_name") == ""
        other.execute("SET TimeZone = 'Asia/Tokyo'")
        assert {one(other, "SHOW TimeZone") for _ in range(4)} == {"Asia/Tokyo"}
        assert "Asia/Tokyo" not in {one(connection, "SHOW TimeZone") for _ in range(4)}


def test_a_prepared_statement_is_unknown_in_the_next_transaction(pooler: Pooler) -> None:
    with psycopg.connect(pooler.dsn, autocommit=True) as connection:
        with connection.transaction():
            for _ in range(2):
                connection.execute("SELECT %s", [1], prepare=True)
        with pytest.raises(psycopg.errors.InvalidSqlStatementName):
            connection.execute("SELECT %s", [1], prepare=True)


def test_a_temporary_table_is_gone_in_the_next_transaction(pooler: Pooler) -> None:
    with plain(pooler) as connection:
        connection.execute("CREATE TEMPORARY TABLE short_lived ()")
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("SELECT FROM short_lived")


def test_an_advisory_lock_of_the_session_cannot_be_given_back(pooler: Pooler) -> None:
    with plain(pooler) as connection:
        assert one(connection, "SELECT pg_try_advisory_lock(7)") == "True"
        assert one(connection, "SELECT pg_advisory_unlock(7)") == "False"
        assert one(connection, "SELECT pg_try_advisory_lock(7)") == "False"


def test_a_notification_reaches_no_client_of_the_pooler(pooler: Pooler, dsn: str) -> None:
    with plain(pooler) as connection, psycopg.connect(dsn, autocommit=True) as direct:
        for listener in (connection, direct):
            listener.execute("LISTEN news")
        direct.execute("NOTIFY news")
        for _ in range(3):  # so that each backend had an occasion
            one(connection, "SELECT 1")
        assert list(connection.notifies(timeout=0.1)) == []
        assert [each.channel for each in direct.notifies(timeout=0, stop_after=1)] == ["news"]


def test_a_notice_reaches_its_client(pooler: Pooler) -> None:
    with plain(pooler) as connection:
        said: list[str | None] = []
        connection.add_notice_handler(lambda notice: said.append(notice.message_primary))
        connection.execute("DO $$ BEGIN RAISE NOTICE 'by the way'; END $$")
        assert said == ["by the way"]


def test_a_startup_parameter_that_a_pooler_does_not_know_is_refused(pooler: Pooler) -> None:
    with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter: options"):
        psycopg.connect(pooler.dsn, options="-c search_path=x")


def test_a_pipeline_with_many_statements_is_one_transaction(pooler: Pooler) -> None:
    with plain(pooler) as connection:
        connection.execute("CREATE TABLE things (id int)")
        with connection.pipeline(), connection.transaction():
            for number in range(500):
                connection.execute("INSERT INTO things VALUES (%s)", [number])
            first, second = backend(connection), backend(connection)
        assert first == second
        assert one(connection, "SELECT count(*) FROM things") == "500"


def test_a_pipeline_may_have_several_syncs_under_way(pooler: Pooler) -> None:
    with plain(pooler) as connection, connection.pipeline() as pipeline:
        cursors = []
        for number in range(50):
            cursors.append(connection.execute("SELECT %s::int, repeat('x', 10000)", [number]))
            pipeline.sync()
        assert [row[0] for cursor in cursors for row in cursor] == list(range(50))


def test_an_error_in_a_pipeline_reaches_the_client_and_spares_the_connection(pooler: Pooler) -> None:
    with plain(pooler) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero), connection.pipeline():
            connection.execute("SELECT 1/0")
            connection.execute("SELECT 1")
        assert one(connection, "SELECT 1") == "1"


def test_a_client_that_leaves_in_a_transaction_leaves_nothing_of_it(pooler: Pooler, dsn: str) -> None:
    with plain(pooler) as connection:
        connection.execute("CREATE TABLE things (id int)")
    connection = plain(pooler)
    connection.execute("BEGIN")
    connection.execute("INSERT INTO things VALUES (1)")
    pid = backend(connection)
    connection.close()
    with psycopg.connect(dsn, autocommit=True) as direct:
        alive = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}"
        postgres.wait_until(lambda: one(direct, alive) == "0", "the backend of the client goes on")
        assert one(direct, "SELECT count(*) FROM things") == "0"
    with plain(pooler) as connection:
        assert one(connection, "SELECT 1") == "1"


def test_a_client_that_leaves_between_transactions_leaves_its_backend_to_others(pooler: Pooler) -> None:
    pids = set()
    for _ in range(9):
        with plain(pooler) as connection:
            pids.add(backend(connection))
    assert len(pids) == 3


def test_a_query_can_be_cancelled_through_the_pooler(pooler: Pooler, dsn: str) -> None:
    with plain(pooler) as connection, psycopg.connect(dsn, autocommit=True) as direct:

        def cancel() -> None:
            sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
            postgres.wait_until(lambda: one(direct, sleeping) == "1", "nobody sleeps")
            connection.cancel_safe()

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute("SELECT pg_sleep(60)")
        thread.join()


def test_a_hundred_clients_share_few_backends(dsn: str) -> None:
    with pooling(dsn, most=5) as pooler, contextlib.ExitStack() as opened:
        connections = [opened.enter_context(plain(pooler)) for _ in range(100)]
        connections[0].execute("CREATE TABLE counter AS SELECT 0 AS value")
        pids: set[int] = set()

        def count(connection: psycopg.Connection) -> None:
            for _ in range(5):
                with connection.transaction(), connection.pipeline():
                    connection.execute("UPDATE counter SET value = value + 1")
                    pids.add(backend(connection))

        threads = [threading.Thread(target=count, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one(connections[0], "SELECT value FROM counter") == "500"
        assert 3 <= len(pids) <= 5


@pytest.mark.parametrize("way", ["simple", "extended", "pipeline"])
@pytest.mark.parametrize("hook", ["drop_next_commit_answer", "cut_before_commit"])
def test_a_fault_at_the_commit_decides_whether_it_happened_and_the_client_is_not_told(
    pooler: Pooler, dsn: str, hook: str, way: str
) -> None:
    with psycopg.connect(dsn, autocommit=True) as direct:
        direct.execute("CREATE TABLE things (id int)")
        happened = getattr(pooler, hook)()
        with plain(pooler) as connection, pytest.raises(psycopg.OperationalError):
            write(connection, way)
        assert happened.wait(10)
        with plain(pooler) as connection:  # the hook is for one commit
            write(connection, way)
        assert one(direct, "SELECT count(*) FROM things") == ("2" if hook == "drop_next_commit_answer" else "1")


def write(connection: psycopg.Connection, way: str) -> None:
    if way == "simple":
        connection.execute("BEGIN; INSERT INTO things VALUES (1)")
        connection.execute("COMMIT")
    elif way == "extended":
        connection.execute("BEGIN")
        connection.execute("INSERT INTO things VALUES (%s)", [1])
        connection.pgconn.exec_params(b"COMMIT", None)
        connection.execute("SELECT 1")
    else:
        with connection.pipeline(), connection.transaction():
            connection.execute("INSERT INTO things VALUES (%s)", [1])


def test_a_commit_that_fails_is_answered_and_the_fault_waits_for_the_next(pooler: Pooler) -> None:
    happened = pooler.drop_next_commit_answer()
    with plain(pooler) as connection:
        connection.execute("CREATE TABLE things (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        with pytest.raises(psycopg.errors.UniqueViolation), connection.transaction():
            connection.execute("INSERT INTO things VALUES (1), (1)")
        assert not happened.is_set()
        with pytest.raises(psycopg.OperationalError), connection.transaction():
            connection.execute("INSERT INTO things VALUES (1)")
        assert happened.wait(10)


def test_cut_all_cuts_every_client_and_rolls_back_what_they_had_begun(pooler: Pooler, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as direct, plain(pooler) as idle, plain(pooler) as busy:
        direct.execute("CREATE TABLE things (id int)")
        busy.execute("BEGIN; INSERT INTO things VALUES (1)")
        pooler.cut_all()
        for connection in (idle, busy):
            with pytest.raises(psycopg.OperationalError):
                connection.execute("COMMIT")
        with direct.transaction():
            direct.execute("LOCK TABLE things")  # waits until the transaction has ended
            assert one(direct, "SELECT count(*) FROM things") == "0"
        with plain(pooler) as again:
            assert one(again, "SELECT 1") == "1"


def test_clients_hear_that_the_server_went_down_and_get_on_when_it_is_back() -> None:
    with postgres.running() as server, pooling(server.dsn()) as pooler:
        with plain(pooler) as connection:
            connection.execute("BEGIN")
            server.stop()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("COMMIT")
        with plain(pooler) as connection, pytest.raises(psycopg.OperationalError, match="server login failed"):
            connection.execute("SELECT 1")
        server.start()
        with plain(pooler) as connection:
            assert one(connection, "SELECT 1") == "1"
