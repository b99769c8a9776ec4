"""The command `byssus`: one file for each group of subcommands, and here what they share at the edge. Nothing here
imports them: see commands.py.

Exit codes: 0, 1 for an error (one line on stderr), 2 for a wrong command line, 130, 141 and 143 for an interrupt, a
reader that went away and a SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from byssus.cli import ending
from byssus.cli.parser import commands_of, parser_for
from byssus.cli.screen import pager, terminal
from byssus.cli.words import did_you_mean, in_words
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
    code = 1
    try:
        code = _run(argv)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as exiting:
        code = exiting.code if isinstance(exiting.code, int) else 1
        raise
    finally:
        ending.close_runners(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    terminal.prepare()
    typed = [terminal.typed(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser = parser_for(typed)
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
    except Exception as error:  # noqa: BLE001 - a person at a shell gets one line, whatever it is
        terminal.abandon_output()
        if args.debug:
            terminal.remark(redacted("".join(traceback.format_exception(error))))
        terminal.complain(in_words(error))
        return 1
    return code


def _choose_logs(debug: bool) -> None:
    """A person at a shell gets one line for a failure, and no warning; an app that sets up logging gets them all."""
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


def _refuse_unknown(parser: argparse.ArgumentParser, more: Sequence[str]) -> NoReturn:
    """Exit with 2 and the usage of the command that got options or arguments which it does not have."""
    unknown = next((word.partition("=")[0] for word in more if word.startswith("-")), "")
    hints = [did_you_mean(unknown, parser._option_string_actions)] if unknown else []
    if parser.prog.endswith(" search") and unknown:
        phrase = shlex.quote(f'"{unknown}"')
        hints.append(f"to search for that text, quote it after --: byssus search -- {phrase}")
    parser.error("; ".join([f"unrecognized arguments: {' '.join(map(redacted, more))}", *filter(None, hints)]))
