"""One run that is watched: what it does, what it has said, and how many tokens it takes a minute.

It gets the items of its thread (`cp.follow`) from the beginning of the run on, and remembers the last of them.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime
from typing import Any, NamedTuple

from byssus import AssistantMessage, Pending, ToolResultMessage
from byssus.checkpointer import (
    CallEnded,
    CallStarted,
    CallWaiting,
    CaughtUp,
    FollowItem,
    InboxPut,
    MessageAdded,
    ReplyDelta,
    ReplyReset,
    RunBegan,
    RunEnded,
    RunInfo,
    ThreadInfo,
)
from byssus.cli.screen import terminal
from byssus.messages import Message

_MOST_ENTRIES = 500
_LONGEST = 4_000  # characters of an entry, and of a reply that arrives
_MINUTE = 60.0
_CHARS_PER_TOKEN = 4  # of a reply whose tokens are not counted yet


class Entry(NamedTuple):
    """Something that was said or done. `kind` is user, assistant, tool, call or end."""

    kind: str
    text: str


class Watched:
    """A run, or a thread that waits for one."""

    def __init__(self, info: ThreadInfo, run: RunInfo | None) -> None:
        self.thread_id = info.id
        self.info = info
        self.run = run
        self.state: str = info.state
        self.waiting: list[Pending] = []
        self.entries: deque[Entry] = deque(maxlen=_MOST_ENTRIES)
        self.arriving = ""
        self.is_caught_up = run is None
        self.is_over = run is None  # another run of the thread may have taken its place
        self.left_at: float | None = None  # when it was found to be live no longer, by the monotonic clock
        self._phase = "waits for the model" if run is not None else "no run"
        self._open: dict[str, str] = {}  # tools that run, by the ids of their calls
        self._spent: deque[tuple[float, int]] = deque()
        self._estimated = 0

    @property
    def began_at(self) -> str:
        """When its run began; empty without one."""
        return "" if self.run is None else self.run.began_at

    @property
    def doing(self) -> str:
        """What it does, in a few words."""
        if self.state == "waiting":
            return f"waits for an answer about {self.waiting[0].tool_name}" if self.waiting else "waits for a person"
        if self.state not in ("running", "idle"):
            return self.state
        if self._open:
            return f"runs {', '.join(dict.fromkeys(self._open.values()))}"
        if self.arriving:
            return f"writes: {' '.join(self.arriving.split())[-80:]}"
        return self._phase

    def tokens_a_minute(self, now: float) -> int:
        """The tokens of the last minute; those of a reply that arrives are estimated."""
        since = now - _MINUTE
        while self._spent and self._spent[0][0] < since:
            self._spent.popleft()
        return sum(tokens for at, tokens in self._spent if at >= since) + self._estimated // _CHARS_PER_TOKEN

    def add(self, item: FollowItem) -> None:
        """Take in what has happened."""
        match item:
            case MessageAdded():
                self._add(item.message)
            case ReplyDelta():
                self._grow(item)
            case ReplyReset():
                self.arriving, self._estimated = "", 0
            case CallStarted() | CallWaiting() | CallEnded():
                self._hear_of_call(item)
            case InboxPut():
                self._note("user", f"(queued) {item.message.text}")
            case RunBegan():
                self.is_over = self.run is None or item.run_id != self.run.id
                self._phase = "waits for the model"
                if item.attempt > 1:
                    self._note("end", f"attempt {item.attempt} goes on")
            case RunEnded() if self.run is not None and item.run_id == self.run.id:
                self._open.clear()
                self._phase = f"ended: {item.stop_reason}"
                self._note("end", f"{self._phase}{f', {item.error}' if item.error else ''}")
            case CaughtUp():
                self.is_caught_up = True

    def _hear_of_call(self, item: CallStarted | CallWaiting | CallEnded) -> None:
        is_earlier = self._is_earlier(item.reply)
        match item:
            case CallStarted():
                self._open[item.call_id] = item.tool_name
                again = f" (attempt {item.attempt})" if item.attempt > 1 else ""
                if not is_earlier:
                    self._note("call", f"{item.tool_name} {terminal.as_json(item.arguments)}{again}")
            case CallWaiting() if not is_earlier:
                self._note("call", f"{item.tool_name} {terminal.as_json(item.arguments)} waits for a person")
            case CallEnded():
                self._open.pop(item.call_id, None)
                if item.status != "done" and not is_earlier:
                    self._note("end", f"{item.tool_name}: {item.status}")

    def _is_earlier(self, reply: int) -> bool:
        """Whether a call was made before this run: the calls of the reply before a cursor are always sent again."""
        return not self.is_caught_up and self.run is not None and reply < self.run.first_seq

    def _add(self, message: Message) -> None:
        if isinstance(message, AssistantMessage):
            self.arriving, self._estimated = "", 0
            self._spent.append((time.monotonic() - _age(message.created_at), message.usage.total))
            self._note("assistant", message.text)
        elif isinstance(message, ToolResultMessage):
            self._note("tool", f"{message.tool_name}: {message.text}")
            self._phase = "waits for the model"
        else:
            self._note("user", str(getattr(message, "text", "")))
            self._phase = "waits for the model"

    def _grow(self, item: ReplyDelta) -> None:
        self._estimated += len(item.delta)
        if item.kind == "text":
            self.arriving = f"{self.arriving}{item.delta}"[-_LONGEST:]
        else:
            self._phase = "thinks" if item.kind == "thinking" else f"calls {item.tool_name or 'a tool'}"

    def _note(self, kind: str, text: str) -> None:
        if text.strip():
            cut = "" if len(text) <= _LONGEST else f"\n[... {len(text):,} characters]"
            self.entries.append(Entry(kind, f"{text[:_LONGEST]}{cut}"))

    def as_json(self) -> dict[str, Any]:
        """The run for programs."""
        run = self.run
        return {
            "thread_id": self.thread_id,
            "title": self.info.title,
            "run_id": None if run is None else run.id,
            "state": self.state,
            "doing": self.doing,
            "began_at": None if run is None else run.began_at,
            "waiting": [call.call_id for call in self.waiting],
            "tokens_a_minute": self.tokens_a_minute(time.monotonic()),
        }


def _age(created_at: str | None) -> float:
    """How many seconds ago that was; for ever, if it is no time."""
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(created_at or "")).total_seconds()
    except (TypeError, ValueError):
        return _MINUTE * 2
    return max(age, 0.0)
