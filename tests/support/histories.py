"""An independent judge of histories: written from the rules of the services, not from the code."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from byssus.messages import (
    AssistantMessage,
    Message,
    ModelMessage,
    Note,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
)


def says_something(message: ModelMessage) -> bool:
    return any(
        bool(block.text.strip()) if isinstance(block, TextContent) else not isinstance(block, ThinkingContent)
        for block in message.content
    )


def flaws(history: Sequence[Message]) -> list[str]:
    """All reasons for which a service would refuse this conversation. Written from the rules, not from the code."""
    found: list[str] = []
    if history and history[0].role != "user":
        found.append(f"begins with {history[0].role}")
    due: list[str] = []
    for position, message in enumerate(history):
        if isinstance(message, ToolResultMessage):
            if not due:
                found.append(f"{position}: a result without a call")
            elif due.pop(0) != message.tool_call_id:
                found.append(f"{position}: a result out of order")
            continue
        if due:
            found.append(f"{position}: calls {due} have no result")
            due = []
        if isinstance(message, Note):
            found.append(f"{position}: a note")
            continue
        if not says_something(message):
            found.append(f"{position}: an empty {message.role} message")
        if any(isinstance(block, TextContent) and not block.text.strip() for block in message.content) and isinstance(
            message, AssistantMessage
        ):
            found.append(f"{position}: an empty text block")
        if isinstance(message, AssistantMessage):
            due = [block.id for block in message.content if isinstance(block, ToolCall)]
    if due:
        found.append(f"calls {due} have no result at the end")
    if history and isinstance(last := history[-1], AssistantMessage) and last.failed:
        found.append("ends with a reply that broke off")
    return found


def without_ids(history: Sequence[Message]) -> list[Message]:
    """The same conversation, whatever the calls are named by."""
    return [_without_id(message) for message in history]


def _without_id(message: Message) -> Message:
    if isinstance(message, ToolResultMessage):
        return msgspec.structs.replace(message, tool_call_id="")
    if isinstance(message, AssistantMessage):
        calls = (isinstance(block, ToolCall) for block in message.content)
        content = [
            msgspec.structs.replace(block, id="") if is_call else block
            for block, is_call in zip(message.content, calls, strict=True)
        ]
        return msgspec.structs.replace(message, content=content)
    return message


def shared_ids(history: Sequence[Message]) -> list[str]:
    """The ids of calls that a service would refuse: empty ones, and those that more than one call has."""
    replies = [message for message in history if isinstance(message, AssistantMessage)]
    ids = [call.id for reply in replies for call in reply.tool_calls]
    return [call_id for call_id in ids if not call_id or ids.count(call_id) > 1]
