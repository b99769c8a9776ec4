"""Versions of a thread: checkpoints that point into its log, forks and rewinds.

A put that passes the whole list of messages is compared with the thread, page by page and beside the writer. Then one
transaction adds what is new and the checkpoint; if the thread has moved in between, it is compared again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from byssus.errors import InputError, ThreadMoved
from byssus.messages import decode, dumps
from byssus.queries.log import branches, threads
from byssus.queries.log.leases import Unleased
from byssus.queries.log.threads import MessageRow
from byssus.queries.versions import checkpoints, forks, putting
from byssus.queries.versions.checkpoints import HIGHEST_STEP, Agreement, CheckpointRow, NewCheckpointRow, ThreadState
from byssus.store.database import Store, Tx
from byssus.threads.encoding import PAGE, PLAIN, body_of, checked_id, encode_json, json_row, message_row
from byssus.threads.waiting import retry_while_driven
from byssus.values import clock
from byssus.values.checkpoints import Checkpoint, CheckpointMetadata, Difference, NewCheckpoint, Tree


class _Matched(NamedTuple):
    """How far given messages agree with a thread's, the rest of them, and the thread's version."""

    agreement: Agreement
    tail: list[MessageRow]
    version: int


# --- put and get ------------------------------------------------------------------------------------------------------


async def put(store: Store, checkpoint: Checkpoint, wait: float) -> ThreadState:
    """Store a checkpoint, and of its messages what the thread does not hold yet."""
    new, given = encoded(checkpoint), list(_checked_messages(checkpoint.messages))
    thread_id = checkpoint.metadata.thread_id

    async def attempt(dead_epoch: int) -> ThreadState:
        while True:
            matched = await _match(store, thread_id, given)
            try:
                return await store.write(
                    putting.put,
                    thread_id,
                    new,
                    matched.tail,
                    matched.agreement,
                    left=left_behind(f"where the thread stood before {new.id!r} was put"),
                    by=Unleased(dead_epoch),
                    expect=matched.version,
                )
            except ThreadMoved:
                continue  # each time, somebody else has come forward

    return await retry_while_driven(attempt, wait)


async def _match(store: Store, thread_id: str, given: Sequence[Any]) -> _Matched:
    """Compare messages with a thread's, beside the event loop."""
    thread = await store.read(checkpoints.thread_state, thread_id)
    if thread is None:
        return _Matched(Agreement(0, 0, True), await store.aside(lambda: _stored_from(given, 0)), 0)
    seq = count = 0
    while True:
        same, page = await store.read(_compare, thread, given, count, seq)
        if same:
            seq, count = page[same - 1], count + same
        if same < len(page) or len(page) < PAGE:
            break
    is_end = same == len(page)
    tail = await store.aside(lambda: _stored_from(given, count))
    return _Matched(Agreement(seq, count, is_end), tail, thread.version)


def _compare(tx: Tx, thread: ThreadState, given: Sequence[Any], start: int, after: int) -> tuple[int, list[int]]:
    """How many of a page's messages are the given ones; and the page's seqs."""
    page = threads.page_as_given(tx, thread.branch, after=after, upto=thread.head, limit=PAGE)
    same = 0
    for value, (_, body, plain) in zip(given[start : start + len(page)], page, strict=False):
        given_body, given_plain = _body_at(value, start + same)
        if given_plain != plain or not _is_same(given_body, body):
            break
        same += 1
    return same, [seq for seq, _, _ in page]


def _stored_from(given: Sequence[Any], start: int) -> list[MessageRow]:
    return [_stored_at(value, position) for position, value in enumerate(given[start:], start)]


def _stored_at(value: Any, position: int) -> MessageRow:
    try:
        return json_row(value) if isinstance(value, PLAIN) else message_row(value)
    except InputError as error:
        raise InputError(f"messages[{position}]: {error}") from error


def _body_at(value: Any, position: int) -> tuple[str, int]:
    """As much of it as a comparison needs: most of a list is there already, and is not to be stored again."""
    try:
        return body_of(value)
    except InputError as error:
        raise InputError(f"messages[{position}]: {error}") from error


def _is_same(a: str, b: str) -> bool:
    """Whether two JSON texts are the same value. The order of keys does not matter; 1 and 1.0 and true differ."""
    return a == b or _sorted(a) == _sorted(b)


def _sorted(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True)


async def get(store: Store, thread_id: str, checkpoint_id: str | None) -> Checkpoint | None:
    """A checkpoint of a thread, or its latest one, with all its messages."""
    while (found := await store.read(checkpoints.get, thread_id, checkpoint_id)) is not None:
        row, body = found
        messages: list[Any] = []
        after, is_whole = 0, False
        while not is_whole:
            page = await store.read(_values, row.branch, after=after, upto=row.seq)
            messages += [value for _, value in page]
            is_whole = len(page) < PAGE
            after = page[-1][0] if page else after
        # Between two reads the checkpoint may have been deleted, and what it needed with it.
        if await store.read(checkpoints.is_there, row):
            state = json.loads(body)
            return Checkpoint(
                metadata_of(thread_id, row),
                messages,
                state.get("state", {}),
                state.get("tools_result", {}),
                state.get("next_node"),
            )
    return None


def _values(tx: Tx, branch: int, *, after: int, upto: int) -> list[tuple[int, Any]]:
    rows = threads.page_as_given(tx, branch, after=after, upto=upto, limit=PAGE)
    return [(seq, json.loads(body) if plain else decode(body)) for seq, body, plain in rows]


# --- checkpoints as rows ----------------------------------------------------------------------------------------------


def encoded(checkpoint: Checkpoint) -> NewCheckpointRow:
    """A checkpoint as the store takes it, without its messages."""
    if not isinstance(checkpoint, Checkpoint) or not isinstance(checkpoint.metadata, CheckpointMetadata):
        raise InputError(f"put takes a Checkpoint(metadata=CheckpointMetadata(...), ...), got {checkpoint!r:.80}")
    about = checkpoint.metadata
    checked_id(about.thread_id)
    if about.parent_checkpoint_id is not None:
        checked_id(about.parent_checkpoint_id, "a parent_checkpoint_id")
    if isinstance(about.step, bool) or not isinstance(about.step, int) or not 0 <= about.step <= HIGHEST_STEP:
        raise InputError(f"a step must be a whole number from 0 to 2**53 - 1, got {about.step!r:.80}")
    if not isinstance(about.created_at, datetime) or about.created_at.tzinfo is None:
        raise InputError(f"created_at must be a datetime with a time zone, got {about.created_at!r:.80}")
    return NewCheckpointRow(
        checked_checkpoint_id(about.checkpoint_id),
        about.step,
        about.parent_checkpoint_id,
        encoded_about(about.tags, about.summary),
        encoded_body(checkpoint.state, checkpoint.tools_result, checkpoint.next_node),
        about.created_at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z",
    )


def encoded_about(tags: Sequence[str], summary: str | None) -> str:
    if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) for tag in tags):
        raise InputError(f"tags must be a list of strings, got {tags!r:.80}")
    if not isinstance(summary, str | None):
        raise InputError(f"summary must be a string, got {summary!r:.80}")
    return dumps({"tags": list(tags), "summary": summary})


def encoded_body(state: Any, tools_result: Any, next_node: str | None) -> str:
    if not isinstance(next_node, str | None):
        raise InputError(f"next_node must be a string or None, got {next_node!r:.80}")
    parts = {"state": encode_json("state", state), "tools_result": encode_json("tools_result", tools_result)}
    if next_node is not None:
        parts["next_node"] = dumps(next_node)
    # An empty one is what an absent one means.
    return "{" + ",".join(f'"{name}":{text}' for name, text in parts.items() if text != "{}") + "}"


def encoded_checkpoint(checkpoint: NewCheckpoint) -> NewCheckpointRow:
    """A checkpoint that an agent makes, as the store takes it; its step and its parent, the thread knows."""
    return NewCheckpointRow(
        checkpoint.id,
        0,
        None,
        encoded_about(checkpoint.tags, checkpoint.summary),
        encoded_body(checkpoint.state, {}, None),
    )


def left_behind(summary: str) -> NewCheckpointRow:
    """A checkpoint for what a thread leaves."""
    return NewCheckpointRow(clock.new_id(), 0, None, encoded_about(["left"], summary), "{}")


def metadata_of(thread_id: str, row: CheckpointRow) -> CheckpointMetadata:
    about = json.loads(row.about)
    made = datetime.fromisoformat(row.created_at)
    return CheckpointMetadata(thread_id, row.id, row.step, row.parent, made, about["tags"], about["summary"])


def list_page(tx: Tx, thread_id: str, *, limit: int, offset: int) -> list[CheckpointMetadata]:
    """A list of a thread's checkpoints, made on a reader's thread: it may be long."""
    return [metadata_of(thread_id, row) for row in checkpoints.list_page(tx, thread_id, limit=limit, offset=offset)]


def recent(tx: Tx, *, limit: int, offset: int) -> list[CheckpointMetadata]:
    """The same of the threads' latest ones."""
    return [metadata_of(name, row) for name, row in checkpoints.recent(tx, limit=limit, offset=offset)]


def checked_checkpoint_id(checkpoint_id: object) -> str:
    return checked_id(checkpoint_id, "a checkpoint id")  # type: ignore[arg-type]


def _checked_messages(messages: object) -> Sequence[Any]:
    if not isinstance(messages, list | tuple):
        raise InputError(f"messages must be a list, got {type(messages).__name__}: {messages!r:.80}")
    return messages


# --- forks, trees and differences -------------------------------------------------------------------------------------


def checked_at(at: object, what: str) -> str | int:
    """A point of a thread as callers name it: a checkpoint, its metadata or its id, or a seq."""
    if isinstance(at, Checkpoint):
        at = at.metadata
    if isinstance(at, CheckpointMetadata):
        at = at.checkpoint_id
    if isinstance(at, str):
        return checked_checkpoint_id(at)
    if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= HIGHEST_STEP:
        raise InputError(f"{what} must be a checkpoint, its id, or a seq from 0 up, got {at!r:.80}")
    return at


async def tree(store: Store, thread_id: str) -> Tree | None:
    """A thread and all that was forked from it. However deep, it is walked without recursion."""
    bare: dict[str, tuple[Tree, list[str]]] = {}
    waiting = [thread_id]
    while waiting:
        name = waiting.pop()
        found = await store.read(_bare_tree, name)
        if found is not None:
            bare[name] = found
            waiting += [fork for fork in found[1] if fork not in bare]
    trees: dict[str, Tree] = {}
    for name, (tree, names) in reversed(bare.items()):  # a fork is found after the thread that it was forked from
        trees[name] = tree._replace(forks=[trees[fork] for fork in names if fork in trees])
    return trees.get(thread_id)


def _bare_tree(tx: Tx, name: str) -> tuple[Tree, list[str]] | None:
    """A thread as a tree shows it, without its forks; and their ids."""
    node = forks.node(tx, name)
    if node is None:
        return None
    shown, left = ([metadata_of(name, row) for row in reversed(rows)] for rows in (node.shown, node.left))
    return Tree(name, node.thread.message_count, node.origin, node.origin_seq, shown, left, []), node.forks


async def diff(store: Store, a: str, b: str) -> Difference:
    """Where two threads part. What they share is skipped; behind that, they may still say the same."""
    one, other, seq = await store.read(forks.shared, a, b)
    shared = await store.read(_count, one, seq)
    after = [seq, seq]
    while True:
        pages = [
            await store.read(_bodies, thread.branch, after=start, upto=thread.head)
            for thread, start in zip((one, other), after, strict=True)
        ]
        same = _same_at_the_start(*pages)
        if same:
            seq, shared = pages[0][same - 1][0], shared + same
            after = [page[same - 1][0] for page in pages]
        if same < PAGE:
            return Difference(seq, shared, one.message_count - shared, other.message_count - shared)


def _same_at_the_start(a: list[tuple[int, str]], b: list[tuple[int, str]]) -> int:
    for position, ((_, one), (_, other)) in enumerate(zip(a, b, strict=False)):
        if not _is_same(one, other):
            return position
    return min(len(a), len(b))


def _bodies(tx: Tx, branch: int, *, after: int, upto: int) -> list[tuple[int, str]]:
    return threads.page(tx, branch, after=after, upto=upto, limit=PAGE)


def _count(tx: Tx, thread: ThreadState, seq: int) -> int:
    return branches.count(tx, thread.branch, seq)
