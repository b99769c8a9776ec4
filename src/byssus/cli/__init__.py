"""The command `byssus`: one file for each group of subcommands, and here what they share at the edge.

Exit codes: 0, 1 for an error (one line on stderr), 2 for a wrong command line, 130, 141 and 143 for an interrupt, a
reader that went away and a SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from byssus import __version__
from byssus.cli import database
from byssus.cli.admin import completion, doctor, maintenance, retention, transfer
from byssus.cli.browse import checkpoints, memory, runs, search, show, tasks, threads, users
from byssus.cli.chat import ask, chat, resume
from byssus.cli.ids import did_you_mean
from byssus.cli.screen import pager, terminal
from byssus.cli.words import in_words
from byssus.values.places import redacted
from byssus.values.shown import reason


class _Reports(logging.Handler):
    """One line on stderr for an error that no command reports, such as a listener of an app that fails."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:  # the app has set up logging, and shows it there
            return
        error = record.exc_info[1] if record.exc_info else None
        why = "" if error is None else f": {reason(error)}"
        terminal.complain(f"{record.getMessage()}{why}")


_REPORTS = _Reports(logging.ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    terminal.prepare()
    parser = _parser()
    typed = [terminal.typed(word) for word in (sys.argv[1:] if argv is None else argv)]
    if _asks_for_help(typed):
        _parser_meant(parser, typed).print_help()
        return 0
    args, more = parser.parse_known_args(typed)
    takes_more = getattr(args, "takes_more", None)
    if more and not (takes_more and takes_more(args, more)):
        _refuse_unknown(_parser_meant(parser, typed), more)
    if args.db is not None and not getattr(args, "has_database", False):
        parser.error(f"this command takes no --db, got {redacted(args.db)!r}")
    _choose_logs(args.debug)
    try:
        code: int = 0  # also if a person leaves the pager
        with pager.paged(args.command in pager.PAGED and not (args.no_pager or getattr(args, "follow", False))):
            code = args.run(args)
        terminal.flush()
    except BrokenPipeError:
        terminal.abandon_output()
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - a person at a shell gets one line, whatever it is
        terminal.abandon_output()
        if args.debug:
            terminal.remark(redacted("".join(traceback.format_exception(error))))
        terminal.complain(in_words(error))
        return 1
    return code


def _choose_logs(debug: bool) -> None:
    """A person at a shell gets one line for a failure, and no warning; an app that sets up logging hears all."""
    log = logging.getLogger("byssus")
    if debug:
        log.removeHandler(_REPORTS)
    else:
        log.addHandler(_REPORTS)


def _asks_for_help(typed: list[str]) -> bool:
    options = typed[: typed.index("--")] if "--" in typed else typed
    return "-h" in options or "--help" in options


def _parser_meant(parser: argparse.ArgumentParser, typed: list[str]) -> argparse.ArgumentParser:
    """The parser of the command that stands anywhere on the line, or the whole one."""
    choices = commands_of(parser)
    return next((choices[word] for word in typed if word in choices), parser)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Each command with its parser."""
    (found,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(found.choices)


def _refuse_unknown(parser: argparse.ArgumentParser, more: Sequence[str]) -> NoReturn:
    """Exit with 2 and the usage of the command that got options or arguments which it does not have."""
    unknown = next((word.partition("=")[0] for word in more if word.startswith("-")), "")
    hints = [did_you_mean(unknown, parser._option_string_actions)] if unknown else []
    if parser.prog.endswith(" search") and unknown:
        phrase = shlex.quote(f'"{unknown}"')
        hints.append(f"to search for that text, quote it after --: byssus search -- {phrase}")
    parser.error("; ".join([f"unrecognized arguments: {' '.join(map(redacted, more))}", *filter(None, hints)]))


class _Parser(argparse.ArgumentParser):
    """The parser of the command, and of each subcommand."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2. What was typed stands in the message: neither a password of it nor a control character."""
        if unknown := re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from", message):
            hint = did_you_mean(unknown[1], commands_of(self))
            message = f"there is no command {unknown[1]!r}; {f'{hint} ' if hint else ''}'byssus --help' lists them"
        super().error(terminal.line(redacted(message)))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="byssus", description="Agents and conversations that survive a restart.")
    parser.add_argument("--version", action="version", version=f"byssus {__version__}")
    parser.add_argument("--db", metavar="DATABASE", help=database.explained())
    parser.set_defaults(utc=False, debug=False, no_pager=False)
    _share_options(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands", dest="command")
    for command in (
        chat,
        ask,
        resume,
        threads,
        users,
        tasks,
        show,
        memory,
        runs,
        checkpoints,
        retention,
        transfer,
        maintenance,
        search,
        completion,
        doctor,
    ):
        command.add_to(commands)
    for each in commands.choices.values():
        _share_options(each)
    return parser


def _share_options(parser: argparse.ArgumentParser) -> None:
    """What may stand before the command and behind it."""
    parser.add_argument("--utc", action="store_true", default=argparse.SUPPRESS, help="show times in UTC, not local")
    parser.add_argument(
        "--no-pager", action="store_true", default=argparse.SUPPRESS, help="print long output to the terminal at once"
    )
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
