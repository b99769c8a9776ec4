"""Retention: which checkpoints are kept, how the others are removed, and how whole threads are deleted.

A deletion is a sequence of transactions. After a crash between two of them the database is consistent, and the next
prune or deletion continues. On a full disk the steps become smaller, because each needs room for the pages that it
changes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from byssus.errors import ByssusError, InputError, StoreFull
from byssus.queries.log.leases import NO_EPOCH, Unleased
from byssus.queries.versions import checkpoints, deleting
from byssus.queries.versions.checkpoints import CheckpointRef
from byssus.queries.versions.deleting import Dropped
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.threads.waiting import retry_while_any_driven
from byssus.values.checkpoints import Pruned, Retention, keep_age, keep_last
from byssus.values.inputs import ThreadId, checked_count, checked_thread, checked_wait
from byssus.values.shown import reason
from byssus.values.thread_key import ThreadKey

_SMALLEST_STEP = 16  # rows
_log = logging.getLogger("byssus.store")
T = TypeVar("T")


def encoded(retention: Retention) -> str:
    return json.dumps({"last": retention.last, "seconds": retention.seconds, "tags": sorted(retention.tags)})


def time_to_live(days: float, keep: Retention | None) -> str:
    """The stored retention of a thread: a number of days, and always the latest checkpoint."""
    return encoded(keep_age(days) | keep_last(1) | (Retention() if keep is None else checked(keep)))


def decoded(text: str) -> Retention:
    value = json.loads(text)
    return Retention(value["last"], value["seconds"], frozenset(value["tags"]))


def checked(retention: object) -> Retention:
    if not isinstance(retention, Retention) or retention == Retention():
        raise InputError(
            f"prune() needs a policy: keep_last(n), keep_age(days), keep_tagged(...), joined with |; "
            f"got {retention!r:.80}"
        )
    return retention


async def prune(store: Runner, thread_id: ThreadId | None = None, keep: Retention | None = None) -> Pruned:
    """Remove the checkpoints that `keep` does not keep, and messages that are no longer reachable.

    `keep` is keep_last(n), keep_age(days) or keep_tagged(...), or several of them joined with |: a checkpoint stays if
    any of them keeps it. Without arguments, every thread with a time to live is pruned by it.
    """
    if thread_id is None and keep is None:
        return await _prune_expired(store)
    if thread_id is None:
        raise InputError(
            "prune(keep=...) needs a thread id; prune() without arguments applies each thread's time to live"
        )
    return await _prune(store, checked_thread(thread_id), checked(keep))


async def set_ttl(store: Runner, thread_id: ThreadId, days: float | None, keep: Retention | None = None) -> None:
    """Remove the thread's checkpoints when they are `days` old; None disables this.

    The latest one always stays, and so does what `keep` keeps. Checkpoints are removed with each put, at the end of
    each run, and when `prune()` is called.
    """
    text = None if days is None else time_to_live(days, keep)
    await store.write(deleting.set_ttl, checked_thread(thread_id), text)


async def delete_before(store: Runner, thread_id: ThreadId, before_step: int) -> int:
    """Delete the thread's checkpoints below a step; returns their number. Messages stay."""
    thread_key, step = checked_thread(thread_id), checked_count("before_step", before_step)
    taken, _ = await _drop(store, thread_key, await store.read(deleting.below, thread_key, step))
    return len(taken)


async def _prune(store: Runner, thread_key: ThreadKey, retention: Retention) -> Pruned:
    found = await store.read(
        deleting.doomed, thread_key, last=retention.last, seconds=retention.seconds, tags=retention.tags
    )
    taken, messages = await _drop(store, thread_key, [row for row, _ in found])
    messages += await _collect(store, thread_key, None)  # what an interrupted one has left
    return Pruned([name for row, name in found if row.key in taken], messages)


async def tidy(store: Runner, thread_id: ThreadId) -> None:
    """Prune one thread by its time to live, if it has one."""
    thread_key = checked_thread(thread_id)
    thread = await store.read(checkpoints.thread_state, thread_key)
    if thread is not None and thread.ttl is not None:
        await prune_by_ttl(store, thread_key, thread.ttl)


async def prune_by_ttl(store: Runner, thread_key: ThreadKey, ttl: str) -> None:
    """Prune a thread after something else has succeeded: a failure here is logged, and the next call tries again."""
    try:
        await _prune(store, thread_key, decoded(ttl))
    except ByssusError as error:
        _log.warning("old checkpoints of thread %r could not be pruned: %s", thread_key.id, reason(error))


async def _prune_expired(store: Runner) -> Pruned:
    """Prune each thread that has a time to live."""
    removed = Pruned([], 0)
    for thread_id, ttl in await store.read(deleting.with_ttl):
        done = await _prune(store, ThreadKey("", thread_id), decoded(ttl))
        removed = Pruned(removed.checkpoints + done.checkpoints, removed.messages + done.messages)
    return removed


async def _drop(store: Runner, thread_key: ThreadKey, doomed: Sequence[CheckpointRef]) -> tuple[set[int], int]:
    """Remove checkpoints in steps; returns their keys, and the number of messages removed with them."""
    taken: set[int] = set()
    messages, start, steps = 0, 0, _Steps(store)
    while some := doomed[start : start + steps.size // 4]:

        def drop(tx: Tx, size: int, some: Sequence[CheckpointRef] = some) -> tuple[Dropped, int]:
            fewer = some[: max(size // 4, 1)]
            return deleting.drop(tx, thread_key, fewer, chunk=size), len(fewer)

        done, count = await steps.take(drop)
        start += count
        taken.update(done.checkpoints)
        messages += done.messages + (await _collect(store, thread_key, done.left) if done.left else 0)
    return taken, messages


async def _collect(store: Runner, thread_key: ThreadKey, left: list[int] | None) -> int:
    messages, steps = 0, _Steps(store)
    while left is None or left:

        def collect(tx: Tx, size: int, left: list[int] | None = left) -> Dropped:
            return deleting.collect(tx, thread_key, left, chunk=size)

        done = await steps.take(collect)
        messages, left = messages + done.messages, done.left
    return messages


class _Steps:
    """Steps of a deletion, each in a transaction. They become smaller when there is no room for one."""

    def __init__(self, store: Runner) -> None:
        self.size = deleting.CHUNK  # rows
        self._store = store

    async def take(self, step: Callable[[Tx, int], T]) -> T:
        while True:
            try:
                return await self._store.write(step, self.size)
            except StoreFull:
                if self.size <= _SMALLEST_STEP:
                    raise
                self.size //= 5


async def delete_thread(store: Runner, thread_id: ThreadId, *, wait: float = 0) -> int:
    """Delete the thread and everything that belongs to it, child threads included; returns the number of checkpoints.

    Forks keep the past that they share. Waits for a run as `append` does.
    """
    thread_key = checked_thread(thread_id)

    async def discard(dead: Mapping[str, int]) -> int | None:
        by = Unleased(dead.get(thread_key.id, NO_EPOCH))
        return await store.write(deleting.discard, thread_key, by=by, dead={**dead})

    count = await retry_while_any_driven(store, discard, checked_wait(wait))
    await empty_trash(store)
    return count or 0


async def empty_trash(store: Runner) -> int:
    """Remove what deleted threads and interrupted imports have left; returns the number of messages."""
    await store.write(deleting.discard_stale_imports)
    messages, has_more, steps = 0, True, _Steps(store)
    while has_more:
        done, has_more = await steps.take(lambda tx, size: deleting.empty_trash(tx, chunk=size))
        messages += done
    return messages
