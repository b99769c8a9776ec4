"""Checks: verify that a database is consistent.

- A check writes nothing. Each problem has a kind (`what`), a place (`where`), a sentence, and says whether a repair can
  fix it.
- Each thread is read in one snapshot, so that concurrent writes are not reported as problems.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from byssus.accounts.rows import CheckResult, ProblemRow
from byssus.accounts.users import leaves
from byssus.errors import StoreCorrupt
from byssus.messages import Note, decode
from byssus.queries.accounts import usage
from byssus.queries.accounts.usage import Spent
from byssus.queries.log.threads import END
from byssus.queries.moving import checks
from byssus.queries.moving.checks import BranchFacts, CheckpointFacts, MarkFacts, Shown, ThreadFacts, UserFacts
from byssus.queries.search import kinds
from byssus.search import tokens
from byssus.store.database import Tx
from byssus.store.jobs import takes_long
from byssus.store.operations import Runner
from byssus.threads.encoding import spent_by
from byssus.values.thread_key import LONGEST_ID

_ALONG = ("message_count", "head")  # what is counted along the pieces of a branch
_PAGE = 200  # threads, checkpoints, messages in one query


class Problem(NamedTuple):
    """Something that is wrong. `key` and `id` are of the thread or the user that a repair looks at."""

    what: str
    where: str
    detail: str
    repairable: bool = False
    key: int = 0
    id: str = ""

    def as_dict(self) -> ProblemRow:
        return {"what": self.what, "where": self.where, "detail": self.detail, "repairable": self.repairable}


async def check(store: Runner, *, deep: bool = True) -> CheckResult:
    """Verify the database; returns the problems that were found.

    Without `deep`, messages are counted but not read, and the files and the search index are not checked.
    """
    problems, checked = await find_problems(store, deep=deep)
    return {"ok": not problems, "problems": [problem.as_dict() for problem in problems], "checked": checked}


async def recount(store: Runner) -> CheckResult:
    """Count messages, usage and tool calls again, and report where the stored sums differ."""
    problems, checked = await _check_contents(store)
    found = [problem for problem in problems if problem.what in ("usage", "tool_usage")]
    return {"ok": not found, "problems": [problem.as_dict() for problem in found], "checked": checked}


async def find_problems(store: Runner, *, deep: bool) -> tuple[list[Problem], dict[str, int]]:
    problems: list[Problem] = []
    checked: dict[str, int] = {}
    try:
        if deep:
            problems += [Problem("file", store.name, text) for text in await store.aside(store.base.integrity)]
        if not problems:  # else nothing that is read can be trusted
            problems += await _check_rows(store, checked, deep=deep)
    except StoreCorrupt as error:
        problems.append(Problem("file", store.name, str(error)))
    return _mark_unrepairable(problems), checked


async def _check_rows(store: Runner, checked: dict[str, int], *, deep: bool) -> list[Problem]:
    problems = await store.read(_references) + await store.read(_ids)
    found, counts = await _check_threads(store)
    problems += found
    checked |= counts
    for name, (look, start, judge) in _PAGED.items():
        found, checked[name] = await _paged(store, look, start, judge)
        problems += found
    if deep:
        found, counts = await _check_contents(store)
        problems += found + await _check_index(store)
        checked |= counts
    return problems


def _mark_unrepairable(problems: list[Problem]) -> list[Problem]:
    """A counter along segments that are wrong cannot be counted again."""
    broken = {problem.key for problem in problems if problem.what == "segments"}
    return [
        problem._replace(repairable=False) if problem.what in _ALONG and problem.key in broken else problem
        for problem in problems
    ]


@takes_long
def _references(tx: Tx) -> list[Problem]:
    return [
        Problem("reference", table, f"row {key} of {table} has {column} {value}, and {parent} has no row {value}")
        for table, key, column, value, parent in checks.dangling(tx)
    ]


@takes_long
def _ids(tx: Tx) -> list[Problem]:
    return [
        Problem(
            "id",
            table,
            f"the {column} {begins!r}... of a row of {table} has {size:,} bytes of UTF-8, and can have {LONGEST_ID:,}; "
            "no Postgres can take a copy of it: fork a thread under a shorter id, then delete this one",
        )
        for table, column, begins, size in checks.long_ids(tx)
    ]


async def _paged(
    store: Runner,
    look: Callable[[Tx, Any, int], Sequence[Any]],
    after: Any,
    judge: Callable[[Sequence[Any]], Iterator[Problem]],
) -> tuple[list[Problem], int]:
    """Look at all rows of a kind, a page at a time."""
    problems: list[Problem] = []
    count = 0
    while page := await store.read(look, after, _PAGE):
        problems += judge(page)
        count += len(page)
        after = page[-1].place
    return problems, count


# --- threads ----------------------------------------------------------------------------------------------------------


async def _check_threads(store: Runner) -> tuple[list[Problem], dict[str, int]]:
    problems: list[Problem] = []
    count = uncounted = after = 0
    while page := await store.read(checks.threads, after, _PAGE):
        for thread, latest in page:
            problems += _judge_thread(thread, latest)
        count += len(page)
        uncounted += sum(not thread.is_countable for thread, _ in page)
        after = page[-1][0].key
    return problems, {"threads": count, "uncounted": uncounted}


def _judge_thread(thread: ThreadFacts, latest: Shown) -> Iterator[Problem]:
    where, key = _name(thread.namespace, thread.id), thread.key
    if thread.thread_of_branch != key:
        detail = f"{where} is on branch {thread.branch}, which {_belongs(thread.thread_of_branch)}"
        yield Problem("branch", where, detail)
        return  # nothing can be counted along it
    if thread.line and thread.thread_of_line != key:
        yield Problem("branch", where, f"{where} is on line {thread.line}, which {_belongs(thread.thread_of_line)}")
    if thread.message_count != thread.messages:
        detail = f"{where} says that it has {thread.message_count} messages, and {thread.messages} can be read"
        yield Problem("message_count", where, detail, True, key, thread.id)
    if thread.highest is not None and thread.head < thread.highest:
        detail = f"the head of {where} is {thread.head}, below its last message at {thread.highest}"
        yield Problem("head", where, detail, True, key, thread.id)
    if (thread.latest, thread.latest_at) != latest:
        detail = f"the latest checkpoint of {where} is row {latest.key} of {latest.at}, and row {thread.latest} of"
        yield Problem("latest", where, f"{detail} {thread.latest_at} is kept as that", True, key, thread.id)
    if thread.is_misnamed:
        detail = f"messages of {where} are looked for in an index by their ids, and not all of them are in it"
        yield Problem("named", where, detail, True, key, thread.id)


def _belongs(thread: int | None) -> str:
    return "does not exist" if thread is None else f"belongs to the thread with key {thread}"


def _name(namespace: str, thread_id: str) -> str:
    return f"thread {thread_id!r}" + (f" of {namespace!r}" if namespace else "")


def _judge_branches(page: Sequence[BranchFacts]) -> Iterator[Problem]:
    for branch in page:
        where = f"branch {branch.key}" + (f" of thread {branch.thread_id!r}" if branch.thread is not None else "")
        before = 0
        for source, after, upto in branch.segments:
            piece = f"{where} reads branch {source} after {after} and up to {upto}"
            if after >= upto:
                yield Problem("segments", where, f"{piece}: that is nothing", key=branch.thread or 0)
            elif after < before:
                detail = f"{piece}, and another one up to {before}: they overlap"
                yield Problem("segments", where, detail, key=branch.thread or 0)
            before = max(before, upto)
        last = branch.segments[-1] if branch.segments else None
        if branch.thread is not None and (last is None or (last.source, last.upto) != (branch.key, END)):
            detail = f"{where} does not end with a piece of its own, so what is written there cannot be read"
            yield Problem("segments", where, detail, key=branch.thread)


def _judge_checkpoints(page: Sequence[CheckpointFacts]) -> Iterator[Problem]:
    count, branch = 0, None
    for point in page:
        count = point.messages + (count if point.branch == branch and point.before is not None else 0)
        branch = point.branch
        if point.message_count != count:
            where = f"checkpoint {point.id!r}"
            detail = (
                f"{where} (row {point.key}) is of {point.message_count} messages, and {count} can be read on branch"
            )
            yield Problem("checkpoint", where, f"{detail} {point.branch} up to {point.seq}")


def _judge_marks(page: Sequence[MarkFacts]) -> Iterator[Problem]:
    for mark in page:
        if not mark.is_read:
            detail = (
                f"mark {mark.mark!r:.80} (row {mark.key}) is on message {mark.message}, which is not read along branch"
            )
            yield Problem("mark", f"branch {mark.branch}", f"{detail} {mark.branch}, to which the mark belongs")


# --- what threads hold ------------------------------------------------------------------------------------------------


class _Contents(NamedTuple):
    """What was read of a thread: how many messages, and what is wrong with them and with what is counted of them."""

    messages: int
    problems: list[Problem]


async def _check_contents(store: Runner) -> tuple[list[Problem], dict[str, int]]:
    """Read every message."""
    problems: list[Problem] = []
    threads = messages = uncounted = after = 0
    while page := await store.read(checks.threads, after, _PAGE):
        for thread, _ in page:
            where = _name(thread.namespace, thread.id)
            try:
                contents = await store.read(_look_into, thread.key, where)
            except StoreCorrupt as error:
                contents = _Contents(0, [Problem("message", where, f"{where} cannot be read: {error}")])
            problems += [problem._replace(id=thread.id) for problem in contents.problems]
            messages += contents.messages
        threads += len(page)
        uncounted += sum(not thread.is_countable for thread, _ in page)
        after = page[-1][0].key
    return problems, {"threads": threads, "uncounted": uncounted, "messages": messages}


_Counts = dict[tuple[str, str], tuple[int, Spent]]  # by day and model


def _look_into(tx: Tx, thread: int, where: str) -> _Contents:
    counts, messages, problems = count_messages(tx, thread, where)
    # What an unreadable message has cost, only the sums know.
    if not problems and checks.is_there(tx, thread) and checks.is_countable(tx, thread):
        problems += _judge_usage(tx, thread, where, counts)
        problems += _judge_calls(tx, thread, where)
    return _Contents(messages, problems)


def count_messages(tx: Tx, thread: int, where: str) -> tuple[_Counts, int, list[Problem]]:
    """What the messages of a thread say that was spent."""
    counts: _Counts = {}
    problems: list[Problem] = []
    after = messages = 0
    while page := usage.written(tx, thread, after, _PAGE):
        for key, day, body, plain in page:
            spent = None
            try:
                message = decode(body)
                spent = spent_by(message) if plain or not isinstance(message, Note) else None
            except StoreCorrupt:
                detail = f"message {key} of {where} is no JSON: {body[:60]!r}"
                problems.append(Problem("message", where, detail))
            known, total = counts.get((day, spent.model if spent else ""), (0, Spent(spent.model if spent else "")))
            counts[day, total.model] = (known + 1, total + spent if spent else total)
        messages += len(page)
        after = page[-1][0]
    return counts, messages, problems


def _judge_usage(tx: Tx, thread: int, where: str, counts: _Counts) -> Iterator[Problem]:
    kept = {(day, model): (number, Spent(model, *sums)) for day, model, number, *sums in usage.counted(tx, thread)}
    for day, model in sorted(kept.keys() | counts.keys()):
        ours, theirs = kept.get((day, model), (0, Spent(model))), counts.get((day, model), (0, Spent(model)))
        if ours[0] != theirs[0] or ours[1][:-1] != theirs[1][:-1] or not _same(ours[1].cost, theirs[1].cost):
            detail = f"on {day}, with model {model!r}, {_spent(*ours)} are kept for {where}, and its messages say"
            yield Problem("usage", where, f"{detail} {_spent(*theirs)}", True, thread)


def _spent(messages: int, spent: Spent) -> str:
    parts = f"{spent.input} in, {spent.output} out, {spent.cache_read} and {spent.cache_write} cached"
    return f"{messages} messages and {spent.tokens} tokens ({parts}) for {spent.cost:.6g}"


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


class _Calls(NamedTuple):
    """Calls of a day, a tool and a bucket."""

    calls: int = 0
    failures: int = 0
    total_ms: float = 0.0
    doubtful: int = 0  # calls that ended when the thread went elsewhere: these may have been counted or not


_CallCounts = dict[tuple[str, str, int], _Calls]


def count_calls(tx: Tx, thread: int) -> _CallCounts:
    counts: _CallCounts = {}
    after = 0
    while page := checks.ended_calls(tx, thread, after, _PAGE):
        for _, day, name, status, elapsed in page:
            place = (day, name, usage.bucket_of(elapsed))
            calls, failures, total, doubtful = counts.get(place, _Calls())
            if status == "unknown" and elapsed is None:
                counts[place] = _Calls(calls, failures, total, doubtful + 1)
            else:
                failed = int(status != "done")
                counts[place] = _Calls(calls + 1, failures + failed, total + (elapsed or 0.0), doubtful)
        after = page[-1][0]
    return counts


def _judge_calls(tx: Tx, thread: int, where: str) -> Iterator[Problem]:
    counts = count_calls(tx, thread)
    kept = {(row[0], row[1], row[2]): _Calls(*row[3:]) for row in checks.counted_calls(tx, thread)}
    for day, name, bucket in sorted(kept.keys() | counts.keys()):
        ours, theirs = kept.get((day, name, bucket), _Calls()), counts.get((day, name, bucket), _Calls())
        more = ours.calls - theirs.calls
        is_right = 0 <= more <= theirs.doubtful and ours.failures - theirs.failures == more
        if not is_right or not _same(ours.total_ms, theirs.total_ms):
            detail = f"on {day}, {_called(ours)} of {name!r} are kept for {where} (bucket {bucket}), and its ledger has"
            yield Problem("tool_usage", where, f"{detail} {_called(theirs)}", True, thread)


def _called(calls: _Calls) -> str:
    return f"{calls.calls} calls, {calls.failures} of which failed, in {calls.total_ms:.6g} ms"


# --- users and the index ----------------------------------------------------------------------------------------------


def _judge_users(page: Sequence[UserFacts]) -> Iterator[Problem]:
    for user in page:
        where = f"user {user.id!r}"
        if user.quota_used < 0:
            detail = f"{where} has used {user.quota_used} tokens; update_user({user.id!r}, quota_used=...) sets it"
            yield Problem("quota", where, detail)
        expected = leaves_of(user.preferences)
        if expected is None:
            yield Problem("preferences", where, f"the preferences of {where} are no JSON: {user.preferences[:60]!r}")
        elif sorted(expected) != sorted(user.leaves):
            detail = f"{where} is found by {len(user.leaves)} preferences, and has {len(expected)}"
            if len(expected) == len(user.leaves):
                detail = f"{where} is found by other preferences than it has"
            yield Problem("preferences", where, detail, True, user.key, user.id)


def leaves_of(preferences: str) -> list[tuple[str, str]] | None:
    try:
        value = json.loads(preferences)
    except (ValueError, RecursionError):
        return None
    return leaves(value) if isinstance(value, dict) else None


async def _check_index(store: Runner) -> list[Problem]:
    problems: list[Problem] = []
    for kind, (name, table, *_) in kinds.KINDS.items():
        facts = await store.read(checks.index, tokens.VERSION, kind)
        if facts is None:
            continue
        if facts.missing:
            some = ", ".join(map(str, facts.missing[:5]))
            detail = f"rows of {table} are not in the index for search, which should have them: {some}"
            problems.append(Problem("index", name, detail, True))
        if facts.surplus:
            some = ", ".join(map(str, facts.surplus[:5]))
            problems.append(Problem("index", name, f"the index for search has rows that {table} has not: {some}", True))
    return problems


_PAGED: dict[str, tuple[Callable[..., Any], Any, Callable[..., Iterator[Problem]]]] = {
    "branches": (checks.branches, 0, _judge_branches),
    "checkpoints": (checks.checkpoints_by_branch, (0, 0, 0), _judge_checkpoints),
    "marks": (checks.marks, 0, _judge_marks),
    "users": (checks.users, 0, _judge_users),
}
