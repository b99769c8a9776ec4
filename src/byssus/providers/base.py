"""The seam between byssus and a model.

A provider has a name and one verb. `stream` is a plain function that returns an async iterator of stream events:

- it raises at once, before anything is streamed, only for mistakes of the program (no key, a script without a step);
- while it streams, a failure is a raised `ProviderError`; the run turns it into the final message;
- it may be cancelled between any two events, and should then give its connection back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from msgspec import Struct

from byssus.events import StreamEvent
from byssus.messages import Message, Usage
from byssus.signals import Signal


class Prices(Struct, frozen=True):
    """What a million tokens cost."""

    input: float = 0.0
    output: float = 0.0
    cache_read: float = 0.0
    cache_write: float = 0.0


class Model(Struct, frozen=True):
    """Which model to ask and how. What is None is left to the service.

    `provider` names the provider that serves it, which matters when an agent has several. `reasoning` is how hard the
    model shall think: "low", "medium" or "high", or a number of tokens. `context_window` is in tokens.
    """

    id: str
    provider: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    reasoning: str | int | None = None
    context_window: int | None = None
    prices: Prices | None = None

    def cost(self, usage: Usage) -> float:
        """What the usage costs, in the unit of the prices; 0.0 without prices."""
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


class ToolSpec(Struct, frozen=True):
    """A tool as a model sees it: `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


class Request(Struct, frozen=True):
    """One question to a model: a valid history, what it may use, and the JSON schema of its answer, if it has one."""

    model: Model
    messages: Sequence[Message]
    system_prompt: str = ""
    tools: Sequence[ToolSpec] = ()
    output: dict[str, Any] | None = None


class Provider(Protocol):
    """Anything that can answer a request as a stream of events.

    One that has a mechanism for structured output says so with an attribute `structured_output = True`, and obeys
    `request.output`, a JSON schema. One that can tell beforehand what it lacks (a package, a key) has a method
    `check()`, which raises it; a run calls that before it stores anything.
    """

    @property
    def name(self) -> str:
        """The name by which a `Model` asks for this provider."""

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        """Send the request and yield the reply as stream events; raise a `ProviderError` on failure."""
