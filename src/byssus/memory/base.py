"""What every memory can do. One is exchanged for another in the line that makes it."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from byssus.memory.msg import Msg


class MemoryBase(abc.ABC):
    """Messages in the order in which they were added, each with its marks, and a summary of those left out."""

    @abc.abstractmethod
    async def add(
        self,
        memories: Msg | Iterable[Msg] | None,
        marks: str | list[str] | None = None,
        allow_duplicates: bool = False,
        **kwargs: Any,
    ) -> None:
        """Add messages with these marks, all or none. One with the id of a message that is there is left out, unless
        duplicates are allowed."""

    @abc.abstractmethod
    async def delete(self, msg_ids: Iterable[str], **kwargs: Any) -> int:
        """Take out the messages with these ids; returns how many that were."""

    @abc.abstractmethod
    async def delete_by_mark(self, mark: str | list[str], **kwargs: Any) -> int:
        """Take out the messages with one of these marks; returns how many that were."""

    @abc.abstractmethod
    async def update_messages_mark(
        self, new_mark: str | None, old_mark: str | None = None, msg_ids: Iterable[str] | None = None
    ) -> int:
        """Mark messages, of those with `old_mark` if it is given, and of these ids if they are given; returns how many
        were changed. The new mark takes the old one's place; None for the new one removes the old one."""

    @abc.abstractmethod
    async def update_compressed_summary(self, summary: str) -> None:
        """Say what stands for the messages that are left out."""

    @abc.abstractmethod
    async def mark_compressed(
        self, msg_ids: Iterable[str], summary: str, mark: str = "compressed", *, expected: str | None = None
    ) -> int | None:
        """Mark messages and set the summary that stands for them, both or neither; returns how many got the mark.

        None, and nothing is changed, if the summary until now is not the `expected` one.
        """

    @abc.abstractmethod
    async def get_memory(
        self,
        mark: str | list[str] | None = None,
        exclude_mark: str | list[str] | None = None,
        prepend_summary: bool = True,
        **kwargs: Any,
    ) -> list[Msg]:
        """The messages in order: those with one of the marks, if any is given, and without any of the excluded ones.

        Before them stands the summary, if there is one and it is not unwanted, as a message of the user.
        """

    @abc.abstractmethod
    async def search(self, query: str, limit: int = 10) -> list[Msg]:
        """The messages that match a query, the newest first."""

    @abc.abstractmethod
    async def size(self) -> int:
        """How many messages there are."""

    @abc.abstractmethod
    async def clear(self) -> None:
        """Take out all messages. The summary stays."""

    @abc.abstractmethod
    async def compressed_summary(self) -> str:
        """What stands for the messages that are left out; empty, if nothing does."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, as plain values."""

    @abc.abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on with another memory's state. Without `strict`, what is missing from it stays as it is."""

    async def close(self) -> None:  # noqa: B027 - not every memory has anything to close
        """Let go of what the memory has opened."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
