"""The time, for a model that cannot know it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from byssus.errors import InputError
from byssus.tools import Tool, tool


def clock() -> list[Tool[..., Any]]:
    """Return the tool `current_time`."""
    return [tool(name="current_time", recovery="retry")(_current_time)]


def _current_time(zone: Annotated[str, "such as Europe/Oslo; empty for the local time"] = "") -> str:
    """The current date and time, with the weekday and the offset from UTC."""
    return f"{datetime.now(_zone(zone)).astimezone(_zone(zone)):%A, %Y-%m-%d %H:%M:%S %z %Z}"


def _zone(name: str) -> ZoneInfo | None:
    if not name:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InputError(f"there is no time zone {name!r:.80}; use a name such as Europe/Oslo or UTC") from error
