"""What stays the same from run to run of an agent, and how far a run may go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from msgspec import Struct

from byssus.errors import InputError
from byssus.messages import Usage
from byssus.middleware import Chain
from byssus.providers.model_call import Patience, Route
from byssus.signals import Aborted, Signal, until_aborted
from byssus.tools import Tool

T = TypeVar("T")


class Limits(Struct, frozen=True):
    """Where a run is stopped: turns, tokens (all of them), cost, and seconds of wall time. None: no limit."""

    turns: int | None = 100
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise InputError(f"the limit on {name} must be a number above 0, or None for no limit; got {value!r}")

    def reached(self, turns: int, usage: Usage) -> str | None:
        """The stop reason of the first limit that has been reached."""
        if self.turns is not None and turns >= self.turns:
            return "turn_limit"
        if self.tokens is not None and usage.total >= self.tokens:
            return "token_limit"
        if self.cost is not None and usage.cost >= self.cost:
            return "cost_limit"
        return None


class Setup(Struct, frozen=True):
    """What stays the same from run to run of an agent."""

    routes: list[Route]
    system_prompt: str
    tools: dict[str, Tool[Any, Any]]
    sequential: bool
    middleware: Chain
    limits: Limits
    patience: Patience
    thread_id: str | None
    user_id: str | None
    checkpoint_every: int = 0  # turns; 0: never

    async def unless_aborted(self, hook: Coroutine[Any, Any, T], signal: Signal) -> T:
        """A hook may hang; an abort does not wait for it. Without hooks there is nothing to wait for."""
        if self.middleware.is_empty:
            return await hook
        return await until_aborted(hook, signal, self.patience.grace)

    async def checked(self, hooks: Coroutine[Any, Any, T], signal: Signal, *, withheld: T) -> T:
        """What hooks make of something that is already there. They get a moment also in an aborted run, because it
        cannot be kept without them; if they need longer, it is withheld."""
        try:
            if signal.aborted and not self.middleware.is_empty:
                return await asyncio.wait_for(hooks, self.patience.grace)
            return await self.unless_aborted(hooks, signal)
        except (Aborted, TimeoutError):
            return withheld
