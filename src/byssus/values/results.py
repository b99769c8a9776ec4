"""What a run came to, and what a tool did."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from byssus.errors import ByssusError
from byssus.messages import Message, Usage


class ToolResult(Struct):
    """A tool's answer in full. The model sees `content`; `details` are kept for programs and people.

    Both may be anything: text and images, or a value that is shown as JSON. `end_run` ends the run after this turn.
    """

    content: Any = None
    details: Any = None
    is_error: bool = False
    end_run: bool = False


class RunResult(Struct, frozen=True):
    """What a run came to.

    `stop_reason` is stop, length, error or aborted; stopped, if a tool or a middleware ended the run; waiting, if tool
    calls wait for a person (`agent.pending`, `agent.answer`); or the limit that ended it: turn_limit, token_limit,
    cost_limit, time_limit, quota_limit (the user's). `messages` are those that the run added. `output` is the value
    that was asked for with `output=`.
    """

    run_id: str
    text: str
    messages: list[Message]
    stop_reason: str
    usage: Usage
    error: ByssusError | None = None
    output: Any = None

    def raise_for_error(self) -> None:
        """Raise the model's failure, or that the user's quota is used up, if that is how the run ended."""
        if self.error is not None:
            raise self.error
