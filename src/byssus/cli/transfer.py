"""`byssus export|import`: threads as JSON lines, which another database takes."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from byssus.checkpointer import Checkpointer
from byssus.cli import database, terminal
from byssus.cli.subcommand import add
from byssus.errors import InputError
from byssus.maintenance.admission import Terms, checked_terms, in_words
from byssus.maintenance.export import export_thread, export_user
from byssus.maintenance.import_ import Imported, bring
from byssus.values.places import looks_like_dsn, redacted


def add_to(commands: Any) -> None:
    more = "One object a line: messages, tool calls, checkpoints and all else that 'byssus import' brings back."
    parser = add(commands, "export", _export, "write a thread, or all threads of a user, as JSON lines", more)
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("thread", metavar="THREAD", nargs="?", help="the thread's id; 'byssus threads' lists them")
    whose.add_argument("--user", metavar="ID", help="all threads of this user instead")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write them (default: the standard output)")
    more = (
        "Everything in the file is imported, or nothing. A thread that is there already is left alone. Only data is "
        "imported: answers to tool calls, queued messages, tasks, users and usage are left out, unless the file is a "
        "backup of your own and you say so with --trusted."
    )
    parser = add(commands, "import", _import, "bring back what 'byssus export' has written", more)
    parser.add_argument("file", metavar="FILE", help="the file, or - for the standard input")
    parser.add_argument("--as", dest="as_id", metavar="ID", help="another id for the thread")
    parser.add_argument("--user", metavar="ID", help="whose the threads become (default: nobody's)")
    parser.add_argument("--trusted", action="store_true", help="the file is a backup of your own: restore all of it")


def _export(args: argparse.Namespace) -> int:
    checkpointer = database.existing_checkpointer_of(args)
    if args.output is None:
        asyncio.run(_print(checkpointer, args))
    else:
        if looks_like_dsn(args.output):
            raise InputError(f"{redacted(args.output)!r} is no file; 'byssus copy' copies into another database")
        _save(checkpointer, args, Path(args.output))
    return 0


def _lines(checkpointer: Checkpointer, args: argparse.Namespace) -> AsyncIterator[str]:
    if args.user is not None:
        return export_user(checkpointer.store, args.user)
    return export_thread(checkpointer.store, args.thread)


async def _known(checkpointer: Checkpointer, args: argparse.Namespace) -> None:
    if args.user is None and await checkpointer.info(args.thread) is None:
        raise InputError(f"there is no thread {args.thread!r} in {checkpointer.name}; 'byssus threads' lists them")


async def _print(checkpointer: Checkpointer, args: argparse.Namespace) -> None:
    async with checkpointer:
        await _known(checkpointer, args)
        async for line in _lines(checkpointer, args):
            if sys.stdout.isatty():
                terminal.write(f"{terminal.json_line(line)}\n")  # nothing in it may drive the terminal
            else:
                sys.stdout.buffer.write(line.encode() + b"\n")
        sys.stdout.buffer.flush()


def _save(checkpointer: Checkpointer, args: argparse.Namespace, path: Path) -> None:
    """Write the file beside its place first: what is there stays until the export is whole."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            count = asyncio.run(_write(checkpointer, args, file))
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise
    terminal.remark(f"{terminal.line(str(path))}: {count:,} lines\n")


async def _write(checkpointer: Checkpointer, args: argparse.Namespace, file: Any) -> int:
    count = 0
    async with checkpointer:
        await _known(checkpointer, args)
        async for line in _lines(checkpointer, args):
            file.write(line.encode() + b"\n")
            count += 1
    return count


def _import(args: argparse.Namespace) -> int:
    if args.file != "-" and not Path(args.file).is_file():
        raise InputError(f"there is no file {redacted(args.file)!r}")
    asked: str | BinaryIO = sys.stdin.buffer if args.file == "-" else args.file
    terms = checked_terms(args.as_id, args.user, args.trusted)
    imported = asyncio.run(_bring(database.checkpointer_of(args), asked, terms))
    for name in imported.ids:
        print(terminal.line(f"Imported thread {name}"))
    if what := in_words(imported.left_out):
        hint = "" if args.trusted else " If the file is a backup of your own, use --trusted."
        terminal.remark(f"Left out: {what}.{hint}\n")
    return 0


async def _bring(checkpointer: Checkpointer, lines: str | BinaryIO, terms: Terms) -> Imported:
    async with checkpointer:
        return await bring(checkpointer.store, lines, terms)
