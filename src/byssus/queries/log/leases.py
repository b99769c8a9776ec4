"""Leases: who drives a thread.

A run claims its thread and keeps the lease until it ends; each of its writes carries the lease's epoch and renews it. A
lease that has run out, by the database's clock, can be neither used nor renewed: whoever slept through its end finds
out at the next write, and nothing of that write is kept.

The checks are part of the statement that takes the thread's row (`threads.advance`), so they cost no round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from byssus.errors import LeaseLost, ThreadBusy, ThreadInactive
from byssus.store.database import Tx
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey

NOBODY = -1  # the epoch of no lease


class Claim(NamedTuple):
    """A run that wants a thread's lease. `dead_epoch` is an epoch whose owner is known to be gone."""

    owner: str
    run: str
    seconds: float
    dead_epoch: int = NOBODY


class Lease(NamedTuple):
    """The right to write to a thread."""

    epoch: int
    seconds: float


class Unleased(NamedTuple):
    """A write from outside any run: welcome while nobody drives the thread."""

    dead_epoch: int = NOBODY


By = Claim | Lease | Unleased

# What `threads.advance` needs of each: a condition on the thread's row, and what becomes of its lease. The empty one is
# a visitor who writes over nobody's lease.
_UNUSED = "(lease_until IS NULL OR lease_until <= :now)"
_FREE = "(lease_until IS NULL OR lease_until <= :now OR lease_epoch = :dead_epoch)"
_MINE = "(lease_epoch = :epoch AND lease_until > :now)"
_ACTIVE = "status NOT IN ('paused', 'cancelled')"
GUARD = {"Claim": f"{_FREE} AND {_ACTIVE}", "Unleased": _FREE, "Lease": _MINE, "": _UNUSED}
CHANGE = {
    "Claim": ", lease_owner = :owner, lease_epoch = lease_epoch + 1, lease_until = :until, lease_abort = 0, run = :run",
    "Unleased": "",
    "": "",
    "Lease": ", lease_until = :until",
}
# A run that would stop goes on if a message waits for it. Where no run may start, none goes on either.
_IS_OVER = f"(NOT EXISTS (SELECT 1 FROM inbox WHERE inbox.thread = threads.key) OR NOT ({_ACTIVE}))"
RELEASES = {
    Release.END: ", lease_owner = NULL, lease_until = NULL, run = NULL",
    Release.END_IF_INBOX_EMPTY: (
        f", lease_owner = CASE WHEN {_IS_OVER} THEN NULL ELSE lease_owner END"
        f", lease_until = CASE WHEN {_IS_OVER} THEN NULL ELSE :until END"
        f", run = CASE WHEN {_IS_OVER} THEN NULL ELSE run END"
    ),
    Release.PAUSE: ", lease_owner = NULL, lease_until = NULL",
}


def parameters(tx: Tx, by: By) -> dict[str, object]:
    """The values of a guard and a change."""
    if isinstance(by, Lease):
        return {"epoch": by.epoch, "until": tx.after(by.seconds)}
    if isinstance(by, Claim):
        return {"owner": by.owner, "run": by.run, "until": tx.after(by.seconds), "dead_epoch": by.dead_epoch}
    return {"dead_epoch": by.dead_epoch}


def refuse(tx: Tx, thread_key: ThreadKey, by: By) -> None:
    """Say why a write was refused, if that was because of a lease."""
    row = tx.one(
        "SELECT lease_owner, lease_epoch, lease_until, lease_until > :now, status FROM threads"
        " WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
        now=tx.now(),
    )
    if row is None:
        return
    owner, epoch, until, is_alive, status = row
    if isinstance(by, Lease):
        if epoch != by.epoch or not is_alive:
            raise LeaseLost(thread_key.id)
    elif is_alive and epoch != by.dead_epoch:
        raise ThreadBusy(thread_key.id, owner, epoch, until)
    if isinstance(by, Claim) and status in ("paused", "cancelled"):
        raise ThreadInactive(thread_key.id, status)


class Held(NamedTuple):
    """A lease of this process, as its keeper knows it."""

    thread_id: str
    namespace: str
    epoch: int
    seconds: float
    token: str = ""


def renew(tx: Tx, held: Sequence[Held]) -> list[Held]:
    """Renew leases; returns those that are lost."""
    lost = []
    for lease in sorted(held):  # in the order in which everybody takes threads' rows
        row = tx.one(
            f"UPDATE threads SET lease_until = :until WHERE namespace = :namespace AND id = :id AND {_MINE}"
            " RETURNING lease_epoch",
            namespace=lease.namespace,
            id=lease.thread_id,
            epoch=lease.epoch,
            until=tx.after(lease.seconds),
            now=tx.now(),
        )
        if row is None:
            lost.append(lease)
    return lost


def aborted(tx: Tx, held: Sequence[Held]) -> list[Held]:
    """Those of the leases whose run was asked to stop."""
    rows = tx.all("SELECT namespace, id, lease_abort FROM threads WHERE run IS NOT NULL AND lease_abort = lease_epoch")
    asked = set(rows)
    return [lease for lease in held if (lease.namespace, lease.thread_id, lease.epoch) in asked]


def abort(tx: Tx, thread_key: ThreadKey) -> str | None:
    """Ask the run that drives the thread to stop; returns its owner, or None if there is none."""
    row = tx.one(
        "UPDATE threads SET lease_abort = lease_epoch"
        " WHERE namespace = :namespace AND id = :id AND lease_until > :now RETURNING lease_owner",
        namespace=thread_key.namespace,
        id=thread_key.id,
        now=tx.now(),
    )
    return row[0] if row else None
