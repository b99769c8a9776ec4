"""Marks: labels on messages, and what is left of a thread without the messages that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from byssus.messages import AssistantMessage, Message, Note, ToolResultMessage


class MarkedMessages(NamedTuple):
    """Which messages of a thread bear a mark, and the summary that stands for those that are left out."""

    summary: str = ""
    ids: Mapping[int, str] = {}  # by their places in the thread, which has `total` messages (-1: no matter)
    total: int = 0

    def without(self, messages: list[Message]) -> list[Message]:
        """What is left of a thread's messages without these, and without the results of calls that are among them."""
        if len(messages) == self.total and all(_may_be(messages[place], name) for place, name in self.ids.items()):
            hidden = [place in self.ids for place in range(len(messages))]
        else:  # another hook has changed the list, or the positions are not needed
            names = set(self.ids.values())
            hidden = [not isinstance(message, Note) and message.id in names for message in messages]
        left: list[Message] = []
        orphans: set[str] = set()  # calls whose reply is not shown: nor are their results
        for message, is_hidden in zip(messages, hidden, strict=True):
            if isinstance(message, AssistantMessage):
                orphans = {call.id for call in message.tool_calls} if is_hidden else set()
            is_orphan = isinstance(message, ToolResultMessage) and message.tool_call_id in orphans
            if not is_hidden and not is_orphan:
                left.append(message)
        return left


def _may_be(message: Message, name: str) -> bool:
    """Whether a message may be the one that the log knows by this id: to those that have none it gives one."""
    return isinstance(message, Note) or message.id in (None, name)
