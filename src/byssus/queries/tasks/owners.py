"""The users of tasks and schedules. Those of a thread have the thread's owner; the column is kept equal to it here."""

from __future__ import annotations

from byssus.store.database import Tx

_TABLES = ("tasks", "schedules")


def follow(tx: Tx, thread: int) -> None:
    """The owner of a thread has changed."""
    for table in _TABLES:
        tx.run(
            f"UPDATE {table} SET owner = COALESCE((SELECT t.owner FROM threads t WHERE t.key = :thread), '')"
            " WHERE thread = :thread",
            thread=thread,
        )


def disown(tx: Tx, user_id: str) -> None:
    """The threads of a user have no user any more."""
    for table in _TABLES:
        tx.run(f"UPDATE {table} SET owner = '' WHERE owner = :id AND thread IS NOT NULL", id=user_id)


def forget(tx: Tx, user_id: str) -> None:
    """Remove what belongs to a user and to no thread."""
    for table in _TABLES:
        tx.run(f"DELETE FROM {table} WHERE owner = :id AND thread IS NULL", id=user_id)
