"""The time and the ids that values are stamped with.

A time is ISO 8601 text in UTC with microseconds, everywhere: "2026-01-31T12:00:00.000000Z". Such texts sort by time.
Callers may also pass a datetime, a date, or text with another offset.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, date, datetime, timedelta
from typing import TypeAlias

from byssus.errors import InputError

Time: TypeAlias = str | date  # as callers may pass it; a datetime is a date

_second = (-1, "")  # the last second that was formatted: each write asks for the time, and most share a second


def now() -> str:
    """The time as it is stored: ISO 8601, UTC, microseconds."""
    global _second  # noqa: PLW0603
    whole, nanos = divmod(time.time_ns(), 1_000_000_000)
    second, text = _second
    if second != whole:
        text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
        _second = (whole, text)
    return f"{text}.{nanos // 1000:06d}Z"


def after(moment: str, seconds: float) -> str:
    """A time as it is stored, so many seconds after another one."""
    then = datetime.fromisoformat(moment[:-1]) + timedelta(seconds=seconds)
    return f"{then.isoformat(timespec='microseconds')}Z"


def between(moment: str, later: str) -> float:
    """The seconds between two times as they are stored."""
    return (datetime.fromisoformat(later[:-1]) - datetime.fromisoformat(moment[:-1])).total_seconds()


def stored(moment: object, what: str) -> str:
    """A time that a caller has passed, as it is stored. Without an offset it is UTC; a date is its first moment."""
    try:
        if isinstance(moment, date) and not isinstance(moment, datetime):
            moment = moment.isoformat()
        time = moment if isinstance(moment, datetime) else datetime.fromisoformat(moment)  # type: ignore[arg-type]
        utc = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{what} must be a datetime or a text such as '2026-01-31' or '2026-01-31T12:00:00Z', got {moment!r:.80}"
        ) from error
    return f"{utc.replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def new_id() -> str:
    """An id that cannot collide and sorts by the time of its making: 48 bits of milliseconds, 80 bits of chance."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"
