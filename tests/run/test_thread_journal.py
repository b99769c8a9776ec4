"""An agent and its thread: what one process said, the next one knows."""

from __future__ import annotations

import asyncio
import json
import math
import textwrap
from typing import Any

import pytest

from byssus import AssistantMessage, ImageContent, TextContent, ToolCall, ToolContext, Usage, UserMessage, tool
from byssus.checkpointer import Checkpointer, SQLiteCheckpointer
from byssus.errors import InputError, StoreNotOpen
from byssus.events import AgentStart
from byssus.providers.scripted import ScriptedProvider
from byssus.storage import AgentStorage
from tests.support import forked
from tests.support.agents import Acted, Hanging, Heard, check_whole, history, make, sent, within
from tests.support.databases import Database

CHAT = """
    import asyncio, json, sys
    from byssus import Agent, Model
    from byssus.checkpointer import checkpointer_for
    from byssus.providers.scripted import ScriptedProvider

    async def main(place, thread_id, prompt):
        provider = ScriptedProvider(["noted"])
        async with checkpointer_for(place) as cp:
            agent = Agent(provider=provider, model=Model("m"), checkpointer=cp, thread_id=thread_id)
            agent.state.extra["prompts"] = agent.state.extra.get("prompts", []) + [prompt]
            await agent.prompt(prompt)
            print(json.dumps([message.text for message in provider.requests[0].messages]))

    asyncio.run(main(*sys.argv[1:]))
"""


def chat(place: str, thread_id: str, prompt: str) -> list[str]:
    """One prompt in a process of its own; returns what the model was sent."""
    done = forked.run(["-W", "error", "-c", textwrap.dedent(CHAT), place, thread_id, prompt])
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.processes
def test_a_second_process_remembers_and_another_thread_is_blank(database: Database) -> None:
    assert chat(database.place, "trip", "I am Ann") == ["I am Ann"]
    assert chat(database.place, "trip", "who am I?") == ["I am Ann", "noted", "who am I?"]
    assert chat(database.place, "other", "who am I?") == ["who am I?"]


def test_another_agent_remembers_everything_as_it_was(database: Database) -> None:
    @tool
    def look() -> str:
        return "seen"

    async def main() -> None:
        async with database.checkpointer() as cp:
            first = make(
                [AssistantMessage([TextContent("hm"), ToolCall("c1", "look")], usage=Usage(1, 2)), "done"],
                tools=[look],
                checkpointer=cp,
                thread_id="t",
            )
            await first.prompt([TextContent("see"), ImageContent("iVBORw0KGgo=")])
            second = make(["ok"], checkpointer=cp, thread_id="t")
            await second.load()
            assert second.state.messages == first.state.messages
            assert second.state.usage == Usage(1, 2)

    within(main())


def test_thousands_of_threads_share_one_checkpointer(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:

            async def one(number: int) -> None:
                agent = make([f"re {number}"], checkpointer=cp, thread_id=f"t{number}")
                assert (await agent.prompt(f"{number}")).text == f"re {number}"

            await asyncio.gather(*(one(number) for number in range(200)))
            for number in (0, 57, 199):
                assert await history(cp, f"t{number}") == [f"user: {number}", f"assistant: re {number}"]

    within(main())


@pytest.mark.parametrize(
    "text", ["\0", "a\ud800b", "\U0001f600", "x" * 20_000_000], ids=["NUL", "surrogate", "emoji", "20 MB"]
)
def test_hard_text_is_said_stored_and_remembered(database: Database, text: str) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await make([lambda request: request.messages[-1].text], checkpointer=cp, thread_id="t").prompt(text)
            provider = ScriptedProvider(["ok"])
            await make(provider, checkpointer=cp, thread_id="t").prompt("again")
            said = [message.text for message in provider.requests[0].messages]
            assert said == [text, text, "again"]

    within(main())


def test_the_system_prompt_is_not_stored(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await make(["a"], system_prompt="old", checkpointer=cp, thread_id="t").prompt("hi")
            provider = ScriptedProvider(["b"])
            await make(provider, system_prompt="new", checkpointer=cp, thread_id="t").prompt("hi")
            assert provider.requests[0].system_prompt == "new"
            assert await history(cp, "t") == ["user: hi", "assistant: a", "user: hi", "assistant: b"]

    within(main())


def test_a_run_names_its_thread(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await cp.create_user("Ann", user_id="ann")

            @tool
            def where(ctx: ToolContext) -> str:
                return f"{ctx.thread_id} {ctx.user_id}"

            agent = make(
                [[ToolCall("c1", "where")], "ok"], tools=[where], checkpointer=cp, thread_id="t", user_id="ann"
            )
            heard = Heard(agent)
            result = await agent.prompt("go")
            assert heard.of(AgentStart)[0].thread_id == "t"
            assert result.messages[2].text == "t ann"

    within(main())


# --- others write -----------------------------------------------------------------------------------------------------


def test_what_another_wrote_between_two_prompts_is_seen_by_the_next(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp, database.checkpointer() as other:
            provider = ScriptedProvider(["a", "b"])
            agent = make(provider, checkpointer=cp, thread_id="t")
            await agent.prompt("one")
            await other.append("t", [UserMessage("by the way"), AssistantMessage("yes?")])
            await other.append("t", {"role": "system", "content": "a note"})
            heard = Heard(agent)
            assert (await agent.prompt("two")).text == "b"
            check_whole(heard)
            assert sent(provider) == ["user: one", "assistant: a", "user: by the way", "assistant: yes?", "user: two"]
            assert len(await history(cp, "t")) == len(agent.state.messages) == 7

    within(main())


def test_two_agents_that_take_turns_see_each_other(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            providers = [ScriptedProvider(["a0", "a1"]), ScriptedProvider(["b0", "b1"])]
            agents = [make(provider, checkpointer=cp, thread_id="t") for provider in providers]
            for turn in range(2):
                for agent in agents:
                    await agent.prompt(f"p{turn}")
            assert [line.split(": ")[1] for line in sent(providers[1])] == ["p0", "a0", "p0", "b0", "p1", "a1", "p1"]

    within(main())


@pytest.mark.processes
def test_a_process_that_wrote_between_two_prompts_is_seen_by_the_next(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            provider = ScriptedProvider(["a", "b"])
            agent = make(provider, checkpointer=cp, thread_id="t")
            await agent.prompt("one")
            await asyncio.to_thread(chat, database.place, "t", "from elsewhere")
            await agent.prompt("two")
            assert [line.split(": ")[1] for line in sent(provider)] == ["one", "a", "from elsewhere", "noted", "two"]

    within(main())


def test_a_broken_row_of_a_foreign_hand_does_not_stop_the_agent(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            odd: list[dict[str, Any]] = [
                {"role": "assistant", "content": None},
                {"role": "user"},
                {"role": "assistant", "content": "hi", "usage": "many"},
                {"anything": 1},
            ]
            await cp.append("t", [UserMessage("hi"), *odd])
            provider = ScriptedProvider(["ok"])
            agent = make(provider, checkpointer=cp, thread_id="t")
            assert (await agent.prompt("go")).text == "ok"
            assert sent(provider) == ["user: hi", "user: go"]
            assert agent.state.usage == Usage()

    within(main())


# --- extra ------------------------------------------------------------------------------------------------------------


async def stored_extra(cp: Checkpointer) -> dict[str, Any]:
    thread = await cp.load("t")
    assert thread is not None
    return thread.extra


def test_extra_is_stored_with_the_run_and_known_to_the_next_agent(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["a", "b"], checkpointer=cp, thread_id="t")
            agent.state.extra["mood"] = {"now": ["good", None, 2**70]}
            await agent.prompt("hi")
            assert await stored_extra(cp) == {"mood": {"now": ["good", None, 2**70]}}
            second = make(["c"], checkpointer=cp, thread_id="t")
            second.state.extra["more"] = 1
            await second.prompt("hi")
            assert second.state.extra == await stored_extra(cp) == {"mood": {"now": ["good", None, 2**70]}, "more": 1}

    within(main())


def test_a_key_that_was_removed_from_extra_is_removed(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["a", "b"], checkpointer=cp, thread_id="t")
            agent.state.extra.update(keep=1, drop=2)
            await agent.prompt("hi")
            del agent.state.extra["drop"]
            await agent.prompt("hi")
            assert await stored_extra(cp) == {"keep": 1}

    within(main())


def test_a_tool_may_write_to_extra(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:

            @tool
            def remember(ctx: ToolContext) -> None:
                ctx.extra["from"] = "tool"

            await make([[ToolCall("c1", "remember")], "ok"], tools=[remember], checkpointer=cp, thread_id="t").prompt(
                "go"
            )
            assert await stored_extra(cp) == {"from": "tool"}

    within(main())


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**300, "\0\ud800", {"": [None]}], ids=repr)
def test_extra_holds_hard_values(database: Database, value: Any) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["a"], checkpointer=cp, thread_id="t")
            agent.state.extra["x"] = value
            await agent.prompt("hi")
            assert repr(await stored_extra(cp)) == repr({"x": value})

    within(main())


@pytest.mark.parametrize("with_thread", [True, False])
@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 10**5000], ids=["object", "set", "bytes", "endless"])
def test_extra_that_cannot_be_stored_is_named_before_anything_is_written(
    database: Database, value: Any, with_thread: bool
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            options: dict[str, Any] = {"checkpointer": cp, "thread_id": "t"} if with_thread else {}
            provider = ScriptedProvider(["ok"])
            agent = make(provider, **options)
            heard = Heard(agent)
            agent.state.extra["fine"] = 1
            agent.state.extra["bad"] = value
            with pytest.raises(InputError, match=r"extra\['bad'\]"):
                await agent.prompt("hi")
            assert heard == []
            assert provider.requests == []
            assert await cp.load("t") is None
            assert agent.state.messages == []
            del agent.state.extra["bad"]
            assert (await agent.prompt("hi")).text == "ok"

    within(main())


def test_extra_survives_an_abort_and_a_failure_of_the_model(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            hanging = Hanging()
            agent = make(Acted(hanging), checkpointer=cp, thread_id="t")
            agent.state.extra["x"] = 1
            running = asyncio.create_task(agent.prompt("hi"))
            await hanging.begun.wait()
            agent.abort()
            await running
            assert await stored_extra(cp) == {"x": 1}

    within(main())


def test_extra_that_was_set_before_a_resume_is_stored(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make([ValueError("down"), "ok"], checkpointer=cp, thread_id="t")
            await agent.prompt("hi")
            agent.state.extra["tried"] = 2
            assert (await agent.resume()).text == "ok"
            assert await stored_extra(cp) == {"tried": 2}

    within(main())


def test_extra_that_was_set_before_others_wrote_to_the_thread_is_stored(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["a", "b"], checkpointer=cp, thread_id="t")
            agent.state.extra["kept"] = 0
            await agent.prompt("hi")
            agent.state.extra["mine"] = 1
            await cp.append("t", UserMessage("by the way"))
            await agent.prompt("hi")
            assert await stored_extra(cp) == {"kept": 0, "mine": 1}

    within(main())


def test_extra_that_was_set_before_calls_are_recovered_is_stored(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await cp.append("t", [UserMessage("go"), AssistantMessage([ToolCall("c1", "look")], "tool_use")])
            agent = make(["ok"], checkpointer=cp, thread_id="t")
            agent.state.extra["mine"] = 1
            await agent.prompt("hi")
            assert await stored_extra(cp) == {"mine": 1}

    within(main())


def test_extra_that_another_saved_between_two_prompts_is_seen(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["a", "b"], checkpointer=cp, thread_id="t")
            await agent.prompt("hi")
            await cp.save_extra("t", {"theirs": 1})
            await agent.prompt("hi")
            assert agent.state.extra == {"theirs": 1}
            assert await stored_extra(cp) == {"theirs": 1}

    within(main())


# --- how it is built and opened ---------------------------------------------------------------------------------------


def test_a_thread_id_without_a_checkpointer_is_refused_and_the_other_way_round(database: Database) -> None:
    with pytest.raises(InputError, match="'t' without a checkpointer"):
        make([], thread_id="t")
    with pytest.raises(InputError, match="checkpointer without a thread_id"):
        make([], checkpointer=database.checkpointer())


def test_a_storage_is_refused_as_a_checkpointer(database: Database) -> None:
    with AgentStorage(database.place) as storage, pytest.raises(InputError, match=r"SQLiteCheckpointer.*AgentStorage"):
        make([], checkpointer=storage, thread_id="t")


@pytest.mark.parametrize("thread_id", ["", "a\0b", "\ud800", 5])
def test_a_thread_id_that_cannot_be_one_is_refused_when_the_agent_is_built(database: Database, thread_id: Any) -> None:
    with pytest.raises(InputError, match="thread id"):
        make([], checkpointer=database.checkpointer(), thread_id=thread_id)


@pytest.mark.parametrize("way", ["prompt", "resume", "load"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_checkpointer_that_is_not_open_is_an_error_that_says_what_to_do(
    database: Database, way: str, closed: bool
) -> None:
    async def main() -> None:
        cp = database.checkpointer()
        agent = make(["ok"], checkpointer=cp, thread_id="t")
        heard = Heard(agent)
        if closed:
            await cp.open()
            await cp.close()
        with pytest.raises(StoreNotOpen, match="async with"):
            await (agent.prompt("hi") if way == "prompt" else getattr(agent, way)())
        check_whole(heard)
        assert not agent.state.is_streaming
        async with cp:
            assert (await agent.prompt("hi")).text == "ok"

    within(main())


def test_an_agent_and_its_checkpointer_serve_several_event_loops(database: Database) -> None:
    cp = database.checkpointer()
    asyncio.run(cp.open())
    agent = make(["a", "b", "c"], checkpointer=cp, thread_id="t")
    for prompt in ("one", "two", "three"):
        asyncio.run(agent.prompt(prompt))
    assert len(asyncio.run(history(cp, "t"))) == 6
    asyncio.run(cp.close())


def test_a_checkpointer_in_memory_works_too() -> None:
    async def main() -> None:
        async with SQLiteCheckpointer(":memory:") as cp:
            await make(["a"], checkpointer=cp, thread_id="t").prompt("one")
            provider = ScriptedProvider(["b"])
            await make(provider, checkpointer=cp, thread_id="t").prompt("two")
            assert sent(provider) == ["user: one", "assistant: a", "user: two"]

    within(main())
