"""Claims: which worker runs a task, and how that ends.

- A claim takes the tasks with the highest priority. Among equals users take turns, and of a user the oldest task comes
  first. It goes through the index `tasks_ready` by seeks, so it costs the same however many tasks wait.
- A claim gives the task a new epoch. All that the worker writes about the task names that epoch, so a worker that has
  lost a task cannot write about it any more.
- A task whose worker has died goes back, which counts as a retry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec

from byssus.queries.tasks import rates
from byssus.queries.tasks.rates import NO_LIMITS, Capacity, TypeLimits
from byssus.queries.tasks.tasks import Task
from byssus.store.database import Tx
from byssus.store.jobs import about_tasks
from byssus.values import clock
from byssus.values.thread_key import ThreadKey

P = ParamSpec("P")

READY: Final = "status = 'pending' AND run_at IS NULL AND waits_for IS NULL"
_CHUNK = 500  # tasks that become ready, or miss their deadline, in one transaction
_COLUMNS = ", ".join(
    name if name != "session_id" else "(SELECT t.id FROM threads t WHERE t.key = tasks.thread)" for name in Task._fields
)
_NEXT_OWNER: Final = f"SELECT MIN(owner) FROM tasks WHERE type = :type AND priority = :priority AND {READY}"
_MINE = "id = :id AND lease_epoch = :epoch AND status = 'running' AND lease_until IS NOT NULL"
_UNLEASED = ", lease_owner = NULL, lease_until = NULL, asked = NULL"


class ClaimedTask(NamedTuple):
    """A task that a worker runs now, and how long it has until its deadline."""

    task: Task
    seconds_left: float | None


class Wish(NamedTuple):
    """What a worker asks for: at most `most` tasks of these types (None: of any)."""

    owner: str
    seconds: float
    most: int
    types: Sequence[str] | None
    limits: Mapping[str, TypeLimits]
    served: Mapping[str, str]  # by type: the user whose task was taken last


def claim(tx: Tx, _: ThreadKey, wish: Wish) -> list[ClaimedTask]:
    """Take tasks that are ready."""
    tops = _tops(tx, all_types(tx) if wish.types is None else wish.types)
    room: dict[str, Capacity] = {}
    chosen: list[_Waiting] = []
    while tops and len(chosen) < wish.most:
        priority = max(tops.values())
        found: list[_Waiting] = []
        equals = [kind for kind, top in tops.items() if top == priority]
        for kind in equals:
            if kind not in room:
                room[kind] = rates.room(tx, kind, wish.limits.get(kind, NO_LIMITS))
            found += _waiting(tx, kind, priority, wish.most - len(chosen), wish.served.get(kind), room[kind])
        found.sort(key=lambda each: (each.turn, each.place, each.key))
        most = wish.most - len(chosen)
        chosen += [each for each in found[:most] if room[each.type].take(each.owner, each.thread)]
        if len(chosen) < wish.most:
            tops = _next_tops(tx, tops, equals, room)
    return _take(tx, wish, room, chosen)


class _Waiting(NamedTuple):
    key: int
    type: str
    owner: str
    thread: int | None
    turn: int  # the number of tasks of the same user that are taken before it
    place: int  # of the user, among those who take turns


def _tops(tx: Tx, types: Sequence[str]) -> dict[str, int]:
    """The highest priority of the ready tasks of each type, where there are any."""
    if not types:
        return {}
    columns = ", ".join(
        f"(SELECT priority FROM tasks WHERE type = :type_{n} AND {READY} ORDER BY priority DESC LIMIT 1)"
        for n in range(len(types))
    )
    row = tx.one(f"SELECT {columns}", **{f"type_{n}": kind for n, kind in enumerate(types)})
    assert row is not None
    return {kind: top for kind, top in zip(types, row, strict=True) if top is not None}


def _next_tops(tx: Tx, tops: Mapping[str, int], done: Sequence[str], room: Mapping[str, Capacity]) -> dict[str, int]:
    """The priorities that are left, when the highest ones of some types are done."""
    found = {kind: top for kind, top in tops.items() if kind not in done}
    for kind in done:
        if not room[kind].is_full and (below := _top(tx, kind, below=tops[kind])) is not None:
            found[kind] = below
    return found


def _top(tx: Tx, kind: str, *, below: int) -> int | None:
    row = tx.one(
        f"SELECT priority FROM tasks WHERE type = :type AND {READY} AND priority < :below"
        " ORDER BY priority DESC LIMIT 1",
        type=kind,
        below=below,
    )
    return row[0] if row else None


def all_types(tx: Tx) -> list[str]:
    """The types of all tasks that are ready."""
    least = f"SELECT MIN(type) FROM tasks WHERE {READY}"
    rows = tx.all(
        # Not first: a store may put another WITH before the first question of a transaction.
        "SELECT type FROM ("
        f"WITH RECURSIVE found (type) AS (SELECT ({least}) UNION ALL SELECT ({least} AND type > found.type) FROM found"
        " WHERE found.type IS NOT NULL) SELECT type FROM found WHERE type IS NOT NULL) AS types"
    )
    return [kind for (kind,) in rows]


def _waiting(tx: Tx, kind: str, priority: int, count: int, served: str | None, room: Capacity) -> list[_Waiting]:
    """Ready tasks of a type and a priority, a turn of each user after the other."""
    count = min(count, room.left)
    if count <= 0:
        return []
    passed = _passed(room)
    owners = list(enumerate(_owners(tx, kind, priority, count, served, room, passed)))
    found: list[_Waiting] = []
    last = dict.fromkeys((owner for _, owner in owners), 0)
    turns: Counter[str] = Counter()
    while owners and len(found) < count:  # again, if some users have fewer tasks than their share
        each = -(-(count - len(found)) // len(owners))
        more = []
        for place, owner in owners:
            rows = tx.all(
                f"SELECT key, thread FROM tasks WHERE type = :type AND priority = :priority AND owner = :owner AND"
                f" {READY} AND key > :last{passed.text} ORDER BY key LIMIT :count {tx.dialect.skip_locked}",
                type=kind,
                priority=priority,
                owner=owner,
                last=last[owner],
                count=min(each, room.left_of(owner) - turns[owner]),
                **passed.values,
            )
            found += [
                _Waiting(key, kind, owner, thread, turns[owner] + n, place) for n, (key, thread) in enumerate(rows)
            ]
            turns[owner] += len(rows)
            if len(rows) == each:
                last[owner] = rows[-1][0]
                more.append((place, owner))
        owners = more
    return found


class _Passed(NamedTuple):
    """A condition that passes over the sessions that are at their limit, and its values."""

    text: str
    values: dict[str, Any]


def _passed(room: Capacity) -> _Passed:
    full = room.full_threads
    text = "".join(f" AND (thread IS NULL OR thread <> :full_{n})" for n in range(len(full)))
    return _Passed(text, {f"full_{n}": thread for n, thread in enumerate(full)})


def _owners(
    tx: Tx, kind: str, priority: int, count: int, served: str | None, room: Capacity, passed: _Passed
) -> list[str]:
    """Users with such tasks, beginning behind the one who was served last. Those at their limit are passed over."""
    # No text is between a user and this. One lap goes from there to the end, and one from the beginning to that user.
    laps = [_lap(passed.text, "0")]
    if served is not None:
        laps.append(_lap(f"{passed.text} AND owner <= :served", "1"))
    rows = tx.all(
        f"SELECT owner FROM ({' UNION ALL '.join(laps)}) AS laps WHERE owner IS NOT NULL ORDER BY lap, number",
        type=kind,
        priority=priority,
        start_0="" if served is None else f"{served}\x01",
        wanted=count + len(room.full_owners),
        **({} if served is None else {"start_1": "", "served": served}),
        **passed.values,
    )
    return [owner for (owner,) in rows if room.left_of(owner) > 0][:count]


def _lap(among: str, lap: str) -> str:
    """Users in their order, each found by a seek."""
    return (
        f"SELECT owner, number, {lap} AS lap FROM (WITH RECURSIVE found (owner, number) AS"
        f" (SELECT ({_NEXT_OWNER}{among} AND owner >= :start_{lap}), 1 UNION ALL"
        f" SELECT ({_NEXT_OWNER}{among} AND owner > found.owner), number + 1 FROM found"
        f" WHERE found.owner IS NOT NULL AND number < :wanted) SELECT owner, number FROM found) AS lap_{lap}"
    )


def _take(tx: Tx, wish: Wish, room: Mapping[str, Capacity], chosen: Sequence[_Waiting]) -> list[ClaimedTask]:
    for kind, each in room.items():
        rates.spend(tx, kind, each)
    if not chosen:
        return []
    places = ", ".join(f":key_{n}" for n in range(len(chosen)))
    rows = tx.all(
        "UPDATE tasks SET status = 'running', updated_at = :now, started_at = COALESCE(started_at, :now), asked = NULL,"
        " lease_owner = :owner, lease_until = :until,"
        f" lease_epoch = lease_epoch + 1 WHERE key IN ({places}) AND {READY} RETURNING key, :now, {_COLUMNS}",
        owner=wish.owner,
        until=tx.after(wish.seconds),
        now=tx.now(),
        **{f"key_{n}": each.key for n, each in enumerate(chosen)},
    )
    order = {each.key: n for n, each in enumerate(chosen)}
    claimed = []
    for _, now, *values in sorted(rows, key=lambda row: order[row[0]]):
        task = Task(*values)
        left = None if task.deadline is None else clock.seconds_between(now, task.deadline)
        claimed.append(ClaimedTask(task, left))
    return claimed


# --- what there is to do ----------------------------------------------------------------------------------------------


class Outlook(NamedTuple):
    """Whether tasks are ready, and in how many seconds the next one becomes ready or misses its deadline."""

    is_ready: bool
    seconds: float | None


def look(tx: Tx, types: Sequence[str] | None) -> Outlook:
    """What a worker with handlers for these types (None: all) has to do."""
    of_types = "" if types is None else f" AND type IN ({', '.join(f':type_{n}' for n in range(len(types)))})"
    ready = "0" if types is not None and not types else f"EXISTS (SELECT 1 FROM tasks WHERE {READY}{of_types})"
    row = tx.one(
        f"SELECT :now, {ready},"
        " (SELECT MIN(run_at) FROM tasks WHERE status = 'pending' AND run_at IS NOT NULL),"
        " (SELECT MIN(deadline) FROM tasks WHERE status IN ('pending', 'paused') AND deadline IS NOT NULL)",
        now=tx.now(),
        **{f"type_{n}": kind for n, kind in enumerate(types or ())},
    )
    assert row is not None
    now, is_ready, *times = row
    seconds = min((clock.seconds_between(now, time) for time in times if time is not None), default=None)
    return Outlook(bool(is_ready), seconds)


@about_tasks
def tend(tx: Tx, _: ThreadKey, error: str) -> bool:
    """Make tasks ready whose time has come, and fail those that have missed their deadline; whether there may be more.

    `error` is what failed tasks get.
    """
    due = tx.all(
        "UPDATE tasks SET run_at = NULL, waits_for = NULL WHERE status = 'pending' AND key IN (SELECT key FROM tasks"
        " WHERE status = 'pending' AND run_at IS NOT NULL AND run_at <= :now"
        f" ORDER BY run_at LIMIT :limit {tx.dialect.skip_locked}) RETURNING key",
        now=tx.now(),
        limit=_CHUNK,
    )
    late = tx.all(
        "UPDATE tasks SET status = 'failed', error = :error, completed_at = :now, updated_at = :now, run_at = NULL,"
        " waits_for = NULL WHERE status IN ('pending', 'paused') AND key IN (SELECT key FROM tasks"
        " WHERE status IN ('pending', 'paused') AND deadline IS NOT NULL AND deadline <= :now"
        f" ORDER BY deadline LIMIT :limit {tx.dialect.skip_locked}) RETURNING key",
        error=error,
        now=tx.now(),
        limit=_CHUNK,
    )
    return len(due) == _CHUNK or len(late) == _CHUNK


class Leased(NamedTuple):
    """A task that a worker runs, or ran until it died."""

    id: str
    epoch: int
    owner: str  # "" in a copy of a database
    until: str
    has_run_out: int


def leased(tx: Tx) -> list[Leased]:
    """All tasks that workers run."""
    rows = tx.all(
        "SELECT id, lease_epoch, COALESCE(lease_owner, ''), lease_until, lease_until <= :now FROM tasks"
        " WHERE status = 'running' AND lease_until IS NOT NULL",
        now=tx.now(),
    )
    return [Leased(*row) for row in rows]


# --- while it runs ----------------------------------------------------------------------------------------------------


class HeldTask(NamedTuple):
    """A task of this process, as its keeper knows it."""

    id: str
    epoch: int
    seconds: float
    token: str


def renew(tx: Tx, held: Sequence[HeldTask]) -> list[HeldTask]:
    """Renew leases; returns those that are lost. One that has run out is renewed if nobody has taken the task."""
    lost = []
    for lease in sorted(held):  # all transactions lock tasks in this order: no deadlock
        row = tx.one(
            f"UPDATE tasks SET lease_until = :until WHERE {_MINE} RETURNING key",
            id=lease.id,
            epoch=lease.epoch,
            until=tx.after(lease.seconds),
        )
        if row is None:
            lost.append(lease)
    return lost


def asked(tx: Tx, held: Sequence[HeldTask]) -> list[HeldTask]:
    """Those of the tasks that are to be paused or cancelled."""
    rows = tx.all("SELECT id, lease_epoch FROM tasks WHERE status = 'running' AND asked IS NOT NULL")
    found = set(rows)
    return [lease for lease in held if (lease.id, lease.epoch) in found]


def asked_of(tx: Tx, task_id: str, epoch: int) -> str | None:
    """What the worker of a task is asked to do."""
    row = tx.one(f"SELECT asked FROM tasks WHERE {_MINE}", id=task_id, epoch=epoch)
    return row[0] if row else None


def set_progress(tx: Tx, _: ThreadKey, task_id: str, epoch: int, progress: float, note: str | None) -> bool:
    """Say how far a task is; False if the worker has lost it."""
    row = tx.one(
        f"UPDATE tasks SET progress = :progress, progress_note = :note, updated_at = :now WHERE {_MINE} RETURNING key",
        id=task_id,
        epoch=epoch,
        progress=progress,
        note=note,
        now=tx.now(),
    )
    return row is not None


def hold(tx: Tx, task_id: str, epoch: int) -> int | None:
    """Lock the row of a task that a worker runs, for what else it writes about it; its key, None if it is lost."""
    row = tx.one(f"UPDATE tasks SET updated_at = :now WHERE {_MINE} RETURNING key", **_of(tx, task_id, epoch))
    return row[0] if row else None


# --- how it ends ------------------------------------------------------------------------------------------------------


def complete(tx: Tx, _: ThreadKey, held: HeldTask, result: str) -> bool:
    """The handler has returned. As all that follow: False if the worker has lost the task."""
    row = tx.one(
        "UPDATE tasks SET status = 'completed', result = :result, error = NULL, completed_at = :now, updated_at = :now,"
        f" progress = CASE WHEN progress IS NULL THEN NULL ELSE 1 END{_UNLEASED} WHERE {_MINE} RETURNING key",
        result=result,
        **_of(tx, held.id, held.epoch),
    )
    return row is not None


def fail(tx: Tx, _: ThreadKey, held: HeldTask, error: str, retry_after: float | None) -> bool:
    """The handler has failed: the task is tried again after so many seconds, or not at all (None)."""
    row = tx.one(
        f"UPDATE tasks SET error = :error, updated_at = :now WHERE {_MINE} RETURNING retry_count < max_retries, asked",
        error=error,
        **_of(tx, held.id, held.epoch),
    )
    if row is None:
        return False
    _put_back(tx, held.id, held.epoch, row[1], retry_after if row[0] else None)
    return True


def _put_back(tx: Tx, task_id: str, epoch: int, word: str | None, retry_after: float | None) -> None:
    """End an attempt that came to nothing: by the word of a person, or with a retry, or for good."""
    if word is not None:
        stop_here(tx, task_id, epoch)
    elif retry_after is None:
        tx.run(
            f"UPDATE tasks SET status = 'failed', completed_at = :now{_UNLEASED} WHERE {_MINE}",
            **_of(tx, task_id, epoch),
        )
    else:
        tx.run(
            "UPDATE tasks SET status = 'pending', retry_count = retry_count + 1, run_at = :run_at, updated_at = :now,"
            f" progress = NULL, progress_note = NULL{_UNLEASED} WHERE {_MINE}",
            run_at=tx.after(retry_after) if retry_after > 0 else None,
            **_of(tx, task_id, epoch),
        )


@about_tasks
def stop(tx: Tx, _: ThreadKey, held: HeldTask) -> bool:
    """The handler has stopped because it was asked to: to pause, to be cancelled, or to go on elsewhere."""
    return stop_here(tx, held.id, held.epoch)


def stop_here(tx: Tx, task_id: str, epoch: int) -> bool:
    row = tx.one(
        "UPDATE tasks SET status = CASE asked WHEN 'cancel' THEN 'cancelled' WHEN 'pause' THEN 'paused' ELSE 'pending'"
        f" END, completed_at = CASE asked WHEN 'cancel' THEN :now END, updated_at = :now{_UNLEASED} WHERE {_MINE}"
        " RETURNING key",
        **_of(tx, task_id, epoch),
    )
    return row is not None


def suspend(tx: Tx, task_id: str, epoch: int, seconds: float | None, waits_for: str | None) -> bool:
    """The handler sleeps, or waits for an event: the task holds no worker meanwhile.

    A person's word goes first: a task that was to be cancelled is cancelled.
    """
    row = tx.one(
        "UPDATE tasks SET run_at = :run_at, waits_for = :waits_for,"
        " status = CASE asked WHEN 'cancel' THEN 'cancelled' WHEN 'pause' THEN 'paused' ELSE 'pending' END,"
        f" completed_at = CASE asked WHEN 'cancel' THEN :now END, updated_at = :now{_UNLEASED} WHERE {_MINE}"
        " RETURNING key",
        run_at=None if seconds is None else tx.after(seconds),
        waits_for=waits_for,
        **_of(tx, task_id, epoch),
    )
    return row is not None


class Dead(NamedTuple):
    """A task whose worker has died. `is_known`: its process is known to have ended, and the lease need not run out."""

    id: str
    epoch: int
    is_known: bool
    retry_after: float


@about_tasks
def recover(tx: Tx, _: ThreadKey, dead: Sequence[Dead], error: str) -> list[str]:
    """Put back tasks whose worker has died, which counts as a retry; returns their ids. `error` is what they get."""
    found = []
    for each in sorted(dead):
        row = tx.one(
            "UPDATE tasks SET lease_epoch = lease_epoch + 1, error = :error, updated_at = :now"
            f" WHERE {_MINE} AND (:known = 1 OR lease_until <= :now) RETURNING retry_count < max_retries, asked",
            error=error,
            known=int(each.is_known),
            **_of(tx, each.id, each.epoch),
        )
        if row is not None:
            _put_back(tx, each.id, each.epoch + 1, row[1], each.retry_after if row[0] else None)
            found.append(each.id)
    return found


def _of(tx: Tx, task_id: str, epoch: int) -> dict[str, Any]:
    return {"id": task_id, "epoch": epoch, "now": tx.now()}


def _rung(query: Callable[Concatenate[Tx, P], bool]) -> Callable[Concatenate[Tx, P], bool]:
    """The same for a type with limits: other workers are woken, because there is room again."""

    def rung(tx: Tx, /, *args: P.args, **kwargs: P.kwargs) -> bool:
        return query(tx, *args, **kwargs)

    return about_tasks(rung)


complete_limited, fail_limited = _rung(complete), _rung(fail)
