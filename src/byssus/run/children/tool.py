"""An agent as a tool of another agent.

Each call gets an agent of its own, with the same settings, on a thread of its own: a child of the thread of the call.
What such a call needs of the agent is `ChildAgent`; `calls.py` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from byssus.errors import InputError
from byssus.events import Event
from byssus.run.journal import Journal
from byssus.run.known.state import AgentState
from byssus.run.outside.handing_over import HandOver
from byssus.run.settings import Setup
from byssus.signals import Signal
from byssus.tools import Tool
from byssus.values.decisions import Ask
from byssus.values.results import RunResult
from byssus.values.thread_key import ThreadKey

_TASK = "What to do, with everything that must be known for it: this conversation is not seen there."


class Above(NamedTuple):
    """What reaches a child's run from its parent's run: an abort, and a request to hand the thread over."""

    signal: Signal
    handing: HandOver


class Below(NamedTuple):
    """Where the agent of a call works: a thread of a database, or in memory."""

    database: Any = None  # a checkpointer
    thread: ThreadKey | None = None
    user_id: str | None = None
    depth: int = 1  # 0 is the thread that no call has made
    deepest: int | None = None
    is_strict: bool = False  # whether nothing is published before it is committed


class ChildAgent(Protocol):
    """What a call needs of its agent."""

    @property
    def state(self) -> AgentState: ...
    async def prompt(self, message: str, *, output: Any = None, key: str | None = None) -> RunResult[Any]: ...
    async def resume(self, *, output: Any = None) -> RunResult[Any]: ...
    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]: ...


class MadeAgent(NamedTuple):
    """The agent of a call, its journal, and what makes its runs follow a run of the parent."""

    agent: ChildAgent
    journal: Journal
    lead: Callable[[Above], None]


class AgentTool(Tool[[str], Any]):
    """A tool that is an agent. A call can always be resumed: its thread knows what was done."""

    def __init__(
        self,
        name: str,
        description: str,
        make: Callable[[Below], MadeAgent],
        *,
        output: type[Any] | None,
        sequential: bool,
        approval: bool | Ask,
    ) -> None:
        if not isinstance(name, str) or not isinstance(description, str):
            raise InputError(f"as_tool takes a name and a description, got {name!r:.80} and {description!r:.80}")
        if not name:
            raise InputError("a tool's name must be 1 to 64 letters, digits, _ or -, got ''")

        async def ask(task: Annotated[str, _TASK]) -> Any:
            result = await make(Below()).agent.prompt(task, output=output)
            result.raise_for_error()
            return result.text if output is None else result.output

        super().__init__(
            ask,
            name=name,
            description=description or f"Give a task to the agent {name}. It returns its answer.",
            sequential=sequential,
            recovery="retry",
            approval=approval,
            max_attempts=None,  # its tools have their own policies
        )
        self.make = make
        self.output = output


def settings_below(setup: Setup, place: Below) -> Setup:
    """The settings of an agent, for a call of another agent. No thread is deeper than the first of them allows."""
    depths = [each for each in (setup.limits.depth, place.deepest) if each is not None]
    return msgspec.structs.replace(
        setup,
        thread_id=None if place.thread is None else place.thread.id,
        user_id=place.user_id,
        depth=place.depth,
        limits=msgspec.structs.replace(setup.limits, depth=min(depths, default=None)),
        patience=setup.patience._replace(is_strict=place.is_strict),
    )
