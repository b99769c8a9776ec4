"""What stays the same from run to run of an agent, the checks of its options, and the limits of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from msgspec import Struct

from byssus.errors import InputError
from byssus.messages import Usage
from byssus.middleware import Chain
from byssus.providers.model_call import Patience, Route
from byssus.signals import Aborted, Signal, until_aborted
from byssus.tools import Tool
from byssus.values.results import StopReason

T = TypeVar("T")


SHORT = 1_000  # messages: a thread that is not longer is loaded as a whole


class Limits(Struct, frozen=True):
    """Limits that stop a run: turns, tokens (input and output), cost, and seconds of wall time. None: no limit.

    Two others refuse calls of tools that are agents: `children` limits how many child threads a run begins, and `depth`
    how many levels of them there can be below a thread.
    """

    turns: int | None = 100
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None
    children: int | None = 64
    depth: int | None = 4

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise InputError(f"the limit on {name} must be a number above 0, or None for no limit; got {value!r}")

    def reached(self, turns: int, usage: Usage) -> StopReason | None:
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
    last: int | None = None  # messages that are loaded; None: all
    depth: int = 0  # how many threads are above this one

    async def unless_aborted(self, hook: Coroutine[Any, Any, T], signal: Signal) -> T:
        """A hook may hang; an abort does not wait for it. Without hooks there is nothing to wait for."""
        if self.middleware.is_empty:
            return await hook
        return await until_aborted(hook, signal, self.patience.grace)

    async def checked(self, hooks: Coroutine[Any, Any, T], signal: Signal, *, withheld: T) -> T:
        """Apply hooks to a reply or result that exists already. They run briefly even in an aborted run, because it
        cannot be stored without them; if they take longer, it is withheld."""
        try:
            if signal.aborted and not self.middleware.is_empty:
                return await asyncio.wait_for(hooks, self.patience.grace)
            return await self.unless_aborted(hooks, signal)
        except (Aborted, TimeoutError):
            return withheld


# --- the options of an agent ------------------------------------------------------------------------------------------


def tools_by_name(tools: Iterable[Tool[..., Any] | Callable[..., Any]]) -> dict[str, Tool[Any, Any]]:
    named: dict[str, Tool[Any, Any]] = {}
    if not isinstance(tools, Iterable):
        raise InputError(f"tools must be a list of functions, got {tools!r}")
    for item in tools:
        if not callable(item):
            raise InputError(f"a tool must be a function, with @tool or without; got {item!r}")
        tool = item if isinstance(item, Tool) else Tool(item)
        if tool.name in named:
            raise InputError(
                f"two tools are named {tool.name!r}; give one of them another name: @tool(name=...), or "
                "mcp_tools(prefix=...)"
            )
        if tool.recovery == "check" and not tool.has_check:
            raise InputError(
                f"tool {tool.name!r} has recovery='check' and nothing to check with; pass check=..., or decorate a "
                f"function of a ToolContext with @{tool.name}.check"
            )
        named[tool.name] = tool
    return named


def is_stored(checkpointer: object, thread_id: object, at: object) -> bool:
    """Whether an agent with these options stores its thread; False for an agent in memory."""
    if at is not None and (checkpointer is None or thread_id is None):
        raise InputError(f"at={at!r:.80} needs checkpointer=... and thread_id=...: the thread that it is a point of")
    if checkpointer is None and thread_id is None:
        return False
    if checkpointer is None:
        raise InputError(
            f"thread_id={thread_id!r} without a checkpointer: nothing would be stored; pass checkpointer=... too, "
            "or leave both out to work in memory"
        )
    if not (hasattr(type(checkpointer), "store") and hasattr(checkpointer, "lease_seconds")):
        raise InputError(
            f"checkpointer must be a checkpointer, for example SQLiteCheckpointer('chat.db'), got {checkpointer!r}; "
            "an AgentStorage can be open on the same database at the same time"
        )
    if thread_id is None:
        raise InputError("a checkpointer without a thread_id: pass thread_id=... to name the thread")
    return True


def checked_every(every: object, checkpointer: object) -> int:
    """After how many turns a checkpoint is made; 0: never."""
    turns = 1 if every == "turn" else 0 if every is None else every
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < (every is not None):
        raise InputError(f"checkpoint_every must be 'turn', a number of turns from 1 up, or None; got {every!r:.80}")
    if turns and checkpointer is None:
        raise InputError(f"checkpoint_every={every!r} without a checkpointer: pass checkpointer=... and thread_id=...")
    return turns


def messages_to_load(history: object, middleware: Chain) -> int | None:
    """How many messages from the end of a thread an agent loads; None: all."""
    if history == "all":
        return None
    if history == "auto":
        return SHORT if middleware.asks_for_earlier else None
    if isinstance(history, bool) or not isinstance(history, int) or not 0 < history < 2**53:
        raise InputError(f"history must be 'auto', 'all', or a number of messages from 1 up; got {history!r:.80}")
    return history


def checked_strict(durability: object, checkpointer: object) -> bool:
    """Whether nothing of a reply is published before it is committed."""
    if durability not in ("normal", "strict"):
        raise InputError(f"stream_durability must be 'normal' or 'strict', got {durability!r:.80}")
    if durability == "strict" and checkpointer is None:
        raise InputError("stream_durability='strict' without a checkpointer: pass checkpointer=... and thread_id=...")
    return durability == "strict"


def checked_flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r:.80}")
    return value


def check_options(tool_mode: object, system_prompt: object, limits: object) -> None:
    if tool_mode not in ("parallel", "sequential"):
        raise InputError(f"tool_mode must be 'parallel' or 'sequential', got {tool_mode!r}")
    if not isinstance(system_prompt, str):
        raise InputError(f"system_prompt must be a string, got {system_prompt!r:.80}")
    if not isinstance(limits, Limits | None):
        raise InputError(f"limits must be Limits(...), for example Limits(turns=20); got {limits!r:.80}")


def patience(
    max_retries: int,
    idle_timeout: float | None,
    abort_grace: float,
    listener_timeout: float,
    save_partial: float | None,
    *,
    is_strict: bool,
) -> Patience:
    """How long a model call is pursued, and how often its reply is saved. Raises for what is no time."""
    if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
        raise InputError(f"max_retries must be a whole number from 0 up, got {max_retries!r}")
    for name, seconds in (("idle_timeout", idle_timeout), ("save_partial", save_partial)):
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise InputError(f"{name} must be a number of seconds above 0, or None; got {seconds!r}")
    for name, seconds in (("abort_grace", abort_grace), ("listener_timeout", listener_timeout)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
            raise InputError(f"{name} must be a number of seconds from 0 up, got {seconds!r:.80}")
    return Patience(max_retries, idle_timeout, abort_grace, save_partial, is_strict)
