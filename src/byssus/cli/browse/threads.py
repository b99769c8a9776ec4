"""`byssus threads|rename`: the conversations in a database, and what they are called."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from byssus.checkpointer import Checkpointer, ThreadInfo, ThreadState
from byssus.cli import database
from byssus.cli.ids import known_user
from byssus.cli.screen import terminal
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add, add_thread, number, work_on


def add_to(commands: Any) -> None:
    parser = add(commands, "threads", _list, "Most recently updated first.", json=True)
    parser.add_argument("--user", metavar="ID", help="only those of this user; 'byssus users' lists the users")
    parser.add_argument("--state", choices=get_args(ThreadState), help="only those in this state")
    parser.add_argument("--title", metavar="TEXT", help="only those with this text in the title or the first words")
    parser.add_argument("--limit", type=number, default=50, metavar="N", help="at most N of them (default: 50)")
    parser.add_argument("--children", action="store_true", help="each with its child threads below it")
    more = "An empty title restores the default: the first words of the thread."
    parser = add(commands, "rename", _rename, more)
    add_thread(parser)
    parser.add_argument("title", metavar="TITLE", help="the new title")


def _list(args: argparse.Namespace) -> int:
    listed = work_on(args, lambda cp: _listed(cp, args))
    if args.json:
        terminal.print_json([info._asdict() for info in listed])
    elif listed:
        _print(listed, args.utc)
        if len(listed) == args.limit:
            terminal.remark(f"(the last {args.limit}; --limit N shows more)\n")
    elif args.user or args.state or args.title:
        print("No thread matches; 'byssus threads' lists them all.")
    else:
        print("There are no threads yet; 'byssus chat' starts one.")
    if not listed and (hint := database.others_here(database.setting_of(args))):
        terminal.remark(f"{hint}\n")
    return 0


async def _listed(cp: Checkpointer, args: argparse.Namespace) -> list[ThreadInfo]:
    user = None if args.user is None else await known_user(cp, args.user)
    listed = await cp.threads(args.limit, user_id=user, state=args.state, title=args.title)
    return [each for info in listed for each in (info, *await _below(cp, info))] if args.children else listed


async def _below(cp: Checkpointer, above: ThreadInfo) -> list[ThreadInfo]:
    """The child threads of a thread and theirs, each behind its parent."""
    return [each for info in await cp.children(above.id) for each in (info, *await _below(cp, info))]


def _print(listed: list[ThreadInfo], utc: bool) -> None:
    headers = ["THREAD", "TITLE", "STATE", "MESSAGES", "UPDATED"]
    rows = [
        [info.id, info.title, info.state, str(info.message_count), terminal.when(info.updated_at, utc)]
        for info in listed
    ]
    if any(info.user_id for info in listed):
        headers.append("USER")
        for row, info in zip(rows, listed, strict=True):
            row.append(info.user_id or "")
    print_table(headers, rows, right=[3], whole=[4])


def _rename(args: argparse.Namespace) -> int:
    work_on(args, lambda cp: cp.set_title(args.thread, args.title), args.thread)
    return 0
