"""The results of runs and of tools."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from byssus.errors import ByssusError, InputError
from byssus.messages import Message, Usage, checked_dumps, plain
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
]


class ToolResult(Struct):
    """The full result of a tool. The model sees `content`; `details` are stored for programs and people.

    Both may be anything: text and images, or a value that is shown as JSON. `end_run` ends the run after this turn.
    """

    content: Any = None
    details: Any = None
    is_error: bool = False
    end_run: bool = False


class RunResult(Struct, Generic[T], frozen=True):
    """The result of a run.

    `stop_reason` is stop, length, error or aborted; stopped, if a tool or a middleware ended the run; waiting, if tool
    calls wait for a person (`agent.pending`, `agent.answer`); or the limit that ended it: turn_limit, token_limit,
    cost_limit, time_limit, quota_limit (the user's). `messages` are those that the run added. `output` is the value
    that was asked for with `output=`.
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
        told = {
            "run_id": self.run_id,
            "text": self.text,
            "messages": plain(self.messages),
            "stop_reason": self.stop_reason,
            "usage": plain(self.usage),
            "error": None if error is None else {"kind": type(error).__name__, "message": str(error)},
        }
        try:
            return checked_dumps({**told, "output": msgspec.to_builtins(self.output, enc_hook=_of_pydantic)})
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


def _of_pydantic(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise NotImplementedError(f"{type(value).__name__} is no JSON")
    return dump(mode="json")
