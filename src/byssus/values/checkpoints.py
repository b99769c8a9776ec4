"""Checkpoints as values: what `put` takes, what lists and trees return, and what a prune keeps.

Checkpoint(CheckpointMetadata("trip", "c7", step=7, tags=["milestone"]), messages=[...], state={"plan": "agreed"})
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from msgspec import Struct

from byssus.errors import InputError
from byssus.values import clock
from byssus.values.clock import Time


@dataclass(slots=True)
class CheckpointMetadata:
    """A checkpoint without its messages and state. `created_at` is ISO 8601 UTC text; the default is now.

    You may pass a datetime, or text with any offset; without an offset it is UTC.
    `seq` is the position of its last message in the thread, 0 before the first one; None before it is stored.
    """

    thread_id: str
    checkpoint_id: str = field(default_factory=clock.new_id)
    step: int = 0
    parent_checkpoint_id: str | None = None
    created_at: str = field(default_factory=clock.now)
    tags: list[str] = field(default_factory=list)
    summary: str = ""
    seq: int | None = field(default=None, compare=False)

    if TYPE_CHECKING:

        def __init__(
            self,
            thread_id: str,
            checkpoint_id: str = ...,
            step: int = 0,
            parent_checkpoint_id: str | None = None,
            created_at: Time = ...,
            tags: Sequence[str] = ...,
            summary: str = "",
            seq: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        self.created_at = clock.stored(self.created_at, "created_at")
        if isinstance(self.tags, tuple | set | frozenset):
            self.tags = list(self.tags)


@dataclass(slots=True)
class Checkpoint:
    """A position in a thread: all messages up to it, and a state of its own.

    `messages` are byssus messages or any JSON; `get` returns them unchanged.
    """

    metadata: CheckpointMetadata
    messages: list[Any] = field(default_factory=list)
    state: Any = field(default_factory=dict)
    tools_result: Any = field(default_factory=dict)
    next_node: str | None = None

    def next(self, **changes: Any) -> Self:
        """The checkpoint after this one: a new id, the next step, this one as parent; `changes` sets other fields."""
        about = self.metadata
        new = CheckpointMetadata(about.thread_id, step=about.step + 1, parent_checkpoint_id=about.checkpoint_id)
        return replace(self, metadata=new, **changes)


@runtime_checkable
class CheckpointBackend(Protocol):
    """The versioned methods of a checkpointer, for code that takes any backend."""

    async def put(self, checkpoint: Checkpoint) -> str:
        """Store a checkpoint; returns its id."""

    async def get(self, checkpoint_id: str, thread_id: str | None = None) -> Checkpoint | None:
        """One checkpoint, or None."""

    async def get_latest(self, thread_id: str) -> Checkpoint | None:
        """The checkpoint of the thread with the highest step, or None."""

    async def list_threads(self, limit: int = 50, offset: int = 0) -> list[CheckpointMetadata]:
        """The latest checkpoint of each thread, newest first."""

    async def list_checkpoints(self, thread_id: str, limit: int = 100, offset: int = 0) -> list[CheckpointMetadata]:
        """The checkpoints of a thread, highest step first."""

    async def delete_thread(self, thread_id: str) -> int:
        """Delete a thread; returns how many checkpoints it had."""

    async def delete_before(self, thread_id: str, before_step: int) -> int:
        """Delete the checkpoints below a step; returns how many."""


class LeftBranch(NamedTuple):
    """A branch that a rewind or a put has left: where and from which branch it parts, its checkpoints and forks."""

    parted_at: int  # the seq up to which it shares the past
    within: int | None  # the place of the other left branch in the list that it parts from; None: the thread's line
    checkpoints: list[CheckpointMetadata]
    forks: list[str]


class Tree(NamedTuple):
    """A thread, its checkpoints, what rewinds have left, its forks and its child threads. `print(tree)` draws it.

    `checkpoints` are those that were made on this thread, lowest step first; checkpoints that a fork shares with its
    origin are listed at the origin. `left` are those that a rewind has left behind: rewind to one to restore it.
    `left_branches` groups them by branch. `children` are the threads of calls of other agents.
    """

    thread_id: str
    message_count: int
    forked_from: str | None
    forked_at: int | None  # the seq up to which it shares the past
    checkpoints: list[CheckpointMetadata]
    left: list[CheckpointMetadata]
    forks: list[Tree]
    left_branches: tuple[LeftBranch, ...] = ()
    children: tuple[Tree, ...] = ()
    child_of: str | None = None

    def __str__(self) -> str:
        return "\n".join(drawn(self))


class Difference(NamedTuple):
    """Where two threads part: the last common seq, the number of shared messages, and how many follow in each."""

    seq: int
    shared: int
    only_a: int
    only_b: int


class Pruned(NamedTuple):
    """The result of a prune: the ids of removed checkpoints, and the number of removed messages."""

    checkpoints: list[str]
    messages: int


class Erased(NamedTuple):
    """The result of an erasure. `note` says where copies may still exist, and what to do about them."""

    threads: int
    checkpoints: int
    messages: int
    is_gone: bool  # False: a reader keeps old pages in the file, or there was no room to rewrite it
    kept: list[str]  # forks that still hold what they shared with it
    note: str
    backups: list[str]  # known backups that may still hold it


# --- what is kept -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep. `a | b` keeps what either of them keeps."""

    last: int = 0
    seconds: float = 0.0
    tags: frozenset[str] = frozenset()

    def __or__(self, other: Retention) -> Retention:
        return Retention(max(self.last, other.last), max(self.seconds, other.seconds), self.tags | other.tags)


def keep_last(count: int) -> Retention:
    """Keep the latest n checkpoints."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < 2**53:
        raise InputError(f"keep_last takes a number from 1 up, got {count!r:.80}")
    return Retention(last=count)


def keep_age(days: float) -> Retention:
    """Keep checkpoints that are younger than this number of days."""
    if isinstance(days, bool) or not isinstance(days, int | float) or not 0 < days <= 36_500:
        raise InputError(f"keep_age takes a number of days above 0 and up to 36500, got {days!r:.80}")
    return Retention(seconds=days * 86_400.0)


def keep_tagged(*tags: str) -> Retention:
    """Keep checkpoints with at least one of these tags."""
    if not tags or not all(isinstance(tag, str) for tag in tags):
        raise InputError(f"keep_tagged takes one or more tags, which are strings; got {tags!r:.80}")
    return Retention(tags=frozenset(tags))


# --- drawings ---------------------------------------------------------------------------------------------------------


class Signs(NamedTuple):
    """What a tree is drawn with."""

    arm: str = "├── "
    last_arm: str = "└── "
    trunk: str = "│   "
    dot: str = " · "


ASCII = Signs("|-- ", "`-- ", "|   ", " - ")

_Part: TypeAlias = tuple[Tree, int | None]  # a thread's line, or the left branch of it at this place
_Row: TypeAlias = tuple[str, _Part | None]  # a line of the drawing, and what hangs below it


def drawn(tree: Tree, signs: Signs = Signs()) -> Iterator[str]:  # noqa: B008 - it does not change
    """The lines of a drawing, without recursion: a thread may be forked from a fork a thousand times over."""
    first: _Row = (_titled(tree), (tree, None))
    waiting = [("", "", first)]  # what stands before its line, before those below it, the line
    while waiting:
        before, below, (text, part) = waiting.pop()
        yield before + text
        rows = _rows_of(*part, signs.dot) if part else []
        for number, row in enumerate(reversed(rows)):
            arm, trunk = (signs.last_arm, "    ") if number == 0 else (signs.arm, signs.trunk)
            waiting.append((below + arm, below + trunk, row))


def _rows_of(tree: Tree, branch: int | None, dot: str) -> list[_Row]:
    """What hangs on a thread's line or on a left branch: checkpoints, and what parts there, each at its message."""
    on_left = {fork for left in tree.left_branches for fork in left.forks}
    mine = None if branch is None else tree.left_branches[branch]
    made = tree.checkpoints if mine is None else mine.checkpoints
    # Steps need not go up with the messages: what parts stands behind the last checkpoint that is not after it.
    lowest = list(accumulate((each.seq or 0 for each in reversed(made)), min))[::-1]
    rows: list[tuple[tuple[int, int], _Row]] = [
        ((place, -1), (_line(each, dot), None)) for place, each in enumerate(made)
    ]
    for place, left in enumerate(tree.left_branches):
        if left.within == branch:
            at = left.parted_at
            rows.append(((bisect_right(lowest, at) - 1, at), (f"message {at}{dot}left behind", (tree, place))))
    for fork in tree.forks:
        if fork.thread_id in mine.forks if mine else fork.thread_id not in on_left:
            at = fork.forked_at or 0
            rows.append(((bisect_right(lowest, at) - 1, at), (f"message {at}{dot}fork {_titled(fork)}", (fork, None))))
    below = [(f"child {_titled(child)}", (child, None)) for child in tree.children] if branch is None else []
    return [*(row for _, row in sorted(rows, key=lambda each: each[0])), *below]


def _titled(tree: Tree) -> str:
    return f"{_one_line(tree.thread_id)} ({tree.message_count} message{'s' * (tree.message_count != 1)})"


def _line(metadata: CheckpointMetadata, dot: str) -> str:
    at = "" if metadata.seq is None else f"{dot}message {metadata.seq}"
    parts = [f"step {metadata.step}{at}{dot}{metadata.checkpoint_id}"]
    parts += [f"[{', '.join(metadata.tags)}]"] if metadata.tags else []
    parts += [metadata.summary] if metadata.summary else []
    return "  ".join(map(_one_line, parts))


def _one_line(text: str) -> str:
    return " ".join(text.split())


class NewCheckpoint(Struct, frozen=True):
    """A checkpoint of a thread as it stands, which an agent makes."""

    id: str
    tags: Sequence[str]
    summary: str | None  # None: the beginning of what was said last
    state: Any
