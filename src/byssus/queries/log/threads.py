"""Threads and their log.

- A write takes the thread's row first, so two writers of one thread queue up there on any database.
- Every write says by what right it is made (`by`): a run's lease, a claim for one, or a visit while nobody drives.
- `version` counts the writes to a thread. A writer that passes the version it knows (`expect`) cannot write past
  somebody else's message.
- A reply that asks for tools reserves a seq for each call, so results that commit in any order read in call order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from byssus.errors import ThreadMoved
from byssus.queries.accounts import quotas, usage
from byssus.queries.accounts.quotas import Charge
from byssus.queries.accounts.usage import Spent
from byssus.queries.log import leases
from byssus.queries.log.leases import By, Unleased
from byssus.store.database import Moment, Tx
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey

ANY = -1  # whatever the thread's version is
UNLEASED = Unleased()  # the usual one, who writes over nobody's lease

END = 2**62  # behind the last seq that there can be
# What waits in the inbox: 2 if there is something for the next turn, 1 if only for the end of the run.
_MAIL = (
    "COALESCE((SELECT MAX(CASE kind WHEN 'steer' THEN 2 ELSE 1 END) FROM inbox WHERE inbox.thread = threads.key), 0)"
)
# A branch is read along its segments.
ALONG = (
    # One bound on either side: of two, SQLite seeks by the segment's, and reads past all that the other one excludes.
    "segments s JOIN messages m ON m.branch = s.source"
    " AND m.seq > CASE WHEN s.after_seq < :after THEN :after ELSE s.after_seq END"
    " AND m.seq <= CASE WHEN s.upto_seq < :upto THEN s.upto_seq ELSE :upto END"
)
_PAGE = (
    f"SELECT {{}} FROM {ALONG} WHERE s.branch = :branch AND s.upto_seq > :after"
    " ORDER BY s.after_seq, m.seq LIMIT :limit"
)


class MessageRow(NamedTuple):
    """A message as it is stored."""

    id: str
    role: str
    body: str
    plain: int = 0  # 1: the writer gave JSON of their own, and not one of our messages
    spent: Spent | None = None  # None: nothing that is counted in tokens


class Position(NamedTuple):
    """Where a thread stands after a write. `mail` says what waits in its inbox: 2 steering, 1 only follow-ups."""

    head: int
    version: int
    branch: int = 0
    epoch: int = 0
    is_held: int = 0  # whether somebody drives the thread
    mail: int = 0


class ThreadRow(NamedTuple):
    key: int
    branch: int
    head: int
    version: int
    extra: str
    run: str | None  # the run that has not ended
    unledgered: int
    partial: str | None  # what had arrived of a reply
    mail: int
    created_at: str
    ttl: str | None
    owner: str | None


class ThreadInfo(NamedTuple):
    """A thread as a list shows it. Times are ISO 8601 UTC text."""

    id: str
    message_count: int
    created_at: str
    updated_at: str


def append(
    tx: Tx,
    thread_key: ThreadKey,
    messages: Sequence[MessageRow],
    *,
    by: By = UNLEASED,
    expect: int = ANY,
    reserve: int = 0,
    extra: str | None = None,
    release: Release | None = None,
    clear_partial: bool = False,
    owner: str | None = None,
    charge: Charge | None = None,
) -> Position:
    """Add messages at the end, and keep `reserve` places free behind them. The thread is made if it is new.

    The extra and the lease may change in the same step; `clear_partial` means that the saved part of a reply goes.
    `owner` becomes the thread's user, if it has none. `charge` settles what was reserved for the messages.
    """
    count = len(messages)
    size = count + reserve
    row = None
    if by is UNLEASED and expect == ANY:  # what most writes are: made for speed
        row = tx.one(
            _PLAIN_MOVE, namespace=thread_key.namespace, id=thread_key.id, size=size, count=count, now=tx.now()
        )
    if row is not None:
        key, position = row[0], Position(*row[1:])
    else:
        key, position = advance(tx, thread_key, by, size=size, count=count, expect=expect, release=release)
    add(tx, position.branch, position.head - size, messages, thread=key)
    if charge is not None:
        quotas.settle(tx, key, charge)
    if extra is not None:
        set_extra(tx, key, extra)
    if clear_partial:
        tx.run("DELETE FROM partials WHERE thread = :key", key=key)
    if owner is not None:
        quotas.take(tx, owner)
        # Asked for, and not told: who removes the user in the same transaction must see it.
        claim = "UPDATE threads SET owner = :owner WHERE key = :key AND owner IS NULL RETURNING key"
        tx.one(claim, owner=owner, key=key)
    return position


def add(tx: Tx, branch: int, after: int, messages: Sequence[MessageRow], *, thread: int) -> None:
    """Store messages behind a seq of a branch of a thread. Whose turn that is, the caller knows."""
    now = tx.now()
    if len(messages) == 1:  # what most writes are: made for speed
        name, role, body, plain, spent = messages[0]
        tx.run(_INSERTS[plain], branch=branch, seq=after + 1, id=name, role=role, body=body, now=now)
        if spent is None:
            tx.run(usage.COUNT, thread=thread, messages=1, now=now)
        else:
            usage.count(tx, thread, [spent])
        return
    for plain, same in groupby(enumerate(messages, after + 1), key=lambda each: each[1].plain):
        tx.many(
            _INSERTS[plain],
            [
                {"branch": branch, "seq": seq, "id": message_id, "role": role, "body": body, "now": now}
                for seq, (message_id, role, body, *_) in same
            ],
        )
    usage.count(tx, thread, [message.spent for message in messages])


def fill(
    tx: Tx,
    thread_key: ThreadKey,
    slots: Sequence[tuple[int, MessageRow]],
    *,
    by: By = UNLEASED,
    extra: str | None = None,
) -> Position:
    """Put messages into reserved places. A place that is taken means that somebody else settled it."""
    last = max(seq for seq, _ in slots)
    key, position = advance(tx, thread_key, by, count=len(slots), last=last, create=False)
    for seq, m in slots:
        stored = tx.one(
            "INSERT INTO messages (branch, seq, id, role, body, created_at)"
            " VALUES (:branch, :seq, :id, :role, :body, :now) ON CONFLICT (branch, seq) DO NOTHING RETURNING seq",
            branch=position.branch,
            seq=seq,
            id=m.id,
            role=m.role,
            body=m.body,
            now=tx.now(),
        )
        if not stored:
            raise ThreadMoved(thread_key.id)
    usage.count(tx, key, [message.spent for _, message in slots])
    if extra is not None:
        set_extra(tx, key, extra)
    return position


def save_extra(tx: Tx, thread_key: ThreadKey, extra: str, *, by: By = UNLEASED, expect: int = ANY) -> Position:
    """Replace the thread's extra. The thread is made if it is new."""
    return append(tx, thread_key, [], by=by, expect=expect, extra=extra)


def set_extra(tx: Tx, key: int, extra: str) -> None:
    tx.run("UPDATE threads SET extra = :extra WHERE key = :key", extra=extra, key=key)


def find(tx: Tx, thread_key: ThreadKey) -> ThreadRow | None:
    row = tx.one(
        f"SELECT key, branch, head, version, extra, run, unledgered, partials.body, {_MAIL}, created_at, ttl, owner"
        " FROM threads LEFT JOIN partials ON partials.thread = threads.key"
        " WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return ThreadRow(*row) if row else None


def is_at(tx: Tx, thread_key: ThreadKey, key: int, branch: int, created_at: str) -> bool:
    """Whether a thread is still the one that it was, and on the same branch."""
    row = find(tx, thread_key)
    return row is not None and (row.key, row.branch, row.created_at) == (key, branch, created_at)


def page(tx: Tx, branch: int, *, after: int, upto: int, limit: int) -> list[tuple[int, str]]:
    """The next messages of a branch in order, each with its seq: short reads keep the WAL short."""
    return tx.all(_PAGE.format("m.seq, m.body"), branch=branch, after=after, upto=upto, limit=limit)


def page_as_given(tx: Tx, branch: int, *, after: int, upto: int, limit: int) -> list[tuple[int, str, int]]:
    """The same, each with whether it is JSON of its writer's own."""
    return tx.all(_PAGE.format("m.seq, m.body, m.plain"), branch=branch, after=after, upto=upto, limit=limit)


def recent(tx: Tx, *, namespace: str = "", limit: int, before: ThreadInfo | None = None) -> list[ThreadInfo]:
    """Threads, the one that was written last first; `before` goes on after the last one of an earlier list."""
    rows = tx.all(
        "SELECT id, message_count, created_at, updated_at FROM threads"
        " WHERE namespace = :namespace AND (updated_at, id) < (:updated_at, :id)"
        " ORDER BY updated_at DESC, id DESC LIMIT :limit",
        namespace=namespace,
        updated_at=before.updated_at if before else "~",
        id=before.id if before else "",
        limit=limit,
    )
    return [ThreadInfo(*row) for row in rows]


def info(tx: Tx, thread_key: ThreadKey) -> ThreadInfo | None:
    row = tx.one(
        "SELECT id, message_count, created_at, updated_at FROM threads WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return ThreadInfo(*row) if row else None


def unfinished(tx: Tx, *, namespace: str = "") -> list[tuple[ThreadInfo, str | None, int]]:
    """Threads with a run that has not ended and that no living lease protects, except where a person must answer first,
    or has said that nothing shall go on.

    Each comes with the owner and the epoch of its lease, if that has not run out: the owner may be gone all the same.
    """
    rows = tx.all(
        "SELECT id, message_count, created_at, updated_at,"
        " CASE WHEN lease_until > :now THEN lease_owner END, lease_epoch FROM threads"
        " WHERE run IS NOT NULL AND namespace = :namespace AND status NOT IN ('paused', 'cancelled') AND NOT EXISTS"
        " (SELECT 1 FROM tool_calls WHERE tool_calls.thread = threads.key AND tool_calls.status = 'waiting')"
        " ORDER BY key",
        namespace=namespace,
        now=tx.now(),
    )
    return [(ThreadInfo(*row[:4]), row[4], row[5]) for row in rows]


def set_owner(tx: Tx, thread_key: ThreadKey, owner: str | None) -> None:
    """Say whose thread it is: a user, who must exist, or nobody. The thread is made if it is new."""
    key = key_of(tx, thread_key)
    if owner is not None:
        quotas.take(tx, owner)
    change = "UPDATE threads SET owner = :owner, version = version + 1 WHERE key = :key RETURNING key"
    tx.one(change, owner=owner, key=key)  # asked for, and not told: see `append`


def save_partial(tx: Tx, thread_key: ThreadKey, body: str, *, by: By) -> None:
    """Keep what has arrived of a reply so far. That is a write to the thread: whoever knows it must look again."""
    key, _ = advance(tx, thread_key, by, create=False)
    tx.run(
        "INSERT INTO partials (thread, body, saved_at) VALUES (:thread, :body, :now)"
        " ON CONFLICT (thread) DO UPDATE SET body = excluded.body, saved_at = excluded.saved_at",
        thread=key,
        body=body,
        now=tx.now(),
    )


def distrust(tx: Tx, thread_key: ThreadKey, upto: int, *, by: By) -> None:
    """From here up, the ledger does not know which calls have run."""
    key, _ = hold(tx, thread_key, by)
    tx.run(
        "UPDATE threads SET unledgered = :upto WHERE key = :key AND unledgered < :upto",
        upto=upto,
        key=key,
    )


def message_id(tx: Tx, branch: int, seq: int) -> str | None:
    """The id of the message at a place, also if its writer gave it none."""
    row = tx.one(
        "SELECT m.id FROM segments s JOIN messages m ON m.branch = s.source AND m.seq = :seq"
        " WHERE s.branch = :branch AND s.after_seq < :seq AND s.upto_seq >= :seq",
        branch=branch,
        seq=seq,
    )
    return row[0] if row else None


def hold(tx: Tx, thread_key: ThreadKey, by: By) -> tuple[int, int]:
    """Take the thread's row without changing anything but the lease: its key and its branch."""
    values = leases.parameters(tx, by)
    row = tx.one(_TOUCHES[type(by).__name__], namespace=thread_key.namespace, id=thread_key.id, now=tx.now(), **values)
    if row is None:
        leases.refuse(tx, thread_key, by)
        raise ThreadMoved(thread_key.id)
    return row[0], row[1]


def key_of(tx: Tx, thread_key: ThreadKey) -> int:
    """The thread's key, its row taken: nobody deletes it meanwhile. The thread is made if it is new."""
    take = "UPDATE threads SET head = head WHERE namespace = :namespace AND id = :id RETURNING key"
    while (row := tx.one(take, namespace=thread_key.namespace, id=thread_key.id)) is None:
        make(tx, thread_key, tx.now())
    key: int = row[0]
    return key


def advance(
    tx: Tx,
    thread_key: ThreadKey,
    by: By,
    *,
    size: int = 0,
    count: int = 0,
    last: int = 0,
    expect: int = ANY,
    release: Release | None = None,
    create: bool = True,
) -> tuple[int, Position]:
    """Take the thread's row and move its head: one statement where the thread exists and may be written."""
    values: dict[str, Any] = {
        "namespace": thread_key.namespace,
        "id": thread_key.id,
        "size": size,
        "count": count,
        "now": tx.now(),
    }
    values |= leases.parameters(tx, by) | {"last": last, "expect": expect}
    move = _move("" if by is UNLEASED else type(by).__name__, release, last > 0, expect != ANY)
    while (row := tx.one(move, **values)) is None:
        # Where others write at the same time, what refused us may be gone when we look: then it is tried again.
        leases.refuse(tx, thread_key, by)
        known = find(tx, thread_key)
        if known is None and create:
            make(tx, thread_key, tx.now())
            made = find(tx, thread_key)
            if expect == 0 and made is not None and made.head == 0:  # there was none, as was expected
                values["expect"] = expect = made.version
        elif known is None or expect not in (ANY, known.version):
            raise ThreadMoved(thread_key.id)
    return row[0], Position(*row[1:])


@functools.cache
def _move(kind: str, release: Release | None, has_last: bool, has_expected: bool) -> str:
    """The statement with the conditions that are needed: this is what every append runs. Whoever comes this way may
    write what is not in the index of names: see 0008_memory.sql."""
    guard, change = leases.GUARD[kind], leases.RELEASES[release] if release else leases.CHANGE[kind]
    head = "CASE WHEN head + :size < :last THEN :last ELSE head + :size END" if has_last else "head + :size"
    leased = f", lease_epoch, lease_until IS NOT NULL, {_MAIL if kind == 'Lease' else 0}" if kind else ""
    return (
        f"UPDATE threads SET head = {head}, version = version + 1, message_count = message_count + :count,"
        f" updated_at = :now, named = 0{change} WHERE namespace = :namespace AND id = :id"
        f"{' AND version = :expect' if has_expected else ''} AND {guard} RETURNING key, head, version, branch{leased}"
    )


_PLAIN_MOVE = _move("", None, False, False)
_INSERTS = (
    "INSERT INTO messages (branch, seq, id, role, body, created_at) VALUES (:branch, :seq, :id, :role, :body, :now)",
    "INSERT INTO messages (branch, seq, id, role, body, created_at, plain)"
    " VALUES (:branch, :seq, :id, :role, :body, :now, 1)",
)
_TOUCHES = {
    kind: (
        f"UPDATE threads SET head = head{leases.CHANGE[kind]} WHERE namespace = :namespace AND id = :id"
        f" AND {leases.GUARD[kind]} RETURNING key, branch"
    )
    for kind in ("Claim", "Lease")
}


def make(tx: Tx, thread_key: ThreadKey, now: Moment) -> bool:
    """Make a thread; False if there is one of this name."""
    row = tx.one(
        "INSERT INTO threads (namespace, id, branch, head, version, message_count, extra, created_at, updated_at)"
        " VALUES (:namespace, :id, 0, 0, 0, 0, '{}', :now, :now)"
        " ON CONFLICT (namespace, id) DO NOTHING RETURNING key",
        namespace=thread_key.namespace,
        id=thread_key.id,
        now=now,
    )
    if row is None:  # another writer was faster
        return False
    branch = tx.one("INSERT INTO branches (thread) VALUES (:thread) RETURNING key", thread=row[0])
    assert branch is not None
    tx.run(
        "INSERT INTO segments (branch, source, after_seq, upto_seq) VALUES (:branch, :branch, 0, :end)",
        branch=branch[0],
        end=END,
    )
    # In a statement of its own: one that was deleted while we waited for its name has left its mark by now.
    tx.run(
        "UPDATE threads SET branch = :branch, line = :branch, version = COALESCE((SELECT MAX(value) FROM floors), 0),"
        " lease_epoch = COALESCE((SELECT MAX(value) FROM floors), 0) WHERE key = :key",
        branch=branch[0],
        key=row[0],
    )
    return True
