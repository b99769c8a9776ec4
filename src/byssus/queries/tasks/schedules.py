"""Schedules: rows that make a task at each of their ticks.

- A tick becomes tasks in the transaction that moves `next_at` on from it, and only if `next_at` is still that tick. So
  each tick is used once, however many workers notice it.
- The task of a tick has a unique key, too: a clock that goes back cannot make it a second time while the task is there.
- When the ticks are is computed elsewhere: these queries only compare times, by the database's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from byssus.errors import NotFound
from byssus.queries.accounts import quotas, sessions
from byssus.queries.tasks import tasks
from byssus.queries.tasks.tasks import NewTask
from byssus.store.database import Tx
from byssus.store.jobs import about_tasks
from byssus.values.thread_key import ThreadKey


class Schedule(NamedTuple):
    id: str
    session_id: str | None
    type: str
    payload: str
    priority: int
    max_retries: int
    cron: str | None
    every: float | None
    zone: str
    missed: str
    status: str
    next_at: str | None
    last_at: str | None
    created_at: str
    updated_at: str
    user_id: str  # "": none


class NewSchedule(NamedTuple):
    """A schedule to be created or changed."""

    id: str
    type: str
    payload: str
    priority: int
    max_retries: int
    cron: str | None
    every: float | None
    zone: str
    missed: str
    next_at: str | None
    owner: str  # of one without a session


class KnownSchedule(NamedTuple):
    """A schedule, if there is one, and the time by the database's clock."""

    schedule: Schedule | None
    now: str


class DueSchedules(NamedTuple):
    """Schedules to be looked at, each with its key, and the time by the database's clock."""

    schedules: list[tuple[int, Schedule]]
    now: str


_COLUMNS = ", ".join({"session_id": "t.id", "user_id": "s.owner"}.get(name, f"s.{name}") for name in Schedule._fields)
_FROM = "schedules s LEFT JOIN threads t ON t.key = s.thread"
_IS_SAME_RULE = " AND ".join(
    f"schedules.{name} IS NOT DISTINCT FROM excluded.{name}" for name in ("cron", "every", "zone")
)


def put(tx: Tx, thread_key: ThreadKey | None, new: NewSchedule) -> Schedule:
    """Create a schedule, or change the one that has this id. As long as it ticks as before, its next tick stays."""
    thread, owner = None, new.owner
    if thread_key is not None:
        thread = sessions.take(tx, thread_key)
        row = tx.one("SELECT COALESCE(owner, '') FROM threads WHERE key = :thread", thread=thread)
        owner = row[0] if row else ""
    elif owner:
        quotas.take(tx, owner)
    tx.run(
        "INSERT INTO schedules (id, thread, owner, type, payload, priority, max_retries, cron, every, zone, missed,"
        " status, next_at, created_at, updated_at) VALUES (:id, :thread, :owner, :type, :payload, :priority,"
        " :max_retries, CAST(:cron AS TEXT), CAST(:every AS DOUBLE PRECISION), :zone, :missed, 'active',"
        " CAST(:next_at AS TEXT), :now, :now) ON CONFLICT (id) DO UPDATE SET thread = excluded.thread,"
        " owner = excluded.owner, type = excluded.type, payload = excluded.payload, priority = excluded.priority,"
        " max_retries = excluded.max_retries, cron = excluded.cron, every = excluded.every, zone = excluded.zone,"
        " missed = excluded.missed, updated_at = excluded.updated_at,"
        f" next_at = CASE WHEN {_IS_SAME_RULE} THEN schedules.next_at ELSE excluded.next_at END",
        thread=thread,
        now=tx.now(),
        **{**new._asdict(), "owner": owner},
    )
    return require(tx, new.id)


def known(tx: Tx, schedule_id: str) -> KnownSchedule:
    (now,) = tx.one("SELECT :now", now=tx.now()) or ("",)
    return KnownSchedule(get(tx, schedule_id), now)


def get(tx: Tx, schedule_id: str) -> Schedule | None:
    row = tx.one(f"SELECT {_COLUMNS} FROM {_FROM} WHERE s.id = :id", id=schedule_id)
    return Schedule(*row) if row else None


def require(tx: Tx, schedule_id: str) -> Schedule:
    """The schedule, which must exist."""
    schedule = get(tx, schedule_id)
    if schedule is None:
        raise unknown(schedule_id)
    return schedule


def unknown(schedule_id: str) -> NotFound:
    return NotFound(f"there is no schedule {schedule_id!r}; schedules() lists them")


def page(tx: Tx, *, user_id: str | None, limit: int, offset: int) -> list[Schedule]:
    """Schedules, oldest first."""
    of_user = "" if user_id is None else " WHERE s.owner = :user"
    rows = tx.all(
        f"SELECT {_COLUMNS} FROM {_FROM}{of_user} ORDER BY s.key LIMIT :limit OFFSET :offset",
        user=user_id or "",
        limit=limit,
        offset=offset,
    )
    return [Schedule(*row) for row in rows]


def set_status(tx: Tx, schedule_id: str, status: str, next_at: str | None) -> Schedule:
    """Pause or resume a schedule. `next_at` counts if it changes anything."""
    tx.run(
        "UPDATE schedules SET status = :status, next_at = CAST(:next_at AS TEXT), updated_at = :now"
        " WHERE id = :id AND status <> :status",
        status=status,
        next_at=next_at,
        id=schedule_id,
        now=tx.now(),
    )
    return require(tx, schedule_id)


def remove(tx: Tx, schedule_id: str) -> None:
    if tx.one("DELETE FROM schedules WHERE id = :id RETURNING key", id=schedule_id) is None:
        raise unknown(schedule_id)


# --- ticks ------------------------------------------------------------------------------------------------------------


def due(tx: Tx, *, after: int, limit: int, most_ahead: float) -> DueSchedules:
    """Schedules whose next tick is due, those with keys above `after`.

    Also those whose last tick is so many seconds ahead: the clock has gone back since.
    """
    rows = tx.all(
        f"SELECT s.key, {_COLUMNS} FROM {_FROM} WHERE s.status = 'active' AND s.key > :after"
        " AND (s.next_at <= :now OR s.last_at > :ahead) ORDER BY s.key LIMIT :limit",
        now=tx.now(),
        ahead=tx.after(most_ahead),
        after=after,
        limit=limit,
    )
    (now,) = tx.one("SELECT :now", now=tx.now()) or ("",)
    return DueSchedules([(key, Schedule(*columns)) for key, *columns in rows], now)


def next_tick(tx: Tx, after: str) -> tuple[str, str] | None:
    """The first tick after that time, and the time now; None if there is none."""
    row = tx.one(
        "SELECT next_at, :now FROM schedules WHERE status = 'active' AND next_at > :after ORDER BY next_at LIMIT 1",
        now=tx.now(),
        after=after,
    )
    return None if row is None else (row[0], row[1])


@about_tasks
def advance(tx: Tx, seen: Schedule, new_tasks: Sequence[NewTask], last_at: str | None, next_at: str | None) -> bool:
    """Create the tasks of ticks and move on, unless another worker has done so, or the schedule was changed."""
    moved = tx.one(
        "UPDATE schedules SET next_at = CAST(:next_at AS TEXT), last_at = CAST(:last_at AS TEXT) WHERE id = :id"
        " AND status = 'active' AND next_at = :seen AND updated_at = :version RETURNING key",
        id=seen.id,
        next_at=next_at,
        last_at=last_at,
        seen=seen.next_at,
        version=seen.updated_at,
    )
    if moved is None:
        return False
    for new in new_tasks:
        about = tasks.of_no_session(new.id) if seen.session_id is None else ThreadKey("", seen.session_id)
        tasks.create(tx, about, new)
    return True
