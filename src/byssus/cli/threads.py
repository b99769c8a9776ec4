"""`byssus threads`: the conversations in a database."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from byssus.checkpointer import Checkpointer, ThreadInfo
from byssus.cli import database, terminal
from byssus.cli.subcommand import number


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "threads",
        help="list the threads",
        description="`byssus threads`: the conversations in a database, the last one first.",
    )
    parser.add_argument("--limit", type=number, default=50, metavar="N", help="at most N of them (default: 50)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    database.add_option(parser)
    parser.set_defaults(run=_list)


def _list(args: argparse.Namespace) -> int:
    listed = asyncio.run(_listed(database.existing_checkpointer_of(args), args.limit))
    if args.json:
        terminal.print_json([info._asdict() for info in listed])
    elif listed:
        _print_table(listed)
        if len(listed) == args.limit:
            terminal.remark(f"(the last {args.limit}; --limit N shows more)\n")
    else:
        print("There are no threads yet; 'byssus chat' starts one.")
    if not listed and (hint := database.others_here(database.setting_of(args))):
        terminal.remark(f"{hint}\n")
    return 0


async def _listed(checkpointer: Checkpointer, limit: int) -> list[ThreadInfo]:
    async with checkpointer:
        return await checkpointer.threads(limit=limit)


def _print_table(listed: list[ThreadInfo]) -> None:
    rows = [("THREAD", "MESSAGES", "LAST WRITTEN (UTC)")]
    rows += [(terminal.line(info.id), str(info.message_count), info.updated_at[:19]) for info in listed]
    width = max(len(name) for name, _, _ in rows)
    for name, messages, written in rows:
        print(f"{name:{width}}  {messages:>8}  {terminal.line(written)}")
