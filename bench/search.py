"""Search: how fast messages are indexed and found, next to LIKE and to FTS5's trigrams, with the recall of each.

Half of the messages are Chinese. `--messages` says how many; `--database postgres` does the same there, without the
comparison. What an append costs with the index behind it is measured on databases of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from bench.measure import alternate, append_rate, report, scratch
from byssus.checkpointer import Checkpointer, PostgresCheckpointer, SQLiteCheckpointer
from byssus.messages import UserMessage, decode
from byssus.search import index, search, tokens
from byssus.storage import SearchOrder
from tests.support import postgres

QUERIES = 40  # of each kind
CHECKED = 2  # of each kind, whose whole result is compared with a scan
THREAD = 1_000  # messages a thread
QUOTE = '"'
COMMA = "\uff0c"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    given = parser.parse_args()
    folder = scratch()
    with asyncio.Runner() as runner:
        if given.database == "postgres":
            place = postgres.server_for_tests().fresh_schema()
            cp: Checkpointer = PostgresCheckpointer(place.dsn, schema=place.name)
        else:
            cp = SQLiteCheckpointer(folder / "search.db", durability="normal")
        runner.run(cp.open())
        runner.run(_fill(cp, given.messages))
        before = _size(folder)
        _index(runner, cp, given.messages)
        if given.database == "sqlite":
            grown = _size(folder) - before
            print(f"index: {grown / 1e6:,.0f} MB beside {before / 1e6:,.0f} MB of messages", flush=True)
        asked = _queries(given.messages)
        _ask(runner, cp, asked)
        if given.database == "sqlite":
            _compare(runner, cp, folder, asked, given.messages)
        runner.run(cp.close())
        if given.database == "sqlite":
            _appends(runner)


# --- what is searched -------------------------------------------------------------------------------------------------


class Corpus:
    """Text as people write it, as far as an index can tell: few words are frequent, and most are rare."""

    def __init__(self) -> None:
        chance = random.Random(7)
        hanzi = [chr(code) for code in range(0x4E00, 0x4E00 + 3_500)]
        chance.shuffle(hanzi)
        pick = list(itertools.accumulate(1 / (rank + 10) for rank in range(len(hanzi))))
        sizes = [chance.choice((1, 2, 2, 2, 3)) for _ in range(20_000)]
        self.chinese = ["".join(chance.choices(hanzi, cum_weights=pick, k=size)) for size in sizes]
        parts = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "ol", "ut")]
        ends = ("", "", "s", "ed", "ing", "ment", "ly")
        sizes = [chance.choice((2, 3, 3, 4)) for _ in range(20_000)]
        self.english = ["".join(chance.choices(parts, k=size)) + chance.choice(ends) for size in sizes]
        self._weights = list(itertools.accumulate(1 / (rank + 5) for rank in range(20_000)))
        self._chance = chance

    def texts(self, count: int) -> Iterator[str]:
        chance, weights = self._chance, self._weights
        for number in range(count):
            if number % 2:
                some = chance.choices(self.chinese, cum_weights=weights, k=chance.randint(10, 80))
                yield COMMA.join("".join(some[at : at + 7]) for at in range(0, len(some), 7)) + "。"
            else:
                yield " ".join(chance.choices(self.english, cum_weights=weights, k=chance.randint(8, 60))) + "."


async def _fill(cp: Checkpointer, count: int) -> None:
    started = time.perf_counter()
    texts = Corpus().texts(count)
    for number in itertools.count():
        some = list(itertools.islice(texts, THREAD))
        if not some:
            break
        await cp.append(f"thread {number}", [UserMessage(text) for text in some])
    print(f"{count:,} messages in {time.perf_counter() - started:.0f} s", flush=True)


def _index(runner: asyncio.Runner, cp: Checkpointer, count: int) -> None:
    started = time.perf_counter()
    assert runner.run(search.index(cp.store)) == count
    rate = count / (time.perf_counter() - started)
    report("messages indexed a second", f"{rate:,.0f}/s", rate / 3_000, 1, at_least=True)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _queries(count: int) -> dict[str, list[str]]:
    """Queries of each kind, taken from what was written: frequent words more often than rare ones."""
    texts = list(Corpus().texts(min(count, 20_000)))
    chance = random.Random(11)

    def some(make: Callable[[str], str], *, chinese: bool) -> list[str]:
        return [make(texts[chance.randrange(len(texts) // 2) * 2 + chinese]) for _ in range(QUERIES)]

    def piece(size: int) -> Callable[[str], str]:
        def make(text: str) -> str:
            part = max(text.strip("。").split(COMMA), key=len)
            at = chance.randrange(max(1, len(part) - size))
            return part[at : at + size]

        return make

    def phrase(text: str) -> str:
        parts = text.strip(".").split()
        at = chance.randrange(len(parts) - 1)
        return f'"{parts[at]} {parts[at + 1]}"'

    return {
        "one character": some(piece(1), chinese=True),
        "two characters": some(piece(2), chinese=True),
        "four characters": some(piece(4), chinese=True),
        "word": some(lambda text: chance.choice(text.strip(".").split()), chinese=False),
        "phrase": some(phrase, chinese=False),
    }


# --- asking -----------------------------------------------------------------------------------------------------------


def _ask(runner: asyncio.Runner, cp: Checkpointer, asked: dict[str, list[str]]) -> None:
    def took(query: str, order: SearchOrder = "newest") -> float:
        return _timed(lambda: runner.run(search.search(cp.store, query, order=order)))

    for kind, queries in asked.items():
        bar = 200 if kind == "one character" else 50
        for query in queries[:5]:  # which warms up
            took(query)
        taken = [took(query) for query in queries]
        worst = _percentile(taken, 95)
        figure = f"p50 {_percentile(taken, 50):.1f} ms, p95 {worst:.1f} ms"
        report(f"search, {kind}", figure, worst / bar, 1, at_least=False)
    for kind in ("two characters", "word"):
        taken = [took(query, "relevance") for query in asked[kind]]
        print(
            f"by relevance, {kind}: p50 {_percentile(taken, 50):.1f} ms, p95 {_percentile(taken, 95):.1f} ms",
            flush=True,
        )


def _compare(runner: asyncio.Runner, cp: Checkpointer, folder: Path, asked: dict[str, list[str]], count: int) -> None:
    """The same questions to LIKE and to FTS5's trigrams; and what of a scan each of them finds."""
    connection = apsw.Connection(str(folder / "search.db"))
    other = apsw.Connection(str(folder / "trigram.db"))
    other.execute("PRAGMA journal_mode = off; PRAGMA synchronous = off")
    other.execute("CREATE VIRTUAL TABLE grams USING fts5 (text, content = '', tokenize = 'trigram')")
    checked = {query: tokens.parse(query) for queries in asked.values() for query in _rare(connection, queries)}
    expected: dict[str, set[int]] = {query: set() for query in checked}
    spent = 0.0
    other.execute("BEGIN")
    for key, body in connection.execute("SELECT key, body FROM messages"):
        text = decode(body).text
        started = time.perf_counter()
        other.execute("INSERT INTO grams (rowid, text) VALUES (?, ?)", (key, text))
        spent += time.perf_counter() - started
        for query, matcher in checked.items():
            if matcher.find(text):
                expected[query].add(key)
    started = time.perf_counter()
    other.execute("COMMIT")
    spent += time.perf_counter() - started
    size = (folder / "trigram.db").stat().st_size
    print(f"FTS5 trigram: {count / spent:,.0f} messages/s, {size / 1e6:,.0f} MB", flush=True)
    keys: dict[str, int] = {name: key for key, name in connection.execute("SELECT key, id FROM messages")}
    for kind, queries in asked.items():
        like = [_timed(lambda: _like(connection, query, 20)) for query in queries[: QUERIES // 4]]  # noqa: B023
        grams = [_timed(lambda: _trigram(other, query, 20)) for query in queries[: QUERIES // 4]]  # noqa: B023
        found = dict.fromkeys(("byssus", "LIKE", "trigram"), 0)
        sure = [query for query in queries if query in checked]
        for query in sure:
            hits = runner.run(search.search(cp.store, query, limit=10_000))
            found["byssus"] += len(expected[query] & {keys[hit["message_id"]] for hit in hits})
            assert len(hits) == len(expected[query]), f"{query}: {len(hits)} hits, and {len(expected[query])} by a scan"
            found["LIKE"] += len(expected[query] & _like(connection, query, -1))
            found["trigram"] += len(expected[query] & _trigram(other, query, -1))
        whole = sum(len(expected[query]) for query in sure)
        print(
            f"{kind}: LIKE p95 {_percentile(like, 95):,.0f} ms, trigram p95 {_percentile(grams, 95):,.0f} ms",
            flush=True,
        )
        for name, got in found.items():
            print(f"  recall of {name}: {100 * got / max(whole, 1):.1f} % of {whole:,}", flush=True)


def _rare(connection: apsw.Connection, queries: list[str]) -> list[str]:
    """Some with so few results that one search gives them all."""
    rare = (query for query in queries if len(_like(connection, query, 7_000)) < 7_000)
    return list(itertools.islice(rare, CHECKED))


def _like(connection: apsw.Connection, query: str, limit: int) -> set[int]:
    rows = connection.execute(
        "SELECT key FROM messages WHERE body LIKE ? ORDER BY key DESC LIMIT ?", (f"%{query.strip(QUOTE)}%", limit)
    )
    return {key for (key,) in rows}


def _trigram(connection: apsw.Connection, query: str, limit: int) -> set[int]:
    quoted = '"' + query.strip(QUOTE) + '"'
    rows = connection.execute(
        "SELECT rowid FROM grams WHERE grams MATCH ? ORDER BY rowid DESC LIMIT ?", (quoted, limit)
    )
    return {key for (key,) in rows}


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def _percentile(taken: list[float], percent: int) -> float:
    return sorted(taken)[min(len(taken) - 1, len(taken) * percent // 100)]


# --- what an append costs ---------------------------------------------------------------------------------------------


def _appends(runner: asyncio.Runner) -> None:
    """With the index behind it and without, in turns."""
    folder = scratch()
    plain = runner.run(SQLiteCheckpointer(folder / "plain.db").open())
    indexed = runner.run(SQLiteCheckpointer(folder / "indexed.db").open())
    index.of(indexed.store).start()

    def caught_up() -> bool:
        return all(kind.waiting == 0 for kind in runner.run(search.state(indexed.store)).values())

    def behind(at_once: int, each: int) -> float:
        rate = runner.run(append_rate(indexed, at_once, each))
        while not caught_up():  # else it would do so at the cost of the other one
            time.sleep(0.05)
        return rate

    for at_once, each in ((1, 1_000), (64, 100)):
        without, rate = alternate(
            7,
            lambda: runner.run(append_rate(plain, at_once, each)),  # noqa: B023
            lambda: behind(at_once, each),  # noqa: B023
        )
        figure = f"{rate:,.0f}/s, without {without:,.0f}/s"
        report(f"append with search on, {at_once} at a time", figure, rate / without, 0.9, at_least=True)
    runner.run(plain.close())
    runner.run(indexed.close())


if __name__ == "__main__":
    main()
