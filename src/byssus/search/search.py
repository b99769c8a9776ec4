"""Search over messages and tool logs: read candidates, newest first, and decide by their text.

- What matches is decided by `tokens.Matcher` on the text alone. So the answer is that of a scan over everything, on any
  database, whatever the index has of it.
- Newest first is the order of writing; messages and tool calls are merged by their times. Relevance is computed from
  the text, over the newest 2,000 that match.
- A page of texts is read in one transaction, and matched when that has ended (`store.compute`). So neither the event
  loop nor other readers nor the WAL wait for a long text or a long query.
- A search ends with an error after `timeout`, and soon after its caller was cancelled: it looks between two texts.
- A coroutine here awaits the store and nothing else, so that it can be driven without an event loop.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime
from typing import Any, NamedTuple, Protocol, get_args

from byssus.accounts.rows import FoundMessage, SearchHit, SearchKind, SearchOrder
from byssus.accounts.sessions import history_row
from byssus.errors import InputError, SearchTimeout
from byssus.queries.log.messages import StoredMessage
from byssus.queries.search import candidates
from byssus.queries.search import index as queries
from byssus.queries.search.kinds import CALL, MESSAGE, Candidate, Filters, tool
from byssus.search import tokens
from byssus.search.index import KINDS, index, keep_up, reindex, state, text_of, tools_of
from byssus.store.computing import IsDropped
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.values import clock
from byssus.values.clock import Time
from byssus.values.inputs import checked_choice, checked_count, checked_id, column_text

__all__ = ["find_messages", "index", "reindex", "search", "state"]

MAX_LIMIT = 10_000
WINDOW = 2_000  # the newest matches among which relevance is computed, if no more are asked for
TIMEOUT = 30.0  # seconds
MARKS = ("**", "**")  # around what matches in a snippet: harmless as HTML, and bold in Markdown

_TOOL_ROLES = ("tool", "tool_result")  # as an application says it, and as it is stored
_PAGES = (64, 500, 2_000)  # candidates in the first page, the second, and the others
_PAGE_BYTES = 4_000_000  # of text that is read at once, or one text that is longer
_SATURATION, _LENGTH = 1.2, 0.75  # as in BM25


class _Judge(Protocol):
    """A search query with its filters."""

    def chains(self) -> Sequence[Sequence[str]]:
        """The tokens that the index must have of it, those of each chain side by side."""

    def judge(self, kind: str, given: Sequence[str | None]) -> tokens.Found | None:
        """Whether a row is meant."""


class _Saying:
    """What matches a query."""

    def __init__(self, matcher: tokens.Matcher) -> None:
        self.chains = matcher.chains
        self._find = matcher.find

    def judge(self, kind: str, given: Sequence[str | None]) -> tokens.Found | None:
        return self._find(text_of(kind, given))


class _Calling:
    """What calls a tool."""

    def __init__(self, tool_name: str) -> None:
        self._name = tool_name

    def chains(self) -> Sequence[Sequence[str]]:
        return [[tool(self._name)]]

    def judge(self, kind: str, given: Sequence[str | None]) -> tokens.Found | None:
        if self._name not in tools_of(kind, given):
            return None
        return tokens.Found(tokens.Folded(given[0] or ""), [[(0, 0)]])


class _Ask(NamedTuple):
    """A search, read and checked."""

    wanted: _Judge
    filters: Filters
    kinds: tuple[str, ...]
    marks: tuple[str, str]
    show: Callable[[_Ask, _Row, float | None], Any]  # what a hit looks like
    timer: _Timer


class _Timer:
    """How long a search may take. It does not run while the index is made."""

    def __init__(self, timeout: object) -> None:
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0
        ):
            raise InputError(f"timeout must be a number of seconds, or None for no limit, got {timeout!r:.80}")
        self._seconds = math.inf if timeout is None else timeout
        self._began = math.inf
        self._texts = 0

    def start(self) -> None:
        self._began = time.monotonic()

    def look(self, is_dropped: IsDropped) -> None:
        """Called before each text."""
        if is_dropped():
            raise _Dropped
        if time.monotonic() - self._began >= self._seconds:
            raise SearchTimeout(self._seconds, self._texts)
        self._texts += 1


class _Dropped(Exception):
    """The caller of the search is gone; this is never raised to it."""


class _Row(NamedTuple):
    """A row that matches."""

    kind: str
    candidate: Candidate
    found: tokens.Found


class _Scored(NamedTuple):
    """What is kept of a match while others are looked for."""

    kind: str
    candidate: Candidate
    counts: list[int]
    length: int


async def search(
    store: Runner,
    query: str,
    *,
    user_id: str | None = None,
    session_id: str | None = None,
    role: str | None = None,
    since: Time | None = None,
    until: Time | None = None,
    limit: int = 20,
    offset: int = 0,
    order: SearchOrder = "newest",
    kinds: Sequence[SearchKind] | SearchKind = ("message", "tool_call"),
    marks: tuple[str, str] = MARKS,
    timeout: float | None = TIMEOUT,  # noqa: ASYNC109 - it serves callers without an event loop, too
) -> list[SearchHit]:
    """Messages and tool calls that match a query, each as a dict with a snippet.

    All words of the query must match; `"a phrase"` matches these words in sequence; `-word` and `-"a phrase"` exclude.
    Raises `SearchTimeout` after `timeout` seconds; None is no limit.
    """
    matcher = tokens.parse(query)
    filters = _checked_filters(user_id, session_id, role, since, until)
    asked = _checked_kinds(kinds)
    if role is not None and role not in _TOOL_ROLES:
        asked = tuple(kind for kind in asked if kind != CALL)
    ask = _Ask(_Saying(matcher), filters, asked, _checked_marks(marks), _hit, _Timer(timeout))
    wanted, passed = checked_limit(limit), checked_count("offset", offset)
    checked_choice("order", order, get_args(SearchOrder))
    await keep_up(store)
    if wanted == 0:
        return []
    if order == "newest":
        return await _newest(store, ask, wanted, passed)
    return await _most_relevant(store, ask, wanted, passed)


async def find_messages(
    store: Runner,
    tool_name: str,
    *,
    user_id: str | None = None,
    session_id: str | None = None,
    since: Time | None = None,
    until: Time | None = None,
    limit: int = 20,
    offset: int = 0,
    timeout: float | None = TIMEOUT,  # noqa: ASYNC109 - it serves callers without an event loop, too
) -> list[FoundMessage]:
    """Messages that call a tool, newest first, in the shape of a conversation's history, each with its session."""
    if not isinstance(tool_name, str) or not tool_name:
        raise InputError(f"a tool's name must be a string with at least one character, got {tool_name!r:.80}")
    filters = _checked_filters(user_id, session_id, None, since, until)
    ask = _Ask(_Calling(tool_name), filters, (MESSAGE,), MARKS, _as_said, _Timer(timeout))
    wanted, passed = checked_limit(limit), checked_count("offset", offset)
    await keep_up(store)
    return await _newest(store, ask, wanted, passed) if wanted else []


async def find_keys(store: Runner, query: str, *, namespace: str, session_id: str, limit: int) -> list[int]:
    """The rows of the messages of one thread that match a query, the newest first."""
    filters = Filters(None, session_id, None, None, None, namespace)
    ask = _Ask(_Saying(tokens.parse(query)), filters, (MESSAGE,), MARKS, _key, _Timer(TIMEOUT))
    wanted = checked_limit(limit)
    await keep_up(store)
    return await _newest(store, ask, wanted, 0) if wanted else []


def _key(_: _Ask, row: _Row, __: float | None) -> int:
    return row.candidate.key


def _as_said(_: _Ask, row: _Row, __: float | None) -> FoundMessage:
    """A message as a row of its session's history."""
    found = row.candidate
    row_of_hit = StoredMessage(0, found.id, found.role, row.found.folded.source, found.plain, found.created_at)
    return {"session_id": found.thread_id, **history_row(row_of_hit)}


# --- what was asked ---------------------------------------------------------------------------------------------------


def _checked_filters(user: object, session: object, role: object, since: object, until: object) -> Filters:
    if role is not None and (not isinstance(role, str) or not role):
        raise InputError(f"role must be a text such as 'user' or 'assistant', got {role!r:.80}")
    return Filters(
        None if user is None else checked_id(user, "a user id"),  # type: ignore[arg-type]
        None if session is None else checked_id(session, "a session id"),  # type: ignore[arg-type]
        None if role is None else _TOOL_ROLES if role in _TOOL_ROLES else (column_text(role),),
        _checked_time("since", since),
        _checked_time("until", until),
    )


def _checked_time(name: str, value: object) -> str | None:
    """A time as it is stored. One without a zone is UTC; a day is all of it."""
    if value is None:
        return None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = value.isoformat()
    is_day = isinstance(value, str) and len(value) == len("2026-01-31")
    return clock.stored(f"{value}T23:59:59.999999Z" if is_day and name == "until" else value, name)


def checked_limit(limit: object) -> int:
    if checked_count("limit", limit) > MAX_LIMIT:
        raise InputError(f"limit must be {MAX_LIMIT:,} at most, got {limit}; page with offset=...")
    return int(limit)  # type: ignore[call-overload, no-any-return]


def _checked_kinds(kinds: object) -> tuple[str, ...]:
    given = list(kinds) if isinstance(kinds, Sequence) and not isinstance(kinds, str) else [kinds]
    unknown = [kind for kind in given if not isinstance(kind, str) or kind not in KINDS]
    if unknown or not given:
        raise InputError(f"kinds must be some of {', '.join(KINDS)}, got {kinds!r:.80}")
    return tuple(kind for name, kind in KINDS.items() if name in given)


def _checked_marks(marks: object) -> tuple[str, str]:
    match marks:
        case (str() as start, str() as end):
            return start, end
    raise InputError(f"marks must be two texts, one before and one behind a match, got {marks!r:.80}")


# --- finding ----------------------------------------------------------------------------------------------------------


class _Cursor(NamedTuple):
    """Below which key each kind goes on; None: it is at its end."""

    below: dict[str, int | None]
    pages: int = 0


_Text = tuple[str, Candidate, tuple[str | None, ...]]  # a candidate of a kind, and what its text is made of


class _Page(NamedTuple):
    """What was read at once of each kind, newest first; and below which key there may be more."""

    texts: dict[str, list[_Text]]
    ends: dict[str, int | None]


def _start(ask: _Ask) -> _Cursor:
    ask.timer.start()
    return _Cursor(dict.fromkeys(ask.kinds, 2**62))


async def _newest(store: Runner, ask: _Ask, limit: int, offset: int) -> list[Any]:
    hits: list[Any] = []
    cursor: _Cursor | None = _start(ask)
    while cursor is not None and len(hits) < limit:
        page = await store.read(_read, ask, cursor, _PAGES[min(cursor.pages, 2)])
        found, offset, cursor = await store.compute(
            functools.partial(_next_hits, ask, cursor, page, limit - len(hits), offset)
        )
        hits += found
    return hits


def _next_hits(
    ask: _Ask, cursor: _Cursor, page: _Page, limit: int, offset: int, is_dropped: IsDropped
) -> tuple[list[Any], int, _Cursor | None]:
    hits: list[Any] = []
    below = dict(cursor.below)
    for row in _matching(ask, page, below, is_dropped):
        if offset:
            offset -= 1
            continue
        hits.append(ask.show(ask, row, None))
        if len(hits) == limit:
            return hits, offset, None
    return hits, offset, _following(cursor, below)


def _following(cursor: _Cursor, below: dict[str, int | None]) -> _Cursor | None:
    return _Cursor(below, cursor.pages + 1) if any(key is not None for key in below.values()) else None


def _matching(ask: _Ask, page: _Page, below: dict[str, int | None], is_dropped: IsDropped) -> Iterator[_Row]:
    """The rows of a page that match, newest first. `below` is moved along, and complete when this has ended.

    Two kinds are merged by their times, so it ends where one of them needs its next page.
    """
    # What does not match has no say in the order: whether it is a candidate depends on what is indexed.
    found = {kind: _verified(ask, texts, is_dropped) for kind, texts in page.texts.items()}
    heads = {kind: next(rows, None) for kind, rows in found.items()}
    while True:
        if not any(heads.values()) or any(head is None and page.ends[kind] is not None for kind, head in heads.items()):
            break
        row = max((head for head in heads.values() if head), key=lambda head: (head.candidate.created_at, head.kind))
        kind = row.kind
        below[kind] = row.candidate.key
        yield row
        heads[kind] = next(found[kind], None)
    below.update((kind, page.ends[kind]) for kind, head in heads.items() if head is None)


def _verified(ask: _Ask, texts: Iterable[_Text], is_dropped: IsDropped) -> Iterator[_Row]:
    """Those whose text matches."""
    for kind, candidate, given in texts:
        ask.timer.look(is_dropped)
        found = ask.wanted.judge(kind, given)
        if found is not None:
            yield _Row(kind, candidate, found)


def _read(tx: Tx, ask: _Ask, cursor: _Cursor, limit: int) -> _Page:
    """The next candidates with their texts. One transaction reads both: a key may be given to another row later."""
    page = _Page({}, {})
    for kind, before in cursor.below.items():
        if before is not None:
            rows, end = _candidates(tx, ask, kind, before, limit)
            some = _fitting(rows)
            page.texts[kind] = _with_texts(tx, kind, some)
            page.ends[kind] = end if len(some) == len(rows) else some[-1].key
    return page


def _candidates(tx: Tx, ask: _Ask, kind: str, before: int, limit: int) -> tuple[list[Candidate], int | None]:
    state = queries.state(tx, kind)
    named = candidates.scope_keys(tx, kind, ask.filters)
    if named == []:
        return [], None
    return candidates.page(
        tx,
        kind,
        ask.filters,
        chains=ask.wanted.chains(),
        named=named,
        upto=state.upto if state.tokenizer == tokens.VERSION else None,
        before=before,
        limit=limit,
    )


def _fitting(rows: Sequence[Candidate]) -> Sequence[Candidate]:
    """The first rows, as many as have a few megabytes of text, but at least one."""
    size = 0
    for number, row in enumerate(rows):
        size += row.size
        if number and size > _PAGE_BYTES:
            return rows[:number]
    return rows


def _with_texts(tx: Tx, kind: str, rows: Sequence[Candidate]) -> list[_Text]:
    texts = candidates.texts(tx, kind, [row.key for row in rows]) if rows else {}
    return [(kind, row, texts[row.key]) for row in rows if row.key in texts]


def _hit(ask: _Ask, row: _Row, score: float | None) -> SearchHit:
    _, thread_id, name, role, created_at, tool_name, _, _ = row.candidate
    return {
        "kind": "message" if row.kind == MESSAGE else "tool_call",
        "session_id": thread_id,
        "message_id": name,
        "role": "tool" if role in _TOOL_ROLES else role,
        "content": row.found.folded.source,
        "created_at": created_at,
        "snippet": tokens.snippet(row.found, ask.marks),
        "tool_name": tool_name,
        "score": score,
    }


# --- relevance --------------------------------------------------------------------------------------------------------


async def _most_relevant(store: Runner, ask: _Ask, limit: int, offset: int) -> list[SearchHit]:
    scored: list[_Scored] = []
    cursor: _Cursor | None = _start(ask)
    window = max(WINDOW, offset + limit)
    while cursor is not None and len(scored) < window:
        page = await store.read(_read, ask, cursor, _PAGES[2])
        found, cursor = await store.compute(functools.partial(_next_scored, ask, cursor, page))
        scored += found
    best = (await store.compute(lambda _: _ranked(scored[:window])))[offset : offset + limit]
    hits: list[SearchHit] = []
    while best:
        some = best[: len(_fitting([one.candidate for _, one in best[: _PAGES[1]]]))]
        best = best[len(some) :]
        texts = await store.read(_read_again, ask, [one for _, one in some])
        hits += await store.compute(functools.partial(_shown, ask, texts, some))
    return hits


def _next_scored(
    ask: _Ask, cursor: _Cursor, page: _Page, is_dropped: IsDropped
) -> tuple[list[_Scored], _Cursor | None]:
    below = dict(cursor.below)
    found = [
        _Scored(row.kind, row.candidate, row.found.counts(), len(row.found.folded.text))
        for row in _matching(ask, page, below, is_dropped)
    ]
    return found, _following(cursor, below)


def _ranked(scored: Sequence[_Scored]) -> list[tuple[float, _Scored]]:
    """The best first; of equals, the newest. A term weighs more the rarer it is in what matches."""
    if not scored:
        return []
    total = sum(one.length for one in scored)
    mean = total / len(scored)
    weights = [math.log(1 + total / sum(one.counts[term] for one in scored)) for term in range(len(scored[0].counts))]
    ranked = []
    for one in scored:
        norm = _SATURATION * (1 - _LENGTH + _LENGTH * one.length / mean)
        score = sum(
            weight * count * (_SATURATION + 1) / (count + norm)
            for weight, count in zip(weights, one.counts, strict=True)
        )
        ranked.append((round(score, 6), one))
    return sorted(ranked, key=lambda each: -each[0])  # it is stable: equals stay as they were


def _read_again(tx: Tx, ask: _Ask, found: Sequence[_Scored]) -> list[_Text]:
    """The texts of rows that were read before, as far as those are still there."""
    texts: dict[tuple[str, int], _Text] = {}
    for kind in ask.kinds:
        rows = [one.candidate for one in found if one.kind == kind]
        there = candidates.remaining(tx, kind, ask.filters, rows) if rows else []
        texts |= {(kind, text[1].key): text for text in _with_texts(tx, kind, there)}
    keys = [(one.kind, one.candidate.key) for one in found]
    return [texts[key] for key in keys if key in texts]


def _shown(
    ask: _Ask, texts: Sequence[_Text], best: Sequence[tuple[float, _Scored]], is_dropped: IsDropped
) -> list[SearchHit]:
    scores = {(one.kind, one.candidate.key): score for score, one in best}
    return [ask.show(ask, row, scores[row.kind, row.candidate.key]) for row in _verified(ask, texts, is_dropped)]
