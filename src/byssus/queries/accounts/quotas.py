"""How many tokens a user may still spend.

- What is left is the total, less what was used, less what runs have set aside for model calls that are under way.
- Whoever decides takes the user's row first, so that a hundred at once never decide upon the same tokens.
- A reservation counts while the lease lives under which it was made. It is settled in the transaction that stores the
  reply; after a crash nobody needs to give it back.
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
    """Take the row of a user, who must exist: nobody removes them meanwhile.

    Whoever writes to a thread takes that one's row before, as every model call of a run does.
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
    # Asked for, and not told: who decides next in the same transaction must see it, whatever thread that is about.
    tx.one(f"{_SPEND} RETURNING key", tokens=tokens, user=user_id, now=tx.now())
    return True


def reserve(tx: Tx, thread: int, epoch: int, user_id: str, wanted: int, least: int) -> QuotaLeft | None:
    """Set tokens aside for a thread's next model call: as many as wanted, or what is left if that is enough.

    Answers what was granted (`tokens` is None if there is no limit), or None if less than `least` is left.
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
    """What was really spent, in the place of what was set aside. Both together, so it does not matter who sees it."""
    tx.run("DELETE FROM reservations WHERE thread = :thread", thread=thread)
    tx.run(_SPEND, tokens=charge.tokens, user=charge.user, now=tx.now())


def _taken(tx: Tx, user_id: str, *, but: int = 0) -> QuotaLeft | None:
    """What is left, with the user's row in our hands."""
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
