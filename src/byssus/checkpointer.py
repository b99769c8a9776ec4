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
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from byssus.accounts import sessions, tasks, tool_log, usage, users
from byssus.errors import InputError, StoreNotOpen, ThreadBusy
from byssus.messages import Message, UserMessage, decode, stamped
from byssus.queries.log import inbox, leases, threads, tool_calls
from byssus.queries.log.leases import Unleased
from byssus.queries.log.threads import ThreadInfo
from byssus.queries.versions import checkpoints, deleting, erasure_notes, forks
from byssus.store import opening, sharing
from byssus.store.database import Store
from byssus.store.jobs import in_worker
from byssus.store.lazy import LazyModule
from byssus.store.opening import exists, is_dsn
from byssus.store.operations import awaited
from byssus.store.sqlite import store as sqlite
from byssus.store.sqlite.file import check_durability, check_path
from byssus.threads import checkpoints as versions
from byssus.threads import erasure, retention, watching
from byssus.threads.encoding import (
    PAGE,
    Appendable,
    Thread,
    as_list,
    checked_count,
    checked_id,
    column_text,
    encode_extra,
    load,
    message_row,
)
from byssus.threads.inbox import Receipt, Waiting, id_of
from byssus.threads.waiting import checked_wait, owner_is_gone, retry_while_driven
from byssus.values import clock
from byssus.values.checkpoints import (
    Checkpoint,
    CheckpointBackend,
    CheckpointMetadata,
    Difference,
    Erased,
    Pruned,
    Retention,
    Tree,
    keep_age,
    keep_last,
    keep_tagged,
)
from byssus.values.decisions import Answer, Pending, encode_answer
from byssus.values.prompts import single

if TYPE_CHECKING:
    from byssus.maintenance import backup as backups
    from byssus.maintenance import check as checking
    from byssus.maintenance import export
    from byssus.search import search as searching
else:  # half of what a start would import, for what few programs do at once
    backups = LazyModule("byssus.maintenance.backup")
    checking = LazyModule("byssus.maintenance.check")
    export = LazyModule("byssus.maintenance.export")
    searching = LazyModule("byssus.search.search")


__all__ = [
    "Checkpoint",
    "CheckpointBackend",
    "CheckpointMetadata",
    "Checkpointer",
    "Difference",
    "Erased",
    "PostgresCheckpointer",
    "Pruned",
    "Retention",
    "SQLiteCheckpointer",
    "Thread",
    "ThreadInfo",
    "ToolCallRecord",
    "Tree",
    "checkpointer_for",
    "exists",
    "keep_age",
    "keep_last",
    "keep_tagged",
]


At: TypeAlias = str | int | CheckpointMetadata | Checkpoint  # a point of a thread: an id, a seq, or what has the id
Forks: TypeAlias = Literal["keep", "erase"]


class ToolCallRecord(NamedTuple):
    """What the ledger says about a tool call.

    `status` is started, waiting (for a person) or answered; or how it ended: done, failed, denied, aborted, unknown,
    left (by a rewind, unanswered).
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
        self._blocks = 0  # how many `async with` are in it: the last one closes it

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The database, as people may see it."""

    @abc.abstractmethod
    def _open_store(self) -> Store: ...

    async def open(self) -> Self:
        """Open the database, made and migrated if need be. `async with` does it for you."""
        if self._store is None:
            opening = in_worker(self._open_store)
            try:
                store = await opening
            except asyncio.CancelledError:
                if opening.exception() is None:  # nobody would ever close it
                    await in_worker(lambda: sharing.release(opening.result()))
                raise
            if self._store is None:
                self._store, self._was_open = store, True
                await self._finish_erasures()
            else:  # opened twice at once
                await in_worker(lambda: sharing.release(store))
        return self

    async def _finish_erasures(self) -> None:
        """Go on with what an interrupted erasure has left; a database that cannot even be asked is closed again."""
        try:
            store = self.store
            left = await store.read(erasure_notes.unfinished) if store.has_files else []
            if left:
                await in_worker(lambda: erasure.go_on(store))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish what was submitted and let go of the database."""
        store, self._store, self._blocks = self._store, None, 0
        if store is not None:
            await in_worker(lambda: sharing.release(store))

    async def __aenter__(self) -> Self:
        await self.open()
        self._blocks += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks = max(self._blocks - 1, 0)
        if self._blocks == 0:
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
        rows = [*map(message_row, as_list(messages))]
        thread, store, seconds = checked_id(thread_id), self.store, checked_wait(wait)
        if not rows:
            return
        try:
            await store.write(threads.append, thread, rows)
        except ThreadBusy:
            await retry_while_driven(
                lambda dead_epoch: store.write(threads.append, thread, rows, by=Unleased(dead_epoch)), seconds
            )

    async def save_extra(self, thread_id: str, extra: dict[str, Any], *, wait: float = 0) -> None:
        """Replace the thread's extra: a key that is not there any more is gone. As `append` while a run is going on."""
        thread, text, store = checked_id(thread_id), encode_extra(extra), self.store
        await retry_while_driven(
            lambda dead_epoch: store.write(threads.save_extra, thread, text, by=Unleased(dead_epoch)),
            checked_wait(wait),
        )

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
        return [info for info, owner, _ in found if owner is None or owner_is_gone(owner)]

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
        return Receipt(message, self.store.submit(inbox.send, checked_id(thread_id), kind, message_row(message)))

    async def inbox(self, thread_id: str) -> list[Waiting]:
        """What was said and not heard yet, in order."""
        rows = await self.store.read(inbox.waiting, checked_id(thread_id))
        return [Waiting(row.id, row.kind, decode(row.body), row.created_at) for row in rows]  # type: ignore[arg-type]

    async def withdraw(self, thread_id: str, message: str | Receipt | Waiting) -> bool:
        """Take back what was not heard yet; False if it is too late."""
        return await self.store.write(inbox.withdraw, checked_id(thread_id), column_text(id_of(message)))

    async def abort(self, thread_id: str) -> bool:
        """Ask the run that drives the thread, in whatever process, to end. False if there is none."""
        owner = await self.store.write(leases.abort, checked_id(thread_id))
        return owner is not None and not owner_is_gone(owner)

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
        await self.store.write(tool_calls.answer, checked_id(thread_id), column_text(call_id), answer)

    async def tool_calls(self, thread_id: str) -> list[ToolCallRecord]:
        """The ledger of the thread: every tool call that was begun or put before a person, oldest first."""
        found: list[ToolCallRecord] = []
        after = 0
        while True:
            rows = await self.store.read(tool_calls.records, checked_id(thread_id), after=after, limit=PAGE)
            found += [ToolCallRecord(row[1], row[2], json.loads(row[3]) or {}, *row[4:]) for row in rows]
            if len(rows) < PAGE:
                return found
            after = rows[-1][0]

    # --- lists --------------------------------------------------------------------------------------------------------

    async def info(self, thread_id: str) -> ThreadInfo | None:
        """A thread as a list shows it, or None when nothing was ever stored under this id."""
        return await self.store.read(threads.info, checked_id(thread_id))

    async def threads(self, limit: int = 50, before: ThreadInfo | str | None = None) -> list[ThreadInfo]:
        """All threads, the one that was written last first. To go on, pass the last of the list as `before`."""
        checked_count("limit", limit)
        if isinstance(before, str):
            known = await self.store.read(threads.info, checked_id(before))
            if known is None:
                raise InputError(f"there is no thread {before!r} to list the ones before")
            before = known
        elif not isinstance(before, ThreadInfo | None):
            raise InputError(f"before must be a ThreadInfo from an earlier list, or a thread id; got {before!r:.80}")
        return await self.store.read(threads.recent, limit=limit, before=before)

    # --- versions -----------------------------------------------------------------------------------------------------

    async def put(self, checkpoint: Checkpoint, *, wait: float = 0) -> str:
        """Store a checkpoint, and of its messages those that the thread does not hold yet; returns its id.

        Messages that go on from the thread's are appended to it. Messages that differ become a branch, which the thread
        goes over to unless it has a checkpoint with a higher step. An id that is there already is replaced.
        """
        seconds, store = checked_wait(wait), self.store
        thread = await versions.put(store, checkpoint, seconds)
        if thread.ttl is not None:
            await retention.tidy(store, thread.id, thread.ttl)
        return checkpoint.metadata.checkpoint_id

    async def get(self, checkpoint_id: str, thread_id: str | None = None) -> Checkpoint | None:
        """A checkpoint with all its messages, or None. Without a thread id, it must be the only one of its name."""
        name, store = versions.checked_checkpoint_id(checkpoint_id), self.store
        thread = await store.read(checkpoints.thread_with, name) if thread_id is None else checked_id(thread_id)
        return None if thread is None else await versions.get(store, thread, name)

    async def get_latest(self, thread_id: str) -> Checkpoint | None:
        """The thread's checkpoint with the highest step, or None."""
        return await versions.get(self.store, checked_id(thread_id), None)

    async def list_threads(self, limit: int = 50, offset: int = 0) -> list[CheckpointMetadata]:
        """The latest checkpoint of each thread that has any, the newest first."""
        limit, offset = checked_count("limit", limit), checked_count("offset", offset)
        return await self.store.read(versions.recent, limit=limit, offset=offset)

    async def list_checkpoints(self, thread_id: str, limit: int = 100, offset: int = 0) -> list[CheckpointMetadata]:
        """The thread's checkpoints, the highest step first."""
        limit, offset = checked_count("limit", limit), checked_count("offset", offset)
        return await self.store.read(versions.list_page, checked_id(thread_id), limit=limit, offset=offset)

    async def fork(
        self, thread_id: str, at: At | None = None, *, new_id: str | None = None, user_id: str | None = None
    ) -> str:
        """A new thread that shares the past of this one: up to a checkpoint, a seq, or its head. Returns its id.

        Messages are not copied, and what is written to either side never shows on the other. The fork belongs to the
        same user, unless `user_id` says otherwise.
        """
        new = clock.new_id() if new_id is None else checked_id(new_id)
        point = None if at is None else versions.checked_at(at, "at")
        owner = None if user_id is None else checked_id(user_id, "a user id")
        await self.store.write(forks.fork, checked_id(thread_id), new, point, owner=owner)
        return new

    async def rewind(self, thread_id: str, to: At, *, wait: float = 0) -> str:
        """Let the thread go on from an earlier checkpoint or seq.

        Nothing is removed: what came after stays in the tree. Returns the id of the checkpoint that holds where the
        thread stood (made if there was none), so that rewinding to that one undoes this.
        """
        point, thread, store = versions.checked_at(to, "to"), checked_id(thread_id), self.store
        left = versions.left_behind(f"where the thread stood before it was rewound to {to!r}")
        return await retry_while_driven(
            lambda dead_epoch: store.write(forks.rewind, thread, point, left=left, by=Unleased(dead_epoch)),
            checked_wait(wait),
        )

    async def tree(self, thread_id: str) -> Tree | None:
        """The thread with its checkpoints, what rewinds have left, and its forks with theirs; None if it is unknown."""
        return await versions.tree(self.store, checked_id(thread_id))

    async def diff(self, a: str, b: str) -> Difference:
        """Where two threads part."""
        return await versions.diff(self.store, checked_id(a), checked_id(b))

    def export_thread(self, thread_id: str) -> AsyncIterator[str]:
        """The thread as JSON lines, without their newlines: all that `import_from` brings back."""
        return export.export_thread(self.store, checked_id(thread_id))

    def export_user(self, user_id: str) -> AsyncIterator[str]:
        """The same for all threads of a user."""
        return export.export_user(self.store, checked_id(user_id, "a user id"))

    async def import_from(self, lines: export.Lines, as_id: str | None = None) -> list[str]:
        """Bring back what was exported, all of it or nothing; returns the threads' ids.

        `lines` is the path of a file, or whatever gives lines. `as_id` is another id for it, where it is one thread.
        """
        return await export.import_lines(self.store, lines, as_id)

    # --- users, sessions, tools and usage: as AgentStorage has them ---------------------------------------------------

    create_user = awaited(users.create_user)
    get_user = awaited(users.get_user)
    list_users = awaited(users.list_users)
    find_users = awaited(users.find_users)
    update_user = awaited(users.update_user)
    delete_user = awaited(users.delete_user)
    check_quota = awaited(users.check_quota)
    consume_quota = awaited(users.consume_quota)

    create_session = awaited(sessions.create_session)
    get_session = awaited(sessions.get_session)
    list_user_sessions = awaited(sessions.list_user_sessions)
    update_session = awaited(sessions.update_session)
    pause_session = awaited(sessions.pause_session)
    resume_session = awaited(sessions.resume_session)
    complete_session = awaited(sessions.complete_session)
    cancel_session = awaited(sessions.cancel_session)
    delete_session = awaited(sessions.delete_session)

    save_message = awaited(sessions.save_message)
    get_conversation_history = awaited(sessions.get_conversation_history)
    get_message = awaited(sessions.get_message)
    update_message = awaited(sessions.update_message)
    delete_message = awaited(sessions.delete_message)

    log_tool_call = awaited(tool_log.log_tool_call)
    get_tool_call = awaited(tool_log.get_tool_call)
    list_tool_calls = awaited(tool_log.list_tool_calls)
    update_tool_call = awaited(tool_log.update_tool_call)
    delete_tool_call = awaited(tool_log.delete_tool_call)

    create_task = awaited(tasks.create_task)
    get_task = awaited(tasks.get_task)
    list_tasks = awaited(tasks.list_tasks)
    update_task = awaited(tasks.update_task)
    update_task_status = awaited(tasks.update_task_status)
    delete_task = awaited(tasks.delete_task)

    get_usage_stats = awaited(usage.get_usage_stats)
    get_session_usage = awaited(usage.get_session_usage)
    set_price = awaited(usage.set_price)
    get_prices = awaited(usage.get_prices)
    delete_price = awaited(usage.delete_price)

    search = awaited.late(lambda: searching.search)
    find_messages = awaited.late(lambda: searching.find_messages)
    index = awaited.late(lambda: searching.index)
    reindex = awaited.late(lambda: searching.reindex)
    backup = awaited.late(lambda: backups.backup)
    restore = awaited.late(lambda: backups.restore)
    check = awaited.late(lambda: checking.check)
    repair = awaited.late(lambda: checking.repair)
    recount = awaited.late(lambda: checking.recount)

    # --- removing -----------------------------------------------------------------------------------------------------

    async def delete_before(self, thread_id: str, before_step: int) -> int:
        """Delete the thread's checkpoints below a step; returns how many. Its messages stay."""
        step = checked_count("before_step", before_step)
        doomed = await self.store.read(deleting.below, checked_id(thread_id), step)
        taken, _ = await retention.drop(self.store, thread_id, doomed)
        return len(taken)

    async def delete_thread(self, thread_id: str, *, wait: float = 0) -> int:
        """Delete the thread with all that belongs to it; returns how many checkpoints it had.

        Forks keep the past that they share. As `append` while a run is going on.
        """
        return await retention.delete_thread(self.store, checked_id(thread_id), checked_wait(wait))

    async def set_user(self, thread_id: str, user_id: str | None) -> None:
        """Say whose thread it is, for `export_user` and `erase_user`. `Agent(user_id=)` does so by itself."""
        user = None if user_id is None else checked_id(user_id, "a user id")
        await self.store.write(threads.set_owner, checked_id(thread_id), user)

    async def erase_thread(self, thread_id: str, *, forks: Forks | None = None, wait: float = 0) -> Erased:
        """Remove every byte of the thread, from the files of the database too; the answer says what that was.

        If it has forks, say what becomes of them: "keep" leaves them with the past that they share, "erase" erases them
        too. Take an `export_thread` first if it may be wanted again. As `append` while a run is going on.
        """
        decided = erasure.checked_forks(forks)
        return await erasure.erase_thread(self.store, checked_id(thread_id), decided, checked_wait(wait))

    async def erase_user(self, user_id: str, *, forks: Forks | None = None, wait: float = 0) -> Erased:
        """The same for all threads of a user. Forks of theirs that belong to others are what `forks` is about."""
        decided, user = erasure.checked_forks(forks), checked_id(user_id, "a user id")
        return await erasure.erase_user(self.store, user, decided, checked_wait(wait))

    async def prune(self, thread_id: str | None = None, keep: Retention | None = None) -> Pruned:
        """Remove the checkpoints that `keep` does not keep, and messages that nothing leads to any more.

        `keep` is keep_last(n), keep_age(days) or keep_tagged(...), or several of them joined with |: what any of them
        keeps, stays. Without arguments, each thread that has a time to live is pruned by it.
        """
        if thread_id is None and keep is None:
            return await retention.prune_expired(self.store)
        if thread_id is None:
            raise InputError("prune(keep=...) needs a thread's id; prune() alone goes by the threads' time to live")
        return await retention.prune(self.store, checked_id(thread_id), retention.checked(keep))

    async def tidy(self, thread_id: str) -> None:
        """Prune one thread by its time to live, if it has one."""
        thread = await self.store.read(checkpoints.thread_state, checked_id(thread_id))
        if thread is not None and thread.ttl is not None:
            await retention.tidy(self.store, thread_id, thread.ttl)

    async def set_ttl(self, thread_id: str, days: float | None, keep: Retention | None = None) -> None:
        """Let the thread's checkpoints go by themselves when they are so many days old; None ends that.

        The latest one always stays, and so does what `keep` keeps. It happens with each put, at the end of each run,
        and when `prune()` is called.
        """
        text = None if days is None else retention.time_to_live(days, keep)
        await self.store.write(deleting.set_ttl, checked_id(thread_id), text)


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
        if not isinstance(db_path, os.PathLike):  # which is asked when the file is opened
            check_path(db_path)
        self._path = db_path

    @property
    def name(self) -> str:
        return os.fspath(self._path)

    def _open_store(self) -> Store:
        return sqlite.open_store(self._path, durability=self._durability)


class PostgresCheckpointer(Checkpointer):
    """Keeps threads in a Postgres database, which any number of processes on any number of machines may share.

    `dsn` is `postgresql://user:password@host:5432/database`, or several hosts of which the one that can be written is
    used. The tables are made where they are not there yet, in the schema "byssus"; `schema`, or `?schema=` in the
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
        self._server = opening.postgres_server(dsn, schema=schema, listen_dsn=listen_dsn)
        if isinstance(pool_size, bool) or not isinstance(pool_size, int) or not 2 <= pool_size <= 1_000:
            raise InputError(f"pool_size must be a number of connections from 2 to 1000, got {pool_size!r}")
        self._pool_size = pool_size

    @property
    def name(self) -> str:
        return self._server.name

    def _open_store(self) -> Store:
        return opening.open(self._server, durability=self._durability, pool_size=self._pool_size)


def checkpointer_for(place: str | os.PathLike[str], **options: Any) -> Checkpointer:
    """The checkpointer for a path or a DSN, for programs that are told their database from outside."""
    if is_dsn(place):
        return PostgresCheckpointer(os.fspath(place), **options)
    return SQLiteCheckpointer(place, **options)
