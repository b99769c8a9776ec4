"""Runs as rows: the runs of a thread, one run, and the attempts of processes to drive it.

The rows are written by the run itself (`queries/log/runs.py`). Here they are read, and the state of a run is decided as
that of a thread is (`threads/listing.py`): by its lease, and by whether the lease's owner still lives.
"""

from __future__ import annotations

from typing import cast

from byssus.errors import InputError, NotFound
from byssus.messages import Message, decode
from byssus.queries.log import listing, runs
from byssus.queries.log.runs import RunRow
from byssus.store.operations import Runner
from byssus.threads.encoding import PAGE
from byssus.threads.waiting import lease_is_dead
from byssus.values.inputs import ThreadId, checked_count, checked_thread, readable_id
from byssus.values.results import RunAttempt, RunInfo, RunState, StopReason
from byssus.values.thread_key import ThreadKey

_FIRST = 2**62  # above any key


async def list_runs(
    store: Runner, thread_id: ThreadId | None = None, limit: int = 50, before: RunInfo | str | None = None
) -> list[RunInfo]:
    """Runs of a thread, or of all threads, newest first. For the next page, pass the last run of a page as `before`.

    An unknown thread has none.
    """
    thread_key = None if thread_id is None else checked_thread(thread_id)
    start = await _start(store, before)
    rows = await store.read(runs.page, thread_key, before=start, limit=checked_count("limit", limit))
    return [await _info_of(store, row) for row in rows]


async def _start(store: Runner, before: RunInfo | str | None) -> int:
    if before is None:
        return _FIRST
    if not isinstance(before, RunInfo | str):
        raise InputError(f"before must be a RunInfo from an earlier list, or a run id; got {before!r:.80}")
    name = before if isinstance(before, str) else before.id
    row = await found(store, name)
    if row is None:
        raise NotFound(f"there is no run {name!r:.80} to list the ones before")
    return row.key


async def run(store: Runner, run_id: str, thread_id: ThreadId | None = None) -> RunInfo | None:
    """A run by its id; None for an unknown id.

    If a thread was imported twice, its runs exist twice: `thread_id` selects one of them.
    """
    row = await found(store, run_id, thread_id)
    return None if row is None else await _info_of(store, row)


async def run_attempts(store: Runner, run_id: str, thread_id: ThreadId | None = None) -> list[RunAttempt]:
    """The attempts of processes to drive a run, in order; [] for an unknown id."""
    row = await found(store, run_id, thread_id)
    rows = [] if row is None else await store.read(runs.attempts, row.key)
    return [RunAttempt(*attempt) for attempt in rows]


async def found(store: Runner, run_id: str, thread_id: ThreadId | None = None) -> RunRow | None:
    """The row of a run, if there is such a one."""
    name = readable_id(run_id, "a run id")
    thread_key = None if thread_id is None else checked_thread(thread_id)
    return None if name is None else await store.read(runs.find, name, thread_key)


async def messages(store: Runner, row: RunRow) -> list[Message]:
    """The messages of a run, in order; those of a run that has not ended up to the end of the log."""
    read, after = list[Message](), 0
    while page := await store.read(runs.messages, row, after=after, limit=PAGE):
        read += [decode(logged.body) for logged in page]
        after = page[-1].seq
    return read


async def _info_of(store: Runner, row: RunRow) -> RunInfo:
    """A run as it was read just now."""
    stop_reason = cast("StopReason | None", row.stop_reason)
    return RunInfo(
        row.id,
        row.thread_id,
        row.namespace,
        await _state_of(store, row),
        *(row.branch, row.first_seq, row.last_seq, row.began_at, row.ended_at, stop_reason, row.error),
        *(row.cause, row.started_by, row.request_key, row.attempts, row.retries),
    )


async def _state_of(store: Runner, row: RunRow) -> RunState:
    if row.ended_at is not None:
        return "ended"
    if row.owner is not None and not lease_is_dead(store, row.owner, row.until):
        return "running"
    if row.stop_reason != "waiting":
        return "interrupted"
    facts = await store.read(listing.facts, ThreadKey(row.namespace, row.thread_id))
    return "waiting" if facts is not None and facts.is_waiting else "interrupted"  # all answered: it can go on
