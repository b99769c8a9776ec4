"""Which database a command works on: `--db`, or `$HOLDFAST_DB`, or `chat.db` in the user's data directory."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import platformdirs

from holdfast.errors import InputError


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--db", metavar="PATH", help="the database (default: $HOLDFAST_DB, or the user's chat.db)")


def path_of(args: argparse.Namespace) -> str:
    """The database that the command line means."""
    if args.db is not None:
        return str(args.db)
    return os.environ.get("HOLDFAST_DB") or str(platformdirs.user_data_path("holdfast", appauthor=False) / "chat.db")


def existing_path_of(args: argparse.Namespace) -> str:
    """The same, for commands that only look: they make no file."""
    path = path_of(args)
    if not Path(path).exists():
        raise InputError(f"there is no database at {path} yet; 'holdfast chat' makes one, --db PATH names another")
    return path
