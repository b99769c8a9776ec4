"""A follower in a process of its own, while the process that drives the thread is killed at its write boundaries.

A life of the driver goes on with what the one before has left, then prompts until it is killed. The lives differ in the
boundary at which they end, so that all boundaries of a run are tried: before and after each of its first commits.
The follower is cut off, too, and goes on with the cursor of the last item that it has seen. In the end, what it has
seen is the log: each message once. With strict streams, nothing that it, or a listener, was ever shown is taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from byssus import Agent, AssistantMessage, Model, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import NothingToResume
from byssus.events import Event, MessageUpdate, StreamDone, StreamEvent, StreamStart, TextDelta, ToolCallEnd
from byssus.messages import encode
from byssus.providers.base import Request
from byssus.signals import Signal
from byssus.values.following.items import ReplyDelta, ReplyReset, item_from_json
from tests.crash.place import Place
from tests.crash.stage.actors import Actor, Broken, Line
from tests.crash.stage.judge import expect
from tests.support.following import Client

_WORDS = 6
_BOUNDARIES = range(1, 25)  # as many as a run has, or more


def followed(chance: random.Random, directory: Path, place: Place) -> None:
    """The driver is killed at its write boundaries while another process follows; what it saw is the log."""
    is_strict = chance.random() < 0.6
    seen = _Seen(is_strict=is_strict)
    follower = Actor("follower", functools.partial(_follow, place=place, after=None))
    try:
        follower.hear("open")
        for dies_at in (*chance.sample(_BOUNDARIES, len(_BOUNDARIES)), None):
            drive = functools.partial(_drive, place=place, dies_at=dies_at, is_strict=is_strict)
            with Actor("driver", drive) as driver:
                while driver.listen():
                    pass
                seen.shown += [line["text"] for line in driver.lines("shown")]
                expect(bool(driver.lines("over")) == (dies_at is None), f"a driver was not killed at {dies_at}")
            if chance.random() < 0.4:
                follower.kill()
                seen.take(follower)
                follower = Actor("follower", functools.partial(_follow, place=place, after=seen.client.cursor))
                follower.hear("open")
        with Actor("judge", functools.partial(_look, place=place)) as judge:
            log = judge.hear("log")["log"]
        while seen.count(follower) < len(log):
            follower.listen()
    finally:
        follower.kill()
    seen.judge(log)


class _Seen:
    """What a client has seen through all followers, and what listeners of the drivers were shown."""

    def __init__(self, *, is_strict: bool) -> None:
        self.client = Client()
        self.shown: list[str] = []
        self._is_strict = is_strict
        self._texts: list[str] = []  # of replies while they arrived
        self._resets = 0

    def take(self, follower: Actor) -> None:
        for said in follower.lines("item"):
            item = item_from_json(said["item"])
            self.client.see([item])
            self._resets += isinstance(item, ReplyReset)
            if isinstance(item, ReplyDelta) and item.kind == "text":
                self._texts.append(self.client.arriving[item.block])
        follower.said.clear()
        follower._taken = 0

    def count(self, follower: Actor) -> int:
        """How many messages were seen."""
        self.take(follower)
        return len(self.client.messages)

    def judge(self, log: list[str]) -> None:
        if [encode(message) for message in self.client.log] != log:
            raise Broken(f"a client has seen {self.client.texts}, and the log is {log}")
        if self.client.twice:
            raise Broken(f"messages came twice: {self.client.twice}")
        if not self._is_strict:
            return
        stored = [message.text for message in self.client.log if isinstance(message, AssistantMessage)]
        for text in [*self.shown, *self._texts]:
            if not any(each.startswith(text) for each in stored):
                raise Broken(f"{text!r} was shown, and is not stored: {stored}")
        if self._resets:
            raise Broken("a reply was taken back")


# --- the processes ----------------------------------------------------------------------------------------------------


async def _follow(line: Line, place: Place, after: str | None) -> None:
    async with place.checkpointer() as cp:
        line.say("open")
        async for item in cp.follow("t", after=after):
            line.say("item", item=item.to_json())


async def _look(line: Line, place: Place) -> None:
    async with place.checkpointer() as cp:
        thread = await cp.load("t")
        assert thread is not None
        line.say("log", log=[encode(message) for message in thread.messages])


@tool(recovery="retry", max_attempts=None)
def act(number: int) -> str:
    return f"act {number}"


class _Model:
    """Answers each prompt with the calls of two tools, and then with some words, slowly."""

    name = "model"

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        return self._stream(request, signal)

    async def _stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        if isinstance(request.messages[-1], UserMessage):
            for number in range(2):
                yield ToolCallEnd(number, ToolCall(f"c{number}", "act", {"number": number}))
            yield StreamDone("tool_use")
            return
        mark = os.urandom(4).hex()  # no two replies begin alike: what was shown of one is not found in another
        for number in range(_WORDS):
            yield TextDelta(0, f"{mark} word{number} ")
            await asyncio.sleep(0.02)
        yield StreamDone()


async def _drive(line: Line, place: Place, dies_at: int | None, *, is_strict: bool) -> None:
    boundaries = 0

    def reach(_: str) -> None:
        nonlocal boundaries
        boundaries += 1
        if boundaries == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async with place.checkpointer(lease_seconds=2.0) as cp:
        cp.store.boundary = reach if dies_at is not None else None
        await _go_on(line, cp, "strict" if is_strict else "normal")


async def _go_on(line: Line, cp: Checkpointer, durability: Any) -> None:
    texts: dict[int, str] = {}

    def hear(event: Event) -> None:
        if event.type == "message_start":
            texts.clear()
        if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta):
            texts[0] = texts.get(0, "") + event.stream_event.delta
            line.say("shown", text=texts[0])

    agent = Agent(
        provider=_Model(),
        model=Model("m"),
        checkpointer=cp,
        thread_id="t",
        tools=[act],
        stream_durability=durability,
        save_partial=0.03,
        wait=30,
    )
    agent.subscribe(hear)
    with contextlib.suppress(NothingToResume):
        await agent.resume()
    while True:
        await agent.prompt("go")
        if cp.store.boundary is None:
            line.say("over")
            return
