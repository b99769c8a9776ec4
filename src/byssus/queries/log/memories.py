"""Memories: threads that are read by marks, and whose messages are known by their ids.

- Adding and removing messages are writes to the thread, and refused while a run holds its lease (see leases.py). Marks
  and the summary only say how the log is read: they can be set at any time.
- Each write locks the thread's row first, so the writers of one memory queue up there.
- A message whose id is in the thread already is not added again. In a thread that only a memory has written, ids are
  found by an index; in a thread that an agent has written, all messages are read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from byssus.queries.log import branches, editing, marks, threads
from byssus.queries.log.editing import MessageRef
from byssus.queries.log.leases import By
from byssus.queries.log.threads import ALONG, END, UNLEASED, MessageRow
from byssus.queries.versions.checkpoints import thread_state_of
from byssus.queries.versions.putting import on_its_line
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey

NAME = 64  # characters of an id that are in the index
_ASKED = (1, 8, 64)  # ids that are asked for at once: few statements, which are prepared once
_MOST = 512  # with more ids than these, all messages are looked at


class MemoryMessage(NamedTuple):
    """A message as a memory reads it."""

    id: str
    body: str
    plain: int
    created_at: str


class MarkedMessage(NamedTuple):
    """A message with its marks."""

    message: MessageRow
    marks: Sequence[str]


class _Thread(NamedTuple):
    key: int
    branch: int
    head: int
    named: int
    pieces: int  # segments of its branch; if there is one, all messages are the branch's own


# --- reading ----------------------------------------------------------------------------------------------------------


def size(tx: Tx, thread_key: ThreadKey) -> int:
    """How many messages there are."""
    row = tx.one(
        "SELECT message_count FROM threads WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return row[0] if row else 0


def summary(tx: Tx, thread_key: ThreadKey) -> str:
    """The summary of the messages that were left out; empty if there is none."""
    row = _find(tx, thread_key)
    return row[1] if row else ""


def read(
    tx: Tx, thread_key: ThreadKey, *, marked: Sequence[str] | None, unmarked: Sequence[str]
) -> tuple[str, list[MemoryMessage]]:
    """The summary, and the messages in order: those with one of some marks (None: all), but none with one of others."""
    row = _find(tx, thread_key)
    if row is None or (marked is not None and not marked):
        return row[1] if row else "", []
    branch, text = row
    values: dict[str, Any] = {"branch": branch}
    if marked is None:
        source, order = f"{ALONG} WHERE s.branch = :branch", "s.after_seq, m.seq"
        values |= {"after": 0, "upto": END}
    else:
        source, order = f"messages m WHERE m.key IN ({_marked_by('in', marked, values)})", "m.seq"
    # Not NOT IN: Postgres would go through all marks for each message, once they are many.
    without = f" AND NOT EXISTS ({_marked_by('out', unmarked, values)} AND k.message = m.key)" if unmarked else ""
    rows = tx.all(f"SELECT m.id, m.body, m.plain, m.created_at FROM {source}{without} ORDER BY {order}", **values)
    return text, [MemoryMessage(*row) for row in rows]


class Listed(NamedTuple):
    """A memory as a list shows it. The namespace is the user."""

    namespace: str
    id: str
    message_count: int
    marked: int
    updated_at: str


def list_page(tx: Tx, *, namespace: str | None, limit: int) -> list[Listed]:
    """Memories, most recently updated first: threads of users, threads that only a memory has written, and others with
    marks or a summary."""
    rows = tx.all(
        "SELECT t.namespace, t.id, t.message_count,"
        " (SELECT COUNT(DISTINCT k.message) FROM marks k WHERE k.branch = t.branch), t.updated_at"
        " FROM threads t JOIN branches b ON b.key = t.branch"
        " WHERE (:every = 1 OR t.namespace = :namespace) AND t.namespace NOT LIKE :hidden AND (t.namespace <> ''"
        " OR t.named = 1 OR b.summary <> '' OR EXISTS (SELECT 1 FROM marks k WHERE k.branch = t.branch))"
        " ORDER BY t.updated_at DESC, t.key DESC LIMIT :limit",
        every=int(namespace is None),
        namespace=namespace or "",
        hidden="\x7f%",  # what is deleted, or being imported
        limit=limit,
    )
    return [Listed(*row) for row in rows]


def entries(tx: Tx, thread_key: ThreadKey) -> tuple[str, list[tuple[MemoryMessage, list[str]]]] | None:
    """The summary, and all messages with their marks; None if there is no such thread."""
    row = _find(tx, thread_key)
    if row is None:
        return None
    branch, text = row
    marked: dict[int, list[str]] = {}
    for message, mark in tx.all("SELECT message, mark FROM marks WHERE branch = :branch ORDER BY key", branch=branch):
        marked.setdefault(message, []).append(mark)
    rows = tx.all(
        f"SELECT m.key, m.id, m.body, m.plain, m.created_at FROM {ALONG} WHERE s.branch = :branch"
        " ORDER BY s.after_seq, m.seq",
        branch=branch,
        after=0,
        upto=END,
    )
    return text, [(MemoryMessage(*kept), marked.get(key, [])) for key, *kept in rows]


def at(tx: Tx, keys: Sequence[int]) -> list[MemoryMessage]:
    """The messages of these rows, in this order."""
    found = []
    for key in keys:
        row = tx.one("SELECT id, body, plain, created_at FROM messages WHERE key = :key", key=key)
        if row is not None:  # it may be gone by now
            found.append(MemoryMessage(*row))
    return found


def marked(tx: Tx, thread_key: ThreadKey, wanted: Sequence[str], *, after: int = 0) -> tuple[str, dict[int, str], int]:
    """The summary; the ids of the messages with one of these marks, by their places; and how many messages there are.

    Only messages after a seq count. If all of them are an agent's own, their ids suffice: the number is then -1, and
    the places mean nothing.
    """
    row = _find(tx, thread_key)
    if row is None:
        return "", {}, 0
    branch, text = row
    values: dict[str, Any] = {"branch": branch}
    marked_by = _marked_by("in", wanted, values)
    if after:  # the end of a long thread: look at each message, and not at each mark
        marked_by += " AND k.message = m.key"
        rows = tx.all(
            f"SELECT m.seq, m.id, m.plain FROM {ALONG} WHERE s.branch = :branch AND EXISTS ({marked_by})",
            after=after,
            upto=END,
            **values,
        )
    else:
        rows = tx.all(f"SELECT m.seq, m.id, m.plain FROM messages m WHERE m.key IN ({marked_by})", **values)
    found = {seq: name for seq, name, _ in rows}
    if not any(plain for _, _, plain in rows):  # an agent's own messages contain their ids
        return text, found, -1
    seqs = tx.all(
        f"SELECT m.seq FROM {ALONG} WHERE s.branch = :branch ORDER BY m.seq", branch=branch, after=after, upto=END
    )
    return text, {place: found[seq] for place, (seq,) in enumerate(seqs) if seq in found}, len(seqs)


def _find(tx: Tx, thread_key: ThreadKey) -> tuple[int, str] | None:
    """The branch that a thread reads, and its summary."""
    row = tx.one(
        "SELECT b.key, b.summary FROM threads t JOIN branches b ON b.key = t.branch"
        " WHERE t.namespace = :namespace AND t.id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
    )
    return (row[0], row[1]) if row else None


def _marked_by(name: str, wanted: Sequence[str], values: dict[str, Any]) -> str:
    """A query for the messages of a branch that have one of these marks; its values are added to `values`."""
    given = {f"{name}_{number}": mark for number, mark in enumerate(wanted)}
    values |= given
    return f"SELECT k.message FROM marks k WHERE k.branch = :branch AND k.mark IN ({_list(given)})"


def _list(names: Iterable[str]) -> str:
    return ", ".join(f":{name}" for name in names)


# --- writing ----------------------------------------------------------------------------------------------------------


def add(
    tx: Tx,
    thread_key: ThreadKey,
    messages: Sequence[MessageRow],
    new_marks: Sequence[str],
    *,
    by: By = UNLEASED,
    again: bool = False,
) -> None:
    """Add messages at the end, each with these marks, all or none. Ids that are there already are skipped, unless
    `again`."""
    thread = _taken(tx, thread_key, by, size=len(messages))
    after = thread.head - len(messages)
    if not again:
        ids = {message.id for message in messages}
        known = {name for _, _, name in _with_ids(tx, thread, ids, upto=after)}
        if known:
            messages = [message for message in messages if message.id not in known]
            tx.run(
                "UPDATE threads SET head = :head, message_count = message_count - :gap WHERE key = :key",
                head=after + len(messages),
                gap=thread.head - after - len(messages),
                key=thread.key,
            )
    if messages:
        threads.add(tx, thread.branch, after, messages, thread=thread.key)
        _mark_new(tx, thread.branch, after, [MarkedMessage(message, new_marks) for message in messages])


def delete(tx: Tx, thread_key: ThreadKey, ids: Collection[str], *, by: By = UNLEASED) -> int:
    """Remove the messages with these ids; returns how many there were."""
    return _take_out(
        tx, thread_key, by, lambda thread: [MessageRef(key, seq) for key, seq, _ in _with_ids(tx, thread, ids)]
    )


def delete_marked(tx: Tx, thread_key: ThreadKey, wanted: Sequence[str], *, by: By = UNLEASED) -> int:
    """Remove the messages with one of these marks; returns how many there were."""
    return _take_out(tx, thread_key, by, lambda thread: _with_marks(tx, thread.branch, wanted))


def _take_out(tx: Tx, thread_key: ThreadKey, by: By, find: Callable[[_Thread], list[MessageRef]]) -> int:
    """Remove the messages that `find` returns. It runs before anything is written, because most deletions find nothing,
    and again when the row is locked."""
    seen = _seen(tx, thread_key)
    if seen is None or not find(seen):
        return 0
    thread = _taken(tx, thread_key, by)
    spots = find(thread)
    if spots:
        editing.remove(tx, on_its_line(tx, thread.key), spots)
    return len(spots)


def clear(tx: Tx, thread_key: ThreadKey, *, by: By = UNLEASED) -> bool:
    """Remove all messages. True if there were any: then `deleting.collect` may have something to delete."""
    if not size(tx, thread_key):
        return False
    _emptied(tx, _taken(tx, thread_key, by))
    return True


def replace(tx: Tx, thread_key: ThreadKey, entries: Sequence[MarkedMessage], text: str, *, by: By = UNLEASED) -> None:
    """Replace all messages, and the summary."""
    thread = _taken(tx, thread_key, by)
    branch = _emptied(tx, thread)
    marks.summarize(tx, branch, text)
    if entries:
        tx.run(
            "UPDATE threads SET head = head + :size, message_count = :size WHERE key = :key",
            size=len(entries),
            key=thread.key,
        )
        threads.add(tx, branch, thread.head, [entry.message for entry in entries], thread=thread.key)
        _mark_new(tx, branch, thread.head, entries)


def update_marks(tx: Tx, thread_key: ThreadKey, new: str | None, old: str | None, ids: Collection[str] | None) -> int:
    """Add, change or remove a mark; returns how many messages got it, or lost it if there is no new one."""
    thread = _held(tx, thread_key)
    if thread is None or (new is None and old is None):
        return 0
    wanted = None if ids is None else [key for key, _, _ in _with_ids(tx, thread, ids)]
    if old is None:
        assert new is not None
        return _mark(tx, thread.branch, new, _all_keys(tx, thread.branch) if wanted is None else wanted)
    marked = marks.holders(tx, thread.branch, old)
    chosen = list(marked) if wanted is None else [key for key in wanted if key in marked]
    marks.drop(tx, [marked[key][0] for key in chosen])  # of two equal marks on a message, the first one
    if new is None:
        return len(chosen)
    return _mark(tx, thread.branch, new, sorted(chosen))


def summarize(tx: Tx, thread_key: ThreadKey, text: str) -> None:
    """Set the summary. The thread is made if it is new."""
    marks.summarize(tx, _held_or_made(tx, thread_key).branch, text)


def compress(
    tx: Tx, thread_key: ThreadKey, ids: Collection[str], mark: str, text: str, *, before: str | None
) -> int | None:
    """Mark messages and set the summary that stands for them, in one step; returns how many were not marked before.

    Returns None, and changes nothing, if the summary is no longer `before`, from which the new one was made.
    """
    thread = _held_or_made(tx, thread_key)
    if before not in (None, summary(tx, thread_key)):
        return None
    marks.summarize(tx, thread.branch, text)
    return _mark(tx, thread.branch, mark, [key for key, _, _ in _with_ids(tx, thread, ids)])


# --- the thread and its messages --------------------------------------------------------------------------------------

_THREAD = "key, branch, head, named, (SELECT COUNT(*) FROM segments WHERE segments.branch = threads.branch) AS pieces"
_SEE = f"SELECT {_THREAD} FROM threads WHERE namespace = :namespace AND id = :id"


def _taken(tx: Tx, thread_key: ThreadKey, by: By, *, size: int = 0) -> _Thread:
    """The thread, its row locked for a change of its log. It is made if it is new."""
    return _Thread(*threads.advance_indexed(tx, thread_key, by, _THREAD, size=size))


def _held(tx: Tx, thread_key: ThreadKey) -> _Thread | None:
    """The thread, its row locked; the log stays as it is."""
    row = threads.take(tx, thread_key, _THREAD)
    return _Thread(*row) if row else None


def _held_or_made(tx: Tx, thread_key: ThreadKey) -> _Thread:
    return _Thread(*threads.take_or_make(tx, thread_key, _THREAD))


def _seen(tx: Tx, thread_key: ThreadKey) -> _Thread | None:
    """The thread, without a lock: to see whether there is anything to do."""
    row = tx.one(_SEE, namespace=thread_key.namespace, id=thread_key.id)
    return _Thread(*row) if row else None


def _emptied(tx: Tx, thread: _Thread) -> int:
    on_its_line(tx, thread.key)
    branch = editing.empty(tx, thread_state_of(tx, thread.key))
    tx.run("UPDATE threads SET named = 1 WHERE key = :key", key=thread.key)
    return branch


def _with_ids(tx: Tx, thread: _Thread, ids: Collection[str], *, upto: int = END) -> list[tuple[int, int, str]]:
    """The messages with these ids, in order: key, seq and id."""
    if thread.named and len(ids) <= _MOST:
        found = _looked_up(tx, thread, sorted(ids))
    else:
        found = tx.all(
            f"SELECT m.key, m.seq, m.id FROM {ALONG} WHERE s.branch = :branch", branch=thread.branch, after=0, upto=END
        )
    return sorted(((key, seq, name) for key, seq, name in found if seq <= upto and name in ids), key=lambda row: row[1])


def _looked_up(tx: Tx, thread: _Thread, ids: Sequence[str]) -> list[tuple[int, int, str]]:
    """The messages with these ids by the index, source by source: a fork may have many segments, of few sources."""
    if thread.pieces == 1:
        return _named(tx, thread.branch, ids)
    return [
        (key, seq, name)
        for source in branches.sources_of(tx, thread.branch)
        for key, seq, name in _named(tx, source, ids)
        if _source_at(tx, thread.branch, seq) == source
    ]


def _named(tx: Tx, branch: int, ids: Sequence[str]) -> list[tuple[int, int, str]]:
    """The branch's own messages with these ids, and those whose first characters are equal to a long id's."""
    found: list[tuple[int, int, str]] = []
    start = 0
    while start < len(ids):
        many = next((size for size in _ASKED if size >= len(ids) - start), _ASKED[-1])
        some = ids[start : start + many]
        names = [name[:NAME] for name in some] + [some[-1][:NAME]] * (many - len(some))
        values = {f"name_{number}": name for number, name in enumerate(names)}
        found += tx.all(
            "SELECT key, seq, id FROM messages WHERE branch = :branch AND plain = 1"
            f" AND substr(id, 1, {NAME}) IN ({_list(values)})",
            branch=branch,
            **values,
        )
        start += many
    return found


def _source_at(tx: Tx, branch: int, seq: int) -> int | None:
    """The branch whose own message is read at a place."""
    row = tx.one(
        "SELECT source, upto_seq FROM segments WHERE branch = :branch AND after_seq < :seq"
        " ORDER BY after_seq DESC LIMIT 1",
        branch=branch,
        seq=seq,
    )
    return row[0] if row is not None and row[1] >= seq else None


def _with_marks(tx: Tx, branch: int, wanted: Sequence[str]) -> list[MessageRef]:
    if not wanted:
        return []
    values: dict[str, Any] = {"branch": branch}
    rows = tx.all(
        f"SELECT m.key, m.seq FROM messages m WHERE m.key IN ({_marked_by('in', wanted, values)}) ORDER BY m.seq",
        **values,
    )
    return [MessageRef(*row) for row in rows]


def _all_keys(tx: Tx, branch: int) -> list[int]:
    rows = tx.all(
        f"SELECT m.key FROM {ALONG} WHERE s.branch = :branch ORDER BY m.seq", branch=branch, after=0, upto=END
    )
    return [key for (key,) in rows]


def _mark(tx: Tx, branch: int, mark: str, messages: Iterable[int]) -> int:
    """Add a mark to those of the messages that do not have it; returns how many those are."""
    marked = marks.holders(tx, branch, mark)
    fresh = [key for key in messages if key not in marked]
    marks.put(tx, branch, fresh, [mark])
    return len(fresh)


def _mark_new(tx: Tx, branch: int, after: int, entries: Sequence[MarkedMessage]) -> None:
    """Put marks on messages that were just added behind a seq."""
    rows = [
        {"branch": branch, "seq": seq, "mark": mark}
        for seq, entry in enumerate(entries, after + 1)
        for mark in entry.marks
    ]
    tx.many(
        "INSERT INTO marks (branch, message, mark)"
        " SELECT :branch, m.key, :mark FROM messages m WHERE m.branch = :branch AND m.seq = :seq",
        rows,
    )
