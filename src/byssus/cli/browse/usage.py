"""`byssus usage`: what was said and spent, by day, model and tool. On a terminal it is drawn as bars, too."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from byssus.checkpointer import Checkpointer
from byssus.cli.ids import whole_id
from byssus.cli.screen import plots, terminal
from byssus.cli.screen.plots import Bar
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add, count, number, with_thread, work_on
from byssus.errors import InputError

if TYPE_CHECKING:
    from byssus.storage import UsageStats

_MOST_DAYS = 31  # of a plot with a row for each day; of a longer period, those with usage have one
_PERCENTILES = ("p50", "p90", "p95", "p99")


def add_to(commands: Any) -> None:
    parser = add(commands, "usage", _usage, json=True)
    parser.add_argument("user", metavar="USER", nargs="?", help="the user's id (default: all users)")
    parser.add_argument(
        "--days", type=number, default=7, metavar="N", help="number of days, including today (default: 7)"
    )
    parser.add_argument("--plot", action="store_true", help="draw the plots also where the output is not a terminal")
    parser.add_argument("--recount", action="store_true", help="count everything again, and list the differences")


def _usage(args: argparse.Namespace) -> int:
    if args.recount:
        return _recount(args)

    async def usage(cp: Checkpointer) -> UsageStats | None:
        return await cp.get_usage_stats(args.user and await whole_id(cp, "user", args.user), args.days)

    stats = work_on(args, usage)
    if stats is None:
        raise InputError(f"there is no user {args.user!r}; 'byssus users' lists them")
    if args.json:
        totals = {name: value for name, value in stats.items() if name not in ("session_count", "by_session")}
        by_thread = [with_thread(row) for row in stats["by_session"]]
        terminal.print_json({**totals, "thread_count": stats["session_count"], "by_thread": by_thread})
        return 0
    print(
        f"{count(stats['total_messages'], 'message')} and {count(stats['total_tokens'], 'token')}"
        f" in {count(stats['session_count'], 'thread')} since {stats['since']}, cost {stats['total_cost']:.4f}"
    )
    if args.plot or terminal.is_screen():
        for chart in _charts(stats):
            print()
            for row in chart:
                print(row)
    columns = ("messages", "tokens", "input_tokens", "output_tokens", "cache_read_tokens", "cost")
    parts: list[tuple[str, Sequence[Mapping[str, Any]]]] = [("day", stats["by_day"]), ("model", stats["by_model"])]
    for name, rows in parts:
        _table((name, *columns), [_cells(row, name, columns) for row in rows])
    columns = ("call_count", "failures", "avg_latency", "p50", "p95", "p99")
    tools = [_cells(tool, "tool_name", columns) for tool in stats["tool_usage"]]
    _table(("tool", "calls", "failures", "average ms", "p50", "p95", "p99"), tools)
    return 0


def _charts(stats: UsageStats) -> Iterator[Iterator[str]]:
    """The plots: those with something to draw."""
    columns = terminal.columns() or 80
    days = _filled(stats["by_day"], stats["since"], stats["period_days"])
    parts: list[tuple[str, str, Sequence[Mapping[str, Any]]]] = [
        ("DAY", "day", days),
        ("MODEL", "model", stats["by_model"]),
    ]
    for title, name, rows in parts:
        for what in ("tokens", "cost"):
            bars = [Bar(str(row[name]), float(row[what]), _figure(row[what])) for row in rows]
            if any(bar.value for bar in bars):
                yield plots.chart(f"{what.upper()} BY {title}", bars, columns)
    if tools := stats["tool_usage"]:
        bars = [Bar(tool["tool_name"], tool["call_count"], _figure(tool["call_count"])) for tool in tools]
        yield plots.chart("CALLS BY TOOL", bars, columns)
        if timed := [tool for tool in tools if tool["p50"] is not None]:
            bars = [Bar(tool["tool_name"], tool["p95"] or 0, _latency(tool)) for tool in timed]
            yield plots.chart("LATENCY BY TOOL: p50, p90, p95 and p99, and a bar for p95", bars, columns)


def _latency(tool: Mapping[str, Any]) -> str:
    values = [tool[name] for name in _PERCENTILES]
    return f"{plots.sparkline(values)} {_figure(values[0])} to {_figure(values[-1])} ms"


def _filled(by_day: Sequence[Mapping[str, Any]], since: str, period: int) -> Sequence[Mapping[str, Any]]:
    """A row for each day of a short period, also for those without usage."""
    if period > _MOST_DAYS:
        return by_day
    known = {row["day"]: row for row in by_day}
    first = date.fromisoformat(since[:10])
    days = [(first + timedelta(days=number)).isoformat() for number in range(period)]
    return [known.get(day, {"day": day, "tokens": 0, "cost": 0.0}) for day in days]


def _recount(args: argparse.Namespace) -> int:
    found = work_on(args, lambda cp: cp.recount())
    if args.json:
        terminal.print_json(found)
        return 0 if found["ok"] else 1
    for problem in found["problems"]:
        print(terminal.line(f"{problem['where']}: {problem['detail']}"))
    if found["ok"]:
        print("Everything was counted right.")
    else:
        terminal.remark("'byssus check --repair' mends it.\n")
    return 0 if found["ok"] else 1


def _cells(row: Mapping[str, Any], name: str, columns: Sequence[str]) -> list[str]:
    return [row[name], *(_figure(row[column]) for column in columns)]


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if value < 1_000 else f"{value:,.0f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        print()
        headers = [name.upper().replace("_", " ").removesuffix(" TOKENS") for name in head]
        print_table(headers, rows, right=range(1, len(headers)), whole=[0] if head[0] == "day" else ())
