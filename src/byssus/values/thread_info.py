"""A thread as a list shows it, and the four states that it can be in."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

ThreadState: TypeAlias = Literal["running", "waiting", "interrupted", "idle"]


class ThreadInfo(NamedTuple):
    """A thread as a list shows it. Times are ISO 8601 UTC text."""

    id: str
    message_count: int
    created_at: str
    updated_at: str
    user_id: str | None
    state: ThreadState
    title: str  # as `set_title` has set it, else the first words
    first_words: str  # of the first message of a user, on one line; "" if there is none
