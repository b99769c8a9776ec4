"""Erasures: threads and users that are deleted with every byte of their data.

An erasure is noted in the transaction that puts the threads into the trash, and closed when the files are known to hold
nothing of them. A process that dies in between leaves the note, and the next one that opens the database finishes the
erasure. A user is deleted in that first transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from byssus.errors import NotFound
from byssus.queries.accounts import quotas, users
from byssus.queries.log.leases import NO_EPOCH, Unleased
from byssus.queries.versions import checkpoints, deleting, erasure_notes
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey


class Fork(NamedTuple):
    """A thread that shares the past of another one."""

    id: str
    owner: str | None


class ErasedRows(NamedTuple):
    """How many threads and checkpoints were removed; or the forks that the caller must decide about first."""

    threads: int
    checkpoints: int
    undecided: list[Fork]
    kept: Sequence[str] = ()  # the forks that stay


def begin_thread(tx: Tx, thread_key: ThreadKey, *, forks: str | None, dead: Mapping[str, int]) -> ErasedRows:
    """Put a thread and its children into the trash; `forks` ("erase" or "keep") says what happens to their forks.

    If there are any and it is None, nothing is written, and they are returned. `dead` has the epochs of leases whose
    owners are known to be gone, by the ids of the threads.
    """
    thread = checkpoints.thread_state(tx, thread_key)
    if thread is None:
        return ErasedRows(0, 0, [])
    return _erase(tx, [thread.key], forks, dead)


def begin_user(tx: Tx, user_id: str, *, forks: str | None, dead: Mapping[str, int]) -> ErasedRows:
    """Delete a user, and put all of their threads into the trash, with their children and with the user's forks.

    `forks` says what happens to forks of others. If there are any and it is None, nothing is written, and they are
    returned.
    """
    with suppress(NotFound):  # memories may belong to an id that is no user's
        quotas.take(tx, user_id)  # from here on, no thread becomes theirs
    rows = tx.all(
        "SELECT key FROM threads WHERE (owner = :user OR namespace = :user)"
        " AND namespace NOT IN (:trash, :importing) ORDER BY key",
        user=user_id,
        trash=deleting.TRASH,
        importing=deleting.IMPORTING,
    )
    begun = _erase(tx, [key for (key,) in rows], forks, dead)
    if not begun.undecided and users.remove(tx, user_id) and not rows:
        erasure_notes.add(tx)
    return begun


class _Doomed(NamedTuple):
    key: int
    namespace: str
    id: str
    owner: str | None
    is_fork: int


def _erase(tx: Tx, keys: Sequence[int], forks: str | None, dead: Mapping[str, int]) -> ErasedRows:
    """Put threads with their children into the trash, and with `forks="erase"` their forks with their children."""
    mine = {each.key: each for key in keys for each in _with_theirs(tx, key, "k.parent = f.key")}
    all_ = {each.key: each for key in mine for each in _with_theirs(tx, key, "k.origin = f.key OR k.parent = f.key")}
    others = sorted(Fork(each.id, each.owner) for each in all_.values() if each.key not in mine and each.is_fork)
    if others and forks is None:
        return ErasedRows(0, 0, others)
    doomed = all_ if forks == "erase" else mine
    # The last one first: a fork then still knows what it was forked from.
    counts = [
        deleting.discard(tx, ThreadKey(each.namespace, each.id), by=Unleased(dead.get(each.id, NO_EPOCH)), dead=dead)
        for each in sorted(doomed.values(), reverse=True)
    ]
    if counts:
        erasure_notes.add(tx)
    kept = [fork.id for fork in others] if forks == "keep" else []
    return ErasedRows(sum(count is not None for count in counts), sum(count or 0 for count in counts), [], kept)


def _with_theirs(tx: Tx, thread: int, step: str) -> list[_Doomed]:
    """A thread and what a step leads to from it, and from there."""
    rows = tx.all(
        "WITH RECURSIVE found (key) AS (SELECT key FROM threads WHERE key = :thread"
        f" UNION SELECT k.key FROM found f JOIN threads k ON {step})"
        " SELECT t.key, t.namespace, t.id, t.owner, t.origin IS NOT NULL FROM found f JOIN threads t ON t.key = f.key",
        thread=thread,
    )
    return [_Doomed(*row) for row in rows]
