"""Where a run records what happens: in a thread of a store, or only in memory.

A journal holds the history that the agent goes on from. Its list and the disk agree: a message is added to the list
after its commit, and once a write has failed or somebody else has written, the journal is stale and is loaded again
before the next run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.checkpointer import SQLiteCheckpointer, Thread, checked_id, encode_extra, load, stored
from holdfast.errors import ThreadMoved
from holdfast.messages import AssistantMessage, Message, ToolResultMessage
from holdfast.recovery import last_reply_id
from holdfast.store import threads
from holdfast.store.threads import Position


class Journal(Protocol):
    """What a run needs of its record. Each of the writes is durable when it returns."""

    messages: list[Message]
    extra: dict[str, Any]
    unsaved: dict[tuple[str | None, int], ToolResultMessage]  # results whose write failed, by reply id and index

    async def load(self, *, again: bool = False) -> None:
        """Load the history, if it is not known or no longer true; `again` does so in any case."""

    async def append(self, messages: Sequence[Message], *, reserve: int = 0) -> None:
        """Add messages; keep places free behind them for as many tool results."""

    async def settle(self, index: int, result: ToolResultMessage) -> None:
        """Put a result into the place that was reserved for the call with this index."""

    def close_turn(self, results: Sequence[ToolResultMessage]) -> None:
        """All calls are settled: their results, in call order, join the history."""

    async def recover(self, results: dict[int, ToolResultMessage]) -> None:
        """Settle calls that an earlier run left open, by their index in the last reply."""

    async def save_extra(self) -> None:
        """Store the extra, if it changed."""


class MemoryJournal:
    """For an agent without a checkpointer: the history lives as long as the agent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.extra: dict[str, Any] = {}
        self.unsaved: dict[tuple[str | None, int], ToolResultMessage] = {}

    async def load(self, *, again: bool = False) -> None:
        pass

    async def append(self, messages: Sequence[Message], *, reserve: int = 0) -> None:  # noqa: ARG002
        self.messages.extend(messages)

    async def settle(self, index: int, result: ToolResultMessage) -> None:
        pass

    def close_turn(self, results: Sequence[ToolResultMessage]) -> None:
        self.messages.extend(results)

    async def recover(self, results: dict[int, ToolResultMessage]) -> None:
        self.messages.extend(results.values())

    async def save_extra(self) -> None:
        encode_extra(self.extra)  # the same mistakes are mistakes here


class ThreadJournal:
    """A thread of a store."""

    def __init__(self, checkpointer: SQLiteCheckpointer, thread_id: str) -> None:
        self.messages: list[Message] = []
        self.extra: dict[str, Any] = {}
        self.unsaved: dict[tuple[str | None, int], ToolResultMessage] = {}
        self._reply_id: str | None = None  # whose calls are being settled
        self._checkpointer = checkpointer
        self._thread_id = checked_id(thread_id)
        self._saved_extra = "{}"
        self._loaded = False
        self._position: Position | None = None  # None: not loaded yet, or stale
        self._first_place = 0  # the seq that is reserved for the first call of the last reply
        self._taken: set[int] = set()  # the seqs behind the last reply that hold a message

    async def load(self, *, again: bool = False) -> None:
        if self._position is not None and not again:
            return
        thread = await load(self._checkpointer.store, self._thread_id) or Thread([], {}, [], Position(0, 0))
        self.messages = thread.messages
        # What the program put there before the first run counts on top of what is stored.
        if not self._loaded:
            self.extra = {**thread.extra, **self.extra}
        elif encode_extra(self.extra) == self._saved_extra:  # else it is about to be saved, and wins
            self.extra = thread.extra.copy()
        self._loaded = True
        self._saved_extra = encode_extra(thread.extra)
        self._position = thread.position
        self._first_place = _place_behind_last_reply(thread)
        self._reply_id = last_reply_id(thread.messages)
        self._taken = {seq for seq in reversed(thread.seqs) if seq >= self._first_place}

    async def append(self, messages: Sequence[Message], *, reserve: int = 0) -> None:
        rows = [stored(message) for message in messages]
        before = self._current()
        write = self._checkpointer.store.write(
            threads.append, self._thread_id, rows, expect=before.version, reserve=reserve
        )
        self._position = None  # whatever happens now: stale until the write is known to be done
        try:
            await write
        finally:
            # A cancelled caller still learns of a commit: the write has settled before the cancellation arrives.
            if write.done() and write.exception() is None:
                self._position = write.result()
                self._first_place = self._position.head - reserve + 1
                self.messages.extend(messages)
                self._reply_id = getattr(messages[-1], "id", None) if messages else self._reply_id

    async def settle(self, index: int, result: ToolResultMessage) -> None:
        settled = False
        try:
            places = [(self._first_place + index, stored(result))]
            write = self._checkpointer.store.write(threads.fill, self._thread_id, places)
            try:
                await write
            finally:
                if write.done() and write.exception() is None:
                    self._advance(write.result())
                    settled = True
        except asyncio.CancelledError:
            self._position = None  # it may be stored, and is not in the list
            raise
        finally:
            if not settled:  # the tool ran all the same: what it answered is not forgotten while we live
                self.unsaved[self._reply_id, index] = result
                self._position = None

    def close_turn(self, results: Sequence[ToolResultMessage]) -> None:
        self.messages.extend(results)
        self._current()  # the results are stored; if somebody else wrote meanwhile, the run ends here

    async def recover(self, results: dict[int, ToolResultMessage]) -> None:
        rows = {self._first_place + index: stored(result) for index, result in results.items()}
        self._position = None
        if free := [(seq, row) for seq, row in rows.items() if seq not in self._taken]:
            await self._checkpointer.store.write(threads.fill, self._thread_id, free)
        # Where somebody appended without leaving room, the results go to the end; a request puts them right.
        if late := [row for seq, row in rows.items() if seq in self._taken]:
            await self._checkpointer.store.write(threads.append, self._thread_id, late)
        self.unsaved.clear()
        await self.load()

    async def save_extra(self) -> None:
        extra = encode_extra(self.extra)
        if extra == self._saved_extra:
            return
        before = self._current()
        write = self._checkpointer.store.write(threads.save_extra, self._thread_id, extra, expect=before.version)
        self._position = None
        try:
            await write
        finally:
            if write.done() and write.exception() is None:
                self._position = write.result()
                self._saved_extra = extra

    def _current(self) -> Position:
        if self._position is None:
            raise ThreadMoved(
                f"thread {self._thread_id!r} was written by somebody else during this run; what was committed is kept: "
                "prompt or resume again to go on from what the thread holds now"
            )
        return self._position

    def _advance(self, position: Position) -> None:
        """Results settle side by side but commit in the order of submission: each moves the version by one."""
        known = self._position
        self._position = position if known is not None and position.version == known.version + 1 else None


def _place_behind_last_reply(thread: Thread) -> int:
    for message, seq in zip(reversed(thread.messages), reversed(thread.seqs), strict=True):
        if isinstance(message, AssistantMessage):
            return seq + 1
    return 0
