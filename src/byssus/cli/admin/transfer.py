"""`byssus export|import`: threads as JSON lines, which another database takes, or as Markdown to read."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from byssus.checkpointer import Checkpointer
from byssus.cli import database, ids
from byssus.cli.screen import pages, terminal
from byssus.cli.subcommand import add, work_on
from byssus.errors import InputError, NotFound
from byssus.maintenance.admission import Terms, checked_terms, in_words
from byssus.maintenance.export import export_thread, export_user
from byssus.maintenance.import_ import Imported, bring
from byssus.maintenance.look import is_database
from byssus.values.places import looks_like_dsn, redacted

_PAGE = 500


def add_to(commands: Any) -> None:
    more = "One object per line: messages, tool calls, checkpoints and everything else that 'byssus import' restores."
    parser = add(commands, "export", _export, more)
    parser.add_argument(
        "--format", choices=["jsonl", "markdown"], default="jsonl", help="jsonl (default), or markdown: to read only"
    )
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("thread", metavar="THREAD", nargs="?", help="the thread's id; 'byssus threads' lists them")
    whose.add_argument("--user", metavar="ID", help="all threads of this user instead")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the file, which only you can read (default: -, the standard output)"
    )
    more = (
        "The import is atomic, and existing threads are not changed. Only data is imported: answers to tool calls, "
        "queued messages, tasks, users and usage are left out, unless the file is a backup of your own and you say "
        "so with --trusted."
    )
    parser = add(commands, "import", _import, more)
    parser.add_argument("file", metavar="FILE", help="the file, or - for the standard input")
    parser.add_argument("--as", dest="as_id", metavar="ID", help="another id for the thread")
    parser.add_argument("--user", metavar="ID", help="the user who gets the threads (default: none)")
    parser.add_argument("--trusted", action="store_true", help="the file is a backup of your own: restore all of it")


def _export(args: argparse.Namespace) -> int:
    known = [] if args.thread is None else [args.thread]
    if args.output in (None, "-"):
        work_on(args, lambda cp: _print(cp, args), *known)
        return 0
    if looks_like_dsn(args.output):
        raise InputError(f"{redacted(args.output)!r} is no file; 'byssus copy' copies into another database")
    path = Path(args.output)
    if not path.parent.is_dir():
        raise InputError(f"there is no directory {str(path.parent)!r} for the export; make it, or name another file")
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a directory; name a file in it")
    owner = Path(args.output.removesuffix("-wal").removesuffix("-shm"))
    if owner.is_file() and is_database(str(owner)):  # perhaps the one that is exported
        raise InputError(f"{str(path)!r} belongs to a database of byssus; name another file for the export")
    if path.exists() and not path.is_file():  # a device or a named pipe, which must not be replaced by a file
        _save_in_place(args, path, known)
    else:
        _save(args, path, known)
    return 0


async def _lines(cp: Checkpointer, args: argparse.Namespace) -> AsyncIterator[str]:
    """What is written, line by line, without the newlines."""
    if args.user is not None:
        args.user = await ids.whole_id(cp, "user", args.user)
    if args.format == "markdown":
        async for page in _pages(cp, args):
            yield page.removesuffix("\n")
        return
    lines = export_thread(cp.store, args.thread) if args.user is None else export_user(cp.store, args.user)
    async for line in lines:
        yield line


async def _pages(cp: Checkpointer, args: argparse.Namespace) -> AsyncIterator[str]:
    names = [args.thread] if args.user is None else await _threads_of(cp, args.user)
    for position, name in enumerate(names):
        thread = await cp.load(name)
        if thread is None:
            continue  # deleted meanwhile
        if position:
            yield ""
        for piece in pages.markdown(name, thread.messages, functools.partial(terminal.when, utc=args.utc)):
            yield piece


async def _threads_of(cp: Checkpointer, user_id: str) -> list[str]:
    names: list[str] = []
    while page := await cp.list_user_sessions(user_id, limit=_PAGE, offset=len(names)):
        names += [session["id"] for session in page]
    if page is None:
        raise NotFound(f"there is no user {user_id!r}; 'byssus users' lists them")
    return names


async def _print(cp: Checkpointer, args: argparse.Namespace) -> None:
    async for line in _lines(cp, args):
        if args.format == "markdown":
            print(line)
        elif terminal.is_screen():
            print(terminal.json_line(line))  # nothing in it may drive the terminal
        elif sys.stdout is not None:
            sys.stdout.buffer.write(line.encode() + b"\n")


def _save(args: argparse.Namespace, path: Path, known: list[str]) -> None:
    """Write the file beside its place first: what is there stays until the export is whole."""
    with _draft_of(path) as file:
        try:
            Path(file.name).chmod(0o600)  # a umask may take from the owner, too
            count = work_on(args, lambda cp: _write(cp, args, file), *known)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise
    terminal.remark(f"{terminal.line(str(path))}: {count:,} lines\n")


def _draft_of(path: Path) -> Any:
    """A new file beside this one. An error names the file that was asked for, and not the draft."""
    try:
        return tempfile.NamedTemporaryFile(dir=path.parent, prefix=".byssus-export-", delete=False)
    except OSError as error:
        error.filename = str(path)
        raise


def _save_in_place(args: argparse.Namespace, path: Path, known: list[str]) -> None:
    with path.open("wb") as file:
        work_on(args, lambda cp: _write(cp, args, file), *known)


async def _write(cp: Checkpointer, args: argparse.Namespace, file: Any) -> int:
    count = 0
    async for line in _lines(cp, args):
        file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        count += line.count("\n") + 1
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
