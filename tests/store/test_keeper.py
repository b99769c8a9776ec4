"""A keeper renews any kind of lease: what a lease is, only its two queries know."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import NamedTuple

from byssus.store import keeper
from byssus.store.database import Store, Tx

PATIENCE = 30  # seconds until a test that hangs is a test that fails


class Ticket(NamedTuple):
    """A lease on nothing in particular. It is lost after so many renewals by anybody."""

    token: str
    seconds: float
    renewals: int


def renew(tx: Tx, held: Sequence[Ticket]) -> list[Ticket]:
    row = tx.one("UPDATE indexing SET epoch = epoch + 1 WHERE kind = 'message' RETURNING epoch")
    assert row is not None
    return [ticket for ticket in held if row[0] >= ticket.renewals]


def none(tx: Tx, held: Sequence[Ticket]) -> list[Ticket]:
    return []


def every(tx: Tx, held: Sequence[Ticket]) -> list[Ticket]:
    return list(held)


def epoch(tx: Tx) -> int:
    row = tx.one("SELECT epoch FROM indexing WHERE kind = 'message'")
    assert row is not None
    return int(row[0])


def test_a_lease_is_renewed_until_its_query_says_that_it_is_lost(store: Store) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    ticket = Ticket("a", 2.0, store.read_now(epoch) + 2)
    keeping = keeper.of(store, renew, none)
    keeping.keep(ticket, told.put)
    assert keeper.is_alive("a")
    assert told.get(timeout=PATIENCE) == keeper.LOST
    assert store.read_now(epoch) == ticket.renewals
    assert not keeper.is_alive("a")


def test_a_lease_that_was_asked_to_stop_is_told_so_and_is_kept(store: Store) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    ticket = Ticket("b", 30.0, 2**62)
    keeping = keeper.of(store, renew, every)
    keeping.keep(ticket, told.put)
    assert told.get(timeout=PATIENCE) == keeper.ABORTED
    assert keeper.is_alive("b")
    keeping.drop(ticket)
    assert not keeper.is_alive("b")


def test_each_kind_of_lease_on_a_store_has_one_keeper(store: Store) -> None:
    assert keeper.of(store, renew, none) is keeper.of(store, renew, none)
    assert keeper.of(store, renew, none) is not keeper.of(store, every, none)
