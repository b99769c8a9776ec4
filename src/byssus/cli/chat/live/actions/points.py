"""Points of a thread, as they are typed: a checkpoint's id or name, step:N, or seq:N."""

from __future__ import annotations

from byssus.checkpointer import Checkpointer, CheckpointMetadata
from byssus.cli.ids import chosen
from byssus.errors import InputError

SHOWN = 200  # checkpoints of a thread in a list
_PAGE = 500


async def checkpoints(cp: Checkpointer, thread_id: str) -> list[CheckpointMetadata]:
    """Those of the thread, the latest first, and then what rewinds have left."""
    found: list[CheckpointMetadata] = []
    while page := await cp.list_checkpoints(thread_id, _PAGE, len(found)):
        found += page
    tree = await cp.tree(thread_id)
    return [*found, *(tree.left if tree else [])]


async def latest(cp: Checkpointer, thread_id: str) -> tuple[list[CheckpointMetadata], bool]:
    """The checkpoints for a list, the latest first; and whether there are more of them. Only a few are read.

    What rewinds have left is among them if all fit.
    """
    found = await cp.list_checkpoints(thread_id, SHOWN + 1)
    if len(found) > SHOWN:
        return found[:SHOWN], True
    tree = await cp.tree(thread_id)
    all_of_them = [*found, *(tree.left if tree else [])]
    return all_of_them[:SHOWN], len(all_of_them) > SHOWN


async def point_of(cp: Checkpointer, thread_id: str, typed: str) -> str | int:
    """The point that was typed, as the checkpointer takes it."""
    name, colon, digits = typed.partition(":")
    if colon and name in ("seq", "step"):
        if not digits.isdecimal():
            raise InputError(f"{name}: needs a number from 0 up, got {typed!r}")
        if name == "seq":
            return int(digits)
    known = await checkpoints(cp, thread_id)
    if colon and name == "step":
        at_step = [each.checkpoint_id for each in known if each.step == int(digits)]
        if not at_step:
            raise InputError(f"no checkpoint of this thread has step {digits}; /tree shows them")
        return at_step[0]
    named = [each.checkpoint_id for each in known if typed in each.tags]
    if named:
        return named[0]
    meant = chosen(typed, (each.checkpoint_id for each in known), "checkpoints")
    if meant not in {each.checkpoint_id for each in known}:
        raise InputError(f"this thread has no checkpoint {typed!r}; /tree shows them, and seq:N will do")
    return meant
