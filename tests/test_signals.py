"""The signal: set once, from anywhere, heard by all; and work that ends when it is set, whether it likes it or not."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading

import pytest

from byssus.signals import Aborted, Signal, shielded, until_aborted, until_done, wait_all


def test_a_signal_is_set_once_and_its_first_reason_stays() -> None:
    signal = Signal()
    assert (signal.aborted, signal.reason) == (False, None)
    signal.abort("time_limit")
    signal.abort("later")
    assert (signal.aborted, signal.reason) == (True, "time_limit")


def test_each_callback_is_called_once() -> None:
    signal, called = Signal(), list[str]()
    signal.on_abort(lambda: called.append("a"))
    signal.on_abort(lambda: called.append("b"))
    signal.abort()
    signal.abort()
    assert called == ["a", "b"]


def test_a_callback_that_comes_late_is_called_at_once() -> None:
    signal, called = Signal(), list[str]()
    signal.abort()
    signal.on_abort(lambda: called.append("a"))
    assert called == ["a"]


def test_a_callback_can_be_taken_back() -> None:
    signal, called = Signal(), list[str]()
    forget = signal.on_abort(lambda: called.append("a"))
    forget()
    forget()
    signal.abort()
    assert called == []


def test_a_callback_may_use_the_signal() -> None:
    signal, called = Signal(), list[str | None]()
    signal.on_abort(lambda: called.append(signal.reason))
    signal.on_abort(lambda: signal.abort("again"))
    signal.abort("first")
    assert called == ["first"]


def test_a_callback_that_fails_does_not_keep_the_others_from_hearing() -> None:
    signal, called = Signal(), list[str]()

    def fail() -> None:
        raise ValueError("mine")

    signal.on_abort(fail)
    signal.on_abort(lambda: called.append("b"))
    with contextlib.suppress(ValueError):  # whether it is also raised is another question
        signal.abort()
    assert called == ["b"]


def test_a_waiter_is_woken_from_another_thread() -> None:
    async def main() -> None:
        signal = Signal()
        waiting = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        threading.Thread(target=signal.abort).start()
        await waiting

    asyncio.run(main())


def test_waiting_for_a_signal_that_is_set_returns() -> None:
    async def main() -> None:
        signal = Signal()
        signal.abort()
        await signal.wait()

    asyncio.run(main())


def test_work_that_is_done_gives_its_result() -> None:
    async def work() -> int:
        return 3

    assert asyncio.run(until_aborted(work(), Signal(), 1.0)) == 3


def test_work_that_fails_raises_its_error() -> None:
    async def work() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(until_aborted(work(), Signal(), 1.0))


def test_work_is_not_begun_when_the_signal_is_already_set() -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    signal = Signal()
    signal.abort()
    with pytest.raises(Aborted):
        asyncio.run(until_aborted(work(), signal, 1.0))
    assert begun == []


@pytest.mark.parametrize("from_thread", [False, True])
def test_work_ends_when_the_signal_is_set(from_thread: bool) -> None:
    async def main() -> None:
        signal, begun, cleaned = Signal(), asyncio.Event(), list[int]()

        async def work() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append(1)

        waiting = asyncio.create_task(until_aborted(work(), signal, 30.0))
        await begun.wait()
        if from_thread:
            threading.Thread(target=signal.abort).start()
        else:
            signal.abort()
        with pytest.raises(Aborted):
            await waiting
        assert cleaned == [1]

    asyncio.run(main())


def test_work_that_ignores_its_cancellation_is_left_behind() -> None:
    async def main() -> None:
        signal, begun, release = Signal(), asyncio.Event(), asyncio.Event()

        async def work() -> None:
            begun.set()
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            raise ValueError("nobody will ask")  # and nobody is told that nobody asked

        waiting = asyncio.create_task(until_aborted(work(), signal, 0.01))
        await begun.wait()
        signal.abort()
        with pytest.raises(Aborted):
            await waiting
        release.set()

    asyncio.run(main())


def test_work_that_finishes_in_its_grace_gives_its_result() -> None:
    async def main() -> str:
        signal, begun = Signal(), asyncio.Event()

        async def work() -> str:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "saved"
            return "never"

        waiting = asyncio.create_task(until_aborted(work(), signal, 30.0))
        await begun.wait()
        signal.abort()
        return await waiting

    assert asyncio.run(main()) == "saved"


def test_a_cancellation_of_the_caller_sets_the_signal() -> None:
    async def main() -> None:
        signal, begun = Signal(), asyncio.Event()

        async def work() -> None:
            begun.set()
            await asyncio.Event().wait()

        waiting = asyncio.create_task(until_aborted(work(), signal, 30.0))
        await begun.wait()
        waiting.cancel()
        with pytest.raises(Aborted):
            await waiting
        assert signal.reason == "cancelled"

    asyncio.run(main())


def test_a_signal_forgets_work_that_is_done() -> None:
    async def work() -> None:
        pass

    async def main() -> None:
        signal = Signal()
        for _ in range(10):
            await until_aborted(work(), signal, 1.0)
        assert signal._callbacks == []

    asyncio.run(main())


def test_waiting_for_all_outlasts_a_cancellation_and_sets_the_signal() -> None:
    async def main() -> None:
        signal, release = Signal(), asyncio.Event()
        tasks = {asyncio.create_task(release.wait()) for _ in range(3)}
        waiting = asyncio.create_task(wait_all(tasks, signal))
        await asyncio.sleep(0)
        waiting.cancel()
        await signal.wait()
        assert not waiting.done()
        release.set()
        await waiting
        assert all(task.done() for task in tasks)

    asyncio.run(main())


# --- waiting that a cancellation does not end -------------------------------------------------------------------------


def test_until_done_returns_the_last_cancellation_when_the_future_is_done() -> None:
    async def main() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        called: list[str] = []
        task = asyncio.ensure_future(until_done(future, lambda: called.append("cancelled")))
        for name in ("first", "last"):
            await asyncio.sleep(0)
            task.cancel(name)
            await asyncio.sleep(0)
        assert not task.done()
        future.set_result(None)
        cancelled = await task
        assert isinstance(cancelled, asyncio.CancelledError)
        assert cancelled.args == ("last",)
        assert called == ["cancelled"] * 2
        assert await until_done(future) is None

    asyncio.run(main())


def test_without_anyio_a_shield_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in (None, object()):  # not imported, or just being imported
        monkeypatch.setitem(sys.modules, "anyio", loaded)
        with shielded() as nothing:
            assert nothing is None
