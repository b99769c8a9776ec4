"""`byssus chat`: a conversation in the terminal that goes on where it stopped.

There are two of them: the one that draws (`live/`), and the plain one (`plain.py`) for pipes, terminals that cannot
draw, and installations without the extra `chat`. What draws is imported only when it is used.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import Any

from byssus.cli import options
from byssus.cli.chat import agents, plain
from byssus.cli.commands import COMMANDS
from byssus.cli.screen import terminal

_DESCRIPTION = (
    "Talk to a model in the terminal. The conversation is kept; run it again to go on. "
    "Text that is piped in is one prompt. Ctrl-C stops a reply, Ctrl-D leaves. "
    "/help lists the commands of the chat."
)
_NEEDS = ("prompt_toolkit", "rich")


def add_to(commands: Any) -> None:
    parser = commands.add_parser("chat", help=COMMANDS["chat"].help, description=_DESCRIPTION)
    parser.add_argument("thread", metavar="THREAD", nargs="?", default="main", help="the thread's id (default: main)")
    parser.add_argument("--plain", action="store_true", help="plain text, line by line, as in a pipe")
    agents.add_options(parser)
    options.add_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    source = agents.source_of(args)
    if terminal.is_interactive():
        terminal.read_utf8()
    if args.plain or not _can_draw():
        return plain.run(args, source)
    from byssus.cli.chat.live import start  # noqa: PLC0415 - prompt_toolkit and rich take longer to load than most commands

    return start.run(args, source)


def _can_draw() -> bool:
    """Whether a person sits at a terminal that can move its cursor, and what draws is installed."""
    if not terminal.is_interactive() or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    return all(importlib.util.find_spec(name) is not None for name in _NEEDS)
