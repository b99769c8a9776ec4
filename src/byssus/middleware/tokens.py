"""Estimates of the tokens of a model call, so that they can be reserved before the call is made."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from byssus.messages import AssistantMessage, dumps
from byssus.middleware.windows import estimate_text, estimate_tokens
from byssus.providers.base import Model, Request

SHORTEST_REPLY = 16  # tokens: with a lower limit, the model is not called
_USUAL_REPLY = 4_096  # if the model has no limit


def needed(request: Request, models: Iterable[Model]) -> tuple[int, int]:
    """Return the estimated tokens of the request, and the highest possible number of the reply, for any of the models.

    The service has counted everything up to the last reply; only later messages are estimated.
    """
    asked = 0
    for message in reversed(request.messages):
        if isinstance(message, AssistantMessage) and (counted := message.usage.plausible().total):
            asked += counted
            break
        asked += estimate_tokens(message)
    else:
        asked += estimate_text(request.system_prompt)
        asked += sum(estimate_text(f"{tool.name}{tool.description}{dumps(tool.parameters)}") for tool in request.tools)
    return asked, max(model.max_tokens or _USUAL_REPLY for model in models)


def shortened(model: Model, longest: int) -> Model:
    """Return the model with `max_tokens` limited to `longest`."""
    return msgspec.structs.replace(model, max_tokens=min(longest, model.max_tokens or longest))
