"""Which database a text means, and that no password of it is ever shown."""

from __future__ import annotations

import pytest

from byssus.values.places import EXAMPLE, looks_like_dsn, postgres_dsn, redacted


@pytest.mark.parametrize(
    ("place", "dsn"),
    [
        ("postgresql://u:p@h/db", "postgresql://u:p@h/db"),
        ("postgres://u:p@h/db", "postgresql://u:p@h/db"),
        ("POSTGRESQL://u:P@h/db", "postgresql://u:P@h/db"),
        ("postgresql+psycopg://u:p@h/db", "postgresql://u:p@h/db"),
        ("postgresql+asyncpg://u:p@h/db?sslmode=require", "postgresql://u:p@h/db?sslmode=require"),
        ("postgres+psycopg2://u:p@h/db", "postgresql://u:p@h/db"),
        ("  postgresql://u:p@h/db\n", "postgresql://u:p@h/db"),
        ("host=h dbname=db password=p", "host=h dbname=db password=p"),
        (" dbname = db", "dbname = db"),
        ("user=u password='a b'", "user=u password='a b'"),
        ("host=/var/run/postgresql", "host=/var/run/postgresql"),
        ("service=chat", "service=chat"),
        ("port=5432 host=h", "port=5432 host=h"),
    ],
)
def test_postgres_is_recognised_however_it_is_written(place: str, dsn: str) -> None:
    assert postgres_dsn(place) == dsn
    assert looks_like_dsn(place)


@pytest.mark.parametrize(
    "place",
    [
        "mysql://u:p@h/db",
        "redis://:p@h",
        "sqlite:///chat.db",
        "jdbc:postgresql://h/db?user=u&password=p",
        "DATABASE_URL=postgresql://u:p@h/db",
        "u:p@h/db",
        "//u:p@h/db",
        "u:p w@h/db",
        "postgresql:/u:p@h/db",  # what pathlib makes of it
    ],
)
def test_any_other_dsn_is_neither_postgres_nor_a_path(place: str) -> None:
    assert postgres_dsn(place) is None
    assert looks_like_dsn(place)


@pytest.mark.parametrize(
    "place",
    [
        "chat.db",
        "./chat.db",
        "/srv/chat.db",
        "~/chat.db",
        ":memory:",
        "run=7.db",
        "a=b/c=d.db",
        "user=ann/chat.db",
        "user=ann.db",
        "host=web1/chat.db",
        "./host=h password=p",
        "data:2026/chat.db",
        "ann@home.db",
        "mail/ann@home:1.db",
        "café 你好.db",
        "my host=1.db",
    ],
)
def test_a_path_remains_a_path(place: str) -> None:
    assert postgres_dsn(place) is None
    assert not looks_like_dsn(place)


@pytest.mark.parametrize("place", [None, 7, b"postgresql://u:p@h/db"])
def test_what_is_no_text_is_no_dsn(place: object) -> None:
    assert postgres_dsn(place) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:hunter2@h/db", "postgresql://***@h/db"),
        ("MySQL://u:hun@te:r2/x@h/db", "MySQL://***@h/db"),
        ("mysql://u:hun ter2@h/db", "mysql://***@h/db"),
        ("redis://:hunter2@h", "redis://***@h"),
        ("postgresql:/u:hunter2@h/db", "postgresql:/***@h/db"),
        ("host=h password=hunter2", "host=h password=***"),
        ("host=h password = 'hun ter2' dbname=d", "host=h password =***"),
        ("Server=h;Uid=u;Pwd=hunter2;", "Server=h;Uid=u;Pwd=***"),
        ("postgresql://h/db?user=u&password=hunter2", "postgresql://h/db?user=u&password=***"),
        ("u:hunter2@h/db", "u:***@h/db"),
        ("u:hun ter2@h/db", "u:***@h/db"),
        ("unrecognized arguments: u:hunter2@h/db", "unrecognized arguments: u:***@h/db"),
        ("invalid choice: 'mysql://u:hunter2@h' (choose", "invalid choice: 'mysql://***@h' (choose"),
        ("from mysql://u:hunter2@h to redis://:hunter2@h", "from mysql://***@h"),
    ],
)
def test_nothing_of_a_password_is_shown(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


def test_the_example_in_our_own_errors_stays() -> None:
    text = f"'mysql://***@h' is no path; write it as {EXAMPLE}; at 12:03 ann@example.org called pass x=1, max_tokens=5"
    assert redacted(text) == text
    text = f"'mysql://h/db' is no path; write it as {EXAMPLE}"  # no login: what follows does not belong to it
    assert redacted(text) == text
