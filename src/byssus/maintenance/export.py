"""Threads as JSON lines: exported whole, and imported as they were.

    async for line in export_thread(store, "trip"): ...
    await import_lines(store, "trip.jsonl")

- Each line is an object. The first one of a thread is about the thread itself; then come its branches, messages, marks,
  tool calls, checkpoints, inbox, tasks and usage, each row a line; the last one counts them, with a sha256 over all
  lines before it. The threads of a user stand between two lines of the same kind, behind what is kept of the user: the
  account, and what deleted threads have left of usage.
- What was stored as JSON stands in a line just as it was stored, behind the other fields: no digit of it changes.
- What a fork shares with others is part of its export, and what it does not read of theirs is not. Nothing in the lines
  depends on the database that they come from: an import, exported again, gives the very same bytes.
- Leases do not travel. A run that had not ended is an interrupted one where it is imported.
- An export is one snapshot, written to a temporary file before its first line is given out: neither memory nor a slow
  reader's time is spent on it. An import exists when its last line was verified, and before that not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from byssus.accounts import users
from byssus.errors import ByssusError, InputError, NotFound
from byssus.maintenance.lines import Incoming
from byssus.maintenance.shapes import COUNTED, FORMAT, format_line
from byssus.messages import dumps
from byssus.queries.moving import exporting, importing
from byssus.queries.moving.exporting import PAGE_BYTES, PAGE_ROWS, Line
from byssus.queries.moving.importing import Account, Arriving
from byssus.queries.versions import checkpoints
from byssus.store.database import Store, Tx
from byssus.threads import retention
from byssus.values import clock
from byssus.values.inputs import checked_id

Lines: TypeAlias = str | os.PathLike[str] | Iterable[str | bytes] | AsyncIterable[str | bytes]

_IN_MEMORY = 1_000_000  # bytes of an export, before it becomes a file
_LONGEST = 2**30  # bytes of a line: no database takes a longer text


# --- export -----------------------------------------------------------------------------------------------------------


async def export_thread(store: Store, thread_id: str, *, namespace: str = "") -> AsyncIterator[str]:
    """The lines of a thread, without their newlines."""
    with _new_file() as file:
        if not await store.read(_write_thread, checked_id(thread_id), file, namespace=namespace):
            raise checkpoints.unknown_thread(thread_id)
        async for line in _lines_of(file, hashlib.sha256()):
            yield line


async def export_user(store: Store, user_id: str) -> AsyncIterator[str]:
    """The lines of a user and of all threads of theirs. Each thread is a snapshot of its own.

    What deleted threads have left is read first: a thread that is deleted meanwhile is not counted twice.
    """
    owned = await store.read(exporting.owned, checked_id(user_id, "a user id"))
    with _new_file() as file:
        await store.read(_write_account, user_id, file)
        if not owned and file.seek(0, os.SEEK_END) == 0:
            raise NotFound(f"there is no user {user_id!r}, and no thread of theirs")
        first = dumps({"byssus": "user", "format": FORMAT, "user": user_id})
        digest = hashlib.sha256(first.encode() + b"\n")
        yield first
        async for line in _lines_of(file, digest):
            yield line
    exported: list[int] = []
    for thread in owned:
        with _new_file() as file:
            if not await store.read(_write_thread, thread.id, file, namespace=thread.namespace):
                continue  # it was deleted meanwhile
            exported.append(thread.key)
            async for line in _lines_of(file, digest):
                yield line
    forks = await store.read(exporting.origins, exported)
    yield dumps({"end": {"threads": len(exported)}, "forks": forks, "sha256": digest.hexdigest()})


def _write_thread(tx: Tx, thread_id: str, file: BinaryIO, *, namespace: str) -> bool:
    """Write all lines of a thread into a file; False if there is no such thread. It may be repeated."""
    digest = hashlib.sha256()
    counts = _write(file, exporting.export(tx, thread_id, namespace=namespace), digest)
    if file.tell() == 0:
        return False
    file.write(dumps({"end": counts, "sha256": digest.hexdigest()}).encode() + b"\n")
    return True


def _write_account(tx: Tx, user_id: str, file: BinaryIO) -> None:
    """Write what is kept of a user beside their threads. It may be repeated."""
    _write(file, exporting.account(tx, user_id), hashlib.sha256())


def _write(file: BinaryIO, rows: Iterable[Line], digest: Any) -> dict[str, int]:
    """Write rows into an empty file, and count those of each kind."""
    file.seek(0)
    file.truncate()
    counts = dict.fromkeys(COUNTED.values(), 0)
    for kind, fields in rows:
        line = format_line(kind, fields).encode() + b"\n"
        digest.update(line)
        file.write(line)
        if kind in COUNTED:
            counts[COUNTED[kind]] += 1
    return counts


async def _lines_of(file: BinaryIO, digest: Any) -> AsyncIterator[str]:
    """A file's lines from its beginning, which become part of a sum."""
    file.seek(0)
    async for page in _pages_of(file):
        for line in page:
            digest.update(line + b"\n")
            yield line.decode()


def _new_file() -> BinaryIO:
    return tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # type: ignore[return-value]


async def _pages_of(file: BinaryIO) -> AsyncIterator[list[bytes]]:
    """A file's lines, a page at a time and beside the event loop."""
    while page := await asyncio.to_thread(_page_of, file):
        yield page


def _page_of(file: BinaryIO) -> list[bytes]:
    page: list[bytes] = []
    size = 0
    while len(page) < PAGE_ROWS and size < PAGE_BYTES and (line := file.readline(_LONGEST)):
        page.append(line.removesuffix(b"\n"))
        size += len(line)
    return page


# --- import -----------------------------------------------------------------------------------------------------------


async def import_lines(store: Store, lines: Lines, as_id: str | None = None) -> list[str]:
    """Import what was exported, all of it or nothing; returns the ids of the threads.

    `lines` is the path of a file, or whatever gives lines. `as_id` is another id for the thread, where there is one.
    """
    new_id = None if as_id is None else checked_id(as_id, "as_id")
    await retention.empty_trash(store)  # what an interrupted import has left, too
    token = clock.new_id()
    try:
        return await _import(store, token, lines, new_id)
    except BaseException:
        with suppress(ByssusError):  # then the next import does it
            await store.write(importing.discard, token)
            await retention.empty_trash(store)
        raise


async def _import(store: Store, token: str, lines: Lines, as_id: str | None) -> list[str]:
    await store.write(importing.begin, token, importing.SECONDS)
    incoming, arriving = Incoming(), Arriving()
    async for page in _given(lines):
        rows = await asyncio.to_thread(incoming.take, page)
        arriving = await store.write(importing.add, token, arriving, rows, importing.SECONDS)
    incoming.finish()
    arrivals = list(arriving.whole)
    if as_id is not None:
        if len(arrivals) != 1:
            raise InputError(f"as_id={as_id!r} is a name for one thread, and these are {len(arrivals)}")
        arrivals = [arrivals[0]._replace(id=as_id)]
    account = await asyncio.to_thread(_account, incoming)
    await store.write(importing.publish, token, arrivals, incoming.forks, account)
    return [arrival.id for arrival in arrivals]


def _account(incoming: Incoming) -> Account | None:
    fields = incoming.account
    if fields is None:
        return None
    leaves = users.leaves(json.loads(fields["preferences"]))
    return Account(incoming.user_id, fields, leaves, incoming.left)


async def _given(lines: Lines) -> AsyncIterator[list[bytes]]:
    """Pages of lines, from wherever they come."""
    if isinstance(lines, str | os.PathLike):
        with await asyncio.to_thread(Path(lines).open, "rb") as file:
            async for some in _pages_of(file):
                yield some
        return
    page: list[bytes] = []
    size = 0
    async for line in _one_by_one(lines):
        page.append(line)
        size += len(line)
        if len(page) >= PAGE_ROWS or size >= PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


async def _one_by_one(lines: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[bytes]:
    if isinstance(lines, AsyncIterable):
        async for line in lines:
            yield _as_bytes(line)
    elif isinstance(lines, Iterable):
        for line in lines:
            yield _as_bytes(line)
    else:
        raise InputError(f"an import takes the path of a file or lines, got {type(lines).__name__}")


def _as_bytes(line: object) -> bytes:
    if isinstance(line, str):
        with suppress(UnicodeEncodeError):  # what cannot be encoded is no JSON of ours: it is refused as such
            return line.encode().removesuffix(b"\n")
        return b"\xff"
    if not isinstance(line, bytes):
        raise InputError(f"a line must be text, got {type(line).__name__}: {line!r:.80}")
    return line.removesuffix(b"\n")
