"""Msg: a message as memories take and return it, and the conversion of other messages to it.

It has the shape of AgentScope's Msg, so that code can move between the two. A memory stores its fields as JSON.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Self

import msgspec

from byssus.errors import InputError, StoreCorrupt
from byssus.messages import (
    AssistantMessage,
    Block,
    ImageContent,
    Message,
    Note,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    decode,
    dumps,
)
from byssus.values import clock

ROLES = ("user", "assistant", "system")


@dataclass
class Msg:
    """A message: the name of its author, its content (a text or a list of blocks), and its role: user, assistant or
    system.

    `id` is generated with the message; you can set your own.
    """

    name: str | None
    content: str | list[Any]
    role: str
    metadata: dict[str, Any] | None = None
    timestamp: str | None = None
    invocation_id: str | None = None
    id: str = field(default_factory=clock.new_id, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.content, str | list):
            raise InputError(f"a Msg's content must be a string or a list of blocks, got {self.content!r:.80}")
        if self.role not in ROLES:
            raise InputError(f"a Msg's role must be one of {', '.join(map(repr, ROLES))}; got {self.role!r:.80}")
        self.metadata = self.metadata or {}
        self.timestamp = self.timestamp or datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values. They are copies."""
        return copy.deepcopy({**values_of(self), "invocation_id": self.invocation_id})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a message from the result of `to_dict`. Without an id, it gets a new one."""
        if not isinstance(values, Mapping) or not values.keys() >= {"name", "content", "role"}:
            raise InputError(f"Msg.from_dict needs a dict with name, content and role; got {values!r:.80}")
        message = cls(
            values["name"],
            values["content"],
            values["role"],
            values.get("metadata"),
            values.get("timestamp"),
            values.get("invocation_id"),
        )
        message.id = values.get("id", message.id)
        return message

    def get_text_content(self, separator: str = "\n") -> str | None:
        """Return the text of the message without its other blocks; None if there is no text."""
        if isinstance(self.content, str):
            return self.content
        texts = [block["text"] for block in self.get_content_blocks("text") if isinstance(block.get("text"), str)]
        return separator.join(texts) if texts else None

    def get_content_blocks(self, block_type: str | Sequence[str] | None = None) -> list[Any]:
        """Return the blocks of the message, or those of some types. A text is one block."""
        blocks = [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content
        if block_type is None:
            return list(blocks)
        wanted = [block_type] if isinstance(block_type, str) else block_type
        return [block for block in blocks if isinstance(block, dict) and block.get("type") in wanted]

    def has_content_blocks(self, block_type: str | Sequence[str] | None = None) -> bool:
        """Whether there is a block of this type, or any block."""
        return bool(self.get_content_blocks(block_type))


def values_of(message: Any) -> dict[str, Any]:
    """Return the fields of an object with the shape of a Msg, of any class. Raises AttributeError for other objects."""
    values = {
        "id": message.id,
        "name": message.name,
        "role": message.role,
        "content": message.content,
        "metadata": message.metadata,
        "timestamp": message.timestamp,
    }
    invocation = getattr(message, "invocation_id", None)
    return values if invocation is None else {**values, "invocation_id": invocation}


class _Fields(msgspec.Struct):
    """The JSON that a memory stores."""

    id: str
    name: str | None
    role: str
    content: str | list[Any]
    metadata: dict[str, Any] | None
    timestamp: str | None
    invocation_id: str | None = None


_decoder = msgspec.json.Decoder(_Fields)


class MsgFields(NamedTuple):
    """A stored message, with the fields of `Msg`."""

    id: str
    name: str | None
    role: str
    content: str | list[Any]
    metadata: dict[str, Any] | None
    timestamp: str | None
    invocation_id: str | None


def msg_fields(name: str, body: str, plain: int, created_at: str) -> MsgFields:
    """Return the fields of a stored message, whichever API wrote it. `id` is the id that the row is looked up by."""
    if plain:
        try:
            own = _decoder.decode(body)
            if own.role in ROLES:
                return MsgFields(
                    name,
                    own.name,
                    own.role,
                    own.content,
                    own.metadata,
                    _at(own.timestamp, created_at),
                    own.invocation_id,
                )
        except (msgspec.DecodeError, UnicodeEncodeError):  # not written by a memory, or not on the fast path
            pass
        if (given := _as_given(body)) is not None:
            at = _at(given.get("timestamp"), created_at)
            fields = (given.get("name"), given["role"], given["content"], given.get("metadata"))
            return MsgFields(name, *fields, at, given.get("invocation_id"))
    return _of_message(name, decode(body), created_at)


def _at(timestamp: str | None, created_at: str) -> str:
    return created_at if timestamp is None else timestamp


def _as_given(body: str) -> dict[str, Any] | None:
    """Return the fields of a message in this shape that another API stored. Only role and content are required."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt(f"a stored message is not JSON ({error}): {body[:80]!r}; run an integrity check") from error
    if not isinstance(value, dict) or value.get("role") not in ROLES or value.get("tool_calls"):
        return None
    shapes = {"name": str, "timestamp": str, "metadata": dict, "invocation_id": str}
    fits = all(isinstance(value.get(field), shape | None) for field, shape in shapes.items())
    return value if fits and isinstance(value.get("content"), str | list) else None


def _of_message(name: str, message: Message, created_at: str) -> MsgFields:
    if isinstance(message, Note):
        role = message.role if message.role in ROLES else "system"
        return MsgFields(name, role, role, message.text or dumps(message.body), None, created_at, None)
    at = message.created_at or created_at
    if isinstance(message, ToolResultMessage):
        result = {"type": "tool_result", "id": message.tool_call_id, "name": message.tool_name}
        return MsgFields(name, "system", "system", [{**result, "output": _content(message.content)}], None, at, None)
    role = "assistant" if isinstance(message, AssistantMessage) else "user"
    return MsgFields(name, role, role, _content(message.content), None, at, None)


def _content(blocks: Sequence[Block]) -> str | list[Any]:
    if len(blocks) == 1 and isinstance(blocks[0], TextContent):
        return blocks[0].text
    return [_block(block) for block in blocks]


def _block(block: Block) -> Any:
    match block:
        case TextContent():
            return {"type": "text", "text": block.text}
        case ImageContent():
            return {
                "type": "image",
                "source": {"type": "base64", "media_type": block.mime_type, "data": block.data},
            }
        case ThinkingContent():
            return {"type": "thinking", "thinking": block.thinking}
        case ToolCall():
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments}
        case _:
            return block.data
