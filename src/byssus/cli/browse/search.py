"""`byssus search|usage`: where something was said, and what was spent."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from byssus.checkpointer import Checkpointer
from byssus.cli.ids import whole_id
from byssus.cli.screen import terminal
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add, count, number, with_thread, work_on
from byssus.errors import InputError

if TYPE_CHECKING:
    from byssus.storage import SearchHit, UsageStats


def add_to(commands: Any) -> None:
    more = "A hit has all WORDS; -WORD excludes. Quote a phrase twice, also for the shell: '\"a phrase\"'."
    parser = add(commands, "search", _search, "find what was said, and what tools did", more, json=True)
    parser.set_defaults(takes_more=_take_excluded)
    parser.add_argument("words", metavar="WORDS", nargs="*", help="words and phrases to search for; -WORD excludes")
    parser.add_argument("--user", metavar="ID", help="only in threads of this user")
    parser.add_argument("--thread", metavar="ID", help="only in this thread")
    parser.add_argument("--role", choices=["user", "assistant", "system", "tool"], help="only what this role said")
    parser.add_argument("--since", metavar="TIME", help="only from this time on, as 2026-01-31 or 2026-01-31T08:00:00Z")
    parser.add_argument("--until", metavar="TIME", help="only up to this time; a date covers the whole day")
    parser.add_argument("--limit", type=number, default=20, metavar="N", help="at most N hits (default: 20)")
    parser.add_argument("--timeout", type=number, default=30, metavar="SECONDS", help="stop after this (default: 30)")
    parser.add_argument("--relevance", action="store_true", help="sort by relevance, not by time")
    parser = add(commands, "usage", _usage, "show the usage: messages, tokens and cost", json=True)
    parser.add_argument("user", metavar="USER", nargs="?", help="the user's id (default: all users)")
    parser.add_argument(
        "--days", type=number, default=7, metavar="N", help="number of days, including today (default: 7)"
    )
    parser.add_argument("--recount", action="store_true", help="count everything again, and list the differences")


def _search(args: argparse.Namespace) -> int:
    if all(word.startswith("-") for word in args.words):
        given = shlex.quote(f'"{args.words[0]}"') if args.words else "-- -WORD"
        raise InputError(
            "a search needs a word that must occur: byssus search WORD -WITHOUT"
            + (
                f"; to search for text that begins with '-', quote it after --: byssus search -- {given}"
                if args.words
                else ""
            )
        )

    async def search(cp: Checkpointer) -> list[SearchHit]:
        return await cp.search(
            " ".join(args.words),
            user_id=args.user and await whole_id(cp, "user", args.user),
            session_id=args.thread and await whole_id(cp, "thread", args.thread),
            role=args.role,
            since=args.since,
            until=args.until,
            limit=args.limit,
            order="relevance" if args.relevance else "newest",
            timeout=args.timeout,
        )

    hits = work_on(args, search)
    if args.json:
        terminal.print_json([with_thread(hit) for hit in hits])
        return 0
    if not hits:
        terminal.remark("Nothing was found.\n")
        return 0
    rows = [
        (
            hit["session_id"],
            terminal.when(hit["created_at"], args.utc),
            f"{hit['role']} {hit['tool_name']}" if hit["tool_name"] else hit["role"],
            hit["snippet"],
        )
        for hit in hits
    ]
    print_table(("THREAD", "TIME", "ROLE", "TEXT"), rows, whole=[1])
    if len(hits) == args.limit:
        terminal.remark(f"(the first {args.limit}; --limit N shows more)\n")
    return 0


def _take_excluded(args: argparse.Namespace, more: Sequence[str]) -> bool:
    """Whether what looks like unknown options are words that must not be there."""
    if any(word.startswith("--") for word in more):
        return False
    args.words += more
    return True


def _usage(args: argparse.Namespace) -> int:
    if args.recount:
        return _recount(args)

    async def usage(cp: Checkpointer) -> UsageStats | None:
        return await cp.get_usage_stats(args.user and await whole_id(cp, "user", args.user), args.days)

    stats = work_on(args, usage)
    if stats is None:
        raise InputError(f"there is no user {args.user!r}; 'byssus users' lists them")
    if args.json:
        told = {name: value for name, value in stats.items() if name not in ("session_count", "by_session")}
        by_thread = [with_thread(row) for row in stats["by_session"]]
        terminal.print_json({**told, "thread_count": stats["session_count"], "by_thread": by_thread})
        return 0
    print(
        f"{count(stats['total_messages'], 'message')} and {count(stats['total_tokens'], 'token')}"
        f" in {count(stats['session_count'], 'thread')} since {stats['since']}, cost {stats['total_cost']:.4f}"
    )
    columns = ("messages", "tokens", "input_tokens", "output_tokens", "cache_read_tokens", "cost")
    parts: list[tuple[str, Sequence[Mapping[str, Any]]]] = [("day", stats["by_day"]), ("model", stats["by_model"])]
    for name, rows in parts:
        _table((name, *columns), [_cells(row, name, columns) for row in rows])
    columns = ("call_count", "failures", "avg_latency", "p50", "p95", "p99")
    tools = [_cells(tool, "tool_name", columns) for tool in stats["tool_usage"]]
    _table(("tool", "calls", "failures", "average ms", "p50", "p95", "p99"), tools)
    return 0


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
        terminal.remark("'byssus check --repair' fixes it.\n")
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
        headers = [name.upper().replace("_", " ") for name in head]
        print_table(headers, rows, right=range(1, len(headers)))
