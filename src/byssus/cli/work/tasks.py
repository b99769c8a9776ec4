"""`byssus tasks`: the tasks of all threads, or of one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from byssus.cli.screen import terminal
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add, number, with_thread, work_on

if TYPE_CHECKING:
    from byssus.storage import TaskRow


def add_to(commands: Any) -> None:
    parser = add(commands, "tasks", _list, "Highest priority first.", json=True)
    parser.add_argument("thread", metavar="THREAD", nargs="?", help="only those of this thread")
    parser.add_argument("--status", metavar="STATUS", help="only those with this status: pending, running, failed ...")
    parser.add_argument("--limit", type=number, default=100, metavar="N", help="at most N of them (default: 100)")


def _list(args: argparse.Namespace) -> int:
    named = [] if args.thread is None else [args.thread]
    tasks = work_on(args, lambda cp: cp.list_tasks(args.thread, args.status, args.limit), *named) or []
    if args.json:
        terminal.print_json([with_thread(task) for task in tasks])
    elif tasks:
        rows = [_row(task, args.utc) for task in tasks]
        print_table(("TASK", "THREAD", "TYPE", "STATUS", "PRIORITY", "UPDATED"), rows, right=[4], whole=[5])
        if len(tasks) == args.limit:
            terminal.remark(f"(the first {args.limit}; --limit N shows more)\n")
    else:
        print("There are no such tasks." if named or args.status else "There are no tasks; a program adds them.")
    return 0


def _row(task: TaskRow, utc: bool) -> tuple[str, ...]:
    updated = terminal.when(task["updated_at"], utc)
    return task["id"], task["session_id"] or "-", task["type"], task["status"], str(task["priority"]), updated
