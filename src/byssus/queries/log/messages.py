"""Single messages of a thread, as they are stored: the newest ones, or one by its id."""

from __future__ import annotations

from typing import NamedTuple

from byssus.queries.log import threads
from byssus.queries.log.threads import ALONG, END
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey


class StoredMessage(NamedTuple):
    """A message as it is stored."""

    seq: int
    id: str
    role: str
    body: str
    plain: int
    created_at: str
    key: int = 0


_COLUMNS = ", ".join(f"m.{name}" for name in StoredMessage._fields)


def history(tx: Tx, thread_key: ThreadKey, limit: int) -> list[StoredMessage] | None:
    """The newest messages of a thread, in the order of the log; None if there is no such thread."""
    thread = threads.find(tx, thread_key)
    if thread is None:
        return None
    rows = threads.rows_before(tx, _COLUMNS, thread.branch, before=thread.head + 1, limit=limit)
    return [StoredMessage(*row) for row in rows]


def find(tx: Tx, thread_key: ThreadKey, message_id: str) -> StoredMessage | None:
    """The message of this id, or None; of several, the last one."""
    thread = threads.find(tx, thread_key)
    if thread is None:
        return None
    row = tx.one(
        f"SELECT {_COLUMNS} FROM {ALONG} WHERE s.branch = :branch AND m.id = :id"
        " ORDER BY s.after_seq DESC, m.seq DESC LIMIT 1",
        branch=thread.branch,
        after=0,
        upto=END,
        id=message_id,
    )
    return StoredMessage(*row) if row else None
