"""By what right a write is made: the values that say so, on a raw store. What runs do with them: tests/run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from byssus.errors import ThreadBusy
from byssus.queries.log import memories, threads, tool_calls
from byssus.queries.log.leases import NO_EPOCH, By, Claim, Lease, Unleased
from byssus.queries.log.threads import UNLEASED, MessageRow
from byssus.queries.log.tool_calls import Start
from byssus.queries.versions import deleting
from byssus.store.database import Row, Store, Tx
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey

T = ThreadKey("", "t")
ROW = MessageRow("m", "user", "{}")


class RenamedClaim(Claim):
    pass


class RenamedLease(Lease):
    pass


class RenamedUnleased(Unleased):
    pass


def test_no_statement_depends_on_the_name_of_a_class(store: Store) -> None:
    claimed = store.write_now(threads.append, T, [ROW], by=RenamedClaim("me", "run", 30))
    lease = RenamedLease(claimed.epoch, 30)
    store.write_now(tool_calls.start, T, Start(1, 0, "c", "look", "{}", "never", "key", "run"), by=lease)
    assert store.write_now(threads.append, T, [ROW], by=lease).head == 2
    over_it = RenamedUnleased(claimed.epoch)
    assert store.write_now(threads.append, T, [ROW], by=over_it).head == 3
    store.write_now(memories.add, T, [ROW._replace(id="n", plain=1)], [], by=over_it)
    assert store.read_now(memories.size, T) == 4
    assert store.write_now(deleting.discard, T, by=over_it) == 0


class Recorded:
    """A transaction that notes the statements that it runs."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self.statements: list[str] = []

    def one(self, sql: str, /, **params: Any) -> Row | None:
        self.statements.append(sql)
        return self._tx.one(sql, **params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)


def statements_of(store: Store, by: By) -> list[str]:
    def query(tx: Tx) -> list[str]:
        recorded = Recorded(tx)
        threads.append(recorded, T, [ROW], by=by)
        return recorded.statements

    return store.write_now(query)


def test_any_value_for_a_write_without_a_run_takes_the_same_short_way(store: Store) -> None:
    store.write_now(threads.append, T, [ROW])
    usual = statements_of(store, UNLEASED)
    assert len(usual) == 1
    assert ":dead_epoch" not in usual[0]
    assert statements_of(store, Unleased()) == usual
    assert statements_of(store, Unleased(NO_EPOCH)) == usual
    assert statements_of(store, Unleased(5)) != usual


WRITES: dict[str, Callable[[Tx, By], object]] = {
    "append": lambda tx, by: threads.append(tx, T, [ROW], by=by),
    "save_extra": lambda tx, by: threads.save_extra(tx, T, '{"x":1}', by=by),
    "add": lambda tx, by: memories.add(tx, T, [ROW._replace(id="n")], [], by=by),
    "clear": lambda tx, by: memories.clear(tx, T, by=by),
    "delete": lambda tx, by: memories.delete(tx, T, ["m"], by=by),
    "discard": lambda tx, by: deleting.discard(tx, T, by=by),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_lease_keeps_others_out_unless_they_know_that_its_owner_is_gone(store: Store, write: str) -> None:
    epoch = store.write_now(threads.append, T, [ROW], by=Claim("me", "run", 30)).epoch
    for by in (Unleased(), Unleased(epoch + 1)):
        with pytest.raises(ThreadBusy):
            store.write_now(WRITES[write], by)
    store.write_now(WRITES[write], Unleased(epoch))


class Meanwhile:
    """A transaction in which something happens after an update that changed nothing."""

    def __init__(self, tx: Tx, happens: Callable[[Tx], object]) -> None:
        self._tx = tx
        self._happens = [happens]

    def one(self, sql: str, /, **params: Any) -> Row | None:
        row = self._tx.one(sql, **params)
        if row is None and sql.startswith("UPDATE"):
            self._happens.pop()(self._tx)
        return row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_a_lease_forbade_is_made_if_the_lease_ends_meanwhile(store: Store, write: str) -> None:
    epoch = store.write_now(threads.append, T, [ROW], by=Claim("me", "run", 30)).epoch

    def release(tx: Tx) -> None:
        threads.append(tx, T, [], by=Lease(epoch, 30), release=Release.END)

    store.write_now(lambda tx: WRITES[write](Meanwhile(tx, release), Unleased()))
    thread = store.read_now(threads.find, T)
    assert (thread and thread.version) == (None if write == "discard" else 3)
