"""What people and policies decide about a tool call: whether it may run, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from byssus.errors import InputError
from byssus.messages import (
    Block,
    ImageContent,
    ToolResultMessage,
    checked_dumps,
    decode,
    encode,
    image_type,
)
from byssus.values.results import ToolResult

Recovery: TypeAlias = Literal["never", "retry", "check", "ask"]
Why: TypeAlias = Literal["approval", "recovery"]

APPROVAL, RECOVERY = "approval", "recovery"


class Deny(Struct, frozen=True):
    """Denies a tool call; the model reads the reason. Return it from `before_tool_call`, or pass it as an answer."""

    reason: str


class Ask(Struct, frozen=True):
    """Requires a person's approval before the call runs. Return it from `before_tool_call`."""

    question: str = ""


class Pending(Struct, frozen=True):
    """A tool call that waits for a person.

    `reason` is "approval" (it has not run) or "recovery" (it was interrupted, and may or may not have taken effect).
    """

    thread_id: str | None
    call_id: str
    tool_name: str
    arguments: dict[str, Any]
    reason: Why
    question: str
    asked_at: str


Answer: TypeAlias = str | Deny | ToolResult

APPROVE, DENY = "approve", "deny"


class Decision(NamedTuple):
    """An answer, as it is acted upon."""

    is_approved: bool
    reason: str = ""
    result: ToolResultMessage | None = None
    ends_run: bool = False


def encode_answer(answer: object) -> str:
    """A person's answer, as it is stored."""
    if isinstance(answer, str) and answer == APPROVE:
        return checked_dumps({"decision": APPROVE})
    if isinstance(answer, str) and answer == DENY:
        return checked_dumps({"decision": DENY, "reason": ""})
    if isinstance(answer, Deny) and isinstance(answer.reason, str):
        return checked_dumps({"decision": DENY, "reason": answer.reason})
    if isinstance(answer, ToolResult):
        result = json.loads(encode(_as_message(answer)))
        return checked_dumps({"decision": "result", "result": result, "end_run": bool(answer.end_run)})
    raise InputError(f"an answer is 'approve', 'deny', Deny('reason') or ToolResult(...); got {answer!r:.80}")


def decode_answer(text: str) -> Decision:
    value = json.loads(text)
    if value["decision"] == APPROVE:
        return Decision(is_approved=True)
    if value["decision"] == DENY:
        return Decision(is_approved=False, reason=value["reason"])
    result = decode(json.dumps(value["result"]))
    assert isinstance(result, ToolResultMessage)
    return Decision(is_approved=False, result=result, ends_run=value.get("end_run", False))


def _as_message(result: ToolResult) -> ToolResultMessage:
    content: Any = result.content
    if isinstance(content, Block):
        content = [content]
    is_content = isinstance(content, str) or (
        isinstance(content, Sequence) and bool(content) and all(isinstance(item, Block) for item in content)
    )
    try:
        text = content if is_content else checked_dumps(content)
        message = ToolResultMessage("", "", text, result.details, bool(result.is_error))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the answer's result cannot be stored as JSON: {error}") from error
    if any(isinstance(block, ImageContent) and image_type(block) is None for block in message.content):
        raise InputError("the answer's result has an image that is none: pass the base64 of a PNG, JPEG, GIF or WebP")
    return message
