"""`byssus search`: where something was said."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from byssus.checkpointer import Checkpointer
from byssus.cli.ids import known_thread, known_user
from byssus.cli.screen import terminal
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add, number, with_thread, work_on
from byssus.errors import InputError

if TYPE_CHECKING:
    from byssus.storage import SearchHit


def add_to(commands: Any) -> None:
    more = "A hit has all WORDS; -WORD excludes. Quote a phrase twice, also for the shell: '\"a phrase\"'."
    parser = add(commands, "search", _search, more, json=True)
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
            user_id=None if args.user is None else await known_user(cp, args.user),
            session_id=None if args.thread is None else await known_thread(cp, args.thread),
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
