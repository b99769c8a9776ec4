"""`byssus copy`: all of one database into another, which also makes a file of a server's database.

What a person watches goes to stderr, and only to a terminal; what a script reads goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import Any

from byssus.cli import terminal
from byssus.maintenance import copy
from byssus.maintenance.copy import Copied, Progress

_DESCRIPTION = (
    "Copy everything from SOURCE into TARGET, and verify it. Each is the path of a SQLite file, or a DSN that begins "
    "with postgresql://. TARGET must be new or empty. An interrupted copy goes on when the same command is run again; "
    "a finished one is only compared."
)
_WIDTH = 24  # of the bar
_SECONDS = 0.1  # between two looks of it


def add_to(commands: Any) -> None:
    parser = commands.add_parser("copy", help="copy a database into another", description=_DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", help="the database that is read")
    parser.add_argument("target", metavar="TARGET", help="the database that is made equal to it")
    parser.add_argument("--json", action="store_true", help="tell the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    bar = _Bar()
    try:
        copied = copy.copy(args.source, args.target, bar.show)
    except KeyboardInterrupt:
        bar.clear()
        terminal.remark("Stopped. What was copied is kept: run the same command again to go on.\n")
        raise
    finally:
        bar.clear()
    if args.json:
        print(json.dumps(_as_dict(copied), indent=2))
    else:
        _tell(copied)
    return 0


def _tell(copied: Copied) -> None:
    rows = sum(table.rows for table in copied.tables)
    new = sum(table.written for table in copied.tables)
    if copied.was_finished:
        what = "was a finished copy already: nothing was written"
    elif new < rows:
        what = f"is complete: {new:,} rows were written, the others were there already"
    else:
        what = "is complete"
    print(terminal.line(f"The copy of {copied.source} in {copied.target} {what}."))
    width = max(len(table.name) for table in copied.tables)
    for table in copied.tables:
        print(f"  {table.name:{width}}  {table.rows:>12,}")
    print(f"Verified: both hold the same {rows:,} rows, sha256 {copied.sha256}")


def _as_dict(copied: Copied) -> dict[str, object]:
    return {**copied._asdict(), "tables": [table._asdict() for table in copied.tables]}


class _Bar:
    """One line on a terminal that overwrites itself; elsewhere nothing. It shows our own words and numbers alone."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._shown_at = float("-inf")
        self._length = 0

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if not self._is_shown or now < self._shown_at + _SECONDS:
            return
        self._shown_at = now
        share = min(progress.done / progress.total, 1) if progress.total else 1
        bar = "#" * round(share * _WIDTH)
        text = f"{progress.step:9} [{bar:{_WIDTH}}] {share:4.0%}  {progress.done:,} of {progress.total:,} rows"
        text = f"{text} ({progress.table})"[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text:{self._length}}", end="", file=sys.stderr, flush=True)
        self._length = len(text)

    def clear(self) -> None:
        if self._length:
            print(f"\r{'':{self._length}}\r", end="", file=sys.stderr, flush=True)
            self._length = 0
