"""What a user has spent, asked of a database with a million messages, of which 100,000 are theirs.

Next to it, in the same run: the same sums from the messages themselves, in plain SQL. `--messages` for fewer of them,
`--database postgres` for the same there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.measure import report, scratch
from byssus.messages import AssistantMessage, Usage, UserMessage
from byssus.queries.log import threads
from byssus.storage import AgentStorage
from byssus.store.database import Tx
from byssus.threads.encoding import message_row
from byssus.values import clock
from byssus.values.thread_key import ThreadKey
from tests.support import postgres

TEXT = "x" * 330
PAGE = 100  # messages of a session
DAYS = 30
BAR_MS = 50.0

_SCAN = {
    "sqlite": (
        "SELECT COUNT(*), SUM(COALESCE(json_extract(m.body, '$.usage.input'), 0)"
        " + COALESCE(json_extract(m.body, '$.usage.output'), 0))"
        " FROM threads t JOIN branches b ON b.thread = t.key JOIN messages m ON m.branch = b.key"
        " WHERE t.owner = :user AND m.created_at >= :since"
    ),
    "postgresql": (
        "SELECT COUNT(*), SUM(COALESCE((m.body::json #>> '{{usage,input}}')::bigint, 0)"
        " + COALESCE((m.body::json #>> '{{usage,output}}')::bigint, 0))"
        " FROM threads t JOIN branches b ON b.thread = t.key JOIN messages m ON m.branch = b.key"
        " WHERE t.owner = :user AND m.created_at >= :since"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    options = parser.parse_args()
    with contextlib.ExitStack() as ends:
        place = (
            str(scratch() / "usage.db")
            if options.database == "sqlite"
            else f"{ends.enter_context(postgres.running(fsync='off')).dsn()}"
        )
        storage = ends.enter_context(AgentStorage(place))
        users = [storage.create_user(f"user {n}", quota_total=None)["id"] for n in range(10)]
        took = fill(storage, users, options.messages)
        print(f"{options.messages:,} messages of {len(users)} users, {options.messages / took:,.0f}/s")
        measure(storage, users[3])


def fill(storage: AgentStorage, users: list[str], count: int) -> float:
    """Sessions of a hundred messages, each on another day of the last month."""
    started = time.perf_counter()
    said = message_row(UserMessage(TEXT))
    replies = [
        message_row(AssistantMessage(TEXT, usage=Usage(900, 80 + n, cache_read=400), model=f"model-{n}"))
        for n in range(3)
    ]
    real = clock.now
    days = itertools.cycle(range(DAYS))
    pending = []
    for number in range(count // PAGE):
        rows = [row for _ in range(PAGE // 2) for row in (said, replies[number % 3])]
        pending.append((f"session-{number}", users[number % len(users)], rows, next(days)))
        if len(pending) == 20:
            _write(storage, pending, real)
            pending = []
    _write(storage, pending, real)
    return time.perf_counter() - started


def _write(storage: AgentStorage, pending: list[Any], real: Callable[[], str]) -> None:
    def query(tx: Tx, rows: list[Any]) -> None:
        for session, user, messages, _ in rows:
            threads.append(tx, ThreadKey("", session), messages, owner=user)

    for _, same in itertools.groupby(sorted(pending, key=lambda each: each[3]), key=lambda each: each[3]):
        group = list(same)
        moment = clock.after(real(), -86_400.0 * group[0][3])
        clock.now = lambda moment=moment: moment  # type: ignore[misc]
        try:
            storage.store.write_now(query, group)
        finally:
            clock.now = real


def measure(storage: AgentStorage, user: str) -> None:
    for days in (7, 30, 365):
        stats = storage.get_usage_stats(user, days)
        assert stats is not None
        p50, p95 = _times(lambda days=days: storage.get_usage_stats(user, days))  # type: ignore[misc]
        what = f"usage of a user, {days} days: {stats['total_messages']:,} messages"
        report(what, f"p50 {p50:.1f} ms, p95 {p95:.1f} ms", p95 / BAR_MS, 1.0, at_least=False)
    since = clock.after(clock.now(), -86_400.0 * 29)[:10]

    def scan(tx: Tx) -> Any:
        return tx.all(_SCAN[storage.store.dialect.name], user=user, since=since)

    started = time.perf_counter()
    (found,) = storage.store.read_now(scan)
    took = (time.perf_counter() - started) * 1_000
    kept = storage.get_usage_stats(user, 30)
    assert kept is not None
    assert found[0] == kept["total_messages"], json.dumps(kept)
    print(f"the same 30 days from the messages themselves: {took:,.0f} ms")


def _times(ask: Callable[[], object], rounds: int = 40) -> tuple[float, float]:
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        ask()
        taken.append((time.perf_counter() - started) * 1_000)
    return statistics.median(taken), sorted(taken)[int(0.95 * rounds)]


if __name__ == "__main__":
    main()
