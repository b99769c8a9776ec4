"""The limits of a type of tasks, as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from byssus.errors import InputError
from byssus.queries.tasks.rates import TypeLimits

_RATE = re.compile(r"\s*(\d+)\s*/\s*(second|minute|hour|day)\s*")
_SECONDS = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}


@dataclass(frozen=True)
class Limit:
    """How many tasks of a type run at once, over all workers: in all, of a user, of a session; and how many start.

    `rate` is a text such as "10/minute" (second, minute, hour, day): that many may start at once, and then that many
    per period. All workers of a database need the same limits.
    """

    concurrency: int | None = None
    per_user: int | None = None
    per_session: int | None = None
    rate: str | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "per_user", "per_session"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1e6):
                raise InputError(f"{name} must be a number from 1 up, or None; got {value!r:.80}")
        if self.rate is not None:
            _parsed(self.rate)

    @property
    def limits(self) -> TypeLimits:
        """The same, as claims take it."""
        count, seconds = (0, 1) if self.rate is None else _parsed(self.rate)
        rate = None if self.rate is None else count / seconds
        return TypeLimits(self.concurrency, self.per_user, self.per_session, rate, count)


def _parsed(rate: object) -> tuple[int, int]:
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if match is None or not 0 < int(match[1]) < 1e6:
        raise InputError(f"rate must be a text such as '10/minute' (or second, hour, day), got {rate!r:.80}")
    return int(match[1]), _SECONDS[match[2]]
