"""The option `--db`, which most commands take. Every `--help` shows it, so this file imports nothing of byssus."""

from __future__ import annotations

import argparse

import platformdirs


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(has_database=True)
    parser.add_argument(
        "--db",
        metavar="DATABASE",
        default=argparse.SUPPRESS,  # it may stand before the command too
        help=explained(),
    )


def explained() -> str:
    """What --db is, and the database without it."""
    default = default_place().replace("%", "%%")
    return f"a path or a postgresql:// DSN (default: $BYSSUS_DB, else byssus.toml, else {default})"


def default_place() -> str:
    """The file in the user's data directory that is used without any setting."""
    return str(platformdirs.user_data_path("byssus", appauthor=False) / "chat.db")
