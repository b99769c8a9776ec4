"""A memory in process memory: a list of messages with their marks. It is the reference for all other memories."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

from byssus.memory import arguments
from byssus.memory.arguments import Item
from byssus.memory.base import MemoryBase
from byssus.memory.msg import Msg, values_of
from byssus.queries.search.kinds import MESSAGE
from byssus.search import tokens
from byssus.search.index import text_of
from byssus.search.search import checked_limit
from byssus.threads.encoding import encode_json


class InMemoryMemory(MemoryBase):
    """A memory that exists only in this process."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._summary = ""

    async def add(
        self,
        memories: Msg | Iterable[Msg] | None,
        marks: str | list[str] | None = None,
        allow_duplicates: bool = False,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        if memories is None:
            return
        marks = arguments.marks_to_add(marks)
        given = [copy.deepcopy(message) for message in arguments.messages(memories)]
        for message in given:
            _check(message)
        known = set() if allow_duplicates else {item.message.id for item in self._items}
        self._items += [Item(message, list(marks)) for message in given if message.id not in known]

    async def delete(self, msg_ids: Iterable[str], **kwargs: Any) -> int:  # noqa: ARG002
        ids = arguments.ids("msg_ids", msg_ids)
        return self._keep([item for item in self._items if item.message.id not in ids])

    async def delete_by_mark(self, mark: str | list[str], **kwargs: Any) -> int:  # noqa: ARG002
        doomed = set(arguments.marks_to_delete(mark))
        return self._keep([item for item in self._items if doomed.isdisjoint(item.marks)])

    def _keep(self, entries: list[Item]) -> int:
        count = len(self._items) - len(entries)
        self._items = entries
        return count

    async def update_messages_mark(
        self, new_mark: str | None, old_mark: str | None = None, msg_ids: Iterable[str] | None = None
    ) -> int:
        change = arguments.change(new_mark, old_mark, msg_ids)
        if change is None:
            return 0
        new, old, ids = change
        chosen = [marks for message, marks in self._items if ids is None or message.id in ids]
        return sum(_changed(marks, new, old) for marks in chosen)

    async def update_compressed_summary(self, summary: str) -> None:
        self._summary = arguments.summary("" if summary is None else summary)

    async def mark_compressed(
        self, msg_ids: Iterable[str], summary: str, mark: str = "compressed", *, expected: str | None = None
    ) -> int | None:
        checked, ids = arguments.summary(summary), arguments.ids("msg_ids", msg_ids)
        marks = arguments.mark_to_add(mark)
        if expected is not None and arguments.summary(expected) != self._summary:
            return None
        self._summary = checked
        return await self.update_messages_mark(marks, msg_ids=ids)

    async def get_memory(
        self,
        mark: str | list[str] | None = None,
        exclude_mark: str | list[str] | None = None,
        prepend_summary: bool = True,
        **kwargs: Any,  # noqa: ARG002
    ) -> list[Msg]:
        wanted = arguments.wanted("mark", mark)
        unwanted = arguments.wanted("exclude_mark", exclude_mark) or []
        found = [
            copy.deepcopy(message)
            for message, marks in self._items
            if (wanted is None or not set(wanted).isdisjoint(marks)) and set(unwanted).isdisjoint(marks)
        ]
        return [Msg("user", self._summary, "user"), *found] if prepend_summary and self._summary else found

    async def search(self, query: str, limit: int = 10) -> list[Msg]:
        matcher, wanted = tokens.parse(query), checked_limit(limit)
        bodies = ((message, encode_json("a message", values_of(message))) for message, _ in reversed(self._items))
        found = (message for message, body in bodies if matcher.find(text_of(MESSAGE, [body])) is not None)
        return [copy.deepcopy(message) for message in itertools.islice(found, wanted)]

    async def size(self) -> int:
        return len(self._items)

    async def clear(self) -> None:
        self._items = []

    async def compressed_summary(self) -> str:
        return self._summary

    def state_dict(self) -> dict[str, Any]:
        content = [[message.to_dict(), list(marks)] for message, marks in self._items]
        return {"_compressed_summary": self._summary, "content": content}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        state = arguments.state(state_dict)
        if strict and "content" not in state:
            raise KeyError("The state_dict does not contain 'content' keys required for InMemoryMemory.")
        loaded = arguments.items(copy.deepcopy(state["content"])) if "content" in state else self._items
        for message, _ in loaded:
            _check(message)
        if "content" in state or "_compressed_summary" in state:
            self._summary = arguments.summary(state.get("_compressed_summary") or "")
        self._items = loaded


def _check(message: Any) -> None:
    """Reject messages that a database could not store."""
    encode_json(f"message {message.id!r}", arguments.checked_values(message))


def _changed(marks: list[str], new: str | None, old: str | None) -> bool:
    """Change the marks of one message; returns whether it counts as changed."""
    if old is not None:
        if old not in marks:
            return False
        marks.remove(old)
    if new is None:
        return old is not None
    if new in marks:
        return False
    marks.append(new)
    return True
