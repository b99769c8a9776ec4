"""Checkpointers: they store the threads of agents.

    async with SQLiteCheckpointer("chat.db") as cp:
        await cp.append("trip", [UserMessage("hello")])
        thread = await cp.load("trip")

One checkpointer serves any number of threads and agents. Several on one database share its connections. The methods are
a table of operations; `AgentStorage` offers the same ones without an event loop.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from byssus.accounts import sessions, tool_log, usage, users
from byssus.errors import InputError, StoreNotOpen
from byssus.run.outside.supervision import Factory, Supervision, TakeOver
from byssus.signals import refuse_in_loop
from byssus.store import opening
from byssus.store.database import Durability, Store
from byssus.store.handle import Handle
from byssus.store.lazy import LazyModule
from byssus.store.opening import exists, is_dsn
from byssus.store.operations import awaited, direct
from byssus.store.sqlite.file import check_busy_timeout, check_durability, check_path
from byssus.tasks import schedules, tasks
from byssus.tasks import steps as task_steps
from byssus.threads import approvals, checkpoints, erasure, forks, listing, retention, thread
from byssus.threads import inbox as inbox_operations
from byssus.threads.approvals import ToolCallRecord
from byssus.threads.encoding import Appendable
from byssus.threads.following import follow, watching
from byssus.threads.forks import At
from byssus.threads.inbox import Receipt, Waiting
from byssus.threads.listing import Quarantined, ThreadInfo, ThreadState
from byssus.threads.runs import records, timeline
from byssus.threads.thread import Thread
from byssus.values.checkpoints import (
    Checkpoint,
    CheckpointBackend,
    CheckpointMetadata,
    Difference,
    Erased,
    LeftBranch,
    Pruned,
    Retention,
    Tree,
    keep_age,
    keep_last,
    keep_tagged,
)
from byssus.values.clock import Time
from byssus.values.decisions import Answer
from byssus.values.following.items import (
    CallAnswered,
    CallEnded,
    CallStarted,
    CallWaiting,
    CaughtUp,
    CheckpointAdded,
    FollowItem,
    InboxHeard,
    InboxPut,
    InboxWithdrawn,
    Lagged,
    MessageAdded,
    ReplyDelta,
    ReplyReset,
    RunBegan,
    RunEnded,
    ThreadDeleted,
    ThreadRewound,
    TitleChanged,
    item_from_json,
)
from byssus.values.inputs import ThreadId
from byssus.values.places import redacted
from byssus.values.prompts import Prompt
from byssus.values.results import RunAttempt, RunInfo, RunStep
from byssus.values.thread_key import ThreadKey

if TYPE_CHECKING:
    from byssus.maintenance import backup as backup_operations
    from byssus.maintenance import check as check_operations
    from byssus.maintenance import export, import_
    from byssus.maintenance import repair as repair_operations
    from byssus.maintenance import restore as restore_operations
    from byssus.search import search as search_operations
else:  # half of what a start would import, for what few programs do at once
    backup_operations = LazyModule("byssus.maintenance.backup")
    check_operations = LazyModule("byssus.maintenance.check")
    export = LazyModule("byssus.maintenance.export")
    import_ = LazyModule("byssus.maintenance.import_")
    repair_operations = LazyModule("byssus.maintenance.repair")
    restore_operations = LazyModule("byssus.maintenance.restore")
    search_operations = LazyModule("byssus.search.search")

__all__ = [
    "Answer",
    "Appendable",
    "At",
    "CallAnswered",
    "CallEnded",
    "CallStarted",
    "CallWaiting",
    "CaughtUp",
    "Checkpoint",
    "CheckpointAdded",
    "CheckpointBackend",
    "CheckpointMetadata",
    "Checkpointer",
    "Difference",
    "Durability",
    "Erased",
    "FollowItem",
    "InboxHeard",
    "InboxPut",
    "InboxWithdrawn",
    "Lagged",
    "LeftBranch",
    "MessageAdded",
    "PostgresCheckpointer",
    "Prompt",
    "Pruned",
    "Quarantined",
    "Receipt",
    "ReplyDelta",
    "ReplyReset",
    "Retention",
    "RunAttempt",
    "RunBegan",
    "RunEnded",
    "RunInfo",
    "RunStep",
    "SQLiteCheckpointer",
    "Supervision",
    "TakeOver",
    "Thread",
    "ThreadDeleted",
    "ThreadId",
    "ThreadInfo",
    "ThreadKey",
    "ThreadRewound",
    "ThreadState",
    "Time",
    "TitleChanged",
    "ToolCallRecord",
    "Tree",
    "Waiting",
    "checkpointer_for",
    "exists",
    "item_from_json",
    "keep_age",
    "keep_last",
    "keep_tagged",
]


class Checkpointer(abc.ABC):
    """Stores threads. Make one with `SQLiteCheckpointer`, `PostgresCheckpointer` or `checkpointer_for`."""

    def __init__(self, open_store: Callable[[], Store], *, lease_seconds: float) -> None:
        if isinstance(lease_seconds, bool) or not isinstance(lease_seconds, int | float) or not 0 < lease_seconds < 1e6:
            raise InputError(f"lease_seconds must be a number of seconds above 0, got {lease_seconds!r}")
        self.lease_seconds = float(lease_seconds)
        self._blocks = 0  # how many `async with` are in it: the last one closes it
        kind = type(self).__name__
        closed = f"this {kind} was closed while it was being opened; await cp.open() again"
        self._handle = Handle(kind, open_store, on_open=erasure.finish_what_was_left, if_closed=closed)

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The database, without its password."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {'open' if self._handle.known() else 'not open'})"

    async def open(self) -> Self:
        """Open the database; create or migrate it if needed. `async with` calls this for you."""
        self._handle.reopen()
        try:
            await self._handle.store()
        except asyncio.CancelledError:
            if self._blocks == 0:  # no caller is left that would close it
                await self._handle.close()
            raise
        return self

    async def close(self) -> None:
        """Finish the submitted writes and close the database."""
        self._blocks = 0
        await self._handle.close()

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

    def __enter__(self) -> Self:
        """Open the database in a program without an event loop, for `agent.run_sync()`."""
        kind = type(self).__name__
        refuse_in_loop(f"'with {kind}(...)'", f"'async with {kind}(...) as cp:'")
        self._handle.reopen()
        self._handle.opened()
        self._blocks += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks = max(self._blocks - 1, 0)
        if self._blocks == 0:
            self._handle.close_now()

    @property
    def store(self) -> Store:
        """The store that runs the queries. Raises `StoreNotOpen` while the checkpointer is not open."""
        known = self._handle.known()
        if known is None:
            kind = type(self).__name__
            raise StoreNotOpen(
                f"this {kind} on {self.name!r} {'was closed' if self._handle.is_closed else 'is not open yet'}; "
                f"use it inside 'async with {kind}(...) as cp:' (plain 'with' for run_sync()), or await cp.open() first"
            )
        return known

    # --- threads ------------------------------------------------------------------------------------------------------

    load = awaited(thread.load)
    append = awaited(thread.append)
    save_extra = awaited(thread.save_extra)
    set_user = awaited(thread.set_user)
    info = awaited(listing.info)
    state = awaited(listing.state)
    threads = awaited(listing.list_threads)
    children = awaited(listing.children)
    unfinished = awaited(listing.unfinished)
    quarantined = awaited(listing.quarantined)
    lift_quarantine = awaited(listing.lift_quarantine)
    runs = awaited(records.list_runs)
    run = awaited(records.run)
    run_attempts = awaited(records.run_attempts)
    timeline = awaited(timeline.timeline)
    set_title = awaited(listing.set_title)
    abort = awaited(thread.abort)
    follow = direct(follow.follow)

    def supervise(
        self,
        factory: Factory,
        *,
        concurrency: int = 8,
        every: float = 0.5,
        max_deaths: int | None = 3,
        grace: float = 20.0,
        report: Callable[[TakeOver], object] | None = None,
    ) -> Supervision:
        """Resume interrupted runs, now and when other processes end: `async with cp.supervise(factory):`, or await it.

        `factory(thread_id, user_id)` returns the agent for a thread, and may be async. Most recently updated threads
        come first, at most `concurrency` at once; `every` is the interval between two queries, in seconds. A run that
        has ended its process `max_deaths` times is quarantined. `report` is called with each `TakeOver`. At the end,
        the runs are handed over, within `grace` seconds.
        """
        return Supervision(
            self,
            factory,
            concurrency=concurrency,
            every=every,
            max_deaths=max_deaths,
            grace=grace,
            report=report,
        )

    watch = direct(watching.watch)

    steer = direct(inbox_operations.steer)
    follow_up = direct(inbox_operations.follow_up)
    inbox = awaited(inbox_operations.inbox)
    withdraw = awaited(inbox_operations.withdraw)

    pending = awaited(approvals.pending)
    answer = awaited(approvals.answer)
    tool_calls = awaited(approvals.tool_calls)

    put = awaited(checkpoints.put)
    get = awaited(checkpoints.get)
    get_latest = awaited(checkpoints.get_latest)
    list_threads = awaited(checkpoints.list_threads)
    list_checkpoints = awaited(checkpoints.list_checkpoints)
    fork = awaited(forks.fork)
    rewind = awaited(forks.rewind)
    tree = awaited(forks.tree)
    diff = awaited(forks.diff)

    prune = awaited(retention.prune)
    set_ttl = awaited(retention.set_ttl)
    delete_before = awaited(retention.delete_before)
    delete_thread = awaited(retention.delete_thread)
    erase_thread = awaited(erasure.erase_thread)
    erase_user = awaited(erasure.erase_user)

    export_thread = direct.late(lambda: export.export_thread)
    export_user = direct.late(lambda: export.export_user)
    import_from = awaited.late(lambda: import_.import_from)

    # --- users, sessions, tools, usage, search and upkeep -------------------------------------------------------------

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
    pause_task = awaited(tasks.pause_task)
    resume_task = awaited(tasks.resume_task)
    cancel_task = awaited(tasks.cancel_task)
    retry_task = awaited(tasks.retry_task)
    send_event = awaited(task_steps.send_event)
    task_steps = awaited(task_steps.task_steps)

    create_schedule = awaited(schedules.create_schedule)
    get_schedule = awaited(schedules.get_schedule)
    pause_schedule = awaited(schedules.pause_schedule)
    resume_schedule = awaited(schedules.resume_schedule)
    delete_schedule = awaited(schedules.delete_schedule)
    schedules = awaited(schedules.list_schedules)

    get_usage_stats = awaited(usage.get_usage_stats)
    get_session_usage = awaited(usage.get_session_usage)
    set_price = awaited(usage.set_price)
    get_prices = awaited(usage.get_prices)
    delete_price = awaited(usage.delete_price)

    search = awaited.late(lambda: search_operations.search)
    find_messages = awaited.late(lambda: search_operations.find_messages)
    index = awaited.late(lambda: search_operations.index)
    reindex = awaited.late(lambda: search_operations.reindex)
    backup = awaited.late(lambda: backup_operations.backup)
    restore = awaited.late(lambda: restore_operations.restore)
    check = awaited.late(lambda: check_operations.check)
    repair = awaited.late(lambda: repair_operations.repair)
    recount = awaited.late(lambda: check_operations.recount)


class SQLiteCheckpointer(Checkpointer):
    """Stores threads in one SQLite file.

    `durability="full"` (the default) survives a power cut; `"normal"` survives a crash of the process, but can lose
    the last commits when the machine goes down. `lease_seconds` is how long a thread stays reserved for a run whose
    process has died or hangs; a live run renews its lease. `busy_timeout` is how many seconds a write waits while
    another process holds the write lock, before it raises `StoreBusy` (30 by default). Leases last at least a third
    longer, so that a run can wait that long.
    """

    def __init__(
        self,
        db_path: str | os.PathLike[str] = "checkpoints.db",
        *,
        durability: Durability = "full",
        lease_seconds: float = 30.0,
        busy_timeout: float | None = None,
    ) -> None:
        check_durability(durability)
        if is_dsn(db_path):
            raise InputError("SQLiteCheckpointer takes a path, and got a DSN; use PostgresCheckpointer(dsn)")
        if not isinstance(db_path, os.PathLike):  # which is asked when the file is opened
            check_path(db_path)
        self._path = db_path
        open_store = functools.partial(opening.open, db_path, durability=durability)
        if busy_timeout is not None:
            open_store = functools.partial(open_store, busy_seconds=check_busy_timeout(busy_timeout))
        super().__init__(open_store, lease_seconds=lease_seconds)
        self.lease_seconds = max(self.lease_seconds, (busy_timeout or 0) * 4 / 3)

    @property
    def name(self) -> str:
        return redacted(os.fspath(self._path))


class PostgresCheckpointer(Checkpointer):
    """Stores threads in a Postgres database, which any number of processes and machines can share.

    `dsn` is `postgresql://user:password@host:5432/database`, or lists several hosts: the writable one is used. Missing
    tables are created in the schema "byssus"; `schema`, or `?schema=` in the DSN, names another. `pool_size` is the
    maximum number of connections of this process; two more serve leases and notifications. If `dsn` points to a
    pooler, which cannot forward notifications, `listen_dsn` must point to the server itself. The other parameters are
    those of `SQLiteCheckpointer`.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema: str | None = None,
        durability: Durability = "full",
        lease_seconds: float = 30.0,
        pool_size: int = 8,
        listen_dsn: str | None = None,
    ) -> None:
        check_durability(durability)
        self._server = opening.postgres_server(dsn, schema=schema, listen_dsn=listen_dsn)
        if isinstance(pool_size, bool) or not isinstance(pool_size, int) or not 2 <= pool_size <= 1_000:
            raise InputError(f"pool_size must be a number of connections from 2 to 1000, got {pool_size!r}")
        open_store = functools.partial(opening.open, self._server, durability=durability, pool_size=pool_size)
        super().__init__(open_store, lease_seconds=lease_seconds)

    @property
    def name(self) -> str:
        return self._server.name


def checkpointer_for(place: str | os.PathLike[str], **options: Any) -> Checkpointer:
    """Return the checkpointer for a path or a DSN, for programs whose database is configured from outside."""
    if is_dsn(place):
        return PostgresCheckpointer(os.fspath(place), **options)
    return SQLiteCheckpointer(place, **options)
