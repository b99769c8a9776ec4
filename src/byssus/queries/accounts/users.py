"""Users: the owners of threads, their preferences, and how many tokens they may spend.

The leaves of a user's preferences have a table of their own, by which users are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from byssus.errors import InputError, QuotaExceeded
from byssus.queries.accounts import quotas, usage
from byssus.queries.accounts.quotas import QuotaLeft, unknown
from byssus.queries.log import threads
from byssus.queries.log.leases import Lease
from byssus.queries.tasks import owners
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

Leaf = tuple[str, str]  # a path and the value there, both as JSON


class User(NamedTuple):
    id: str
    name: str
    email: str
    quota_total: int | None
    quota_used: int
    preferences: str
    created_at: str
    updated_at: str


_COLUMNS = ", ".join(User._fields)


def create(
    tx: Tx, user_id: str, name: str, email: str, quota_total: int | None, preferences: str, leaves: Sequence[Leaf]
) -> User:
    row = tx.one(
        "INSERT INTO users (id, name, email, quota_total, quota_used, preferences, created_at, updated_at)"
        " VALUES (:id, :name, :email, :total, 0, :preferences, :now, :now) ON CONFLICT (id) DO NOTHING"
        f" RETURNING key, {_COLUMNS}",
        id=user_id,
        name=name,
        email=email,
        total=quota_total,
        preferences=preferences,
        now=tx.now(),
    )
    if row is None:
        raise InputError(f"there is a user {user_id!r} already; use update_user, or another user_id")
    _add_leaves(tx, row[0], leaves)
    return User(*row[1:])


def ensure(tx: Tx, user_id: str) -> None:
    """Make a user with this id and no limit, if there is none."""
    tx.run(
        "INSERT INTO users (id, name, email, quota_used, preferences, created_at, updated_at)"
        " VALUES (:id, :id, '', 0, '{}', :now, :now) ON CONFLICT (id) DO NOTHING",
        id=user_id,
        now=tx.now(),
    )


def get(tx: Tx, user_id: str) -> User | None:
    row = tx.one(f"SELECT {_COLUMNS} FROM users WHERE id = :id", id=user_id)
    return User(*row) if row else None


def require(tx: Tx, user_id: str) -> User:
    """The user, who must exist."""
    user = get(tx, user_id)
    if user is None:
        raise unknown(user_id)
    return user


def update(tx: Tx, user_id: str, changes: dict[str, Any], leaves: Sequence[Leaf] | None) -> User:
    """Change some columns; with preferences come their leaves."""
    sets = "".join(f", {column} = :{column}" for column in sorted(changes))
    row = tx.one(
        f"UPDATE users SET updated_at = :now{sets} WHERE id = :id RETURNING key, {_COLUMNS}",
        id=user_id,
        now=tx.now(),
        **changes,
    )
    if row is None:
        raise unknown(user_id)
    if leaves is not None:
        tx.run("DELETE FROM preferences WHERE owner = :key", key=row[0])
        _add_leaves(tx, row[0], leaves)
    return User(*row[1:])


def remove(tx: Tx, user_id: str) -> bool:
    """Remove a user, with their tasks, schedules and the usage of their deleted threads. The caller takes care of
    existing threads."""
    usage.forget_user(tx, user_id)
    tx.run("DELETE FROM reservations WHERE owner = :id", id=user_id)
    owners.forget(tx, user_id)
    return tx.one("DELETE FROM users WHERE id = :id RETURNING key", id=user_id) is not None


def threads_of(tx: Tx, user_id: str) -> list[str]:
    """The ids of a user's threads. The user must exist, and is locked, so that no thread is added meanwhile."""
    quotas.take(tx, user_id)
    rows = tx.all("SELECT id FROM threads WHERE owner = :id AND namespace = '' ORDER BY key", id=user_id)
    return [name for (name,) in rows]


def disown_and_remove(tx: Tx, user_id: str, *, disown: bool) -> list[str]:
    """Remove a user who has no threads; with `disown`, also one who has some, which then have no user.

    Returns the ids of the threads.
    """
    owned = threads_of(tx, user_id)
    if disown or not owned:
        tx.run("UPDATE threads SET owner = NULL, version = version + 1 WHERE owner = :id", id=user_id)
        owners.disown(tx, user_id)
        remove(tx, user_id)
    return owned


def find(tx: Tx, leaves: Sequence[Leaf], *, limit: int, offset: int = 0) -> list[User]:
    """Users that have all these leaves among their preferences, the oldest first; without any, all users."""
    others = ", ".join(f"(:path_{n}, :value_{n})" for n in range(1, len(leaves)))
    # Counted, not joined one by one: planning a hundred joins takes too long.
    conditions = (
        f" AND (SELECT COUNT(*) FROM preferences p WHERE p.owner = u.key AND (p.path, p.value) IN (VALUES {others}))"
        f" = {len(leaves) - 1}"
        if others
        else ""
    )
    values: dict[str, Any] = {}
    for n, (path, value) in enumerate(leaves):
        values |= {f"path_{n}": path, f"value_{n}": value}
    source = (
        "preferences f JOIN users u ON u.key = f.owner WHERE f.path = :path_0 AND f.value = :value_0"
        if leaves
        else "users u WHERE 1 = 1"
    )
    order = "f.owner" if leaves else "u.key"
    columns = ", ".join(f"u.{name}" for name in User._fields)
    rows = tx.all(
        f"SELECT {columns} FROM {source}{conditions} ORDER BY {order} LIMIT :limit OFFSET :offset",
        limit=limit,
        offset=offset,
        **values,
    )
    return [User(*row) for row in rows]


def _add_leaves(tx: Tx, key: int, leaves: Sequence[Leaf]) -> None:
    tx.many(
        "INSERT INTO preferences (owner, path, value) VALUES (:owner, :path, :value)",
        [{"owner": key, "path": path, "value": value} for path, value in leaves],
    )


def reserve(tx: Tx, thread_key: ThreadKey, user_id: str, wanted: int, least: int, *, by: Lease) -> QuotaLeft:
    """Reserve tokens for the next model call of a run; see `quotas.reserve`."""
    thread, _ = threads.hold(tx, thread_key, by)
    granted = quotas.reserve(tx, thread, by.epoch, user_id, wanted, least)
    if granted is None:
        found = quotas.left(tx, user_id, but=thread)
        if found is None:
            raise unknown(user_id)
        raise QuotaExceeded(user_id, least, found.tokens or 0)
    return granted
