"""The seam between byssus and a model.

A provider has a name and one verb. `stream` is a plain function that returns an async iterator of stream events:

- it raises immediately, before anything is streamed, only for mistakes of the program (no key, an empty script);
- while it streams, a failure is a raised `ProviderError`; the run turns it into the final message;
- it may be cancelled between any two events, and should then release its connection.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from byssus.errors import InputError
from byssus.events import StreamEvent
from byssus.messages import Message, Usage
from byssus.signals import Signal


class Prices(Struct, frozen=True):
    """Prices of a million tokens."""

    input: float = 0.0
    output: float = 0.0
    cache_read: float = 0.0
    cache_write: float = 0.0


Reasoning: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # not all models know all


class Model(Struct, frozen=True):
    """A model and its settings. None leaves a setting to the service.

    `provider` names the provider that serves it; it is needed if an agent has several. `reasoning` is the effort of
    thinking: "low", "medium" or "high" (some models also know "none", "minimal", "xhigh" or "max"), or a number of
    tokens. `context_window` is in tokens.
    """

    id: str
    provider: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    reasoning: Reasoning | int | None = None
    context_window: int | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        _refuse_unless(isinstance(self.id, str) and bool(self.id.strip()), "id", self.id, "the name of a model")
        _refuse_unless(isinstance(self.provider, str), "provider", self.provider, "the name of a provider, a string")
        for name, tokens in (("max_tokens", self.max_tokens), ("context_window", self.context_window)):
            _refuse_unless(_is_number(tokens, int) and tokens != 0, name, tokens, "a number of tokens above 0, or None")
        _refuse_unless(
            _is_number(self.temperature, int | float), "temperature", self.temperature, "a number from 0 up, or None"
        )
        _refuse_unless(
            isinstance(self.reasoning, str) or _is_number(self.reasoning, int),
            *("reasoning", self.reasoning, "'low', 'medium' or 'high', a number of tokens, or None"),
        )
        _refuse_unless(isinstance(self.prices, Prices | None), "prices", self.prices, "Prices(...), or None")

    def cost(self, usage: Usage) -> float:
        """The cost of the usage, in the unit of the prices; 0.0 without prices."""
        if self.prices is None:
            return 0.0
        prices, usage = self.prices, usage.plausible()
        spent = (
            usage.input * prices.input
            + usage.output * prices.output
            + usage.cache_read * prices.cache_read
            + usage.cache_write * prices.cache_write
        )
        return spent / 1_000_000


def _is_number(value: object, kinds: Any) -> bool:
    """Whether it is a number from 0 up, or left to the service."""
    return value is None or (isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < math.inf)


def _refuse_unless(fits: bool, field: str, value: object, wanted: str) -> None:
    if not fits:
        raise InputError(f"Model({field}={value!r:.80}): {field} must be {wanted}")


class ToolSpec(Struct, frozen=True):
    """A tool as a model sees it: `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


class Request(Struct, frozen=True):
    """One model call: a valid history, the tools, and the JSON schema of the output, if any."""

    model: Model
    messages: Sequence[Message]
    system_prompt: str = ""
    tools: Sequence[ToolSpec] = ()
    output: dict[str, Any] | None = None


class Provider(Protocol):
    """Anything that can answer a request as a stream of events.

    A provider with structured output has an attribute `structured_output = True` and follows `request.output`, a JSON
    schema. A provider can have a method `check()` that raises if a package or a key is missing; a run calls it before
    it stores anything.
    """

    @property
    def name(self) -> str:
        """The name by which a `Model` selects this provider."""

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        """Send the request and yield the reply as stream events; raise a `ProviderError` on failure."""
