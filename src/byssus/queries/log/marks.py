"""Marks: labels on the messages of a thread, and the summary of those that were left out.

Both belong to the branch that the thread reads. A new branch gets a copy of the marks of the messages that it shares,
so neither side sees what the other one marks later. Marks are deleted together with their message.
"""

from __future__ import annotations

from collections.abc import Sequence

from byssus.store.database import Tx

MAX_MARK = 500  # characters: an index takes no more on every database


def put(tx: Tx, branch: int, messages: Sequence[int], marks: Sequence[str]) -> None:
    """Add marks, in their order, to each of these messages."""
    rows = [{"branch": branch, "message": message, "mark": mark} for message in messages for mark in marks]
    tx.many("INSERT INTO marks (branch, message, mark) VALUES (:branch, :message, :mark)", rows)


def of(tx: Tx, branch: int, message: int) -> list[str]:
    """The marks of a message, in their order."""
    rows = tx.all(
        "SELECT mark FROM marks WHERE message = :message AND branch = :branch ORDER BY key",
        message=message,
        branch=branch,
    )
    return [mark for (mark,) in rows]


def holders(tx: Tx, branch: int, mark: str) -> dict[int, list[int]]:
    """The messages that have a mark, each with the keys of its rows in the table of marks."""
    found: dict[int, list[int]] = {}
    rows = tx.all(
        "SELECT message, key FROM marks WHERE branch = :branch AND mark = :mark ORDER BY key", branch=branch, mark=mark
    )
    for message, key in rows:
        found.setdefault(message, []).append(key)
    return found


def drop(tx: Tx, keys: Sequence[int]) -> None:
    tx.many("DELETE FROM marks WHERE key = :key", [{"key": key} for key in keys])


def inherit(tx: Tx, old: int, new: int, *, upto: int) -> None:
    """Give a new branch the summary of another one, and its marks up to a seq."""
    tx.run(
        "INSERT INTO marks (branch, message, mark) SELECT :new, k.message, k.mark FROM marks k"
        " JOIN messages m ON m.key = k.message WHERE k.branch = :old AND m.seq <= :upto ORDER BY k.key",
        new=new,
        old=old,
        upto=upto,
    )
    tx.run(
        "UPDATE branches SET summary = (SELECT o.summary FROM branches o WHERE o.key = :old) WHERE key = :new"
        " AND EXISTS (SELECT 1 FROM branches o WHERE o.key = :old AND o.summary <> '')",
        new=new,
        old=old,
    )


def forget(tx: Tx, branch: int) -> None:
    """Remove the marks and the summary of a branch."""
    tx.run("DELETE FROM marks WHERE branch = :branch", branch=branch)
    tx.run("UPDATE branches SET summary = '' WHERE key = :branch AND summary <> ''", branch=branch)


def summarize(tx: Tx, branch: int, summary: str) -> None:
    """Set the summary of the messages that are left out; an empty text removes it."""
    tx.run("UPDATE branches SET summary = :summary WHERE key = :branch", summary=summary, branch=branch)
