"""Where a run records what happens: what a run needs of it, and the one that is only in memory.

A journal holds the history that the agent goes on from. The one that keeps it in a thread of a store is
`thread_journal.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from byssus.errors import InputError
from byssus.messages import AssistantMessage, Message, ToolCall, ToolResultMessage, UserMessage
from byssus.providers import history
from byssus.queries.log import tool_calls
from byssus.queries.log.tool_calls import ANSWERED, STARTED, WAITING, LedgerEntry
from byssus.signals import Signal
from byssus.store.keeper import LOST
from byssus.threads.encoding import encode_extra
from byssus.threads.inbox import Modes, Receipt, Waiting
from byssus.values.checkpoints import NewCheckpoint
from byssus.values.decisions import Pending
from byssus.values.marks import MarkedMessages
from byssus.values.release import Release

__all__ = [
    "ANSWERED",
    "LOST",
    "STARTED",
    "WAITING",
    "Journal",
    "LedgerEntry",
    "MemoryJournal",
    "pending",
]


class Journal(Protocol):
    """What a run needs of its record. Each of the writes is durable when it returns."""

    messages: list[Message]
    extra: dict[str, Any]
    unsaved: dict[tuple[str, int], ToolResultMessage]  # results whose write failed, by reply key and place
    entries: dict[int, LedgerEntry]  # what is known of the last reply's calls, by their place in it
    partial: AssistantMessage | None  # what had arrived of a reply when its run was interrupted
    is_interrupted: bool  # whether an earlier run did not come to its end
    payer: str | None  # the user whose quota the run spends

    @property
    def reply_key(self) -> str:
        """What tells the last reply apart from any other."""

    def open_calls(self) -> dict[int, ToolCall]:
        """The calls of the last reply that have no result, by their place in it."""

    async def load(self, *, again: bool = False) -> None:
        """Load the history, if it is not known or no longer true; `again` does so in any case."""

    async def begin(self, run_id: str, signal: Signal, messages: Sequence[Message] = ()) -> None:
        """Take the lease and, in the same commit, record the messages. Without any, look at what the thread holds."""

    async def append(
        self,
        messages: Sequence[Message],
        *,
        reserve: int = 0,
        release: Release | None = None,
        checkpoint: NewCheckpoint | None = None,
        spent: int | None = None,
    ) -> None:
        """Add messages; keep places free behind them for as many tool results. `checkpoint` makes a checkpoint of it.

        `spent` is what the model call took that tokens were set aside for.
        """

    async def set_aside(self, wanted: int, least: int) -> int | None:
        """Set tokens of the user's quota aside for a model call: so many, or what is left if that is enough.

        Answers how many that are, and None if nothing limits them. Raises `QuotaExceeded` if less than `least` is left.
        """

    async def checkpoint(self, checkpoint: NewCheckpoint) -> bool:
        """Make a checkpoint of the thread as it stands; False if that is not known just now."""

    async def marked(self, marks: Sequence[str]) -> MarkedMessages:
        """Which messages of the history bear one of these marks."""

    def was_recorded(self, call_index: int) -> bool:
        """Whether the ledger would know if the call had been started: it does, of replies that an agent stored."""

    async def distrust(self, calls: int) -> None:
        """Remember that the ledger knows nothing of the last reply's calls, of which there are so many."""

    async def start(self, call_index: int, entry: LedgerEntry, run_id: str, policy: str) -> None:
        """Record that a call is about to run."""

    async def ask(self, call_index: int, entry: LedgerEntry, run_id: str, policy: str) -> None:
        """Record that a call waits for a person."""

    async def refresh(self) -> None:
        """Look again at what is known of the last reply's calls: somebody may have answered."""

    async def answer(self, call_id: str, answer: str) -> None:
        """Record what a person said about a call."""

    async def settle(
        self, call_index: int, result: ToolResultMessage, status: str, elapsed_ms: float | None = None
    ) -> None:
        """Record a call's result, how it ended, and after how long."""

    def close_turn(self, results: Sequence[ToolResultMessage]) -> None:
        """These calls are settled: their results, in call order, join the history."""

    def send(self, kind: str, message: UserMessage) -> Receipt:
        """Put a message into the inbox, behind all that was sent before."""

    async def waiting(self) -> list[Waiting]:
        """What waits in the inbox."""

    async def withdraw(self, message_id: str) -> bool:
        """Take a message back from the inbox."""

    def has_mail(self, *, stopping: bool) -> bool:
        """Whether something waits in the inbox for this moment, as far as is known here."""

    async def take(self, run_id: str, signal: Signal, *, stopping: bool) -> list[UserMessage]:
        """Move what waits for this moment from the inbox into the history."""

    def save_partial(self, reply: AssistantMessage) -> None:
        """Keep what has arrived of a reply so far; does not wait."""

    def refuse_partial(self) -> None:
        """A hook did not let the reply pass: what was saved of it goes away when the run ends."""

    async def finish(self, release: Release, *, spent: int = 0) -> bool:
        """Save the extra and give the lease back. False: something was said meanwhile, and the lease is still held."""

    def leave(self, *, spent: int = 0) -> None:
        """Let go of the lease without waiting: the run was interrupted."""

    async def tidy(self) -> None:
        """Remove what need not be kept any longer."""


class MemoryJournal:
    """For an agent without a checkpointer: the history lives as long as the agent."""

    def __init__(self, modes: Modes) -> None:
        self.messages: list[Message] = []
        self.extra: dict[str, Any] = {}
        self.unsaved: dict[tuple[str, int], ToolResultMessage] = {}
        self.entries: dict[int, LedgerEntry] = {}
        self.partial: AssistantMessage | None = None
        self.is_interrupted = False
        self.payer: str | None = None
        self._modes = modes
        self._inbox: list[Waiting] = []

    @property
    def reply_key(self) -> str:
        return history.last_reply_id(self.messages) or ""

    def open_calls(self) -> dict[int, ToolCall]:
        return history.open_calls(self.messages)

    async def load(self, *, again: bool = False) -> None:
        pass

    async def begin(self, run_id: str, signal: Signal, messages: Sequence[Message] = ()) -> None:  # noqa: ARG002
        self.messages.extend(messages)

    async def append(
        self,
        messages: Sequence[Message],
        *,
        reserve: int = 0,  # noqa: ARG002
        release: Release | None = None,  # noqa: ARG002
        checkpoint: NewCheckpoint | None = None,  # noqa: ARG002
        spent: int | None = None,  # noqa: ARG002
    ) -> None:
        self.messages.extend(messages)
        self.entries = {}

    async def set_aside(self, wanted: int, least: int) -> int | None:  # noqa: ARG002
        return None

    async def checkpoint(self, checkpoint: NewCheckpoint) -> bool:  # noqa: ARG002
        raise InputError("a checkpoint needs a checkpointer; pass checkpointer=... and thread_id=... to the Agent")

    async def marked(self, marks: Sequence[str]) -> MarkedMessages:  # noqa: ARG002
        return MarkedMessages()

    def was_recorded(self, call_index: int) -> bool:  # noqa: ARG002
        return True

    async def distrust(self, calls: int) -> None:
        pass

    async def start(self, call_index: int, entry: LedgerEntry, run_id: str, policy: str) -> None:  # noqa: ARG002
        self.entries[call_index] = entry

    async def ask(self, call_index: int, entry: LedgerEntry, run_id: str, policy: str) -> None:  # noqa: ARG002
        self.entries[call_index] = entry

    async def refresh(self) -> None:
        pass

    async def answer(self, call_id: str, answer: str) -> None:
        for call_index, entry in self.entries.items():
            if entry.call_id == call_id and entry.status == WAITING:
                self.entries[call_index] = entry._replace(status=ANSWERED, answer=answer)
                return
        raise tool_calls.not_waiting("the agent", call_id, None)

    async def settle(
        self,
        call_index: int,
        result: ToolResultMessage,  # noqa: ARG002
        status: str,  # noqa: ARG002
        elapsed_ms: float | None = None,  # noqa: ARG002
    ) -> None:
        self.entries.pop(call_index, None)

    def close_turn(self, results: Sequence[ToolResultMessage]) -> None:
        self.messages.extend(results)

    def send(self, kind: str, message: UserMessage) -> Receipt:
        assert message.id is not None
        self._inbox.append(Waiting(message.id, kind, message, message.created_at or ""))
        return Receipt(message)

    async def waiting(self) -> list[Waiting]:
        return list(self._inbox)

    async def withdraw(self, message_id: str) -> bool:
        found = [item for item in self._inbox if item.id == message_id][:1]
        self._inbox = [item for item in self._inbox if item not in found]
        return bool(found)

    def has_mail(self, *, stopping: bool) -> bool:
        return any(item.kind in self._modes.limits(stopping=stopping) for item in self._inbox)

    async def take(self, run_id: str, signal: Signal, *, stopping: bool) -> list[UserMessage]:  # noqa: ARG002
        for kind, limit in self._modes.limits(stopping=stopping).items():
            if taken := [item for item in self._inbox if item.kind == kind][:limit]:
                self._inbox = [item for item in self._inbox if item not in taken]
                self.messages.extend(item.message for item in taken)
                return [item.message for item in taken]
        return []

    def save_partial(self, reply: AssistantMessage) -> None:
        pass

    def refuse_partial(self) -> None:
        pass

    async def finish(self, release: Release, *, spent: int = 0) -> bool:  # noqa: ARG002
        encode_extra(self.extra)  # the same mistakes are mistakes here
        return release is not Release.END_IF_INBOX_EMPTY or not self.has_mail(stopping=True)

    def leave(self, *, spent: int = 0) -> None:
        pass

    async def tidy(self) -> None:
        pass


def pending(thread_id: str | None, entries: dict[int, LedgerEntry]) -> list[Pending]:
    """Those of a reply's calls that wait for a person."""
    return [
        Pending(
            thread_id,
            entry.call_id,
            entry.name,
            json.loads(entry.arguments) or {},
            entry.reason or "",
            entry.question or "",
            entry.asked_at or "",
        )
        for _, entry in sorted(entries.items())
        if entry.status == WAITING
    ]
