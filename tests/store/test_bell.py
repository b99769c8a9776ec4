"""A bell is heard wherever it is rung, and no ring is lost."""

from __future__ import annotations

import asyncio
import threading

from byssus.store.bell import Bell


def test_a_ring_before_the_wait_is_heard_once() -> None:
    async def main() -> None:
        bell = Bell()
        bell.ring()
        bell.ring()
        await bell.wait()
        waiting = asyncio.ensure_future(bell.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        bell.ring()
        await waiting

    asyncio.run(main())


def test_a_ring_from_another_thread_wakes_the_event_loop_or_a_thread_that_blocks() -> None:
    async def main() -> None:
        bell = Bell()
        for _ in range(100):
            ringing = threading.Thread(target=bell.ring)
            ringing.start()
            await asyncio.wait_for(bell.wait(), 20)
            ringing.join()

    asyncio.run(main())
    bell = Bell()
    for _ in range(100):
        ringing = threading.Thread(target=bell.ring)
        ringing.start()
        bell.wait_now()
        ringing.join()


def test_a_wait_that_was_cancelled_leaves_nothing_behind() -> None:
    async def main() -> None:
        bell = Bell()
        waiting = asyncio.ensure_future(bell.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        bell.ring()
        await asyncio.wait_for(bell.wait(), 20)

    asyncio.run(main())


def test_a_ring_after_the_event_loop_is_closed_does_no_harm() -> None:
    bell = Bell()

    async def wait() -> None:
        await bell.wait()

    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    bell_wake = bell._wake
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    bell.ring()
    assert bell_wake is not None
    bell_wake()
