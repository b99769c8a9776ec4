"""`byssus watch [THREAD]`: the live runs of a database and the tasks that run, on one screen or once as tables."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import time
from typing import Any

from byssus.checkpointer import Checkpointer
from byssus.cli import database, ids
from byssus.cli.screen import signals, terminal
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add
from byssus.cli.watch import tasks
from byssus.cli.watch.board import Board
from byssus.errors import MissingExtra


def add_to(commands: Any) -> None:
    more = "Enter follows a run, y and n answer its question. In a pipe or on a dumb terminal, a table is printed once."
    parser = add(commands, "watch", _run, more, json=True)
    parser.add_argument("thread", metavar="THREAD", nargs="?", help="follow this thread, which may not exist yet")


def _run(args: argparse.Namespace) -> int:
    is_screen = terminal.is_interactive() and os.environ.get("TERM", "dumb") != "dumb" and not args.json
    if is_screen and importlib.util.find_spec("prompt_toolkit") is None:
        raise MissingExtra("'byssus watch'", "chat")
    return asyncio.run(_watch(database.existing_checkpointer_of(args), args, is_screen=is_screen))


async def _watch(checkpointer: Checkpointer, args: argparse.Namespace, *, is_screen: bool) -> int:
    async with checkpointer as cp:
        thread = None if args.thread is None else await ids.whole_id(cp, "thread", args.thread)
        board = Board(cp, thread)
        if is_screen:
            from byssus.cli.watch.screen import Screen  # noqa: PLC0415 - it needs the extra

            code = await Screen(board, cp, thread).run()
            if code == 128 + signal.SIGHUP:
                signals.outlive_terminal()
                terminal.abandon_output()
            return code
        try:
            await board.settled()
            _print(board, args)
        finally:
            await board.close()
    return 0


def _print(board: Board, args: argparse.Namespace) -> None:
    runs = list(board.runs.values())
    if args.json:
        terminal.print_json([run.as_json() for run in runs])
        return
    now = time.monotonic()
    table = [
        (
            run.thread_id,
            run.state,
            run.doing,
            str(len(run.waiting)),
            f"{run.tokens_a_minute(now):,}",
            "" if run.run is None else terminal.when(run.run.began_at, args.utc),
        )
        for run in runs
    ]
    if table:
        print_table(("THREAD", "STATE", "DOES", "WAITING", "TOKENS/MIN", "BEGAN"), table, right=[3, 4])
    if board.tasks:
        if table:
            print()
        print_table(tasks.HEADS, [tasks.cells(task) for task in board.tasks])
    if not table and not board.tasks:
        terminal.remark("Nothing runs now, and nothing waits for a person.\n")
