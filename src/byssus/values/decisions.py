"""What people and policies decide about a tool call: whether it may run, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct, field

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
APPROVE: Final = "approve"
DENY: Final = "deny"
RESULT: Final = "result"
_MOST_APPROVERS = 100


class Approve(Struct, frozen=True):
    """An answer that lets a call run. With `arguments`, the tool gets these instead of the model's.

    The ledger keeps both, and the model reads in the result that a person has changed the arguments.
    """

    arguments: dict[str, Any] | None = None


class Deny(Struct, frozen=True):
    """Denies a tool call; the model reads the reason. Return it from `before_tool_call`, or pass it as an answer."""

    reason: str


Answer: TypeAlias = Literal["approve", "deny"] | Approve | Deny | ToolResult


class Ask(Struct, frozen=True):
    """A person must approve the call before it runs. From `before_tool_call`, or as `@tool(approval=Ask(...))`.

    `approvers` different people must approve; one denial is enough to deny. After `expires` seconds without an answer,
    `default` is the answer: "deny", "approve", `Deny(reason)` or `ToolResult(...)`.
    """

    question: str = ""
    approvers: int = 1
    expires: float | None = None
    default: Answer = DENY

    def __post_init__(self) -> None:
        if not isinstance(self.question, str):
            raise InputError(f"a question must be a string, got {self.question!r:.80}")
        if (
            isinstance(self.approvers, bool)
            or not isinstance(self.approvers, int)
            or not 1 <= self.approvers <= _MOST_APPROVERS
        ):
            raise InputError(f"approvers must be a number from 1 to {_MOST_APPROVERS}, got {self.approvers!r:.80}")
        seconds = self.expires
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e9
        ):
            raise InputError(f"expires must be a number of seconds above 0, or None; got {seconds!r:.80}")
        encode_answer(self.default)  # raises for what is no answer
        if approval_in(self.default).arguments is not None:
            raise InputError("a default answer cannot change the arguments, because no person would have seen them")
        if self.lets_run and self.approvers > 1:
            raise InputError(
                f"approvers={self.approvers} with default='approve' would let the call run without them; "
                "use default='deny'"
            )

    @property
    def lets_run(self) -> bool:
        """Whether the default answer lets the call run."""
        return is_approval(self.default)


def joined(one: Ask, other: Ask | None) -> Ask:
    """One question for two: with the stricter demands of both.

    A default answer that lets the call run counts only if both questions have one.
    """
    if other is None:
        return one
    expiring = [ask for ask in (one, other) if ask.expires is not None]
    refusing = [ask for ask in expiring if not ask.lets_run]
    approvers = max(one.approvers, other.approvers)
    question = one.question or other.question
    if refusing:
        first = min(refusing, key=lambda ask: ask.expires or 0)
        return Ask(question, approvers, first.expires, first.default)
    if len(expiring) == 2 and approvers == 1:
        last = max(expiring, key=lambda ask: ask.expires or 0)
        return Ask(question, approvers, last.expires, last.default)
    return Ask(question, approvers)


class Approval(Struct, frozen=True):
    """One of several approvals that a call needs: who gave it, when, and from where."""

    by: str
    at: str
    source: str | None = None


class Pending(Struct, frozen=True):
    """A tool call that waits for a person.

    `reason` is "approval" (it has not run) or "recovery" (it was interrupted, and may or may not have taken effect).
    `approvals` are those that were given so far, if it needs several `approvers`. At `expires_at` the answer is
    `default`: "approve", "deny" or "result". `user_id` is the user that the thread belongs to. `thread_id` is "" for an
    agent without a checkpointer.
    """

    thread_id: str
    call_id: str
    tool_name: str
    arguments: dict[str, Any]
    reason: Why
    question: str
    asked_at: str
    namespace: str = ""
    user_id: str | None = None
    approvers: int = 1
    approvals: list[Approval] = field(default_factory=list)
    expires_at: str | None = None
    default: str | None = None


class Decision(NamedTuple):
    """An answer, as it is acted upon."""

    is_approved: bool
    reason: str = ""
    result: ToolResultMessage | None = None
    ends_run: bool = False


def is_approval(answer: object) -> bool:
    return isinstance(answer, Approve) or (isinstance(answer, str) and answer == APPROVE)


def approval_in(answer: object) -> Approve:
    """The approval that an answer is; an empty one for any other answer."""
    return answer if isinstance(answer, Approve) else Approve()


def encode_answer(answer: object) -> str:
    """A person's answer, as it is stored."""
    if is_approval(answer):
        return checked_dumps({"decision": APPROVE})
    if isinstance(answer, str) and answer == DENY:
        return checked_dumps({"decision": DENY, "reason": ""})
    if isinstance(answer, Deny) and isinstance(answer.reason, str):
        return checked_dumps({"decision": DENY, "reason": answer.reason})
    if isinstance(answer, ToolResult):
        result = json.loads(encode(_as_message(answer)))
        return checked_dumps({"decision": RESULT, "result": result, "end_run": bool(answer.end_run)})
    raise InputError(
        f"an answer is 'approve', 'deny', Approve(arguments=...), Deny('reason') or ToolResult(...); got {answer!r:.80}"
    )


def decode_answer(text: str) -> Decision:
    value = json.loads(text)
    if value["decision"] == APPROVE:
        return Decision(is_approved=True)
    if value["decision"] == DENY:
        return Decision(is_approved=False, reason=value["reason"])
    result = decode(json.dumps(value["result"]))
    assert isinstance(result, ToolResultMessage)
    return Decision(is_approved=False, result=result, ends_run=value.get("end_run", False))


def kind_of(text: str | None) -> str | None:
    """Which kind of answer a stored one is: "approve", "deny" or "result"."""
    return None if text is None else str(json.loads(text)["decision"])


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
