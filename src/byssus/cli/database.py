"""Which database a command works on: `--db`, or `$BYSSUS_DB`, or `chat.db` in the user's data directory."""

from __future__ import annotations

import argparse
import os

import platformdirs

from byssus.checkpointer import Checkpointer, checkpointer_for, exists
from byssus.errors import InputError


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(has_database=True)
    parser.add_argument(
        "--db",
        metavar="DATABASE",
        default=argparse.SUPPRESS,  # it may stand before the command too
        help="a path or a postgresql:// DSN (default: $BYSSUS_DB, or the user's chat.db)",
    )


def checkpointer_of(args: argparse.Namespace) -> Checkpointer:
    """The database that the command line means."""
    return checkpointer_for(_place_of(args))


def existing_checkpointer_of(args: argparse.Namespace) -> Checkpointer:
    """The same, for commands that only look: they make nothing."""
    place = _place_of(args)
    checkpointer = checkpointer_for(place)
    if not exists(place):
        raise InputError(
            f"there is no database at {checkpointer.name} yet; 'byssus chat' makes one, --db DATABASE names another"
        )
    return checkpointer


def _place_of(args: argparse.Namespace) -> str:
    if args.db is not None:
        return str(args.db)
    return os.environ.get("BYSSUS_DB") or str(platformdirs.user_data_path("byssus", appauthor=False) / "chat.db")
