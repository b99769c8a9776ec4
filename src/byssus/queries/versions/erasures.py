"""Erasures: threads and users that are deleted with every byte of their data.

An erasure is noted in the transaction that puts the threads into the trash, and closed when the files are known to hold
nothing of them. A process that dies in between leaves the note, and the next one that opens the database finishes the
erasure. A user is deleted in that first transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from byssus.errors import NotFound
from byssus.queries.accounts import quotas, users
from byssus.queries.log.leases import By
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


def begin_thread(tx: Tx, thread_key: ThreadKey, *, forks: str | None, by: By) -> ErasedRows:
    """Put a thread into the trash; `forks` ("erase" or "keep") says what happens to its forks.

    If there are any and it is None, nothing is written, and they are returned.
    """
    thread = checkpoints.thread_state(tx, thread_key)
    if thread is None:
        return ErasedRows(0, 0, [])
    found = descendants(tx, thread.key)
    if found and forks is None:
        return ErasedRows(0, 0, found)
    names = [fork.id for fork in found]
    doomed = [thread_key.id, *(names if forks == "erase" else [])]
    return _begin(tx, doomed, by=by, namespace=thread_key.namespace)._replace(kept=names if forks == "keep" else [])


def begin_user(tx: Tx, user_id: str, *, forks: str | None, by: By) -> ErasedRows:
    """Delete a user, and put all of their threads into the trash, with forks that belong to the user.

    `forks` says what happens to forks of others. If there are any and it is None, nothing is written, and they are
    returned.
    """
    with suppress(NotFound):  # memories may belong to an id that is no user's
        quotas.take(tx, user_id)  # from here on, no thread becomes theirs
    rows = tx.all(
        "SELECT namespace, id, key FROM threads WHERE (owner = :user OR namespace = :user)"
        " AND namespace NOT IN (:trash, :importing) ORDER BY key",
        user=user_id,
        trash=deleting.TRASH,
        importing=deleting.IMPORTING,
    )
    mine = {(namespace, name) for namespace, name, _ in rows}
    others = {fork for _, _, key in rows for fork in descendants(tx, key) if ("", fork.id) not in mine}
    if others and forks is None:
        return ErasedRows(0, 0, sorted(others))
    doomed = {namespace: [name for space, name, _ in rows if space == namespace] for namespace, _ in sorted(mine)}
    if forks == "erase":
        doomed.setdefault("", []).extend(sorted(fork.id for fork in others))
    begun = [_begin(tx, names, by=by, namespace=namespace) for namespace, names in doomed.items()]
    if users.remove(tx, user_id) and not begun:
        erasure_notes.add(tx)
    kept = sorted(fork.id for fork in others) if forks == "keep" else []
    return ErasedRows(sum(one.threads for one in begun), sum(one.checkpoints for one in begun), [], kept)


def descendants(tx: Tx, thread: int) -> list[Fork]:
    """The forks of a thread, and theirs."""
    rows = tx.all(
        "WITH RECURSIVE forks (key) AS (SELECT key FROM threads WHERE origin = :thread"
        " UNION SELECT t.key FROM forks JOIN threads t ON t.origin = forks.key)"
        " SELECT t.id, t.owner FROM forks JOIN threads t ON t.key = forks.key ORDER BY t.key",
        thread=thread,
    )
    return [Fork(*row) for row in rows]


def _begin(tx: Tx, doomed: Sequence[str], *, by: By, namespace: str) -> ErasedRows:
    # The last one first: a fork then still knows what it was forked from.
    counts = [deleting.discard(tx, ThreadKey(namespace, name), by=by) for name in reversed(doomed)]
    erasure_notes.add(tx)
    return ErasedRows(sum(count is not None for count in counts), sum(count or 0 for count in counts), [])
