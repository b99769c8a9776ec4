"""The limits of a type of tasks: how many may run at once, in all, of a user and of a session, and how many may start.

Who claims tasks of a limited type locks its row in `task_rates` first, so that two workers cannot both see the room for
one more. The rate is a bucket of tokens: it fills steadily, and each start takes one.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from byssus.store.database import Tx
from byssus.values import clock

_ENDLESS = 2**31


class TypeLimits(NamedTuple):
    """What a type of tasks is limited to; None: no limit. `burst` is how many tokens the bucket holds."""

    concurrency: int | None = None
    per_user: int | None = None
    per_session: int | None = None
    per_second: float | None = None
    burst: int = 0


NO_LIMITS = TypeLimits()


class Capacity:
    """How many tasks of a type may start now."""

    def __init__(self, limits: TypeLimits, tokens: float = 0) -> None:
        self.limits = limits
        self.tokens = tokens
        self._running = 0
        self._owners: Counter[str] = Counter()
        self._threads: Counter[int] = Counter()

    def has_running(self, owner: str, thread: int | None, count: int) -> None:
        """So many tasks of a user and a session are running."""
        self._running += count
        self._owners[owner] += count
        if thread is not None:
            self._threads[thread] += count

    @property
    def left(self) -> int:
        """How many tasks may start."""
        most, rate = self.limits.concurrency, self.limits.per_second
        room = _ENDLESS if most is None else most - self._running
        return max(room if rate is None else min(room, int(self.tokens)), 0)

    @property
    def is_full(self) -> bool:
        return self.left == 0

    @property
    def full_owners(self) -> list[str]:
        return [owner for owner in self._owners if self.left_of(owner) <= 0]

    @property
    def full_threads(self) -> list[int]:
        most = self.limits.per_session
        return [] if most is None else [thread for thread, count in self._threads.items() if count >= most]

    def left_of(self, owner: str) -> int:
        """How many tasks of a user may start. Tasks of no user are not counted together."""
        most = self.limits.per_user
        return self.left if most is None or owner == "" else min(self.left, most - self._owners[owner])

    def take(self, owner: str, thread: int | None) -> bool:
        """Start one; False if there is no room for it."""
        most = self.limits.per_session
        is_full = most is not None and thread is not None and self._threads[thread] >= most
        if is_full or self.left_of(owner) <= 0:
            return False
        self.tokens -= 1
        self.has_running(owner, thread, 1)
        return True


def room(tx: Tx, kind: str, limits: TypeLimits) -> Capacity:
    """How many tasks of a type may start now. The type is locked until the transaction ends."""
    if limits == NO_LIMITS:
        return Capacity(limits)
    row = tx.one(
        "INSERT INTO task_rates (type, tokens, filled_at) VALUES (:type, :burst, :now)"
        " ON CONFLICT (type) DO UPDATE SET type = excluded.type RETURNING tokens, filled_at, :now",
        type=kind,
        burst=float(limits.burst),
        now=tx.now(),
    )
    assert row is not None
    tokens, filled_at, now = row
    if limits.per_second is not None:
        passed = max(clock.seconds_between(filled_at, now), 0)  # a clock that was set back fills nothing
        tokens = min(tokens + passed * limits.per_second, float(limits.burst))
    found = Capacity(limits, tokens)
    for owner, thread, count in tx.all(
        "SELECT owner, thread, COUNT(*) FROM tasks WHERE type = :type AND status = 'running' GROUP BY owner, thread",
        type=kind,
    ):
        found.has_running(owner, thread, count)
    return found


def spend(tx: Tx, kind: str, used: Capacity) -> None:
    """Note what is left in the bucket."""
    if used.limits.per_second is not None:
        tx.run(
            "UPDATE task_rates SET tokens = :tokens, filled_at = :now WHERE type = :type",
            tokens=used.tokens,
            type=kind,
            now=tx.now(),
        )
