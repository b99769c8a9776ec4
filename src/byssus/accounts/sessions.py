"""Sessions and their messages: operations for both APIs (see store/operations.py).

A session is a thread. A message that is saved here is stored as the dict that the application passed; an agent that
continues the session decodes it as one of its own messages.
"""

from __future__ import annotations

import json
from typing import Any, cast, get_args

import msgspec

from byssus.accounts.rows import HistoryRow, MessageRole, SessionRow, SessionStatus
from byssus.accounts.usage import rounded_cost
from byssus.errors import InputError
from byssus.messages import AssistantMessage, Message, Note, ToolResultMessage, UserMessage, decode
from byssus.queries.accounts import sessions
from byssus.queries.accounts.sessions import Session
from byssus.queries.log import messages
from byssus.queries.log.leases import Unleased
from byssus.queries.log.messages import StoredMessage
from byssus.queries.log.threads import MessageRow
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.threads import retention
from byssus.threads.encoding import encode_strictly, json_row, message_row, readable_json, spent_by
from byssus.threads.waiting import retry_while_driven
from byssus.values import clock
from byssus.values.inputs import (
    UNCHANGED,
    checked_choice,
    checked_count,
    checked_id,
    checked_new_id,
    checked_text,
    checked_wait,
    readable_id,
)
from byssus.values.thread_key import ThreadKey

_USAGE = ("input", "output", "cache_read", "cache_write")


async def create_session(
    store: Runner,
    user_id: str | None,
    title: str = "新对话",
    model: str | None = "gpt-4o-mini",
    *,
    session_id: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> SessionRow:
    """Create a session for a user; with None, it has no user. `session_id` sets your own id."""
    owner = None if user_id is None else checked_id(user_id, "a user id")
    name = clock.new_id() if session_id is None else checked_new_id(session_id, "a session id")
    given = _checked(title=title, model=model, metadata={} if metadata is None else metadata)
    made = await store.write(
        sessions.create, ThreadKey("", name), owner, given["title"], given["model"], given["metadata"]
    )
    return _as_dict(made)


async def get_session(store: Runner, session_id: str) -> SessionRow | None:
    """Return the session, or None if the id is unknown."""
    name = readable_id(session_id, "a session id")
    session = None if name is None else await store.read(sessions.get, ThreadKey("", name))
    return None if session is None else _as_dict(session)


async def list_user_sessions(
    store: Runner, user_id: str, limit: int = 20, offset: int = 0, *, status: SessionStatus | None = None
) -> list[SessionRow] | None:
    """Return the sessions of a user, most recently updated first. None if the user is unknown."""
    name = readable_id(user_id, "a user id")
    wanted = None if status is None else checked_choice("status", status, get_args(SessionStatus))
    limit, offset = checked_count("limit", limit), checked_count("offset", offset)
    if name is None:
        return None
    found = await store.read(sessions.of_user, name, status=wanted, limit=limit, offset=offset)
    return None if found is None else [_as_dict(session) for session in found]


async def update_session(
    store: Runner,
    session_id: str,
    *,
    title: str = UNCHANGED,
    model: str | None = UNCHANGED,
    status: SessionStatus = UNCHANGED,
    metadata: dict[str, Any] = UNCHANGED,
    user_id: str | None = UNCHANGED,
) -> SessionRow:
    """Change the given fields. Metadata are replaced as a whole."""
    given = {"title": title, "model": model, "status": status, "metadata": metadata, "owner": user_id}
    changes = _checked(**{key: value for key, value in given.items() if value is not UNCHANGED})
    return _as_dict(await store.write(sessions.update, ThreadKey("", checked_id(session_id, "a session id")), changes))


async def pause_session(store: Runner, session_id: str) -> SessionRow:
    """Pause the session: no new run starts until it is resumed. An active run continues to its end."""
    return await update_session(store, session_id, status="paused")


async def resume_session(store: Runner, session_id: str) -> SessionRow:
    """Make the session active again."""
    return await update_session(store, session_id, status="active")


async def complete_session(store: Runner, session_id: str) -> SessionRow:
    """Mark the session as completed. This blocks nothing."""
    return await update_session(store, session_id, status="completed")


async def cancel_session(store: Runner, session_id: str) -> SessionRow:
    """Cancel the session: no new run starts."""
    return await update_session(store, session_id, status="cancelled")


async def delete_session(store: Runner, session_id: str, *, wait: float = 0) -> None:
    """Delete the session with everything that belongs to it. Its usage stays in the statistics of its user.

    While a run holds the session, it raises `ThreadBusy`; with `wait`, it waits up to that many seconds first.
    """
    name = checked_id(session_id, "a session id")
    await store.read(sessions.require, ThreadKey("", name))
    await retention.delete_thread(store, name, wait=wait)


# --- messages ---------------------------------------------------------------------------------------------------------


async def save_message(
    store: Runner,
    session_id: str,
    role: MessageRole,
    content: str | list[Any] | None,
    tool_calls: list[Any] | None = None,
    tool_call_id: str | None = None,
    token_count: int = 0,
    *,
    usage: dict[str, Any] | None = None,
    wait: float = 0,
) -> str:
    """Add a message to the session; returns its id.

    `usage` gives more detail than `token_count`: input, output, cache_read, cache_write and cost. The user's quota is
    not
    charged; use `consume_quota` for that. While a run holds the session, it raises `ThreadBusy`; with `wait`, it waits
    up
    to that many seconds first.
    """
    value = _message(role, content, tool_calls, tool_call_id, checked_count("token_count", token_count), usage)
    name = checked_id(session_id, "a session id")
    thread_key = ThreadKey("", name)
    if ("token_count" in value or "usage" in value) and (model := await store.read(sessions.model, thread_key)):
        value["model"] = model  # its tokens are counted for the model that it names
    row = json_row(value)
    await retry_while_driven(
        store,
        lambda dead_epoch: store.write(sessions.save, thread_key, row, by=Unleased(dead_epoch)),
        checked_wait(wait),
    )
    return row.id


async def get_conversation_history(store: Runner, session_id: str, max_messages: int = 50) -> list[HistoryRow] | None:
    """Return the newest messages of the session, oldest first. None if the session is unknown."""
    name, limit = readable_id(session_id, "a session id"), checked_count("max_messages", max_messages)
    if name is None:
        return None
    return await store.read(_history, name, limit)


async def get_message(store: Runner, session_id: str, message_id: str) -> HistoryRow | None:
    """Return one message of the session, or None if it is unknown."""
    session, message = readable_id(session_id, "a session id"), readable_id(message_id, "a message id")
    if session is None or message is None:
        return None
    row = await store.read(messages.find, ThreadKey("", session), message)
    return None if row is None else history_row(row)


async def update_message(
    store: Runner, session_id: str, message_id: str, content: str | list[Any], *, wait: float = 0
) -> HistoryRow:
    """Replace the content of a message. Forks and checkpoints that hold the message keep the old content."""
    session, message = checked_id(session_id, "a session id"), checked_id(message_id, "a message id")
    row, text = await store.read(sessions.message, ThreadKey("", session), message), _checked_content(content)
    new = _edited(row, text)
    await _replace(store, session, message, new, wait)
    return history_row(row._replace(role=new.role, body=new.body, plain=new.plain))


async def delete_message(store: Runner, session_id: str, message_id: str, *, wait: float = 0) -> None:
    """Remove a message from the session. Forks and checkpoints that hold it keep it."""
    session, message = checked_id(session_id, "a session id"), checked_id(message_id, "a message id")
    await _replace(store, session, message, None, wait)


async def _replace(store: Runner, session: str, message: str, new: MessageRow | None, wait: float) -> None:
    thread = ThreadKey("", session)
    await retry_while_driven(
        store,
        lambda dead_epoch: store.write(sessions.replace_message, thread, message, new, by=Unleased(dead_epoch)),
        checked_wait(wait),
    )


def history_row(row: StoredMessage) -> HistoryRow:
    """Return a message as applications read it, whichever API wrote it."""
    message = decode(row.body)
    given = json.loads(row.body) if row.plain else None
    calls = _calls_of(message, given)
    spent = spent_by(message)
    return {
        "id": row.id,
        "role": role_of(message),
        "content": _content_of(message, given),
        "tool_calls": calls,
        "tool_calls_json": None if calls is None else readable_json(calls),
        "tool_call_id": _call_id_of(message, given),
        "token_count": 0 if spent is None else spent.tokens,
        "created_at": row.created_at,
    }


def role_of(message: Message) -> str:
    """Return the role under the name that applications use."""
    return "tool" if isinstance(message, ToolResultMessage) else message.role


def _history(tx: Tx, session_id: str, limit: int) -> list[HistoryRow] | None:
    """Read and decode on a worker of the store, so that a long history does not block an event loop."""
    found = messages.history(tx, ThreadKey("", session_id), limit)
    return None if found is None else [history_row(row) for row in found]


def _content_of(message: Message, given: Any) -> Any:
    if isinstance(given, dict) and isinstance(given.get("content"), str | list | None) and "content" in given:
        return given["content"]
    return message.text


def _calls_of(message: Message, given: Any) -> list[Any] | None:
    if isinstance(given, dict) and "tool_calls" in given:
        calls: list[Any] | None = given["tool_calls"]
        return calls
    if isinstance(message, AssistantMessage) and (asked := message.tool_calls):
        return [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in asked]
    return None


def _call_id_of(message: Message, given: Any) -> str | None:
    if isinstance(given, dict):
        found: str | None = given.get("tool_call_id")
        return found
    return message.tool_call_id if isinstance(message, ToolResultMessage) else None


def _message(
    role: str, content: Any, tool_calls: Any, tool_call_id: Any, token_count: int, usage: Any
) -> dict[str, Any]:
    """Return a message as it is stored: the dict that the application would write."""
    value: dict[str, Any] = {"id": clock.new_id(), "role": checked_choice("role", role, get_args(MessageRole))}
    value["content"] = _checked_content(content, may_be_none=bool(tool_calls))
    if tool_calls is not None:
        if not isinstance(tool_calls, list | tuple) or not all(isinstance(call, dict) for call in tool_calls):
            raise InputError(f"tool_calls must be a list of dicts, got {tool_calls!r:.80}")
        value["tool_calls"] = list(tool_calls)
    if tool_call_id is not None:
        value["tool_call_id"] = checked_text("tool_call_id", tool_call_id)
    if token_count:
        value["token_count"] = token_count
    if usage is not None:
        if token_count:
            raise InputError(
                f"token_count={token_count} and usage={usage!r:.80} give the same count twice; pass one of them"
            )
        value["usage"] = _checked_usage(role, usage)
    encode_strictly("a message", value)
    return value


def _checked_content(content: Any, *, may_be_none: bool = False) -> Any:
    if isinstance(content, str | list) or (content is None and may_be_none):
        return content
    raise InputError(f"content must be a string or a list of blocks, got {content!r:.80}")


def _checked_usage(role: str, usage: Any) -> dict[str, Any]:
    if role != "assistant" or not isinstance(usage, dict) or not usage.keys() <= {*_USAGE, "cost"}:
        raise InputError(
            f"usage must be a dict of {', '.join(_USAGE)} and cost, for a message of the role 'assistant'; "
            f"got {usage!r:.80} for the role {role!r}"
        )
    for name in _USAGE:
        checked_count(f"usage[{name!r}]", usage.get(name, 0))
    cost = usage.get("cost", 0.0)
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < 1e15:
        raise InputError(f"usage['cost'] must be a number from 0 up, got {cost!r:.80}")
    return dict(usage)


def _edited(stored: StoredMessage, content: Any) -> MessageRow:
    if stored.plain:
        value = json.loads(stored.body)
        row = json_row({**value, "content": content} if isinstance(value, dict) else {"content": content})
    else:
        message = decode(stored.body)
        if isinstance(message, Note):
            raise InputError(f"message {stored.id!r} is a note, not a message, and cannot be edited; delete it instead")
        calls = [block for block in message.content if block.type == "tool_call"]
        row = message_row(msgspec.structs.replace(message, content=[*UserMessage(content).content, *calls]))
    return row._replace(id=stored.id, spent=None)


def _as_dict(session: Session) -> SessionRow:
    metadata = json.loads(session.metadata)
    shown = {
        **session._asdict(),
        "total_tokens": int(session.total_tokens),
        "total_cost": rounded_cost(session.total_cost),
        "metadata": metadata,
        "metadata_json": readable_json(metadata),
    }
    return cast("SessionRow", shown)


def _checked(**given: Any) -> dict[str, Any]:
    """Validate the given columns and encode them for the store."""
    if "title" in given:
        checked_text("a session's title", given["title"])
    if given.get("model") is not None:
        checked_text("a session's model", given["model"])
    if "status" in given:
        checked_choice("status", given["status"], get_args(SessionStatus))
    if given.get("owner") is not None:
        checked_id(given["owner"], "a user id")
    if "metadata" in given:
        if not isinstance(given["metadata"], dict):
            raise InputError(f"metadata must be a dict, got {given['metadata']!r:.80}")
        given["metadata"] = encode_strictly("metadata", given["metadata"])
    return given
