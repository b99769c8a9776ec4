"""The results of runs and of tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from byssus.errors import ByssusError, InputError
from byssus.messages import AssistantMessage, Message, Usage, checked_dumps, plain
from byssus.values import shown
from byssus.values.inputs import column_text

T = TypeVar("T")

StopReason: TypeAlias = Literal[
    "stop",
    "length",
    "error",
    "aborted",
    "stopped",
    "waiting",
    "turn_limit",
    "token_limit",
    "cost_limit",
    "time_limit",
    "quota_limit",
    "interrupted",
    "handed_over",
]
RunState: TypeAlias = Literal["running", "waiting", "interrupted", "ended"]
_ENDINGS: dict[str, StopReason] = {"length": "length", "error": "error", "aborted": "aborted"}


class ToolResult(Struct):
    """The full result of a tool. The model sees `content`; `details` are stored for programs and people.

    Both may be anything: text and images, or a value that is shown as JSON. `end_run` ends the run after this turn.
    """

    content: Any = None
    details: Any = None
    is_error: bool = False
    end_run: bool = False


class RunAttempt(Struct, frozen=True):
    """What one process did of a run, under one lease of the thread.

    `owner` is where it ran (host and pid). `outcome` is ended, waiting (for a person), interrupted, handed over, or
    lost: the process stopped without a word, and another run took the thread over. Without one, the attempt goes on, or
    its process died and no other has taken over yet.
    """

    number: int
    owner: str
    epoch: int
    began_at: str
    ended_at: str | None = None
    outcome: str | None = None


class RunInfo(Struct, frozen=True):
    """A run as it is stored. Times are ISO 8601 UTC text.

    `state` is running, waiting (a tool call waits for a person), interrupted (`resume()` continues it) or ended.
    `stop_reason` is as in `RunResult`; "interrupted" if another prompt or a rewind took the place of a run that had not
    ended. `cause` is "prompt" or "resume". `started_by` is the user of the agent. `first_seq` and `last_seq` are where
    its messages are in the thread, and `branch` numbers the branch (None if a prune removed it). `attempts` counts the
    processes that drove it, and `retries` the model calls that were repeated after a transient failure.
    """

    id: str
    thread_id: str
    namespace: str
    state: RunState
    branch: int | None
    first_seq: int
    last_seq: int | None
    began_at: str
    ended_at: str | None
    stop_reason: StopReason | None
    error: str | None
    cause: str
    started_by: str | None
    request_key: str | None
    attempts: int
    retries: int


class RunStep(Struct, frozen=True):
    """One step of a run's timeline: when, what kind, in words, and the values behind the words."""

    at: str
    kind: Literal["attempt", "message", "model_call", "tool_call", "answer", "quarantine", "end"]
    text: str
    details: dict[str, Any]


class RunResult(Struct, Generic[T], frozen=True):
    """The result of a run.

    `stop_reason` is stop, length, error or aborted; stopped, if a tool or a middleware ended the run; waiting, if tool
    calls wait for a person (`agent.pending`, `agent.answer`); or the limit that ended it: turn_limit, token_limit,
    cost_limit, time_limit, quota_limit (the user's). It is "interrupted" only where a request key names a run that
    another prompt has replaced, and "handed_over" if the run has not ended and another process goes on with it
    (`agent.hand_over`). `messages` and `usage` are those of the run; after `resume()`, those since then. `output` is
    the value that was asked for with `output=`.
    """

    run_id: str
    text: str
    messages: list[Message]
    stop_reason: StopReason
    usage: Usage
    error: ByssusError | None = None
    output: T = None  # type: ignore[assignment]

    def raise_for_error(self) -> None:
        """Raise the error of the run, if it ended with a failure of the model or an exhausted quota."""
        if self.error is not None:
            raise self.error

    def to_json(self) -> str:
        """The result as one line of JSON; an error is its class and its message."""
        error = self.error
        fields = {
            "run_id": self.run_id,
            "text": self.text,
            "messages": plain(self.messages),
            "stop_reason": self.stop_reason,
            "usage": plain(self.usage),
            "error": None if error is None else {"kind": type(error).__name__, "message": str(error)},
        }
        try:
            return checked_dumps({**fields, "output": msgspec.to_builtins(self.output, enc_hook=_of_pydantic)})
        except (TypeError, ValueError, NotImplementedError) as failure:
            raise InputError(f"output={self.output!r:.80} cannot be written as JSON: {failure}") from failure

    def __str__(self) -> str:
        ending = "" if self.error is None else f"\n[{self.stop_reason}: {type(self.error).__name__}: {self.error}]"
        return column_text(f"{self.text}{ending}".strip())

    def _repr_markdown_(self) -> str:
        ending = f"{self.stop_reason}, {self.usage.total:,} tokens"
        if self.error is not None:
            ending = f"{ending}, {type(self.error).__name__}: {self.error}"
        return column_text(f"{shown.safe_markdown(self.text)}\n\n*{shown.escaped(ending)}*")


def ending_of(reply: AssistantMessage) -> StopReason:
    """The stop reason of a run that ends with this reply. A provider's own stop reason is only in the reply."""
    return _ENDINGS.get(reply.stop_reason, "stop")


def usage_of(messages: Iterable[Message]) -> Usage:
    """Tokens and cost of all replies in these messages."""
    return sum((message.usage.plausible() for message in messages if isinstance(message, AssistantMessage)), Usage())


def _of_pydantic(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise NotImplementedError(f"{type(value).__name__} is no JSON")
    return dump(mode="json")
