"""The interface of every memory. To replace one memory by another, change only the line that creates it."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from byssus.memory.msg import Msg


class MemoryBase(abc.ABC):
    """Messages in the order in which they were added, each with its marks, and a summary of the compressed ones."""

    @abc.abstractmethod
    async def add(
        self,
        memories: Msg | Iterable[Msg] | None,
        marks: str | list[str] | None = None,
        allow_duplicates: bool = False,
        **kwargs: Any,
    ) -> None:
        """Add messages with these marks, all or none. A message whose id is already stored is skipped, unless
        duplicates are
        allowed.
        """

    @abc.abstractmethod
    async def delete(self, msg_ids: Iterable[str], **kwargs: Any) -> int:
        """Remove the messages with these ids; returns how many were removed."""

    @abc.abstractmethod
    async def delete_by_mark(self, mark: str | list[str], **kwargs: Any) -> int:
        """Remove the messages with at least one of these marks; returns how many were removed."""

    @abc.abstractmethod
    async def update_messages_mark(
        self, new_mark: str | None, old_mark: str | None = None, msg_ids: Iterable[str] | None = None
    ) -> int:
        """Mark messages: all of them, or those with `old_mark`, or those with these ids; returns how many were changed.

        The new mark replaces the old one; None as the new mark removes the old one.
        """

    @abc.abstractmethod
    async def update_compressed_summary(self, summary: str) -> None:
        """Set the summary of the compressed messages. An empty one removes it."""

    @abc.abstractmethod
    async def mark_compressed(
        self, msg_ids: Iterable[str], summary: str, mark: str = "compressed", *, expected: str | None = None
    ) -> int | None:
        """Mark messages and set their summary, in one transaction; returns how many messages got the mark.

        If the current summary is not the `expected` one, nothing is changed and None is returned.
        """

    @abc.abstractmethod
    async def get_memory(
        self,
        mark: str | list[str] | None = None,
        exclude_mark: str | list[str] | None = None,
        prepend_summary: bool = True,
        **kwargs: Any,
    ) -> list[Msg]:
        """Return the messages in order, with at least one of the marks (if given) and none of the excluded marks.

        With `prepend_summary`, the summary comes first, as a message of the user, if there is one.
        """

    @abc.abstractmethod
    async def search(self, query: str, limit: int = 10) -> list[Msg]:
        """Return the messages that match a query, newest first."""

    @abc.abstractmethod
    async def size(self) -> int:
        """Return the number of messages."""

    @abc.abstractmethod
    async def clear(self) -> None:
        """Remove all messages. The summary is kept."""

    @abc.abstractmethod
    async def compressed_summary(self) -> str:
        """Return the summary of the compressed messages; empty if there is none."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` takes, as plain values."""

    @abc.abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Switch to a saved state. Without `strict`, keys that are missing from it keep their current values."""

    async def close(self) -> None:  # noqa: B027 - not every memory has anything to close
        """Release what the memory has opened."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
