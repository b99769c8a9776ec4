"""A handle opens its store once, for coroutines and for plain code, and releases what it cannot use."""

from __future__ import annotations

import asyncio
import functools

import pytest

from byssus.errors import StoreNotOpen
from byssus.store import opening
from byssus.store.database import Store
from byssus.store.handle import Handle
from tests.support.databases import Database


class Opened:
    """What happened to the stores of a handle."""

    def __init__(self, database: Database) -> None:
        self.stores: list[Store] = []
        self.error: Exception | None = None
        place = database.place
        self.handle = Handle(
            place,
            functools.partial(opening.open, place),
            on_open=self.opened,
            if_closed="this test's handle was closed",
        )

    def opened(self, store: Store) -> None:
        self.stores.append(store)
        if self.error is not None:
            raise self.error


def test_a_store_is_opened_once_however_it_is_asked_for(database: Database) -> None:
    seen = Opened(database)

    async def main() -> None:
        first, second = await asyncio.gather(seen.handle.store(), seen.handle.store())
        assert first is second is seen.handle.opened() is seen.handle.known()
        await seen.handle.close()

    asyncio.run(main())
    assert len(seen.stores) == 1
    assert seen.stores[0].users == 0
    with pytest.raises(StoreNotOpen, match="this test's handle was closed"):
        seen.handle.opened()


def test_plain_code_opens_closes_and_opens_again(database: Database) -> None:
    seen = Opened(database)
    assert seen.handle.opened() is seen.stores[0]
    seen.handle.close_now()
    seen.handle.close_now()
    assert seen.handle.known() is None
    assert seen.stores[0].users == 0
    seen.handle.reopen()
    assert seen.handle.opened() is seen.stores[1]
    seen.handle.close_now()


def test_a_store_whose_opening_fails_half_way_is_released(database: Database) -> None:
    seen = Opened(database)
    seen.error = ZeroDivisionError("in the hook")
    with pytest.raises(ZeroDivisionError):
        seen.handle.opened()
    assert seen.handle.known() is None
    assert seen.stores[0].users == 0
    seen.error = None
    assert seen.handle.opened() is seen.stores[1]
    seen.handle.close_now()


def test_a_store_that_is_required_is_not_opened(database: Database) -> None:
    seen = Opened(database)
    with pytest.raises(StoreNotOpen, match="this test's handle was closed"):
        seen.handle.required()
    assert seen.handle.opened() is seen.handle.required()
    seen.handle.close_now()
