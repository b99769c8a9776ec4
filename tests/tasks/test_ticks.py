"""When schedules are due."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byssus.errors import InputError, MissingExtra
from byssus.tasks import ticks
from byssus.tasks.rows import Missed
from byssus.tasks.ticks import Rule, checked_rule, due, next_tick
from byssus.values import clock

ZONES = ["UTC", "Europe/Oslo", "America/New_York", "Australia/Lord_Howe", "America/Havana", "Asia/Kathmandu"]
PASS = timedelta(minutes=1)

fields = st.tuples(
    st.sampled_from(["*", "0", "30", "*/15", "5,35", "10-20/5"]),
    st.sampled_from(["*", "0", "2", "1-3", "*/6", "0,23"]),
    st.sampled_from(["*", "1", "L", "10-20", "*/7"]),
    st.sampled_from(["*", "3,10", "MAR-APR", "*/2"]),
    st.sampled_from(["*", "1-5", "SUN", "0#1", "5L"]),
)
moments = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)).map(lambda at: clock.stored(at, "it"))
zones = st.sampled_from(ZONES)


def local(tick: str | None, zone: str) -> datetime:
    assert tick is not None
    return datetime.fromisoformat(tick).astimezone(ZoneInfo(zone))


def ticks_between(rule: Rule, first: str, last: str) -> list[str]:
    found = []
    tick = next_tick(rule, first, first)
    while tick is not None and tick <= last:
        found.append(tick)
        tick = next_tick(rule, tick, tick)
    return found


def at(text: str, zone: str = "UTC", fold: int = 0) -> str:
    return clock.stored(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold), "it")


# --- cron -------------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(fields, zones, moments)
def test_each_tick_is_later_than_the_one_before_and_none_lies_between(
    parts: tuple[str, ...], zone: str, begin: str
) -> None:
    rule = checked_rule(" ".join(parts), None, zone)
    first = next_tick(rule, begin)
    assert first is not None
    second = next_tick(rule, first)
    assert second is not None
    assert begin < first < second
    assert next_tick(rule, clock.after(first, -1e-6)) == first
    assert next_tick(rule, clock.after(second, -1e-6)) == second


@settings(max_examples=15)
@given(zones, st.integers(0, 23), st.integers(0, 59), st.integers(2020, 2030))
def test_a_fixed_time_ticks_once_each_day_of_a_year_whatever_the_clocks_do(
    zone: str, hour: int, minute: int, year: int
) -> None:
    rule = checked_rule(f"{minute} {hour} * * *", None, zone)
    found = ticks_between(rule, at(f"{year - 1}-12-31T23:59:59", zone), at(f"{year}-12-31T23:59:59", zone))
    days = [local(tick, zone).date() for tick in found]
    assert len(days) == len(set(days)) == (datetime(year + 1, 1, 1) - datetime(year, 1, 1)).days
    meant = [(local(tick, zone).hour, local(tick, zone).minute) == (hour, minute) for tick in found]
    assert meant.count(False) <= 1


@settings(max_examples=20)
@given(st.sampled_from(["2024-03-30T12:00", "2024-10-26T12:00", "2024-07-01T12:00"]), st.sampled_from(["*", "*/20"]))
def test_each_minute_that_passes_ticks_when_its_local_time_matches(begin: str, minute: str) -> None:
    rule = checked_rule(f"{minute} 1-3 * * *", None, "Europe/Oslo")
    first = datetime.fromisoformat(begin).replace(tzinfo=UTC)
    every = [first + PASS * number for number in range(1, 24 * 60)]
    step = 1 if minute == "*" else 20
    meant = [
        clock.stored(each, "it")
        for each in every
        if (there := each.astimezone(ZoneInfo("Europe/Oslo"))).hour in (1, 2, 3) and there.minute % step == 0
    ]
    assert ticks_between(rule, clock.stored(first, "it"), clock.stored(every[-1], "it")) == meant


def test_a_time_that_the_clocks_skip_moves_to_the_next_one_that_exists() -> None:
    rule = checked_rule("30 2 * * *", None, "Europe/Oslo")
    found = next_tick(rule, at("2024-03-30T12:00", "Europe/Oslo"))
    assert local(found, "Europe/Oslo").isoformat() == "2024-03-31T03:00:00+02:00"
    assert found is not None
    assert local(next_tick(rule, found), "Europe/Oslo").isoformat() == "2024-04-01T02:30:00+02:00"


def test_a_time_that_comes_twice_ticks_the_first_time() -> None:
    rule = checked_rule("30 2 * * *", None, "Europe/Oslo")
    found = next_tick(rule, at("2024-10-27T01:00", "Europe/Oslo"))
    assert local(found, "Europe/Oslo").isoformat() == "2024-10-27T02:30:00+02:00"
    again = next_tick(rule, at("2024-10-27T02:10", "Europe/Oslo", fold=1))  # asked when that hour comes again
    assert local(again, "Europe/Oslo").isoformat() == "2024-10-28T02:30:00+01:00"


# --- intervals and missed ticks ---------------------------------------------------------------------------------------


@given(st.floats(1, 1e6), moments, st.floats(-1e8, 1e8))
def test_an_interval_stays_on_its_grid(every: float, first: str, passed: float) -> None:
    rule = checked_rule(None, every, "UTC")
    assert rule.every is not None
    now = clock.after(first, passed)
    tick = next_tick(rule, now, first)
    assert tick is not None
    assert now < tick <= clock.after(now, rule.every + 1e-5)
    steps = clock.seconds_between(first, tick) / rule.every
    assert abs(steps - round(steps)) < 1e-4


@given(
    st.sampled_from(["skip", "one", "all"]),
    st.sampled_from([("*/7 * * * *", None), ("30 2 * * *", None), (None, 45), (None, timedelta(hours=5))]),
    zones,
    moments,
    st.floats(0, 86_400 * 3),
)
def test_what_is_due_has_passed_and_what_comes_next_has_not(
    missed: Missed, when: tuple[str | None, Any], zone: str, begin: str, late: float
) -> None:
    rule = checked_rule(*when, zone)
    next_at = next_tick(rule, begin)
    assert next_at is not None
    now = clock.after(next_at, late)
    passed = [next_at, *ticks_between(rule, next_at, now)]
    found = due(rule, missed, next_at, now)
    assert found.next_at is not None
    if missed == "all":
        made = found.ticks
        while found.ticks:
            assert found.next_at is not None
            found = due(rule, missed, found.next_at, now)
            made = made + found.ticks
        assert made == passed
    elif missed == "one":
        assert found.ticks == passed[:1]
    else:
        recent = [tick for tick in passed if tick > clock.after(now, -ticks.ON_TIME)]
        assert found.ticks == recent[:1]
    assert found.next_at is not None
    assert found.next_at > now
    assert found.next_at == next_tick(rule, now, next_at)


def test_what_is_not_due_yet_is_left_alone() -> None:
    rule = checked_rule(None, 60, "UTC")
    later = at("2024-01-01T00:00:01")
    assert due(rule, "all", later, at("2024-01-01T00:00:00")) == ([], later)


def test_all_missed_ticks_come_in_groups() -> None:
    rule = checked_rule(None, 1, "UTC")
    found = due(rule, "all", at("2024-01-01T00:00:00"), at("2025-01-01T00:00:00"))
    assert (len(found.ticks), found.next_at) == (ticks.MOST_AT_ONCE, at("2024-01-01T00:01:40"))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cron", "why"),
    [
        ("61 * * * *", r"the minute \(field 1\) cannot be '61', at character 1; it takes 0 to 59"),
        ("0  24 * * *", r"the hour \(field 2\) cannot be '24', at character 4; it takes 0 to 23"),
        ("0 9 * * 1-5,MO", r"the day of the week \(field 5\) cannot be 'MO', at character 13"),
        ("0 9 0 * *", r"the day of the month \(field 3\) cannot be '0', at character 5"),
        ("0 9 * 5-3 *", r"the month \(field 4\) cannot be '5-3', at character 7"),
        ("*/0 * * * *", r"the minute \(field 1\) cannot be '\*/0', at character 1"),
        ("0 1,,2 * * *", r"the hour \(field 2\) cannot be '', at character 5"),
        ("² * * * *", r"the minute \(field 1\) cannot be '²', at character 1"),
        ("0 0 31 2,4 *", r"the day of the month \(field 3\) '31', at character 5, is in none of its months"),
        ("0 0 */20 * 1L", "has no tick in the next 50 years"),
        ("* * * *", "must have 5 fields .*, and has 4"),
        ("0 0 9 * * *", "and has 6; .* for seconds, pass every=SECONDS"),
        ("", "and has 0"),
        ("@daily", "and has 1"),
        ("0 " * 200, "200 characters at most, got 400"),
        ("0 9 * * \0", "NUL"),
        (5, "cron must be a string"),
    ],
)
def test_a_wrong_expression_is_refused_and_the_error_names_the_place(cron: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        checked_rule(cron, None, "UTC")


@given(st.text(st.sampled_from("0123456789*/,-#LW MONTUE"), max_size=30))
def test_any_text_is_an_expression_or_an_error(text: str) -> None:
    try:
        rule = checked_rule(text, None, "Europe/Oslo")
    except InputError:
        return
    assert next_tick(rule, at("2024-01-01T00:00")) is not None


@pytest.mark.parametrize("every", [0, 0.5, -1, float("nan"), float("inf"), True, "60", timedelta(0), 10**12])
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    with pytest.raises(InputError, match="every must be a timedelta or a number of seconds from 1 to 10 years"):
        checked_rule(None, every, "UTC")


@pytest.mark.parametrize(
    ("zone", "why"),
    [
        ("Europe/Olso", "no time zone 'Europe/Olso'; did you mean 'Europe/Oslo'?"),
        ("Europe", "no time zone 'Europe'"),
        ("/etc/passwd", "no time zone"),
        ("../UTC", "no time zone"),
        ("", "no time zone ''; pass a name such as"),
        (None, "zone must be a string"),
    ],
)
def test_a_zone_that_there_is_not_is_refused(zone: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        checked_rule("0 9 * * *", None, zone)


def test_a_schedule_has_either_an_expression_or_an_interval() -> None:
    for cron, every in ((None, None), ("0 9 * * *", 60)):
        with pytest.raises(InputError, match="needs either cron='0 9"):
            checked_rule(cron, every, "UTC")


def test_without_its_extra_an_expression_is_an_error_and_an_interval_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingExtra, match="needs the extra 'schedules'"):
        checked_rule("0 9 * * *", None, "UTC")
    assert checked_rule(None, 5, "UTC").every == 5
