"""Where an agent's threads are kept.

    async with SQLiteCheckpointer("chat.db") as cp:
        await cp.append("trip", [UserMessage("hello")])
        thread = await cp.load("trip")

One checkpointer serves any number of threads and agents. Several on one database share what is below them.
"""

from __future__ import annotations

import abc
import asyncio
import json
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias, get_args

from holdfast import clock, watching
from holdfast.decisions import Answer, Pending, encode_answer
from holdfast.errors import InputError, StoreNotOpen, ThreadBusy
from holdfast.inbox import Receipt, Waiting, id_of
from holdfast.leasing import checked_wait, is_gone, patiently
from holdfast.messages import (
    AssistantMessage,
    Message,
    Note,
    UserMessage,
    checked_dumps,
    decode,
    encode,
    from_value,
    stamped,
)
from holdfast.prompts import single
from holdfast.store import inbox, leases, places, sharing, sqlite, threads, tool_calls
from holdfast.store.database import Store, Tx, in_thread
from holdfast.store.leases import Visit
from holdfast.store.places import exists, is_dsn
from holdfast.store.sqlite_file import check_durability
from holdfast.store.threads import Position, Stored, ThreadInfo

__all__ = [
    "Checkpointer",
    "PostgresCheckpointer",
    "SQLiteCheckpointer",
    "Thread",
    "ThreadInfo",
    "ToolCallRecord",
    "checkpointer_for",
    "exists",
]

Appendable: TypeAlias = Message | dict[str, Any]

_MESSAGES = frozenset(get_args(Message))
_PAGE = 1_000  # messages a read: the event loop gets the interpreter between two pages


class Thread(NamedTuple):
    """A thread as it was loaded.

    `partial` is what has arrived of a reply that is not whole: its run goes on elsewhere, or was interrupted. The rest
    is for the agent: the messages' places in the log, where the thread stands, and the run that has not ended.
    """

    messages: list[Message]
    extra: dict[str, Any]
    partial: AssistantMessage | None = None
    seqs: Sequence[int] = ()
    position: Position = Position(0, 0)
    run_id: str | None = None
    unledgered: int = 0
    mail: int = 0


class ToolCallRecord(NamedTuple):
    """What the ledger says about a tool call.

    `status` is started, waiting (for a person) or answered; or how it ended: done, failed, denied, aborted, unknown.
    """

    call_id: str
    tool_name: str
    arguments: dict[str, Any]
    recovery: str
    idempotency_key: str
    run_id: str
    status: str
    attempts: int
    asked_at: str | None
    started_at: str | None
    ended_at: str | None


class Checkpointer(abc.ABC):
    """Keeps threads. Which database it is, only `SQLiteCheckpointer` and `PostgresCheckpointer` know."""

    def __init__(self, *, durability: str, lease_seconds: float) -> None:
        check_durability(durability)
        if isinstance(lease_seconds, bool) or not isinstance(lease_seconds, int | float) or not 0 < lease_seconds < 1e6:
            raise InputError(f"lease_seconds must be a number of seconds above 0, got {lease_seconds!r}")
        self.lease_seconds = float(lease_seconds)
        self._durability = durability
        self._store: Store | None = None
        self._was_open = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The database, as people may see it."""

    @abc.abstractmethod
    def _open_store(self) -> Store: ...

    async def open(self) -> Self:
        """Open the database, made and migrated if need be. `async with` does it for you."""
        if self._store is None:
            opening = in_thread(self._open_store)
            try:
                store = await opening
            except asyncio.CancelledError:
                if opening.exception() is None:  # nobody would ever close it
                    await in_thread(lambda: sharing.release(opening.result()))
                raise
            if self._store is None:
                self._store, self._was_open = store, True
            else:  # opened twice at once
                await in_thread(lambda: sharing.release(store))
        return self

    async def close(self) -> None:
        """Finish what was submitted and let go of the database."""
        store, self._store = self._store, None
        if store is not None:
            await in_thread(lambda: sharing.release(store))

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
            kind = type(self).__name__
            raise StoreNotOpen(
                f"this {kind} on {self.name!r} {'was closed' if self._was_open else 'is not open yet'}; "
                f"use it inside 'async with {kind}(...) as cp:', or await cp.open() first"
            )
        return self._store

    async def load(self, thread_id: str) -> Thread | None:
        """The whole thread, or None when nothing was ever stored under this id."""
        return await load(self.store, checked_id(thread_id))

    async def append(self, thread_id: str, messages: Appendable | Iterable[Appendable], *, wait: float = 0) -> None:
        """Add messages at the end, all or none; they are on disk when this returns.

        While a run drives the thread, it raises `ThreadBusy`, or waits for so many seconds first.
        """
        given: Iterable[Any] = messages if isinstance(messages, list | tuple) else _listed(messages)
        rows = [stored(message) for message in given]
        thread, store, seconds = checked_id(thread_id), self.store, checked_wait(wait)
        if not rows:
            return
        try:
            await store.write(threads.append, thread, rows)
        except ThreadBusy:
            await patiently(lambda over: store.write(threads.append, thread, rows, by=Visit(over)), seconds)

    async def save_extra(self, thread_id: str, extra: dict[str, Any], *, wait: float = 0) -> None:
        """Replace the thread's extra: a key that is not there any more is gone. As `append` while a run is going on."""
        thread, text, store = checked_id(thread_id), encode_extra(extra), self.store
        await patiently(lambda over: store.write(threads.save_extra, thread, text, by=Visit(over)), checked_wait(wait))

    def watch(self, thread_id: str) -> AsyncGenerator[Message, None]:
        """What the thread holds, and then each message a moment after it was committed, by whichever process.

        It goes on until you break out of the loop. A thread that does not exist yet is waited for.
        """
        return watching.watch(self.store, checked_id(thread_id))

    # --- runs, seen from outside --------------------------------------------------------------------------------------

    async def unfinished(self) -> list[ThreadInfo]:
        """Threads whose run was interrupted: a service resumes them when it starts.

        A run that goes on somewhere is not listed, nor one that waits for a person's answer.
        """
        found = await self.store.read(threads.unfinished)
        return [info for info, owner, _ in found if owner is None or is_gone(owner)]

    def steer(self, thread_id: str, message: str | UserMessage) -> Receipt:
        """Say something into the run that drives the thread, in whatever process: it hears it before its next turn.

        Without a run, it waits for the next one. Await what this returns to know that it is on disk.
        """
        return self.send(thread_id, inbox.STEER, single(message, "steer"))

    def follow_up(self, thread_id: str, message: str | UserMessage) -> Receipt:
        """As `steer`, for the moment when the run would stop."""
        return self.send(thread_id, inbox.FOLLOW_UP, single(message, "follow_up"))

    def send(self, thread_id: str, kind: str, message: UserMessage) -> Receipt:
        """Submit the message at once, behind all that was sent before."""
        message = stamped(message)
        return Receipt(message, self.store.submit(inbox.send, checked_id(thread_id), kind, stored(message)))

    async def inbox(self, thread_id: str) -> list[Waiting]:
        """What was said and not heard yet, in order."""
        rows = await self.store.read(inbox.waiting, checked_id(thread_id))
        return [Waiting(row.id, row.kind, decode(row.body), row.created_at) for row in rows]  # type: ignore[arg-type]

    async def withdraw(self, thread_id: str, message: str | Receipt | Waiting) -> bool:
        """Take back what was not heard yet; False if it is too late."""
        return await self.store.write(inbox.withdraw, checked_id(thread_id), storable(id_of(message)))

    async def abort(self, thread_id: str) -> bool:
        """Ask the run that drives the thread, in whatever process, to end. False if there is none."""
        owner = await self.store.write(leases.abort, checked_id(thread_id))
        return owner is not None and not is_gone(owner)

    async def pending(self, thread_id: str | None = None) -> list[Pending]:
        """The tool calls that wait for a person, of one thread or of all."""
        rows = await self.store.read(tool_calls.pending, None if thread_id is None else checked_id(thread_id))
        return [Pending(*row[:3], json.loads(row.arguments) or {}, *row[4:]) for row in rows]

    async def answer(self, thread_id: str, call_id: str, answer: Answer) -> None:
        """Say what shall become of a call that waits: "approve", "deny", `Deny(reason)` or `ToolResult(...)`.

        It is recorded; the thread's next run (`resume()`, `prompt()`) acts upon it, or the one that is going on.
        """
        await self.answer_encoded(thread_id, call_id, encode_answer(answer))

    async def answer_encoded(self, thread_id: str, call_id: str, answer: str) -> None:
        if not isinstance(call_id, str):
            raise InputError(f"a call is named by its id, got {call_id!r:.80}; pending() lists what waits")
        await self.store.write(tool_calls.answer, checked_id(thread_id), storable(call_id), answer)

    async def tool_calls(self, thread_id: str) -> list[ToolCallRecord]:
        """The ledger of the thread: every tool call that was begun or put before a person, oldest first."""
        found: list[ToolCallRecord] = []
        after = 0
        while True:
            rows = await self.store.read(tool_calls.records, checked_id(thread_id), after=after, limit=_PAGE)
            found += [ToolCallRecord(row[1], row[2], json.loads(row[3]) or {}, *row[4:]) for row in rows]
            if len(rows) < _PAGE:
                return found
            after = rows[-1][0]

    # --- lists --------------------------------------------------------------------------------------------------------

    async def info(self, thread_id: str) -> ThreadInfo | None:
        """A thread as a list shows it, or None when nothing was ever stored under this id."""
        return await self.store.read(threads.info, checked_id(thread_id))

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


class SQLiteCheckpointer(Checkpointer):
    """Keeps threads in one SQLite file.

    `durability="full"` (the default) survives a power cut; `"normal"` survives a crash of the process, and may lose
    the last moments when the machine itself goes down. `lease_seconds` is how long a thread stays reserved for a run
    whose process has stopped without a word; a run that lives renews it.
    """

    def __init__(
        self,
        db_path: str | os.PathLike[str] = "checkpoints.db",
        *,
        durability: str = "full",
        lease_seconds: float = 30.0,
    ) -> None:
        super().__init__(durability=durability, lease_seconds=lease_seconds)
        if is_dsn(db_path):
            raise InputError("SQLiteCheckpointer takes a path, and got a DSN; use PostgresCheckpointer(dsn)")
        self._path = db_path

    @property
    def name(self) -> str:
        return os.fspath(self._path)

    def _open_store(self) -> Store:
        return sqlite.open_store(self._path, durability=self._durability)


class PostgresCheckpointer(Checkpointer):
    """Keeps threads in a Postgres database, which any number of processes on any number of machines may share.

    `dsn` is `postgresql://user:password@host:5432/database`, or several hosts of which the one that can be written is
    used. The tables are made where they are not there yet, in the schema "holdfast"; `schema`, or `?schema=` in the
    DSN, names another. `pool_size` is how many connections this process works with at most; two more serve leases and
    notifications. `listen_dsn` leads to the server itself where `dsn` leads to a pooler, which cannot pass
    notifications on. The rest is as with `SQLiteCheckpointer`.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema: str | None = None,
        durability: str = "full",
        lease_seconds: float = 30.0,
        pool_size: int = 8,
        listen_dsn: str | None = None,
    ) -> None:
        super().__init__(durability=durability, lease_seconds=lease_seconds)
        self._server = places.postgres_server(dsn, schema=schema, listen_dsn=listen_dsn)
        if isinstance(pool_size, bool) or not isinstance(pool_size, int) or not 2 <= pool_size <= 1_000:
            raise InputError(f"pool_size must be a number of connections from 2 to 1000, got {pool_size!r}")
        self._pool_size = pool_size

    @property
    def name(self) -> str:
        return self._server.name

    def _open_store(self) -> Store:
        return places.open_postgres(self._server, durability=self._durability, pool_size=self._pool_size)


def checkpointer_for(place: str | os.PathLike[str], **options: Any) -> Checkpointer:
    """The checkpointer for a path or a DSN, for programs that are told their database from outside."""
    if is_dsn(place):
        return PostgresCheckpointer(os.fspath(place), **options)
    return SQLiteCheckpointer(place, **options)


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
    position = Position(row.head, row.version, row.branch)
    partial = None if row.partial is None else decode(row.partial)
    assert isinstance(partial, AssistantMessage | None)
    return Thread(messages, json.loads(row.extra), partial, seqs, position, row.run, row.unledgered, row.mail)


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
        return Stored(clock.new_id(), storable(message.role), encode(message))
    return Stored(storable(message.id) if message.id else clock.new_id(), message.role, encode(message))


def _listed(messages: object) -> list[Any]:
    """One message, or whatever gives several."""
    if isinstance(messages, Iterable) and not isinstance(messages, str | dict):
        return list(messages)
    return [messages]


def storable(text: str) -> str:
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
