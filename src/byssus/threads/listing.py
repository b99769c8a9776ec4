"""Lists of threads, with the title and the state of each: running, waiting,
quarantined, interrupted or idle.

`state_of` decides the state: for one thread, for each thread of a list, for `unfinished` and for the command line.

A title is what `set_title` has set, or else the first words of the thread, which are read each time and not stored.
"""

from __future__ import annotations

import json
import re
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from byssus.errors import InputError, StoreCorrupt
from byssus.messages import decode
from byssus.queries.log import listing
from byssus.queries.log.listing import Facts, ListedRow
from byssus.store.operations import Runner
from byssus.threads.waiting import lease_is_dead
from byssus.values.inputs import (
    ThreadId,
    checked_choice,
    checked_count,
    checked_id,
    checked_text,
    checked_thread,
    column_text,
)

ThreadState: TypeAlias = Literal["running", "waiting", "quarantined", "interrupted", "idle"]

LONGEST_TITLE = 500  # characters
_PAGE = 500  # threads per read while filtering
_FIRST_WORDS = 60  # characters
_TEXT = re.compile(r'"(?:text|content)":\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)')  # in JSON that may be cut off


class ThreadInfo(NamedTuple):
    """A thread as a list shows it. Times are ISO 8601 UTC text."""

    id: str
    message_count: int
    created_at: str
    updated_at: str
    user_id: str | None
    state: ThreadState
    title: str  # as `set_title` has set it, else the first words
    first_words: str  # of the first message of a user, on one line; "" if there is none
    parent_id: str | None = None  # of a child thread: the thread whose tool call it is


def state_of(store: Runner, facts: Facts) -> ThreadState:
    """The state of a thread, computed from its row.

    A paused or cancelled session is never interrupted: no run may continue it until it is active again.
    """
    if facts.owner is not None and not lease_is_dead(store, facts.owner, facts.until):
        return "running"
    if facts.is_waiting:
        return "waiting"
    if facts.is_quarantined:
        return "quarantined"
    return "interrupted" if facts.has_run and not facts.is_stopped else "idle"


async def state(store: Runner, thread_id: ThreadId) -> ThreadState:
    """The state of a thread, whatever process works on it.

    "running": a run drives it. "waiting": a tool call waits for a person, and there is no run. "interrupted": a run
    began and did not end; `unfinished()` lists these. "quarantined": its run has ended its process too often, and a
    person must lift it; `quarantined()` lists these. "idle": none of these, also for an unknown id.
    """
    facts = await store.read(listing.facts, checked_thread(thread_id))
    return "idle" if facts is None else state_of(store, facts)


async def info(store: Runner, thread_id: ThreadId) -> ThreadInfo | None:
    """The title, state, user and times of a thread, or None for an unknown id."""
    row = await store.read(listing.one, checked_thread(thread_id))
    return None if row is None else _info(store, row)


async def list_threads(
    store: Runner,
    limit: int = 50,
    before: ThreadInfo | str | None = None,
    *,
    user_id: str | None = None,
    state: ThreadState | None = None,
    title: str | None = None,
    children: bool = False,
) -> list[ThreadInfo]:
    """Threads, most recently updated first. For the next page, pass the last one of this list as `before`.

    `user_id`, `state` and `title` filter the list. `title` matches a part of the title or of the first words, and
    ignores case. Child threads (see `agent.as_tool`) are listed only with `children=True`.
    """
    checked_count("limit", limit)
    if not isinstance(children, bool):
        raise InputError(f"children must be True or False, got {children!r:.80}")
    user = None if user_id is None else checked_id(user_id, "user_id")
    wanted = None if state is None else cast("ThreadState", checked_choice("state", state, get_args(ThreadState)))
    part = "" if title is None else _checked_part(title)
    start, found = await _start(store, before), list[ThreadInfo]()
    is_filtered = wanted is not None or part != ""
    while (left := limit - len(found)) > 0:
        size = _PAGE if is_filtered else left
        rows = await store.read(listing.page, limit=size, before=start, user_id=user, state=wanted, children=children)
        found += [each for row in rows if _is_meant(each := _info(store, row), wanted, part)]
        if len(rows) < size:
            break
        start = (rows[-1].updated_at, rows[-1].id)
    return found[:limit]


async def children(store: Runner, thread_id: ThreadId) -> list[ThreadInfo]:
    """The child threads of a thread, oldest first: one for each call of a tool that is an agent (`agent.as_tool`)."""
    return [_info(store, row) for row in await store.read(listing.children, checked_thread(thread_id))]


def _checked_part(title: object) -> str:
    if not isinstance(title, str) or not title.strip():
        raise InputError(f"title must be a part of a title, a string that is not blank; got {title!r:.80}")
    return title.strip().casefold()


def _is_meant(thread: ThreadInfo, state: ThreadState | None, part: str) -> bool:
    if state is not None and thread.state != state:
        return False
    return part in thread.title.casefold() or part in thread.first_words.casefold()


async def _start(store: Runner, before: ThreadInfo | str | None) -> tuple[str, str] | None:
    """Where a page begins: the time and the id of the thread before it."""
    known = await info(store, before) if isinstance(before, str) else before
    if known is None and before is not None:
        raise InputError(f"there is no thread {before!r} to list the ones before")
    if not isinstance(known, ThreadInfo | None):
        raise InputError(f"before must be a ThreadInfo from an earlier list, or a thread id; got {before!r:.80}")
    return None if known is None else (known.updated_at, known.id)


async def unfinished(store: Runner) -> list[ThreadInfo]:
    """Threads whose run was interrupted, oldest first: a service resumes them when it starts."""
    listed = [_info(store, row) for row in await store.read(listing.unfinished)]
    return [thread for thread in listed if thread.state == "interrupted"]


class Quarantined(NamedTuple):
    """A thread whose run has ended its process too often. No run starts on it until the quarantine is lifted."""

    thread_id: str
    user_id: str | None
    run_id: str | None
    since: str
    deaths: int


async def quarantined(store: Runner) -> list[Quarantined]:
    """Quarantined threads, most recently quarantined first."""
    return [Quarantined(*row) for row in await store.read(listing.quarantined)]


async def lift_quarantine(store: Runner, thread_id: ThreadId) -> bool:
    """Lift the quarantine: the thread counts as interrupted, with no deaths. Returns False if it is not quarantined.

    First find out why its run has ended its process: it may happen again.
    """
    return await store.write(listing.lift_quarantine, checked_thread(thread_id))


async def set_title(store: Runner, thread_id: ThreadId, title: str | None) -> None:
    """Set the title of a thread; None or blank text restores the automatic title, its first words.

    Allowed while a run drives the thread. The thread keeps its place in the list.
    """
    text = "" if title is None else checked_text("title", title).strip()
    if len(text) > LONGEST_TITLE:
        raise InputError(f"title can have {LONGEST_TITLE} characters at most, got {len(text):,}: {text[:60]!r}...")
    await store.write(listing.set_title, checked_thread(thread_id), text)


def _info(store: Runner, row: ListedRow) -> ThreadInfo:
    first_words = "" if row.opening is None else _first_words(row.opening)
    return ThreadInfo(*row[:5], state_of(store, row.facts), row.title or first_words, first_words, row.parent)


def _first_words(body: str) -> str:
    """The first words of a message, on one line, from the beginning of its body."""
    text = " ".join(column_text(_text(body)).split())
    if len(text) <= _FIRST_WORDS:
        return text
    whole_words = text[: _FIRST_WORDS + 1].rpartition(" ")[0]
    return whole_words if len(whole_words) > _FIRST_WORDS // 2 else text[:_FIRST_WORDS]


def _text(body: str) -> str:
    try:
        return decode(body).text
    except StoreCorrupt:  # it was cut off, or another program wrote it: the list shows what is readable
        found = _TEXT.search(body)
        return str(json.loads(f'"{found[1]}"', strict=False)) if found else ""
