"""The log of tools: the ledger as applications read it, and the calls that they add to it themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from byssus.errors import NotFound
from byssus.queries.accounts import usage
from byssus.queries.log import threads, tool_calls
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey


class LoggedCall(NamedTuple):
    """A call of the log. `input` and `output` are JSON; `message` is the id of the message that asked for the call.

    An application that logs a call gives the first fields. The others are known when it is read; `result` is the
    message with the result, of a call that an agent made.
    """

    id: str
    name: str
    input: str
    output: str | None
    elapsed_ms: float | None
    status: str
    error: str | None
    message: str | None
    session_id: str = ""
    call_id: str = ""
    created_at: str | None = None
    result: str | None = None


_LOG = (
    "SELECT c.idempotency_key, c.name, c.arguments, c.output, c.elapsed_ms, c.status, c.error,"
    " COALESCE(c.message, (SELECT m.id FROM messages m WHERE c.reply > 0 AND m.branch = c.branch AND m.seq = c.reply)),"
    " t.id, c.call_id, COALESCE(c.started_at, c.asked_at), (SELECT m.body FROM messages m WHERE c.reply > 0"
    " AND m.branch = c.branch AND m.seq = c.reply + 1 + c.place AND m.role = 'tool_result')"
    " FROM tool_calls c JOIN threads t ON t.key = c.thread WHERE t.namespace = '' AND "
)
# A fork that an older byssus made at an open call has a row with the same id.
_THAT_ONE = (
    "key = (SELECT MIN(c.key) FROM tool_calls c JOIN threads t ON t.key = c.thread"
    " WHERE c.idempotency_key = :id AND t.namespace = '' AND {})"
)


def log(tx: Tx, thread: int, call: LoggedCall) -> None:
    """Add a call that an application has made. It belongs to no reply; its `place` counts such calls."""
    row = tx.one(
        "INSERT INTO tool_calls (thread, branch, reply, place, call_id, name, arguments, recovery, idempotency_key,"
        " run, status, attempts, started_at, ended_at, output, error, elapsed_ms, message) SELECT t.key, t.branch, 0,"
        " COALESCE((SELECT MAX(c.place) FROM tool_calls c WHERE c.branch = t.branch AND c.reply = 0), -1) + 1, :id,"
        " :name, :input, 'never', :id, '', :status, 1, :now, :now, :output, :error, :elapsed, :message"
        " FROM threads t WHERE t.key = :thread RETURNING branch, place",
        thread=thread,
        id=call.id,
        name=call.name,
        input=call.input,
        status=call.status,
        now=tx.now(),  # when it was logged: what is known of the call itself is how long it took
        output=call.output,
        error=call.error,
        elapsed=call.elapsed_ms,
        message=call.message,
    )
    assert row is not None
    usage.count_call(tx, row[0], 0, row[1], call.status, call.elapsed_ms)


def logged(tx: Tx, call_id: str) -> LoggedCall | None:
    row = tx.one(_LOG + "c.idempotency_key = :id ORDER BY c.key LIMIT 1", id=call_id)
    return LoggedCall(*row) if row else None


def log_of(
    tx: Tx, session_id: str | None, *, name: str | None, status: Sequence[str] | None, limit: int, offset: int
) -> list[LoggedCall]:
    """The calls of a session, or of all, the newest first."""
    names = {f"status_{n}": value for n, value in enumerate(status or ())}
    among = f" AND c.status IN ({', '.join(f':{name}' for name in names)})" if names else ""
    mine = "" if session_id is None else " AND t.id = :session"
    called = "" if name is None else " AND c.name = :name"
    values = {"session": session_id} if mine else {}
    values |= {"name": name} if called else {}
    rows = tx.all(
        f"{_LOG}1 = 1{mine}{called}{among} ORDER BY c.key DESC LIMIT :limit OFFSET :offset",
        limit=limit,
        offset=offset,
        **values,
        **names,
    )
    return [LoggedCall(*row) for row in rows]


def amend(tx: Tx, call_id: str, changes: dict[str, str | None]) -> None:
    """Change a logged call. It becomes a new row, so that the search index notices."""
    columns = (
        "thread, branch, reply, place, call_id, name, recovery, idempotency_key, run, status, attempts, started_at,"
        " ended_at, elapsed_ms, message, arguments, output, error"
    )
    that_one = _THAT_ONE.format("c.reply = 0")
    of_call = f"SELECT id FROM threads WHERE key = (SELECT thread FROM tool_calls WHERE {that_one})"
    if (thread := tx.one(of_call, id=call_id)) is not None:
        threads.take(tx, ThreadKey("", thread[0]))  # of two changes at once, the second waits for the first
    row = tx.one(f"DELETE FROM tool_calls WHERE {that_one} RETURNING {columns}", id=call_id)
    if row is None:
        raise unknown_call(call_id)
    values = dict(zip((name.strip() for name in columns.split(",")), row, strict=True)) | changes
    tx.run(f"INSERT INTO tool_calls ({columns}) VALUES ({', '.join(f':{name}' for name in values)})", **values)


def unlog(tx: Tx, call_id: str) -> None:
    """Remove a call from the log. An agent's call that has not ended cannot be removed."""
    open_ = ", ".join(f"'{status}'" for status in (*tool_calls.OPEN, "left"))
    ended = _THAT_ONE.format(f"c.status NOT IN ({open_})")
    row = tx.one(f"DELETE FROM tool_calls WHERE {ended} RETURNING branch", id=call_id)
    if row is None:
        raise unknown_call(call_id)
    tx.run("UPDATE branches SET uncounted = 1 WHERE key = :branch", branch=row[0])


def unknown_call(call_id: str) -> NotFound:
    return NotFound(f"there is no such call {call_id!r} in the log of tools; list_tool_calls lists them")
