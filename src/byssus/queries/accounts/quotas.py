"""How many tokens a user may still spend.

- What is left is the total, minus what was used, minus what runs have reserved for model calls that are under way.
- A decision locks the user's row first, so concurrent runs never spend the same tokens.
- A reservation counts while the lease under which it was made is alive. It is settled in the transaction that stores
  the reply; after a crash it ends with the lease.
"""

from __future__ import annotations

from typing import NamedTuple

from byssus.errors import NotFound
from byssus.store.database import Tx

_RESERVED = (
    "SELECT COALESCE(SUM(r.tokens), 0) FROM reservations r JOIN threads t ON t.key = r.thread"
    " WHERE r.owner = :user AND r.thread <> :but AND t.lease_epoch = r.epoch AND t.lease_until > :now"
)
_SPEND = "UPDATE users SET quota_used = quota_used + :tokens, updated_at = :now WHERE id = :user"


class Charge(NamedTuple):
    """What a user has spent."""

    user: str
    tokens: int


class QuotaLeft(NamedTuple):
    """What a user may still spend; None: there is no limit."""

    tokens: int | None

    def suffices(self, required: int) -> bool:
        return self.tokens is None or self.tokens >= required


def unknown(user_id: str) -> NotFound:
    return NotFound(f"there is no user {user_id!r}; create_user(name, user_id={user_id!r}) makes one")


def take(tx: Tx, user_id: str) -> None:
    """Lock the row of a user, who must exist and cannot be removed meanwhile.

    A write to a thread locks the thread's row before it, as every model call of a run does: the order prevents
    deadlocks.
    """
    if tx.one("UPDATE users SET quota_used = quota_used WHERE id = :user RETURNING key", user=user_id) is None:
        raise unknown(user_id)


def left(tx: Tx, user_id: str, *, but: int = 0) -> QuotaLeft | None:
    """What is left; None if there is no such user. What one thread has set aside may be left out."""
    row = tx.one("SELECT quota_total, quota_used FROM users WHERE id = :user", user=user_id)
    return None if row is None else _less_reserved(tx, user_id, but, *row)


def consume(tx: Tx, user_id: str, tokens: int) -> bool | None:
    """Spend tokens, if so many are left. None if there is no such user."""
    found = _taken(tx, user_id)
    if found is None or not found.suffices(tokens):
        return None if found is None else False
    # `one`, not `run`: the next decision in the same transaction must see it, for any thread.
    tx.one(f"{_SPEND} RETURNING key", tokens=tokens, user=user_id, now=tx.now())
    return True


def reserve(tx: Tx, thread: int, epoch: int, user_id: str, wanted: int, least: int) -> QuotaLeft | None:
    """Reserve tokens for a thread's next model call: as many as wanted, or what is left if that is enough.

    Returns what was granted (`tokens` is None if there is no limit), or None if less than `least` is left.
    """
    found = _taken(tx, user_id, but=thread)
    if found is None or not found.suffices(least):
        return None
    tokens = wanted if found.tokens is None else min(wanted, found.tokens)
    tx.one(  # see `consume`
        "INSERT INTO reservations (thread, owner, tokens, epoch) VALUES (:thread, :owner, :tokens, :epoch)"
        " ON CONFLICT (thread) DO UPDATE SET owner = excluded.owner, tokens = excluded.tokens, epoch = excluded.epoch"
        " RETURNING thread",
        thread=thread,
        owner=user_id,
        tokens=tokens,
        epoch=epoch,
    )
    return QuotaLeft(None if found.tokens is None else tokens)


def settle(tx: Tx, thread: int, charge: Charge) -> None:
    """Charge what was really spent, and remove the reservation."""
    tx.run("DELETE FROM reservations WHERE thread = :thread", thread=thread)
    # `one`, not `run`: the reservation counts no more once the lease is given back, which the next decision in the
    # same transaction sees. So it must see this, too.
    tx.one(f"{_SPEND} RETURNING key", tokens=charge.tokens, user=charge.user, now=tx.now())


def _taken(tx: Tx, user_id: str, *, but: int = 0) -> QuotaLeft | None:
    """What is left, with the user's row locked."""
    row = tx.one(
        "UPDATE users SET quota_used = quota_used WHERE id = :user RETURNING quota_total, quota_used", user=user_id
    )
    return None if row is None else _less_reserved(tx, user_id, but, *row)


def _less_reserved(tx: Tx, user_id: str, but: int, total: int | None, used: int) -> QuotaLeft:
    if total is None:
        return QuotaLeft(None)
    row = tx.one(_RESERVED, user=user_id, but=but, now=tx.now())
    assert row is not None
    return QuotaLeft(total - used - int(row[0]))
