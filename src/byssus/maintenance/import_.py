"""Imports: restore threads and users from the JSON lines of an export.

    await import_from(store, "trip.jsonl")

An import is atomic: its threads appear when the last line was verified. What is imported from a file that is not
trusted is decided in `admission.py`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from byssus.accounts import users
from byssus.errors import ByssusError, InputError
from byssus.maintenance.admission import Admission, Terms, checked_terms, in_words
from byssus.maintenance.export import pages_of
from byssus.maintenance.lines import Incoming
from byssus.queries.moving import exporting, importing
from byssus.queries.moving.importing import Account, Arrival, Arriving
from byssus.queries.versions import deleting
from byssus.store.operations import Runner
from byssus.threads import retention
from byssus.values import clock
from byssus.values.inputs import checked_new_id
from byssus.values.places import looks_like_dsn, redacted

_log = logging.getLogger("byssus.import")

Lines: TypeAlias = str | os.PathLike[str] | Iterable[str | bytes] | AsyncIterable[str | bytes]


class Imported(NamedTuple):
    """The ids of the imported threads, and the number of rows of each kind that were left out."""

    ids: list[str]
    left_out: Counter[str]


async def import_from(
    store: Runner, lines: Lines, as_id: str | None = None, *, user_id: str | None = None, trusted: bool = False
) -> list[str]:
    """Import an export atomically; returns the ids of the threads.

    `lines` is the path of a file, or an iterable of lines. If the export is of one thread, `as_id` gives it another id,
    and its child threads ids that begin with that one.

    Only data is imported: threads with their messages, marks, checkpoints and tool logs. They belong to `user_id`, who
    must exist, or have no user. Answered calls wait for an answer again, open ones count as unknown. Users, tasks,
    usage and queued messages are left out, and a warning says so. With `trusted` everything is restored as it was: use
    it for backups of your own, never for a file from another source.
    """
    imported = await bring(store, lines, checked_terms(as_id, user_id, trusted))
    if what := in_words(imported.left_out):
        hint = "" if trusted else "; pass trusted=True if the file is a backup of your own"
        _log.warning("an import left out: %s%s", what, hint)
    return imported.ids


async def bring(store: Runner, lines: Lines, terms: Terms) -> Imported:
    """Import what was exported, on these terms."""
    await retention.empty_trash(store)  # what an interrupted import has left, too
    token = clock.new_id()
    try:
        return await _import(store, token, lines, terms)
    except BaseException:
        with suppress(ByssusError):  # then the next import does it
            await store.write(deleting.discard_import, token)
            await retention.empty_trash(store)
        raise


async def _import(store: Runner, token: str, lines: Lines, terms: Terms) -> Imported:
    await store.write(importing.begin, token, importing.SECONDS)
    admission, arriving = Admission(terms), Arriving()
    incoming = Incoming(admission)
    async for page in _given(store, lines):
        rows = await store.aside(functools.partial(incoming.take, page))
        arriving = await store.write(importing.add, token, arriving, rows, importing.SECONDS)
    incoming.finish()
    arrivals = list(arriving.whole)
    if terms.as_id is not None:
        arrivals = _renamed(arrivals, terms.as_id)
    account = await store.aside(lambda: _account(incoming)) if admission.makes_users else None
    await store.write(importing.publish, token, arrivals, incoming.forks, account, makes_users=admission.makes_users)
    return Imported([arrival.id for arrival in arrivals], admission.left_out)


def _renamed(arrivals: Sequence[Arrival], as_id: str) -> list[Arrival]:
    """The thread under another id, and its children under ids that begin with that."""
    roots = [arrival for arrival in arrivals if arrival.below is None]
    if len(roots) != 1:
        raise InputError(f"as_id={as_id!r} is a name for one thread, and these are {len(roots)}")
    old = roots[0].id
    names = {
        each.id: as_id + (each.id.removeprefix(old) if each.id.startswith(old) else f".{each.id}") for each in arrivals
    }
    for name in names.values():
        checked_new_id(name)
    return [
        each._replace(id=names[each.id], below=None if each.below is None else names[each.below]) for each in arrivals
    ]


def _account(incoming: Incoming) -> Account | None:
    fields = incoming.account
    if fields is None:
        return None
    leaves = users.leaves(json.loads(fields["preferences"]))
    return Account(incoming.user_id, fields, leaves, incoming.left)


async def _given(store: Runner, lines: Lines) -> AsyncIterator[list[bytes]]:
    """Pages of lines, from wherever they come."""
    if isinstance(lines, str | os.PathLike):
        if looks_like_dsn(os.fspath(lines)):
            raise InputError(f"an import takes the path of a file or lines, got {redacted(os.fspath(lines))!r:.80}")
        with await store.aside(lambda: Path(lines).open("rb")) as file:
            async for some in pages_of(store, file):
                yield some
        return
    page: list[bytes] = []
    size = 0
    async for line in _one_by_one(lines):
        page.append(line)
        size += len(line)
        if len(page) >= exporting.PAGE_ROWS or size >= exporting.PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


async def _one_by_one(lines: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[bytes]:
    if isinstance(lines, AsyncIterable):
        async for line in lines:
            yield _as_bytes(line)
    elif isinstance(lines, Iterable):
        for line in lines:
            yield _as_bytes(line)
    else:
        raise InputError(f"an import takes the path of a file or lines, got {type(lines).__name__}")


def _as_bytes(line: object) -> bytes:
    if isinstance(line, str):
        with suppress(UnicodeEncodeError):  # what cannot be encoded is no JSON of ours: it is refused as such
            return line.encode().removesuffix(b"\n")
        return b"\xff"
    if not isinstance(line, bytes):
        raise InputError(f"a line must be text, got {type(line).__name__}: {line!r:.80}")
    return line.removesuffix(b"\n")
