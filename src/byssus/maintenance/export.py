"""Exports: a thread, or a user with all threads, as JSON lines.

    async for line in export_thread(store, "trip"): ...

- Each line is an object. The first line of a thread describes the thread. Its branches, messages, marks, tool calls,
  checkpoints, inbox, tasks and usage follow, one line per row. The last line has their numbers and a sha256 over all
  lines before it. The export of a user begins with the account and the usage of deleted threads; the user's threads
  follow, and a last line of the same kind ends it.
- The children of a thread follow it, each as a thread of its own that names its parent.
- JSON values are the last field of a line and are copied as they are stored: no digit of them changes.
- The export of a fork contains the history that it shares with other threads, and nothing else of those threads. Lines
  do not depend on the database: exporting an import gives the same bytes.
- Leases are not exported. A run that had not ended is imported as an interrupted one.
- An export is one snapshot, written to a temporary file before its first line is yielded: a slow reader holds neither
  memory nor a transaction.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from byssus.errors import NotFound
from byssus.maintenance.shapes import COUNTED, FORMAT, format_line
from byssus.messages import dumps, encode
from byssus.queries.log import threads
from byssus.queries.moving import exporting
from byssus.queries.moving.exporting import Line
from byssus.queries.versions import checkpoints
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.threads.thread import partial_of
from byssus.values.inputs import ThreadId, checked_id, checked_thread
from byssus.values.thread_key import ThreadKey

_IN_MEMORY = 1_000_000  # bytes of an export, before it becomes a file
_LONGEST = 2**30  # bytes of a line: no database takes a longer text


def export_thread(store: Runner, thread_id: ThreadId) -> AsyncIterator[str]:
    """The thread and its child threads as JSON lines, without newlines, for `import_from`."""
    return _export_thread(store, checked_thread(thread_id))


async def _export_thread(store: Runner, thread_key: ThreadKey) -> AsyncIterator[str]:
    with _new_file() as file:
        if not await store.read(_write_family, thread_key, file):
            raise checkpoints.unknown_thread(thread_key.id)
        async for line in _lines_of(store, file, hashlib.sha256()):
            yield line


def export_user(store: Runner, user_id: str) -> AsyncIterator[str]:
    """The lines of a user and of all their threads. Each thread is a separate snapshot.

    The usage of deleted threads is read first, so that a thread that is deleted meanwhile is not counted twice.
    """
    return _export_user(store, checked_id(user_id, "a user id"))


async def _export_user(store: Runner, user_id: str) -> AsyncIterator[str]:
    owned = await store.read(exporting.owned, user_id)
    with _new_file() as file:
        await store.read(_write_account, user_id, file)
        if not owned and file.seek(0, os.SEEK_END) == 0:
            raise NotFound(f"there is no user {user_id!r}, and no thread of that user")
        first = dumps({"byssus": "user", "format": FORMAT, "user": user_id})
        digest = hashlib.sha256(first.encode() + b"\n")
        yield first
        async for line in _lines_of(store, file, digest):
            yield line
    exported: list[int] = []
    for thread in owned:
        with _new_file() as file:
            if not await store.read(_write_one, ThreadKey(thread.namespace, thread.id), file, exported):
                continue  # it was deleted meanwhile
            exported.append(thread.key)
            async for line in _lines_of(store, file, digest):
                yield line
    forks = await store.read(exporting.origins, exported)
    yield dumps({"end": {"threads": len(exported)}, "forks": forks, "sha256": digest.hexdigest()})


def _write_family(tx: Tx, thread_key: ThreadKey, file: BinaryIO) -> bool:
    """Write all lines of a thread and its children into a file; False if there is no such thread.

    It may be repeated.
    """
    _clear(file)
    written: list[int] = []
    for key, name in exporting.family(tx, thread_key).items():
        _write_thread(tx, ThreadKey(thread_key.namespace, name), file, written)
        written.append(key)
    return bool(written)


def _write_one(tx: Tx, thread_key: ThreadKey, file: BinaryIO, exported: Sequence[int]) -> bool:
    """Write all lines of a thread into a file; False if there is no such thread. It may be repeated."""
    _clear(file)
    return _write_thread(tx, thread_key, file, exported)


def _write_thread(tx: Tx, thread_key: ThreadKey, file: BinaryIO, exported: Sequence[int]) -> bool:
    digest, begin = hashlib.sha256(), file.tell()
    counts = _write(file, _with_pieces(tx, thread_key, exporting.export(tx, thread_key, exported)), digest)
    if file.tell() == begin:
        return False
    file.write(dumps({"end": counts, "sha256": digest.hexdigest()}).encode() + b"\n")
    return True


def _with_pieces(tx: Tx, thread_key: ThreadKey, rows: Iterable[Line]) -> Iterator[Line]:
    """The rows of a thread. What was saved of a reply in pieces is exported as one message."""
    for kind, fields in rows:
        row = threads.find(tx, thread_key) if kind == "thread" and fields["partial"] is not None else None
        if row is not None and threads.pieces(tx, row.key):
            partial = partial_of(tx, row)
            assert partial is not None
            fields = {**fields, "partial": encode(partial)}
        yield kind, fields


def _write_account(tx: Tx, user_id: str, file: BinaryIO) -> None:
    """Write what is kept of a user beside their threads. It may be repeated."""
    _clear(file)
    _write(file, exporting.account(tx, user_id), hashlib.sha256())


def _clear(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


def _write(file: BinaryIO, rows: Iterable[Line], digest: Any) -> dict[str, int]:
    """Write rows into a file, and count those of each kind."""
    counts = dict.fromkeys(COUNTED.values(), 0)
    for kind, fields in rows:
        line = format_line(kind, fields).encode() + b"\n"
        digest.update(line)
        file.write(line)
        if kind in COUNTED:
            counts[COUNTED[kind]] += 1
    return counts


async def _lines_of(store: Runner, file: BinaryIO, digest: Any) -> AsyncIterator[str]:
    """A file's lines from its beginning, which become part of a sum."""
    file.seek(0)
    async for page in pages_of(store, file):
        for line in page:
            digest.update(line + b"\n")
            yield line.decode()


def _new_file() -> BinaryIO:
    return tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # type: ignore[return-value]


async def pages_of(store: Runner, file: BinaryIO) -> AsyncIterator[list[bytes]]:
    """A file's lines, a page at a time and beside the event loop."""
    while page := await store.aside(lambda: _page_of(file)):
        yield page


def _page_of(file: BinaryIO) -> list[bytes]:
    page: list[bytes] = []
    size = 0
    while len(page) < exporting.PAGE_ROWS and size < exporting.PAGE_BYTES and (line := file.readline(_LONGEST)):
        page.append(line.removesuffix(b"\n"))
        size += len(line)
    return page
