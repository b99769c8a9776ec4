"""Retention: which checkpoints stay, and how the others go; and whole threads.

Deleting happens in steps that are transactions of their own. Whatever step is the last one before a crash, the database
is whole, and the next prune or deletion goes on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from byssus.errors import ByssusError, InputError
from byssus.queries.log.leases import Unleased
from byssus.queries.moving import importing
from byssus.queries.versions import deleting
from byssus.queries.versions.checkpoints import CheckpointRef
from byssus.store.operations import Runner
from byssus.threads.waiting import retry_while_driven
from byssus.values.checkpoints import Pruned, Retention, keep_age, keep_last
from byssus.values.thread_key import ThreadKey

_DROPPED_AT_ONCE = 500
_log = logging.getLogger("byssus.store")


def encoded(retention: Retention) -> str:
    return json.dumps({"last": retention.last, "seconds": retention.seconds, "tags": sorted(retention.tags)})


def time_to_live(days: float, keep: Retention | None) -> str:
    """A retention as it stands with a thread: so many days, and in any case the latest checkpoint."""
    return encoded(keep_age(days) | keep_last(1) | (Retention() if keep is None else checked(keep)))


def decoded(text: str) -> Retention:
    value = json.loads(text)
    return Retention(value["last"], value["seconds"], frozenset(value["tags"]))


def checked(retention: object) -> Retention:
    if not isinstance(retention, Retention) or retention == Retention():
        raise InputError(
            f"a prune needs to know what to keep: keep_last(n), keep_age(days), keep_tagged(...), joined with |; "
            f"got {retention!r:.80}"
        )
    return retention


async def prune(store: Runner, thread_id: str, retention: Retention) -> Pruned:
    """Remove the checkpoints of a thread that need not stay, and the messages that only they led to."""
    found = await store.read(
        deleting.doomed, ThreadKey("", thread_id), last=retention.last, seconds=retention.seconds, tags=retention.tags
    )
    taken, messages = await drop(store, thread_id, [row for row, _ in found])
    rest = await store.write(deleting.collect, ThreadKey("", thread_id))  # what an interrupted one has left
    messages += rest.messages + await _collect(store, thread_id, rest.left)
    return Pruned([name for row, name in found if row.key in taken], messages)


async def tidy(store: Runner, thread_id: str, ttl: str) -> None:
    """Prune a thread by its time to live, beside what somebody has asked for: that has happened in any case."""
    try:
        await prune(store, thread_id, decoded(ttl))
    except ByssusError as error:  # the next one comes by here too
        _log.warning("old checkpoints of thread %r could not be pruned: %s", thread_id, type(error).__name__)


async def prune_expired(store: Runner) -> Pruned:
    """Prune each thread that has a time to live."""
    removed = Pruned([], 0)
    for thread_id, ttl in await store.read(deleting.with_ttl):
        done = await prune(store, thread_id, decoded(ttl))
        removed = Pruned(removed.checkpoints + done.checkpoints, removed.messages + done.messages)
    return removed


async def drop(store: Runner, thread_id: str, doomed: Sequence[CheckpointRef]) -> tuple[set[int], int]:
    """Take checkpoints away, some at a time; returns the keys of those, and how many messages went with them."""
    taken: set[int] = set()
    messages = 0
    for start in range(0, len(doomed), _DROPPED_AT_ONCE):
        done = await store.write(deleting.drop, ThreadKey("", thread_id), doomed[start : start + _DROPPED_AT_ONCE])
        taken.update(done.checkpoints)
        messages += done.messages + await _collect(store, thread_id, done.left)
    return taken, messages


async def _collect(store: Runner, thread_id: str, left: list[int]) -> int:
    messages = 0
    while left:
        done = await store.write(deleting.collect, ThreadKey("", thread_id), left)
        messages, left = messages + done.messages, done.left
    return messages


async def delete_thread(store: Runner, thread_id: str, wait: float) -> int:
    """Delete a thread; returns how many checkpoints it had."""
    count = await retry_while_driven(
        lambda dead_epoch: store.write(deleting.discard, ThreadKey("", thread_id), by=Unleased(dead_epoch)), wait
    )
    await empty_trash(store)
    return count or 0


async def empty_trash(store: Runner) -> int:
    """Remove what deleted threads and interrupted imports have left; returns how many messages that were."""
    await store.write(importing.discard_stale)
    messages, has_more = 0, True
    while has_more:
        done, has_more = await store.write(deleting.empty_trash)
        messages += done
    return messages
