"""When a schedule is due: the ticks of a cron expression in a time zone, or of an interval.

Nothing here knows a database or asks for the time. Times are text, as they are stored (values/clock.py).

- Each tick is later than the one before it, whatever the clocks of the zone do.
- Where clocks change, ticks are those of Debian's cron. A schedule with fixed hours and minutes ticks once on each of
  its days: a time that is skipped moves to the next time that exists, a time that comes twice counts the first time.
  One that begins its minutes or hours with `*` follows the time that passes, so it also ticks in the repeated hour.
- An interval counts seconds from its first tick. It has no zone.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import NamedTuple, get_args
from zoneinfo import ZoneInfo, available_timezones

from byssus.errors import InputError, MissingExtra
from byssus.tasks.rows import Missed
from byssus.values import clock
from byssus.values.inputs import checked_choice, checked_text

ON_TIME = 60.0  # seconds: with `missed="skip"`, a tick that is noticed later than that is skipped
MOST_AT_ONCE = 100  # ticks that one transaction turns into tasks

_FIELDS = {  # in their order: the values of each, for errors
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day of the month": "1 to 31, L (the last day) or LW (the last weekday)",
    "month": "1 to 12 or JAN to DEC",
    "day of the week": "0 to 7 (0 and 7 are Sunday) or SUN to SAT, with #1 to #5 or L for one week of the month",
}
_LONGEST = 200  # characters of an expression
_LONGEST_INTERVAL = 10 * 366 * 86_400  # seconds


class Rule(NamedTuple):
    """When a schedule ticks: `cron` in a zone, or `every` so many seconds."""

    cron: str | None
    every: float | None
    zone: str


class Due(NamedTuple):
    """The ticks that become tasks now, and the next one to wait for; None if there is none in 50 years."""

    ticks: list[str]
    next_at: str | None


def checked_rule(cron: object, every: object, zone: object) -> Rule:
    """The rule that a caller has passed. Raises `InputError`, which names the field and the position of a mistake."""
    if (cron is None) == (every is None):
        raise InputError("a schedule needs either cron='0 9 * * 1-5' or every=3600 (seconds, or a timedelta)")
    name = checked_text("zone", zone)
    _zone(name)
    if cron is None:
        return Rule(None, _checked_interval(every), name)
    text = " ".join(checked_text("cron", cron).split())
    _check_cron(checked_text("cron", cron))
    rule = Rule(text, None, name)
    if next_tick(rule, clock.now()) is None:
        raise InputError(f"cron {text!r} has no tick in the next 50 years; correct its days and months")
    return rule


def checked_missed(missed: object) -> Missed:
    return checked_choice("missed", missed, get_args(Missed))  # type: ignore[return-value]


def next_tick(rule: Rule, after: str, first: str | None = None) -> str | None:
    """The first tick after a time. An interval counts from `first`, one of its ticks; without it, from `after`."""
    if rule.every is not None:
        start = after if first is None else first
        steps = math.floor(clock.seconds_between(start, after) / rule.every) + 1
        tick = clock.after(start, steps * rule.every)
        return tick if tick > after else clock.after(tick, rule.every)  # the quotient may have been rounded
    assert rule.cron is not None
    begin = datetime.fromisoformat(after).astimezone(_zone(rule.zone))
    for moment in _cron(rule.cron, begin):
        found = clock.stored(moment, "a tick")
        if found > after:  # after the clocks went back, the same time of day comes again, and may have been earlier
            return found
    return None


def due(rule: Rule, missed: Missed, next_at: str, now: str) -> Due:
    """What to do about a schedule whose tick `next_at` is due."""
    if next_at > now:
        return Due([], next_at)
    if missed == "all":
        ticks: list[str] = []
        tick: str | None = next_at
        while tick is not None and tick <= now and len(ticks) < MOST_AT_ONCE:
            ticks.append(tick)
            tick = next_tick(rule, tick, tick)
        return Due(ticks, tick)
    later = next_tick(rule, now, next_at)
    if missed == "one":
        return Due([next_at], later)
    recently = clock.after(now, -ON_TIME)
    tick = next_at if next_at > recently else next_tick(rule, recently, next_at)
    return Due([tick] if tick is not None and tick <= now else [], later)


def _checked_interval(every: object) -> float:
    seconds = every.total_seconds() if isinstance(every, timedelta) else every
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 1 <= seconds <= _LONGEST_INTERVAL:
        raise InputError(f"every must be a timedelta or a number of seconds from 1 to 10 years, got {every!r:.80}")
    return round(float(seconds), 6)


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # also where the system has no zones
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        known = available_timezones()
        alike = difflib.get_close_matches(name, known, 1)
        hint = (
            f"did you mean {alike[0]!r}?"
            if alike
            else "pass a name such as 'Europe/Oslo' or 'UTC'"
            if known
            else "this system has no time zones; install them: pip install tzdata"
        )
        raise InputError(f"there is no time zone {name!r:.80}; {hint}") from error


# --- cron expressions -------------------------------------------------------------------------------------------------


def _cron(expression: str, begin: datetime) -> Iterator[datetime]:
    """The ticks of an expression, which was checked, from a time on. They end after 50 years without one."""
    try:
        from cronsim import CronSim  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingExtra(f"the cron expression {expression!r:.80}", "schedules") from error
    return CronSim(expression, begin)


def _check_cron(text: str) -> None:
    """Raise an error about the first mistake."""
    _cron("* * * * *", datetime(2000, 1, 1))  # without the library, this is an error that names the extra
    if len(text) > _LONGEST:
        raise InputError(f"cron can have {_LONGEST} characters at most, got {len(text):,}: {text[:60]!r}...")
    parts = _parts(text)
    if len(parts) != len(_FIELDS):
        seconds = "; for seconds, pass every=SECONDS" if len(parts) == len(_FIELDS) + 1 else ""
        raise InputError(
            f"cron {text!r} must have 5 fields ({', '.join(_FIELDS)}), and has {len(parts)}; "
            f"for example '0 9 * * 1-5': at 9:00 from Monday to Friday{seconds}"
        )
    for number, ((name, values), (position, field)) in enumerate(zip(_FIELDS.items(), parts, strict=True)):
        for offset, term in _terms(field):
            if not _is_valid(["*"] * number + [term] + ["*"] * (len(_FIELDS) - number - 1)):
                raise InputError(
                    f"cron {text!r}: the {name} (field {number + 1}) cannot be {term!r}, at character "
                    f"{position + offset + 1}; it takes {values}, *, ranges such as 1-5, steps such as */2, and "
                    "lists with commas"
                )
    if not _is_valid([field for _, field in parts]):  # each field alone is right
        position, days = parts[2]
        raise InputError(
            f"cron {text!r}: the day of the month (field 3) {days!r}, at character {position + 1}, is in none of its "
            "months; correct the day, or the month in field 4"
        )


def _parts(text: str) -> list[tuple[int, str]]:
    """The fields of an expression, each with its position."""
    found, position = [], 0
    for field in text.split():
        position = text.index(field, position)
        found.append((position, field))
        position += len(field)
    return found


def _terms(field: str) -> list[tuple[int, str]]:
    """The members of a list, each with its position in the field."""
    found, position = [], 0
    for term in field.split(","):
        found.append((position, term))
        position += len(term) + 1
    return found


def _is_valid(fields: list[str]) -> bool:
    from cronsim import CronSimError  # noqa: PLC0415 - an extra

    try:
        _cron(" ".join(fields), datetime(2000, 1, 1))
    except CronSimError:
        return False
    return all(fields)
