"""What a store does with a query, whatever becomes of the query and of whoever waits for it."""

from __future__ import annotations

import asyncio

import pytest

from byssus.queries.log import threads
from byssus.store.database import Store, Tx
from byssus.values.thread_key import ThreadKey
from tests.support.stores import PATIENCE, Gate, appending, half_done, stored, together


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError])
def test_whatever_a_query_raises_reaches_its_caller_and_nobody_waits_forever(
    store: Store, error: type[BaseException]
) -> None:
    def query(tx: Tx) -> None:
        tx.one("SELECT 1")
        raise error

    before, hears, after = together(store, appending("before"), query, appending("after"))
    assert isinstance(hears, BaseException)
    assert (before, after) == ((1, 1), (2, 2))
    with pytest.raises((error, RuntimeError)):
        store.read_now(query)


def test_a_cancelled_write_settles_before_the_cancellation_arrives(store: Store) -> None:
    async def main() -> None:
        gate = Gate()

        async def write() -> None:
            await store.write(lambda tx: (gate.query(tx), appending("kept")(tx)))

        task = asyncio.ensure_future(write())
        await asyncio.to_thread(gate.entered.wait, PATIENCE)
        for _ in range(3):
            task.cancel()
            for _ in range(50):
                await asyncio.sleep(0)
            assert not task.done()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stored(store) == ["kept"]

    asyncio.run(main())


def test_an_event_loop_that_is_gone_does_not_kill_the_writer(store: Store) -> None:
    gate = Gate()
    loop = asyncio.new_event_loop()

    async def leave() -> None:
        store.write(gate.query)
        store.write(appending("from the closed loop"))
        store.write(half_done)
        store.read(threads.find, ThreadKey("", "t"))

    loop.run_until_complete(leave())
    assert gate.entered.wait(PATIENCE)
    loop.close()
    gate.opened.set()
    store.write_now(appending("from the next one"))
    assert stored(store) == ["from the closed loop", "from the next one"]
