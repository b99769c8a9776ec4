"""What subcommands that work on a database share: how they are declared, and how they reach it and its threads."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from byssus.checkpointer import Checkpointer
from byssus.cli import database, ids, options
from byssus.cli.commands import COMMANDS

T = TypeVar("T")

_THREADS = ("thread", "a", "b")  # the arguments that name threads


def add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], more: str = "", *, json: bool = False
) -> argparse.ArgumentParser:
    """Declare a subcommand; `more` is what its --help says besides the line in the table of commands."""
    does = COMMANDS[name].help
    description = f"{does[0].upper()}{does[1:]}. {more}".strip()
    parser: argparse.ArgumentParser = commands.add_parser(name, help=does, description=description)
    if json:
        parser.add_argument("--json", action="store_true", help="as JSON")
    options.add_option(parser)
    parser.set_defaults(run=run)
    return parser


def add_thread(parser: argparse.ArgumentParser, name: str = "thread") -> None:
    """Let it take the id of a thread."""
    parser.add_argument(name, metavar=name.upper(), help="the thread's id; 'byssus threads' lists them")


def work_on(
    args: argparse.Namespace,
    work: Callable[[Checkpointer], Awaitable[T]],
    *threads: str,
    whole: bool = False,
    creates: bool = False,
) -> T:
    """Do something with the database and these threads, if there are such threads.

    A thread may be typed by the start of its id, unless `whole`: from then on `args` has the whole id in its place.
    The database must exist, unless the command `creates` something.
    """
    checkpointer = database.checkpointer_of(args) if creates else database.existing_checkpointer_of(args)

    async def main() -> T:
        async with checkpointer as cp:
            for typed in threads:
                _put(args, typed, await ids.known_thread(cp, typed, whole=whole))
            return await work(cp)

    return asyncio.run(main())


def _put(args: argparse.Namespace, typed: str, meant: str) -> None:
    for name in _THREADS:
        if getattr(args, name, None) == typed:
            setattr(args, name, meant)


def count(number: int, noun: str) -> str:
    """So many of them, in words: 1 message, 2 messages."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def with_thread(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the storage as JSON has it here: a session of a storage is a thread, and is called so everywhere."""
    return {"thread_id" if name == "session_id" else name: value for name, value in row.items()}


def number(text: str) -> int:
    """A number from 1 up, as it is typed."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 up, got {text!r}")
    return int(text)
