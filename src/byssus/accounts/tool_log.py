"""The tool log: operations for both APIs (see store/operations.py).

Tool calls of agents are in the same ledger, so they are listed here too.
"""

from __future__ import annotations

import json
import math
from typing import Any, cast

from byssus.accounts.rows import CallStatus, ToolLogRow
from byssus.errors import InputError
from byssus.messages import decode, to_value
from byssus.queries.accounts import sessions
from byssus.queries.accounts import tool_log as log
from byssus.queries.accounts.tool_log import LoggedCall
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.threads.encoding import encode_strictly
from byssus.values import clock
from byssus.values.inputs import UNCHANGED, checked_count, checked_id, checked_text, column_text, readable_id
from byssus.values.thread_key import ThreadKey

_FAILURES = ("failed", "aborted", "unknown", "denied")


async def log_tool_call(
    store: Runner,
    session_id: str,
    tool_name: str,
    input_data: Any,
    output_data: Any,
    elapsed_ms: float,
    success: bool = True,
    error_message: str | None = None,
    message_id: str | None = None,
) -> str:
    """Log a tool call with its duration and outcome; returns the call's id."""
    call = LoggedCall(
        clock.new_id(),
        _checked_name(tool_name),
        encode_strictly("input_data", input_data),
        encode_strictly("output_data", output_data),
        _checked_elapsed(elapsed_ms),
        "done" if success else "failed",
        None if error_message is None else column_text(_text("error_message", error_message)),
        None if message_id is None else checked_text("message_id", message_id),
    )
    await store.write(_log, checked_id(session_id, "a session id"), call)
    return call.id


async def get_tool_call(store: Runner, call_id: str) -> ToolLogRow | None:
    """Return one call of the log, or None if the id is unknown."""
    name = readable_id(call_id, "a call's id")
    row = None if name is None else await store.read(log.logged, name)
    return None if row is None else _as_dict(row)


async def list_tool_calls(
    store: Runner,
    session_id: str | None = None,
    limit: int = 100,
    offset: int = 0,
    *,
    tool_name: str | None = None,
    success: bool | None = None,
) -> list[ToolLogRow] | None:
    """Return the calls of a session, or of all sessions, newest first. None if the session is unknown."""
    name = None if session_id is None else readable_id(session_id, "a session id")
    limit, offset = checked_count("limit", limit), checked_count("offset", offset)
    if session_id is not None and (name is None or await store.read(sessions.get, ThreadKey("", name)) is None):
        return None
    tool = None if tool_name is None else column_text(_checked_name(tool_name))
    wanted = None if success is None else ("done",) if success else _FAILURES
    rows = await store.read(log.log_of, name, name=tool, status=wanted, limit=limit, offset=offset)
    return [_as_dict(row) for row in rows]


async def update_tool_call(
    store: Runner,
    call_id: str,
    *,
    input_data: Any = UNCHANGED,
    output_data: Any = UNCHANGED,
    error_message: str | None = UNCHANGED,
) -> ToolLogRow:
    """Change the given fields of a logged call. Calls that an agent made cannot be changed."""
    changes: dict[str, str | None] = {}
    if input_data is not UNCHANGED:
        changes["arguments"] = encode_strictly("input_data", input_data)
    if output_data is not UNCHANGED:
        changes["output"] = encode_strictly("output_data", output_data)
    if error_message is not UNCHANGED:
        changes["error"] = None if error_message is None else column_text(_text("error_message", error_message))
    name = checked_id(call_id, "a call's id")
    await store.write(log.amend, name, changes)
    changed = await get_tool_call(store, name)
    assert changed is not None
    return changed


async def delete_tool_call(store: Runner, call_id: str) -> None:
    """Remove a call from the log. The statistics of tools keep it."""
    await store.write(log.unlog, checked_id(call_id, "a call's id"))


def _log(tx: Tx, session_id: str, call: LoggedCall) -> None:
    log.log(tx, sessions.take(tx, ThreadKey("", session_id)), call)


def _as_dict(row: LoggedCall) -> ToolLogRow:
    result = None if row.result is None else decode(row.result)
    text = None if result is None else result.text
    failed = row.status in _FAILURES
    output = json.loads(row.output) if row.output is not None else None
    if row.output is None and result is not None:
        value = to_value(result)
        output = (value.get("details") if isinstance(value, dict) else None) or text
    return {
        "id": row.id,
        "session_id": row.session_id,
        "tool_name": row.name,
        "input_data": json.loads(row.input),
        "output_data": output,
        "elapsed_ms": row.elapsed_ms,
        "success": row.status == "done",
        "error_message": row.error if row.error is not None or not failed else text,
        "message_id": row.message,
        "call_id": row.call_id,
        "status": cast("CallStatus", row.status),
        "created_at": row.created_at or "",
    }


def _checked_name(value: object) -> str:
    if not value:
        raise InputError(f"a tool's name must be a string with at least one character, got {value!r:.80}")
    return checked_text("a tool's name", value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be a string or None, got {value!r:.80}")
    return value


def _checked_elapsed(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(f"elapsed_ms must be a number of milliseconds from 0 up, got {value!r:.80}")
    return float(min(value, 1e12))
