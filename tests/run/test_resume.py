"""resume(): a thread goes on from wherever it stopped, in whatever process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus import Agent, AssistantMessage, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError, NothingToContinue, NothingToResume, ThreadBusy
from byssus.events import MessageEnd
from byssus.messages import ReplyStop
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from tests.support.agents import Heard, check_whole, history, make, sent, within
from tests.support.databases import Database


async def resumed(database: Database, messages: list[Any]) -> tuple[Agent, ScriptedProvider, list[str]]:
    """A fresh agent resumes a thread that somebody else wrote; the thread afterwards."""
    async with database.checkpointer() as cp:
        await cp.append("t", messages)
        provider = ScriptedProvider(["ok"])
        agent = make(provider, checkpointer=cp, thread_id="t")
        heard = Heard(agent)
        await agent.resume()
        check_whole(heard)
        thread = await cp.load("t")
        assert thread is not None
        assert all(event.message in thread.messages for event in heard.of(MessageEnd)), "told as stored, but it is not"
        return agent, provider, await history(cp, "t")


LOOK = ToolCall("c1", "look")
ASK = AssistantMessage([LOOK], "tool_use")
UNKNOWN = "The outcome of this call is unknown"


def short(lines: list[str]) -> list[str]:
    return [line.split(":")[0] + (" unknown" if UNKNOWN in line else "") for line in lines]


def test_a_thread_that_ends_with_a_user_is_answered(database: Database) -> None:
    _, provider, lines = within(resumed(database, [UserMessage("hi")]))
    assert sent(provider) == ["user: hi"]
    assert lines == ["user: hi", "assistant: ok"]


def test_a_thread_that_ends_with_a_result_is_answered(database: Database) -> None:
    result = {"role": "tool_result", "tool_call_id": "c1", "tool_name": "look", "content": "seen"}
    _, provider, lines = within(resumed(database, [UserMessage("hi"), ASK, result]))
    assert short(sent(provider)) == ["user", "assistant", "tool_result"]
    assert lines[-1] == "assistant: ok"


def test_a_thread_that_ends_with_an_open_call_gets_a_result_that_says_so(database: Database) -> None:
    agent, provider, lines = within(resumed(database, [UserMessage("hi"), ASK]))
    assert short(sent(provider)) == ["user", "assistant", "tool_result unknown"]
    assert short(lines) == ["user", "assistant", "tool_result unknown", "assistant"]
    assert [m.role for m in agent.state.messages] == ["user", "assistant", "tool_result", "assistant"]


def test_a_thread_with_one_of_two_results_keeps_it_and_gets_the_other(database: Database) -> None:
    ask = AssistantMessage([LOOK, ToolCall("c2", "look")], "tool_use")
    result = {"role": "tool_result", "tool_call_id": "c1", "tool_name": "look", "content": "seen"}
    _, provider, lines = within(resumed(database, [UserMessage("hi"), ask, result]))
    assert short(sent(provider)) == ["user", "assistant", "tool_result", "tool_result unknown"]
    assert short(lines) == ["user", "assistant", "tool_result", "tool_result unknown", "assistant"]


def test_a_thread_with_only_the_second_result_keeps_it_and_gets_the_first(database: Database) -> None:
    ask = AssistantMessage([LOOK, ToolCall("c2", "look")], "tool_use")
    result = {"role": "tool_result", "tool_call_id": "c2", "tool_name": "look", "content": "seen"}
    _, provider, _ = within(resumed(database, [UserMessage("hi"), ask, result]))
    assert short(sent(provider)) == ["user", "assistant", "tool_result unknown", "tool_result"]


def test_a_thread_with_an_open_call_and_a_message_behind_it_is_answered(database: Database) -> None:
    _, provider, _ = within(resumed(database, [UserMessage("hi"), ASK, UserMessage("well?")]))
    assert short(sent(provider)) == ["user", "assistant", "tool_result unknown", "user"]


@pytest.mark.parametrize("reason", ["error", "aborted"])
@pytest.mark.parametrize("text", ["", "Hel"])
def test_a_thread_that_ends_with_a_reply_that_broke_off_is_answered_anew(
    database: Database, reason: ReplyStop, text: str
) -> None:
    broken = AssistantMessage(text or [], reason)
    _, provider, lines = within(resumed(database, [UserMessage("hi"), broken]))
    assert sent(provider) == ["user: hi"]
    assert lines == ["user: hi", f"assistant: {text}", "assistant: ok"]


def test_a_thread_that_ends_with_an_answer_cannot_be_continued(database: Database) -> None:
    said = r"Cannot continue from message role: assistant; .* its last reply is complete; prompt\(\) continues"
    with pytest.raises(NothingToResume, match=said) as raised:
        within(resumed(database, [UserMessage("hi"), AssistantMessage("hello")]))
    assert isinstance(raised.value, InputError)
    assert isinstance(raised.value, NothingToContinue), "programs that catch the old name go on working"


def test_a_thread_that_ends_with_an_answer_is_continued_when_something_waits(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await cp.append("t", [UserMessage("hi"), AssistantMessage("hello")])
            for way in ("steer", "follow_up"):
                provider = ScriptedProvider(["ok"])
                agent = make(provider, checkpointer=cp, thread_id="t")
                getattr(agent, way)("go on")
                heard = Heard(agent)
                assert (await agent.resume()).text == "ok"
                check_whole(heard)
                assert sent(provider)[-1] == "user: go on"

    within(main())


@pytest.mark.parametrize("with_thread", [True, False])
def test_nothing_cannot_be_continued(database: Database, with_thread: bool) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            options: dict[str, Any] = {"checkpointer": cp, "thread_id": "t"} if with_thread else {}
            agent = make([], **options)
            heard = Heard(agent)
            with pytest.raises(InputError, match=r"no messages to continue from; prompt\(\)"):
                await agent.resume()
            assert heard == []
            assert await cp.load("t") is None
            assert not agent.state.is_streaming

    within(main())


def test_a_prompt_to_a_thread_with_open_calls_settles_them_first(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            ask = AssistantMessage([LOOK, ToolCall("c2", "look")], "tool_use")
            await cp.append("t", [UserMessage("go"), ask])
            provider = ScriptedProvider(["ok", "ok again"])
            agent = make(provider, checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            await agent.prompt("never mind")
            check_whole(heard)
            expected = ["user", "assistant", "tool_result unknown", "tool_result unknown", "user"]
            assert short(sent(provider)) == expected
            assert short(await history(cp, "t")) == [*expected, "assistant"]
            await agent.prompt("next")
            assert len(await history(cp, "t")) == 8

    within(main())


def test_resuming_does_not_run_a_tool_again(database: Database) -> None:
    ran: list[int] = []

    @tool
    def look() -> str:
        ran.append(1)
        return "seen"

    async def main() -> None:
        async with database.checkpointer() as cp:
            await cp.append("t", [UserMessage("go"), ASK])
            agent = make(["ok"], tools=[look], checkpointer=cp, thread_id="t")
            assert (await agent.resume()).text == "ok"
            assert ran == []

    within(main())


def test_an_agent_in_memory_resumes_after_a_failure() -> None:
    async def main() -> None:
        provider = ScriptedProvider([ValueError("down"), "ok"])
        agent = make(provider)
        assert (await agent.prompt("hi")).stop_reason == "error"
        assert (await agent.resume()).text == "ok"
        assert sent(provider) == ["user: hi"]

    within(main())


def test_of_two_agents_that_resume_at_once_one_goes_on_and_the_other_finds_the_thread_busy(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            for number in range(20):
                await resume_twice(cp, f"t{number}")

    async def resume_twice(cp: Checkpointer, thread_id: str) -> None:
        told = asyncio.Event()

        async def answer(request: Request) -> str:
            await told.wait()  # the run is not over before the other one has come
            return "ok"

        async def resume(agent: Agent) -> str:
            try:
                return (await agent.resume()).text
            except ThreadBusy as busy:
                told.set()
                return str(busy)

        await cp.append(thread_id, [UserMessage("go"), ASK])
        agents = [make([answer], checkpointer=cp, thread_id=thread_id) for _ in range(2)]
        heards = [Heard(agent) for agent in agents]
        results = await asyncio.gather(*map(resume, agents))
        busy = f"thread {thread_id!r} is being driven by "
        assert sorted(result if result == "ok" else result[: len(busy)] for result in results) == ["ok", busy]
        for heard in heards:
            check_whole(heard)
        assert short(await history(cp, thread_id)) == ["user", "assistant", "tool_result unknown", "assistant"]
        assert await cp.unfinished() == []

    within(main())
