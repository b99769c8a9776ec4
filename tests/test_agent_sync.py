"""run_sync(): an agent in a program without an event loop, many times in a row and from any OS thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from byssus import Agent, Model, ToolCall, tool
from byssus.errors import AgentBusy, InputError, Overloaded, StoreNotOpen
from byssus.events import AgentEnd, Event
from byssus.providers.scripted import ScriptedProvider
from tests.support.agents import make
from tests.support.databases import Database


def test_an_agent_without_a_loop_answers_several_times_in_a_row_and_is_closed(database: Database) -> None:
    with database.checkpointer() as cp:
        provider = ScriptedProvider(["one", "two", "three"])
        agent = Agent(provider=provider, model=Model("m"), checkpointer=cp, thread_id="t", checkpoint_every="turn")
        assert [agent.run_sync(text).text for text in ("a", "b", "c")] == ["one", "two", "three"]
        assert [message.text for message in agent.state.messages] == ["a", "one", "b", "two", "c", "three"]
    with pytest.raises(StoreNotOpen, match=r"was closed; use it inside .* \(plain 'with' for run_sync\(\)\)"):
        agent.run_sync("d")

    with database.checkpointer() as cp:  # what was said is there, for another agent
        agent = Agent(provider=ScriptedProvider(["four"]), model=Model("m"), checkpointer=cp, thread_id="t")
        agent.run_sync("d")
        assert len(agent.state.messages) == 8


def test_an_agent_may_go_from_run_sync_to_a_loop_and_back(database: Database) -> None:
    with database.checkpointer() as cp:
        provider = ScriptedProvider(["1", "2", "3"])
        agent = Agent(provider=provider, model=Model("m"), checkpointer=cp, thread_id="t")
        agent.run_sync("a")
        asyncio.run(agent.prompt("b"))
        assert agent.run_sync("c").text == "3"
        assert len(provider.requests[2].messages) == 5


def test_without_a_message_it_resumes(database: Database) -> None:
    @tool(approval=True)
    def pay(amount: int) -> str:
        return f"paid {amount}"

    provider = ScriptedProvider([[ToolCall("c1", "pay", {"amount": 5})], "done"])
    with database.checkpointer() as cp:
        agent = Agent(provider=provider, model=Model("m"), tools=[pay], checkpointer=cp, thread_id="t")
        assert agent.run_sync("pay 5").stop_reason == "waiting"
        asyncio.run(agent.answer("c1", "approve"))
        assert agent.run_sync().text == "done"


def test_a_failure_is_the_result_and_leaves_the_agent_ready() -> None:
    agent = make(ScriptedProvider([Overloaded("busy"), "fine"]), max_retries=0)
    assert isinstance(agent.run_sync("a").error, Overloaded)
    assert agent.run_sync("b").text == "fine"


def test_async_listeners_hear_every_run() -> None:
    agent, heard = make(ScriptedProvider(["1", "2"])), []

    async def listen(event: Event) -> None:
        heard.append(type(event))

    agent.subscribe(listen)
    agent.run_sync("a")
    agent.run_sync("b")
    assert heard.count(AgentEnd) == 2


def test_inside_a_running_loop_it_names_what_to_await() -> None:
    agent = make(ScriptedProvider(["1"]))

    async def main() -> None:
        with pytest.raises(InputError, match=r"run_sync\(\) was called inside a running .*'await agent\.prompt"):
            agent.run_sync("a")
        with pytest.raises(InputError, match=r"'await agent\.resume\(\)'"):
            agent.run_sync()
        assert (await agent.prompt("a")).text == "1"

    asyncio.run(main())


def test_a_checkpointer_is_not_opened_by_a_plain_with_inside_a_loop(database: Database) -> None:
    async def main() -> None:
        with (
            pytest.raises(InputError, match=r"'async with \w+Checkpointer\(\.\.\.\) as cp:' there"),
            database.checkpointer(),
        ):
            pass

    asyncio.run(main())


def test_os_threads_may_run_agents_at_the_same_time(database: Database) -> None:
    def talk(number: int) -> str:
        agent = Agent(
            provider=ScriptedProvider([f"{number}"] * 3), model=Model("m"), checkpointer=cp, thread_id=f"t{number}"
        )
        return "".join(agent.run_sync("x").text for _ in range(3))

    with database.checkpointer() as cp, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(talk, range(4))) == ["000", "111", "222", "333"]


def test_a_second_run_of_the_same_agent_is_refused() -> None:
    begun, go_on = threading.Event(), threading.Event()

    @tool
    def wait() -> str:
        begun.set()
        go_on.wait(30)
        return "waited"

    agent = make(ScriptedProvider([[ToolCall("c", "wait")], "done"]), tools=[wait])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(agent.run_sync, "a")
        begun.wait(30)
        with pytest.raises(AgentBusy):
            agent.run_sync("b")
        go_on.set()
        assert first.result().text == "done"


def test_ctrl_c_ends_the_run_in_good_order(database: Database) -> None:
    @tool
    async def hang() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        return ""

    with database.checkpointer() as cp:
        provider = ScriptedProvider([[ToolCall("c", "hang")], "again"])
        agent = Agent(provider=provider, model=Model("m"), tools=[hang], checkpointer=cp, thread_id="t")
        with pytest.raises(KeyboardInterrupt):
            agent.run_sync("a")
        assert [message.role for message in agent.state.messages] == ["user", "assistant", "tool_result"]
        assert agent.run_sync("b").text == "again"
