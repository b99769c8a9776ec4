"""The parser of the command line: what all commands share, and how it complains."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from typing import NoReturn

from byssus import __version__
from byssus.cli import options
from byssus.cli.commands import add_commands
from byssus.cli.screen import terminal
from byssus.cli.words import did_you_mean
from byssus.values.places import redacted


class _Parser(argparse.ArgumentParser):
    """The parser of the command, and of each subcommand."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2. What was typed stands in the message: neither a password of it nor a control character."""
        if unknown := re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from", message):
            hint = did_you_mean(unknown[1], commands_of(self))
            message = f"there is no command {unknown[1]!r}; {f'{hint} ' if hint else ''}'byssus --help' lists them"
        if message.endswith("arguments are required: COMMAND"):
            message = "which command? 'byssus --help' lists them; the first to try: byssus chat"
        super().error(terminal.line(redacted(message)))


def parser_for(typed: Collection[str] | None = None) -> argparse.ArgumentParser:
    """The parser for what was typed: it knows the options of no other command. Without `typed` it knows all."""
    parser = _Parser(prog="byssus", description="Agents and conversations that survive a restart.")
    parser.add_argument("--version", action="version", version=f"byssus {__version__}")
    parser.add_argument("--db", metavar="DATABASE", help=options.explained())
    parser.set_defaults(utc=False, debug=False, no_pager=False)
    _share_options(parser)
    add_commands(parser, typed)
    for each in commands_of(parser).values():
        _share_options(each)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Each command with its parser."""
    (found,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(found.choices)


def _share_options(parser: argparse.ArgumentParser) -> None:
    """What may stand before the command and behind it."""
    parser.add_argument("--utc", action="store_true", default=argparse.SUPPRESS, help="show times in UTC, not local")
    parser.add_argument(
        "--no-pager", action="store_true", default=argparse.SUPPRESS, help="print long output to the terminal at once"
    )
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
