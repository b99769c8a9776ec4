"""`byssus prune|delete|erase`: what need not stay, and what must go.

A prune keeps what it is told to keep, and asks nothing. What takes whole threads away asks the person at the terminal
to type an id; a script says --yes.
"""

from __future__ import annotations

import argparse
import functools
import operator
import sys
from typing import Any, NamedTuple

from byssus.checkpointer import Checkpointer, Erased, Retention, keep_age, keep_last, keep_tagged
from byssus.cli import database
from byssus.cli.screen import terminal
from byssus.cli.subcommand import add, add_thread, count, number, work_on
from byssus.errors import ForksUndecided, InputError


def add_to(commands: Any) -> None:
    more = (
        "A checkpoint stays if any of the options keeps it. Messages of the thread and of its forks stay. Without "
        "THREAD, every thread that has a time to live is pruned by it."
    )
    parser = add(commands, "prune", _prune, more)
    parser.add_argument("thread", metavar="THREAD", nargs="?", help="the thread's id; 'byssus threads' lists them")
    parser.add_argument("--keep-last", type=number, metavar="N", help="keep the latest N")
    parser.add_argument("--keep-days", type=float, metavar="D", help="keep those that are younger than D days")
    parser.add_argument("--keep-tagged", nargs="+", action="extend", metavar="TAG", help="keep those with such a tag")
    more = "Forks keep the history that they share. To leave no byte in the files of the database, use 'byssus erase'."
    parser = add(commands, "delete", _delete, more)
    add_thread(parser)
    _add_yes(parser)
    more = (
        "The file of a SQLite database is rewritten. That takes as long as a copy, needs free disk space of up to "
        "twice its size, and blocks writers."
    )
    parser = add(commands, "erase", _erase, more)
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("thread", metavar="THREAD", nargs="?", help="the thread's id; 'byssus threads' lists them")
    whose.add_argument("--user", metavar="ID", help="all threads of this user instead")
    parser.add_argument(
        "--forks",
        choices=["keep", "erase"],
        help="keep: forks keep the history that they share; erase: they are erased too",
    )
    _add_yes(parser)


def _add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _prune(args: argparse.Namespace) -> int:
    keep = _kept(args)
    if (args.thread is None) != (keep is None):
        raise InputError(
            "what is kept? byssus prune THREAD --keep-last N, --keep-days D or --keep-tagged TAG"
            if keep is None
            else "which thread? byssus prune THREAD --keep-...; without options, by the threads' time to live"
        )
    known = [] if args.thread is None else [args.thread]
    pruned = work_on(args, lambda cp: cp.prune(args.thread, keep), *known, whole=True)
    print(f"Removed {count(len(pruned.checkpoints), 'checkpoint')} and {count(pruned.messages, 'message')}.")
    for name in pruned.checkpoints:
        print(f"  {terminal.line(name)}")
    return 0


def _kept(args: argparse.Namespace) -> Retention | None:
    policies = [
        *([keep_last(args.keep_last)] if args.keep_last is not None else []),
        *([keep_age(args.keep_days)] if args.keep_days is not None else []),
        *([keep_tagged(*args.keep_tagged)] if args.keep_tagged else []),
    ]
    return functools.reduce(operator.or_, policies) if policies else None


def _delete(args: argparse.Namespace) -> int:
    seen = work_on(args, lambda cp: _look(cp, args.thread), args.thread, whole=True)
    _confirm(args, f"deletes {seen.what}", args.thread)
    points = work_on(args, lambda cp: cp.delete_thread(args.thread), args.thread, whole=True)
    print(terminal.line(f"Deleted {seen.what} and {count(points, 'checkpoint')}."))
    return 0


def _erase(args: argparse.Namespace) -> int:
    if args.thread is None:
        database.existing_checkpointer_of(args)  # or there is nothing to ask about
        _confirm(args, f"erases all threads of user {args.user} for good", args.user)
        try:
            erased = work_on(args, lambda cp: cp.erase_user(args.user, forks=args.forks))
        except ForksUndecided as error:
            raise _undecided(f"user {args.user!r}", error.forks) from error
        return _tell(erased, f"user {args.user!r}")
    seen = work_on(args, lambda cp: _look(cp, args.thread), args.thread, whole=True)
    if seen.forks and args.forks is None:
        raise _undecided(f"thread {args.thread!r}", seen.forks)
    too = f" and {count(len(seen.forks), 'fork')} with theirs" * (args.forks == "erase" and bool(seen.forks))
    _confirm(args, f"erases {seen.what}{too} for good", args.thread)
    erased = work_on(args, lambda cp: cp.erase_thread(args.thread, forks=args.forks), args.thread, whole=True)
    return _tell(erased, f"thread {args.thread!r}")


def _undecided(whose: str, forks: list[str]) -> InputError:
    some = ", ".join(map(repr, forks[:3])) + ", ..." * (len(forks) > 3)
    return InputError(
        f"{whose} shares its past with {count(len(forks), 'fork')} ({some}): pass --forks keep "
        "to leave them as they are, or --forks erase to erase them and their forks too"
    )


def _tell(erased: Erased, whose: str) -> int:
    if erased.threads == 0:
        raise InputError(f"there is nothing of {whose} in the database")
    threads, points = count(erased.threads, "thread"), count(erased.checkpoints, "checkpoint")
    print(f"Erased {threads}, {points} and {count(erased.messages, 'message')}.")
    print(erased.note)
    return 0


class _Seen(NamedTuple):
    """A thread in words, and the forks that share its past."""

    what: str
    forks: list[str]


async def _look(cp: Checkpointer, thread_id: str) -> _Seen:
    tree = await cp.tree(thread_id)
    if tree is None:  # deleted a moment ago
        raise InputError(f"there is no thread {thread_id!r} any more")
    messages = count(tree.message_count, "message")
    return _Seen(f"thread {thread_id} with {messages}", [fork.thread_id for fork in tree.forks])


# --- a person's word --------------------------------------------------------------------------------------------------


def _confirm(args: argparse.Namespace, what: str, name: str) -> None:
    """Go on only with --yes, or with the id that a person types."""
    if args.yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise InputError(f"this {what}, and there is no terminal to ask at; pass --yes to go on")
    terminal.remark(terminal.line(f"This {what}. Type the id to go on:") + " ")
    typed = sys.stdin.readline().rstrip("\n")
    if typed != name:
        raise InputError(f"{typed!r} is not {name!r}: nothing was removed")
