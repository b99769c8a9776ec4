"""Signals that end a screen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from byssus.cli.screen import signals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_screen_and_one_that_comes_after_its_end_does_nothing(number: int) -> None:
    async def main() -> int:
        left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        signals.on_end(left.set_result)
        os.kill(os.getpid(), number)
        return await left

    assert asyncio.run(main()) == number
    os.kill(os.getpid(), number)  # the loop is closed: without a handler, this ends the tests
