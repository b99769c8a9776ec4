"""Following a thread: everything behind a cursor, and then what happens, by whichever process.

A follower reads pages of the log until there is nothing left, then waits for its bell (`hub.py`) and reads again. What
is read becomes items in `news.py`. Each read is one transaction, so an item never mixes two states of the thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import NamedTuple

from byssus.errors import CursorUnknown, StoreUnreachable
from byssus.messages import AssistantMessage, Message, decode
from byssus.queries.following import rows as following
from byssus.queries.following.rows import FollowedRow, Mail
from byssus.queries.log import branches, threads
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.threads.following import hub
from byssus.threads.following.news import Follower, LogPage, Path, SavedPieces
from byssus.values.following.cursors import Cursor, Seen, parse, thread_mark
from byssus.values.following.growth import Piece, decode_pieces
from byssus.values.following.items import FollowItem
from byssus.values.inputs import ThreadId, checked_thread
from byssus.values.thread_key import ThreadKey

_FIRST_PAGE, _SHORTEST, _LONGEST = 32, 1, 512  # messages
_PAGE_CHARS = 64_000  # a page is made shorter when it has more
_FEW_PIECES = 16  # pieces of a reply in one statement
_ATTEMPTS, _AWAY = 60, 1.0  # reads, and seconds between them, while the database does not answer


def follow(store: Runner, thread_id: ThreadId, after: str | None = None) -> AsyncGenerator[FollowItem, None]:
    """Yield everything behind a cursor, and then new items of any process, shortly after their commit.

    `after` is the `cursor` of an item; None begins with the first message. Raises `CursorUnknown` if it is no position
    in this thread. It continues until you break out of the loop. If the thread does not exist yet, it waits for it; if
    the thread is deleted, it yields `ThreadDeleted`. The classes of the items are in `byssus.checkpointer`.
    """
    thread_key = checked_thread(thread_id)
    cursor = None if after is None else parse(after)
    if after is not None and cursor is None:
        raise CursorUnknown(thread_key.id, after, "it is not a cursor that follow() gave")
    return _follow(store, thread_key, cursor)


async def _follow(store: Runner, thread_key: ThreadKey, cursor: Cursor | None) -> AsyncGenerator[FollowItem, None]:
    follower, center = Follower(thread_key), hub.of(store.base)
    bell = center.attach(thread_key)
    try:
        if cursor is not None:
            follower.begin_at(cursor, *await store.read(_position, thread_key, cursor))
        while True:
            live = center.live.get(thread_key)  # before the read: what was stored before it began is read first
            was_here = thread_key in center.here
            async for found in _read_all(store, thread_key, follower, is_local=live is not None):
                if found is not None and found.row.is_driven and not (was_here or thread_key in center.here):
                    center.note_watching(thread_key)
                for item in follower.tell_deleted() if found is None else follower.tell(found):
                    yield item
            if live is not None:
                for item in follower.tell_live(live):
                    yield item
            await store.until(bell)
    finally:
        center.detach(thread_key, bell)


async def _read_all(
    store: Runner, thread_key: ThreadKey, follower: Follower, *, is_local: bool
) -> AsyncIterator[LogPage | None]:
    """What is new, page by page. None: the thread that was followed is not there any more.

    `is_local`: its run is in this process, where the reply that is arriving is in memory.
    """
    limit, attempts = _FIRST_PAGE, 0
    while True:
        known = _Known(
            follower.path,
            follower.seen,
            follower.stamp,
            follower.version,
            follower.calls_from,
            follower.made_after,
            follower.runs_from,
            follower.saved,
            follower.inbox,
            is_local,
        )
        try:
            look = await store.read(_look, thread_key, known, limit)
        except StoreUnreachable:
            attempts += 1
            if attempts == _ATTEMPTS:
                raise
            await store.sleep(_AWAY)
            continue
        if look.is_gone:
            yield None
        if look.found is not None:
            yield look.found
        if look.found is None or look.found.is_whole:
            if not look.is_gone:
                return
        elif look.chars > _PAGE_CHARS:
            limit = max(limit // 2, _SHORTEST)
        elif look.chars < _PAGE_CHARS // 4:
            limit = min(limit * 2, _LONGEST)


class _Known(NamedTuple):
    """What a follower has sent: see `Follower`."""

    path: Path | None
    seen: Seen
    stamp: int | None
    version: int
    calls_from: int
    made_after: int
    runs_from: int
    saved: tuple[str, int]
    inbox: frozenset[str]
    is_local: bool


class _Look(NamedTuple):
    """What one read has found. `is_gone`: the thread that was followed is not there any more."""

    found: LogPage | None
    chars: int = 0  # in the page
    is_gone: bool = False


def _look(tx: Tx, thread_key: ThreadKey, known: _Known, limit: int) -> _Look:
    row = following.find(tx, thread_key)
    if known.path is not None and (row is None or not known.path.is_of(row)):
        return _Look(None, is_gone=True)
    if row is None or row.stamp == known.stamp:
        return _Look(None)
    path, seen, calls_from, made_after = known.path, known.seen, known.calls_from, known.made_after
    if path is None or path.branch != row.branch:
        segments = branches.segments_of(tx, row.branch)
        if path is not None:
            seen = seen.cut(branches.parting(path.segments, segments))
            calls_from, made_after = following.last_call(tx, row.branch, seen.upto), min(made_after, seen.upto)
        path = Path(row.key, row.made_at, row.branch, segments)
    page, chars, is_all = _page(tx, row.branch, seen, row.head, limit)
    last = row.head if is_all else page[-1][0]
    calls = following.calls(tx, row.branch, first=calls_from, last=last)
    # A checkpoint may be made at a place that was read before: then its version tells that it is new.
    is_live = known.version >= 0 and path is known.path
    after, version = (min(made_after, seen.upto) - 1, known.version) if is_live else (made_after, -1)
    made = following.made(tx, row, after=after, upto=last, version=version) if row.latest is not None else []
    runs = following.runs(tx, row.key, path.segments, first=known.runs_from, upto=last + 1)
    mail = following.mail(tx, row.key, known.inbox, chars=_PAGE_CHARS) if is_all and row.has_mail else Mail()
    arriving = _arriving(tx, row, known.saved) if is_all and row.saved_at is not None and not known.is_local else None
    return _Look(LogPage(row, path, seen, page, last, is_all, calls, made, runs, mail, arriving), chars)


def _arriving(tx: Tx, row: FollowedRow, saved: tuple[str, int]) -> SavedPieces | None:
    """What was saved of a reply, behind what is known of it."""
    assert row.saved_at is not None
    body, number = following.partial(tx, row.key), saved[1] if saved[0] == row.saved_at else 0
    head = None if body is None else decode(body)
    if not isinstance(head, AssistantMessage) or head.id is None:
        return None
    pieces, chars = list[Piece](), 0
    while rows := threads.pieces(tx, row.key, after=number, limit=_FEW_PIECES):
        for last, text in rows:
            pieces += decode_pieces(text)
            number, chars = last, chars + len(text)
            if chars > _PAGE_CHARS:
                return SavedPieces(head.id, pieces, row.saved_at, number, is_all=False)
    return SavedPieces(head.id, pieces, row.saved_at, number)


def _page(tx: Tx, branch: int, seen: Seen, head: int, limit: int) -> tuple[list[tuple[int, Message]], int, bool]:
    """The next messages that were not seen, how many characters they have, and whether they are all.

    What was seen behind a gap is not read again: a slow tool may leave one before any number of long results.
    """
    page, chars = list[tuple[int, Message]](), 0
    for after, upto in seen.gaps(head):
        for seq, body in threads.page(tx, branch, after=after, upto=upto, limit=limit - len(page)):
            page.append((seq, decode(body)))
            chars += len(body)
            if len(page) == limit or chars > _PAGE_CHARS:
                return page, chars, False
    return page, chars, True


def _position(tx: Tx, thread_key: ThreadKey, cursor: Cursor) -> tuple[Path, int, int]:
    """Where a cursor stands: its branch, the last reply before it whose calls are in the ledger, and its run."""
    row = following.find(tx, thread_key)

    def unknown(why: str) -> CursorUnknown:
        return CursorUnknown(thread_key.id, str(cursor), why)

    if row is None:
        raise unknown("there is no such thread")
    if cursor.thread != thread_mark(*thread_key, row.made_at):
        raise unknown("it is of another thread, or of one that was deleted")
    is_current = cursor.branch == row.branch
    segments = branches.segments_of(tx, cursor.branch)
    if not segments or not (is_current or following.is_of(tx, cursor.branch, row.key)):
        raise unknown("what it is a position of was removed")
    if cursor.seen.last > (row.head if is_current else following.last_seq(tx, cursor.branch)):
        raise unknown("the thread does not reach that far")
    path = Path(row.key, row.made_at, cursor.branch, segments)
    upto = cursor.seen.upto
    return path, following.last_call(tx, cursor.branch, upto), following.first_run(tx, row.key, segments, upto)
