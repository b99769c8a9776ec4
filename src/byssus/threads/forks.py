"""Forks and rewinds of a thread, and where threads part.

A fork is a thread that shares the past of another one; a rewind lets a thread go on from an earlier point. Neither
copies a message, and neither removes one. Of the tool calls that are open there, both take the questions along and not
the answers: an approval is for one run of a tool.
"""

from __future__ import annotations

from typing import TypeAlias

from byssus.errors import InputError
from byssus.queries.log import branches, threads
from byssus.queries.log.leases import Unleased
from byssus.queries.versions import forks
from byssus.queries.versions.checkpoints import HIGHEST_STEP, CheckpointRow, ThreadState
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.threads.checkpoints import checked_checkpoint_id, is_same, left_behind, metadata_of
from byssus.threads.encoding import PAGE
from byssus.threads.waiting import retry_while_driven
from byssus.values import clock
from byssus.values.checkpoints import Checkpoint, CheckpointMetadata, Difference, LeftBranch, Tree
from byssus.values.inputs import ThreadId, checked_id, checked_new_id, checked_thread, checked_wait
from byssus.values.thread_key import ThreadKey

At: TypeAlias = str | int | CheckpointMetadata | Checkpoint  # a point of a thread: an id, a seq, or what has the id


async def fork(
    store: Runner, thread_id: ThreadId, at: At | None = None, *, new_id: str | None = None, user_id: str | None = None
) -> str:
    """Make a thread that shares the past of this one up to a checkpoint, a seq, or its head. Returns its id.

    No message is copied, and what is written to one thread never shows in the other. The fork belongs to the same
    user, unless `user_id` names another.
    """
    new = clock.new_id() if new_id is None else checked_new_id(new_id)
    point = None if at is None else checked_at(at, "at")
    owner = None if user_id is None else checked_id(user_id, "a user id")
    await store.write(forks.fork, checked_thread(thread_id), new, point, token=clock.new_id(), owner=owner)
    return new


async def rewind(store: Runner, thread_id: ThreadId, to: At, *, wait: float = 0) -> str:
    """Continue the thread from an earlier checkpoint or seq.

    Nothing is removed: what came after stays in the tree. Returns the id of a checkpoint of the former head (created
    if there was none); rewind to it to undo this.
    """
    point, thread_key = checked_at(to, "to"), checked_thread(thread_id)
    left = left_behind(f"where the thread stood before it was rewound to {to!r}")
    return await retry_while_driven(
        store,
        lambda dead_epoch: store.write(
            forks.rewind, thread_key, point, token=clock.new_id(), left=left, by=Unleased(dead_epoch)
        ),
        checked_wait(wait),
    )


def checked_at(at: object, what: str) -> str | int:
    """Check a point of a thread: a checkpoint, its metadata or its id, or a seq."""
    if isinstance(at, Checkpoint):
        at = at.metadata
    if isinstance(at, CheckpointMetadata):
        at = at.checkpoint_id
    if isinstance(at, str):
        return checked_checkpoint_id(at)
    if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= HIGHEST_STEP:
        raise InputError(f"{what} must be a checkpoint, its id, or a seq from 0 up, got {at!r:.80}")
    return at


async def tree(store: Runner, thread_id: ThreadId) -> Tree | None:
    """The thread with its checkpoints, what rewinds have left, its forks and child threads; None if it is unknown."""
    root = checked_thread(thread_id)
    bare: dict[str, tuple[Tree, list[str], list[str]]] = {}
    waiting = [root.id]
    while waiting:  # however deep it is
        name = waiting.pop()
        found = await store.read(_bare_tree, ThreadKey(root.namespace, name))
        if found is not None:
            bare[name] = found
            waiting += [each for each in (*found[1], *found[2]) if each not in bare]
    trees: dict[str, Tree] = {}
    for name, (tree, names, children) in reversed(bare.items()):  # a fork or child is found after the thread above it
        below = tuple(trees[child] for child in children if child in trees)
        trees[name] = tree._replace(forks=[trees[fork] for fork in names if fork in trees], children=below)
    return trees.get(root.id)


def _bare_tree(tx: Tx, thread_key: ThreadKey) -> tuple[Tree, list[str], list[str]] | None:
    """A thread as a tree shows it, without its forks and children; and their ids."""
    node = forks.node(tx, thread_key)
    if node is None:
        return None
    name = thread_key.id
    shown = _metadata(name, node.shown)
    branches_left = tuple(
        LeftBranch(left.parted_at, left.within, _metadata(name, left.shown), left.forks) for left in node.left
    )
    left = [each for branch in reversed(branches_left) for each in branch.checkpoints]
    count, origin, origin_seq = node.thread.message_count, node.origin, node.origin_seq
    bare = Tree(name, count, origin, origin_seq, shown, left, [], branches_left, child_of=node.parent)
    return bare, node.forks, node.children


def _metadata(thread_id: str, rows: list[CheckpointRow]) -> list[CheckpointMetadata]:
    """The lowest step first."""
    return [metadata_of(thread_id, row) for row in reversed(rows)]


async def diff(store: Runner, a: str, b: str) -> Difference:
    """Where two threads part."""
    one, other, seq = await store.read(forks.shared, checked_id(a), checked_id(b))
    # What they share is skipped; behind that, they may still say the same.
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
        if not is_same(one, other):
            return position
    return min(len(a), len(b))


def _bodies(tx: Tx, branch: int, *, after: int, upto: int) -> list[tuple[int, str]]:
    return threads.page(tx, branch, after=after, upto=upto, limit=PAGE)


def _count(tx: Tx, thread: ThreadState, seq: int) -> int:
    return branches.count(tx, thread.branch, seq)
