"""Usage statistics and prices: operations for both APIs (see store/operations.py).

A period is a number of days in UTC, and today is the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from itertools import groupby
from typing import Any, cast

from byssus.accounts.rows import PriceRow, UsageStats
from byssus.errors import InputError, NotFound
from byssus.queries.accounts import usage, users
from byssus.queries.accounts.usage import Scope
from byssus.queries.log import threads
from byssus.store.database import Row, Tx
from byssus.store.operations import Runner
from byssus.values.inputs import checked_text, readable_id
from byssus.values.thread_key import ThreadKey

_LONGEST_PERIOD = 36_500  # days
_PARTS = ("messages", "tokens", "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "cost")
_PERCENTILES = (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99))


async def get_usage_stats(store: Runner, user_id: str | None, days: int = 7) -> UsageStats | None:
    """Return the usage of a user (None: all users) in the last days: in total, and by day, model, session and tool.

    None if the user is unknown. The times of tools (`avg_latency`, `p50` to `p99`) are in milliseconds; percentiles are
    accurate to 2.5 %.
    """
    name = None if user_id is None else readable_id(user_id, "a user id")
    period = _checked_days(days)
    if user_id is not None and (name is None or await store.read(users.get, name) is None):
        return None
    return await store.read(_stats, name, None, period)


async def get_session_usage(store: Runner, session_id: str, days: int | None = None) -> UsageStats | None:
    """Return the usage of one session: in the last days, or without `days` since it began. None if it is unknown.

    The result has the same fields as that of `get_usage_stats`.
    """
    name, period = readable_id(session_id, "a session id"), None if days is None else _checked_days(days)
    return None if name is None else await store.read(_session_stats, ThreadKey("", name), period)


async def set_price(
    store: Runner,
    model: str,
    *,
    input: float = 0.0,
    output: float = 0.0,
    cache_read: float = 0.0,
    cache_write: float = 0.0,
) -> None:
    """Set the price of a million tokens of a model. It applies to messages that have no cost of their own."""
    given = {"input": input, "output": output, "cache_read": cache_read, "cache_write": cache_write}
    for name, price in given.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < 1e12:
            raise InputError(f"the price of {name} tokens must be a number from 0 up, got {price!r:.80}")
    await store.write(usage.set_price, _checked_model(model), {name: float(price) for name, price in given.items()})


async def get_prices(store: Runner) -> dict[str, PriceRow]:
    """Return all prices: for each model, the price of a million tokens of each kind."""
    names = ("input", "output", "cache_read", "cache_write")
    prices = {model: dict(zip(names, row, strict=True)) for model, *row in await store.read(usage.prices)}
    return cast("dict[str, PriceRow]", prices)


async def delete_price(store: Runner, model: str) -> None:
    """Remove the price of a model. Costs that were computed with it do not change."""
    if not await store.write(usage.remove_price, _checked_model(model)):
        raise NotFound(f"no price is set for the model {model!r}; get_prices() lists them")


def _session_stats(tx: Tx, thread_key: ThreadKey, days: int | None) -> UsageStats | None:
    thread = threads.find(tx, thread_key)
    if thread is None:
        return None
    stats = _stats(tx, None, thread.key, days or _LONGEST_PERIOD)
    if days is None:
        first = min([thread.created_at[:10], *(row["day"] for row in stats["by_day"])])
        passed = date.fromisoformat(usage.today(tx, 0)) - date.fromisoformat(first)
        stats["since"], stats["period_days"] = first, max(passed.days, 0) + 1
    return stats


def _stats(tx: Tx, user: str | None, thread: int | None, days: int) -> UsageStats:
    scope = Scope(user, thread, usage.today(tx, days - 1))
    by_day = [_parts("day", row) for row in usage.by(tx, "day", scope)]
    by_model = [_parts("model", row) for row in usage.by(tx, "model", scope)]
    by_session = [_parts("session_id", row) for row in usage.by(tx, "thread_id", scope)]
    total = {name: sum(day[name] for day in by_day) for name in _PARTS}
    stats = {
        "period_days": days,
        "since": scope.since,
        "session_count": usage.sessions(tx, scope),
        "total_tokens": total["tokens"],
        "total_messages": total["messages"],
        "total_cost": rounded_cost(total["cost"]),
        **{name: total[name] for name in _PARTS if name.endswith("_tokens")},
        "by_day": by_day,
        "by_model": [row for row in by_model if row["model"]],
        "by_session": sorted(by_session, key=lambda row: (-row["tokens"], row["session_id"] or "")),
        "tool_usage": _tools(usage.tools(tx, scope)),
    }
    return cast("UsageStats", stats)


def _parts(name: str, row: Row) -> dict[str, Any]:
    key, *counts, cost = row
    return {name: key, **dict(zip(_PARTS, map(int, counts), strict=False)), "cost": rounded_cost(cost)}


def rounded_cost(total: Any) -> float:
    """Return a sum of costs without its last digits, which depend on the order in which a database adds."""
    return round(float(total), 12)


def _tools(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the statistics of each tool, merged from its time buckets."""
    found = []
    for name, group in groupby(rows, key=lambda row: row[0]):
        buckets = [(int(bucket), int(calls), int(failures), float(ms)) for _, bucket, calls, failures, ms in group]
        calls, failures = sum(row[1] for row in buckets), sum(row[2] for row in buckets)
        timed = [(bucket, number) for bucket, number, _, _ in buckets if bucket >= 0]
        count = sum(number for _, number in timed)
        found.append(
            {
                "tool_name": name,
                "call_count": calls,
                "avg_latency": sum(row[3] for row in buckets) / count if count else None,
                "failures": failures,
                "failure_rate": failures / calls,
                **{label: _percentile(timed, count, part) for label, part in _PERCENTILES},
            }
        )
    return sorted(found, key=lambda tool: (-tool["call_count"], tool["tool_name"]))


def _percentile(timed: list[tuple[int, int]], count: int, part: float) -> float | None:
    """Return the time that this share of the calls did not exceed."""
    seen = 0
    for bucket, number in timed:
        seen += number
        if seen >= part * count:
            return usage.middle_of(bucket)
    return None


def _checked_days(days: object) -> int:
    if isinstance(days, bool) or not isinstance(days, int) or not 1 <= days <= _LONGEST_PERIOD:
        raise InputError(f"days must be a whole number from 1 to {_LONGEST_PERIOD:,}, got {days!r:.80}")
    return days


def _checked_model(model: object) -> str:
    if not model:
        raise InputError(f"a model's name must be a string with at least one character, got {model!r:.80}")
    return checked_text("a model's name", model)[: usage.LONG_NAME]
