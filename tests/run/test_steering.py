"""Steering and following up: how something gets into a run."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from byssus import ToolCall, UserMessage, tool
from byssus.errors import InputError
from byssus.events import Event
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from tests.support.agents import Acted, Hanging, Heard, check_whole, history, make, sent, within
from tests.support.databases import Database


@tool
def look() -> str:
    return "seen"


def test_steering_reaches_the_model_before_its_next_turn_behind_the_results() -> None:
    def say(request: Request) -> list[ToolCall]:
        agent.steer("look left")
        return [ToolCall("c1", "look")]

    provider = ScriptedProvider([say, "ok"])
    agent = make(provider, tools=[look])
    assert within(agent.prompt("go")).text == "ok"
    assert sent(provider) == ["user: go", "assistant: ", "tool_result: seen", "user: look left"]


def test_steering_comes_before_following_up_and_each_one_at_a_time() -> None:
    provider = ScriptedProvider(list("abcde"))
    agent = make(provider)
    for number in "12":
        agent.follow_up(f"follow {number}")
        agent.steer(f"steer {number}")
    within(agent.prompt("go"))
    said = [line for line in sent(provider) if line.startswith("user")]
    assert said == ["user: go", "user: steer 1", "user: steer 2", "user: follow 1", "user: follow 2"]
    assert [len(request.messages) for request in provider.requests] == [1, 3, 5, 7, 9]


def test_follow_up_mode_all_takes_all_at_once() -> None:
    provider = ScriptedProvider(["a", "b"])
    agent = make(provider, follow_up_mode="all")
    agent.follow_up("1")
    agent.follow_up("2")
    within(agent.prompt("go"))
    assert sent(provider) == ["user: go", "assistant: a", "user: 1", "user: 2"]


def test_steering_from_another_thread_is_heard() -> None:
    async def reply_after_steering(request: Request) -> str:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def elsewhere() -> None:
            agent.steer("from elsewhere")
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=elsewhere).start()
        await done.wait()
        return "one"

    provider = ScriptedProvider([reply_after_steering, "ok"])
    agent = make(provider)
    assert within(agent.prompt("go")).text == "ok"
    assert sent(provider)[-1] == "user: from elsewhere"


def test_steering_and_following_up_while_idle_wait_for_the_next_run() -> None:
    provider = ScriptedProvider(["a", "b", "c"])
    agent = make(provider)
    agent.follow_up("later")
    agent.steer(UserMessage("soon"))
    assert provider.requests == []
    within(agent.prompt("go"))
    assert sent(provider)[0::2] == ["user: go", "user: soon", "user: later"]


def test_a_listener_may_steer_on_the_last_event_that_still_counts() -> None:
    provider = ScriptedProvider(["a", "b"])
    agent = make(provider)
    said: list[int] = []

    def listen(event: Event) -> None:
        if event.type == "turn_end" and not said:
            said.append(1)
            agent.steer("one more thing")

    agent.subscribe(listen)
    assert within(agent.prompt("go")).text == "b"


def test_what_was_steered_into_a_run_that_was_aborted_waits_for_the_next_one(database: Database) -> None:
    async def main() -> None:
        hanging = Hanging("Hel")
        async with database.checkpointer() as cp:
            agent = make(Acted(hanging), checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            running = asyncio.create_task(agent.prompt("hi"))
            await hanging.begun.wait()
            agent.steer("not like this")
            agent.abort()
            await running
            check_whole(heard)
            assert await history(cp, "t") == ["user: hi", "assistant: Hel"]
            assert [(item.kind, item.message.text) for item in await agent.inbox()] == [("steer", "not like this")]
            provider = ScriptedProvider(["better", "well then"])
            await make(provider, checkpointer=cp, thread_id="t").prompt("again")  # as in another process
            assert sent(provider)[-3:] == ["user: again", "assistant: better", "user: not like this"]
            assert await agent.inbox() == []

    within(main())


def test_what_was_taken_from_the_inbox_is_stored_in_order(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["a", "b", "c"], checkpointer=cp, thread_id="t")
            agent.steer("s")
            agent.follow_up("f")
            await agent.prompt("go")
            assert await history(cp, "t") == [
                "user: go",
                "assistant: a",
                "user: s",
                "assistant: b",
                "user: f",
                "assistant: c",
            ]

    within(main())


@pytest.mark.parametrize("way", ["steer", "follow_up"])
@pytest.mark.parametrize("message", ["", "  \n", UserMessage(""), UserMessage([]), None, 5, b"x"])
def test_nothing_cannot_be_said_into_a_run(way: str, message: Any) -> None:
    agent = make([])
    with pytest.raises(InputError, match=rf"{way}\(\)"):
        getattr(agent, way)(message)


@pytest.mark.parametrize("name", ["steering_mode", "follow_up_mode", "tool_mode"])
@pytest.mark.parametrize("mode", ["", "ALL", "one", None, 1])
def test_an_unknown_mode_is_refused_by_name(name: str, mode: Any) -> None:
    with pytest.raises(InputError, match=rf"{name} must be .*{mode!r}"):
        make([], **{name: mode})
