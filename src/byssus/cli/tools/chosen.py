"""`--tools files,shell,time,threads` and `--folder`: ready-made tools for a plain agent."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from byssus.checkpointer import Checkpointer
from byssus.cli.tools.names import GROUPS
from byssus.cli.words import did_you_mean
from byssus.errors import InputError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take --tools and --folder."""
    parser.add_argument(
        "--tools", metavar="LIST", help=f"tools for the model, with commas: {', '.join(GROUPS)} (default: none)"
    )
    parser.add_argument("--folder", metavar="PATH", help="where files and shell work (default: the current directory)")


class Tools(NamedTuple):
    """The groups that were chosen, and the folder that they work in."""

    groups: tuple[str, ...]
    folder: str

    def made(self, checkpointer: Checkpointer, user_id: str | None) -> list[Any]:
        """The tools themselves. The checkpointer must be open by the time of a call."""
        from byssus.cli.tools import threads  # noqa: PLC0415 - most commands need none of this
        from byssus.tools import ready  # noqa: PLC0415 - likewise

        found: list[Any] = []
        for group in self.groups:
            match group:
                case "files":
                    found += ready.files(self.folder)
                case "shell":
                    found += ready.shell(self.folder)
                case "time":
                    found += ready.clock()
                case "threads":
                    found += threads.search(checkpointer, user_id)
        return found


def of(args: argparse.Namespace) -> Tools:
    """What the command line asks for."""
    typed: str = getattr(args, "tools", None) or ""
    groups = tuple(dict.fromkeys(name.strip() for name in typed.split(",") if name.strip()))
    for name in groups:
        if name not in GROUPS:
            hint = did_you_mean(name, GROUPS)
            raise InputError(f"--tools has no {name!r}{f'; {hint}' if hint else ''}; there are {', '.join(GROUPS)}")
    folder: str | None = getattr(args, "folder", None)
    if folder is not None and not {"files", "shell"} & set(groups):
        raise InputError("--folder is where files and shell work; add --tools files, or leave it out")
    return Tools(groups, "." if folder is None else folder)
