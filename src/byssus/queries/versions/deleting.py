"""Deleting: checkpoints by their keys, and whole threads.

- A deleted thread goes into the trash in one short transaction: from then on it does not exist. Its rows are removed
  after that, in chunks; if that is interrupted, the next deletion in any process goes on with it.
- What a fork still reads stays. Its branches pass to that fork, as do those of its checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from byssus.queries.accounts import usage
from byssus.queries.log import branches, marks, threads
from byssus.queries.log.branches import Point
from byssus.queries.log.leases import NO_EPOCH, By, Unleased
from byssus.queries.log.threads import UNLEASED
from byssus.queries.versions import checkpoints
from byssus.queries.versions.checkpoints import CheckpointRef, CheckpointRow
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

IMPORTING = "\x7fimport"  # the namespace of what is being imported
TRASH = "\x7ftrash"  # no caller can pass this namespace
CHUNK = 2_000  # rows in one transaction: writers wait no longer than that


class Dropped(NamedTuple):
    """What a step has removed, and whether there is more to do."""

    checkpoints: list[int]
    messages: int
    left: list[int]


def drop(tx: Tx, thread_key: ThreadKey, doomed: Sequence[CheckpointRef], *, chunk: int = CHUNK) -> Dropped:
    """Remove checkpoints from a thread, and the messages that only they read."""
    row = threads.take(tx, thread_key)
    if row is None:
        return Dropped([], 0, [])
    (thread,) = row
    freed = checkpoints.drop(tx, thread, doomed)
    checkpoints.show_latest(tx, thread)
    collected = branches.collect(tx, freed.branches, limit=chunk)
    return Dropped(freed.checkpoints, collected.messages, collected.left)


def collect(tx: Tx, thread_key: ThreadKey, candidates: Sequence[int] | None = None, *, chunk: int = CHUNK) -> Dropped:
    """Delete the messages of these branches that are not read any more; None: of all branches the thread has left."""
    thread = checkpoints.thread_state(tx, thread_key)
    if thread is None:
        return Dropped([], 0, [])
    wanted = branches.unread(tx, thread.key) if candidates is None else candidates
    collected = branches.collect(tx, wanted, limit=chunk)
    return Dropped([], collected.messages, collected.left)


def below(tx: Tx, thread_key: ThreadKey, step: int) -> list[CheckpointRef]:
    """The checkpoints of a thread below a step, on all of its lines."""
    thread = checkpoints.thread_state(tx, thread_key)
    return [] if thread is None else sorted(_shown(tx, thread.key, below=step))


def doomed(
    tx: Tx, thread_key: ThreadKey, *, last: int, seconds: float, tags: Collection[str]
) -> list[tuple[CheckpointRef, str]]:
    """The checkpoints of a thread, with their ids, that are none of the last ones, older than so many seconds, and
    without any of the tags. What a rewind has left is none of the last ones."""
    thread = checkpoints.thread_state(tx, thread_key)
    if thread is None:
        return []
    row = tx.one("SELECT :since", since=tx.after(-seconds))
    since: str = row[0] if row and seconds else "~"
    found: dict[CheckpointRef, str] = {}
    for line in checkpoints.lines(tx, thread.key):
        rows = checkpoints.shown(tx, line)
        if line == thread.line:
            kept = {row.doomed for row in rows[:last]}
        found.update({row.doomed: row.id for row in rows if row.created_at < since and not _has_tag(row, tags)})
    return sorted((row, name) for row, name in found.items() if row not in kept)


def set_ttl(tx: Tx, thread_key: ThreadKey, ttl: str | None) -> None:
    """Say what is kept of a thread's checkpoints; None: everything."""
    row = tx.one(
        "UPDATE threads SET ttl = :ttl, version = version + 1 WHERE namespace = :namespace AND id = :id RETURNING key",
        ttl=ttl,
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    if row is None:
        raise checkpoints.unknown_thread(thread_key.id)


def with_ttl(tx: Tx, *, namespace: str = "") -> list[tuple[str, str]]:
    """The threads with checkpoints that have a time to live, each with what it keeps."""
    return tx.all(
        "SELECT id, ttl FROM threads WHERE latest IS NOT NULL AND ttl IS NOT NULL AND namespace = :namespace"
        " ORDER BY key",
        namespace=namespace,
    )


def _has_tag(row: CheckpointRow, tags: Collection[str]) -> bool:
    return bool(tags) and not set(tags).isdisjoint(json.loads(row.about)["tags"])


def _shown(tx: Tx, thread: int, below: int = 2**62) -> set[CheckpointRef]:
    return {row.doomed for line in checkpoints.lines(tx, thread) for row in checkpoints.shown(tx, line, below=below)}


# --- threads ----------------------------------------------------------------------------------------------------------


def discard(
    tx: Tx, thread_key: ThreadKey, *, by: By = UNLEASED, dead: Mapping[str, int] = MappingProxyType({})
) -> int | None:
    """Put a thread and its children into the trash; returns how many checkpoints they showed, or None if there is no
    such thread.

    `dead` has the epochs of leases of children whose owners are known to be gone, by the ids of the threads.
    """
    row = threads.take(tx, thread_key, "key, version, lease_epoch, origin, origin_seq", by=by)
    if row is None:
        return None
    key, version, epoch, origin, seq = row
    found = tx.all("SELECT id FROM threads WHERE parent = :key ORDER BY key", key=key)
    counts = [
        discard(tx, ThreadKey(thread_key.namespace, child), by=Unleased(dead.get(child, NO_EPOCH)), dead=dead)
        for (child,) in found
    ]
    shown = _shown(tx, key)
    usage.bequeath(tx, key)
    tx.run(
        "UPDATE threads SET origin = :origin, origin_seq = CASE WHEN origin_seq < :seq THEN origin_seq ELSE :seq END"
        " WHERE origin = :key",
        origin=origin,
        seq=seq,
        key=key,
    )
    tx.run(
        "UPDATE threads SET namespace = :trash, id = CAST(key AS TEXT), branch = 0, line = 0, latest = NULL,"
        " latest_at = NULL, lease_owner = NULL, lease_until = NULL, run = NULL, owner = NULL, ttl = NULL, extra = '{}',"
        " title = '', status = 'active', model = NULL, metadata = '{}', origin = NULL, origin_seq = NULL,"
        " parent = NULL, parent_call = NULL WHERE key = :key",
        trash=TRASH,
        key=key,
    )
    # At once: until their rows are removed, a schedule would make tasks, and workers would run them.
    tx.run("DELETE FROM schedules WHERE thread = :key", key=key)
    tx.run("UPDATE tasks SET status = 'cancelled' WHERE thread = :key AND status IN ('pending', 'running')", key=key)
    tx.run(
        "INSERT INTO floors (key, value) VALUES (1, :value) ON CONFLICT (key)"
        " DO UPDATE SET value = CASE WHEN floors.value < :value THEN :value ELSE floors.value END",
        value=max(version, epoch) + 1,
    )
    return len(shown) + sum(count or 0 for count in counts)


class Emptied(NamedTuple):
    """How many messages were removed from the trash, and whether there is more in it."""

    messages: int
    has_more: bool


def empty_trash(tx: Tx, *, chunk: int = CHUNK) -> Emptied:
    """Delete a chunk of what is in the trash."""
    first = "SELECT id FROM threads WHERE key = (SELECT MIN(key) FROM threads WHERE namespace = :trash)"
    found = tx.one(first, trash=TRASH)
    row = None if found is None else threads.take(tx, ThreadKey(TRASH, found[0]))
    if row is None:  # the trash is empty, or another process has just removed this thread from it
        return Emptied(0, tx.one("SELECT 1 FROM threads WHERE namespace = :trash LIMIT 1", trash=TRASH) is not None)
    (thread,) = row
    tx.run("DELETE FROM inbox WHERE thread = :thread", thread=thread)
    tx.run("DELETE FROM partials WHERE thread = :thread", thread=thread)
    if _has_removed_a_chunk(tx, thread, chunk):
        return Emptied(0, True)
    freed = _disinherit(tx, thread)
    rows = tx.all(
        "SELECT c.key, c.version FROM checkpoints c JOIN branches b ON b.key = c.line WHERE b.thread = :thread"
        " AND NOT EXISTS (SELECT 1 FROM hidden h WHERE h.line = c.line AND h.checkpoint = c.key) LIMIT :limit",
        thread=thread,
        limit=chunk,
    )
    freed += checkpoints.drop(tx, thread, [CheckpointRef(*row) for row in rows]).branches
    mine = [key for (key,) in tx.all("SELECT key FROM branches WHERE thread = :thread", thread=thread)]
    collected = branches.collect(tx, {*freed, *mine}, limit=chunk)
    if len(rows) < chunk and not collected.left:
        _bequeath(tx, thread)
        tx.run("DELETE FROM threads WHERE key = :thread", thread=thread)
    return Emptied(collected.messages, True)


def _has_removed_a_chunk(tx: Tx, thread: int, chunk: int) -> bool:
    """Delete a chunk of runs, tasks and logged tool calls; True if there may be more.

    The rest of the ledger goes with the replies that it is about, or with the thread.
    """
    for table, condition in (("runs", ""), ("tasks", ""), ("tool_calls", " AND reply = 0")):
        rows = tx.all(
            f"DELETE FROM {table} WHERE key IN (SELECT key FROM {table} WHERE thread = :thread{condition}"
            " ORDER BY key LIMIT :limit) RETURNING key",
            thread=thread,
            limit=chunk,
        )
        if len(rows) == chunk:
            return True
    return False


def _disinherit(tx: Tx, thread: int) -> list[int]:
    """Remove what a thread has inherited, and rows that were kept for it alone. Returns the branches that it read."""
    rows = tx.all(
        "SELECT i.line, i.source FROM inherited i JOIN branches b ON b.key = i.line WHERE b.thread = :thread",
        thread=thread,
    )
    for line, source in rows:
        tx.run("DELETE FROM inherited WHERE line = :line AND source = :source", line=line, source=source)
    freed: list[int] = []
    for source in sorted({source for _, source in rows}):
        kept = tx.all(
            "SELECT c.key, c.version FROM checkpoints c JOIN hidden h ON h.line = c.line AND h.checkpoint = c.key"
            " WHERE c.line = :source",
            source=source,
        )
        freed += checkpoints.drop(tx, thread, [CheckpointRef(*row) for row in kept]).branches
    return freed


def _bequeath(tx: Tx, thread: int) -> None:
    """Pass the branches that other threads still need to one of them. The marks were the thread's own: they go."""
    left = tx.all("SELECT key FROM branches WHERE thread = :thread", thread=thread)
    for (branch,) in left:
        marks.forget(tx, branch)
    successors = [
        successor
        for (branch,) in left
        for (successor,) in tx.all(
            "SELECT b.thread FROM segments s JOIN branches b ON b.key = s.branch"
            " WHERE s.source = :branch AND b.thread <> :thread"
            " UNION SELECT b.thread FROM inherited i JOIN branches b ON b.key = i.line"
            " WHERE i.source = :branch AND b.thread <> :thread",
            branch=branch,
            thread=thread,
        )
    ]
    if successors:
        successor = min(successors)
        for (branch,) in left:
            _mark_as(tx, successor, branch)
        tx.run(
            "UPDATE branches SET thread = :successor, uncounted = 1 WHERE thread = :thread",
            successor=successor,
            thread=thread,
        )


def _mark_as(tx: Tx, successor: int, branch: int) -> None:
    """Give a branch that a checkpoint reads the marks that count there for the thread that gets it."""
    row = tx.one(
        "SELECT t.branch, (SELECT MAX(c.seq) FROM checkpoints c WHERE c.branch = :branch) FROM threads t"
        " WHERE t.key = :successor",
        branch=branch,
        successor=successor,
    )
    if row is not None and row[1] is not None:
        marked_point = branches.marks_point(tx, successor, row[0], Point(branch, row[1], 0))
        marks.inherit(tx, marked_point.branch, branch, upto=marked_point.seq)


# --- imports that came to nothing ------------------------------------------------------------------------------------


def discard_import(tx: Tx, token: str) -> None:
    """Put all that an import has written into the trash."""
    rows = tx.all(
        "UPDATE threads SET namespace = :trash, id = CAST(key AS TEXT), branch = 0, line = 0, latest = NULL,"
        " latest_at = NULL, lease_until = NULL, run = NULL, ttl = NULL, extra = '{}', title = '', status = 'active',"
        " model = NULL, metadata = '{}', parent_call = NULL WHERE namespace = :importing AND (id = :token OR id"
        " LIKE :parts) RETURNING key",
        trash=TRASH,
        importing=IMPORTING,
        token=token,
        parts=f"{token}:%",
    )
    for (key,) in rows:
        usage.forget(tx, key)


def discard_stale_imports(tx: Tx) -> bool:
    """Put into the trash what interrupted imports have left; returns whether there was anything."""
    rows = tx.all(
        "UPDATE threads SET lease_until = NULL WHERE namespace = :importing AND id NOT LIKE :parts"
        " AND (lease_until IS NULL OR lease_until <= :now) RETURNING id",  # a copy of a database has no times of leases
        importing=IMPORTING,
        parts="%:%",
        now=tx.now(),
    )
    for (token,) in rows:
        discard_import(tx, token)
    return bool(rows)
