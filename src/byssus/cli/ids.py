"""The start of an id stands for the whole, as in git, if no other id begins like it. A whole id always means itself.

Commands that take something away want the whole id: a start that was unique yesterday may mean another thread today.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from byssus.checkpointer import Checkpointer
from byssus.cli.words import did_you_mean
from byssus.errors import InputError
from byssus.threads.prefixes import Kind, starting_with
from byssus.values import clock
from byssus.values.inputs import is_long_id

_SHOWN = 5  # candidates that an error names
_FORKS = 100  # numbers that are tried for a fork
_ID_LENGTH = 12
_COMPARED = 1_000  # threads among which an error looks for one that is like the typed id


async def whole_id(cp: Checkpointer, kind: Kind, typed: str) -> str:
    """The id that was meant; what was typed if nothing begins like it, for the caller to complain about."""
    return chosen(typed, await starting_with(cp.store, kind, typed, _SHOWN + 1), f"{kind}s")


def chosen(typed: str, ids: Iterable[str], what: str) -> str:
    """The only id that begins with what was typed; what was typed if it is one of them, or begins none."""
    found = sorted({each for each in ids if each.startswith(typed)}, key=lambda each: (len(each), each))
    if typed in found or not found:
        return typed
    if len(found) > 1:
        raise InputError(f"{typed!r} could be any of these {what}: {_listed(found)}; type more of the id")
    return found[0]


async def known_thread(cp: Checkpointer, typed: str, *, whole: bool = False) -> str:
    """The id of a thread that there is. `whole`: the start of one will not do."""
    meant = typed if whole else await whole_id(cp, "thread", typed)
    if await cp.info(meant) is None:
        alike = await starting_with(cp.store, "thread", typed, _SHOWN + 1)
        if alike:
            hint = f"this command needs the whole id: {_listed(alike)}"
        else:
            guess = did_you_mean(typed, [info.id for info in await cp.threads(_COMPARED)])
            hint = f"{guess} 'byssus threads' lists them".strip()
        raise InputError(f"there is no thread {typed!r} in {cp.name}; {hint}")
    return meant


async def known_user(cp: Checkpointer, typed: str) -> str:
    """The id of a user that there is."""
    meant = await whole_id(cp, "user", typed)
    if await cp.get_user(meant) is None:
        raise InputError(f"there is no user {typed!r} in {cp.name}; 'byssus users' lists them")
    return meant


async def free_fork_id(cp: Checkpointer, thread_id: str) -> str:
    """A readable id for a fork: trip-fork-1, and trip-fork-2 for the next one, or for a fork of the first."""
    stem = re.sub(r"-fork-\d+$", "", thread_id)
    for number in range(1, _FORKS + 1):
        new = f"{stem}-fork-{number}"
        if is_long_id(new):
            break
        if await cp.info(new) is None:
            return new
    return f"fork-{clock.new_id()[:_ID_LENGTH]}"


def _listed(ids: list[str]) -> str:
    return ", ".join(map(repr, ids[:_SHOWN])) + ", ..." * (len(ids) > _SHOWN)
