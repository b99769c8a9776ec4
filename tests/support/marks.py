"""Marks and summaries for tests: set on any thread, and read back as they stand."""

from __future__ import annotations

from typing import Any

from byssus.checkpointer import Checkpointer
from byssus.memory import PostgresMemory, SQLiteMemory
from byssus.memory.stored import StoredMemory
from byssus.messages import dumps
from byssus.queries.log import marks
from byssus.queries.log.threads import ALONG, END
from byssus.queries.versions import checkpoints
from byssus.store import opening
from byssus.store.database import Row, Tx
from byssus.values.thread_key import ThreadKey


def memory_on(place: str, session_id: str, user_id: str | None = None) -> StoredMemory:
    """The memory that a thread is, wherever its database is."""
    kind: Any = PostgresMemory if opening.is_dsn(place) else SQLiteMemory
    made: StoredMemory = kind(place, user_id=user_id, session_id=session_id)
    return made


async def mark(cp: Checkpointer, thread_id: str, seqs: list[int], *given: str, namespace: str = "") -> None:
    """Mark the messages at these places of a thread."""

    def query(tx: Tx) -> None:
        branch, rows = _read(tx, thread_id, namespace)
        keys = [key for seq, key, _ in rows if seq in seqs]
        assert len(keys) == len(seqs)
        marks.put(tx, branch, keys, given)

    await cp.store.write(query)


async def summarize(cp: Checkpointer, thread_id: str, summary: str, namespace: str = "") -> None:
    def query(tx: Tx) -> None:
        marks.summarize(tx, _read(tx, thread_id, namespace)[0], dumps(summary))

    await cp.store.write(query)


async def marked(
    cp: Checkpointer, thread_id: str, namespace: str = "", *, all_of_them: bool = False
) -> tuple[str, dict[int, list[str]]]:
    """The summary of a thread as it is stored, and the marks of its messages, by their places; of those with any."""

    def query(tx: Tx) -> tuple[str, dict[int, list[str]]]:
        branch, rows = _read(tx, thread_id, namespace)
        found = {seq: marks.of(tx, branch, key) for seq, key, _ in rows}
        told = tx.one("SELECT summary FROM branches WHERE key = :branch", branch=branch)
        assert told is not None
        return told[0], {seq: worn for seq, worn in found.items() if worn or all_of_them}

    return await cp.store.read(query)


async def stray(cp: Checkpointer) -> list[Row]:
    """Marks and summaries of branches that neither a thread nor a checkpoint is read along."""

    def query(tx: Tx) -> list[Row]:
        read = "(SELECT t.branch FROM threads t UNION SELECT c.branch FROM checkpoints c)"
        return [
            *tx.all(f"SELECT branch, mark FROM marks WHERE branch NOT IN {read}"),
            *tx.all(f"SELECT key, summary FROM branches WHERE summary <> '' AND key NOT IN {read}"),
        ]

    return await cp.store.read(query)


def _read(tx: Tx, thread_id: str, namespace: str) -> tuple[int, list[Row]]:
    thread = checkpoints.thread_state(tx, ThreadKey(namespace, thread_id))
    assert thread is not None
    rows = tx.all(
        f"SELECT m.seq, m.key, m.id FROM {ALONG} WHERE s.branch = :branch ORDER BY m.seq",
        branch=thread.branch,
        after=0,
        upto=END,
    )
    return thread.branch, rows
