"""Following a thread: each message once, shortly after its commit, whatever process wrote it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from typing import NamedTuple

from byssus.messages import AssistantMessage, Message, decode
from byssus.queries.log import branches, threads
from byssus.queries.log.branches import Segment
from byssus.queries.log.threads import ThreadRow
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.values.inputs import ThreadId, checked_thread
from byssus.values.thread_key import ThreadKey

_LOOK = 0.02  # seconds between two checks for a new commit
_PAGE = 1_000


def watch(store: Runner, thread_id: ThreadId) -> AsyncGenerator[Message, None]:
    """Yield the messages of the thread, and then each new message shortly after its commit, from any process.

    It continues until you break out of the loop. If the thread does not exist yet, it waits for it.
    """
    return _watch(store, checked_thread(thread_id))


async def _watch(store: Runner, thread_key: ThreadKey) -> AsyncGenerator[Message, None]:
    seen = _Seen()
    version: Hashable = None
    while True:
        before, version = version, await store.aside(store.base.version)
        if version != before:
            async for page in _pages(store, thread_key, seen):
                for message in seen.news(page):
                    yield message
        await store.sleep(_LOOK)


async def _pages(store: Runner, thread_key: ThreadKey, seen: _Seen) -> AsyncIterator[list[tuple[int, Message]]]:
    found = await store.read(_where, thread_key, seen.where)
    if found is None:
        return
    row, where = found
    seen.go_along(where)
    after = seen.upto
    while True:
        page = await store.read(_page, row.branch, after=after, upto=row.head)
        yield page
        if len(page) < _PAGE:
            return
        after = page[-1][0]


class _Where(NamedTuple):
    """The thread and the branch that are read: a rewind changes the branch, a deletion the thread."""

    thread: int
    made: str
    branch: int
    segments: list[Segment]


def _where(tx: Tx, thread_key: ThreadKey, known: _Where | None) -> tuple[ThreadRow, _Where] | None:
    row = threads.find(tx, thread_key)
    if row is None:
        return None
    if known is not None and (known.thread, known.made, known.branch) == (row.key, row.created_at, row.branch):
        return row, known
    return row, _Where(row.key, row.created_at, row.branch, branches.segments_of(tx, row.branch))


def _page(tx: Tx, branch: int, *, after: int, upto: int) -> list[tuple[int, Message]]:
    rows = threads.page(tx, branch, after=after, upto=upto, limit=_PAGE)
    return [(seq, decode(body)) for seq, body in rows]


class _Seen:
    """The seqs that were read. Results of parallel tools fill the slots after their reply in any order."""

    def __init__(self) -> None:
        self.upto = 0  # nothing new comes up to here
        self.where: _Where | None = None
        self._behind: set[int] = set()

    def go_along(self, where: _Where) -> None:
        """Read along a branch. What it shares with the one before was read already."""
        before, self.where = self.where, where
        if before is None or before is where:
            return
        is_same_thread = (before.thread, before.made) == (where.thread, where.made)
        shared = branches.parting(before.segments, where.segments) if is_same_thread else 0
        self.upto = min(self.upto, shared)
        self._behind = {seq for seq in self._behind if seq <= shared}

    def news(self, page: list[tuple[int, Message]]) -> list[Message]:
        fresh = [(seq, message) for seq, message in page if seq not in self._behind]
        self._behind.update(seq for seq, _ in fresh)
        replies = [seq for seq, message in fresh if isinstance(message, AssistantMessage)]
        self.upto = max(self.upto, *replies, 0)  # before a reply is stored, the last one's calls are settled
        while self.upto + 1 in self._behind:
            self.upto += 1
        self._behind = {seq for seq in self._behind if seq > self.upto}
        return [message for _, message in fresh]
