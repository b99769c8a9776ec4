"""Messages and extras as a database takes them.

A value that cannot be stored is refused here, before anything is written, with an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeAlias, get_args

from byssus.errors import InputError
from byssus.messages import (
    MOST_TOKENS,
    AssistantMessage,
    Message,
    Note,
    checked_dumps,
    encode,
    from_value,
)
from byssus.queries.accounts.usage import LONG_NAME, Spent
from byssus.queries.log.threads import MessageRow
from byssus.values import clock
from byssus.values.inputs import column_id, column_text

Appendable: TypeAlias = Message | dict[str, Any]

PAGE = 1_000  # messages a read: the event loop gets the interpreter between two pages
PLAIN = (dict, list, tuple, str, int, float, bool, type(None))  # what JSON is made of
_MESSAGES = frozenset(get_args(Message))


def message_row(message: Appendable) -> MessageRow:
    """A message as the store takes it. Dicts are accepted; one that is no message for a model is stored as a note."""
    if isinstance(message, dict):
        return json_row(message)
    if type(message) not in _MESSAGES:
        raise InputError(
            f"a thread holds messages, got {type(message).__name__}: {message!r:.80}; use UserMessage(...) or a dict"
        )
    if isinstance(message, Note):
        return MessageRow(clock.new_id(), column_text(message.role), encode(message))
    name = column_id(message.id) if message.id else clock.new_id()
    return MessageRow(name, message.role, encode(message), 0, spent_by(message))


def json_row(value: Any) -> MessageRow:
    """Any JSON as the store takes it: kept as it is, beside what it is taken for when it is read as a message."""
    body = encode(Note(value))
    message = from_value(value)
    name = None if isinstance(message, Note) else message.id
    return MessageRow(
        column_id(name) if name else clock.new_id(), column_text(message.role), body, 1, spent_by(message)
    )


def spent_by(message: Message) -> Spent | None:
    """The tokens and the cost of a message; None if they are unknown."""
    if type(message) is AssistantMessage:
        usage = message.usage.plausible()
        if usage.total or usage.cost:
            return Spent(
                column_text(message.model or "")[:LONG_NAME],
                min(usage.total, MOST_TOKENS),
                usage.input,
                usage.output,
                usage.cache_read,
                usage.cache_write,
                usage.cost,
            )
    if not isinstance(message, Note) and message.unknown is None:
        return None
    return _tokens_noted(message)


def _tokens_noted(message: Message) -> Spent | None:
    """The number of tokens that an application stored in a message: output tokens for a reply, else input tokens."""
    noted = message.body if isinstance(message, Note) else message.unknown
    count = noted.get("token_count") if isinstance(noted, dict) else None
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < MOST_TOKENS:
        return None
    model = noted.get("model", "") if isinstance(noted, dict) else ""
    if isinstance(message, AssistantMessage):
        return Spent(column_text(message.model or "")[:LONG_NAME], count, output=count)
    return Spent(column_text(model)[:LONG_NAME] if isinstance(model, str) else "", count, input=count)


def body_of(value: Any) -> tuple[str, int]:
    """The text that `message_row` or `json_row` would store of a value, and which of them."""
    if isinstance(value, PLAIN):
        return encode(Note(value)), 1
    return (encode(value) if type(value) in _MESSAGES else message_row(value).body), 0


def as_list(messages: object) -> list[Any]:
    """One message, or an iterable of messages."""
    if type(messages) in _MESSAGES:
        return [messages]
    if isinstance(messages, Iterable) and not isinstance(messages, str | dict):
        return list(messages)
    return [messages]


def encode_extra(extra: dict[str, Any]) -> str:
    """The extra as JSON text; what JSON cannot hold is named by its key."""
    if extra == {}:  # most threads have none, and each run asks three times
        return "{}"
    if not isinstance(extra, dict):
        raise InputError(f"extra must be a dict, got {type(extra).__name__}: {extra!r:.80}")
    return encode_json("extra", extra)


def encode_json(name: str, value: Any) -> str:
    """A value as JSON text; of a dict, what JSON cannot hold is named by its key."""
    try:
        return checked_dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        found, why = _unstorable(name, value, error)
        raise InputError(
            f"{found} cannot be stored as JSON: {why}; use strings, numbers, booleans, None, lists and dicts with "
            "string keys"
        ) from error


def readable_json(value: Any) -> str:
    """JSON text with non-ASCII characters as they are, not escaped."""
    return json.dumps(value, ensure_ascii=False)


def encode_strictly(name: str, value: Any) -> str:
    """JSON text that other programs can read: raises for NaN and infinite numbers."""
    text = encode_json(name, value)
    if "NaN" in text or "Infinity" in text:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise InputError(
                f"{name} holds NaN or an infinite number, which JSON cannot hold; use None or a text, got {value!r:.80}"
            ) from error
    return text


def _unstorable(name: str, value: Any, error: Exception) -> tuple[str, Exception]:
    """Which part of a value cannot be stored, and why."""
    for key, item in value.items() if isinstance(value, dict) else ():
        try:
            checked_dumps({key: item})
        except (TypeError, ValueError, RecursionError) as why:
            return f"{name}[{key!r}]", why
    return name, error
