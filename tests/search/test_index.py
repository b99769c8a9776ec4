"""The index on Postgres, where rows appear out of the order of their keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from byssus.messages import UserMessage
from byssus.queries.log import threads
from byssus.queries.search import index as queries
from byssus.queries.search.kinds import MESSAGE
from byssus.search import search as searching
from byssus.search.index import Indexer
from byssus.store.operations import Blocking, to_the_end
from byssus.store.postgres.store import PostgresStore
from byssus.threads.encoding import message_row
from byssus.values.thread_key import ThreadKey
from tests.support.postgres import Schema
from tests.support.stores import opened


@pytest.fixture
def store(where: Schema, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresStore]:
    monkeypatch.setattr(Indexer, "start", lambda _: None)  # what is indexed when is up to the test
    with opened(where) as made:
        yield made


def say(store: PostgresStore, thread_id: str, *texts: str) -> None:
    store.write_now(threads.append, ThreadKey("", thread_id), [message_row(UserMessage(text)) for text in texts])


def found(store: PostgresStore, query: str) -> list[str]:
    return [hit["content"] for hit in to_the_end(searching.search(Blocking(store), query, limit=1_000))]


def index(store: PostgresStore) -> int:
    return to_the_end(searching.index(Blocking(store)))


def test_a_row_that_appears_below_others_is_found_and_indexed(store: PostgresStore, where: Schema) -> None:
    say(store, "slow", "word 0")
    row = store.read_now(threads.find, ThreadKey("", "slow"))
    assert row is not None
    with psycopg.connect(where.dsn, options=f"-c search_path={where.name}") as slow:
        slow.execute("UPDATE threads SET head = head + 1 WHERE id = 'slow'")
        late = slow.execute(
            "INSERT INTO messages (branch, seq, id, role, body, created_at) VALUES (%s, 2, 'x', 'user', %s, '')"
            " RETURNING key",
            [row.branch, message_row(UserMessage("word late")).body],
        ).fetchall()[0][0]
        for number in range(1, 6):
            say(store, "fast", f"word {number}")
            index(store)
            assert found(store, "word") == [f"word {each}" for each in range(number, -1, -1)]
        assert store.read_now(queries.state, MESSAGE).upto < late
    expected = [*(f"word {number}" for number in range(5, 0, -1)), "word late", "word 0"]
    assert found(store, "word") == expected
    assert index(store) == 1
    assert found(store, "word") == expected
    say(store, "fast", "word 6")
    index(store)
    say(store, "fast", "word 7")
    index(store)
    assert store.read_now(queries.state, MESSAGE).upto > late
    assert found(store, "word") == ["word 7", "word 6", *expected]


def test_a_watermark_of_another_server_is_not_trusted(store: PostgresStore) -> None:
    """Numbers of transactions begin anew where a dump is restored."""
    say(store, "t", "word 1", "word 2")
    index(store)
    store.write_now(lambda tx: tx.run("UPDATE indexing SET horizon = 4611686018427387904, horizon_key = 1000000"))
    for number in range(3, 7):
        say(store, "t", f"word {number}")
        index(store)
    state = store.read_now(queries.state, MESSAGE)
    assert 2 < state.upto <= 6
    assert len(found(store, "word")) == 6


def test_what_is_deleted_takes_its_tokens_along(store: PostgresStore) -> None:
    say(store, "t", "word 1", "word 2")
    index(store)
    store.write_now(lambda tx: tx.run("DELETE FROM messages"))
    assert store.read_now(lambda tx: tx.all("SELECT * FROM message_words")) == []


def test_many_may_index_at_once(store: PostgresStore) -> None:
    say(store, "t", *(f"word {number}" for number in range(300)))

    async def main() -> int:
        return sum(await asyncio.gather(*(searching.index(store) for _ in range(4))))

    assert asyncio.run(main()) >= 300
    assert len(found(store, "word")) == 300
