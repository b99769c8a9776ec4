"""Questions to people about tool calls, and the answers.

- The first answer counts. Of several at the same time, the one whose statement changes the row.
- A call that needs several approvers collects them in `approvals`; the last one answers it. One denial is an answer.
- A question whose time is over counts as answered, from that moment on, by its `fallback`. `expire` records it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from byssus.errors import AlreadyAnswered, InputError, NotFound
from byssus.queries.log import threads
from byssus.queries.tasks import steps
from byssus.queries.versions.children import OPEN_BELOW
from byssus.store.database import Row, Tx
from byssus.store.jobs import about_tasks
from byssus.values.thread_key import ThreadKey

EXPIRY = "expiry"  # the source of an answer that did not come in time

# Whether a row of `tool_calls` (or of its alias) still waits. It needs the parameter :now.
IS_OPEN = "{0}.status = 'waiting' AND ({0}.expires_at IS NULL OR {0}.expires_at > :now)"
IS_EXPIRED = "{0}.status = 'waiting' AND {0}.expires_at <= :now"
_OPEN = IS_OPEN.format("tool_calls")
_EXPIRED = IS_EXPIRED.format("tool_calls")
_FIRST = "(SELECT MIN(o.asked_at) FROM tool_calls o WHERE o.branch = c.branch AND o.reply = c.reply)"


class Question(NamedTuple):
    """What a person is asked about a call. `seconds` is how long it waits for an answer."""

    reason: str
    text: str
    approvers: int = 1
    seconds: float | None = None
    fallback: str | None = None  # the answer when the time is over


class NewAnswer(NamedTuple):
    """An answer, with who gave it and from where."""

    answer: str
    by: str | None = None
    source: str | None = None
    edited: str | None = None  # the arguments that were approved instead of the model's
    is_approval: bool = False


class PendingRow(NamedTuple):
    """A question that waits for an answer."""

    thread_id: str
    call_id: str
    name: str
    arguments: str
    reason: str
    question: str
    asked_at: str
    namespace: str
    owner: str | None
    approvers: int
    expires_at: str | None
    fallback: str | None
    key: int


class ApprovalRow(NamedTuple):
    """One of several approvals of a call: of its key, or of its place in a reply."""

    call: int
    person: str
    given_at: str
    source: str | None


class PendingAt(NamedTuple):
    """Where a question stands in the list of all: when its reply asked first, and its place in the thread."""

    asked_at: str
    thread: int
    reply: int
    place: int


def pending(
    tx: Tx,
    thread_key: ThreadKey | None = None,
    *,
    namespace: str | None = "",
    user: str | None = None,
    limit: int | None = None,
    after: PendingAt | None = None,
) -> tuple[list[PendingRow], list[ApprovalRow]]:
    """The questions that wait, the oldest first, and the approvals that they have.

    They are those of one thread and its open children, of a namespace or (None) of all, of one user or of all, behind a
    place in this list.
    Calls of one reply are asked about at the same time, so they are listed in the order in which the reply has them.
    """
    space, thread_id = thread_key or (namespace, "")
    named = "SELECT key FROM threads WHERE namespace = :namespace AND id = :id"
    of_thread = "" if thread_key is None else f" AND c.thread IN ({OPEN_BELOW.format(named)} SELECT thread FROM below)"
    rows: list[Row] = tx.all(
        "SELECT t.id, c.call_id, c.name, COALESCE(c.edited, c.arguments), c.reason, c.question, c.asked_at,"
        " t.namespace, t.owner, c.approvers, c.expires_at, c.fallback, c.key FROM tool_calls c"
        " JOIN threads t ON t.key = c.thread"
        f" WHERE {IS_OPEN.format('c')} AND (:everywhere = 1 OR t.namespace = :namespace)"
        " AND substr(t.namespace, 1, 1) <> :deleted"
        f"{of_thread} AND (:anybody = 1 OR t.owner = :user)"
        f" AND ({_FIRST}, c.thread, c.reply, c.place) > (:first, :thread, :reply, :place)"
        f" ORDER BY {_FIRST}, c.thread, c.reply, c.place LIMIT :limit",
        now=tx.now(),
        everywhere=int(space is None),
        namespace=space or "",
        deleted="\x7f",
        id=thread_id,
        anybody=int(user is None),
        user=user or "",
        limit=2**53 if limit is None else limit,
        **_named(after or PendingAt("", 0, 0, 0)),
    )
    found = [PendingRow(*row) for row in rows]
    return found, approvals(tx, [row.key for row in found if row.approvers > 1])


def _named(place: PendingAt) -> dict[str, object]:
    return {"first": place.asked_at, "thread": place.thread, "reply": place.reply, "place": place.place}


def place_of(tx: Tx, thread_key: ThreadKey, call_id: str, asked_at: str) -> PendingAt:
    """Where a question stands, or stood before it was answered. Of one that is gone, the time is left."""
    row = tx.one(
        f"SELECT {_FIRST}, c.thread, c.reply, c.place FROM tool_calls c JOIN threads t ON t.key = c.thread"
        " WHERE t.namespace = :namespace AND t.id = :id AND c.call_id = :call_id AND c.asked_at = :asked_at"
        " ORDER BY c.key DESC LIMIT 1",
        namespace=thread_key.namespace,
        id=thread_key.id,
        call_id=call_id,
        asked_at=asked_at,
    )
    return PendingAt(asked_at, 2**62, 0, 0) if row is None else PendingAt(*row)


def approvals(tx: Tx, calls: Sequence[int]) -> list[ApprovalRow]:
    """The approvals of calls that need several, in the order in which they were given."""
    found = []
    for call in calls:
        found += tx.all(
            "SELECT call, person, given_at, source FROM approvals WHERE call = :call ORDER BY key",
            call=call,
        )
    return [ApprovalRow(*row) for row in found]


def approvals_of_reply(tx: Tx, branch: int, reply: int) -> list[ApprovalRow]:
    """The approvals of the calls of a reply, each with the call's index in it."""
    rows = tx.all(
        "SELECT c.place, a.person, a.given_at, a.source FROM approvals a JOIN tool_calls c ON c.key = a.call"
        " WHERE c.branch = :branch AND c.reply = :reply ORDER BY a.key",
        branch=branch,
        reply=reply,
    )
    return [ApprovalRow(*row) for row in rows]


@about_tasks
def answer(tx: Tx, thread_key: ThreadKey, call_id: str, new: NewAnswer) -> bool:
    """Record a person's answer. The run that continues the thread acts upon it.

    Returns False if it is an approval, and more people must approve.
    """
    where = f"thread {thread_key.id!r}"
    if threads.take(tx, thread_key) is None:  # before its calls, as all writers do, or they would lock each other out
        raise NotFound(f"there is no {where}, so call {call_id!r} waits for no answer; threads() lists the threads")
    rows = tx.all(
        "SELECT tool_calls.key, tool_calls.status, answered_by, answered_at, answered_from, reason, approvers,"
        f" CASE WHEN {_EXPIRED} THEN expires_at END FROM tool_calls JOIN threads ON threads.key = tool_calls.thread"
        " WHERE namespace = :namespace AND threads.id = :id AND call_id = :call_id ORDER BY tool_calls.key DESC",
        namespace=thread_key.namespace,
        id=thread_key.id,
        call_id=call_id,
        now=tx.now(),
    )
    for key, status, *_, reason, approvers, expired_at in reversed(rows):
        if status != "waiting" or expired_at is not None or not _lock(tx, key):
            continue  # another process may have answered it meanwhile
        check_edit(call_id, where, new, reason)
        if new.is_approval and approvers > 1 and not _approved(tx, key, call_id, where, new, approvers):
            return False
        tx.run(
            "UPDATE tool_calls SET status = 'answered', answer = :answer, answered_by = :by, answered_at = :now,"
            " answered_from = :source, edited = COALESCE(:edited, edited) WHERE key = :key",
            answer=new.answer,
            by=new.by,
            now=tx.now(),
            source=new.source,
            edited=new.edited,
            key=key,
        )
        steps.wake_answered(tx, thread_key)
        return True
    raise _too_late(tx, where, call_id, [row[0] for row in rows])


def _lock(tx: Tx, key: int) -> bool:
    """Lock the row of a question until the transaction ends; False if it waits no more."""
    locked = tx.one(
        f"UPDATE tool_calls SET status = 'waiting' WHERE key = :key AND {_OPEN} RETURNING key", key=key, now=tx.now()
    )
    return locked is not None


def _approved(tx: Tx, key: int, call_id: str, where: str, new: NewAnswer, approvers: int) -> bool:
    """Add one of several approvals; whether it was the last one that was needed."""
    check_approval(call_id, where, new, approvers)
    added = tx.one(
        "INSERT INTO approvals (call, person, given_at, source) VALUES (:call, :person, :now, :source)"
        " ON CONFLICT (call, person) DO NOTHING RETURNING key",
        call=key,
        person=new.by,
        now=tx.now(),
        source=new.source,
    )
    given = approvals(tx, [key])
    if added is None:
        earlier = next(row for row in given if row.person == new.by)
        raise approved_before(call_id, where, earlier, len(given), approvers)
    return len(given) >= approvers


def approved_before(call_id: str, where: str, earlier: ApprovalRow, given: int, approvers: int) -> AlreadyAnswered:
    """The error of a person who approves a call twice."""
    return AlreadyAnswered(
        f"{earlier.person!r} has approved call {call_id!r} of {where} already, at {earlier.given_at}; {given} of "
        f"{approvers} people have approved, and another person must",
        earlier.person,
        earlier.given_at,
        earlier.source,
    )


def check_edit(call_id: str, where: str, new: NewAnswer, reason: str | None) -> None:
    """Raise for other arguments for a call that may have run already: its idempotency key stands for the first ones."""
    if new.edited is not None and reason == "recovery":
        raise InputError(
            f"call {call_id!r} of {where} was interrupted and may have taken effect, so it can only run again with the "
            "same arguments; approve it without others, or deny it"
        )


def check_approval(call_id: str, where: str, new: NewAnswer, approvers: int) -> None:
    """Raise for one of several approvals that cannot count."""
    if new.by is None:
        raise InputError(
            f"call {call_id!r} of {where} needs {approvers} different people; say who approves it: by='...'"
        )
    if new.edited is not None:
        raise InputError(
            f"call {call_id!r} of {where} needs {approvers} people, and they must approve the same arguments; "
            "deny it, and say in the reason which arguments would do"
        )


def _too_late(tx: Tx, where: str, call_id: str, keys: Sequence[int]) -> InputError:
    """Why a call takes no answer, by the latest one with this id. It is read again: another process may be faster."""
    if not keys:
        return not_waiting(where, call_id, None)
    row = tx.one(
        f"SELECT status, answered_by, answered_at, answered_from, CASE WHEN {_EXPIRED} THEN expires_at END"
        " FROM tool_calls WHERE key = :key",
        key=keys[0],
        now=tx.now(),
    )
    if row is None:
        return not_waiting(where, call_id, None)
    status, by, at, source, expired_at = row
    if expired_at is not None:
        status, by, at, source = "expired", None, expired_at, EXPIRY
    if at is None:
        return not_waiting(where, call_id, status)
    return answered(f"{where} does not wait for an answer: it is {status}", call_id, by, at, source)


def answered(what: str, call_id: str, by: str | None, at: str, source: str | None) -> AlreadyAnswered:
    """The error of an answer that comes after another one, or after the time for it."""
    if source == EXPIRY and by is None:
        how = f"there was no answer until {at}, so the default answer counts"
    else:
        how = f"{by or 'a person'} answered at {at}{f' from {source}' if source else ''}, and the first answer counts"
    return AlreadyAnswered(f"call {call_id!r} of {what}; {how}", by, at, source)


def not_waiting(where: str, call_id: str, status: str | None) -> InputError:
    """The error of an answer to a call that is unknown, or that has no question."""
    if status is None:
        return NotFound(f"call {call_id!r} of {where} is unknown and does not wait for an answer; pending() lists them")
    return InputError(
        f"call {call_id!r} of {where} does not wait for an answer: it is {status}; pending() lists what waits"
    )


def expire(tx: Tx, branch: int, reply: int) -> None:
    """Record the default answers of the questions about a reply whose time is over."""
    tx.run(
        "UPDATE tool_calls SET status = 'answered', answer = fallback, answered_by = NULL, answered_at = expires_at,"
        f" answered_from = :source WHERE branch = :branch AND reply = :reply AND {_EXPIRED}",
        source=EXPIRY,
        branch=branch,
        reply=reply,
        now=tx.now(),
    )
