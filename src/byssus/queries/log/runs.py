"""Runs as rows, and the attempts of processes to drive them.

`begin` and `end` are parts of writes that a run makes anyway (`threads.append`): the claim for the lease, and the write
that gives it back. The caller has locked the thread's row. `threads.run` names the run whose row has no end.
"""

from __future__ import annotations

from typing import NamedTuple

from byssus.errors import ByssusError
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

_HIDDEN = "\x7f"  # a namespace that begins with it holds what is being deleted or imported


class RequestTaken(ByssusError):
    """Another run of the thread has this request key. The caller joins that run."""


class RequestKey(NamedTuple):
    """What makes a prompt that is sent twice happen once."""

    key: str
    digest: str
    is_message: bool = False  # the key is the id of a message, and counts while that message is in the thread


class RunBegin(NamedTuple):
    """What a claim records of its run."""

    id: str
    cause: str
    started_by: str | None = None
    request: RequestKey | None = None
    continues: bool = False  # the run is one that has not ended; if it has meanwhile, the claim is refused
    has_prompt: bool = True  # False: the request's prompt is stored later, and its key is recorded then
    takes_over: bool = True  # False: the caller knows that the thread has no run that has not ended


class RunEnd(NamedTuple):
    """How an attempt ends. The run itself ends with it if the outcome is "ended"."""

    id: str
    outcome: str
    stop_reason: str | None = None
    error: str | None = None
    retries: int = 0


class RunRow(NamedTuple):
    key: int
    thread_id: str
    namespace: str
    id: str
    branch: int | None
    first_seq: int
    last_seq: int | None
    began_at: str
    ended_at: str | None
    stop_reason: str | None
    error: str | None
    cause: str
    started_by: str | None
    request_key: str | None
    request_digest: str | None
    attempts: int
    retries: int
    owner: str | None  # of the thread's lease, while it lasts
    until: str


class AttemptRow(NamedTuple):
    number: int
    owner: str
    epoch: int
    began_at: str
    ended_at: str | None
    outcome: str | None


_RUN = (
    "SELECT r.key, t.id, t.namespace, r.id, r.branch, r.first_seq, r.last_seq, r.began_at, r.ended_at, r.stop_reason,"
    " r.error, r.cause, r.started_by, r.request_key, r.request_digest, r.attempts, r.retries,"
    " CASE WHEN t.lease_until > :now THEN t.lease_owner END, COALESCE(t.lease_until, '')"
    " FROM runs r JOIN threads t ON t.key = r.thread"
)
# Whether the message whose id is the key is still read along the thread's branch.
_IS_IN_THREAD = (
    "EXISTS (SELECT 1 FROM segments s JOIN messages m ON m.branch = s.source AND m.seq > s.after_seq"
    " AND m.seq <= s.upto_seq WHERE s.branch = t.branch AND m.seq >= r.first_seq"
    " AND m.seq <= COALESCE(r.last_seq, t.head) AND m.id = :key)"
)
_THIS = "id = :id AND thread = :thread"
# A message that came another way than with a request key: queued for a run, or appended. Among the last ones.
_USER_MESSAGE = (
    "SELECT m.seq, m.branch, m.body FROM threads t JOIN segments s ON s.branch = t.branch JOIN messages m"
    " ON m.branch = s.source AND m.seq > CASE WHEN s.after_seq < :head - :few THEN :head - :few ELSE s.after_seq END"
    " AND m.seq <= CASE WHEN s.upto_seq < :head THEN s.upto_seq ELSE :head END"
    " WHERE t.key = :thread AND m.id = :key AND m.role = 'user' ORDER BY m.seq DESC LIMIT 1"
)
# The run that took it in, or that was started to answer it.
_RUN_OF_MESSAGE = (
    "SELECT key FROM (SELECT * FROM runs WHERE thread = :thread ORDER BY key DESC LIMIT :few) AS r"
    " WHERE r.branch = :branch AND COALESCE(r.last_seq, :head) >= :seq"
    " AND (r.first_seq <= :seq OR (r.first_seq = :seq + 1 AND r.cause = 'resume')) ORDER BY key DESC LIMIT 1"
)
_FEW = 1_000  # messages, and runs
_BEGIN = (
    "INSERT INTO runs (thread, id, branch, first_seq, began_at, cause, started_by, request_key, request_digest,"
    " attempts, retries) VALUES (:thread, :id, :branch, :first, :now, :cause, :by, :request, :digest, 1, 0)"
    # A run that goes on. On another branch, after a rewind, it begins anew.
    " ON CONFLICT (id, thread) DO UPDATE SET attempts = runs.attempts + 1, ended_at = NULL, stop_reason = NULL,"
    " error = NULL, last_seq = NULL,"
    " first_seq = CASE WHEN runs.branch = excluded.branch THEN runs.first_seq ELSE excluded.first_seq END,"
    " branch = excluded.branch"
)
_ATTEMPT = (
    "INSERT INTO run_attempts (run, number, owner, epoch, began_at)"
    f" SELECT key, attempts, :owner, :epoch, :now FROM runs WHERE {_THIS}"
)
_ENDS = (
    f"UPDATE runs SET last_seq = :head, stop_reason = :reason, error = :error, retries = retries + :retries{{}}"
    f" WHERE {_THIS}"
)
_PAUSE, _END = _ENDS.format(""), _ENDS.format(", ended_at = :now")
_END_ATTEMPT = (
    "UPDATE run_attempts SET ended_at = :now, outcome = :outcome"
    f" WHERE run = (SELECT key FROM runs WHERE {_THIS}) AND epoch = :epoch"
)


# --- what a run writes ------------------------------------------------------------------------------------------------


def begin(
    tx: Tx, thread: int, run: RunBegin, *, before: str | None, branch: int, first: int, owner: str, epoch: int
) -> None:
    """Record that a process drives a run, new or continued. `before` is the run that the thread had not ended."""
    now = tx.now()
    if before is not None:
        _lose(tx, thread, before)
        if before != run.id:
            close(tx, thread, before, head=first - 1)
    if run.request is not None:
        _refuse_taken(tx, thread, run.request, head=first - 1)
    key, digest, _ = (run.has_prompt and run.request) or (None, None, False)
    tx.run(
        _BEGIN,
        thread=thread,
        id=run.id,
        branch=branch,
        first=first,
        now=now,
        cause=run.cause,
        by=run.started_by,
        request=key,
        digest=digest,
    )
    tx.run(_ATTEMPT, thread=thread, id=run.id, owner=owner, epoch=epoch, now=now)


def end(tx: Tx, thread: int, how: RunEnd, *, head: int, epoch: int) -> None:
    """Record that a process drives a run no longer, and how the run ended if it did."""
    now, this = tx.now(), {"thread": thread, "id": how.id}
    tx.run(
        _END if how.outcome == "ended" else _PAUSE,
        head=head,
        reason=how.stop_reason,
        error=how.error,
        retries=how.retries,
        now=now,
        **this,
    )
    tx.run(_END_ATTEMPT, outcome=how.outcome, epoch=epoch, now=now, **this)


def request(tx: Tx, thread: int, run_id: str, asked: RequestKey, *, head: int) -> None:
    """Record the key of a prompt that the same transaction stores behind a seq, in a run that has begun already."""
    _refuse_taken(tx, thread, asked, head=head)
    tx.run(
        f"UPDATE runs SET request_key = :key, request_digest = :digest WHERE {_THIS}",
        key=asked.key,
        digest=asked.digest,
        thread=thread,
        id=run_id,
    )


def close(tx: Tx, thread: int, run_id: str, *, head: int) -> None:
    """End a run that was interrupted and that nothing continues."""
    tx.run(
        "UPDATE runs SET ended_at = :now, stop_reason = 'interrupted', last_seq = COALESCE(last_seq, :head)"
        f" WHERE {_THIS} AND ended_at IS NULL",
        now=tx.now(),
        head=head,
        thread=thread,
        id=run_id,
    )


def _lose(tx: Tx, thread: int, run_id: str) -> None:
    """The process that drove a run has not recorded that it stopped."""
    tx.run(
        "UPDATE run_attempts SET ended_at = :now, outcome = 'lost'"
        f" WHERE run = (SELECT key FROM runs WHERE {_THIS}) AND ended_at IS NULL",
        now=tx.now(),
        thread=thread,
        id=run_id,
    )


def _refuse_taken(tx: Tx, thread: int, asked: RequestKey, *, head: int) -> None:
    taken = tx.one(
        f"SELECT r.key, {_IS_IN_THREAD} FROM runs r JOIN threads t ON t.key = r.thread"
        " WHERE r.thread = :thread AND r.request_key = :key",
        thread=thread,
        key=asked.key,
    )
    if taken is not None and (taken[1] or not asked.is_message):
        raise RequestTaken(f"a run of the thread has the key {asked.key!r}")
    if asked.is_message and _run_about(tx, thread, asked.key, head) is not None:
        raise RequestTaken(f"the message {asked.key!r} is in the thread, or waits for a run of it")
    if taken is not None:
        free = "UPDATE runs SET request_key = NULL, request_digest = NULL WHERE key = :key"
        tx.run(free, key=taken[0])  # a rewind has left the message


class Logged(NamedTuple):
    """A user's message in the log."""

    seq: int
    branch: int
    body: str


def logged(tx: Tx, thread: int, message_id: str, head: int) -> Logged | None:
    """A user's message by its id, among the last messages of a thread."""
    row = tx.one(_USER_MESSAGE, thread=thread, key=message_id, head=head, few=_FEW)
    return None if row is None else Logged(*row)


def _run_about(tx: Tx, thread: int, message_id: str, head: int) -> tuple[int | None, str] | None:
    """A user's message by its id: the run that is about it, if there is one, and its body. None: it can be sent.

    One that no run has taken in is only found where the next run will answer it: as the last one, or in the inbox.
    """
    found = logged(tx, thread, message_id, head)
    if found is not None:
        seq, branch, body = found
        run = tx.one(_RUN_OF_MESSAGE, thread=thread, branch=branch, seq=seq, head=head, few=_FEW)
        if run is not None or seq == head:
            return run[0] if run else None, body
    waiting = tx.one(
        "SELECT r.key, i.body FROM inbox i JOIN threads t ON t.key = i.thread"
        " LEFT JOIN runs r ON r.thread = t.key AND r.id = t.run"
        " WHERE i.thread = :thread AND i.id = :key ORDER BY i.key LIMIT 1",
        thread=thread,
        key=message_id,
    )
    return (waiting[0], waiting[1]) if waiting else None


# --- looking ----------------------------------------------------------------------------------------------------------


def find(tx: Tx, run_id: str, thread_key: ThreadKey | None = None) -> RunRow | None:
    """A run by its id; of several threads that were imported from one, the thread that is named or the newest."""
    namespace, thread_id = thread_key or ("", "")
    row = tx.one(
        f"{_RUN} WHERE r.id = :id AND substr(t.namespace, 1, 1) <> :hidden"
        " AND (:every = 1 OR (t.namespace = :namespace AND t.id = :thread)) ORDER BY r.key DESC LIMIT 1",
        id=run_id,
        hidden=_HIDDEN,
        every=int(thread_key is None),
        namespace=namespace,
        thread=thread_id,
        now=tx.now(),
    )
    return RunRow(*row) if row else None


def page(tx: Tx, thread_key: ThreadKey | None, *, before: int, limit: int) -> list[RunRow]:
    """Runs of a thread, or of all threads that are in no namespace, newest first."""
    namespace, thread_id = thread_key or ("", "")
    of_thread = (
        ""
        if thread_key is None
        else " AND r.thread = (SELECT key FROM threads WHERE namespace = :namespace AND id = :id)"
    )
    rows = tx.all(
        f"{_RUN} WHERE t.namespace = :namespace AND r.key < :before{of_thread} ORDER BY r.key DESC LIMIT :limit",
        namespace=namespace,
        id=thread_id,
        before=before,
        limit=limit,
        now=tx.now(),
    )
    return [RunRow(*row) for row in rows]


class Requested(NamedTuple):
    """What a request key stands for. `body` is the message that was found by its id, where no run began with it.

    Without a run, that message waits for one.
    """

    run: RunRow | None
    body: str | None = None


def of_request(tx: Tx, thread_key: ThreadKey, asked: RequestKey) -> Requested | None:
    """The run that a request key began, or that has taken in the message whose id it is."""
    names = {"namespace": thread_key.namespace, "id": thread_key.id}
    still = f" AND {_IS_IN_THREAD}" if asked.is_message else ""
    row = tx.one(
        f"{_RUN} WHERE t.namespace = :namespace AND t.id = :id AND r.request_key = :key{still} ORDER BY r.key LIMIT 1",
        key=asked.key,
        now=tx.now(),
        **names,
    )
    if row is not None:
        return Requested(RunRow(*row))
    thread = tx.one("SELECT key, head FROM threads WHERE namespace = :namespace AND id = :id", **names)
    found = _run_about(tx, thread[0], asked.key, thread[1]) if thread is not None and asked.is_message else None
    if found is None:
        return None
    row = tx.one(f"{_RUN} WHERE r.key = :key", key=found[0], now=tx.now()) if found[0] is not None else None
    return Requested(None if row is None else RunRow(*row), found[1])


def attempts(tx: Tx, run: int) -> list[AttemptRow]:
    """The attempts of a run, in order."""
    rows = tx.all(
        "SELECT number, owner, epoch, began_at, ended_at, outcome FROM run_attempts WHERE run = :run ORDER BY number",
        run=run,
    )
    return [AttemptRow(*row) for row in rows]


class TimelineMessage(NamedTuple):
    """A message of a run, and when it was committed."""

    seq: int
    body: str
    stored_at: str


class TimelineCall(NamedTuple):
    """A tool call as the timeline of a run shows it."""

    call_id: str
    name: str
    status: str
    attempts: int
    recovery: str
    reason: str | None
    question: str | None
    answer: str | None
    answered_by: str | None
    answered_at: str | None
    answered_from: str | None
    edited: str | None
    approvers: int
    asked_at: str | None
    started_at: str | None
    ended_at: str | None
    elapsed_ms: float | None
    key: int
    thread_id: str | None = None  # the child thread that it ran on


def messages(tx: Tx, run: RunRow, *, after: int, limit: int) -> list[TimelineMessage]:
    """The messages of a run behind a seq, in order; those of a run that goes on up to the end of the log."""
    rows = tx.all(
        "SELECT m.seq, m.body, m.created_at FROM segments s JOIN messages m ON m.branch = s.source"
        " AND m.seq > CASE WHEN s.after_seq < :after THEN :after ELSE s.after_seq END"
        " AND m.seq <= CASE WHEN s.upto_seq < :upto THEN s.upto_seq ELSE :upto END"
        " WHERE s.branch = :branch AND s.upto_seq > :after ORDER BY s.after_seq, m.seq LIMIT :limit",
        branch=run.branch or 0,
        after=max(after, run.first_seq - 1),
        upto=2**62 if run.last_seq is None else run.last_seq,
        limit=limit,
    )
    return [TimelineMessage(*row) for row in rows]


def calls(tx: Tx, run: RunRow) -> list[TimelineCall]:
    """The tool calls that a run began, asked about or settled, in order: its own, and those of the reply before it."""
    columns = ", ".join(f"c.{name}" for name in TimelineCall._fields[:-1])
    rows = tx.all(
        f"SELECT {columns}, k.id FROM tool_calls c"
        " LEFT JOIN threads k ON k.parent = c.thread AND k.parent_call = c.idempotency_key"
        " WHERE c.branch = :branch AND c.reply <= :last"
        " AND c.reply >= COALESCE((SELECT MAX(b.reply) FROM tool_calls b"
        " WHERE b.branch = :branch AND b.reply > 0 AND b.reply < :first), 1)"
        " AND (c.run = :run OR c.reply >= :first) ORDER BY c.key",
        run=run.id,
        branch=run.branch or 0,
        first=run.first_seq,
        last=2**62 if run.last_seq is None else run.last_seq,
    )
    return [TimelineCall(*row) for row in rows]


class Quarantine(NamedTuple):
    """Since when the thread of a run is quarantined because of it, and when a person lifted that last."""

    since: str | None
    lifted_at: str | None


def quarantine(tx: Tx, run: int) -> Quarantine:
    """The quarantine of a run. The thread keeps no earlier ones."""
    row = tx.one(
        "SELECT CASE WHEN t.run = r.id THEN t.quarantined_at END,"
        " CASE WHEN t.lifted_at >= r.began_at AND t.lifted_at <= COALESCE(r.ended_at, t.lifted_at) THEN t.lifted_at END"
        " FROM runs r JOIN threads t ON t.key = r.thread WHERE r.key = :run",
        run=run,
    )
    return Quarantine(*row) if row else Quarantine(None, None)
