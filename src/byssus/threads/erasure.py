"""Erasure: removes all data of a thread or of a user, down to the bytes in the files.

First the threads are deleted in one transaction. Then their rows are removed in steps, and finally the database scrubs
its files. A reader of an older state keeps its pages in the file: the result says so, and they are scrubbed as soon as
that reader has ended, by this process or by the next one that opens the database.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

from byssus.errors import ByssusError, ForksUndecided, InputError, StoreBusy, StoreFull
from byssus.queries.versions import deleting, erasure_notes, erasures
from byssus.queries.versions.erasures import ErasedRows
from byssus.store import sharing
from byssus.store.database import Store
from byssus.store.operations import Runner
from byssus.threads import known_backups
from byssus.threads.retention import empty_trash
from byssus.threads.waiting import retry_while_any_driven
from byssus.values.checkpoints import Erased
from byssus.values.inputs import ThreadId, checked_id, checked_thread, checked_wait

Forks: TypeAlias = Literal["keep", "erase"]

_FORKS = ("keep", "erase")
_NAMED = 5  # backups in a note
_LOOK = 0.5  # seconds between two attempts to scrub pages that are still being read
_PINNED = (
    "A reader of an older state of the database keeps old pages in its files; they are removed "
    "when that ends, or when the database is opened next. "
)
_NO_ROOM = (
    "It is deleted, but there was no room to rewrite the files, so old pages of it may still be in them; free some "
    "disk space: they are removed when the database is opened next. "
)
_NOTHING = (
    "There was nothing to erase. What was deleted before, and not erased, may still be in free space of the database's "
    "files until the next erasure."
)
_log = logging.getLogger("byssus.store")


def _checked_forks(forks: object) -> str | None:
    if forks is not None and forks not in _FORKS:
        raise InputError(f"forks must be 'keep' or 'erase', got {forks!r:.80}")
    return None if forks is None else str(forks)


async def erase_thread(store: Runner, thread_id: ThreadId, *, forks: Forks | None = None, wait: float = 0) -> Erased:
    """Remove every byte of the thread and its child threads, also from the database's files; returns what was removed.

    If the thread has forks, `forks` is required: "keep" leaves them the past that they share, "erase" erases them too.
    Use `export_thread` first if you may need it again. Waits for a run as `append` does.
    """
    decided, thread_key = _checked_forks(forks), checked_thread(thread_id)
    begun = await retry_while_any_driven(
        store,
        lambda dead: store.write(erasures.begin_thread, thread_key, forks=decided, dead={**dead}),
        checked_wait(wait),
    )
    return await _erase(store, begun, f"thread {thread_key.id!r}")


async def erase_user(store: Runner, user_id: str, *, forks: Forks | None = None, wait: float = 0) -> Erased:
    """Remove every byte of a user and of all their threads.

    `forks` is for forks of these threads that belong to other users, as in `erase_thread`.
    """
    decided, user = _checked_forks(forks), checked_id(user_id, "a user id")
    begun = await retry_while_any_driven(
        store,
        lambda dead: store.write(erasures.begin_user, user, forks=decided, dead={**dead}),
        checked_wait(wait),
    )
    return await _erase(store, begun, f"user {user!r}")


async def _erase(store: Runner, begun: ErasedRows, whose: str) -> Erased:
    if begun.undecided:
        forks = [f"{fork.id!r} of {fork.owner!r}" if fork.owner else repr(fork.id) for fork in begun.undecided]
        raise ForksUndecided(
            f"{whose} shares its past with {len(forks)} fork(s): {', '.join(forks[:5])}; say what becomes of them: "
            "forks='keep' leaves them the past that they share, forks='erase' erases them too",
            [fork.id for fork in begun.undecided],
        )
    if begun.threads == 0 and not await store.read(erasure_notes.unfinished):  # else an earlier one is continued
        return Erased(0, 0, 0, True, [], _NOTHING, [])
    keys = await store.read(erasure_notes.unfinished)  # these are in the trash by now
    messages = await empty_trash(store)
    database = store.base
    try:
        is_scrubbed, left = await store.aside(database.scrub), _PINNED
        if not is_scrubbed:
            await store.aside(lambda: _finish_later(database))
    except StoreFull:
        is_scrubbed, left = False, _NO_ROOM
    if is_scrubbed:
        await store.write(erasure_notes.finish, keys)
    note = database.remains if is_scrubbed else left + database.remains
    if begun.kept:
        note = f"{len(begun.kept)} fork(s) keep the past that they share with it. {note}"
    backups = await store.aside(lambda: known_backups.still_known(database))
    note += _told(backups)
    return Erased(begun.threads, begun.checkpoints, messages, is_scrubbed, list(begun.kept), note, backups)


def _told(backups: Sequence[str]) -> str:
    if not backups:
        return ""
    some = ", ".join(map(repr, backups[:_NAMED])) + (f" and {len(backups) - _NAMED} more" if backups[_NAMED:] else "")
    return (
        f" Known backups that may still hold it: {some}. Delete them, or bring them up to date: "
        "byssus backup FILE --incremental"
    )


def finish_what_was_left(store: Store) -> None:
    """Continue erasures that another process has begun, without waiting for them."""
    if store.has_files and store.read_now(erasure_notes.unfinished):
        go_on(store)


def go_on(store: Store) -> None:
    """Finish erasures that were interrupted, on a worker of their own."""
    _log.info("an erasure in %r was interrupted, and is finished now", store.name)
    _finish_later(store, rewrite=True)


def _finish_later(store: Store, *, rewrite: bool = False) -> None:
    """Scrub the files when no reader needs the old pages any more.

    The OS thread keeps the store open and the process alive while it scrubs, so that a short-lived program finishes it
    too. It does not wait for a reader that has not ended.
    """
    sharing.retain(store)
    threading.Thread(target=_finish, args=(store, rewrite), name="byssus-scrub").start()


def _finish(store: Store, rewrite: bool) -> None:
    try:
        keys = store.read_now(erasure_notes.unfinished)
        while rewrite and store.write_now(deleting.empty_trash).has_more:
            pass
        while not _scrubbed(store, rewrite=rewrite):
            rewrite = False
            if store.users == 1 or not threading.main_thread().is_alive():  # no other user is left
                return  # the next process that opens it continues
            time.sleep(_LOOK)
        store.write_now(erasure_notes.finish, keys)
    except ByssusError as error:
        _log.warning("an erasure in %r is not finished: %s; it goes on when it is opened next", store.name, error)
    finally:
        sharing.release(store)


def _scrubbed(store: Store, *, rewrite: bool) -> bool:
    try:
        return store.scrub(rewrite=rewrite)
    except StoreBusy:  # another process writes a lot, or scrubs too
        return False
