"""`byssus backup|restore|check`: that nothing is lost, and that what is there is right.

What a person watches goes to stderr, and only to a terminal; what a script reads goes to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from typing import Any

from byssus.cli import database, terminal
from byssus.cli.subcommand import add, count, work_on
from byssus.maintenance import backup, check, repair, restore

_WIDTH = 24  # of the bar
_SECONDS = 0.1  # between two looks of it

Result = dict[str, Any]


def add_to(commands: Any) -> None:
    more = (
        "Others may go on writing meanwhile. FILE must be new; with --incremental it may be an earlier backup of the "
        "same database, in which only what differs is written."
    )
    parser = add(commands, "backup", _backup, "write all of a database into a new SQLite file", more, json=True)
    parser.add_argument("file", metavar="FILE", help="the file that is written")
    parser.add_argument("--incremental", action="store_true", help="bring an earlier backup up to date")
    more = "The database must be new or empty. An interrupted restore goes on when it is run again."
    parser = add(commands, "restore", _restore, "bring a backup into a new database", more, json=True)
    parser.add_argument("file", metavar="FILE", help="the backup")
    more = (
        "It reads everything, and writes nothing without --repair, which makes anew what is derived from something "
        "else: counters, usage, the index for search. The exit code is 1 while something is wrong."
    )
    parser = add(commands, "check", _check, "look whether everything in a database is as it should be", more, json=True)
    parser.add_argument("--repair", action="store_true", help="mend what can be mended")


def _backup(args: argparse.Namespace) -> int:
    bar = _Bar("backup")
    try:
        made = work_on(
            args,
            lambda cp: backup.backup(cp.store, args.file, incremental=args.incremental, progress=bar.show),
        )
    finally:
        bar.clear()
    if args.json:
        print(json.dumps(made, indent=2))
        return 0
    what = f"is up to date: {count(made['written'], 'row')} written" if made["incremental"] else "is complete"
    print(terminal.line(f"The backup in {made['path']} {what}."))
    _tell_rows(made)
    return 0


def _restore(args: argparse.Namespace) -> int:
    restore.checked_source(args.file)  # or a new database would be made for nothing
    checkpointer = database.checkpointer_of(args)
    bar = _Bar("restore")

    async def main() -> tuple[str, Result]:
        async with checkpointer as cp:
            return cp.name, await restore.restore(cp.store, args.file, progress=bar.show)

    try:
        name, made = asyncio.run(main())
    finally:
        bar.clear()
    if args.json:
        print(json.dumps(made, indent=2))
        return 0
    taken = f", taken at {made['taken_at']}," if made["taken_at"] else ""
    print(terminal.line(f"The backup {made['path']}{taken} is restored in {name}."))
    _tell_rows(made)
    return 0


def _tell_rows(made: Result) -> None:
    rows = {name: number for name, number in made["rows"].items() if number}
    width = max((len(name) for name in rows), default=0)
    for name, number in rows.items():
        print(f"  {name:{width}}  {number:>12,}")
    size = f", {made['bytes']:,} bytes" if "bytes" in made else ""
    print(f"Verified: {count(sum(rows.values()), 'row')}{size}, sha256 {made['sha256']}")


def _check(args: argparse.Namespace) -> int:
    found = work_on(args, lambda cp: repair.repair(cp.store) if args.repair else check.check(cp.store))
    if args.json:
        print(json.dumps(found, indent=2))
        return 0 if found["ok"] else 1
    for problem in found.get("repaired", []):
        print(terminal.line(f"repaired  {problem['what']}: {problem['detail']}"))
    for problem in found["problems"]:
        print(terminal.line(f"wrong     {problem['what']}: {problem['detail']}"))
    checked = ", ".join(
        count(found["checked"][name], noun)
        for name, noun in (("threads", "thread"), ("messages", "message"), ("checkpoints", "checkpoint"))
        if name in found["checked"]
    )
    if found["ok"]:
        print(f"Checked {checked}: all is well.")
        return 0
    mendable = sum(problem["repairable"] for problem in found["problems"])
    hint = f"--repair can mend {mendable} of them" if mendable else "a backup may still have what is lost"
    print(f"Checked {checked or 'the file'}: {count(len(found['problems']), 'problem')}; {hint}.")
    return 1


class _Bar:
    """One line on a terminal that overwrites itself; elsewhere nothing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._shown_at = float("-inf")
        self._length = 0

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_shown or now < self._shown_at + _SECONDS:
            return
        self._shown_at = now
        share = done / total if total else 1
        text = f"{self._what} [{'#' * round(share * _WIDTH):{_WIDTH}}] {share:4.0%}"
        text = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text:{self._length}}", end="", file=sys.stderr, flush=True)
        self._length = len(text)

    def clear(self) -> None:
        if self._length:
            print(f"\r{'':{self._length}}\r", end="", file=sys.stderr, flush=True)
            self._length = 0
