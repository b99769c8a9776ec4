"""What a program can read of an agent: `agent.state`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from byssus.errors import NotLoaded
from byssus.messages import Message, Usage
from byssus.run.journal import History
from byssus.values.results import usage_of


class Known(NamedTuple):
    """What an agent knows at the moment."""

    history: History
    thread_id: str | None
    is_running: bool
    error: BaseException | None


class AgentState:
    """The current state of an agent. Read-only, except `extra`, which your program may change."""

    def __init__(self, known: Callable[[], Known]) -> None:
        self._known = known

    @property
    def messages(self) -> list[Message]:
        """The thread's history, or the end of it: see `has_earlier`.

        Raises `NotLoaded` before the first run or `load()` of an agent with a checkpointer.
        """
        return self._loaded("state.messages").messages

    @property
    def has_earlier(self) -> bool:
        """Whether the thread has messages before `messages`. `agent.earlier()` loads them."""
        return self._loaded("state.has_earlier").earlier_count > 0

    @property
    def first_seq(self) -> int:
        """The position in the thread's log at which `messages` begins."""
        return self._loaded("state.first_seq").first_seq

    @property
    def extra(self) -> dict[str, Any]:
        """A JSON object that is stored with the thread when a run ends."""
        return self._known().history.extra

    @property
    def is_streaming(self) -> bool:
        """Whether a run is in progress."""
        return self._known().is_running

    @property
    def error(self) -> BaseException | None:
        """The error of the last run, or None."""
        return self._known().error

    @property
    def usage(self) -> Usage:
        """Tokens and cost of all replies in `messages`. Raises `NotLoaded` as `messages` does."""
        return usage_of(self._loaded("state.usage").messages)

    def __repr__(self) -> str:
        history = self._known().history
        known = f"{len(history.messages)} messages" if history.is_loaded else "not loaded"
        return f"AgentState({known}, {'running' if self.is_streaming else 'idle'})"

    def _loaded(self, what: str) -> History:
        """The history; raises `NotLoaded` if that is not known yet."""
        known = self._known()
        if not known.history.is_loaded:
            raise NotLoaded(known.thread_id or "", what)
        return known.history
