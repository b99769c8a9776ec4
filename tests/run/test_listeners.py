"""Listeners: they hear everything, and none of them can harm a run."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

import pytest

from byssus.errors import InputError
from byssus.events import Event, MessageUpdate
from byssus.signals import Signal
from tests.support.agents import make, within

KINDS = [
    *["agent_start", "turn_start", "message_start", "message_end", "message_start"],
    *["message_update"] * 5,
    *["message_end", "turn_end", "agent_end"],
]


def kinds(events: list[Event]) -> list[str]:
    return [event.type for event in events]


# --- signatures -------------------------------------------------------------------------------------------------------


class Ear:
    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.signals: set[Signal | None] = set()

    def event(self, event: Event) -> None:
        self.heard.append(event)

    def both(self, event: Event, signal: Signal) -> None:
        self.heard.append(event)
        self.signals.add(signal)

    def optional(self, event: Event, signal: Signal | None = None) -> None:
        self.heard.append(event)
        self.signals.add(signal)

    def many(self, *events: Event) -> None:
        self.heard.extend(events)

    def __call__(self, event: Event) -> None:
        self.heard.append(event)

    async def later(self, event: Event) -> None:
        await asyncio.sleep(0)
        self.heard.append(event)

    async def later_both(self, event: Event, signal: Signal) -> None:
        self.heard.append(event)
        self.signals.add(signal)

    @staticmethod
    def static(heard: list[Event], event: Event) -> None:
        heard.append(event)


@pytest.mark.parametrize("name", ["event", "both", "optional", "many", "__call__", "later", "later_both"])
def test_a_listener_of_any_signature_hears_everything_in_order(name: str) -> None:
    ear = Ear()
    agent = make(["word"])
    agent.subscribe(getattr(ear, name))
    within(agent.prompt("hi"))
    assert kinds(ear.heard) == KINDS
    if name in ("both", "optional", "later_both"):
        assert len(ear.signals) == 1
        assert None not in ear.signals


def test_things_that_can_be_called_are_listeners() -> None:
    ear, appended, partly = Ear(), list[Event](), list[Event]()
    agent = make(["word"])
    agent.subscribe(ear)
    agent.subscribe(appended.append)
    agent.subscribe(functools.partial(Ear.static, partly))
    agent.subscribe(lambda event: None)
    within(agent.prompt("hi"))
    assert kinds(ear.heard) == kinds(appended) == kinds(partly) == KINDS


def test_print_is_a_listener(capsys: pytest.CaptureFixture[str]) -> None:
    agent = make(["word"])
    agent.subscribe(print)
    within(agent.prompt("hi"))
    assert len(capsys.readouterr().out.splitlines()) == len(KINDS)


def test_an_async_callable_object_is_a_listener() -> None:
    class Later:
        def __init__(self) -> None:
            self.heard: list[Event] = []

        async def __call__(self, event: Event, signal: Signal) -> None:
            self.heard.append(event)

    later, agent = Later(), make(["word"])
    agent.subscribe(later)
    within(agent.prompt("hi"))
    assert kinds(later.heard) == KINDS


def test_a_partial_of_an_async_function_is_a_listener() -> None:
    heard: list[Event] = []

    async def listen(to: list[Event], event: Event) -> None:
        to.append(event)

    agent = make(["word"])
    agent.subscribe(functools.partial(listen, heard))
    within(agent.prompt("hi"))
    assert kinds(heard) == KINDS


def nothing() -> None: ...
def three(a: object, b: object, c: object) -> None: ...
def named(*, event: object) -> None: ...
def demanding(event: object, *, more: object) -> None: ...


@pytest.mark.parametrize("listener", [nothing, three, named, demanding, None, 5, "print"])
def test_a_listener_that_cannot_be_called_is_refused_when_it_subscribes(listener: Any) -> None:
    with pytest.raises(InputError, match=r"f\(event\) or f\(event, signal\)"):
        make([]).subscribe(listener)


# --- harm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_listener_that_fails_is_reported_and_harms_nobody(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ValueError(f"no {event.type}")

    async def later(event: Event) -> None:
        fail(event)

    heard: list[Event] = []
    agent = make(["word", "again"])
    agent.subscribe(fail if kind == "sync" else later)
    leave = agent.subscribe(heard.append)
    with caplog.at_level(logging.ERROR, "byssus"):
        result = within(agent.prompt("hi"))
        leave()
    assert (result.stop_reason, result.text) == ("stop", "word")
    assert kinds(heard) == KINDS
    assert agent.state.error is None
    (record,) = caplog.records
    assert "failed on agent_start" in record.getMessage()
    assert "no agent_start" in caplog.text
    within(agent.prompt("hi"))
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_each_kind_of_failure_of_each_listener_is_reported_once_in_a_run(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise (KeyError if event.type.startswith("message") else ValueError)(event.type)

    async def later(event: Event) -> None:
        fail(event)

    agent = make(["word"])
    for _ in range(2):
        agent.subscribe(fail if kind == "sync" else later)
    within(agent.prompt("hi"))
    told = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert sorted(map(str, told)) == sorted(map(str, [KeyError, KeyError, ValueError, ValueError]))


def test_a_listener_that_returns_coroutines_is_reported_once_in_a_run(caplog: pytest.LogCaptureFixture) -> None:
    async def later() -> None: ...

    agent = make(["word"])
    agent.subscribe(lambda _: later())
    within(agent.prompt("hi"))
    (record,) = caplog.records
    assert "returned a coroutine" in record.getMessage()


def test_a_slow_async_listener_does_not_stall_the_run() -> None:
    """It hears nothing further until the run is over; a run that waited for it would never be."""

    async def main() -> None:
        over, heard = asyncio.Event(), list[Event]()

        async def slow(event: Event) -> None:
            heard.append(event)
            await over.wait()

        agent = make(["word"])
        agent.subscribe(slow)
        agent.subscribe(lambda event: over.set() if event.type == "agent_end" else None)
        await agent.prompt("hi")
        assert kinds(heard) == KINDS  # and it has heard all by the time that prompt() returns

    within(main())


def test_a_run_does_not_wait_for_ever_for_an_async_listener(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def stuck(event: Event) -> None:
            await release.wait()

        agent = make(["word", "another"], listener_timeout=0.01)
        agent.subscribe(stuck)
        assert (await agent.prompt("hi")).text == "word"
        assert (await agent.prompt("hi")).text == "another"
        release.set()

    with caplog.at_level(logging.WARNING, "byssus"):
        within(main())
    assert "still busy" in caplog.text


def test_an_async_listener_that_falls_behind_misses_updates_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        heard: list[Event] = []

        async def listen(event: Event) -> None:
            heard.append(event)

        agent = make([" ".join(["word"] * 5_000)])  # streamed without a pause: a listener has no chance to keep up
        agent.subscribe(listen)
        await agent.prompt("hi")
        others = [kind for kind in kinds(heard) if kind != "message_update"]
        assert others == [kind for kind in KINDS if kind != "message_update"]
        assert len([event for event in heard if isinstance(event, MessageUpdate)]) < 5_000

    with caplog.at_level(logging.WARNING, "byssus"):
        within(main())
    assert "missed" in caplog.text


def test_async_listeners_hear_beside_each_other() -> None:
    async def main() -> None:
        met = asyncio.Barrier(2)

        async def meet(event: Event) -> None:
            if event.type == "agent_start":
                await met.wait()

        async def meet_too(event: Event) -> None:
            await meet(event)

        agent = make(["word"])
        agent.subscribe(meet)
        agent.subscribe(meet_too)
        await agent.prompt("hi")
        assert met.n_waiting == 0

    within(main())


# --- coming and going -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_listener_that_unsubscribed_hears_nothing_more(kind: str) -> None:
    async def main() -> None:
        ear = Ear()
        agent = make(["word", "word"])
        stop = agent.subscribe(ear.event if kind == "sync" else ear.later)
        await agent.prompt("hi")
        stop()
        stop()
        await agent.prompt("hi")
        assert kinds(ear.heard) == KINDS

    within(main())


def test_the_same_listener_twice_hears_twice_and_leaves_once() -> None:
    async def main() -> None:
        ear = Ear()
        agent = make(["word", "word"])
        stop = agent.subscribe(ear.event)
        agent.subscribe(ear.event)
        await agent.prompt("hi")
        assert len(ear.heard) == 2 * len(KINDS)
        stop()
        await agent.prompt("hi")
        assert len(ear.heard) == 3 * len(KINDS)

    within(main())


def test_a_listener_may_leave_while_it_listens() -> None:
    heard: list[Event] = []
    first: list[Event] = []

    def once(event: Event) -> None:
        first.append(event)
        stop()

    agent = make(["word"])
    stop = agent.subscribe(once)
    agent.subscribe(heard.append)
    within(agent.prompt("hi"))
    assert kinds(first) == ["agent_start"]
    assert kinds(heard) == KINDS


@pytest.mark.parametrize("others", [0, 1])
def test_a_listener_that_joins_while_another_listens_hears_the_next_event(others: int) -> None:
    heard: list[Event] = []

    def invite(event: Event) -> None:
        if event.type == "turn_start":
            agent.subscribe(heard.append)

    agent = make(["word"])
    agent.subscribe(invite)
    for _ in range(others):
        agent.subscribe(lambda event: None)
    within(agent.prompt("hi"))
    assert kinds(heard) == KINDS[2:]


def test_listeners_outlast_an_event_loop() -> None:
    plain, later = Ear(), Ear()
    agent = make(["word", "word"])
    agent.subscribe(plain.event)
    agent.subscribe(later.later)
    asyncio.run(agent.prompt("hi"))
    asyncio.run(agent.prompt("hi"))
    assert kinds(plain.heard) == kinds(later.heard) == KINDS + KINDS
