"""Threads and their log.

- A write locks the thread's row first, so the writers of one thread queue up there on any database.
- Every write says by what right it is made (`by`): a run's lease, a claim for one, or a write without a run, which is
  allowed while no run holds the lease.
- `version` counts the writes to a thread. A writer that passes the version it knows (`expect`) cannot write behind a
  message that it has not seen.
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
from byssus.queries.log import leases, runs
from byssus.queries.log.leases import By, Claim, Late, Unleased
from byssus.queries.log.runs import RequestKey, RunBegin, RunEnd
from byssus.queries.tasks import owners
from byssus.store.database import Moment, Row, Tx
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey

ANY = -1  # any version of the thread will do
UNLEASED = Unleased()

END = 2**62  # above any seq
# What waits in the inbox: 2 if there is something for the next turn, 1 if only for the end of the run.
_MAIL = (
    "COALESCE((SELECT MAX(CASE kind WHEN 'steer' THEN 2 ELSE 1 END) FROM inbox WHERE inbox.thread = threads.key), 0)"
)
# When a thread was made here, by its first write or by an import.
MADE_AT = "COALESCE(imported_at, created_at)"
# A branch is read along its segments.
ALONG = (
    # One bound on either side: with two, SQLite seeks by the segment's, and reads all rows that the other excludes.
    "segments s JOIN messages m ON m.branch = s.source"
    " AND m.seq > CASE WHEN s.after_seq < :after THEN :after ELSE s.after_seq END"
    " AND m.seq <= CASE WHEN s.upto_seq < :upto THEN s.upto_seq ELSE :upto END"
)
# A page asks for a range of seqs as long as itself, and for more only if some of these are empty. With a LIMIT alone,
# Postgres would sort everything behind the page, because it does not know that segments follow one another.
_PAGE = (
    f"SELECT {{}} FROM {ALONG} WHERE s.branch = :branch AND s.upto_seq > :after AND s.after_seq < :upto"
    " ORDER BY s.after_seq, m.seq LIMIT :limit"
)
_BACK = (
    f"SELECT {{}} FROM {ALONG} WHERE s.branch = :branch AND s.upto_seq > :after AND s.after_seq < :upto{{}}"
    " ORDER BY s.after_seq DESC, m.seq DESC LIMIT :limit"
)
_FEW = 64  # messages: most replies are among the last ones
# Whether a thread is a child of the one with this key, or a child of such a child.
_IS_BELOW = (
    "key IN (WITH RECURSIVE below (key) AS (SELECT key FROM threads WHERE parent = :key"
    " UNION SELECT k.key FROM below b JOIN threads k ON k.parent = b.key) SELECT key FROM below)"
)


class MessageRow(NamedTuple):
    """A message as it is stored."""

    id: str
    role: str
    body: str
    plain: int = 0  # 1: the body is an application's own JSON, not an encoded Message
    spent: Spent | None = None  # None: the message has no tokens to count


class Position(NamedTuple):
    """Where a thread stands after a write. `mail` says what waits in its inbox: 2 steering, 1 only follow-ups."""

    head: int
    version: int
    branch: int = 0
    epoch: int = 0
    is_held: int = 0  # whether a run holds the lease
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
    made_at: str  # with the key, it identifies the thread: one that is made anew may get the same key
    ttl: str | None
    owner: str | None
    message_count: int = 0
    created_at: str = ""


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
    begins: RunBegin | None = None,
    ends: RunEnd | None = None,
) -> Position:
    """Add messages at the end, and keep `reserve` places free behind them. The thread is made if it is new.

    In the same step, `extra` replaces the thread's extra, `release` gives the lease back, `clear_partial` deletes the
    saved part of a reply, and `charge` settles the tokens that were reserved for the messages. `owner` becomes the
    thread's user, if it has none. A claim comes with the run that `begins`, a release with how it `ends`.
    """
    count = len(messages)
    size = count + reserve
    row = None
    before = _unended(tx, thread_key, begins) if begins is not None and begins.takes_over else None
    if by == UNLEASED and expect == ANY:  # a fast path, for most writes
        row = tx.one(
            _PLAIN_MOVE, namespace=thread_key.namespace, id=thread_key.id, size=size, count=count, now=tx.now()
        )
    if row is not None:
        key, position = row[0], Position(*row[1:])
    else:
        key, position = advance(tx, thread_key, by, size=size, count=count, expect=expect, release=release)
    if begins is not None:  # first: a message that is looked for among those of earlier runs is not the new one
        _begin(tx, key, position, by, begins, size, before)
    add(tx, position.branch, position.head - size, messages, thread=key)
    if ends is not None and release is not None and not position.is_held:
        runs.end(tx, key, ends, head=position.head, epoch=position.epoch)
    if charge is not None:
        quotas.settle(tx, key, charge)
    if extra is not None:
        set_extra(tx, key, extra)
    if clear_partial:
        tx.run("DELETE FROM partials WHERE thread = :key", key=key)
    if owner is not None:
        _own(tx, key, owner)
    return position


def _own(tx: Tx, key: int, owner: str) -> None:
    quotas.take(tx, owner)
    # `one`, not `run`: a later query of the same transaction that removes the user must see it.
    change = "UPDATE threads SET owner = :owner WHERE key = :key AND owner IS NULL RETURNING key"
    if tx.one(change, owner=owner, key=key) is not None:
        owners.follow(tx, key)
    tx.run(f"UPDATE threads SET owner = :owner WHERE owner IS NULL AND {_IS_BELOW}", owner=owner, key=key)


def _unended(tx: Tx, thread_key: ThreadKey, begins: RunBegin) -> str | None:
    """The run that a thread has not ended, its row locked."""
    row = take(tx, thread_key, "run")
    run: str | None = row[0] if row else None
    if begins.continues and run != begins.id:  # another process was faster, and has ended it
        raise ThreadMoved(thread_key.id)
    return run


def _begin(tx: Tx, key: int, position: Position, by: By, begins: RunBegin, size: int, before: str | None) -> None:
    assert isinstance(by, Claim)
    runs.begin(
        tx,
        key,
        begins,
        before=before,
        branch=position.branch,
        first=position.head - size + 1,
        owner=by.owner.split(" ", 1)[0],
        epoch=position.epoch,
    )


def append_requested(
    tx: Tx, thread_key: ThreadKey, messages: Sequence[MessageRow], *, by: By, run: str, request: RequestKey
) -> Position:
    """Add a prompt that has a request key, in a run that has begun already."""
    key, position = advance(tx, thread_key, by, size=len(messages), count=len(messages))
    runs.request(tx, key, run, request, head=position.head - len(messages))
    add(tx, position.branch, position.head - len(messages), messages, thread=key)
    tx.run("DELETE FROM partials WHERE thread = :key", key=key)
    return position


def append_late(
    tx: Tx,
    thread_key: ThreadKey,
    *,
    message: MessageRow,
    behind: Position,
    reserve: int,
    extra: str | None,
    charge: Charge | None,
    epoch: int,
) -> None:
    """Add a reply that could not be stored in time. Raises `ThreadMoved` if something was added since, or the reply."""
    row = take(tx, thread_key, "branch, head", by=Late(epoch))
    if row != (behind.branch, behind.head):
        raise ThreadMoved(thread_key.id)
    append(
        tx,
        thread_key,
        [message],
        by=Late(epoch),
        reserve=reserve,
        extra=extra,
        clear_partial=True,
        charge=charge,
    )


def release_late(
    tx: Tx,
    thread_key: ThreadKey,
    *,
    extra: str | None,
    charge: Charge | None,
    epoch: int,
    ends: RunEnd | None = None,
) -> None:
    """Give the lease of an interrupted run back, if that was not done."""
    row = take(tx, thread_key, "lease_until", by=Late(epoch))
    if row is not None and row[0] is not None:
        append(tx, thread_key, [], by=Late(epoch), extra=extra, release=Release.PAUSE, charge=charge, ends=ends)


def add(tx: Tx, branch: int, after: int, messages: Sequence[MessageRow], *, thread: int) -> None:
    """Store messages behind a seq of a branch. The caller has locked the thread's row and moved its head."""
    now = tx.now()
    if len(messages) == 1:  # a fast path, for most writes
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
    """Put messages into reserved slots. Raises `ThreadMoved` if one is taken: another process has filled it."""
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
        f"SELECT key, branch, head, version, extra, run, unledgered, partials.body, {_MAIL}, {MADE_AT}, ttl, owner,"
        " message_count, created_at FROM threads LEFT JOIN partials ON partials.thread = threads.key"
        " WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return ThreadRow(*row) if row else None


def is_at(tx: Tx, thread_key: ThreadKey, key: int, branch: int, made_at: str) -> bool:
    """Whether a thread is still the one that it was, and on the same branch."""
    row = find(tx, thread_key)
    return row is not None and (row.key, row.branch, row.made_at) == (key, branch, made_at)


def page(tx: Tx, branch: int, *, after: int, upto: int, limit: int) -> list[tuple[int, str]]:
    """The next messages of a branch, in order: seq and body. Short reads keep the WAL short."""
    return _forwards(tx, "m.seq, m.body", branch, after, upto, limit)


def page_as_given(tx: Tx, branch: int, *, after: int, upto: int, limit: int) -> list[tuple[int, str, int]]:
    """The next messages of a branch, in order: seq, body, and whether the body is an application's own JSON."""
    return _forwards(tx, "m.seq, m.body, m.plain", branch, after, upto, limit)


def page_before(tx: Tx, branch: int, *, before: int, limit: int) -> list[tuple[int, str]]:
    """The last messages of a branch before a seq, in order: seq and body."""
    return rows_before(tx, "m.seq, m.body", branch, before=before, limit=limit)


def rows_before(tx: Tx, columns: str, branch: int, *, before: int, limit: int) -> list[Row]:
    """Some columns of the last messages of a branch before a seq, in order."""
    found: list[Row] = []
    span, upto = limit, before - 1
    while upto > 0 and len(found) < limit:
        after = max(upto - span, 0)
        found += tx.all(_BACK.format(columns, ""), branch=branch, after=after, upto=upto, limit=limit - len(found))
        span, upto = 2 * span, after
    return found[::-1]


def last_spoken(tx: Tx, branch: int, *, before: int, roles: Sequence[str]) -> tuple[int, str] | None:
    """The last message before a seq whose writer has one of these roles: seq and body; None if there is none."""
    names = {f"role_{number}": role for number, role in enumerate(roles)}
    spoken = f" AND m.role IN ({', '.join(f':{name}' for name in names)})"
    span, upto = _FEW, before - 1
    while upto > 0:
        after = max(upto - span, 0)
        row = tx.one(_BACK.format("m.seq, m.body", spoken), branch=branch, after=after, upto=upto, limit=1, **names)
        if row is not None:
            return row[0], row[1]
        span, upto = 2 * span, after
    return None


def _forwards(tx: Tx, columns: str, branch: int, after: int, upto: int, limit: int) -> list[Row]:
    found: list[Row] = []
    span = limit
    while after < upto and len(found) < limit:
        end = min(after + span, upto)
        found += tx.all(_PAGE.format(columns), branch=branch, after=after, upto=end, limit=limit - len(found))
        span, after = 2 * span, end
    return found


def set_owner(tx: Tx, thread_key: ThreadKey, owner: str | None) -> None:
    """Set the user of a thread and its children, who must exist, or remove it (None). A new thread is made."""
    (key,) = take_or_make(tx, thread_key)
    if owner is not None:
        quotas.take(tx, owner)
    change = "UPDATE threads SET owner = :owner, version = version + 1 WHERE key = :key RETURNING key"
    tx.one(change, owner=owner, key=key)  # `one`, not `run`: see `append`
    tx.run(f"UPDATE threads SET owner = :owner, version = version + 1 WHERE {_IS_BELOW}", owner=owner, key=key)
    owners.follow(tx, key)


def save_partial(tx: Tx, thread_key: ThreadKey, body: str, *, by: By, piece: str | None = None) -> None:
    """Save the part of a reply that has arrived so far, in place of what was saved. The thread's version changes.

    `body` is a message, and `piece` the first of the pieces that are added to it: see `add_piece`.
    """
    key, _ = advance(tx, thread_key, by, create=False)
    tx.run("DELETE FROM partials WHERE thread = :thread", thread=key)  # and its pieces with it
    tx.run(
        "INSERT INTO partials (thread, body, saved_at) VALUES (:thread, :body, :now)",
        thread=key,
        body=body,
        now=tx.now(),
    )
    if piece is not None:
        _insert_piece(tx, key, 1, piece)


def add_piece(tx: Tx, thread_key: ThreadKey, number: int, body: str, *, by: By) -> None:
    """Add the next piece to the saved part of a reply. The thread's version changes."""
    key, _ = advance(tx, thread_key, by, create=False)
    _insert_piece(tx, key, number, body)


def _insert_piece(tx: Tx, key: int, number: int, body: str) -> None:
    """Not behind a piece that could not be written: the writer notices, and saves the whole again."""
    tx.run(
        "INSERT INTO pieces (thread, number, body) SELECT thread, :number, :body FROM partials WHERE thread = :thread"
        " AND (:number = 1 OR EXISTS (SELECT 1 FROM pieces p WHERE p.thread = :thread AND p.number = :number - 1))",
        thread=key,
        number=number,
        body=body,
    )


def pieces(tx: Tx, thread: int, *, after: int = 0, limit: int = END) -> list[tuple[int, str]]:
    """The pieces of a partial behind a number, in order: number and body."""
    return tx.all(
        "SELECT number, body FROM pieces WHERE thread = :thread AND number > :after ORDER BY number LIMIT :limit",
        thread=thread,
        after=after,
        limit=limit,
    )


def distrust(tx: Tx, thread_key: ThreadKey, upto: int, *, by: By) -> None:
    """Record that the ledger does not know which calls up to this seq have run."""
    key, _ = hold(tx, thread_key, by)
    tx.run(
        "UPDATE threads SET unledgered = :upto WHERE key = :key AND unledgered < :upto",
        upto=upto,
        key=key,
    )


def message_id(tx: Tx, branch: int, seq: int) -> str | None:
    """The id of the message at a seq of a branch."""
    row = tx.one(
        "SELECT m.id FROM segments s JOIN messages m ON m.branch = s.source AND m.seq = :seq"
        " WHERE s.branch = :branch AND s.after_seq < :seq AND s.upto_seq >= :seq",
        branch=branch,
        seq=seq,
    )
    return row[0] if row else None


def take(tx: Tx, thread_key: ThreadKey, columns: str = "key", *, by: By | None = None) -> Row | None:
    """Lock a thread's row until the transaction ends, and return some columns of it; None if there is no such thread.

    With `by`, the lease is checked and changed in the same statement; a lease that forbids the write is an error.
    """
    guard, change, values = (f" AND {by.guard}", by.change, by.parameters(tx)) if by is not None else ("", "", {})
    statement = (
        f"UPDATE threads SET touched = touched + 1{change} WHERE namespace = :namespace AND id = :id{guard}"
        f" RETURNING {columns}"
    )
    values |= {"namespace": thread_key.namespace, "id": thread_key.id, "now": tx.now()}
    while (row := tx.one(statement, **values)) is None:
        # A lease that forbade it may have ended since: then it is tried again.
        if by is None or not leases.refuse(tx, thread_key, by):
            return None
    return row


def take_or_make(tx: Tx, thread_key: ThreadKey, columns: str = "key") -> Row:
    """Lock a thread's row until the transaction ends, and return some columns. The thread is made if it is new."""
    while (row := take(tx, thread_key, columns)) is None:
        make(tx, thread_key, tx.now())
    return row


def touch(tx: Tx, thread_key: ThreadKey) -> None:
    """Let followers notice a change that no other statement on the thread's row goes with."""
    tx.run(
        "UPDATE threads SET touched = touched + 1 WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )


def hold(tx: Tx, thread_key: ThreadKey, by: By) -> tuple[int, int]:
    """Lock the row of a thread that must exist, with a run's lease: its key and its branch."""
    row = take(tx, thread_key, "key, branch", by=by)
    if row is None:
        raise ThreadMoved(thread_key.id)
    return row[0], row[1]


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
    """Take the thread's row, move its head by `size` places (or to `last`), and count the messages.

    That is one statement where the thread exists and may be written. Returns its key, and where it stands.
    """
    change = leases.RELEASES[release] if release else by.change
    columns = _LEASED_POSITION if change else _POSITION  # a write that changes the lease must learn the result
    move = _move(by.guard, change, columns, has_last=last > 0, has_expected=expect != ANY)
    row = _moved(tx, thread_key, by, move, size=size, count=count, last=last, expect=expect, create=create)
    return row[0], Position(*row[1:])


def advance_indexed(tx: Tx, thread_key: ThreadKey, by: By, columns: str, *, size: int = 0) -> Row:
    """Take the row of a thread and move its head, for messages that are in the index of ids (see 0008_memory.sql).

    Returns these columns of the row. The thread is made if it is new.
    """
    move = _move(by.guard, by.change, columns, named="CASE WHEN head = 0 THEN 1 ELSE named END")
    return _moved(tx, thread_key, by, move, size=size, count=size)


def _moved(
    tx: Tx,
    thread_key: ThreadKey,
    by: By,
    move: str,
    *,
    size: int,
    count: int,
    last: int = 0,
    expect: int = ANY,
    create: bool = True,
) -> Row:
    """The row that a statement of `_move` returns. A thread that is missing is made, unless it should exist."""
    values: dict[str, Any] = {
        "namespace": thread_key.namespace,
        "id": thread_key.id,
        "size": size,
        "count": count,
        "now": tx.now(),
    }
    values |= by.parameters(tx) | {"last": last, "expect": expect}
    while (row := tx.one(move, **values)) is None:
        # What forbade the write may have changed since, where others write at the same time: then it is tried again.
        leases.refuse(tx, thread_key, by)
        known = find(tx, thread_key)
        if known is None and create:
            make(tx, thread_key, tx.now())
            made = find(tx, thread_key)
            if expect == 0 and made is not None and made.head == 0:  # there was none, as was expected
                values["expect"] = expect = made.version
        elif known is None or expect not in (ANY, known.version):
            raise ThreadMoved(thread_key.id)
    return row


@functools.cache
def _move(
    guard: str, change: str, columns: str, *, named: str = "0", has_last: bool = False, has_expected: bool = False
) -> str:
    """The statement that every write to a log runs, with only the conditions that are needed."""
    head = "CASE WHEN head + :size < :last THEN :last ELSE head + :size END" if has_last else "head + :size"
    return (
        f"UPDATE threads SET head = {head}, version = version + 1, message_count = message_count + :count,"
        f" updated_at = :now, named = {named}{change} WHERE namespace = :namespace AND id = :id"
        f"{' AND version = :expect' if has_expected else ''} AND {guard} RETURNING {columns}"
    )


_POSITION = "key, head, version, branch"
_LEASED_POSITION = f"{_POSITION}, lease_epoch, lease_until IS NOT NULL, {_MAIL}"
_PLAIN_MOVE = _move(UNLEASED.guard, UNLEASED.change, _POSITION)
_INSERTS = (
    "INSERT INTO messages (branch, seq, id, role, body, created_at) VALUES (:branch, :seq, :id, :role, :body, :now)",
    "INSERT INTO messages (branch, seq, id, role, body, created_at, plain)"
    " VALUES (:branch, :seq, :id, :role, :body, :now, 1)",
)


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
    if row is None:  # it exists, or another writer has just made it
        return False
    branch = tx.one("INSERT INTO branches (thread) VALUES (:thread) RETURNING key", thread=row[0])
    assert branch is not None
    tx.run(
        "INSERT INTO segments (branch, source, after_seq, upto_seq) VALUES (:branch, :branch, 0, :end)",
        branch=branch[0],
        end=END,
    )
    # A statement of its own: it sees the floor that a thread of this id has left, which was deleted while we waited.
    tx.run(
        "UPDATE threads SET branch = :branch, line = :branch, version = COALESCE((SELECT MAX(value) FROM floors), 0),"
        " lease_epoch = COALESCE((SELECT MAX(value) FROM floors), 0) WHERE key = :key",
        branch=branch[0],
        key=row[0],
    )
    return True
