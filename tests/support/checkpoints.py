"""What threads and their checkpoints should be, told in the plainest way: whole copies everywhere, and no database.

A log is a list, of which a seq is the position. What was reserved for a tool result and is still empty is an `Entry`
without a value. Two logs share what are the same entries, and not what merely says the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata
from byssus.messages import AssistantMessage, Message, UserMessage
from byssus.store.database import Row, Tx

Value = Message | dict[str, Any]


@dataclass(eq=False)
class Entry:
    """One place of a log; two are the same only if they are the same place."""

    value: Value | None = None


Log = list[Entry]


@dataclass(eq=False)
class Saved:
    """A checkpoint. It never changes."""

    id: str
    step: int
    order: int
    log: Log
    extra: dict[str, Any]
    state: Any
    tags: list[str]
    home: Thread

    @property
    def rank(self) -> tuple[int, int]:
        return self.step, self.order


@dataclass(eq=False)
class Thread:
    """A log and an extra; the lines of checkpoints that it has been on, the last one of which is the present one."""

    log: Log = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    lines: list[list[Saved]] = field(default_factory=lambda: [[]])
    line: list[Saved] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = [self.line]

    def listed(self) -> list[Saved]:
        return sorted(self.line, key=lambda saved: saved.rank, reverse=True)

    def shown(self) -> list[Saved]:
        """All that it shows, on whichever line."""
        return list(dict.fromkeys(saved for line in self.lines for saved in line))

    def find(self, checkpoint_id: str) -> tuple[list[Saved], Saved] | None:
        for line in (self.line, *reversed(self.lines)):
            for saved in line:
                if saved.id == checkpoint_id:
                    return line, saved
        return None

    def remove(self, gone: Iterable[Saved]) -> list[Saved]:
        gone = list(gone)
        for line in self.lines:
            line[:] = [saved for saved in line if saved not in gone]
        return gone

    def go_over(self, line: list[Saved]) -> None:
        self.lines.append(line)
        self.line = line

    def open_places(self) -> list[int]:
        return [position + 1 for position in open_in(self.log)]


class Model:
    """All threads by their names."""

    def __init__(self) -> None:
        self.threads: dict[str, Thread] = {}
        self._order = itertools.count(1)

    def thread(self, name: str) -> Thread:
        return self.threads.setdefault(name, Thread())

    def append(self, name: str, values: Iterable[Value], reserve: int = 0) -> None:
        log = self.thread(name).log
        log += [Entry(value) for value in values]
        log += [Entry() for _ in range(reserve)]

    def fill(self, name: str, seq: int, value: Value) -> None:
        self.threads[name].log[seq - 1] = Entry(value)

    def put(self, name: str, given: list[Value], **about: Any) -> Log | None:
        """Put a checkpoint; returns what the thread has left, if it went over to a branch."""
        thread = self.thread(name)
        thread.remove([saved for saved in thread.line if saved.id == about["id"]])
        there = [(seq, entry.value) for seq, entry in enumerate(thread.log, 1) if entry.value is not None]
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1][1], zip(given, there, strict=False)))
        seq = there[same - 1][0] if same else 0
        tail = [Entry(value) for value in given[same:]]
        left: Log | None = None
        if same == len(there):
            log = thread.log = [*thread.log, *tail]
        elif not tail:
            log = thread.log[:seq]
        else:
            log = [*cut(thread.log[:seq]), *tail]
            if all(other.step <= about["step"] for other in thread.line):
                left, thread.log = thread.log, log
        self.save(thread, thread.line, log, **about)
        return left

    def save(self, thread: Thread, line: list[Saved], log: Log, **about: Any) -> Saved:
        about.setdefault("extra", dict(thread.extra))
        saved = Saved(order=next(self._order), log=cut(log), home=thread, **about)
        line.append(saved)
        return saved

    def fork(self, name: str, new: str, at: str | int | None) -> None:
        log, extra, line = self._part(self.threads[name], at)
        self.threads[new] = Thread(log, extra, line=line)

    def rewind(self, name: str, to: str | int) -> None:
        thread = self.threads[name]
        thread.log, thread.extra, line = self._part(thread, to)
        thread.go_over(line)

    def _part(self, thread: Thread, at: str | int | None) -> tuple[Log, dict[str, Any], list[Saved]]:
        """The log and the extra at a point, and the checkpoints up to it."""
        if at is None:
            return cut(thread.log), dict(thread.extra), list(thread.line)
        if isinstance(at, str):
            found = thread.find(at)
            assert found is not None
            line, target = found
            return cut(target.log), dict(target.extra), [saved for saved in line if saved.rank <= target.rank]
        log = thread.log[:at]
        upto = [saved.rank for saved in thread.line if saved.log == log[: len(saved.log)]]
        line = [saved for saved in thread.line if upto and saved.rank <= max(upto)]
        return cut(log), dict(thread.extra), line

    def delete(self, name: str) -> int:
        return len(self.threads.pop(name).shown())

    def delete_before(self, name: str, step: int) -> int:
        thread = self.threads[name]
        return len(thread.remove([saved for saved in thread.shown() if saved.step < step]))

    def prune(self, name: str, last: int, tags: Iterable[str]) -> list[str]:
        thread = self.threads[name]
        kept = {*thread.listed()[:last], *(saved for saved in thread.shown() if not set(tags).isdisjoint(saved.tags))}
        return [saved.id for saved in thread.remove([saved for saved in thread.shown() if saved not in kept])]

    def named(self, checkpoint_id: str) -> set[str]:
        """The threads that a name leads to: where it was made, or else wherever it is still shown."""
        shown: dict[Saved, list[str]] = {}
        for name, thread in self.threads.items():
            for saved in thread.shown():
                if saved.id == checkpoint_id:
                    shown.setdefault(saved, []).append(name)
        homes: set[str] = set()
        for saved, names in shown.items():
            home = [name for name in names if self.threads[name] is saved.home]
            homes.update(home or names)
        return homes


def values(log: Log) -> list[Value]:
    return [entry.value for entry in log if entry.value is not None]


def cut(log: Log) -> Log:
    """A log for another reader: what is still empty will be filled on each side for itself."""
    return [Entry() if position in open_in(log) else entry for position, entry in enumerate(log)]


def open_in(log: Log) -> list[int]:
    """The empty places behind the last reply."""
    replies = [position for position, entry in enumerate(log) if is_reply(entry.value)]
    start = replies[-1] if replies else len(log)
    return [position for position in range(start, len(log)) if log[position].value is None]


def is_reply(value: Value | None) -> bool:
    return isinstance(value, AssistantMessage) or (isinstance(value, dict) and value["role"] == "assistant")


def text_of(value: Value) -> str:
    return str(value["content"]) if isinstance(value, dict) else value.text


def spoken(text: str) -> Iterator[Value]:
    """The ways to say something."""
    yield UserMessage(text)
    yield {"role": "user", "content": text}
    yield AssistantMessage(text)
    yield {"content": text, "role": "assistant"}


# --- threads of a database --------------------------------------------------------------------------------------------

# Messages that neither a thread nor a checkpoint leads to.
UNREACHABLE = (
    "SELECT m.branch, m.seq FROM messages m WHERE NOT EXISTS (SELECT 1 FROM segments s WHERE s.source = m.branch"
    " AND m.seq > s.after_seq AND m.seq <= s.upto_seq AND (EXISTS (SELECT 1 FROM threads t WHERE t.branch = s.branch)"
    " OR EXISTS (SELECT 1 FROM checkpoints c WHERE c.branch = s.branch AND c.seq >= m.seq)))"
)
_TABLES = ("threads", "branches", "segments", "messages", "checkpoints", "inherited", "hidden", "tool_calls", "floors")


async def put(
    cp: Checkpointer, thread_id: str, name: str, step: int, messages: list[Any], *, state: Any = None, **about: Any
) -> None:
    metadata = CheckpointMetadata(thread_id, name, step, **about)
    assert await cp.put(Checkpoint(metadata, list(messages), {} if state is None else state)) == name


async def said(cp: Checkpointer, thread_id: str, name: str) -> list[str]:
    """The texts of a checkpoint's messages."""
    found = await cp.get(name, thread_id)
    assert found is not None
    return [text_of(message) for message in found.messages]


async def ids(cp: Checkpointer, thread_id: str) -> list[str]:
    return [about.checkpoint_id for about in await cp.list_checkpoints(thread_id)]


async def left(cp: Checkpointer, thread_id: str) -> list[str]:
    """What is in the tree and not on the thread's line."""
    tree = await cp.tree(thread_id)
    assert tree is not None
    return [about.checkpoint_id for about in tree.left]


def all_rows(tx: Tx) -> list[list[Row]]:
    """Each row of each table, to see that nothing was written."""
    return [sorted(tx.all(f"SELECT * FROM {table}"), key=repr) for table in _TABLES]


def count(table: str) -> Callable[[Tx], int]:
    def query(tx: Tx) -> int:
        row = tx.one(f"SELECT COUNT(*) FROM {table}")
        assert row is not None
        return int(row[0])

    return query
