"""`byssus copy|backup|restore|check`: all of a database in another one, in a file and back; and whether it is right.

Progress goes to stderr, and only to a terminal; what a script reads goes to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from byssus.checkpointer import Checkpointer
from byssus.cli import database
from byssus.cli.commands import COMMANDS
from byssus.cli.screen import terminal
from byssus.cli.subcommand import add, count, work_on
from byssus.cli.words import at_shell
from byssus.maintenance import backup, check, copy, repair, restore
from byssus.maintenance.copy import Copied, Progress

if TYPE_CHECKING:
    from byssus.storage import RestoreResult


def add_to(commands: Any) -> None:
    _add_copy(commands)
    more = (
        "Other processes can write meanwhile. FILE must not exist; with --incremental, it can be an earlier backup of "
        "the same database, and only the differences are written."
    )
    parser = add(commands, "backup", _backup, more, json=True)
    parser.add_argument("file", metavar="FILE", help="the file to write")
    parser.add_argument("--incremental", action="store_true", help="update an earlier backup")
    more = "The database must be new or empty. An interrupted restore continues when it is run again."
    parser = add(commands, "restore", _restore, more, json=True)
    parser.add_argument("file", metavar="FILE", help="the backup")
    more = (
        "Reads everything. Writes nothing without --repair, which rebuilds derived data: counters, usage, the search "
        "index. The exit code is 1 if a problem is left."
    )
    parser = add(commands, "check", _check, more, json=True)
    parser.add_argument("--repair", action="store_true", help="repair derived data")


# --- copy -------------------------------------------------------------------------------------------------------------


def _add_copy(commands: Any) -> None:
    description = (
        "Copy everything from SOURCE into TARGET, and verify it. Each is the path of a SQLite file, or a DSN that "
        "begins with postgresql://. TARGET must be new or empty. An interrupted copy continues when the same command "
        "is run again; a finished one is only verified."
    )
    parser = commands.add_parser("copy", help=COMMANDS["copy"].help, description=description)
    parser.add_argument("source", metavar="SOURCE", help="the database to read")
    parser.add_argument("target", metavar="TARGET", help="the database to write")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_copy)


def _copy(args: argparse.Namespace) -> int:
    try:
        with terminal.progress_bar() as bar:
            copied = copy.copy(args.source, args.target, lambda progress: _show(bar, progress))
    except KeyboardInterrupt:
        terminal.remark("Stopped. What was copied is kept: run the same command again to go on.\n")
        raise
    if args.json:
        result = {**copied._asdict(), "tables": [table._asdict() for table in copied.tables]}
        terminal.print_json(result)
    else:
        _print_copied(copied)
    return 0


def _show(bar: terminal.ProgressBar, progress: Progress) -> None:
    step, table, done, total, _ = progress
    bar.show(f"{step:9}", done, total, f"  {done:,} of {total:,} rows ({table})")


def _print_copied(copied: Copied) -> None:
    rows = sum(table.rows for table in copied.tables)
    new = sum(table.written for table in copied.tables)
    if copied.was_finished:
        what = "was a finished copy already: nothing was written"
    elif new < rows:
        what = f"is complete: {new:,} rows were written, the others were there already"
    else:
        what = "is complete"
    print(terminal.line(f"The copy of {copied.source} in {copied.target} {what}."))
    _print_rows({table.name: table.rows for table in copied.tables})
    print(f"Verified: both hold the same {rows:,} rows, sha256 {copied.sha256}")


def _print_rows(rows: dict[str, int]) -> None:
    width = max((len(name) for name in rows), default=0)
    for name, number in rows.items():
        print(f"  {name:{width}}  {number:>12,}")


# --- backup and restore -----------------------------------------------------------------------------------------------


def _backup(args: argparse.Namespace) -> int:
    with terminal.progress_bar() as bar:
        made = work_on(
            args,
            lambda cp: backup.backup(
                cp.store,
                args.file,
                incremental=args.incremental,
                progress=lambda done, total: bar.show("backup", done, total),
            ),
        )
    what = f"is up to date: {count(made['written'], 'row')} written" if made["incremental"] else "is complete"
    return _report(args, made, f"The backup in {made['path']} {what}.")


def _restore(args: argparse.Namespace) -> int:
    restore.checked_source(args.file)  # or a new database would be made for nothing
    checkpointer = database.checkpointer_of(args)

    async def main(bar: terminal.ProgressBar) -> tuple[str, RestoreResult]:
        async with checkpointer as cp:
            return cp.name, await restore.restore(
                cp.store, args.file, progress=lambda done, total: bar.show("restore", done, total)
            )

    with terminal.progress_bar() as bar:
        name, made = asyncio.run(main(bar))
    taken = f", taken at {made['taken_at']}," if made["taken_at"] else ""
    return _report(args, made, f"The backup {made['path']}{taken} is restored in {name}.")


def _report(args: argparse.Namespace, made: Mapping[str, Any], sentence: str) -> int:
    """Print what a backup or a restore has done."""
    if args.json:
        terminal.print_json(made)
        return 0
    print(terminal.line(sentence))
    rows = {name: number for name, number in made["rows"].items() if number}
    _print_rows(rows)
    size = f", {made['bytes']:,} bytes" if "bytes" in made else ""
    print(f"Verified: {count(sum(rows.values()), 'row')}{size}, sha256 {made['sha256']}")
    return 0


# --- check ------------------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    async def look(cp: Checkpointer) -> Mapping[str, Any]:
        return await (repair.repair(cp.store) if args.repair else check.check(cp.store))

    found = work_on(args, look)
    if args.json:
        terminal.print_json(found)
        return 0 if found["ok"] else 1
    for problem in found.get("repaired", []):
        print(terminal.line(at_shell(f"repaired  {problem['what']}: {problem['detail']}")))
    for problem in found["problems"]:
        print(terminal.line(at_shell(f"wrong     {problem['what']}: {problem['detail']}")))
    checked = ", ".join(
        count(found["checked"][name], noun)
        for name, noun in (("threads", "thread"), ("messages", "message"), ("checkpoints", "checkpoint"))
        if name in found["checked"]
    )
    if found["ok"]:
        print(f"Checked {checked}: all is well.")
        return 0
    repairable = sum(problem["repairable"] for problem in found["problems"])
    hint = f"--repair can mend {repairable} of them" if repairable else "a backup may still have what is lost"
    print(f"Checked {checked or 'the file'}: {count(len(found['problems']), 'problem')}; {hint}.")
    return 1
