"""The index behind search: what the text of a row is, and who brings its tokens there, and when.

- Rows are read, cut into tokens when that transaction has ended, and written, a small batch at a time.
  `queries/search/index.py` says what makes that safe when several processes do it.
- It happens in the background, on a worker of its own, and only while no messages are written: tokens are made in
  Python, and would keep the interpreter from those who append. A long backlog is worked off in small doses anyway.
- It begins with the first search of a process, or with `of(store).start()`. A search that finds much unindexed indexes
  it first. So the background is for speed; nothing depends on it.
- A coroutine here awaits the store and nothing else, so that it can be driven without an event loop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from byssus.errors import ByssusError, StoreBusy, StoreCorrupt, StoreFull, StoreNotOpen, StoreReadOnly
from byssus.messages import AssistantMessage, Note, decode
from byssus.queries.search import index as queries
from byssus.queries.search.kinds import CALL, MESSAGE, Batch, IndexEntry, State, Unindexed, tool
from byssus.search import tokens
from byssus.store.database import Store, Tx
from byssus.store.operations import Runner
from byssus.values.shown import reason

KINDS = {"message": MESSAGE, "tool_call": CALL}

_LONG_LAG = 1_000  # rows that are not indexed: more are indexed before they are searched
_BATCH_ROWS, _BATCH_BYTES = 100, 200_000
_LOOK = 0.25  # seconds between two checks for recent writes
_BREATH = 0.005  # seconds between two batches in the background
_QUIET_ROWS = 50  # in one of those: a transaction of a few milliseconds
_BACKLOG = 50_000  # rows that wait: more of them do not wait for silence
_TROUBLE = 5.0  # seconds to wait after a failure
_log = logging.getLogger("byssus.store")


# --- text -------------------------------------------------------------------------------------------------------------


def text_of(kind: str, given: Sequence[str | None]) -> str:
    """The text that is searched: the text of a message, or the strings in the input and output of a tool call."""
    if kind == MESSAGE:
        try:
            message = decode(given[0] or "null")
        except StoreCorrupt:  # loading the thread raises it; other rows are still found
            return ""
        return _text_of_note(message.body) if isinstance(message, Note) else message.text
    arguments, output, error = given
    found = [text for value in (arguments, output) if value is not None for text in _strings(_loaded(value))]
    return "\n".join([*found, error] if error else found)


def tools_of(kind: str, given: Sequence[str | None]) -> set[str]:
    """The names of the tools that a message calls."""
    body = given[0] or ""
    if kind != MESSAGE or "tool_call" not in body:  # most call none, and need not be read again
        return set()
    try:
        message = decode(body)
    except StoreCorrupt:
        return set()
    return {call.name for call in message.tool_calls} if isinstance(message, AssistantMessage) else set()


def _text_of_note(body: Any) -> str:
    """The strings of any JSON: of its content, if it has one; but not the words by which programs tell it apart."""
    content = body["content"] if isinstance(body, dict) and "content" in body else body
    return "\n".join(_strings(content, frozenset(("role", "type", "id"))))


def _loaded(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # not ours to judge here: it is text
        return value


def _strings(value: Any, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """The strings in any JSON, in order, without the names of its fields; and without some fields."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            waiting.extend(reversed(item))
        elif isinstance(item, dict):
            waiting.extend(reversed([each for name, each in item.items() if name not in without]))


# --- the index --------------------------------------------------------------------------------------------------------


class IndexState(NamedTuple):
    """How many rows there are, and how many of them are not indexed yet."""

    rows: int
    waiting: int
    is_current: bool  # whether the index is one of this version


async def state(store: Runner) -> dict[str, IndexState]:
    """How far the index is, by kind."""
    return await store.read(_state)


def _state(tx: Tx) -> dict[str, IndexState]:
    found = {}
    for name, kind in KINDS.items():
        known = queries.state(tx, kind)
        is_current = known.tokenizer == tokens.VERSION
        rows = queries.count(tx, kind)
        waiting = queries.lag(tx, kind, known.upto) if is_current else rows
        found[name] = IndexState(rows, waiting, is_current)
    return found


async def index(store: Runner, limit: int | None = None) -> int:
    """Index what waits for it, or so many rows of it; returns how many were."""
    done = 0
    for kind in KINDS.values():
        while limit is None or done < limit:
            count = await _index_some(store, kind, _BATCH_ROWS if limit is None else min(limit - done, _BATCH_ROWS))
            if count is None:
                break
            done += count
    return done


async def reindex(store: Runner) -> int:
    """Rebuild the whole index; returns the number of indexed rows."""
    await store.write(queries.reset)
    return await index(store)


async def _index_some(store: Runner, kind: str, rows: int) -> int | None:
    """Index a batch: how many rows that were, or None if there are none."""
    unindexed = await store.read(next_rows, kind, rows)
    if unindexed is None:
        return None
    if unindexed.state.tokenizer != tokens.VERSION:
        await store.write(queries.empty, tokens.VERSION, kind)
        return 0
    batch = await store.compute(lambda _: batch_of(unindexed))
    return len(batch.entries) if await store.write(queries.put, batch) else 0


class NextRows(NamedTuple):
    """The next rows to be indexed, as of a state."""

    kind: str
    state: State
    rows: list[Unindexed]


def next_rows(tx: Tx, kind: str, rows: int) -> NextRows | None:
    """The next rows to be indexed: None if there are none, or if the index is a newer version's."""
    known = queries.state(tx, kind)
    if known.tokenizer != tokens.VERSION:
        return None if known.tokenizer > tokens.VERSION else NextRows(kind, known, [])
    waiting = queries.waiting(tx, kind, known.upto, rows=rows, size=_BATCH_BYTES)
    return NextRows(kind, known, waiting) if waiting else None


def batch_of(unindexed: NextRows) -> Batch:
    """The rows with their tokens. Takes a while."""
    kind, known, rows = unindexed
    upto = max(known.upto, *(row.key for row in rows if row.ticket is None), 0)
    return Batch(kind, known, [_entry(kind, row) for row in rows], upto)


def _entry(kind: str, row: Unindexed) -> IndexEntry:
    sequence, singles = tokens.tokens(text_of(kind, row.texts))
    return IndexEntry(row.key, row.scope_key, row.ticket, sequence, [*singles, *map(tool, tools_of(kind, row.texts))])


async def keep_up(store: Runner) -> None:
    """Index what waits before a search, if that is much: to read all of it each time would take longer."""
    of(store.base).start()  # who searches once will search again
    if await store.read(_is_behind):
        with contextlib.suppress(StoreBusy, StoreFull, StoreReadOnly):  # what cannot be indexed can be read
            await index(store)


def _is_behind(tx: Tx) -> bool:
    for kind in KINDS.values():
        known = queries.state(tx, kind)
        if known.tokenizer < tokens.VERSION:
            return True
        is_usable = known.tokenizer == tokens.VERSION
        if is_usable and queries.lag(tx, kind, known.upto, _LONG_LAG + 1) > _LONG_LAG:
            return True
    return False


# --- in the background ------------------------------------------------------------------------------------------------


class Indexer:
    """Indexes new rows of one store while there are no writes."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._seen: Hashable = None  # the store's version when nothing waited
        self._heads: tuple[int, ...] = ()  # the highest keys when we last looked

    def start(self) -> None:
        """Begin, if it has not begun. It ends with the store, and keeps no program from ending."""
        with self._lock:
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name="byssus-index", daemon=True)
                self._worker.start()

    def _serve(self) -> None:
        pause = _LOOK
        while True:
            time.sleep(pause)
            store = self._store()
            if store is None:
                return
            try:
                self.look(store)
                pause = _LOOK
            except StoreNotOpen:
                return
            except ByssusError as error:  # writers get the same error
                _log.warning("%r could not be indexed: %s", store.name, reason(error))
                pause = _TROUBLE
            del store

    def look(self, store: Store) -> int:
        """Index new rows if there was no write since the last check; returns the number of indexed rows."""
        version = store.version()
        if version == self._seen:
            return 0
        heads, lag = store.read_now(_heads)
        if lag == 0:
            self._seen, self._heads = version, heads
            return 0
        is_quiet, self._heads = heads == self._heads, heads
        if is_quiet:
            return self._work(store)
        return self._dose(store) if lag > _BACKLOG else 0

    def _work(self, store: Store) -> int:
        """Until all rows are indexed, or there is a write."""
        done = 0
        while count := self._dose(store):
            done += count
            time.sleep(_BREATH)
            if store.read_now(_heads, 1)[0] != self._heads:
                break
        return done

    def _dose(self, store: Store) -> int:
        for kind in KINDS.values():
            unindexed = store.read_now(next_rows, kind, _QUIET_ROWS)
            if unindexed is None:
                continue
            if unindexed.state.tokenizer != tokens.VERSION:
                store.write_now(queries.empty, tokens.VERSION, kind)
            else:
                store.write_now(queries.put, batch_of(unindexed))
            return len(unindexed.rows) or 1
        return 0


def _heads(tx: Tx, limit: int = _BACKLOG + 1) -> tuple[tuple[int, ...], int]:
    """The highest keys, and how many rows wait."""
    lag = 0
    for kind in KINDS.values():
        known = queries.state(tx, kind)
        if known.tokenizer == tokens.VERSION:
            lag += queries.lag(tx, kind, known.upto, limit)
        elif known.tokenizer < tokens.VERSION:  # all of them
            lag += queries.highest(tx, kind)
    return tuple(queries.highest(tx, kind) for kind in KINDS.values()), lag


_indexers: weakref.WeakKeyDictionary[Store, Indexer] = weakref.WeakKeyDictionary()


def of(store: Store) -> Indexer:
    """The indexer of this store."""
    return _indexers.get(store) or _indexers.setdefault(store, Indexer(store))
