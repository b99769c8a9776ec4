"""Memories that are stored: threads of a SQLite file or of a Postgres database.

- A memory opens its database on first use, and releases it when it is closed or garbage-collected. Every write is
  stored, even if the memory is never closed. All memories of one database share one store.
- Users and sessions are columns: the thread is (user, session). Without a user, it is the agent thread with the
  session's name.
- Each call is one transaction. Like any other write, adding and removing waits for a run that holds the thread.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from byssus.errors import InputError, NotFound
from byssus.memory import arguments
from byssus.memory.base import MemoryBase
from byssus.memory.loaded_state import Loaded, collect
from byssus.memory.msg import Msg, MsgFields, msg_fields
from byssus.messages import dumps
from byssus.queries.log import memories as queries
from byssus.queries.log.leases import Unleased
from byssus.queries.log.memories import MarkedMessage
from byssus.queries.log.threads import MessageRow
from byssus.search import search as searching
from byssus.store import opening
from byssus.store.database import Durability as Durability  # noqa: PLC0414 - for the adapters
from byssus.store.database import Store, Tx
from byssus.store.handle import Handle
from byssus.store.sqlite.file import check_durability, check_path
from byssus.threads import erasure
from byssus.threads.encoding import encode_json
from byssus.threads.waiting import retry_while_driven
from byssus.values.inputs import checked_new_id, checked_wait
from byssus.values.places import redacted
from byssus.values.thread_key import ThreadKey

if TYPE_CHECKING:
    from byssus.store.postgres.server import Server

T = TypeVar("T")
_log = logging.getLogger("byssus.memory")

SESSION = "default"  # if none is named
_SUMMARY = "_compressed_summary"  # the name in AgentScope's states


class _Here(NamedTuple):
    """The thread of a memory, as it was named and as the store knows it, and the handle of that store."""

    user_id: str | None
    session_id: str | None
    thread: ThreadKey
    handle: Handle


class StoredMemory(MemoryBase, abc.ABC):
    """A memory in a database; subclasses know which one."""

    _place: ClassVar[str]  # the key of the database's place in a state
    _class: ClassVar[type[Any]] = Msg  # the class of the messages that it returns

    def __init__(self, handle: Handle, user_id: str | None, session_id: str | None, *, wait: float) -> None:
        self._wait = checked_wait(wait)
        self._here = _named(user_id, session_id, handle)  # replaced as a whole: a call in progress keeps the old one
        self._loaded: Loaded | None = None

    @abc.abstractmethod
    def _handle_at(self, place: str) -> Handle:
        """Return the handle of the database at a place."""

    @abc.abstractmethod
    def _may_be_at(self, place: str) -> bool:
        """Return whether there may be a database at a place. Creates nothing."""

    @property
    def name(self) -> str:
        """Return the name of the database without secrets, as another process would find it."""
        return self._here.handle.name

    @property
    def user_id(self) -> str | None:
        return self._here.user_id

    @property
    def session_id(self) -> str | None:
        return self._here.session_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, user_id={self.user_id!r}, session_id={self.session_id!r})"

    def __copy__(self) -> Self:
        """Return another memory of the same thread."""
        made = type(self).__new__(type(self))
        made.__dict__ |= self.__dict__ | {"_here": self._here._replace(handle=self._here.handle.anew())}
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)

    # --- the messages -------------------------------------------------------------------------------------------------

    async def add(
        self,
        memories: Msg | Iterable[Msg] | None,
        marks: str | list[str] | None = None,
        allow_duplicates: bool = False,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        if memories is None:
            return
        marks = arguments.marks_to_add(marks)
        rows = [_row_of(message) for message in arguments.messages(memories)]
        if rows:
            await self._write(queries.add, rows, marks, again=bool(allow_duplicates))

    async def delete(self, msg_ids: Iterable[str], **kwargs: Any) -> int:  # noqa: ARG002
        ids = arguments.ids("msg_ids", msg_ids)
        return await self._write(queries.delete, ids) if ids else 0

    async def delete_by_mark(self, mark: str | list[str], **kwargs: Any) -> int:  # noqa: ARG002
        doomed = arguments.marks_to_delete(mark)
        return await self._write(queries.delete_marked, doomed) if doomed else 0

    async def get_memory(
        self,
        mark: str | list[str] | None = None,
        exclude_mark: str | list[str] | None = None,
        prepend_summary: bool = True,
        **kwargs: Any,  # noqa: ARG002
    ) -> list[Msg]:
        wanted = arguments.wanted("mark", mark)
        unwanted = arguments.wanted("exclude_mark", exclude_mark) or []
        store, here = await self._ready()
        summary, found = await store.read(_read, here.thread, self._message, marked=wanted, unmarked=unwanted)
        return [self._class("user", summary, "user"), *found] if prepend_summary and summary else found

    async def search(self, query: str, limit: int = 10) -> list[Msg]:
        store, here = await self._ready()
        keys = await searching.find_keys(
            store, query, namespace=here.thread.namespace, session_id=here.thread.id, limit=limit
        )
        return await store.read(_at, keys, self._message)

    async def size(self) -> int:
        store, here = await self._ready()
        return await store.read(queries.size, here.thread)

    async def clear(self) -> None:
        store, here = await self._ready()
        if await self._attempt(store, here, queries.clear):
            await collect(store, here.thread)

    # --- marks and the summary ----------------------------------------------------------------------------------------

    async def update_messages_mark(
        self, new_mark: str | None, old_mark: str | None = None, msg_ids: Iterable[str] | None = None
    ) -> int:
        change = arguments.change(new_mark, old_mark, msg_ids)
        if change is None:
            return 0
        new, old, ids = change
        store, here = await self._ready()
        return await store.write(queries.update_marks, here.thread, new, old, ids)

    async def update_compressed_summary(self, summary: str) -> None:
        text = _encoded(arguments.summary("" if summary is None else summary))
        store, here = await self._ready()
        await store.write(queries.summarize, here.thread, text)

    async def mark_compressed(
        self, msg_ids: Iterable[str], summary: str, mark: str = "compressed", *, expected: str | None = None
    ) -> int | None:
        text, ids = _encoded(arguments.summary(summary)), arguments.ids("msg_ids", msg_ids)
        marks = arguments.mark_to_add(mark)
        before = None if expected is None else _encoded(arguments.summary(expected))
        store, here = await self._ready()
        return await store.write(queries.compress, here.thread, ids, marks, text, before=before)

    async def compressed_summary(self) -> str:
        store, here = await self._ready()
        return _decoded(await store.read(queries.summary, here.thread))

    # --- states -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the location of the data and the summary, not the data. It may read from the database, and blocks for
        that.
        """
        return {
            self._place: self.name,
            "user_id": self.user_id,
            "session_id": self.session_id,
            _SUMMARY: _decoded(self._look()),
        }

    def _look(self) -> str:
        """Read the summary synchronously."""
        if self._loaded is not None and not self._loaded.is_stored:
            return self._loaded.summary
        here = self._here
        if here.handle.known() is None and not self._may_be_at(self.name):
            return ""
        return here.handle.look(queries.summary, here.thread)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Switch to the memory that a state describes.

        If the state has `content`, as that of a memory without a database does, the next awaited call stores it and
        replaces the current content.
        """
        places_named = arguments.state(state_dict).keys() & {"db_path", "dsn"}
        if strict and _SUMMARY not in state_dict and not (places_named or "content" in state_dict):
            raise KeyError(
                f"Key {_SUMMARY!r} not found in state_dict; a state of {type(self).__name__} has {self._place!r}, "
                f"'user_id', 'session_id' and {_SUMMARY!r}"
            )
        if places_named and "content" in state_dict:
            raise InputError(
                f"a state has the place of the data ({', '.join(places_named)}) or the data ('content'), not both"
            )
        if places_named - {self._place}:
            other = "PostgresMemory" if self._place == "db_path" else "SQLiteMemory"
            raise InputError(
                f"this is not a state of a {type(self).__name__}: it has no {self._place!r}; load it into a {other}"
            )
        loaded = _loaded(state_dict) if "content" in state_dict or not places_named else None
        if places_named:
            self._continue(state_dict, strict)
        if loaded is not None or places_named:
            self._loaded = loaded

    def _continue(self, state: dict[str, Any], strict: bool) -> None:
        """Switch to the thread that a state names."""
        for key in ("user_id", "session_id") if strict else ():
            if key not in state:
                raise KeyError(f"Key {key!r} not found in state_dict; strict=False keeps the current value")
        place = state[self._place]
        if not isinstance(place, str) or not place:
            raise InputError(f"the {self._place!r} of a state must be a text, got {redacted(repr(place)):.80}")
        here = _named(state.get("user_id", self.user_id), state.get("session_id", self.session_id), self._here.handle)
        if place != self.name:
            here = here._replace(handle=self._handle_at(place))  # raises for an invalid place
            self._expect_at(place, is_sure=strict and bool(state.get(_SUMMARY)))
            self._here.handle.leave()
        self._here = here

    def _expect_at(self, place: str, *, is_sure: bool) -> None:
        """Raise or warn if the file of a state is missing: it must not look like an empty memory."""
        if self._may_be_at(place):
            return
        if is_sure:
            raise NotFound(
                f"the database {place!r} of this state does not exist; move the file there, or change "
                f"{self._place!r} in the state"
            )
        _log.warning("there is no database %r, where a state was taken: its memory begins empty", place)

    # --- messages of one's own ----------------------------------------------------------------------------------------

    def _message(self, fields: MsgFields) -> Any:
        """Return a message as callers get it: a copy."""
        return _made(self._class, fields)

    # --- the database -------------------------------------------------------------------------------------------------

    async def open(self) -> Self:
        """Open the database now, or again after `close`."""
        self._here.handle.reopen()
        await self._ready()
        return self

    async def close(self) -> None:
        """Release the database. Everything that was written or loaded is stored."""
        if self._loaded is not None and not self._loaded.is_stored:
            await self.open()
        await self._here.handle.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def _ready(self) -> tuple[Store, _Here]:
        """Return the opened store and the thread, after storing a loaded state."""
        here = self._here
        store = await here.handle.store()
        if self._here is not here:
            raise InputError(f"{self!r} switched to this thread in the middle of a call; await each call first")
        if self._loaded is not None and not self._loaded.is_stored:
            await self._loaded.settle(store, here.thread, wait=self._wait)
        return store, here

    async def _write(self, query: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        store, here = await self._ready()
        return await self._attempt(store, here, query, *args, **kwargs)

    async def _attempt(self, store: Store, here: _Here, query: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Change the log of the thread while no run holds it."""

        def attempt(dead_epoch: int) -> Awaitable[T]:
            return store.write(query, here.thread, *args, by=Unleased(dead_epoch), **kwargs)

        return await retry_while_driven(store, attempt, self._wait)


def _handle(name: str, open_store: Callable[[], Store]) -> Handle:
    if_closed = f"this memory on {name!r} was closed; await memory.open() first, or make another one"
    return Handle(name, open_store, on_open=erasure.finish_what_was_left, if_closed=if_closed)


class SQLiteMemory(StoredMemory):
    """A memory in a SQLite file, which is created if it does not exist.

    `wait` is the number of seconds that a change waits for a run on the thread before it raises `ThreadBusy`.
    """

    _place = "db_path"

    def __init__(
        self,
        db_path: str | os.PathLike[str] = "memory.db",
        user_id: str | None = None,
        session_id: str | None = None,
        *,
        durability: Durability = "full",
        wait: float = 0,
    ) -> None:
        if not isinstance(db_path, str | os.PathLike) or opening.is_dsn(db_path):
            raise InputError(
                f"SQLiteMemory takes the path of a file, got {redacted(repr(db_path)):.80}; for a DSN, use "
                "PostgresMemory"
            )
        check_durability(durability)
        self._durability = durability
        super().__init__(self._handle_at(os.fspath(db_path)), user_id, session_id, wait=wait)

    def _handle_at(self, place: str) -> Handle:
        if not place:
            raise InputError("SQLiteMemory needs the path of a file, or ':memory:'; got an empty text")
        check_path(place)
        if place != ":memory:":  # absolute, so that it is the same file from another directory or process
            with contextlib.suppress(RuntimeError):  # "~nobody": opening it raises the error
                place = str(Path(place).expanduser().absolute())
        return _handle(place, functools.partial(opening.open, place, durability=self._durability))

    def _may_be_at(self, place: str) -> bool:
        return place != ":memory:" and opening.exists(place)


class PostgresMemory(StoredMemory):
    """A memory in a Postgres database. It takes the options of `PostgresCheckpointer`, and `wait`."""

    _place = "dsn"

    def __init__(
        self,
        dsn: str,
        user_id: str | None = None,
        session_id: str | None = None,
        *,
        schema: str | None = None,
        durability: Durability = "full",
        pool_size: int = 8,
        listen_dsn: str | None = None,
        wait: float = 0,
    ) -> None:
        check_durability(durability)
        self._options: dict[str, Any] = {"durability": durability, "pool_size": pool_size}
        server = opening.postgres_server(dsn, schema=schema, listen_dsn=listen_dsn)
        super().__init__(self._handle_of(server), user_id, session_id, wait=wait)

    def _handle_at(self, place: str) -> Handle:
        return self._handle_of(opening.postgres_server(place))

    def _handle_of(self, server: Server) -> Handle:
        return _handle(server.name, functools.partial(opening.open, server, **self._options))

    def _may_be_at(self, place: str) -> bool:  # noqa: ARG002 - it is not asked for before it is needed
        return True


def _named(user_id: str | None, session_id: str | None, handle: Handle) -> _Here:
    namespace = "" if user_id is None else checked_new_id(user_id, "a user id")
    if namespace.startswith("\x7f"):
        raise InputError(f"a user id cannot begin with the control character DEL, got {user_id!r:.80}")
    thread = SESSION if session_id is None else checked_new_id(session_id, "a session id")
    return _Here(user_id, session_id, ThreadKey(namespace, thread), handle)


async def list_memories(store: Store, user_id: str | None, limit: int) -> list[dict[str, Any]]:
    """Return the memories of a database, or of one user, most recently updated first, for display."""
    rows = await store.read(queries.list_page, namespace=user_id, limit=limit)
    return [
        {
            "user_id": row.namespace or None,
            "session_id": row.id,
            "messages": row.message_count,
            "marked": row.marked,
            "updated_at": row.updated_at,
        }
        for row in rows
    ]


async def entries(store: Store, user_id: str | None, session_id: str) -> tuple[str, list[tuple[Msg, list[str]]]] | None:
    """Return a memory's summary, and its messages with their marks; None if the memory is unknown."""
    found = await store.read(queries.entries, ThreadKey(user_id or "", session_id))
    if found is None:
        return None
    return _decoded(found[0]), [(_made(Msg, msg_fields(*kept)), marks) for kept, marks in found[1]]


async def mark(store: Store, user_id: str | None, session_id: str, label: str, ids: Iterable[str]) -> int:
    """Put a mark on messages of a thread; returns how many got it. For the command line."""
    change = arguments.change(label, None, ids)
    return (
        0 if change is None else await store.write(queries.update_marks, ThreadKey(user_id or "", session_id), *change)
    )


def _made(kind: type[Any], fields: MsgFields) -> Any:
    message = kind(fields.name, fields.content, fields.role, fields.metadata, fields.timestamp, fields.invocation_id)
    message.id, message.timestamp = fields.id, fields.timestamp
    return message


def _read(
    tx: Tx,
    thread: ThreadKey,
    make: Callable[[MsgFields], Any],
    *,
    marked: list[str] | None,
    unmarked: list[str],
) -> tuple[str, list[Any]]:
    """Read and decode on a worker of the store, so that a long memory does not block an event loop."""
    summary, found = queries.read(tx, thread, marked=marked, unmarked=unmarked)
    return _decoded(summary), [make(msg_fields(*kept)) for kept in found]


def _at(tx: Tx, keys: list[int], make: Callable[[MsgFields], Any]) -> list[Any]:
    return [make(msg_fields(*kept)) for kept in queries.at(tx, keys)]


def _row_of(message: Any) -> MessageRow:
    values = arguments.checked_values(message)
    return MessageRow(values["id"], values["role"], encode_json(f"message {values['id']!r}", values), 1)


def _loaded(state: dict[str, Any]) -> Loaded | None:
    summary = _encoded(arguments.summary(state.get(_SUMMARY) or ""))
    if "content" in state:
        return Loaded(
            summary, [MarkedMessage(_row_of(each.message), each.marks) for each in arguments.items(state["content"])]
        )
    return Loaded(summary, None) if _SUMMARY in state else None


def _encoded(summary: str) -> str:
    """Encode a summary as JSON, so that it can hold any text; an empty one is stored as empty."""
    return dumps(summary) if summary else ""


def _decoded(stored: str) -> str:
    return str(json.loads(stored)) if stored else ""
