"""Where an agent's threads are kept.

    async with SQLiteCheckpointer("chat.db") as cp:
        await cp.append("trip", [UserMessage("hello")])
        thread = await cp.load("trip")

One checkpointer serves any number of threads and agents. Several on one file share what is below them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias, get_args

from holdfast import clock
from holdfast.errors import InputError, StoreNotOpen
from holdfast.messages import Message, Note, checked_dumps, decode, encode, from_value
from holdfast.store import sqlite, threads
from holdfast.store.database import Store, Tx, in_thread
from holdfast.store.threads import Position, Stored, ThreadInfo

__all__ = ["SQLiteCheckpointer", "Thread", "ThreadInfo"]

Appendable: TypeAlias = Message | dict[str, Any]

_MESSAGES = frozenset(get_args(Message))
_PAGE = 1_000  # messages a read: the event loop gets the interpreter between two pages


class Thread(NamedTuple):
    """A thread as it was loaded. `seqs` are the messages' places in the log."""

    messages: list[Message]
    extra: dict[str, Any]
    seqs: list[int]
    position: Position


class SQLiteCheckpointer:
    """Keeps threads in one SQLite file.

    `durability="full"` (the default) survives a power cut; `"normal"` survives a crash of the process, and may lose
    the last moments when the machine itself goes down.
    """

    def __init__(self, db_path: str | os.PathLike[str] = "checkpoints.db", *, durability: str = "full") -> None:
        if durability not in sqlite.DURABILITIES:
            raise InputError(f"durability must be one of {', '.join(sqlite.DURABILITIES)}, got {durability!r}")
        self._path = db_path
        self._durability = durability
        self._store: sqlite.SQLiteStore | None = None
        self._was_open = False

    async def open(self) -> Self:
        """Open the file, made and migrated if need be. `async with` does it for you."""
        if self._store is None:
            opening = in_thread(lambda: sqlite.open_store(self._path, durability=self._durability))
            try:
                store = await opening
            except asyncio.CancelledError:
                if opening.exception() is None:  # nobody would ever close it
                    await in_thread(lambda: sqlite.release(opening.result()))
                raise
            if self._store is None:
                self._store, self._was_open = store, True
            else:  # opened twice at once
                await in_thread(lambda: sqlite.release(store))
        return self

    async def close(self) -> None:
        """Finish what was submitted and let go of the file."""
        store, self._store = self._store, None
        if store is not None:
            await in_thread(lambda: sqlite.release(store))

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def store(self) -> Store:
        """What runs the queries; an error while the checkpointer is not open."""
        if self._store is None:
            name = type(self).__name__
            raise StoreNotOpen(
                f"this {name} on {os.fspath(self._path)!r} {'was closed' if self._was_open else 'is not open yet'}; "
                f"use it inside 'async with {name}(...) as cp:', or await cp.open() first"
            )
        return self._store

    async def load(self, thread_id: str) -> Thread | None:
        """The whole thread, or None when nothing was ever stored under this id."""
        return await load(self.store, checked_id(thread_id))

    async def append(self, thread_id: str, messages: Appendable | Iterable[Appendable]) -> None:
        """Add messages at the end, all or none; they are on disk when this returns."""
        given: Iterable[Any] = messages if isinstance(messages, list | tuple) else _listed(messages)
        if rows := [stored(message) for message in given]:
            await self.store.write(threads.append, checked_id(thread_id), rows)

    async def save_extra(self, thread_id: str, extra: dict[str, Any]) -> None:
        """Replace the thread's extra: a key that is not there any more is gone."""
        await self.store.write(threads.save_extra, checked_id(thread_id), encode_extra(extra))

    async def threads(self, limit: int = 50, before: ThreadInfo | str | None = None) -> list[ThreadInfo]:
        """All threads, the one that was written last first. To go on, pass the last of the list as `before`."""
        if not isinstance(limit, int) or not 0 <= limit < 2**63:
            raise InputError(f"limit must be a number from 0 up, got {limit!r}")
        if isinstance(before, str):
            known = await self.store.read(threads.info, checked_id(before))
            if known is None:
                raise InputError(f"there is no thread {before!r} to list the ones before")
            before = known
        elif not isinstance(before, ThreadInfo | None):
            raise InputError(f"before must be a ThreadInfo from an earlier list, or a thread id; got {before!r:.80}")
        return await self.store.read(threads.recent, limit=limit, before=before)


async def load(store: Store, thread_id: str) -> Thread | None:
    """Read and decode a thread page by page on a reader's thread: a long one does not stall the event loop."""
    row = await store.read(threads.find, thread_id)
    if row is None:
        return None
    messages: list[Message] = []
    seqs: list[int] = []
    after = 0
    while True:
        page = await store.read(_decoded_page, row.branch, after=after, upto=row.head)
        seqs.extend(seq for seq, _ in page)
        messages.extend(message for _, message in page)
        if len(page) < _PAGE:
            break
        after = seqs[-1]
    return Thread(messages, json.loads(row.extra), seqs, Position(row.head, row.version))


def _decoded_page(tx: Tx, branch: int, *, after: int, upto: int) -> list[tuple[int, Message]]:
    rows = threads.page(tx, branch, after=after, upto=upto, limit=_PAGE)
    return [(seq, decode(body)) for seq, body in rows]


def stored(message: Appendable) -> Stored:
    """A message as the store takes it. Plain dicts are welcome, whether they are messages for a model or not."""
    if isinstance(message, dict):
        message = from_value(message)
    elif type(message) not in _MESSAGES:
        raise InputError(
            f"a thread holds messages, got {type(message).__name__}: {message!r:.80}; use UserMessage(...) or a dict"
        )
    if isinstance(message, Note):
        return Stored(clock.new_id(), _storable(message.role), encode(message))
    return Stored(_storable(message.id) if message.id else clock.new_id(), message.role, encode(message))


def _listed(messages: object) -> list[Any]:
    """One message, or whatever gives several."""
    if isinstance(messages, Iterable) and not isinstance(messages, str | dict):
        return list(messages)
    return [messages]


def _storable(text: str) -> str:
    """Text that any database takes in a column; the body keeps the original."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def checked_id(thread_id: str) -> str:
    if not isinstance(thread_id, str) or not thread_id:
        raise InputError(f"a thread id must be a string with at least one character, got {thread_id!r}")
    if "\0" in thread_id or (not thread_id.isascii() and _has_surrogates(thread_id)):
        raise InputError(f"a thread id cannot contain NUL or lone surrogates, got {thread_id!r}")
    return thread_id


def encode_extra(extra: dict[str, Any]) -> str:
    """The extra as JSON text; what JSON cannot hold is named by its key."""
    if extra == {}:  # most threads have none, and each run asks three times
        return "{}"
    if not isinstance(extra, dict):
        raise InputError(f"extra must be a dict, got {type(extra).__name__}: {extra!r:.80}")
    try:
        return checked_dumps(extra)
    except (TypeError, ValueError, RecursionError):
        pass
    for key, value in extra.items():
        try:
            checked_dumps({key: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"extra[{key!r}] cannot be stored as JSON: {error}; use strings, numbers, booleans, None, lists and "
                f"dicts with string keys, got {type(value).__name__}"
            ) from error
    raise InputError("extra cannot be stored as JSON")


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
