"""Threads: load them, append to them, and stop their runs.

A thread is read and decoded page by page on a reader, so that a long one does not stall the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from byssus.messages import AssistantMessage, Message, decode, encode
from byssus.queries.log import branches, leases, threads
from byssus.queries.log.leases import Unleased
from byssus.queries.log.threads import Position, ThreadRow
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.threads.encoding import PAGE, Appendable, as_list, encode_extra, message_row
from byssus.threads.waiting import owner_is_gone, retry_while_driven
from byssus.values.following.growth import assembled
from byssus.values.inputs import (
    ThreadId,
    checked_id,
    checked_new_thread,
    checked_number,
    checked_thread,
    checked_wait,
)
from byssus.values.thread_key import ThreadKey


class Thread(NamedTuple):
    """A thread as it was loaded.

    `partial` is an incomplete reply: its run is still going on in another process, or was interrupted. `seqs` are the
    positions of the messages in the log. `has_earlier` is true if the thread has messages before these, and
    `message_count` is the number of all its messages. The other fields are for the agent: the position of the thread,
    and the run that has not ended.
    """

    messages: list[Message]
    extra: dict[str, Any]
    partial: AssistantMessage | None = None
    seqs: Sequence[int] = ()
    position: Position = Position(0, 0)
    run_id: str | None = None
    unledgered: int = 0
    mail: int = 0
    has_ttl: bool = False  # whether its checkpoints are removed when they are old
    owner: str | None = None
    has_earlier: bool = False
    message_count: int = 0
    made: tuple[int, str] = (0, "")  # which thread of this id it is: the key and the time of its row


async def load(
    store: Runner, thread_id: ThreadId, *, last: int | None = None, before: int | None = None
) -> Thread | None:
    """The whole thread, or None for an unknown id.

    `last` limits the number of messages, counted from the end; `before` leaves out the messages from a seq on. Together
    they page through a long thread, newest page first: `load(id, last=50)`, then
    `load(id, last=50, before=thread.seqs[0])`.
    """
    thread_key = checked_thread(thread_id)
    if last is not None or before is not None:
        limit = threads.END if last is None else checked_number("last", last)
        start = threads.END if before is None else checked_number("before", before)
        return await _load_end(store, thread_key, limit, start)
    while True:
        row, page = await store.read(_first_page, thread_key)
        if row is None:
            return None
        messages, seqs = [message for _, message in page], [seq for seq, _ in page]
        is_long = len(page) == PAGE
        while len(page) == PAGE:
            page = await store.read(_page, row.branch, after=seqs[-1], upto=row.head)
            messages.extend(message for _, message in page)
            seqs.extend(seq for seq, _ in page)
        # Between two reads the thread may have been rewound and pruned, or deleted: then the rest of it was not there.
        if not is_long or await store.read(threads.is_at, thread_key, row.key, row.branch, row.made_at):
            break
    return _thread_of(row, messages, seqs)


async def _load_end(store: Runner, thread_key: ThreadKey, last: int, before: int) -> Thread | None:
    """The last messages before a seq, read from the end; and whether there is one more."""
    while True:
        row, page = await store.read(_end_of, thread_key, before=before, limit=min(last + 1, PAGE))
        if row is None:
            return None
        pages, count = [page], len(page)
        while len(page) == PAGE and count <= last:
            limit = min(last + 1 - count, PAGE)
            page = await store.read(_page_before, row.branch, before=page[0][0], limit=limit)
            pages.append(page)
            count += len(page)
        if len(pages) == 1 or await store.read(threads.is_at, thread_key, row.key, row.branch, row.made_at):
            break
    shown = [item for page in reversed(pages) for item in page][-last:]
    messages, seqs = [message for _, message in shown], [seq for seq, _ in shown]
    return _thread_of(row, messages, seqs, has_earlier=count > last)


def _thread_of(row: ThreadRow, messages: list[Message], seqs: list[int], *, has_earlier: bool = False) -> Thread:
    position = Position(row.head, row.version, row.branch)
    partial = None if row.partial is None else decode(row.partial)
    assert isinstance(partial, AssistantMessage | None)
    extra, has_ttl = json.loads(row.extra), row.ttl is not None
    known = (row.run, row.unledgered, row.mail, has_ttl, row.owner)
    made = (row.key, row.made_at)
    return Thread(messages, extra, partial, seqs, position, *known, has_earlier, row.message_count, made)


async def load_behind(store: Runner, thread_key: ThreadKey, known: Thread) -> Thread | None:
    """The thread, of which the first messages are known: only what is behind them is loaded.

    Returns None if they may have changed: the thread was rewound, deleted and made again, or messages were removed.
    """
    row = await store.read(_same, thread_key, known)
    if row is None:
        return None
    messages, seqs = list(known.messages), list(known.seqs)
    page: list[tuple[int, Message]] | None = None
    while page is None or len(page) == PAGE:
        page = await store.read(_page, row.branch, after=seqs[-1], upto=row.head)
        messages.extend(message for _, message in page)
        seqs.extend(seq for seq, _ in page)
    return None if await store.read(_same, thread_key, known) is None else _thread_of(row, messages, seqs)


def _same(tx: Tx, thread_key: ThreadKey, known: Thread) -> ThreadRow | None:
    """The row of a thread if nothing was removed from the branch that it reads, and it is still that branch."""
    row = threads.find(tx, thread_key)
    is_same = row is not None and (row.key, row.made_at) == known.made and row.branch == known.position.branch
    return row if is_same and not branches.has_lost(tx, known.position.branch) else None


def _end_of(
    tx: Tx, thread_key: ThreadKey, *, before: int, limit: int
) -> tuple[ThreadRow | None, list[tuple[int, Message]]]:
    row = _find(tx, thread_key)
    return row, [] if row is None else _page_before(tx, row.branch, before=min(before, row.head + 1), limit=limit)


def _page_before(tx: Tx, branch: int, *, before: int, limit: int) -> list[tuple[int, Message]]:
    return [(seq, decode(body)) for seq, body in threads.page_before(tx, branch, before=before, limit=limit)]


def _first_page(tx: Tx, thread_key: ThreadKey) -> tuple[ThreadRow | None, list[tuple[int, Message]]]:
    row = _find(tx, thread_key)
    return row, [] if row is None else _page(tx, row.branch, after=0, upto=row.head)


def _find(tx: Tx, thread_key: ThreadKey) -> ThreadRow | None:
    """A thread. What was saved of a reply in pieces is one message."""
    row = threads.find(tx, thread_key)
    partial = None if row is None else partial_of(tx, row)
    return row if row is None or partial is None else row._replace(partial=encode(partial))


def partial_of(tx: Tx, row: ThreadRow) -> AssistantMessage | None:
    """The part of a reply that was saved."""
    if row.partial is None:
        return None
    head = decode(row.partial)
    assert isinstance(head, AssistantMessage)
    return assembled(head, (body for _, body in threads.pieces(tx, row.key)))


def _page(tx: Tx, branch: int, *, after: int, upto: int) -> list[tuple[int, Message]]:
    rows = threads.page(tx, branch, after=after, upto=upto, limit=PAGE)
    return [(seq, decode(body)) for seq, body in rows]


async def append(
    store: Runner, thread_id: ThreadId, messages: Appendable | Iterable[Appendable], *, wait: float = 0
) -> None:
    """Append messages atomically; they are on disk when this returns.

    While a run drives the thread, it raises `ThreadBusy`, after waiting up to `wait` seconds.
    """
    rows = [*map(message_row, as_list(messages))]
    thread_key, seconds = checked_new_thread(thread_id), checked_wait(wait)
    if rows:
        await retry_while_driven(
            store,
            lambda dead_epoch: store.write(threads.append, thread_key, rows, by=Unleased(dead_epoch)),
            seconds,
        )


async def save_extra(store: Runner, thread_id: ThreadId, extra: dict[str, Any], *, wait: float = 0) -> None:
    """Replace the thread's extra: keys that are not in the new dict are removed. Waits for a run as `append` does."""
    thread_key, text = checked_new_thread(thread_id), encode_extra(extra)
    await retry_while_driven(
        store,
        lambda dead_epoch: store.write(threads.save_extra, thread_key, text, by=Unleased(dead_epoch)),
        checked_wait(wait),
    )


async def set_user(store: Runner, thread_id: ThreadId, user_id: str | None) -> None:
    """Set the user who owns the thread, for lists, `export_user` and `erase_user`. `Agent(user_id=)` sets it too."""
    user = None if user_id is None else checked_id(user_id, "a user id")
    await store.write(threads.set_owner, checked_thread(thread_id), user)


async def abort(store: Runner, thread_id: ThreadId) -> bool:
    """Ask the run that drives the thread, in any process, to stop. False if there is none.

    A thread that waits for a person, itself or by a child, has no run in progress: answer "deny" and resume it.
    """
    owner = await store.write(leases.abort, checked_thread(thread_id))
    return owner is not None and not owner_is_gone(store, owner)
