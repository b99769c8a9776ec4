"""Making checkpoints: of a list of messages that the caller passes, or of a thread as it stands.

- What is new in a list is stored, and nothing else: behind the thread's last message, or on a branch where it differs.
- A thread that goes over to another branch leaves nothing without a name.
"""

from __future__ import annotations

from collections.abc import Sequence

from byssus.errors import InputError
from byssus.queries.accounts.quotas import Charge
from byssus.queries.log import branches, marks, runs, threads
from byssus.queries.log.branches import Point
from byssus.queries.log.leases import By
from byssus.queries.log.runs import RunEnd
from byssus.queries.log.threads import ANY, UNLEASED, MessageRow, Position
from byssus.queries.versions import children
from byssus.queries.versions.checkpoints import (
    HIGHEST_STEP,
    LINES,
    ON_LINE,
    Agreement,
    NewCheckpointRow,
    ThreadState,
    drop,
    inherit,
    named,
    show_latest,
    shown,
    thread_state_of,
)
from byssus.store.database import Moment, Tx
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey


def put(
    tx: Tx,
    thread_key: ThreadKey,
    new: NewCheckpointRow,
    tail: Sequence[MessageRow],
    agreement: Agreement,
    *,
    left: NewCheckpointRow,
    by: By = UNLEASED,
    expect: int = ANY,
) -> ThreadState:
    """Make a checkpoint whose messages agree with the thread's up to a place, and go on with a tail of their own.

    Behind the thread's last message, the tail is appended to it. Elsewhere it becomes a branch; the thread goes over to
    it, unless it is at a higher step already. What it leaves gets a name, if it has none: `left`. The thread is made if
    it is new.
    """
    size = len(tail) if agreement.is_end else 0
    key, _ = threads.advance(tx, thread_key, by, size=size, count=size, expect=expect)
    thread = on_its_line(tx, key)
    freed = _make_room(tx, thread, new)
    if agreement.is_end:
        threads.add(tx, thread.branch, thread.head - size, tail, thread=key)
        point = thread.point
    elif not tail:
        point = Point(thread.branch, agreement.seq, agreement.messages)
    else:
        point = _diverge(tx, thread, new, left, tail, agreement)
    insert(tx, thread, new, point)
    if freed:
        branches.collect(tx, freed)
    show_latest(tx, key)
    return thread


def put_here(
    tx: Tx, thread_key: ThreadKey, new: NewCheckpointRow, *, by: By, expect: int = ANY, extra: str | None = None
) -> Position:
    """Make a checkpoint of a thread as it stands, behind its latest one."""
    key, position = threads.advance(tx, thread_key, by, expect=expect)
    if extra is not None:
        threads.set_extra(tx, key, extra)
    thread = on_its_line(tx, key)
    insert(tx, thread, following(tx, thread, new), thread.point)
    show_latest(tx, key)
    return position


def on_its_line(tx: Tx, key: int) -> ThreadState:
    """The thread, with its line stored: from here on its branch may change."""
    tx.run(f"UPDATE threads AS t SET line = {ON_LINE} WHERE key = :key AND line = 0", key=key)
    return thread_state_of(tx, key)


def append(
    tx: Tx,
    thread_key: ThreadKey,
    messages: Sequence[MessageRow],
    *,
    new: NewCheckpointRow,
    by: By,
    extra: str | None = None,
    release: Release | None = None,
    clear_partial: bool = False,
    charge: Charge | None = None,
    ends: RunEnd | None = None,
) -> Position:
    """Add a run's messages, and a checkpoint of the thread as it stands then: for the end of a turn, when no call is
    open. It asks nothing, and costs no round trip."""
    position = threads.append(
        tx,
        thread_key,
        messages,
        by=by,
        extra=extra,
        release=release,
        clear_partial=clear_partial,
        charge=charge,
        ends=ends,
    )
    _add_here(tx, thread_key, new)
    return position


def _add_here(tx: Tx, thread_key: ThreadKey, new: NewCheckpointRow) -> None:
    tx.run(
        "INSERT INTO checkpoints (line, id, step, version, parent, branch, seq, message_count, about, body, extra,"
        f" created_at) SELECT {ON_LINE}, :id,"
        " CASE WHEN c.step = :highest THEN c.step ELSE COALESCE(c.step, 0) + 1 END, t.version, c.id, t.branch, t.head,"
        " t.message_count, :about, :body, t.extra, :now FROM threads t LEFT JOIN checkpoints c ON c.key = t.latest"
        " WHERE t.namespace = :namespace AND t.id = :thread",
        namespace=thread_key.namespace,
        thread=thread_key.id,
        highest=HIGHEST_STEP,
        id=new.id,
        about=new.about,
        body=new.body,
        now=tx.now(),
    )
    tx.run(
        f"UPDATE threads AS t SET line = {ON_LINE},"
        f" latest = (SELECT MAX(c.key) FROM checkpoints c WHERE c.id = :id AND c.line = {ON_LINE}), latest_at = :now"
        " WHERE namespace = :namespace AND id = :thread",
        namespace=thread_key.namespace,
        thread=thread_key.id,
        id=new.id,
        now=tx.now(),
    )


def following(tx: Tx, thread: ThreadState, new: NewCheckpointRow) -> NewCheckpointRow:
    """The checkpoint as the child of the latest one."""
    latest = shown(tx, thread.line, limit=1)
    if not latest:
        return new._replace(step=1)
    return new._replace(step=min(latest[0].step + 1, HIGHEST_STEP), parent=latest[0].id)


def insert(tx: Tx, thread: ThreadState, new: NewCheckpointRow, point: Point, *, line: int | None = None) -> None:
    """Add the row. Where results may still arrive before its point, it gets a branch where those slots stay empty."""
    branch = branches.make(tx, thread.key, point) if branches.empty_slots(tx, point) else point.branch
    now: Moment | str = tx.now() if new.created_at is None else new.created_at
    tx.run(
        "INSERT INTO checkpoints (line, id, step, version, parent, branch, seq, message_count, about, body, extra,"
        " created_at) VALUES (:line, :id, :step, :version, :parent, :branch, :seq, :count, :about, :body, :extra,"
        " :now)",
        line=line or thread.line,
        id=new.id,
        step=new.step,
        version=thread.version,
        parent=new.parent,
        branch=branch,
        seq=point.seq,
        count=point.messages,
        about=new.about,
        body=new.body,
        extra=thread.extra,
        now=now,
    )


def _make_room(tx: Tx, thread: ThreadState, new: NewCheckpointRow) -> list[int]:
    """Remove the checkpoint that has this id; returns the branches that it was read along."""
    _refuse_cycle(tx, thread, new)
    old = named(tx, thread.line, new.id)
    return [] if old is None else drop(tx, thread.key, [old.doomed]).branches


def _refuse_cycle(tx: Tx, thread: ThreadState, new: NewCheckpointRow) -> None:
    """Refuse a checkpoint that would be its own ancestor. A new id can be one only if another checkpoint names it."""
    if new.parent is None:
        return
    is_parent = tx.one(
        f"SELECT 1 FROM {LINES} CROSS JOIN checkpoints c WHERE c.line = i.source AND c.parent = :id LIMIT 1",
        line=thread.line,
        id=new.id,
        last=2**62,
    )
    if new.parent != new.id and is_parent is None:
        return
    path: list[str] = [new.id]
    parent: str | None = new.parent
    while parent is not None and parent != new.id and parent not in path:
        path.append(parent)
        row = named(tx, thread.line, parent)
        parent = row.parent if row else None
    if parent == new.id:
        raise InputError(
            f"checkpoint {new.id!r} of thread {thread.id!r} would be its own ancestor: "
            f"{' <- '.join(map(repr, [*path, new.id]))}; name another parent_checkpoint_id"
        )


def _diverge(
    tx: Tx,
    thread: ThreadState,
    new: NewCheckpointRow,
    left: NewCheckpointRow,
    tail: Sequence[MessageRow],
    agreement: Agreement,
) -> Point:
    """Store the tail on a branch of its own, and let the thread go over to it."""
    start = Point(thread.branch, agreement.seq, agreement.messages)
    # A caller may replace its last message at each put, as a status line. Then only that part of the tail gets a branch
    # of its own; the rest goes to a branch that the next put can continue.
    lasting = len(tail) - (thread.message_count - agreement.messages)
    if lasting > 0 and branches.is_long(tx, start):
        start, tail = _go_on(tx, thread, start, tail[:lasting]), tail[lasting:]
    branch = branches.begin(tx, thread.key, branches.segments_upto(tx, start))
    marks.inherit(tx, thread.branch, branch, upto=agreement.seq)  # the thread's marks, also if it leaves another branch
    threads.add(tx, branch, start.seq, tail, thread=thread.key)
    point = Point(branch, start.seq + len(tail), start.messages + len(tail))
    latest = shown(tx, thread.line, limit=1)  # without the one that is replaced
    if not latest or new.step >= latest[0].step:
        leave(tx, thread, left, apart=True)
        children.close_calls(tx, thread.key)
        go_over(tx, thread.key, point)
    return point


def _go_on(tx: Tx, thread: ThreadState, start: Point, messages: Sequence[MessageRow]) -> Point:
    """Store messages behind a point, on a branch that later ones can go on with."""
    branch = branches.free_source(tx, thread.key, start)
    if branch is None:
        branch = branches.make(tx, thread.key, start)
    threads.add(tx, branch, start.seq, messages, thread=thread.key)
    return Point(branch, start.seq + len(messages), start.messages + len(messages))


def leave(tx: Tx, thread: ThreadState, left: NewCheckpointRow, *, apart: bool = False) -> str:
    """Make sure that where the thread stands has a name: what it leaves stays reachable. Returns the name.

    `apart` keeps a new one out of the thread's line.
    """
    name = _name_of_head(tx, thread)
    if name is not None:
        return name
    line = thread.line
    if apart:
        made = tx.one("INSERT INTO branches (thread) VALUES (:thread) RETURNING key", thread=thread.key)
        assert made is not None
        line = made[0]
        inherit(tx, line, thread.line, as_of=thread.version)
    insert(tx, thread, following(tx, thread, left), thread.point, line=line)
    return left.id


def _name_of_head(tx: Tx, thread: ThreadState) -> str | None:
    """The checkpoint that holds a thread as it stands, if there is one."""
    path = branches.segments_of(tx, thread.branch, thread.head)
    for branch in dict.fromkeys([thread.branch, *(segment.source for segment in path[-1:])]):
        rows = tx.all(
            "SELECT c.id, c.key FROM checkpoints c WHERE c.branch = :branch AND c.seq = :head AND c.extra = :extra"
            " ORDER BY c.key DESC LIMIT 10",
            branch=branch,
            head=thread.head,
            extra=thread.extra,
        )
        for name, key in rows:
            row = named(tx, thread.line, name)
            if row and row.key == key and branches.segments_of(tx, branch, thread.head) == path:
                return row.id
    return None


def go_over(tx: Tx, key: int, point: Point, extra: str | None = None, line: int | None = None) -> None:
    """Let a thread go on from a point. What a run had begun is over, and what had arrived of a reply is gone."""
    row = tx.one("SELECT run, head FROM threads WHERE key = :key", key=key)
    if row is not None and row[0] is not None:
        runs.close(tx, key, row[0], head=row[1])
    tx.run(
        "UPDATE threads SET branch = :branch, head = :head, message_count = :count, unledgered = :head, run = NULL,"
        " lease_owner = NULL, lease_until = NULL, extra = COALESCE(:extra, extra), line = COALESCE(:line, line)"
        " WHERE key = :key",
        branch=point.branch,
        head=point.seq,
        count=point.messages,
        extra=extra,
        line=line,
        key=key,
    )
    tx.run("DELETE FROM partials WHERE thread = :key", key=key)
