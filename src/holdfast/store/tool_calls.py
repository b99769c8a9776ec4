"""The ledger of tool calls: what was begun, what waits for a person, and how it ended.

A row is written before its tool runs and settled in the transaction that stores the result. So after a crash each call
of a reply is one of: never started (no row), waiting, answered, started (and then its outcome is unknown), or ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import InputError, NotFound
from holdfast.store import threads, usage
from holdfast.store.database import Row, Tx
from holdfast.store.leases import Lease
from holdfast.store.threads import Position, Stored

WAITING, ANSWERED, STARTED = "waiting", "answered", "started"
OPEN = (WAITING, ANSWERED, STARTED)


class Start(NamedTuple):
    """A call that is about to run, or to be put before a person. `reply` and `place` say which call of which reply."""

    reply: int
    place: int
    call_id: str
    name: str
    arguments: str
    recovery: str
    idempotency_key: str
    run: str


class Entry(NamedTuple):
    """A call as the ledger has it."""

    place: int
    call_id: str
    name: str
    arguments: str
    idempotency_key: str
    status: str
    reason: str | None
    question: str | None
    answer: str | None
    attempts: int
    asked_at: str | None


class PendingRow(NamedTuple):
    """A question that waits for an answer."""

    thread_id: str
    call_id: str
    name: str
    arguments: str
    reason: str
    question: str
    asked_at: str


_ENTRY = ", ".join(Entry._fields)
_PUT = (
    "INSERT INTO tool_calls (thread, branch, reply, place, call_id, name, arguments, recovery, idempotency_key, run,"
    " status, reason, question, attempts, asked_at, started_at) VALUES (:thread, :branch, :reply, :place, :call_id,"
    " :name, :arguments, :recovery, :idempotency_key, :run, :status, :reason, :question, :attempts, :asked_at,"
    " :started_at) ON CONFLICT (branch, reply, place) DO UPDATE SET run = excluded.run, status = excluded.status,"
    " arguments = excluded.arguments, recovery = excluded.recovery,"
    " reason = COALESCE(excluded.reason, tool_calls.reason),"
    " question = COALESCE(excluded.question, tool_calls.question), attempts = tool_calls.attempts + excluded.attempts,"
    " asked_at = COALESCE(excluded.asked_at, tool_calls.asked_at),"
    " started_at = COALESCE(excluded.started_at, tool_calls.started_at)"
)


def start(tx: Tx, thread_id: str, call: Start, *, by: Lease, namespace: str = "") -> None:
    """Record that a tool is about to run."""
    _put(tx, thread_id, namespace, by, call, status=STARTED, attempts=1, started_at=tx.now())


def ask(tx: Tx, thread_id: str, call: Start, *, reason: str, question: str, by: Lease, namespace: str = "") -> None:
    """Put a call before a person."""
    _put(tx, thread_id, namespace, by, call, status=WAITING, asked_at=tx.now(), reason=reason, question=question)


def _put(tx: Tx, thread_id: str, namespace: str, by: Lease, call: Start, **values: object) -> None:
    thread, branch = threads.hold(tx, thread_id, namespace, by)
    optional = {"reason": None, "question": None, "attempts": 0, "asked_at": None, "started_at": None}
    tx.run(_PUT, **call._asdict(), **{**optional, **values}, thread=thread, branch=branch)


def finish(
    tx: Tx,
    thread_id: str,
    reply: int,
    ends: Sequence[tuple[int, int, Stored, str, float | None]],
    *,
    by: Lease,
    extra: str | None = None,
    namespace: str = "",
) -> Position:
    """Store results, each with the call's place in the reply, its own seq, how the call ended, and after how many
    milliseconds."""
    filled = [(seq, message) for _, seq, message, *_ in ends]
    position = threads.fill(tx, thread_id, filled, namespace=namespace, by=by, extra=extra)
    for place, _, _, status, elapsed in ends:
        _end(tx, position.branch, reply, place, status, elapsed)
    return position


def finish_behind(
    tx: Tx,
    thread_id: str,
    reply: int,
    ends: Sequence[tuple[int, Stored, str, float | None]],
    *,
    by: Lease,
    extra: str | None = None,
    namespace: str = "",
) -> Position:
    """As `finish`, at the end of the log: for a reply behind which nobody left room."""
    added = [message for _, message, *_ in ends]
    position = threads.append(tx, thread_id, added, namespace=namespace, by=by, extra=extra)
    for place, _, status, elapsed in ends:
        _end(tx, position.branch, reply, place, status, elapsed)
    return position


def _end(tx: Tx, branch: int, reply: int, place: int, status: str, elapsed_ms: float | None) -> None:
    tx.run(
        "UPDATE tool_calls SET status = :status, ended_at = :now, elapsed_ms = :elapsed"
        " WHERE branch = :branch AND reply = :reply AND place = :place",
        status=status,
        elapsed=elapsed_ms,
        now=tx.now(),
        branch=branch,
        reply=reply,
        place=place,
    )
    usage.count_call(tx, branch, reply, place, status, elapsed_ms)


def of_reply(tx: Tx, branch: int, reply: int) -> list[Entry]:
    """What the ledger has about the calls of a reply."""
    rows = tx.all(
        f"SELECT {_ENTRY} FROM tool_calls WHERE branch = :branch AND reply = :reply ORDER BY place",
        branch=branch,
        reply=reply,
    )
    return [Entry(*row) for row in rows]


def pending(tx: Tx, thread_id: str | None = None, *, namespace: str = "") -> list[PendingRow]:
    """The questions that wait, of one thread or of all."""
    rows: list[Row] = tx.all(
        "SELECT threads.id, call_id, name, arguments, reason, question, asked_at FROM tool_calls"
        " JOIN threads ON threads.key = tool_calls.thread"
        " WHERE tool_calls.status = 'waiting' AND namespace = :namespace AND (:every = 1 OR threads.id = :id)"
        " ORDER BY tool_calls.key",
        namespace=namespace,
        every=int(thread_id is None),
        id=thread_id or "",
    )
    return [PendingRow(*row) for row in rows]


def answer(tx: Tx, thread_id: str, call_id: str, answer: str, *, namespace: str = "") -> None:
    """Record what a person said. The run that goes on acts upon it."""
    rows = tx.all(
        "SELECT tool_calls.key, tool_calls.status FROM tool_calls JOIN threads ON threads.key = tool_calls.thread"
        " WHERE namespace = :namespace AND threads.id = :id AND call_id = :call_id ORDER BY tool_calls.key DESC",
        namespace=namespace,
        id=thread_id,
        call_id=call_id,
    )
    for key in [key for key, status in reversed(rows) if status == WAITING]:
        if tx.one(  # somebody else may have been faster
            "UPDATE tool_calls SET status = 'answered', answer = :answer WHERE key = :key AND status = 'waiting'"
            " RETURNING key",
            answer=answer,
            key=key,
        ):
            return
    raise not_waiting(f"thread {thread_id!r}", call_id, rows[0][1] if rows else None)


def not_waiting(where: str, call_id: str, status: str | None) -> InputError:
    what = f"does not wait for an answer: it is {status}" if status else "does not wait for an answer"
    return InputError(f"call {call_id!r} of {where} {what}; agent.pending lists what waits")


# --- the log of tools -------------------------------------------------------------------------------------------------


class Logged(NamedTuple):
    """A call as an application logs it: all but its session is JSON or plain text."""

    id: str
    name: str
    input: str
    output: str | None
    elapsed_ms: float | None
    status: str
    error: str | None
    message: str | None


class LogRow(NamedTuple):
    """A call as an application reads it, whoever made it. `result` is the message with its result, if there is one."""

    id: str
    session_id: str
    call_id: str
    name: str
    input: str
    output: str | None
    elapsed_ms: float | None
    status: str
    error: str | None
    message: str | None
    created_at: str | None
    result: str | None


_LOG = (
    "SELECT c.idempotency_key, t.id, c.call_id, c.name, c.arguments, c.output, c.elapsed_ms, c.status, c.error,"
    " COALESCE(c.message, (SELECT m.id FROM messages m WHERE c.reply > 0 AND m.branch = c.branch AND m.seq = c.reply)),"
    " COALESCE(c.started_at, c.asked_at), (SELECT m.body FROM messages m WHERE c.reply > 0 AND m.branch = c.branch"
    " AND m.seq = c.reply + 1 + c.place AND m.role = 'tool_result')"
    " FROM tool_calls c JOIN threads t ON t.key = c.thread WHERE t.namespace = '' AND "
)


# A fork that parts at an open call has a row with the same id.
_THAT_ONE = (
    "key = (SELECT MIN(c.key) FROM tool_calls c JOIN threads t ON t.key = c.thread"
    " WHERE c.idempotency_key = :id AND t.namespace = '' AND {})"
)


def log(tx: Tx, thread: int, call: Logged) -> None:
    """Add a call that an application has made. They have no reply, and are numbered instead."""
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


def logged(tx: Tx, call_id: str) -> LogRow | None:
    row = tx.one(_LOG + "c.idempotency_key = :id ORDER BY c.key LIMIT 1", id=call_id)
    return LogRow(*row) if row else None


def log_of(
    tx: Tx, session_id: str | None, *, name: str | None, status: Sequence[str] | None, limit: int, offset: int
) -> list[LogRow]:
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
    return [LogRow(*row) for row in rows]


def amend(tx: Tx, call_id: str, changes: dict[str, str | None]) -> None:
    """Change what a logged call says. It becomes a new row, so that whoever has indexed the old one notices."""
    columns = (
        "thread, branch, reply, place, call_id, name, recovery, idempotency_key, run, status, attempts, started_at,"
        " ended_at, elapsed_ms, message, arguments, output, error"
    )
    that_one = _THAT_ONE.format("c.reply = 0")
    take = f"UPDATE threads SET head = head WHERE key = (SELECT thread FROM tool_calls WHERE {that_one}) RETURNING key"
    tx.one(take, id=call_id)  # two who change it come one after the other
    row = tx.one(f"DELETE FROM tool_calls WHERE {that_one} RETURNING {columns}", id=call_id)
    if row is None:
        raise unknown_call(call_id)
    values = dict(zip((name.strip() for name in columns.split(",")), row, strict=True)) | changes
    tx.run(f"INSERT INTO tool_calls ({columns}) VALUES ({', '.join(f':{name}' for name in values)})", **values)


def unlog(tx: Tx, call_id: str) -> None:
    """Remove a call from the log. One that is not over, of an agent's run, is none of the log's."""
    open_ = ", ".join(f"'{status}'" for status in (*OPEN, "left"))
    ended = _THAT_ONE.format(f"c.status NOT IN ({open_})")
    row = tx.one(f"DELETE FROM tool_calls WHERE {ended} RETURNING branch", id=call_id)
    if row is None:
        raise unknown_call(call_id)
    tx.run("UPDATE branches SET uncounted = 1 WHERE key = :branch", branch=row[0])


def unknown_call(call_id: str) -> NotFound:
    return NotFound(f"there is no such call {call_id!r} in the log of tools; list_tool_calls lists them")


def records(tx: Tx, thread_id: str, *, after: int = 0, limit: int, namespace: str = "") -> list[Row]:
    """The ledger of a thread, oldest first."""
    return tx.all(
        "SELECT tool_calls.key, call_id, name, arguments, recovery, idempotency_key, tool_calls.run, tool_calls.status,"
        " attempts, asked_at, started_at, ended_at FROM tool_calls JOIN threads ON threads.key = tool_calls.thread"
        " WHERE namespace = :namespace AND threads.id = :id AND tool_calls.key > :after"
        " ORDER BY tool_calls.key LIMIT :limit",
        namespace=namespace,
        id=thread_id,
        after=after,
        limit=limit,
    )
