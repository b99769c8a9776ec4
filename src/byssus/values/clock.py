"""The time and the ids that values are stamped with."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta

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


def new_id() -> str:
    """An id that cannot collide and sorts by the time of its making: 48 bits of milliseconds, 80 bits of chance."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"
