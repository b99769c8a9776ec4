"""What search indexes, messages and tool calls: their tables and columns, and the values that its queries exchange."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

MESSAGE, CALL = "message", "call"

# Marks in front of tokens. They are for private use in Unicode, so no word has them.
SCOPE, LONG, _TOOL = "\ue000", "\ue001", "\ue002"


class Kind(NamedTuple):
    tokens: str  # the table of its tokens
    table: str
    scope_key: str
    texts: str
    size: str
    columns: str
    created_at: str


_CREATED_CALL = "COALESCE(r.started_at, r.asked_at, r.ended_at, '')"
KINDS = {
    MESSAGE: Kind(
        *("message_words", "messages", "r.branch", "r.body", "octet_length(r.body)"),
        "r.key, t.id, r.id, r.role, r.created_at, NULL, r.plain",
        "r.created_at",
    ),
    CALL: Kind(
        *("call_words", "tool_calls", "r.thread", "r.arguments, r.output, r.error"),
        "octet_length(r.arguments) + COALESCE(octet_length(r.output), 0) + COALESCE(octet_length(r.error), 0)",
        f"r.key, t.id, r.idempotency_key, 'tool', {_CREATED_CALL}, r.name, 0",
        _CREATED_CALL,
    ),
}


class Filters(NamedTuple):
    """What a row must be, besides its text. None: anything."""

    user: str | None = None
    session: str | None = None
    roles: tuple[str, ...] | None = None
    since: str | None = None
    until: str | None = None
    namespace: str = ""


class State(NamedTuple):
    """How far the index of a kind has come."""

    upto: int
    epoch: int
    tokenizer: int


class Unindexed(NamedTuple):
    """A row that is to be indexed: its branch or its thread, and what its text is made of."""

    key: int
    scope_key: int
    texts: tuple[str | None, ...]
    ticket: int | None = None  # of a call that has changed


class IndexEntry(NamedTuple):
    """A row as the index takes it."""

    key: int
    scope_key: int
    ticket: int | None
    sequence: list[str]
    singles: list[str]


class Batch(NamedTuple):
    """Rows to be indexed, as of a state; and the key up to which that is all."""

    kind: str
    state: State
    entries: list[IndexEntry]
    upto: int


class Candidate(NamedTuple):
    """A row that may match."""

    key: int
    thread_id: str
    id: str
    role: str
    created_at: str
    tool_name: str | None
    plain: int
    size: int


class IndexedTable(NamedTuple):
    """Where candidates are selected from: tables with the row as `r`, and a condition with its values."""

    tables: str
    condition: str
    values: dict[str, Any]
    order: str = "r.key"


def tool(name: str) -> str:
    """The token of a message that calls a tool: a name may hold what ends a token, and a digest does not."""
    return _TOOL + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
