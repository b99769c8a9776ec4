"""Messages that wait for a run: steering ones for its next turn, follow-ups for the moment it would stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import InputError
from holdfast.messages import UserMessage

MODES = ("one-at-a-time", "all")


class Inbox:
    """Two queues, each drained one message at a time or all at once."""

    def __init__(self, steering_mode: str, follow_up_mode: str) -> None:
        for name, mode in (("steering_mode", steering_mode), ("follow_up_mode", follow_up_mode)):
            if mode not in MODES:
                raise InputError(f"{name} must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
        self._steering_mode = steering_mode
        self._follow_up_mode = follow_up_mode
        self._steering: deque[UserMessage] = deque()
        self._follow_ups: deque[UserMessage] = deque()

    def steer(self, message: UserMessage) -> None:
        self._steering.append(message)

    def follow_up(self, message: UserMessage) -> None:
        self._follow_ups.append(message)

    def waiting(self, *, stopping: bool) -> bool:
        """Whether something would be taken; follow-ups count when the run would stop."""
        return bool(self._steering) or (stopping and bool(self._follow_ups))

    @contextmanager
    def taken(self, *, stopping: bool) -> Iterator[list[UserMessage]]:
        """What the run gets now: steering first; follow-ups only when it would stop. An error puts it back."""
        queue, mode = self._steering, self._steering_mode
        if not queue and stopping:
            queue, mode = self._follow_ups, self._follow_up_mode
        messages = [queue.popleft() for _ in range(len(queue) if mode == "all" else min(1, len(queue)))]
        try:
            yield messages
        except BaseException:
            queue.extendleft(reversed(messages))
            raise
