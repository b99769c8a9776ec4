"""Repairs: rebuild derived data that a check has found wrong.

Derived data are counters, the latest checkpoint, usage, the leaves of preferences and the search index; nothing else is
changed. A repair counts again while it holds the lock of the thread's row, and then checks everything once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from byssus.accounts.rows import RepairResult
from byssus.maintenance.check import Problem, count_calls, count_messages, find_problems, leaves_of
from byssus.queries.accounts import usage
from byssus.queries.moving import checks
from byssus.queries.versions import checkpoints
from byssus.search import search
from byssus.store.database import Tx
from byssus.store.operations import Runner


async def repair(store: Runner) -> RepairResult:
    """Rebuild derived data that is wrong; returns what was repaired, and what is still wrong."""
    problems, _ = await find_problems(store, deep=True)
    done: list[Problem] = []
    by_thread: dict[int, list[Problem]] = {}
    for problem in problems:
        if problem.what in _REPAIRS and problem.repairable:
            by_thread.setdefault(problem.key, []).append(problem)
    for thread, several in by_thread.items():  # the id comes first: that keeps it in order with the thread's writes
        if await store.write(_repair_thread, several[0].id, thread, [problem.what for problem in several]):
            done += several
    for problem in problems:
        is_repairable = problem.what == "preferences" and problem.repairable
        if is_repairable and await store.write(_repair_leaves, problem.id, problem.key):
            done.append(problem)
    of_index = [problem for problem in problems if problem.what == "index"]
    if of_index:
        await search.reindex(store)
        done += of_index
    left, checked = await find_problems(store, deep=True)
    return {
        "ok": not left,
        "repaired": [problem.as_dict() for problem in done],
        "problems": [problem.as_dict() for problem in left],
        "checked": checked,
    }


def _repair_thread(tx: Tx, _: str, thread: int, kinds: Sequence[str]) -> bool:
    """Put right what is wrong with a thread; False if it is gone."""
    if not checks.hold(tx, thread):
        return False
    for kind in dict.fromkeys(kinds):
        _REPAIRS[kind](tx, thread)
    return True


def _repair_usage(tx: Tx, thread: int) -> None:
    if checks.is_countable(tx, thread):  # something may have been removed since it was checked
        counts, _, _ = count_messages(tx, thread, "")
        usage.set_counted(tx, thread, [(day, number, spent) for (day, _), (number, spent) in sorted(counts.items())])


def _repair_calls(tx: Tx, thread: int) -> None:
    if not checks.is_countable(tx, thread):
        return
    kept = {(row[0], row[1], row[2]): row[3] for row in checks.counted_calls(tx, thread)}
    rows = []
    for place, (calls, failures, total, doubtful) in sorted(count_calls(tx, thread).items()):
        more = min(max(kept.get(place, 0) - calls, 0), doubtful)
        rows.append((*place, calls + more, failures + more, total))
    checks.set_counted_calls(tx, thread, [row for row in rows if row[3]])


def _repair_leaves(tx: Tx, _: str, user: int) -> bool:
    preferences = checks.held_preferences(tx, user)
    found = None if preferences is None else leaves_of(preferences)
    if found is None:
        return False
    checks.set_leaves(tx, user, found)
    return True


_REPAIRS: dict[str, Callable[[Tx, int], None]] = {
    "message_count": checks.set_message_count,
    "head": checks.raise_head,
    "latest": checkpoints.show_latest,
    "named": checks.unname,
    "usage": _repair_usage,
    "tool_usage": _repair_calls,
}
