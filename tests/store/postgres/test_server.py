"""Opening a Postgres database: its tables, other people's, and everything that can be wrong with a DSN."""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from byssus import AssistantMessage, UserMessage
from byssus.checkpointer import PostgresCheckpointer, SQLiteCheckpointer
from byssus.errors import ByssusError, InputError, StoreError, StoreNotOpen, StoreUnreachable, StoreUnusable
from byssus.queries.log import listing
from byssus.store.postgres import server as postgres_server
from byssus.store.postgres.server import Server as Place
from byssus.values.thread_key import ThreadKey
from tests.support import postgres, processes
from tests.support.postgres import Schema, Server, running, server_for_tests
from tests.support.stores import Admin, appending, named, opened, stored

pytestmark = pytest.mark.processes


@pytest.fixture
def empty() -> Iterator[str]:
    """The DSN of a database without anything in it."""
    made = server_for_tests().fresh_database()
    yield made
    server_for_tests().drop(made)


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """A server that asks for passwords, except the superuser's."""
    with running() as made:
        made.execute("CREATE ROLE someone LOGIN PASSWORD 'right'")
        made.execute("CREATE ROLE poor LOGIN")
        made.execute("CREATE DATABASE taken")
        rules = "host all postgres 127.0.0.1/32 trust\nhost all poor 127.0.0.1/32 trust\n"
        (made.data / "pg_hba.conf").write_text(rules + "host all all 127.0.0.1/32 scram-sha-256\n")
        made.execute("SELECT pg_reload_conf()")
        postgres.wait_until(lambda: not _comes_in(made.dsn().replace("postgres@", "someone:x@")), "no password asked")
        yield made


def _comes_in(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return False
    return True


def open_and_close(dsn: Any, **options: Any) -> None:
    async def main() -> None:
        async with PostgresCheckpointer(dsn, **options) as cp:
            await cp.append("t", UserMessage("x"))

    asyncio.run(main())


# --- tables -----------------------------------------------------------------------------------------------------------


def test_tables_are_made_and_found_again(empty: str) -> None:
    for _ in range(2):
        open_and_close(empty)
    admin = Admin(empty)
    assert admin.one("SELECT count(*) FROM byssus.messages") == 2
    assert admin.all("SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []
    admin.close()


def test_two_schemas_side_by_side_do_not_see_each_other(empty: str) -> None:
    async def main() -> None:
        one, mixed = PostgresCheckpointer(empty, schema="one"), PostgresCheckpointer(empty, schema="One")
        plain, dsn = PostgresCheckpointer(empty), PostgresCheckpointer(empty + "&schema=one")
        async with one, mixed, plain, dsn:
            for cp in (one, mixed, plain):
                await cp.append("t", UserMessage(type(cp).__name__))
            loaded = [await cp.load("t") for cp in (one, mixed, plain, dsn)]
            assert [len(thread.messages) for thread in loaded if thread] == [1] * 4
            assert dsn.store is one.store
            assert mixed.store is not one.store

    asyncio.run(main())


@pytest.mark.parametrize("name", ["select", "user", "A_b9", "_", "x" * 63])
def test_a_schema_may_have_any_plain_name(empty: str, name: str) -> None:
    open_and_close(empty, schema=name)
    with opened(Schema(empty, name)) as store:
        assert len(stored(store)) == 1


@pytest.mark.parametrize(
    "name", ["", "a b", 'a"b', "a.b", "1a", "x" * 64, "pg_mine", "PG_MINE", "é", "a;b", 3, b"a", "a\0"]
)
def test_a_schema_with_another_name_is_an_input_error(name: Any) -> None:
    with pytest.raises(InputError, match="schema"):
        PostgresCheckpointer("postgresql://h/db", schema=name)


def test_a_schema_is_named_once() -> None:
    with pytest.raises(InputError, match="say it once"):
        PostgresCheckpointer("postgresql://h/db?schema=a", schema="b")
    PostgresCheckpointer("postgresql://h/db?schema=a", schema="a")
    with pytest.raises(InputError, match="schema"):
        PostgresCheckpointer("postgresql://h/db?schema=")


def test_a_database_from_a_newer_byssus_is_refused_and_left_alone(where: Schema) -> None:
    open_and_close(where.dsn, schema=where.name)
    admin = Admin(where.dsn)
    admin.all(f'UPDATE "{where.name}".byssus_schema SET version = 9999')
    with pytest.raises(StoreUnusable, match=r"newer byssus \(schema 9999.*upgrade"):
        open_and_close(where.dsn, schema=where.name)
    assert admin.one(f'SELECT count(*) FROM "{where.name}".messages') == 1
    admin.close()


@pytest.mark.parametrize("table", ["threads", "messages", "inbox", "writers"])
def test_another_programs_tables_are_refused_and_nothing_is_written(where: Schema, table: str) -> None:
    admin = Admin(where.dsn)
    admin.all(f'CREATE TABLE "{where.name}".{table} (mine INTEGER)')
    with pytest.raises(StoreUnusable, match=rf"another program's tables \({table}\).*schema="):
        open_and_close(where.dsn, schema=where.name)
    found = admin.all("SELECT tablename FROM pg_tables WHERE schemaname = %s", where.name)
    assert found == [(table,)]
    admin.close()


def test_an_older_server_is_refused_with_both_versions(where: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_server, "OLDEST", 99)
    with pytest.raises(StoreUnusable, match=r"is Postgres \d+; byssus needs 99 or newer"):
        open_and_close(where.dsn, schema=where.name)


def test_a_database_that_is_not_utf8_is_refused(strict: Server) -> None:
    strict.execute("CREATE DATABASE ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(StoreUnusable, match=r"SQL_ASCII.*ENCODING 'UTF8'"):
        open_and_close(strict.dsn("ascii"))


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_client_encoding_from_outside_changes_nothing(
    where: Schema, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", encoding)
    with opened(where) as store:
        store.write_now(appending("žluťoučký 🐎", "č"))
        assert stored(store, "č") == ["žluťoučký 🐎"]


def test_settings_of_the_database_change_nothing(where: Schema) -> None:
    odd = {
        "search_path": "pg_temp",
        "DateStyle": "German",
        "IntervalStyle": "sql_standard",
        "TimeZone": "Asia/Kathmandu",
        "default_transaction_isolation": "serializable",
        "standard_conforming_strings": "off",
        "extra_float_digits": "-15",
    }
    with opened(where, dsn=named(where.dsn, "odd", **odd)) as store:
        store.write_now(appending("\\x 'quoted'"))
        assert stored(store) == ["\\x 'quoted'"]
        info = store.read_now(listing.one, ThreadKey("", "t"))
        assert info is not None
        assert info.updated_at[10] == "T"
        assert info.updated_at.endswith("Z")


# --- rights -----------------------------------------------------------------------------------------------------------


def test_a_user_without_rights_is_told_what_to_grant(strict: Server) -> None:
    poor = strict.dsn("taken").replace("postgres@", "poor@")
    with pytest.raises(StoreError, match="GRANT CREATE ON DATABASE") as caught:
        open_and_close(poor)
    assert_one_line(caught.value)
    open_and_close(strict.dsn("taken"))  # the owner makes the tables, and grants nothing
    with pytest.raises(StoreError, match="permission denied") as caught:
        open_and_close(poor)
    assert_one_line(caught.value)
    strict_admin = Admin(strict.dsn("taken"))
    strict_admin.all("GRANT USAGE ON SCHEMA byssus TO poor")
    strict_admin.all("GRANT SELECT ON byssus.byssus_schema TO poor")
    with pytest.raises(StoreError, match="permission denied for table"):
        open_and_close(poor)
    strict_admin.all("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA byssus TO poor")
    open_and_close(poor)
    strict_admin.close()


# --- DSNs -------------------------------------------------------------------------------------------------------------

SECRET = "hunter2"  # in every DSN below


def assert_one_line(error: BaseException) -> None:
    assert len(str(error).splitlines()) == 1, str(error)


def told(make: Callable[[], object], caplog: pytest.LogCaptureFixture) -> tuple[ByssusError, str]:
    """The error, and all that anybody may get to see of it."""
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    with pytest.raises(ByssusError) as caught:
        make()
    error = caught.value
    return error, "\n".join([str(error), repr(error), *traceback.format_exception(error), caplog.text])


UNREADABLE = [
    f"postgresql://u:p%zz{SECRET}@h/db",
    f"postgresql://u:{SECRET} x@h:port/db",
    f"postgresql://u:{SECRET}@[::1/db",
    f"postgresql://h/db?pasword={SECRET}",
    f"postgresql://h/db?{SECRET}",
    f"host=h pasword={SECRET}",
    f"host=h password='{SECRET}",
    f"postgresql://u:{SECRET}\0@h/db",
    f"postgresql://u:{SECRET}\ud800@h/db",
    f"just {SECRET}",
]


@pytest.mark.parametrize("dsn", UNREADABLE)
def test_a_dsn_that_cannot_be_read_is_an_input_error_that_does_not_show_it(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    for make in (lambda: PostgresCheckpointer(dsn), lambda: PostgresCheckpointer("postgresql://h", listen_dsn=dsn)):
        error, text = told(make, caplog)
        assert isinstance(error, InputError)
        assert SECRET not in text
        assert_one_line(error)
        assert "postgresql://user:password@host:5432/database" in str(error)


@pytest.mark.parametrize("dsn", ["", None, b"postgresql://h/db", 5])
def test_what_is_no_dsn_at_all_is_an_input_error(dsn: Any) -> None:
    with pytest.raises(InputError, match="postgresql://user:password@host:5432/database"):
        PostgresCheckpointer(dsn)


# What people write when their password has a character that should have been percent-encoded: libpq reads a part of the
# password as the host, the port or the database.
MISREAD = [
    f"postgresql://u:x@{SECRET}@127.0.0.1:1/db",
    f"postgresql://u:12/{SECRET}@127.0.0.1:1/db",
    f"postgresql://u:x/{SECRET}@127.0.0.1:1/db",
    f"postgresql://u:/{SECRET}@127.0.0.1:1/db",
    f"postgresql://127.0.0.1:{SECRET}/db",
    f"postgresql://u:x?{SECRET}@127.0.0.1:1/db",
    f"postgresql://u:x#{SECRET}@127.0.0.1:1/db",
    f"postgresql://u:x&{SECRET}@127.0.0.1:1/db",
    f"postgresql://u:x:{SECRET}@127.0.0.1:1/db",
    f"postgresql://127.0.0.1:1/db?password={SECRET}",
    f"host=127.0.0.1 port=1 password={SECRET}",
    f"postgresql://u:{SECRET}@127.0.0.1:1/db?options=-c%20x={SECRET}",
]


@pytest.mark.parametrize("dsn", MISREAD)
def test_a_password_is_never_shown_however_it_was_written(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    error, text = told(lambda: open_and_close(dsn), caplog)
    assert SECRET not in text
    assert_one_line(error)
    assert SECRET not in name_of(dsn)


def name_of(dsn: str) -> str:
    try:
        cp = PostgresCheckpointer(dsn)
    except InputError:
        return ""
    with pytest.raises(StoreNotOpen) as caught:
        _ = cp.store
    return cp.name + str(caught.value) + repr(cp) + repr(cp._server)


def test_a_password_with_a_question_mark_arrives_whole() -> None:
    for password in ("abc?", "a?&b", "?", "a?schema=x", "a&&b"):
        assert Place(f"host=h password={password}")._settings["password"] == password


def test_who_cannot_be_reached_is_named_with_the_next_step(strict: Server, caplog: pytest.LogCaptureFixture) -> None:
    tried = {
        strict.dsn().replace("postgres@", f"someone:{SECRET}@"): "password",
        strict.dsn("nowhere"): "nowhere",
        strict.dsn().replace("postgres@", "nobody_there@"): "nobody_there",
        f"postgresql://u:{SECRET}@127.0.0.1:1/db": "127.0.0.1:1",
        f"postgresql://u:{SECRET}@no-such-host.invalid/db": "no-such-host.invalid",
        f"postgresql://u:{SECRET}@/db?host=/nowhere/at/all": "/nowhere/at/all",
    }
    for dsn, word in tried.items():
        error, text = told(lambda dsn=dsn: open_and_close(dsn), caplog)  # type: ignore[misc]
        assert isinstance(error, StoreUnreachable | StoreUnusable), repr(error)
        assert word in str(error)
        assert PostgresCheckpointer(dsn).name in str(error)
        assert SECRET not in text
        assert "check" in str(error) or "create" in str(error)
        assert_one_line(error)
    open_and_close(strict.dsn("taken").replace("postgres@", "postgres:ignored@"))


def test_a_login_that_works_leaves_no_trace_of_its_password(strict: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    strict.execute(f"CREATE ROLE fine LOGIN PASSWORD '{SECRET}'")
    strict.execute("CREATE DATABASE fine OWNER fine")
    dsn = strict.dsn("fine").replace("postgres@", f"fine:{SECRET}@")
    with opened(Schema(dsn, "byssus")) as store:
        store.write_now(appending("x"))
        with pytest.raises(StoreError) as caught:
            store.write_now(lambda tx: tx.run("SELEKT"))
    shown = [*traceback.format_exception(caught.value), store.name, repr(store), repr(store.server), caplog.text]
    with pytest.raises(StoreNotOpen) as closed:
        store.write_now(appending("y"))
    assert SECRET not in "".join([*shown, str(closed.value)])


def test_without_psycopg_the_extra_is_named() -> None:
    script = """
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "psycopg":
                    raise ImportError(name)

        sys.meta_path.insert(0, Blocked())
        from byssus.checkpointer import PostgresCheckpointer
        from byssus.store import opening as places
        for make in (PostgresCheckpointer, places.open):
            try:
                make("postgresql://u:hunter2@h/db")
            except MissingExtra as error:
                assert ".[postgres]" in str(error), error
                assert "hunter2" not in str(error), error
                print("told")
    """
    assert processes.run(script, fresh=True).split() == ["told", "told"]


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_thread_id_that_is_too_long_for_an_index_is_an_input_error_and_nothing_is_half_written(where: Schema) -> None:
    noise = "".join(random.Random(7).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=9_000))

    async def main() -> None:
        async with PostgresCheckpointer(where.dsn, schema=where.name) as cp:
            for make in (
                lambda: cp.append(noise, UserMessage("x")),
                lambda: cp.save_extra(noise, {"a": 1}),
                lambda: cp.steer(noise, "x"),
            ):
                with pytest.raises(InputError, match="1,000 bytes of UTF-8 at most") as caught:
                    await make()
                assert_one_line(caught.value)
                assert len(str(caught.value)) < 1_000
            assert await cp.load(noise) is None
            assert await cp.threads() == []
            await cp.append(noise[:1_000], UserMessage("x"))

    asyncio.run(main())


def test_a_message_of_twenty_megabytes_comes_back(where: Schema) -> None:
    text = "ab\0c\ud800 🐎" + "0123456789" * 2_000_000

    async def main() -> None:
        async with PostgresCheckpointer(where.dsn, schema=where.name) as cp:
            await cp.append("t", UserMessage(text))
            thread = await cp.load("t")
            assert thread is not None
            assert thread.messages == [UserMessage(text, id=thread.messages[0].id)]  # type: ignore[union-attr]

    asyncio.run(main())


ODD = ["a\0b", "\ud800", "%s %(x)s %%", ":name ::x", "\\", "'; --", "\u2028", "", "🐎", "2" * 500, "\x1b[0m"]


def test_odd_text_comes_back_everywhere(where: Schema) -> None:
    async def main() -> None:
        async with PostgresCheckpointer(where.dsn, schema=where.name) as cp:
            for n, odd in enumerate(ODD):
                extra = {"odd": odd, odd: [odd], "big": 10**400, "nested": {"x": [1.5, None, True]}}
                await cp.append(
                    f"t{n}",
                    [UserMessage(odd, id=odd or "x"), AssistantMessage(odd), {"role": odd or "x", "content": odd}],
                )
                await cp.save_extra(f"t{n}", extra)
                await cp.steer(f"t{n}", UserMessage(f"said {odd}", id=f"said {odd}"))
                thread = await cp.load(f"t{n}")
                assert thread is not None
                assert thread.extra == extra
                assert thread.messages[0] == UserMessage(odd, id=odd or "x")
                assert [waiting.message.text for waiting in await cp.inbox(f"t{n}")] == [f"said {odd}"]
                assert await cp.withdraw(f"t{n}", f"said {odd}")

    asyncio.run(main())


def test_threads_are_listed_in_the_same_order_as_on_sqlite(where: Schema, tmp_path: Any) -> None:
    names = ["a", "B", "ä", "z", "Z", "é", "e\u0301", "🐎", "\uffff", "日本", "a-b", "ab", "_", "~", "ß", "I", "\u0131"]
    names += ["10", "9", "a b"]
    names += ["%", "::x", ":name", "\\", "a'b"]

    async def listed(cp: Any, place: Any) -> list[str]:
        async with cp:
            for name in names:
                await cp.append(name, UserMessage("x"))
            await cp.store.write(lambda tx: tx.run("UPDATE threads SET updated_at = '2026-01-01T00:00:00.000000Z'"))
            found = [info.id for info in await cp.threads(10)]
            while len(found) < len(names):
                found += [info.id for info in await cp.threads(4, before=found[-1])]
            return found

    mine = asyncio.run(listed(PostgresCheckpointer(where.dsn, schema=where.name), where))
    assert mine == asyncio.run(listed(SQLiteCheckpointer(tmp_path / "a.db"), tmp_path))
