"""AgentStorage: all operations of a database, for applications that do not use asyncio.

    with AgentStorage("agent_store.db") as storage:
        user = storage.create_user("ann", quota_total=100_000)
        session = storage.create_session(user["id"], "a trip")
        storage.save_message(session["id"], "user", "北京的天气怎么样?")

Users, sessions, messages, tasks, tools and usage are plain dicts and lists. Each call is on disk when it returns. One
object may be used from several OS threads, and inside a running event loop too, which then waits for it: there, the
same methods can be awaited on a checkpointer.
"""

from __future__ import annotations

import functools
import os
from types import TracebackType
from typing import Any, Self

from byssus.accounts import sessions, tool_log, usage, users
from byssus.accounts.rows import (
    BackupResult,
    CallStatus,
    CheckResult,
    DayUsage,
    FoundMessage,
    HistoryRow,
    MessageRole,
    ModelUsage,
    PriceRow,
    ProblemRow,
    RepairResult,
    RestoreResult,
    ScheduleRow,
    SearchHit,
    SearchKind,
    SearchOrder,
    SessionRow,
    SessionStatus,
    SessionUsage,
    TaskError,
    TaskRow,
    TaskStatus,
    TaskStepRow,
    ToolLogRow,
    ToolUsage,
    UsageCounts,
    UsageStats,
    UserRow,
)
from byssus.errors import InputError
from byssus.maintenance import backup as backup_operations
from byssus.maintenance import check as check_operations
from byssus.maintenance import export, import_
from byssus.maintenance import repair as repair_operations
from byssus.maintenance import restore as restore_operations
from byssus.search import search as search_operations
from byssus.store import opening
from byssus.store.database import Durability, Store
from byssus.store.handle import Handle
from byssus.store.operations import blocking, iterated
from byssus.tasks import schedules, tasks
from byssus.tasks import steps as task_steps
from byssus.threads import approvals, checkpoints, erasure, forks, listing, retention, thread
from byssus.threads import inbox as inbox_operations
from byssus.threads.following import follow, watching
from byssus.threads.inbox import Receipt
from byssus.threads.runs import records, timeline
from byssus.values.inputs import ThreadId
from byssus.values.places import redacted
from byssus.values.prompts import Prompt

__all__ = [
    "AgentStorage",
    "BackupResult",
    "CallStatus",
    "CheckResult",
    "DayUsage",
    "FoundMessage",
    "HistoryRow",
    "MessageRole",
    "ModelUsage",
    "PriceRow",
    "ProblemRow",
    "RepairResult",
    "RestoreResult",
    "ScheduleRow",
    "SearchHit",
    "SearchKind",
    "SearchOrder",
    "SessionRow",
    "SessionStatus",
    "SessionUsage",
    "TaskError",
    "TaskRow",
    "TaskStatus",
    "TaskStepRow",
    "ToolLogRow",
    "ToolUsage",
    "UsageCounts",
    "UsageStats",
    "UserRow",
]


_OPTIONS = frozenset({"schema", "pool_size", "listen_dsn"})


class AgentStorage:
    """The database at a path or a `postgresql://` DSN. It is open as soon as it is created.

    `durability` is "full" or "normal", as with the checkpointers; other options are those of `PostgresCheckpointer`.
    """

    def __init__(
        self, place: str | os.PathLike[str] = "agent_store.db", *, durability: Durability = "full", **options: Any
    ) -> None:
        if not isinstance(place, str | os.PathLike) or not options.keys() <= _OPTIONS:
            given = f"{redacted(repr(place)):.80}{''.join(f', {name}=...' for name in options)}"
            raise InputError(
                f"AgentStorage takes a path or a postgresql:// DSN, and for a DSN {', '.join(sorted(_OPTIONS))}; "
                f"got {given}"
            )
        name = opening.name(os.fspath(place))
        self._handle = Handle(
            name,
            functools.partial(opening.open, place, durability=durability, **options),
            on_open=erasure.finish_what_was_left,
            if_closed=f"this AgentStorage on {name!r} was closed; make a new one to go on",
        )
        self._handle.opened()

    def close(self) -> None:
        """Close the database."""
        self._handle.close_now()

    def __repr__(self) -> str:
        return f"AgentStorage({self._handle.name!r}{'' if self._handle.known() else ', closed'})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def store(self) -> Store:
        """The store that runs the queries. Raises `StoreNotOpen` after `close`."""
        return self._handle.required()

    # --- threads, which are sessions here -----------------------------------------------------------------------------

    load = blocking(thread.load)
    append = blocking(thread.append)
    save_extra = blocking(thread.save_extra)
    set_user = blocking(thread.set_user)
    info = blocking(listing.info)
    state = blocking(listing.state)
    threads = blocking(listing.list_threads)
    children = blocking(listing.children)
    unfinished = blocking(listing.unfinished)
    quarantined = blocking(listing.quarantined)
    lift_quarantine = blocking(listing.lift_quarantine)
    runs = blocking(records.list_runs)
    run = blocking(records.run)
    run_attempts = blocking(records.run_attempts)
    timeline = blocking(timeline.timeline)
    set_title = blocking(listing.set_title)
    abort = blocking(thread.abort)
    follow = iterated(follow.follow)
    watch = iterated(watching.watch)

    def steer(self, thread_id: ThreadId, message: Prompt) -> Receipt:
        """Queue a message for the run that drives the thread, in any process; it is on disk when this returns."""
        return inbox_operations.steer(self.store, thread_id, message).wait()

    def follow_up(self, thread_id: ThreadId, message: Prompt) -> Receipt:
        """Queue a message for the moment when the run would stop; it is on disk when this returns."""
        return inbox_operations.follow_up(self.store, thread_id, message).wait()

    inbox = blocking(inbox_operations.inbox)
    withdraw = blocking(inbox_operations.withdraw)

    pending = blocking(approvals.pending)
    answer = blocking(approvals.answer)
    tool_calls = blocking(approvals.tool_calls)

    put = blocking(checkpoints.put)
    get = blocking(checkpoints.get)
    get_latest = blocking(checkpoints.get_latest)
    list_threads = blocking(checkpoints.list_threads)
    list_checkpoints = blocking(checkpoints.list_checkpoints)
    fork = blocking(forks.fork)
    rewind = blocking(forks.rewind)
    tree = blocking(forks.tree)
    diff = blocking(forks.diff)

    prune = blocking(retention.prune)
    set_ttl = blocking(retention.set_ttl)
    delete_before = blocking(retention.delete_before)
    delete_thread = blocking(retention.delete_thread)
    erase_thread = blocking(erasure.erase_thread)
    erase_user = blocking(erasure.erase_user)

    export_thread = iterated(export.export_thread)
    export_user = iterated(export.export_user)
    import_from = blocking(import_.import_from)

    # --- users, sessions, tools, usage, search and upkeep -------------------------------------------------------------

    create_user = blocking(users.create_user)
    get_user = blocking(users.get_user)
    list_users = blocking(users.list_users)
    find_users = blocking(users.find_users)
    update_user = blocking(users.update_user)
    delete_user = blocking(users.delete_user)
    check_quota = blocking(users.check_quota)
    consume_quota = blocking(users.consume_quota)

    create_session = blocking(sessions.create_session)
    get_session = blocking(sessions.get_session)
    list_user_sessions = blocking(sessions.list_user_sessions)
    update_session = blocking(sessions.update_session)
    pause_session = blocking(sessions.pause_session)
    resume_session = blocking(sessions.resume_session)
    complete_session = blocking(sessions.complete_session)
    cancel_session = blocking(sessions.cancel_session)
    delete_session = blocking(sessions.delete_session)

    save_message = blocking(sessions.save_message)
    get_conversation_history = blocking(sessions.get_conversation_history)
    get_message = blocking(sessions.get_message)
    update_message = blocking(sessions.update_message)
    delete_message = blocking(sessions.delete_message)

    log_tool_call = blocking(tool_log.log_tool_call)
    get_tool_call = blocking(tool_log.get_tool_call)
    list_tool_calls = blocking(tool_log.list_tool_calls)
    update_tool_call = blocking(tool_log.update_tool_call)
    delete_tool_call = blocking(tool_log.delete_tool_call)

    create_task = blocking(tasks.create_task)
    get_task = blocking(tasks.get_task)
    list_tasks = blocking(tasks.list_tasks)
    update_task = blocking(tasks.update_task)
    update_task_status = blocking(tasks.update_task_status)
    delete_task = blocking(tasks.delete_task)
    pause_task = blocking(tasks.pause_task)
    resume_task = blocking(tasks.resume_task)
    cancel_task = blocking(tasks.cancel_task)
    retry_task = blocking(tasks.retry_task)
    send_event = blocking(task_steps.send_event)
    task_steps = blocking(task_steps.task_steps)

    create_schedule = blocking(schedules.create_schedule)
    get_schedule = blocking(schedules.get_schedule)
    pause_schedule = blocking(schedules.pause_schedule)
    resume_schedule = blocking(schedules.resume_schedule)
    delete_schedule = blocking(schedules.delete_schedule)
    schedules = blocking(schedules.list_schedules)

    get_usage_stats = blocking(usage.get_usage_stats)
    get_session_usage = blocking(usage.get_session_usage)
    set_price = blocking(usage.set_price)
    get_prices = blocking(usage.get_prices)
    delete_price = blocking(usage.delete_price)

    search = blocking(search_operations.search)
    find_messages = blocking(search_operations.find_messages)
    index = blocking(search_operations.index)
    reindex = blocking(search_operations.reindex)
    backup = blocking(backup_operations.backup)
    restore = blocking(restore_operations.restore)
    check = blocking(check_operations.check)
    repair = blocking(repair_operations.repair)
    recount = blocking(check_operations.recount)
