"""Leases: which run may write to a thread.

- A run claims its thread and keeps the lease until it ends; each of its writes carries the lease's epoch and renews it.
- A lease that has run out, by the database's clock, can be neither used nor renewed. A run that was suspended for too
  long gets `LeaseLost` at its next write, and goes no further. What it had finished before may still be written, until
  another run has taken the thread (`Late`).
- The checks are part of the statement that locks the thread's row (`threads.advance`, `threads.take`), so they cost no
  round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from byssus.errors import LeaseLost, ThreadBusy, ThreadInactive, ThreadQuarantined
from byssus.store.database import Tx
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey

NO_EPOCH = -1  # no lease ever has it

_UNUSED = "(lease_until IS NULL OR lease_until <= :now)"
_FREE = "(lease_until IS NULL OR lease_until <= :now OR lease_epoch = :dead_epoch)"
_MINE = "(lease_epoch = :epoch AND lease_until > :now)"
_ACTIVE = "status NOT IN ('paused', 'cancelled')"
_FREE_AND_ACTIVE = f"{_FREE} AND {_ACTIVE} AND quarantined_at IS NULL"
_CLAIM = ", lease_owner = :owner, lease_epoch = lease_epoch + 1, lease_until = :until, lease_abort = 0, run = :run"
_RENEW = ", lease_until = :until"


# Each of the three says how a statement treats the lease of the thread's row: `guard` is a condition on the row,
# `change` goes into its SET clause, and `parameters` are the values of both.


class Claim(NamedTuple):
    """A run takes the thread's lease. `dead_epoch` is the epoch of a lease whose owner is known to be gone."""

    owner: str
    run: str
    seconds: float
    dead_epoch: int = NO_EPOCH

    @property
    def guard(self) -> str:
        return _FREE_AND_ACTIVE

    @property
    def change(self) -> str:
        return _CLAIM

    def parameters(self, tx: Tx) -> dict[str, object]:
        until = tx.after(self.seconds)
        return {"owner": self.owner, "run": self.run, "until": until, "dead_epoch": self.dead_epoch}


class Lease(NamedTuple):
    """A run that holds the lease writes, and renews it."""

    epoch: int
    seconds: float

    @property
    def guard(self) -> str:
        return _MINE

    @property
    def change(self) -> str:
        return _RENEW

    def parameters(self, tx: Tx) -> dict[str, object]:
        return {"epoch": self.epoch, "until": tx.after(self.seconds)}


class Unleased(NamedTuple):
    """A write from outside any run, allowed while no run holds the lease. It may ignore the lease of `dead_epoch`."""

    dead_epoch: int = NO_EPOCH

    @property
    def guard(self) -> str:
        return _UNUSED if self.dead_epoch == NO_EPOCH else _FREE

    @property
    def change(self) -> str:
        return ""

    def parameters(self, tx: Tx) -> dict[str, object]:  # noqa: ARG002
        return {"dead_epoch": self.dead_epoch}


class Late(NamedTuple):
    """A run writes what it had finished in time and could not write. Allowed until another run has taken the thread."""

    epoch: int

    @property
    def guard(self) -> str:
        return "lease_epoch = :epoch"

    @property
    def change(self) -> str:
        return ""

    def parameters(self, tx: Tx) -> dict[str, object]:  # noqa: ARG002
        return {"epoch": self.epoch}


By = Claim | Lease | Unleased | Late

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


def refuse(tx: Tx, thread_key: ThreadKey, by: By) -> bool:
    """Raise why the lease of a thread forbids a write. If it does not (any more): whether there is such a thread."""
    row = tx.one(
        "SELECT lease_owner, lease_epoch, lease_until, lease_until > :now, status, quarantined_at FROM threads"
        " WHERE namespace = :namespace AND id = :id",
        namespace=thread_key.namespace,
        id=thread_key.id,
        now=tx.now(),
    )
    if row is None:
        return False
    owner, epoch, until, is_alive, status, quarantined_at = row
    if isinstance(by, Lease | Late):
        if epoch != by.epoch or (isinstance(by, Lease) and not is_alive):
            raise LeaseLost(thread_key.id)
    elif is_alive and epoch != by.dead_epoch:
        raise ThreadBusy(thread_key.id, owner, epoch, until)
    if isinstance(by, Claim) and status in ("paused", "cancelled"):
        raise ThreadInactive(thread_key.id, status)
    if isinstance(by, Claim) and quarantined_at is not None:
        raise ThreadQuarantined(thread_key.id, quarantined_at)
    return True


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
    for lease in sorted(held):  # all transactions lock threads in this order: no deadlock
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
    """Ask the run that holds the lease to stop; returns the lease's owner, or None if there is no run."""
    row = tx.one(
        "UPDATE threads SET lease_abort = lease_epoch"
        " WHERE namespace = :namespace AND id = :id AND lease_until > :now RETURNING lease_owner",
        namespace=thread_key.namespace,
        id=thread_key.id,
        now=tx.now(),
    )
    return row[0] if row else None
