"""The command `byssus`: one file for each group of subcommands, and here what they share at the edge.

Exit codes: 0, 1 for an error (one line on stderr), 2 for a wrong command line, 130, 141 and 143 for an interrupt, a
reader that went away and a SIGTERM.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from byssus import __version__
from byssus.cli import (
    ask,
    chat,
    checkpoints,
    doctor,
    maintenance,
    memory,
    resume,
    retention,
    runs,
    search,
    terminal,
    threads,
    transfer,
)
from byssus.errors import ByssusError
from byssus.values.places import redacted


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    terminal.prepare()
    parser = _parser()
    args, more = parser.parse_known_args(argv)
    takes_more = getattr(args, "takes_more", None)
    if more and not (takes_more and takes_more(args, more)):
        parser.error(f"unrecognized arguments: {' '.join(map(redacted, more))}")
    if args.db is not None and not getattr(args, "has_database", False):
        parser.error(f"this command takes no --db, got {redacted(args.db)!r}")
    try:
        code: int = args.run(args)
        terminal.flush()
    except BrokenPipeError:
        terminal.abandon_output()
        return 141
    except KeyboardInterrupt:
        return 130
    except (ByssusError, OSError) as error:
        terminal.abandon_output()
        terminal.complain(error)
        return 1
    return code


class _Parser(argparse.ArgumentParser):
    """The parser of the command, and of each subcommand."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2. What was typed stands in the message: neither a password of it nor a control character."""
        super().error(terminal.line(redacted(message)))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="byssus", description="Agents and conversations that survive a restart.")
    parser.add_argument("--version", action="version", version=f"byssus {__version__}")
    parser.add_argument("--db", help=argparse.SUPPRESS)  # the commands explain it, and take it too
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in (
        chat,
        ask,
        resume,
        threads,
        memory,
        runs,
        checkpoints,
        retention,
        transfer,
        maintenance,
        search,
        doctor,
    ):
        command.add_to(commands)
    return parser
