"""The dicts that `AgentStorage` and the checkpointers return for users, sessions, messages, tasks, tools and usage.

They are plain dicts at run time. Times are ISO 8601 UTC text, as everywhere in byssus: "2026-01-31T12:00:00.000000Z".
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from byssus.queries.log.tool_calls import CallStatus as CallStatus  # noqa: PLC0414 - a part of these types
from byssus.tasks.rows import ScheduleRow as ScheduleRow  # noqa: PLC0414 - likewise
from byssus.tasks.rows import TaskError as TaskError  # noqa: PLC0414 - likewise
from byssus.tasks.rows import TaskRow as TaskRow  # noqa: PLC0414
from byssus.tasks.rows import TaskStatus as TaskStatus  # noqa: PLC0414
from byssus.tasks.rows import TaskStepRow as TaskStepRow  # noqa: PLC0414

if not TYPE_CHECKING and sys.version_info < (3, 12):
    with contextlib.suppress(ImportError):  # pydantic, and so FastAPI, takes no other one there, and brings it along
        from typing_extensions import TypedDict

SessionStatus: TypeAlias = Literal["active", "paused", "completed", "cancelled"]
MessageRole: TypeAlias = Literal["user", "assistant", "system", "tool"]
SearchOrder: TypeAlias = Literal["newest", "relevance"]
SearchKind: TypeAlias = Literal["message", "tool_call"]


class UserRow(TypedDict):
    """A user. Without a limit, `quota_total` is None; `preferences_json` is `preferences` as text."""

    id: str
    name: str
    email: str
    quota_total: int | None
    quota_used: int
    preferences: dict[str, Any]
    preferences_json: str
    created_at: str
    updated_at: str


class SessionRow(TypedDict):
    """A session with its usage. `metadata_json` is `metadata` as text."""

    id: str
    user_id: str | None
    title: str
    status: SessionStatus
    model: str | None
    total_tokens: int
    total_cost: float
    message_count: int
    metadata: dict[str, Any]
    metadata_json: str
    created_at: str
    updated_at: str


class HistoryRow(TypedDict):
    """A message of a session. `content` and `tool_calls` are as they were saved; of an agent's message, its text.

    `role` is user, assistant, system or tool, or what a note calls itself.
    """

    id: str
    role: str
    content: Any
    tool_calls: list[Any] | None
    tool_calls_json: str | None
    tool_call_id: str | None
    token_count: int
    created_at: str


class FoundMessage(HistoryRow):
    """A message that calls a tool, with its session."""

    session_id: str


class ToolLogRow(TypedDict):
    """A tool call: one that was logged, or one that an agent made. `message_id` is the message that asked for it."""

    id: str
    session_id: str
    tool_name: str
    input_data: Any
    output_data: Any
    elapsed_ms: float | None
    success: bool
    error_message: str | None
    message_id: str | None
    call_id: str
    status: CallStatus
    created_at: str


class SearchHit(TypedDict):
    """A message or a tool call that matches a query. `score` is None unless the order is "relevance"."""

    kind: SearchKind
    session_id: str
    message_id: str
    role: str
    content: str
    created_at: str
    snippet: str
    tool_name: str | None
    score: float | None


class UsageCounts(TypedDict):
    """Numbers of messages and tokens, and their cost."""

    messages: int
    tokens: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    cost: float


class DayUsage(UsageCounts):
    """The usage of a day in UTC, such as "2026-01-31"."""

    day: str


class ModelUsage(UsageCounts):
    """The usage of a model."""

    model: str


class SessionUsage(UsageCounts):
    """The usage of a session; the id None stands for all deleted sessions."""

    session_id: str | None


class ToolUsage(TypedDict):
    """How often a tool was called, and how long it took in milliseconds; None if no call was timed."""

    tool_name: str
    call_count: int
    avg_latency: float | None
    failures: int
    failure_rate: float
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class UsageStats(TypedDict):
    """The usage of a period, in total and by day, model, session and tool."""

    period_days: int
    since: str
    session_count: int
    total_tokens: int
    total_messages: int
    total_cost: float
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    by_day: list[DayUsage]
    by_model: list[ModelUsage]
    by_session: list[SessionUsage]
    tool_usage: list[ToolUsage]


class PriceRow(TypedDict):
    """The prices of a million tokens of a model."""

    input: float
    output: float
    cache_read: float
    cache_write: float


class ProblemRow(TypedDict):
    """A problem that a check found: its kind, its place, and whether `repair` can fix it."""

    what: str
    where: str
    detail: str
    repairable: bool


class CheckResult(TypedDict):
    """The problems that a check found, and the numbers of rows that it read."""

    ok: bool
    problems: list[ProblemRow]
    checked: dict[str, int]


class RepairResult(CheckResult):
    """What a repair has fixed; `problems` are those that remain."""

    repaired: list[ProblemRow]


class BackupResult(TypedDict):
    """A verified backup: the number of rows per table, and how many were written this time."""

    path: str
    bytes: int
    rows: dict[str, int]
    written: int
    incremental: bool
    verified: bool
    sha256: str
    seconds: float


class RestoreResult(TypedDict):
    """A restored and verified backup. `taken_at` is when the backup was taken."""

    path: str
    rows: dict[str, int]
    written: int
    taken_at: str | None
    verified: bool
    sha256: str
    seconds: float
