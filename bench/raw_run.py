"""What a run leaves in the tables, written down by hand: plain apsw, and no byssus between it and the rows.

It knows all that raw code could know: its thread is there, and nobody else writes to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.measure import COUNT, INSERT, MOVE, TEXT, message, raw_database, raw_thread
from byssus.messages import AssistantMessage, encode
from byssus.store.owners import Presence
from byssus.values import clock

_TAKE = ", lease_owner = :owner, lease_epoch = lease_epoch + 1, lease_until = :until, run = :run"
_KEEP = ", lease_until = :until"
_GIVE_BACK = ", lease_owner = NULL, lease_until = NULL, run = NULL"
_TOUCH = "UPDATE threads SET version = version + 1{} WHERE namespace = '' AND id = 't'"
_START = (
    "INSERT INTO tool_calls (thread, branch, reply, place, call_id, name, arguments, recovery, idempotency_key, run,"
    " status, attempts, started_at) VALUES (:thread, :branch, :reply, 0, 'c1', 'look', '{}', 'never', :run, :run,"
    " 'started', 1, :now)"
)
_END = (
    "UPDATE tool_calls SET status = 'done', ended_at = :now, elapsed_ms = 1 WHERE branch = :branch AND reply = :reply"
)
_COUNT_CALL = (
    "INSERT INTO tool_usage (thread, owner, day, name, bucket, calls, failures, total_ms)"
    " VALUES (:thread, '', substr(:now, 1, 10), 'look', 1, 1, 0, 1) ON CONFLICT (thread, owner, day, name, bucket)"
    " DO UPDATE SET calls = tool_usage.calls + 1, total_ms = tool_usage.total_ms + 1"
)


class RawRun:
    """Runs on one thread of one file. Each method is one durable commit.

    `ask` is `take` and a question, `reply` is a reply and `give_back`.
    """

    def __init__(self, path: Path) -> None:
        connection = raw_database(path)
        raw_thread(connection, "t", clock.now())
        self._execute = connection.execute
        self._question = encode(message())
        self._reply = encode(AssistantMessage(TEXT, id="0123456789abcdef", created_at=clock.now()))
        self._owner = Presence(None).name(clock.new_id(), 30)
        self._thread, self._branch, self._head = self._execute("SELECT key, branch, head FROM threads").fetchall()[0]

    def take(self) -> None:
        self._begin()
        self._touch(_TAKE, **self._lease())
        self._commit()

    def give_back(self) -> None:
        self._begin()
        self._touch(_GIVE_BACK)
        self._commit()

    def store_question(self) -> None:
        self._begin()
        self._add("user", self._question, _KEEP, until=self._until())
        self._commit()

    def store_reply(self) -> None:
        self._begin()
        self._add("assistant", self._reply, _KEEP, until=self._until())
        self._commit()

    def ask(self) -> None:
        self._begin()
        self._add("user", self._question, _TAKE, **self._lease())
        self._commit()

    def reply(self) -> None:
        self._begin()
        self._add("assistant", self._reply, _GIVE_BACK)
        self._commit()

    def start_call(self) -> None:
        self._begin()
        self._touch(_KEEP, until=self._until())
        self._execute(_START, {**self._place(), "thread": self._thread, "run": clock.new_id()})
        self._commit()

    def end_call(self) -> None:
        self._begin()
        place = self._place()
        self._add("tool_result", self._question, _KEEP, until=self._until())
        self._execute(_END, place)
        self._execute(_COUNT_CALL, {"thread": self._thread, "now": self._now})
        self._commit()

    def _begin(self) -> None:
        self._now = clock.now()
        self._execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._execute("COMMIT")

    def _touch(self, change: str, **values: Any) -> None:
        self._execute(_TOUCH.format(change), values)

    def _add(self, role: str, body: str, change: str, **values: Any) -> None:
        now = self._now
        row = self._execute(MOVE.format(change), {"id": "t", "now": now, **values}).fetchall()[0]
        self._branch, self._head, self._thread = row
        self._execute(INSERT, {"branch": self._branch, "seq": self._head, "role": role, "body": body, "now": now})
        self._execute(COUNT, {"thread": self._thread, "now": now})

    def _lease(self) -> dict[str, Any]:
        return {"owner": self._owner, "until": self._until(), "run": clock.new_id()}

    def _until(self) -> str:
        return clock.after(self._now, 30.0)

    def _place(self) -> dict[str, Any]:
        """The call of the last message."""
        return {"branch": self._branch, "reply": self._head, "now": self._now}
