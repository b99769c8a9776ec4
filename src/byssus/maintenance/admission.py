"""What of a file an import brings.

A file is untrusted data. Unless the caller trusts it, nothing in it may act:

- A call that a person has answered waits for an answer again. One that was started, or that nothing is known of, counts
  as one whose outcome is unknown: no run starts it automatically.
- A run that had not ended is not resumed, and messages that waited for one are not delivered. A request key is
  dropped, so that no prompt gets a file's reply.
- Threads belong to the user that the caller names, or have no user. Users, tasks and usage are not imported.

A trusted file, one's own backup, comes back as it was. A trusted thread that gets another id is a second thread beside
the first one: its calls are treated as those of a fork, because an approval and an idempotency key are for one thread.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

from byssus.errors import InputError
from byssus.maintenance.shapes import COUNTED
from byssus.values import clock
from byssus.values.inputs import checked_id, checked_new_id, checked_thread
from byssus.values.thread_key import ThreadKey

Row = dict[str, Any]

_ACTING = {"inbox": "queued messages", "task": "tasks", "usage": "usage", "tool_usage": "usage"}
# A question that is asked again has no time limit: its default answer was for another database.
_UNANSWERED = dict.fromkeys(
    ("answer", "answered_by", "answered_at", "answered_from", "edited", "expires_at", "fallback")
)


class Terms(NamedTuple):
    """The options of an import."""

    as_id: str | None = None  # another id for the thread, where there is one
    user_id: str | None = None  # whose the threads become
    trusted: bool = False


def checked_terms(as_id: str | None, user_id: str | None, trusted: bool) -> Terms:
    if not isinstance(trusted, bool):
        raise InputError(f"trusted must be True or False, got {trusted!r:.80}")
    if user_id is not None:
        checked_thread(ThreadKey(checked_id(user_id, "a user id"), "any"))  # a memory's namespace is its user's id
    return Terms(None if as_id is None else checked_new_id(as_id, "as_id"), user_id, trusted)


class Admission:
    """Takes the checked rows of a file one by one, changes them to what may come in, and notes what may not."""

    def __init__(self, terms: Terms) -> None:
        self.left_out: Counter[str] = Counter()
        self._terms = terms
        self._keys = map(f"{clock.new_id()}-{{}}".format, itertools.count())  # idempotency keys that no call has
        self._is_second = False  # whether the thread that is arriving may run beside another one

    @property
    def makes_users(self) -> bool:
        """Whether users whom the file names are made where there are none."""
        return self._terms.trusted and self._terms.user_id is None

    def account(self) -> None:
        """There is an account of a user in the file."""
        if not self.makes_users:
            self.left_out["users"] += 1

    def row(self, kind: str, row: Row) -> Row | None:
        """The row as it comes in; None if it does not."""
        if kind == "thread":
            return self._thread(row)
        if kind == "end":
            return row if self._terms.trusted else {**row, **{COUNTED[each]: 0 for each in _ACTING}}
        if kind in _ACTING and not self._terms.trusted:
            if kind != "usage" or row["tokens"] or row["cost"] or row["priced"]:  # else it counts messages
                self.left_out[_ACTING[kind]] += 1
            return None
        if not self._is_second:
            return row
        return self._call(row) if kind == "call" else self._run(row) if kind == "run" else row

    def _thread(self, row: Row) -> Row:
        as_id, user_id, trusted = self._terms
        if row["below"] is None:  # what holds for a thread holds for its children
            self._is_second = not trusted or as_id not in (None, row["id"])
        if not trusted or user_id is not None:
            row = {**row, **self._home(row)}
        if not self._is_second:
            return row
        self.left_out["runs"] += row["run"] is not None
        return {**row, "run": None, "unledgered": row["head"]}

    def _home(self, row: Row) -> Row:
        """Whose thread it becomes: a memory is one of its namespace, any other one has an owner."""
        user_id, namespace = self._terms.user_id, row["namespace"]
        if namespace and user_id is None:
            raise InputError(
                f"thread {row['id']!r} is a memory of user {namespace!r}; say whose memory it becomes"
                " (user_id=, --user), or that the file is a backup of your own (trusted=True, --trusted)"
            )
        if row["owner"] is not None and user_id is None:
            self.left_out["owners"] += 1
        return {"namespace": user_id, "owner": None} if namespace else {"owner": user_id}

    def _call(self, row: Row) -> Row:
        if row["reply"] == 0:  # an application's log
            return row
        status = row["status"]
        if status in ("answered", "left") and row["answer"] is not None:
            self.left_out["answers"] += 1
        if status == "started":
            return {**row, "status": "unknown"}
        if status not in ("waiting", "answered", "left"):
            return row
        status = "waiting" if status == "answered" else status
        return {**row, **_UNANSWERED, "status": status, "idempotency_key": next(self._keys)}

    def _run(self, row: Row) -> Row:
        """A run as a part of the past: nothing continues it, and no prompt joins it."""
        row = {**row, "request_key": None, "request_digest": None}
        if row["ended_at"] is not None:
            return row
        last = max((time for attempt in row["attempted"] for time in attempt[1:3] if time), default=row["began_at"])
        return {**row, "ended_at": last, "stop_reason": "interrupted"}


def in_words(left_out: Counter[str]) -> str:
    """What was left out, as a person reads it: 'answers (2), tasks (1)'."""
    return ", ".join(f"{what} ({count:,})" for what, count in left_out.items() if count)
