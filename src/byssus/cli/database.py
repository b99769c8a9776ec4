"""Which database a command works on: `--db`, `$BYSSUS_DB`, the configuration file, or `chat.db` in the user's data
directory; and which databases of ours lie in the current directory, for people who look in the wrong one."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from byssus import config
from byssus.checkpointer import Checkpointer, checkpointer_for, exists
from byssus.cli.options import default_place
from byssus.config import Config, Setting
from byssus.errors import InputError, StoreUnusable
from byssus.maintenance.look import is_database

_MOST_NAMED = 3
_MOST_LOOKED_AT = 1_000  # files of a directory


def config_of(args: argparse.Namespace) -> Config:
    """All settings of a command: its flags, the variables and the file."""
    flags = {name: getattr(args, flag.removeprefix("--"), None) for name, flag in config.FLAGS.items()}
    return config.load(flags)


def setting_of(args: argparse.Namespace) -> Setting:
    """The database that the command line means, and how it was chosen."""
    setting = config_of(args).database
    return setting if setting.value is not None else setting._replace(value=_default_place())


def checkpointer_of(args: argparse.Namespace) -> Checkpointer:
    """The checkpointer on that database, which may be new."""
    setting = setting_of(args)
    if setting.layer == "default" and (why := why_not_made(str(setting.value))):
        raise StoreUnusable(why)
    return checkpointer_for(str(setting.value))


def existing_checkpointer_of(args: argparse.Namespace) -> Checkpointer:
    """The same for commands that only look: they make nothing."""
    setting = setting_of(args)
    checkpointer = checkpointer_for(str(setting.value))
    if not exists(str(setting.value)):
        raise InputError(
            f"there is no database at {checkpointer.name} yet; "
            + (others_here(setting) or "'byssus chat' makes one, --db DATABASE names another")
        )
    return checkpointer


def others_here(setting: Setting) -> str:
    """Databases of ours in the current directory, with the command to type; empty if the database was chosen."""
    if setting.layer != "default":
        return ""
    found = _databases_here()
    if not found:
        return ""
    named = ", ".join(found[:_MOST_NAMED]) + (", ..." if len(found) > _MOST_NAMED else "")
    what = "a database" if len(found) == 1 else "databases"
    return f"this directory has {what} of byssus ({named}): byssus threads --db {shlex.quote(found[0])}"


def _databases_here() -> list[str]:
    """Their names, newest first."""
    found: list[tuple[float, str]] = []
    try:
        with os.scandir() as entries:
            for entry, _ in zip(entries, range(_MOST_LOOKED_AT), strict=False):
                if entry.is_file() and is_database(entry.path):
                    found.append((-entry.stat().st_mtime, entry.name))
    except OSError:  # a directory that cannot be listed, or is gone: there is nothing to name
        return []
    return [name for _, name in sorted(found)]


def _default_place() -> str:
    folder = Path(default_place()).parent
    if str(folder).startswith("~"):
        raise InputError(
            f"there is no home directory for the default database, {folder}/chat.db; set HOME, or name a database: "
            "BYSSUS_DB=PATH or --db PATH"
        )
    return default_place()


def why_not_made(place: str) -> str:
    """What keeps the default database from being made, with the way out; empty if nothing does, or if it is there."""
    if os.access(place, os.F_OK):
        return ""
    folder = above = Path(place).parent
    while not os.access(above, os.F_OK) and above.parent != above:
        above = above.parent
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return ""
    reason = f"{above} cannot be written" if above.is_dir() else f"{above} is no directory"
    return f"the default database cannot be made in {folder} ({reason}); name another one: BYSSUS_DB=PATH or --db PATH"
