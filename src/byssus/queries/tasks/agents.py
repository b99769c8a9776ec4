"""Agent tasks that are given back: because the run of the thread waits for a person, or because the thread is busy."""

from __future__ import annotations

from typing import Any

from byssus.queries.log import threads
from byssus.queries.log.answers import IS_OPEN
from byssus.queries.tasks import steps
from byssus.queries.tasks.steps import ANSWER
from byssus.queries.versions.children import OPEN_BELOW
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

# Seconds until a task looks again whether its run still waits. A question can also go away without an answer: with a
# rewind, for example.
_LOOK_AGAIN = 600.0


def wait_for_answer(tx: Tx, thread_key: ThreadKey, task_id: str, epoch: int) -> None:
    """Give a task back until a question of its thread is answered. The default answer of a question counts as one."""
    named = "SELECT key FROM threads WHERE namespace = :namespace AND id = :id"
    names: dict[str, Any] = {"namespace": thread_key.namespace, "id": thread_key.id}
    # An answer locks the thread of its question too: it comes before this, or it finds the task waiting.
    threads.take(tx, thread_key)
    below = tx.all(
        f"{OPEN_BELOW.format(named)} SELECT t.namespace, t.id FROM below JOIN threads t ON t.key = below.thread"
        " ORDER BY t.namespace, t.id",
        **names,
    )
    for child in [ThreadKey(*name) for name in below if name != thread_key]:
        threads.take(tx, child)
    task = steps.take(tx, task_id, epoch)
    row = tx.one(
        f"{OPEN_BELOW.format(named)} SELECT MIN(CASE WHEN c.expires_at < :late THEN c.expires_at ELSE :late END)"
        f" FROM below JOIN tool_calls c ON c.thread = below.thread AND {IS_OPEN.format('c')}",
        late=tx.after(_LOOK_AGAIN),
        now=tx.now(),
        **names,
    )
    until = None if row is None else row[0]
    steps.leave(tx, task, waits_for=None if until is None else ANSWER, run_at=until)


def give_back(tx: Tx, task_id: str, epoch: int, seconds: float) -> None:
    """Give a task back for so many seconds. No retry is counted."""
    task = steps.take(tx, task_id, epoch)
    steps.leave(tx, task, waits_for=None, run_at=tx.after(seconds))
