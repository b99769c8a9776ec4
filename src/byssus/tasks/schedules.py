"""Schedules, which make tasks at given times: operations for both APIs (see store/operations.py)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, cast

from byssus.errors import ByssusError, InputError, StoreError
from byssus.queries.tasks import schedules
from byssus.queries.tasks.schedules import DueSchedules, NewSchedule, Schedule
from byssus.queries.tasks.tasks import NewTask
from byssus.store.operations import Runner
from byssus.tasks import ticks
from byssus.tasks.rows import Missed, ScheduleRow, schedule_row
from byssus.tasks.tasks import checked_new_type, checked_priority, id_of_key
from byssus.tasks.ticks import Rule
from byssus.threads.encoding import encode_strictly
from byssus.values import clock
from byssus.values.inputs import checked_count, checked_id, readable_id
from byssus.values.thread_key import ThreadKey

_LONGEST_ID = 200  # characters
_PAGE = 100  # schedules that are read at a time
_MOST_AHEAD = 3_600.0  # seconds that the last tick may be ahead of the clock


class Ticked(NamedTuple):
    """When the next tick is, and the schedules that cannot tick here, with the reasons."""

    seconds: float | None  # None: no schedule ticks
    failed: dict[str, ByssusError]


async def create_schedule(
    store: Runner,
    schedule_id: str,
    task_type: str,
    payload: Any = None,
    *,
    cron: str | None = None,
    every: timedelta | float | None = None,
    zone: str = "UTC",
    missed: Missed = "one",
    session_id: str | None = None,
    user_id: str | None = None,
    priority: int = 0,
    max_retries: int = 3,
) -> ScheduleRow:
    """Create a task of this type at each tick, or change the schedule that has this id.

    Ticks are those of `cron` in a time zone ("0 9 * * 1-5": at 9:00 from Monday to Friday), or come `every` so many
    seconds. `missed` says what happens to ticks while no worker runs: "skip" drops them, "one" makes one task for all
    of them, and "all" makes a task for each. A schedule that is created again and ticks as before keeps its next tick.
    """
    rule = ticks.checked_rule(cron, every, zone)
    if session_id is not None and user_id is not None:
        raise InputError("pass session_id or user_id, not both: the tasks of a session belong to its user")
    thread_key = None if session_id is None else ThreadKey("", checked_id(session_id, "a session id"))
    name = checked_id(schedule_id, "a schedule id")
    if len(name) > _LONGEST_ID:  # it is a part of the keys of tasks
        raise InputError(
            f"a schedule id can have {_LONGEST_ID} characters at most, got {len(name):,}: {name[:60]!r}..."
        )
    found = await store.read(schedules.known, name)
    new = NewSchedule(
        id=name,
        type=checked_new_type(task_type),
        payload=encode_strictly("payload", payload),
        priority=checked_priority(priority),
        max_retries=checked_count("max_retries", max_retries),
        cron=rule.cron,
        every=rule.every,
        zone=rule.zone,
        missed=ticks.checked_missed(missed),
        next_at=ticks.next_tick(rule, found.now),
        owner="" if user_id is None else checked_id(user_id, "user_id"),
    )
    return schedule_row(await store.write(schedules.put, thread_key, new))


async def get_schedule(store: Runner, schedule_id: str) -> ScheduleRow | None:
    """Return the schedule, or None if the id is unknown."""
    name = readable_id(schedule_id, "a schedule id")
    found = None if name is None else (await store.read(schedules.known, name)).schedule
    return None if found is None else schedule_row(found)


async def list_schedules(
    store: Runner, limit: int = 100, offset: int = 0, *, user_id: str | None = None
) -> list[ScheduleRow]:
    """Return all schedules, or those of a user and their sessions, oldest first."""
    limit, offset = checked_count("limit", limit), checked_count("offset", offset)
    user = None if user_id is None else checked_id(user_id, "user_id")
    return [schedule_row(each) for each in await store.read(schedules.page, user_id=user, limit=limit, offset=offset)]


async def pause_schedule(store: Runner, schedule_id: str) -> ScheduleRow:
    """Stop a schedule from ticking until it is resumed. Tasks that it has made stay as they are."""
    name = checked_id(schedule_id, "a schedule id")
    return schedule_row(await store.write(schedules.set_status, name, "paused", None))


async def resume_schedule(store: Runner, schedule_id: str) -> ScheduleRow:
    """Let a paused schedule tick again, from its next tick on: those of the pause are not made up for."""
    name = checked_id(schedule_id, "a schedule id")
    found = await store.read(schedules.known, name)
    if found.schedule is None:
        raise schedules.unknown(name)
    next_at = ticks.next_tick(_rule(found.schedule), found.now, found.schedule.last_at)
    return schedule_row(await store.write(schedules.set_status, name, "active", next_at))


async def delete_schedule(store: Runner, schedule_id: str) -> None:
    """Delete a schedule. Tasks that it has made stay."""
    await store.write(schedules.remove, checked_id(schedule_id, "a schedule id"))


# --- ticks ------------------------------------------------------------------------------------------------------------


async def tick(store: Runner, ends: Callable[[], bool] = lambda: False) -> Ticked:
    """Create the tasks of all ticks that are due. Any number of workers may do this at once: each tick is used once.

    A schedule that cannot tick here, for example in a zone that this machine does not know, stops no other. Ticks that
    were missed may be many: once `ends()` is true, the rest is left to a later call.
    """
    first = found = await _due(store, 0)
    failed: dict[str, ByssusError] = {}
    while found.schedules and not ends():
        for _, schedule in found.schedules:
            try:
                await _use_ticks(store, schedule, found.now, ends)
            except StoreError:
                raise
            except ByssusError as error:
                failed[schedule.id] = error
        found = await _due(store, found.schedules[-1][0])
    coming = await store.read(schedules.next_tick, first.now)  # what became due meanwhile is among these
    return Ticked(None if coming is None else max(clock.seconds_between(coming[1], coming[0]), 0.0), failed)


async def _due(store: Runner, after: int) -> DueSchedules:
    return await store.read(schedules.due, after=after, limit=_PAGE, most_ahead=_MOST_AHEAD)


async def _use_ticks(store: Runner, seen: Schedule, now: str, ends: Callable[[], bool]) -> None:
    """Create the tasks of a schedule, and go on to its next tick after now."""
    rule = _rule(seen)
    if seen.next_at is None or seen.next_at > now:  # the clock was ahead when it ticked last
        await store.write(schedules.advance, seen, [], None, ticks.next_tick(rule, now, seen.last_at))
        return
    next_at: str | None = seen.next_at
    is_current = True
    while is_current and next_at is not None and next_at <= now and not ends():
        due = ticks.due(rule, cast("Missed", seen.missed), next_at, now)
        new_tasks = [_task(seen, tick) for tick in due.ticks]
        last_at = due.ticks[-1] if due.ticks else seen.last_at
        is_current = await store.write(schedules.advance, seen, new_tasks, last_at, due.next_at)
        next_at = due.next_at
        seen = seen._replace(next_at=next_at, last_at=last_at)


def _task(schedule: Schedule, tick: str) -> NewTask:
    key = f"schedule:{schedule.id}:{tick}"
    return NewTask(
        id=id_of_key(key),
        type=schedule.type,
        payload=schedule.payload,
        priority=schedule.priority,
        max_retries=schedule.max_retries,
        unique_key=key,
        schedule=schedule.id,
        owner="" if schedule.session_id is not None else schedule.user_id,
    )


def _rule(schedule: Schedule) -> Rule:
    return Rule(schedule.cron, schedule.every, schedule.zone)
