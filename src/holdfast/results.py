"""What a run came to."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from holdfast.errors import ProviderError
from holdfast.messages import Message, Usage


class RunResult(Struct, frozen=True):
    """What a run came to.

    `stop_reason` is stop, length, error or aborted; stopped, if a tool or a middleware ended the run; or the limit that
    did: turn_limit, token_limit, cost_limit, time_limit. `messages` are those that the run added. `output` is the value
    that was asked for with `output=`.
    """

    run_id: str
    text: str
    messages: list[Message]
    stop_reason: str
    usage: Usage
    error: ProviderError | None = None
    output: Any = None

    def raise_for_error(self) -> None:
        """Raise the model's failure, if that is how the run ended."""
        if self.error is not None:
            raise self.error
