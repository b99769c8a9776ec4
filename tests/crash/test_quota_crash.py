"""Quotas of processes that are killed: what they set aside counts no more, and a reply is paid for if it is stored.

    python -m tests.crash.test_quota_crash SCENE PLACE      the process that is killed

Nothing here waits for a time to pass: the child says where it stands, and stands still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from byssus import Agent, AssistantMessage, Model, ToolCall, tool
from byssus.checkpointer import Checkpointer
from byssus.events import Event, MessageEnd, StreamEvent, StreamStart, TextDelta, TextStart
from byssus.messages import Usage
from byssus.providers.base import Provider, Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.queries.accounts import quotas
from byssus.queries.log import threads
from byssus.signals import Signal
from byssus.store.database import Row, Tx
from tests.crash import databases
from tests.crash.place import Place
from tests.support import forked
from tests.support.leases import expire

ROOT = Path(__file__).parents[2]
TOTAL = 10_000_000
HOUR = 3_600.0


# --- the process that is killed ---------------------------------------------------------------------------------------


def say(what: str) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def stand_still() -> None:
    threading.Event().wait()


@tool
def look() -> str:
    return "seen"


class Talking:
    """Says a few words and then nothing more."""

    name = "talking"

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        yield TextStart(0)
        yield TextDelta(0, "Hel")
        say("asking")
        await asyncio.Event().wait()


def reply(content: Any, tokens: int) -> AssistantMessage:
    return AssistantMessage(content, "stop" if isinstance(content, str) else "tool_use", Usage(tokens))


def agent(cp: Checkpointer, provider: Provider, **options: Any) -> Agent:
    settings = {"model": Model("m", max_tokens=500), "tools": [look], "user_id": "ann", "thread_id": "t", **options}
    return Agent(provider=provider, checkpointer=cp, **settings)


def stop_after(module: Any, name: str) -> None:
    """Stand still inside the transaction, when this part of it is done."""
    real = getattr(module, name)

    def then_stop(*args: Any, **options: Any) -> Any:
        done = real(*args, **options)
        say("inside")
        stand_still()
        return done

    setattr(module, name, then_stop)


def stop_when_told(event: Event) -> None:
    if isinstance(event, MessageEnd) and isinstance(event.message, AssistantMessage):
        say("committed")
        stand_still()


def tell(event: Event) -> None:
    if isinstance(event, MessageEnd):
        say("message_end")


async def play(scene: str, cp: Checkpointer) -> None:
    match scene:
        case "asking":
            await agent(cp, Talking(), save_partial=None).prompt("go")
        case "settling":
            made = agent(cp, ScriptedProvider([reply("hello", 30)]))
            await cp.create_session("ann", session_id="t")
            stop_after(quotas, "settle")
            await made.prompt("go")
        case "adding":
            made = agent(cp, ScriptedProvider([reply("hello", 30)]))
            await cp.create_session("ann", session_id="t")
            real = threads.add

            def add(tx: Tx, branch: int, after: int, messages: Any, **options: Any) -> None:
                real(tx, branch, after, messages, **options)
                if any(message.role == "assistant" for message in messages):
                    say("inside")
                    stand_still()

            threads.add = add
            await made.prompt("go")
        case "committed":
            made = agent(cp, ScriptedProvider([reply("hello", 30)]))
            made.subscribe(stop_when_told)
            await made.prompt("go")
        case "talking":
            script: list[Step] = [reply([ToolCall("c1", "look")], 7), reply("done", 13)]
            made = agent(cp, ScriptedProvider(script * 100_000))
            made.subscribe(tell)
            for number in range(100_000):
                await made.prompt(f"prompt {number}")


async def main(scene: str, place: Place) -> None:
    async with place.checkpointer(lease_seconds=HOUR) as cp:
        await cp.create_user("ann", quota_total=TOTAL, user_id="ann")
        await play(scene, cp)


# --- the tests --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def killed(scene: str, place: Place, *, after: str, times: int = 1) -> Iterator[None]:
    """A process that has said something so many times, and then was killed."""
    command = ["-W", "error", "-m", "tests.crash.test_quota_crash", scene, str(place)]
    process = forked.Process(command, env=os.environ, cwd=ROOT, stdout=forked.PIPE)
    try:
        assert process.stdout is not None
        for _ in range(times):
            line = process.stdout.readline()
            assert line, f"the child ended too early, with {process.wait()}"
            assert json.loads(line) == after
    finally:
        process.kill()
        process.communicate()
    databases.settled(place)
    yield


def ask(place: Place, use: Any) -> None:
    async def go() -> None:
        async with place.checkpointer() as cp:
            await use(cp)

    asyncio.run(go())


async def used(cp: Checkpointer) -> int:
    user = await cp.get_user("ann")
    assert user is not None
    count: int = user["quota_used"]
    return count


async def replies(cp: Checkpointer) -> list[AssistantMessage]:
    thread = await cp.load("t")
    assert thread is not None
    return [message for message in thread.messages if isinstance(message, AssistantMessage)]


def reservations(tx: Tx) -> list[Row]:
    return tx.all("SELECT owner, tokens FROM reservations")


def test_what_a_dead_process_had_set_aside_counts_until_its_lease_is_dead_and_no_longer(place: Place) -> None:
    async def look_at(cp: Checkpointer) -> None:
        assert await used(cp) == 0
        ((owner, tokens),) = await cp.store.read(reservations)
        assert (owner, tokens > 500) == ("ann", True)
        assert not await cp.check_quota("ann", TOTAL - tokens + 1)
        assert await cp.check_quota("ann", TOTAL - tokens)
        await expire(cp)
        assert await cp.check_quota("ann", TOTAL)
        assert await cp.consume_quota("ann", TOTAL)

    with killed("asking", place, after="asking"):
        ask(place, look_at)


def test_who_takes_a_dead_process_thread_over_pays_for_one_reply_and_nothing_stays_set_aside(place: Place) -> None:
    async def go_on(cp: Checkpointer) -> None:
        result = await agent(cp, ScriptedProvider([reply("hello", 30)])).resume()
        assert (result.text, await used(cp)) == ("hello", 30)
        assert await cp.store.read(reservations) == []
        assert await cp.check_quota("ann", TOTAL - 30)

    with killed("asking", place, after="asking"):
        ask(place, go_on)


@pytest.mark.parametrize("scene", ["settling", "adding"])
def test_a_process_that_dies_inside_the_commit_of_a_reply_leaves_neither_the_reply_nor_its_price(
    place: Place, scene: str
) -> None:
    async def look_at(cp: Checkpointer) -> None:
        assert (await used(cp), await replies(cp)) == (0, [])
        session = await cp.get_session("t")
        assert session is not None
        assert (session["total_tokens"], session["message_count"]) == (0, 1)
        result = await agent(cp, ScriptedProvider([reply("hello", 40)])).resume()
        assert (result.text, await used(cp)) == ("hello", 40)
        assert await cp.check_quota("ann", TOTAL - 40)

    with killed(scene, place, after="inside"):
        ask(place, look_at)


def test_a_process_that_dies_behind_the_commit_of_a_reply_leaves_both(place: Place) -> None:
    async def look_at(cp: Checkpointer) -> None:
        assert (await used(cp), [message.text for message in await replies(cp)]) == (30, ["hello"])
        assert await cp.store.read(reservations) == []
        assert await cp.check_quota("ann", TOTAL - 30)

    with killed("committed", place, after="committed"):
        ask(place, look_at)


@pytest.mark.parametrize("times", [1, 4, 9, 22])
def test_whenever_a_process_dies_its_user_has_paid_for_what_is_stored(place: Place, times: int) -> None:
    async def look_at(cp: Checkpointer) -> None:
        stored = await replies(cp)
        paid = sum(message.usage.total for message in stored)
        assert await used(cp) == paid
        stats = await cp.get_usage_stats("ann")
        assert stats is not None
        assert stats["total_tokens"] == paid
        await expire(cp)
        assert await cp.check_quota("ann", TOTAL - paid)
        assert not await cp.check_quota("ann", TOTAL - paid + 1)

    with killed("talking", place, after="message_end", times=times):
        ask(place, look_at)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Place.told(sys.argv[2])))
