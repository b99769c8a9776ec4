"""What a process knows of the thread that it drives: the slots behind the last reply, and what a commit changes."""

from __future__ import annotations

import asyncio

import pytest

from byssus import AssistantMessage, UserMessage
from byssus.errors import LeaseLost, ThreadBusy
from byssus.queries.log import threads
from byssus.queries.log.leases import Claim, Unleased
from byssus.queries.log.threads import Position
from byssus.run.driven_thread import Change, DrivenThread, Geometry
from byssus.run.journal import Driver
from byssus.signals import Signal
from byssus.threads.encoding import message_row
from byssus.values.thread_key import ThreadKey
from tests.support.agents import within
from tests.support.databases import Database

KEY = ThreadKey("", "t")


# --- slots ------------------------------------------------------------------------------------------------------------


def test_the_slots_of_a_reply_that_was_just_stored_are_free_and_recorded() -> None:
    slots = Geometry(first=8, reserved=9)
    assert slots.reply == 7
    assert [slots.seq(i) for i in range(2)] == [8, 9]
    assert [slots.is_free(i) for i in range(3)] == [True, True, False]
    assert [slots.is_recorded(i) for i in range(3)] == [True, True, False]


def test_a_settled_call_has_no_free_slot_and_its_neighbour_keeps_its_own() -> None:
    before = Geometry(first=8, reserved=9)
    after = before.settled(0)
    assert [after.is_free(i) for i in range(2)] == [False, True]
    assert before.is_free(0), "the value itself does not change"


def test_without_reserved_slots_no_call_has_one() -> None:
    assert not Geometry(first=8, reserved=7).is_free(0)


def test_a_message_behind_a_reply_that_another_program_stored_takes_the_slot_that_it_lies_on() -> None:
    slots = Geometry(first=8, reserved=9, taken=frozenset({8, 9}))
    assert [slots.is_free(i) for i in range(3)] == [False, False, False]


def test_a_call_that_the_ledger_may_not_know_is_not_recorded_but_has_its_slot() -> None:
    slots = Geometry(first=8, reserved=10, unledgered=9)
    assert [slots.is_free(i) for i in range(3)] == [True, True, True]
    assert [slots.is_recorded(i) for i in range(3)] == [False, False, True]


def test_the_calls_of_a_reply_are_foreign_where_the_log_up_to_it_came_from_elsewhere() -> None:
    places = [Geometry(first=8, reserved=10, unledgered=n).is_foreign for n in (0, 6, 7, 9)]
    assert places == [False, False, True, True]
    assert not Geometry(first=0, reserved=0, unledgered=5).is_foreign, "there is no reply"


# --- what a commit changes --------------------------------------------------------------------------------------------


def test_a_reply_opens_its_slots_and_closes_those_of_the_last_one(database: Database) -> None:
    thread = DrivenThread(database.checkpointer(), KEY, 30)
    thread.geometry, thread.has_partial = Geometry(2, 3, frozenset({2, 3}), unledgered=3), True
    reply = AssistantMessage("hm", id="r2")
    thread.apply(Position(head=9, version=4), Change([reply], extra='{"a":1}', reserve=2))
    assert thread.geometry == Geometry(8, 9, frozenset(), unledgered=3)
    assert (thread.messages, thread.reply_id, thread.saved_extra) == ([reply], "r2", '{"a":1}')
    assert (thread.partial, thread.has_partial) == (None, False)


def test_a_result_takes_its_slot_and_joins_the_list_later(database: Database) -> None:
    thread = DrivenThread(database.checkpointer(), KEY, 30)
    thread.geometry = Geometry(8, 9)
    thread.apply(Position(head=9, version=5), Change(settled=1))
    assert (thread.geometry, thread.unseen, thread.messages) == (Geometry(8, 9, frozenset({9})), 1, [])


def test_a_commit_that_is_reported_late_does_not_turn_the_position_back(database: Database) -> None:
    thread = DrivenThread(database.checkpointer(), KEY, 30)
    thread.apply(Position(head=9, version=6, mail=1), Change())
    thread.apply(Position(head=9, version=5), Change())
    assert thread.position == Position(head=9, version=6, mail=1)
    assert thread.mail == 1


# --- the lease --------------------------------------------------------------------------------------------------------


def test_without_a_lease_a_run_cannot_write(database: Database) -> None:
    with pytest.raises(LeaseLost):
        DrivenThread(database.checkpointer(), KEY, 30).lease()


def test_a_write_that_another_run_refuses_leaves_what_was_known_known(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            rows = [message_row(UserMessage("hi"))]
            other = Claim("other-host:1", "run", 30)
            driven = await cp.store.write(threads.append, KEY, rows, by=other)
            thread = DrivenThread(cp, KEY, 30)
            thread.position = driven
            with thread.claiming(Driver("mine", Signal())) as claimed, pytest.raises(ThreadBusy):
                await thread.write(Change(claimed=claimed), threads.append, rows, by=claimed.claim)
            assert thread.position == driven
            assert (thread.held, thread.messages) == (None, [])

    within(main())


def test_any_other_failed_write_leaves_the_thread_stale(database: Database) -> None:
    def broken(*_: object, **__: object) -> Position:
        raise ValueError("broken")

    async def main() -> None:
        async with database.checkpointer() as cp:
            thread = DrivenThread(cp, KEY, 30)
            thread.position = Position(1, 1)
            with pytest.raises(ValueError, match="broken"):
                await thread.write(Change(), broken)
            assert thread.position is None

    within(main())


def test_a_cancelled_writer_learns_of_the_commit(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            thread, message = DrivenThread(cp, KEY, 30), UserMessage("hi")
            change, rows = Change([message]), [message_row(message)]
            writing = asyncio.create_task(thread.write(change, threads.append, rows, by=Unleased()))
            await asyncio.sleep(0)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            assert thread.messages == [message]
            assert thread.position is not None
            loaded = await cp.load("t")
            assert loaded is not None
            assert [stored.text for stored in loaded.messages] == ["hi"]

    within(main())
