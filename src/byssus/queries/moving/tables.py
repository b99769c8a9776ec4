"""Every table and its columns: what a column holds, and whether copies and exports carry it.

Copying, exporting, importing and the check of references are derived from `TABLES`; a test compares it with the
catalogue of a fresh database. To add a column, write a migration, and one entry here.

- A column is copied unless `not_copied` says why not, and exported unless `not_exported` does.
- Tables are in the order of their foreign keys. Columns are in the order in which a line of an export has them, where
  JSON comes last.
- `since` is the first format of exports that has a field, and `before` is its value in older exports.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from byssus.queries.log.tool_calls import CallStatus
from byssus.queries.tasks.tasks import STATUSES as TASK_STATUSES
from byssus.queries.tasks.tasks import Asked
from byssus.store.database import Row

Key: TypeAlias = tuple[int, ...]
# What a column holds. `maintenance/shapes.py` has a check for each kind that is exported.
Number: TypeAlias = Literal["key", "row", "branch", "flag", "number", "count", "sum", "priority", "bucket", "amount"]
Text: TypeAlias = Literal[
    "text", "short text", "long text", "name", "token", "namespace", "mark", "choice", "time", "day"
]
Json: TypeAlias = Literal["any", "object", "string", "about", "retention", "answer", "reply", "user message"]
# Rows of other tables, as fields of a line.
Nested: TypeAlias = Literal["segments", "inherited", "numbers", "attempts", "steps"]

NO_SUMMARY = '""'  # as JSON
_FIRST, _LAST = -(2**63), 2**63 - 1  # no key is before the one or behind the other


class Column(NamedTuple):
    name: str
    kind: Number | Text | Json | Nested
    is_optional: bool = False  # may be NULL
    choices: tuple[str, ...] = ()
    parent: str = ""  # the table that it references
    not_copied: str = ""
    not_exported: str = ""
    is_stored: bool = True  # False: a field of a line that this table has no column for
    since: int = 1
    before: Any = None

    @property
    def is_json(self) -> bool:
        return self.kind in get_args(Json)

    @property
    def is_long(self) -> bool:
        """Whether it may hold megabytes."""
        return self.is_json or self.kind == "long text"


@dataclass(frozen=True, eq=False)
class Table:
    name: str
    fields: tuple[Column, ...]
    key: tuple[str, ...] = ("key",)
    unique: tuple[str, ...] = ()  # a unique name besides the key
    parked: str = ""  # sets a unique name that no row has, for a row whose name another row is to have
    line: str = ""  # what its lines in an export are called
    since: int = 1  # the first format that has such lines
    not_exported: str = ""  # why there are no such lines

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """What a copy carries: the key, the unique name, and all others."""
        names = (field.name for field in self.fields if field.is_stored and not field.not_copied)
        first = (*self.key, *self.unique)
        return (*first, *(name for name in names if name not in first))

    @cached_property
    def exported(self) -> tuple[str, ...]:
        """The columns whose values are fields of a line."""
        return tuple(field.name for field in self.line_fields if field.is_stored)

    @cached_property
    def line_fields(self) -> tuple[Column, ...]:
        return tuple(field for field in self.fields if self.line and not field.not_exported)

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """The exported columns that hold the key of a branch: a line has the branch's number instead."""
        return tuple(field.name for field in self.line_fields if field.is_stored and field.kind == "branch")

    @cached_property
    def long(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields if field.is_stored and field.is_long)

    @cached_property
    def parents(self) -> tuple[tuple[str, str], ...]:
        """Each column that references another table, and that table."""
        return tuple((field.name, field.parent) for field in self.fields if field.parent)

    @property
    def start(self) -> Key:
        return (_FIRST,) * len(self.key)

    @property
    def end(self) -> Key:
        return (_LAST,) * len(self.key)

    def key_of(self, row: Row) -> Key:
        return row[: len(self.key)]

    def names_of(self, row: Row) -> Row:
        """The key and the unique name."""
        return row[: len(self.key) + len(self.unique)]

    def values_of(self, row: Row) -> dict[str, Any]:
        return dict(zip(self.columns, row, strict=True))


def _each(kind: Number | Text | Json, *names: str, **options: Any) -> tuple[Column, ...]:
    return tuple(Column(name, kind, **options) for name in names)


_CALL_STATUSES = get_args(CallStatus)
_HERE = "a line belongs to the thread, or the user, whose line comes before it"
_WATCHED = "a follower watches one database"
_LEASED = "a lease belongs to a process of the source; in the target it would only keep every writer out"
_FOUND = "found among the imported checkpoints"
_FORKS = "the last line of a user's export has the forks"
_CHILDREN = "the line has the id of the parent, as `below`"
_KEY = Column("key", "key", not_exported="each database gives out its own")
_THREAD = Column("thread", "row", parent="threads", not_exported=_HERE)
_BRANCH = Column("branch", "branch", parent="branches")
_LINE = Column("line", "branch", parent="branches")
_DELETED = Column("owner", "text", not_exported="empty while the thread exists; else the user whose lines these are")

THREADS = Table(
    "threads",
    (
        _KEY,
        Column("id", "name"),
        Column("namespace", "namespace"),
        Column("owner", "name", is_optional=True),
        *_each("time", "created_at", "updated_at"),
        *_each("branch", "branch", "line"),
        *_each("count", "head", "message_count", "unledgered"),
        Column("run", "text", is_optional=True),
        Column("saved_at", "time", is_optional=True, is_stored=False),  # with `partial`, a row of `partials`
        Column("title", "text", since=2, before=""),
        Column("status", "choice", choices=("active", "paused", "completed", "cancelled"), since=2, before="active"),
        Column("model", "text", is_optional=True, since=2),
        Column("below", "name", is_optional=True, is_stored=False, since=5),  # the id of the parent
        Column("parent_call", "token", is_optional=True, since=5),
        Column("extra", "object"),
        Column("ttl", "retention", is_optional=True),
        Column("partial", "reply", is_optional=True, is_stored=False),
        Column("metadata", "object", since=2, before="{}"),
        Column("version", "count", not_exported="counts from the versions that are imported"),
        Column("latest", "row", is_optional=True, not_exported=_FOUND),
        Column("latest_at", "time", is_optional=True, not_exported=_FOUND),
        Column("origin", "row", is_optional=True, not_exported=_FORKS),
        Column("origin_seq", "count", is_optional=True, not_exported=_FORKS),
        Column("parent", "row", is_optional=True, not_exported=_CHILDREN),
        Column("named", "flag", not_exported="depends on the imported messages"),
        Column("touched", "count", not_exported="counts the changes of one database"),
        Column("imported_at", "time", is_optional=True, not_exported="is about one database"),
        Column("watched_until", "time", is_optional=True, not_copied=_WATCHED, not_exported=_WATCHED),
        # The epoch is copied, so that fencing stays monotonic; so is the run, which is listed there as interrupted.
        *_each("count", "lease_epoch", "lease_abort", not_exported="fences the writers of one database"),
        *_each(
            "time", "quarantined_at", "lifted_at", is_optional=True, not_exported="is about the runs of one database"
        ),
        Column("lease_owner", "text", is_optional=True, not_copied=_LEASED, not_exported=_LEASED),
        Column("lease_until", "time", is_optional=True, not_copied=_LEASED, not_exported=_LEASED),
    ),
    unique=("namespace", "id"),
    parked="namespace = CAST(key AS TEXT), id = ''",
    line="thread",
)
BRANCHES = Table(
    "branches",
    (
        _KEY,
        _THREAD,
        Column("number", "number", is_stored=False),
        Column("segments", "segments", is_stored=False),
        Column("inherited", "inherited", is_stored=False),
        Column("uncounted", "flag", not_exported="1 for all that was imported"),
        Column("summary", "string", since=3, before=NO_SUMMARY),
    ),
    line="branch",
)
SEGMENTS = Table(
    "segments",
    (_BRANCH, Column("source", "branch", parent="branches"), *_each("count", "after_seq", "upto_seq")),
    key=("branch", "after_seq"),
    not_exported="part of the line of a branch",
)
MESSAGES = Table(
    "messages",
    (
        _KEY,
        _BRANCH,
        Column("seq", "number"),
        *_each("text", "id", "role"),
        Column("plain", "flag"),
        Column("created_at", "time"),
        Column("body", "any"),
    ),
    unique=("branch", "seq"),
    parked="seq = -key",
    line="message",
)
MARKS = Table(
    "marks",
    (
        _KEY,
        _BRANCH,
        Column("message", "row", parent="messages", not_exported="the line has the seq of the message"),
        Column("seq", "number", is_stored=False),
        Column("mark", "mark"),
    ),
    line="mark",
    since=3,
)
TOOL_CALLS = Table(
    "tool_calls",
    (
        _KEY,
        _THREAD,
        _BRANCH,
        *_each("count", "reply", "place"),
        *_each("text", "call_id", "name"),
        Column("recovery", "choice", choices=("never", "retry", "check", "ask")),
        Column("idempotency_key", "token"),
        Column("run", "text"),
        Column("status", "choice", choices=_CALL_STATUSES),
        Column("reason", "choice", is_optional=True, choices=("approval", "recovery")),
        Column("question", "long text", is_optional=True),
        Column("attempts", "count"),
        *_each("time", "asked_at", "started_at", "ended_at", is_optional=True),
        Column("error", "long text", is_optional=True, since=2),
        Column("elapsed_ms", "amount", is_optional=True, since=2),
        Column("message", "text", is_optional=True, since=2),
        *_each("text", "answered_by", "answered_from", is_optional=True, since=4),
        *_each("time", "answered_at", "expires_at", is_optional=True, since=4),
        Column("approvers", "count", since=4, before=1),
        Column("arguments", "any"),
        Column("answer", "answer", is_optional=True),
        Column("output", "any", is_optional=True, since=2),
        Column("edited", "object", is_optional=True, since=4),
        Column("fallback", "answer", is_optional=True, since=4),
    ),
    unique=("branch", "reply", "place"),
    parked="place = -key",
    line="call",
)
APPROVALS = Table(
    "approvals",
    (
        _KEY,
        Column("call", "row", parent="tool_calls"),
        *_each("text", "person"),
        Column("given_at", "time"),
        Column("source", "text", is_optional=True),
    ),
    unique=("call", "person"),
    parked="person = 'parked ' || CAST(key AS TEXT)",
    not_exported="an imported question is asked again, from the first approval on",
)
RUNS = Table(
    "runs",
    (
        _KEY,
        _THREAD,
        Column("id", "token"),
        Column("branch", "branch", is_optional=True),  # None also if the thread does not read it any more
        Column("first_seq", "count"),
        Column("last_seq", "count", is_optional=True),
        Column("began_at", "time"),
        Column("ended_at", "time", is_optional=True),
        Column("stop_reason", "text", is_optional=True),
        Column("error", "long text", is_optional=True),
        Column("cause", "text"),
        Column("started_by", "text", is_optional=True),
        Column("request_key", "token", is_optional=True),
        Column("request_digest", "text", is_optional=True),
        *_each("count", "attempts", "retries"),
        Column("attempted", "attempts", is_stored=False),
    ),
    unique=("id", "thread"),
    parked="id = CAST(key AS TEXT)",
    line="run",
    since=4,
)
RUN_ATTEMPTS = Table(
    "run_attempts",
    (
        Column("run", "row", parent="runs"),
        Column("number", "number"),
        Column("owner", "text"),
        Column("epoch", "count"),
        Column("began_at", "time"),
        Column("ended_at", "time", is_optional=True),
        Column("outcome", "text", is_optional=True),
    ),
    key=("run", "number"),
    not_exported="part of the line of a run",
)
CHECKPOINTS = Table(
    "checkpoints",
    (
        _KEY,
        _LINE,
        Column("id", "name"),
        Column("step", "count"),
        Column("version", "number"),
        Column("parent", "name", is_optional=True),
        _BRANCH,
        *_each("count", "seq", "message_count"),
        Column("created_at", "time"),
        Column("hidden", "numbers", is_stored=False),
        Column("about", "about"),
        *_each("object", "body", "extra"),
    ),
    line="checkpoint",
)
INHERITED = Table(
    "inherited",
    (_LINE, Column("source", "branch", parent="branches"), *_each("count", "step", "version", "as_of")),
    key=("line", "source"),
    not_exported="part of the line of a branch",
)
HIDDEN = Table(
    "hidden",
    (_LINE, Column("checkpoint", "row", parent="checkpoints")),
    key=("line", "checkpoint"),
    not_exported="part of the line of a checkpoint",
)
INBOX = Table(
    "inbox",
    (
        _KEY,
        _THREAD,
        Column("kind", "choice", choices=("steer", "follow_up")),
        *_each("text", "id", "role"),
        Column("created_at", "time"),
        Column("body", "user message"),
    ),
    line="inbox",
)
PARTIALS = Table(
    "partials",
    (_THREAD, Column("body", "reply"), Column("saved_at", "time")),
    key=("thread",),
    not_exported="part of the line of a thread",
)
PIECES = Table(
    "pieces",
    (Column("thread", "row", parent="partials", not_exported=_HERE), Column("number", "number"), Column("body", "any")),
    key=("thread", "number"),
    not_exported="part of the line of a thread",
)
FLOORS = Table("floors", (_KEY, Column("value", "count")), not_exported="fences the writers of one database")
USERS = Table(
    "users",
    (
        _KEY,
        Column("id", "name", not_exported="in the first line of the user's export"),
        *_each("text", "name", "email"),
        Column("quota_total", "count", is_optional=True),
        Column("quota_used", "sum"),
        *_each("time", "created_at", "updated_at"),
        Column("preferences", "object"),
    ),
    unique=("id",),
    parked="id = CAST(key AS TEXT)",
    line="account",
    since=2,
)
PREFERENCES = Table(
    "preferences",
    (_KEY, Column("owner", "row", parent="users"), *_each("text", "path", "value")),
    not_exported="made again from the user's preferences",
)
TASKS = Table(
    "tasks",
    (
        _KEY,
        Column("thread", "row", is_optional=True, parent="threads", not_exported=_HERE),
        Column("owner", "text", not_exported=_HERE),
        *_each("name", "id", "type"),
        Column("status", "choice", choices=TASK_STATUSES),
        Column("priority", "priority"),
        *_each("count", "max_retries", "retry_count"),
        *_each("time", "created_at", "updated_at"),
        *_each("time", "started_at", "completed_at", is_optional=True),
        *_each("time", "run_at", "deadline", is_optional=True, since=6),
        *_each("name", "unique_key", "parent", "schedule", is_optional=True, since=6),
        Column("progress", "amount", is_optional=True, since=6),
        *_each("text", "progress_note", "waits_for", is_optional=True, since=6),
        Column("asked", "choice", is_optional=True, choices=get_args(Asked), since=6),
        # A task that a worker runs has lost that worker elsewhere. When this time has come, another one takes it.
        Column("lease_until", "time", is_optional=True, since=6),
        Column("steps", "steps", is_stored=False, since=6, before=()),
        Column("payload", "any"),
        Column("result", "any", is_optional=True),
        Column("error", "any", is_optional=True, since=6),
        Column("lease_epoch", "count", not_exported="fences the workers of one database"),
        Column("lease_owner", "text", is_optional=True, not_copied=_LEASED, not_exported=_LEASED),
    ),
    unique=("id",),
    parked="id = CAST(key AS TEXT)",
    line="task",
    since=2,
)
TASK_STEPS = Table(
    "task_steps",
    (
        _KEY,
        Column("task", "row", parent="tasks"),
        Column("name", "text"),
        *_each("text", "kind", "status"),
        Column("recovery", "text", is_optional=True),
        Column("attempts", "count"),
        *_each("any", "result", "error", is_optional=True),
        Column("until", "time", is_optional=True),
        Column("started_at", "time"),
        Column("ended_at", "time", is_optional=True),
    ),
    unique=("task", "kind", "name"),
    parked="name = 'parked ' || CAST(key AS TEXT)",
    not_exported="part of the line of a task",
)
SCHEDULES = Table(
    "schedules",
    (
        _KEY,
        Column("id", "name"),
        Column("thread", "row", is_optional=True, parent="threads"),
        *_each("text", "owner", "type"),
        Column("payload", "any"),
        Column("priority", "priority"),
        Column("max_retries", "count"),
        Column("cron", "text", is_optional=True),
        Column("every", "amount", is_optional=True),
        *_each("text", "zone", "missed", "status"),
        *_each("time", "next_at", "last_at", is_optional=True),
        *_each("time", "created_at", "updated_at"),
    ),
    unique=("id",),
    parked="id = CAST(key AS TEXT)",
    not_exported="a program creates its schedules when it starts",
)
# `thread` is 0 when the thread was deleted, so it references none.
USAGE = Table(
    "usage",
    (
        _KEY,
        Column("thread", "row", not_exported=_HERE),
        _DELETED,
        Column("day", "day"),
        Column("model", "short text"),
        *_each("sum", "messages", "tokens", "input", "output", "cache_read", "cache_write"),
        *_each("amount", "cost", "priced"),
    ),
    unique=("thread", "owner", "day", "model"),
    parked="model = CAST(key AS TEXT)",
    line="usage",
    since=2,
)
TOOL_USAGE = Table(
    "tool_usage",
    (
        _KEY,
        Column("thread", "row", not_exported=_HERE),
        _DELETED,
        Column("day", "day"),
        Column("name", "short text"),
        Column("bucket", "bucket"),
        *_each("sum", "calls", "failures"),
        Column("total_ms", "amount"),
    ),
    unique=("thread", "owner", "day", "name", "bucket"),
    parked="bucket = -1 - key",
    line="tool_usage",
    since=2,
)
PRICES = Table(
    "prices",
    (_KEY, Column("model", "text"), *_each("amount", "input", "output", "cache_read", "cache_write")),
    unique=("model",),
    parked="model = CAST(key AS TEXT)",
    not_exported="belongs to no thread and no user",
)

TABLES = (
    *(THREADS, BRANCHES, SEGMENTS, MESSAGES, MARKS, TOOL_CALLS, APPROVALS, RUNS, RUN_ATTEMPTS, INBOX, PARTIALS, PIECES),
    *(CHECKPOINTS, INHERITED, HIDDEN, FLOORS, USERS, PREFERENCES, TASKS, TASK_STEPS, SCHEDULES),
    *(USAGE, TOOL_USAGE, PRICES),
)
KEYS = {table.name: table.key[0] for table in TABLES}  # the column that references to a table point at


class LocalTable(NamedTuple):
    """A table about the database itself, which is neither copied nor exported."""

    name: str
    reason: str
    columns: tuple[str, ...]  # the key first
    parents: tuple[tuple[str, str], ...] = ()


LOCAL = (
    LocalTable(
        "copies",
        "the copies that were made into this database",
        ("key", "source", "began_at", "written_at", "finished_at", "sha256"),
    ),
    LocalTable(
        "backups",
        "which backup this database is",
        ("key", "database", "source", "taken_at", "shape", "sha256"),
    ),
    LocalTable("known_backups", "the backups of this database", ("key", "host", "path", "device", "taken_at")),
    LocalTable("identity", "differs between databases", ("key", "id")),
    LocalTable("erasures", "what is being erased from the files of this database", ("key", "began_at", "finished_at")),
    LocalTable(
        "reservations",
        "belongs to a lease, which belongs to a process of this database",
        ("thread", "owner", "tokens", "epoch"),
        (("thread", "threads"),),
    ),
    LocalTable("task_rates", "limits the workers of this database", ("type", "tokens", "filled_at")),
    LocalTable(
        "indexing",
        "how far the search index has come; each database makes its own",
        ("kind", "upto", "epoch", "tokenizer", "horizon", "horizon_key"),
    ),
    LocalTable("changed_calls", "what the search index must read again", ("call", "ticket"), (("call", "tool_calls"),)),
)
