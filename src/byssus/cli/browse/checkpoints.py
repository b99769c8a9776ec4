"""`byssus checkpoints|tree|fork|rewind|diff`: the versions of a thread.

A point of a thread is a checkpoint's id, or `step:3`, or `seq:12`. A number alone would be ambiguous: lists show steps,
and messages are counted too.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from byssus.checkpointer import Checkpointer, CheckpointMetadata, Tree
from byssus.cli.ids import chosen
from byssus.cli.screen import table, terminal
from byssus.cli.subcommand import add, add_thread, count, number, work_on
from byssus.errors import InputError, NotFound
from byssus.values.checkpoints import ASCII, Signs, drawn

_POINT = "a checkpoint's id, or step:N for the checkpoint of a step, or seq:N for the place behind the Nth message"
_PAGE = 500


def add_to(commands: Any) -> None:
    parser = add(commands, "checkpoints", _checkpoints, json=True)
    add_thread(parser)
    parser.add_argument("--limit", type=number, default=100, metavar="N", help="at most N of them (default: 100)")
    more = "The JSON is a flat list of the thread, its forks and children; forked_from and child_of name their origin."
    parser = add(commands, "tree", _tree, more, json=True)
    add_thread(parser)
    more = "Later writes to one of them do not show in the other. Prints the id of the new thread."
    parser = add(commands, "fork", _fork, more)
    add_thread(parser)
    parser.add_argument("--at", type=_point, metavar="POINT", help=f"where they part (default: the end): {_POINT}")
    parser.add_argument("--as", dest="new_id", metavar="ID", help="the new thread's id (default: a new one)")
    more = "Nothing is removed: what came after stays in the tree."
    parser = add(commands, "rewind", _rewind, more)
    add_thread(parser)
    parser.add_argument("to", type=_point, metavar="POINT", help=_POINT)
    parser = add(commands, "diff", _diff, json=True)
    add_thread(parser, "a")
    add_thread(parser, "b")


def _checkpoints(args: argparse.Namespace) -> int:
    listed = work_on(args, lambda cp: cp.list_checkpoints(args.thread, args.limit), args.thread)
    if args.json:
        terminal.print_json([_as_dict(each) for each in listed])
    elif listed:
        rows = [
            (
                str(each.step),
                str(each.seq),
                each.checkpoint_id,
                terminal.when(each.created_at, args.utc),
                ", ".join(each.tags),
                each.summary or "",
            )
            for each in listed
        ]
        table.print_table(("STEP", "MESSAGE", "CHECKPOINT", "MADE", "TAGS", "SUMMARY"), rows, right=(0, 1), whole=(3,))
        if len(listed) == args.limit:
            terminal.remark(f"(the latest {args.limit}; --limit N shows more)\n")
    else:
        print(terminal.line(f"Thread {args.thread} has no checkpoints."))
    return 0


def _tree(args: argparse.Namespace) -> int:
    tree = work_on(args, lambda cp: cp.tree(args.thread), args.thread)
    if tree is None:  # deleted a moment ago
        raise InputError(f"there is no thread {args.thread!r} any more")
    if args.json:
        terminal.print_json(_flat(tree))
    else:
        _draw(tree)
    return 0


def _draw(tree: Tree) -> None:
    can_draw = terminal.drawn("├└│─·", "") != ""
    columns = terminal.columns()
    for text in drawn(tree, Signs() if can_draw else ASCII):
        text = terminal.printable(text)
        print(text if columns is None else table.cut(text, columns))


def _flat(tree: Tree) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        lists: dict[str, Any] = {
            name: [_as_dict(each) for each in getattr(node, name)] for name in ("checkpoints", "left")
        }
        lists["left_branches"] = [
            {**each._asdict(), "checkpoints": [one.checkpoint_id for one in each.checkpoints]}
            for each in node.left_branches
        ]
        found.append(
            {name: value for name, value in {**node._asdict(), **lists}.items() if name not in ("forks", "children")}
        )
        waiting += reversed((*node.forks, *node.children))
    return found


def _fork(args: argparse.Namespace) -> int:
    async def fork(cp: Checkpointer) -> str:
        at = None if args.at is None else await _found(cp, args.thread, args.at)
        with _helpfully(args.thread, at):
            return await cp.fork(args.thread, at, new_id=args.new_id)

    print(terminal.line(work_on(args, fork, args.thread)))
    return 0


def _rewind(args: argparse.Namespace) -> int:
    async def rewind(cp: Checkpointer) -> tuple[str | None, int]:
        to = await _found(cp, args.thread, args.to)
        with _helpfully(args.thread, to):
            stood = await cp.rewind(args.thread, to)
        info = await cp.info(args.thread)
        return stood, info.message_count if info else 0

    stood, messages = work_on(args, rewind, args.thread)
    print(terminal.line(f"Thread {args.thread} has {count(messages, 'message')} now."))
    if stood is not None:
        print(terminal.line(f"To undo this: byssus rewind {shlex.quote(args.thread)} {shlex.quote(stood)}"))
    return 0


def _diff(args: argparse.Namespace) -> int:
    found = work_on(args, lambda cp: cp.diff(args.a, args.b), args.a, args.b)
    if args.json:
        terminal.print_json(found._asdict())
        return 0
    if found.only_a == found.only_b == 0:
        print(terminal.line(f"{args.a} and {args.b} are the same: {count(found.shared, 'message')}."))
        return 0
    print(terminal.line(f"{args.a} and {args.b} share {count(found.shared, 'message')}, up to seq:{found.seq}."))
    for thread, messages in ((args.a, found.only_a), (args.b, found.only_b)):
        print(terminal.line(f"  {thread} goes on with {count(messages, 'message')}"))
    return 0


# --- points of a thread -----------------------------------------------------------------------------------------------


def _point(text: str) -> tuple[str, int] | str:
    """A point as it is typed: an id, or the name of a number and the number."""
    name, colon, digits = text.partition(":")
    if not colon or name not in ("seq", "step"):
        return text
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"must be {name}: and a number from 0 up, got {text!r}")
    return name, int(digits)


async def _found(cp: Checkpointer, thread_id: str, point: tuple[str, int] | str) -> str | int:
    """The point as the checkpointer takes it; of an id, the start will do."""
    if isinstance(point, str):
        return chosen(point, await _all_checkpoints(cp, thread_id), "checkpoints")
    name, position = point
    return position if name == "seq" else await _at_step(cp, thread_id, position)


async def _all_checkpoints(cp: Checkpointer, thread_id: str) -> list[str]:
    """Those of the thread's line, and those that rewinds have left."""
    found: list[str] = []
    while page := await cp.list_checkpoints(thread_id, _PAGE, len(found)):
        found += [each.checkpoint_id for each in page]
    tree = await cp.tree(thread_id)
    return [*found, *(each.checkpoint_id for each in (tree.left if tree else []))]


@contextmanager
def _helpfully(thread_id: str, point: str | int | None) -> Iterator[None]:
    """Say of an unknown id what else it could be."""
    try:
        yield
    except NotFound as error:
        if not isinstance(point, str):
            raise
        raise NotFound(
            f"thread {thread_id!r} has no checkpoint {point!r}; 'byssus tree' names them, and step:N or seq:N will do"
        ) from error


async def _at_step(cp: Checkpointer, thread_id: str, step: int) -> str:
    found: list[str] = []
    offset = 0
    while page := await cp.list_checkpoints(thread_id, _PAGE, offset):
        found += [each.checkpoint_id for each in page if each.step == step]
        if page[-1].step < step:
            break
        offset += len(page)
    if len(found) != 1:
        which = f"{len(found)} checkpoints" if found else "no checkpoint"
        raise NotFound(f"thread {thread_id!r} has {which} of step {step}; 'byssus checkpoints' lists them by id")
    return found[0]


# --- values -----------------------------------------------------------------------------------------------------------


def _as_dict(each: CheckpointMetadata) -> dict[str, Any]:
    names = ("thread_id", "checkpoint_id", "step", "parent_checkpoint_id", "tags", "summary", "seq", "created_at")
    return {name: getattr(each, name) for name in names}
