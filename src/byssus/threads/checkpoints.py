"""Checkpoints of a thread: points of its log, with a state.

A put that passes the whole list of messages is compared with the thread, page by page and beside the writer. Then one
transaction adds what is new and the checkpoint; if the thread has moved in between, it is compared again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from byssus.errors import InputError, ThreadMoved
from byssus.messages import AssistantMessage, decode, dumps
from byssus.queries.log import threads
from byssus.queries.log.leases import Unleased
from byssus.queries.log.threads import MessageRow
from byssus.queries.versions import checkpoints, putting
from byssus.queries.versions.checkpoints import HIGHEST_STEP, Agreement, CheckpointRow, NewCheckpointRow, ThreadState
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.threads import retention
from byssus.threads.encoding import PAGE, PLAIN, body_of, encode_json, json_row, message_row
from byssus.threads.waiting import retry_while_driven
from byssus.values import clock
from byssus.values.checkpoints import Checkpoint, CheckpointMetadata, NewCheckpoint
from byssus.values.inputs import (
    ThreadId,
    checked_count,
    checked_id,
    checked_new_id,
    checked_new_thread,
    checked_thread,
    checked_wait,
    refuse_long_id,
)
from byssus.values.thread_key import ThreadKey

TURN = "turn"  # the tag of the checkpoints that agents make by themselves
_FEW = 32  # rows a read, where the first ones nearly always suffice


class _Matched(NamedTuple):
    """How far given messages agree with a thread's, the rest of them, and the thread's version."""

    agreement: Agreement
    tail: list[MessageRow]
    version: int


# --- put and get ------------------------------------------------------------------------------------------------------


async def put(store: Runner, checkpoint: Checkpoint, *, wait: float = 0) -> str:
    """Store a checkpoint and those of its messages that the thread does not have yet; returns its id.

    Messages that continue the thread are appended to it. Messages that differ become a branch, and the thread switches
    to it unless it has a checkpoint with a higher step. A checkpoint with the same id is replaced.
    """
    seconds, new, given = checked_wait(wait), encoded(checkpoint), list(_checked_messages(checkpoint.messages))
    thread_key = checked_new_thread(checkpoint.metadata.thread_id)

    async def attempt(dead_epoch: int) -> ThreadState:
        while True:
            matched = await _match(store, thread_key, given)
            try:
                return await store.write(
                    putting.put,
                    thread_key,
                    new,
                    matched.tail,
                    matched.agreement,
                    left=left_behind(f"where the thread stood before {new.id!r} was put"),
                    by=Unleased(dead_epoch),
                    expect=matched.version,
                )
            except ThreadMoved:
                continue  # each time, another writer has made progress

    thread = await retry_while_driven(store, attempt, seconds)
    if thread.ttl is not None:
        await retention.prune_by_ttl(store, thread_key, thread.ttl)
    return new.id


async def _match(store: Runner, thread_key: ThreadKey, given: Sequence[Any]) -> _Matched:
    """Compare messages with a thread's, on a reader: it may be long."""
    thread = await store.read(checkpoints.thread_state, thread_key)
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
        if given_plain != plain or not is_same(given_body, body):
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
    """The part that a comparison needs: most messages of a list are stored already."""
    try:
        return body_of(value)
    except InputError as error:
        raise InputError(f"messages[{position}]: {error}") from error


def is_same(a: str, b: str) -> bool:
    """Whether two JSON texts are the same value. The order of keys does not matter; 1 and 1.0 and true differ."""
    return a == b or _sorted(a) == _sorted(b)


def _sorted(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True)


async def get(store: Runner, checkpoint_id: str, thread_id: ThreadId | None = None) -> Checkpoint | None:
    """A checkpoint with all its messages, or None. Without a thread id, the checkpoint id must be unique."""
    name = checked_checkpoint_id(checkpoint_id)
    if thread_id is not None:
        return await _load(store, checked_thread(thread_id), name)
    thread = await store.read(checkpoints.thread_with, name)
    return None if thread is None else await _load(store, ThreadKey("", thread), name)


async def get_latest(store: Runner, thread_id: ThreadId) -> Checkpoint | None:
    """The thread's checkpoint with the highest step, or None."""
    return await _load(store, checked_thread(thread_id), None)


async def list_checkpoints(
    store: Runner, thread_id: ThreadId, limit: int = 100, offset: int = 0
) -> list[CheckpointMetadata]:
    """The thread's checkpoints, highest step first."""
    limit, offset = checked_count("limit", limit), checked_count("offset", offset)
    return await store.read(_list_page, checked_thread(thread_id), limit=limit, offset=offset)


async def list_threads(store: Runner, limit: int = 50, offset: int = 0) -> list[CheckpointMetadata]:
    """The latest checkpoint of each thread that has any, newest first."""
    limit, offset = checked_count("limit", limit), checked_count("offset", offset)
    return await store.read(_recent, limit=limit, offset=offset)


async def turns(store: Runner, thread_key: ThreadKey, every: int) -> int:
    """How many replies that did not fail there are since the last checkpoint of a turn, counted up to `every`."""
    return await store.read(_turns, thread_key, every)


def _turns(tx: Tx, thread_key: ThreadKey, every: int) -> int:
    """Both are looked for from the end, so that a long thread costs no more than a short one."""
    thread = checkpoints.thread_state(tx, thread_key)
    replies = [] if thread is None else _last_replies(tx, thread, every)
    if thread is None or not replies:
        return 0
    offset = 0
    while rows := checkpoints.shown(tx, thread.line or thread.branch, limit=_FEW, offset=offset):
        for row in rows:
            if row.seq < replies[-1]:
                return len(replies)
            if TURN in json.loads(row.about)["tags"]:
                return sum(seq > row.seq for seq in replies)
        offset += len(rows)
    return len(replies)


def _last_replies(tx: Tx, thread: ThreadState, count: int) -> list[int]:
    """The seqs of the last replies that did not fail, the last one first."""
    found: list[int] = []
    before = thread.head + 1
    while len(found) < count and (page := threads.page_before(tx, thread.branch, before=before, limit=_FEW)):
        before = page[0][0]
        decoded = ((seq, decode(body)) for seq, body in reversed(page))
        found += [seq for seq, message in decoded if isinstance(message, AssistantMessage) and not message.failed]
    return found[:count]


async def _load(store: Runner, thread_key: ThreadKey, checkpoint_id: str | None) -> Checkpoint | None:
    """A checkpoint of a thread, or its latest one, with all its messages."""
    while (found := await store.read(checkpoints.get, thread_key, checkpoint_id)) is not None:
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
                metadata_of(thread_key.id, row),
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
    if about.parent_checkpoint_id is not None:
        checked_new_id(about.parent_checkpoint_id, "a parent_checkpoint_id")
    if isinstance(about.step, bool) or not isinstance(about.step, int) or not 0 <= about.step <= HIGHEST_STEP:
        raise InputError(f"a step must be a whole number from 0 to 2**53 - 1, got {about.step!r:.80}")
    return NewCheckpointRow(
        refuse_long_id(checked_checkpoint_id(about.checkpoint_id), "a checkpoint id"),
        about.step,
        about.parent_checkpoint_id,
        encoded_about(about.tags, about.summary),
        encoded_body(checkpoint.state, checkpoint.tools_result, checkpoint.next_node),
        clock.stored(about.created_at, "created_at"),
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
    """A checkpoint of the branch that a thread leaves."""
    return NewCheckpointRow(clock.new_id(), 0, None, encoded_about(["left"], summary), "{}")


def metadata_of(thread_id: str, row: CheckpointRow) -> CheckpointMetadata:
    about = json.loads(row.about)
    details = (row.created_at, about["tags"], about["summary"])
    return CheckpointMetadata(thread_id, row.id, row.step, row.parent, *details, row.seq)


def _list_page(tx: Tx, thread_key: ThreadKey, *, limit: int, offset: int) -> list[CheckpointMetadata]:
    """A page of a thread's checkpoints, decoded on a reader: it may be long."""
    return [
        metadata_of(thread_key.id, row) for row in checkpoints.list_page(tx, thread_key, limit=limit, offset=offset)
    ]


def _recent(tx: Tx, *, limit: int, offset: int) -> list[CheckpointMetadata]:
    """A page of the threads' latest checkpoints."""
    return [metadata_of(name, row) for name, row in checkpoints.recent(tx, limit=limit, offset=offset)]


def checked_checkpoint_id(checkpoint_id: object) -> str:
    return checked_id(checkpoint_id, "a checkpoint id")  # type: ignore[arg-type]


def _checked_messages(messages: object) -> Sequence[Any]:
    if not isinstance(messages, list | tuple):
        raise InputError(f"messages must be a list, got {type(messages).__name__}: {messages!r:.80}")
    return messages
