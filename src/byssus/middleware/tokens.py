"""About how many tokens a model call will take, so that they can be set aside before it is made."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from byssus.messages import AssistantMessage, dumps
from byssus.middleware.windows import estimate_text, estimate_tokens
from byssus.providers.base import Model, Request

SHORTEST_REPLY = 16  # tokens: a model that may say less than that is not worth asking
_USUAL_REPLY = 4_096  # where nothing says how long a reply may get


def needed(request: Request, models: Iterable[Model]) -> tuple[int, int]:
    """What the question takes, and what the reply may take at most, as far as is known, whichever model gives it.

    The service itself has counted all up to the last reply; only what came after that has to be estimated.
    """
    asked = 0
    for message in reversed(request.messages):
        if isinstance(message, AssistantMessage) and (told := message.usage.plausible().total):
            asked += told
            break
        asked += estimate_tokens(message)
    else:
        asked += estimate_text(request.system_prompt)
        asked += sum(estimate_text(f"{tool.name}{tool.description}{dumps(tool.parameters)}") for tool in request.tools)
    return asked, max(model.max_tokens or _USUAL_REPLY for model in models)


def shortened(model: Model, longest: int) -> Model:
    """The model, which may say no more than that."""
    return msgspec.structs.replace(model, max_tokens=min(longest, model.max_tokens or longest))
