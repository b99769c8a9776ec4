"""`byssus users`: the users in a database, and what they have used of their quotas."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from byssus.cli.screen import terminal
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add, number, work_on

if TYPE_CHECKING:
    from byssus.storage import UserRow


def add_to(commands: Any) -> None:
    parser = add(commands, "users", _list, "Oldest first.", json=True)
    parser.add_argument("--limit", type=number, default=100, metavar="N", help="at most N of them (default: 100)")


def _list(args: argparse.Namespace) -> int:
    users = work_on(args, lambda cp: cp.list_users(args.limit))
    if args.json:
        terminal.print_json(users)
    elif users:
        print_table(("USER", "NAME", "EMAIL", "USED", "QUOTA"), map(_row, users), right=[3, 4])
        if len(users) == args.limit:
            terminal.remark(f"(the first {args.limit}; --limit N shows more)\n")
    else:
        print("There are no users; a program adds them.")
    return 0


def _row(user: UserRow) -> tuple[str, ...]:
    total = user["quota_total"]
    return user["id"], user["name"], user["email"], f"{user['quota_used']:,}", "none" if total is None else f"{total:,}"
