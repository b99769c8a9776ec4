"""Threads as sessions: their user, title, status and metadata, and their messages."""

from __future__ import annotations

from typing import Any, NamedTuple

from byssus.errors import InputError, NotFound
from byssus.queries.accounts import quotas, users
from byssus.queries.log import editing, messages, threads
from byssus.queries.log.leases import By
from byssus.queries.log.messages import StoredMessage
from byssus.queries.log.threads import UNLEASED, MessageRow
from byssus.queries.tasks import owners
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey


class Session(NamedTuple):
    id: str
    user_id: str | None
    title: str
    status: str
    model: str | None
    total_tokens: int
    total_cost: float
    message_count: int
    metadata: str
    created_at: str
    updated_at: str


_SPENT = "(SELECT COALESCE(SUM({}), 0) FROM usage u WHERE u.thread = t.key AND u.owner = '')"
# A thread without a model of its own has the one that replied last.
_MODEL = (
    "COALESCE(t.model, (SELECT u.model FROM usage u WHERE u.thread = t.key AND u.owner = '' AND u.model <> ''"
    " ORDER BY u.day DESC, u.key DESC LIMIT 1))"
)
_COLUMNS = (
    f"t.id, t.owner, t.title, t.status, {_MODEL}, {_SPENT.format('u.tokens')}, {_SPENT.format('u.cost + u.priced')},"
    " t.message_count, t.metadata, t.created_at, t.updated_at"
)


def create(tx: Tx, thread_key: ThreadKey, user_id: str | None, title: str, model: str | None, metadata: str) -> Session:
    """Make a session. The user must exist, and is locked until the transaction ends."""
    if not threads.make(tx, thread_key, tx.now()):
        raise InputError(f"there is a session {thread_key.id!r} already; use update_session, or another session_id")
    if user_id is not None:  # not first: a query's first question is asked before others of its transaction have run
        quotas.take(tx, user_id)
    tx.run(
        "UPDATE threads SET owner = :owner, title = :title, model = :model, metadata = :metadata"
        " WHERE namespace = :namespace AND id = :id",
        owner=user_id,
        title=title,
        model=model,
        metadata=metadata,
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return require(tx, thread_key)


def get(tx: Tx, thread_key: ThreadKey) -> Session | None:
    row = tx.one(
        f"SELECT {_COLUMNS} FROM threads t WHERE t.namespace = :namespace AND t.id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return Session(*row) if row else None


def require(tx: Tx, thread_key: ThreadKey) -> Session:
    """The session, which must exist."""
    session = get(tx, thread_key)
    if session is None:
        raise unknown(thread_key.id)
    return session


def unknown(session_id: str) -> NotFound:
    return NotFound(f"there is no session {session_id!r}; create_session(user_id, title) makes one")


def take(tx: Tx, thread_key: ThreadKey) -> int:
    """Lock the row of a session, which must exist, so that it is not deleted meanwhile; returns its key."""
    row = threads.take(tx, thread_key)
    if row is None:
        raise unknown(thread_key.id)
    key: int = row[0]
    return key


def update(tx: Tx, thread_key: ThreadKey, changes: dict[str, Any]) -> Session:
    """Change some columns."""
    key, owner = take(tx, thread_key), changes.get("owner")
    if owner is not None:
        quotas.take(tx, owner)
    sets = "".join(f", {column} = :{column}" for column in sorted(changes))
    tx.run(
        f"UPDATE threads SET updated_at = :now, version = version + 1{sets} WHERE key = :key",
        now=tx.now(),
        key=key,
        **changes,
    )
    if "owner" in changes:
        owners.follow(tx, key)
    return require(tx, thread_key)


def of_user(
    tx: Tx, user_id: str, *, status: str | None, limit: int, offset: int, namespace: str = ""
) -> list[Session] | None:
    """A user's sessions, most recently updated first, without child threads; None if there is no such user."""
    if users.get(tx, user_id) is None:
        return None
    rows = tx.all(
        f"SELECT {_COLUMNS} FROM threads t WHERE t.owner = :user AND t.namespace = :namespace"
        " AND t.parent IS NULL AND (:every = 1 OR t.status = :status)"
        " ORDER BY t.updated_at DESC, t.id DESC LIMIT :limit OFFSET :offset",
        user=user_id,
        namespace=namespace,
        every=int(status is None),
        status=status or "",
        limit=limit,
        offset=offset,
    )
    return [Session(*row) for row in rows]


# --- messages ---------------------------------------------------------------------------------------------------------


def model(tx: Tx, thread_key: ThreadKey) -> str | None:
    """The model that a session was given, which must exist; None if it was given none."""
    row = tx.one(
        "SELECT model FROM threads WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    if row is None:
        raise unknown(thread_key.id)
    found: str | None = row[0]
    return found


def save(tx: Tx, thread_key: ThreadKey, message: MessageRow, *, by: By = UNLEASED) -> None:
    """Add a message to a session, which must exist."""
    model(tx, thread_key)
    threads.append(tx, thread_key, [message], by=by)


def message(tx: Tx, thread_key: ThreadKey, message_id: str) -> StoredMessage:
    """A message of a session; both must exist."""
    found = messages.find(tx, thread_key, message_id)
    if found is None:
        raise _no_message(tx, thread_key, message_id)
    return found


def replace_message(
    tx: Tx, thread_key: ThreadKey, message_id: str, new: MessageRow | None, *, by: By = UNLEASED
) -> None:
    """Replace a message of a session, or remove it if `new` is None; see `editing.replace`."""
    try:
        editing.replace(tx, thread_key, message_id, new, by=by)
    except NotFound:
        raise _no_message(tx, thread_key, message_id) from None


def _no_message(tx: Tx, thread_key: ThreadKey, message_id: str) -> NotFound:
    if get(tx, thread_key) is None:
        return unknown(thread_key.id)
    return NotFound(
        f"session {thread_key.id!r} has no message {message_id!r}; get_conversation_history lists those that it has"
    )
