"""What a store does with a query, whatever becomes of the query and of whoever waits for it."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref

import pytest

from byssus.queries.log import threads
from byssus.store.database import Store, Tx
from byssus.values.thread_key import ThreadKey
from tests.support.stores import PATIENCE, Gate, LongRead, appending, half_done, stored, together


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


def test_cancelled_reads_give_way(store: Store) -> None:
    """Those that run are interrupted, and the others never begin."""

    async def main() -> None:
        long, unbegun = LongRead(), LongRead()
        reads = [store.read(long.query) for _ in range(4)]
        assert await asyncio.to_thread(long.begun.acquire, timeout=PATIENCE)
        reads += [store.read(unbegun.query) for _ in range(20)]
        assert all(read.cancel() for read in reversed(reads))  # or one would begin where another was interrupted
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*(store.read(lambda _: "served") for _ in range(8))) == ["served"] * 8
        assert unbegun.runs == 0

    asyncio.run(main())
    store.close()  # which waits for those that run


def test_a_timeout_around_a_read_is_kept(store: Store) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await store.read(LongRead().query)
        assert await store.read(lambda _: "served") == "served"

    asyncio.run(main())


def test_a_read_that_is_cancelled_hits_no_other(store: Store) -> None:
    """Cancelled at any moment, also the one in which it ends."""

    async def main() -> None:
        for _ in range(300):
            read, others = store.read(_short), [store.read(_short) for _ in range(4)]
            await asyncio.sleep(0)
            read.cancel()
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.gather(*others) == [2] * 4

    asyncio.run(main())


def test_what_a_read_returned_goes_with_its_caller(store: Store) -> None:
    """Nothing has to be collected first: it may be megabytes."""

    class Page:
        pass

    async def main() -> None:
        pages: list[weakref.ref[Page]] = []

        def query(_: Tx) -> Page:
            made = Page()
            pages.append(weakref.ref(made))
            return made

        for _ in range(20):
            await store.read(query)
        await store.read(_short)
        assert len([page for page in pages if page() is not None]) <= 8  # what each worker was at last

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def _short(tx: Tx) -> int:
    return len(tx.all("SELECT kind FROM indexing"))


def test_a_blocking_read_is_interrupted_with_its_caller(store: Store) -> None:
    store.read_now(lambda _: 7)  # its worker runs: an interrupt while Python starts one would be another story
    long = LongRead()
    main = threading.main_thread().ident
    assert main is not None

    interrupted = threading.Event()

    def raise_once(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        assert long.begun.acquire(timeout=PATIENCE)
        signal.pthread_kill(main, signal.SIGINT)
        while not interrupted.wait(0.1):  # Python does not see one that comes just before it waits for a lock
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, raise_once)
    try:
        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            store.read_now(long.query)
        other.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [store.read_now(lambda _: 7) for _ in range(8)] == [7] * 8
    store.close()  # which waits for those that run


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
