"""Python that takes a while beside the event loop: on few workers, and not for callers that are gone."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from byssus.store.computing import compute

PATIENCE = 30  # seconds until a test that hangs is a test that fails
CALLS = 20


def test_what_is_computed_or_raised_reaches_the_caller() -> None:
    async def main() -> None:
        assert await compute(lambda is_dropped: (7, is_dropped())) == (7, False)
        with pytest.raises(ZeroDivisionError):
            await compute(lambda _: 1 // 0)

    asyncio.run(main())


def test_however_many_calls_there_are_they_share_a_few_workers() -> None:
    async def main() -> None:
        workers = await asyncio.gather(*(compute(lambda _: threading.get_ident()) for _ in range(CALLS)))
        assert len(set(workers)) <= 2

    asyncio.run(main())


def test_a_cancelled_call_is_told_and_one_that_has_not_begun_never_begins() -> None:
    begun: list[int] = []
    told = threading.Semaphore(0)

    def until_dropped(number: int) -> Callable[[Callable[[], bool]], None]:
        def call(is_dropped: Callable[[], bool]) -> None:
            begun.append(number)
            while not is_dropped():
                pass
            told.release()

        return call

    async def main() -> None:
        tasks = [asyncio.ensure_future(compute(until_dropped(number))) for number in range(CALLS)]
        async with asyncio.timeout(PATIENCE):
            while len(begun) < 2:
                await asyncio.sleep(0)
            for some in (tasks[2:], tasks[:2]):
                for task in some:
                    task.cancel()
                await asyncio.wait(some)
            assert all(task.cancelled() for task in tasks)
            assert await compute(lambda _: "next") == "next"

    asyncio.run(main())
    assert all(told.acquire(timeout=PATIENCE) for _ in range(2))
    assert sorted(begun) == [0, 1]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # it is on purpose
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_process_has_workers_of_its_own() -> None:
    assert asyncio.run(compute(lambda _: 7)) == 7
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if asyncio.run(compute(lambda _: 7)) == 7 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
