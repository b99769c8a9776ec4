"""Half a reply: what had arrived when its run ended is shown, kept, and never stored twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from byssus import AssistantMessage, Middleware, ToolCall
from byssus.checkpointer import Checkpointer
from byssus.errors import HookFailed, LeaseLost, NetworkFailed, ThreadBusy
from byssus.events import (
    MessageEnd,
    StreamDone,
    StreamEvent,
    StreamStart,
    TextDelta,
    TextEnd,
    TextStart,
    ThinkingDelta,
    ThinkingStart,
    ToolCallEnd,
    ToolCallStart,
)
from byssus.messages import TextContent, ThinkingContent, encode
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.log import threads
from byssus.signals import Signal
from byssus.values.thread_key import ThreadKey
from tests.support.agents import Acted, Heard, check_whole, history, sent
from tests.support.checkpointers import loaded, texts
from tests.support.databases import Database
from tests.support.histories import flaws
from tests.support.leases import (
    FAR_AWAY,
    Streaming,
    agent_on,
    claim,
    die,
    expire,
    lease_of,
    look,
    partial,
    take_over,
    until,
    with_two,
)

# --- half a reply -----------------------------------------------------------------------------------------------------


async def cut(cp: Checkpointer, *words: str) -> None:
    """A thread whose run died while this was arriving."""
    streaming = Streaming(*words)
    agent = agent_on(cp, Acted(streaming), save_partial=0.005)
    run = asyncio.create_task(agent.prompt("go"))
    await until(lambda: streaming.is_saved(cp))
    await die(cp, agent, run)


def test_whoever_looks_at_the_thread_sees_the_reply_grow_and_then_the_reply(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        words = asyncio.Queue[str | None]()

        async def scene(request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
            yield StreamStart()
            yield TextStart(0)
            while (word := await words.get()) is not None:
                yield TextDelta(0, word)
            yield TextEnd(0)
            yield StreamDone()

        agent = agent_on(cp, Acted(scene), save_partial=0.005)
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        seen = ""
        for word in ("one", " two", " \0\ud800-", " 汉字"):
            words.put_nowait(word)
            seen += word
            await until(lambda seen=seen: _is_partial(other, seen))  # type: ignore[misc]
            thread = await loaded(other, "t")
            assert [message.text for message in thread.messages] == ["go"]
            assert thread.partial is not None
            assert thread.partial.stop_reason == "aborted"
        words.put_nowait(None)
        await run
        thread = await loaded(other, "t")
        assert thread.partial is None
        assert [message.text for message in thread.messages] == ["go", seen]
        assert len(heard.of(MessageEnd)) == 2

    with_two(database, use)


async def _is_partial(cp: Checkpointer, text: str) -> bool:
    return await partial(cp) == text


def test_the_part_of_a_reply_has_its_thoughts_and_no_calls(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        async def scene(request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
            yield StreamStart("m-1")
            yield ThinkingStart(0)
            yield ThinkingDelta(0, "hm")
            yield TextStart(1)
            yield TextDelta(1, "so")
            yield ToolCallStart(2, "c1", "look")
            yield ToolCallEnd(2, ToolCall("c1", "look"))
            await asyncio.Event().wait()

        agent = agent_on(cp, Acted(scene), tools=[look], save_partial=0.005)
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: _is_partial(other, "so"))
        saved = (await loaded(other, "t")).partial
        assert saved is not None
        assert saved.content == [ThinkingContent("hm"), TextContent("so")]
        assert saved.id is not None
        await die(cp, agent, run)
        provider = ScriptedProvider(["ok"])
        assert (await agent_on(other, provider, tools=[look]).resume()).text == "ok"
        assert flaws(provider.requests[0].messages) == []
        assert await other.tool_calls("t") == []

    with_two(database, use)


def test_nothing_is_saved_before_the_reply_unless_it_is_wanted(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        saved: list[Any] = []
        real = cp.store.submit

        def submit(query: Any, /, *args: Any, **kwargs: Any) -> Any:
            saved.append(query)
            return real(query, *args, **kwargs)

        monkeypatch.setattr(cp.store, "submit", submit)
        for seconds in (None, 0.01):
            streaming = Streaming("one ")
            run = asyncio.create_task(agent_on(cp, Acted(streaming), save_partial=seconds).prompt("go"))
            await asyncio.sleep(0.1)
            streaming.let_go.set()
            await run
            assert (threads.save_partial in saved) == (seconds is not None)
            assert saved.count(threads.save_partial) <= 2  # what has not grown is not saved again

    with_two(database, use)


@pytest.mark.parametrize("ending", ["reply", "failure", "abort", "cancel", "remote abort"])
def test_the_part_of_a_reply_is_gone_when_the_run_has_ended(database: Database, ending: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        streaming = Streaming("one ", then=NetworkFailed("cut") if ending == "failure" else None)
        agent = agent_on(cp, Acted(streaming), save_partial=0.005, max_retries=0)
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: streaming.is_saved(other))
        if ending == "abort":
            agent.abort()
        elif ending == "cancel":
            run.cancel()
        elif ending == "remote abort":
            await other.abort("t")
        else:
            streaming.let_go.set()
        await asyncio.wait([run])
        thread = await loaded(other, "t")
        assert thread.partial is None
        assert [message.text for message in thread.messages] == ["go", "one end" if ending == "reply" else "one "]

    with_two(database, use)


def test_the_part_of_a_reply_that_a_hook_refused_is_gone(database: Database) -> None:
    class Refuses(Middleware):
        async def after_model_response(self, message: AssistantMessage, **_: Any) -> None:
            raise ValueError("not fit for print")

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        streaming = Streaming("secret ")
        agent = agent_on(cp, Acted(streaming), middleware=[Refuses()], save_partial=0.005)
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: streaming.is_saved(other))
        streaming.let_go.set()
        with pytest.raises(HookFailed):
            await run
        assert await partial(other) is None
        await agent_on(other, ["ok"]).prompt("again")
        assert await texts(cp, "t") == ["go", "again", "ok"]

    with_two(database, use)


def test_after_a_crash_the_part_joins_the_history_and_the_model_is_asked_again(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cut(cp, "one ", "two ")
        assert await partial(other) == "one two "
        provider = ScriptedProvider(["all of it"])
        agent = agent_on(other, provider)
        heard = Heard(agent)
        result = await agent.resume()
        check_whole(heard)
        assert sent(provider) == ["user: go"]  # at the end of the history, it would have to be gone on with
        assert [message.text for message in result.messages] == ["one two ", "all of it"]
        thread = await loaded(cp, "t")
        assert thread.partial is None
        kept = thread.messages[1]
        assert isinstance(kept, AssistantMessage)
        assert (kept.text, kept.stop_reason) == ("one two ", "aborted")
        assert kept.error is not None
        assert kept.error.kind == "Interrupted"
        assert await texts(cp, "t") == ["go", "one two ", "all of it"]
        assert await other.unfinished() == []

    with_two(database, use)


def test_after_a_crash_a_prompt_comes_behind_the_part_which_the_model_then_sees(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cut(cp, "one ", "two ")
        provider = ScriptedProvider(["fine"])
        await agent_on(other, provider).prompt("go on from there")
        assert sent(provider) == ["user: go", "assistant: one two ", "user: go on from there"]
        assert await history(cp, "t") == [*sent(provider), "assistant: fine"]
        assert await partial(cp) is None

    with_two(database, use)


@pytest.mark.parametrize("way", ["prompt", "resume"])
def test_the_part_of_a_reply_joins_the_history_once(database: Database, way: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cut(cp, "half ")
        agent = agent_on(other, ["a", "b", "c"])
        await (agent.prompt("one") if way == "prompt" else agent.resume())
        await agent.prompt("two")
        await agent.prompt("three")
        assert (await texts(cp, "t")).count("half ") == 1

    with_two(database, use)


def test_an_agent_that_was_refused_while_the_reply_was_arriving_finds_its_part_later(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        theirs = await claim(cp, FAR_AWAY, "go")
        agent = agent_on(other, ["fine", "and on"])
        with pytest.raises(ThreadBusy):
            await agent.prompt("me too")
        await cp.store.write(
            threads.save_partial, ThreadKey("", "t"), encode(AssistantMessage("half", "aborted")), by=theirs
        )
        await expire(cp)
        await agent.prompt("now?")
        assert await texts(cp, "t") == ["go", "half", "now?", "fine"]
        assert await partial(cp) is None
        await agent_on(cp, ["well"]).prompt("and?")
        assert await texts(cp, "t") == ["go", "half", "now?", "fine", "and?", "well"]

    with_two(database, use)


def test_an_agent_that_waits_for_a_run_sees_its_reply_and_not_the_part(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        streaming = Streaming("one ")
        run = asyncio.create_task(agent_on(cp, Acted(streaming), save_partial=0.005).prompt("go"))
        await until(lambda: streaming.is_saved(other))
        provider = ScriptedProvider(["fine"])
        waiting = asyncio.create_task(agent_on(other, provider, wait=30).prompt("me too"))
        await asyncio.sleep(0.03)
        streaming.let_go.set()
        await asyncio.gather(run, waiting)
        assert await texts(cp, "t") == ["go", "one end", "me too", "fine"]
        assert await partial(cp) is None

    with_two(database, use)


def test_a_run_that_lost_its_thread_saves_no_more_of_its_reply(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        streaming = Streaming("one ")
        agent = agent_on(cp, Acted(streaming), save_partial=0.005)
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: streaming.is_saved(other))
        await take_over(other)
        streaming.let_go.set()
        with pytest.raises(LeaseLost):
            await run
        assert await partial(other) == "one "
        assert (await lease_of(other)).owner == FAR_AWAY
        await expire(cp)
        assert (await agent_on(other, ["ok"]).resume()).text == "ok"
        assert await texts(cp, "t") == ["go", "one ", "ok"]

    with_two(database, use)
