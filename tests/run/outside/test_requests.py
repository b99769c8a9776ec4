"""A prompt that is sent twice happens once: its key joins the run that it began, wherever that goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from byssus import Agent, AssistantMessage, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import AgentBusy, InputError, KeyReused, NetworkFailed, NothingToResume, ThreadBusy
from byssus.events import AgentEnd, AgentStart, MessageEnd
from byssus.messages import plain
from byssus.providers.scripted import ScriptedProvider
from tests.support.agents import make
from tests.support.approvals import Deleting, delete
from tests.support.checkpointers import loaded, texts, with_cp
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, Slow, agent_on, die, until, with_two
from tests.support.tool_calls import Acting, act, interrupt


async def is_running(cp: Checkpointer) -> bool:
    return await cp.state("t") == "running"


def test_a_key_that_is_sent_again_returns_the_result_from_the_log(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting()
        first = await agent_on(cp, [[act(1)], "done"], tools=[acting.tool]).prompt("go", key="k")
        again = await agent_on(other, []).prompt("go", key="k")  # a script without a step: no model is asked
        assert (again.run_id, again.text, again.stop_reason) == (first.run_id, "done", "stop")
        assert plain(again.messages) == plain(first.messages)
        assert again.usage == first.usage
        assert [n for n, _ in acting.runs] == [1]
        (run,) = await cp.runs("t")
        assert (run.request_key, run.attempts) == ("k", 1)
        await agent_on(cp, ["ok"]).prompt("go", key="another")  # the same words under another key are said again
        assert len(await cp.runs("t")) == 2
        assert (await agent_on(cp, []).prompt("go", key="k")).run_id == first.run_id

    with_two(database, use)


def test_a_key_with_another_prompt_is_refused_by_name(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["ok"])
        run_id = (await agent.prompt("pay the bill", key="k")).run_id
        with pytest.raises(KeyReused, match=r"key 'k' of thread 't' began run .* with another prompt") as error:
            await agent.prompt("pay it twice", key="k")
        assert (error.value.thread_id, error.value.key, error.value.run_id) == ("t", "k", run_id)
        assert await texts(cp, "t") == ["pay the bill", "ok"]
        elsewhere = await agent_on(cp, ["hi"], "u").prompt("hello", key="k")  # a key belongs to one thread
        assert elsewhere.text == "hi"

    with_cp(database, use)


@pytest.mark.parametrize("key", ["", 7, "a\0b", "\ud800", "x" * 5_000])
def test_what_cannot_be_a_key_is_refused(database: Database, key: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match="key "):
            await agent_on(cp, []).prompt("go", key=key)
        assert await cp.load("t") is None

    with_cp(database, use)


def test_a_key_needs_a_stored_thread_and_a_message() -> None:
    agent = make(["ok"])
    with pytest.raises(InputError, match="key='k' needs a checkpointer"):
        asyncio.run(agent.prompt("go", key="k"))
    with pytest.raises(InputError, match="key='k' needs a message"):
        agent.run_sync(key="k")
    assert asyncio.run(agent.prompt(UserMessage("go", id="m"))).text == "ok"  # an id means nothing in memory


def test_two_calls_at_once_on_one_agent_are_one_run(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW, "done"], tools=[slow.tool])
        calls = [asyncio.create_task(agent.prompt("go", key="k")) for _ in range(5)]
        await slow.begun.wait()
        late = asyncio.create_task(agent.prompt("go", key="k"))
        with pytest.raises(AgentBusy):
            await agent.prompt("something else", key="k2")
        slow.let_go.set()
        results = await asyncio.gather(*calls, late)
        assert len({result.run_id for result in results}) == 1
        assert {result.text for result in results} == {"done"}
        assert slow.runs == 1

    with_cp(database, use)


def test_cancelling_who_joined_leaves_the_run_alone(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW, "done"], tools=[slow.tool])
        first = asyncio.create_task(agent.prompt("go", key="k"))
        await slow.begun.wait()
        joined = asyncio.create_task(agent.prompt("go", key="k"))
        await asyncio.sleep(0)
        joined.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joined
        slow.let_go.set()
        assert (await first).stop_reason == "stop"

    with_cp(database, use)


def test_a_run_that_goes_on_elsewhere_is_waited_for(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        first = asyncio.create_task(agent_on(cp, [CALL_SLOW, "done"], tools=[slow.tool]).prompt("go", key="k"))
        await slow.begun.wait()
        joined = asyncio.create_task(agent_on(other, []).prompt("go", key="k"))
        with pytest.raises(ThreadBusy):  # a prompt with another key is not that run
            await agent_on(other, []).prompt("go", key="k2")
        assert not joined.done()
        slow.let_go.set()
        assert (await joined).run_id == (await first).run_id
        assert (await joined).text == "done"
        assert slow.runs == 1

    with_two(database, use)


def test_a_run_whose_process_dies_meanwhile_is_resumed_by_who_waits_for_it(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        agent = agent_on(cp, [[act(1)]], tools=[acting.tool])
        first = asyncio.create_task(agent.prompt("go", key="k"))
        await acting.begun.wait()
        joined = asyncio.create_task(agent_on(other, ["done"], tools=[acting.tool]).prompt("go", key="k"))
        await until(lambda: is_running(other))
        await die(cp, agent, first)
        result = await joined
        (run,) = await other.runs("t")
        assert (result.text, result.run_id, run.attempts) == ("done", run.id, 2)
        assert await texts(other, "t") == ["go", "", "did 1", "done"]

    with_two(database, use)


def test_an_interrupted_run_is_resumed_and_not_prompted_again(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        agent = agent_on(cp, [[act(1)]], tools=[acting.tool])
        first = asyncio.create_task(agent.prompt("go", key="k"))
        await acting.begun.wait()
        await die(cp, agent, first)
        result = await agent_on(cp, ["done"], tools=[acting.tool]).prompt("go", key="k")
        assert result.text == "done"
        assert [message.text for message in result.messages] == ["did 1", "done"]  # since it was resumed
        later = await agent_on(cp, []).prompt("go", key="k")
        assert [message.text for message in later.messages] == ["go", "", "did 1", "done"]
        assert await texts(cp, "t") == ["go", "", "did 1", "done"]
        assert len(await cp.runs("t")) == 1

    with_cp(database, use)


def test_a_run_that_waits_for_a_person_is_told_as_such_and_goes_on_once_it_is_answered(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        await agent_on(cp, [[delete("/a")]], tools=[deleting.tool]).prompt("go", key="k")
        waits = await agent_on(cp, [], tools=[deleting.tool]).prompt("go", key="k")
        (run,) = await cp.runs("t")
        assert (waits.stop_reason, run.attempts) == ("waiting", 1)
        await cp.answer("t", "/a", "approve")
        result = await agent_on(cp, ["gone"], tools=[deleting.tool]).prompt("go", key="k")
        assert (result.run_id, result.text, result.stop_reason) == (run.id, "gone", "stop")

    with_cp(database, use)


def test_a_key_of_a_run_that_another_prompt_replaced_says_interrupted(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        agent = agent_on(cp, [CALL_SLOW], tools=[slow.tool])
        first = asyncio.create_task(agent.prompt("go", key="k"))
        await slow.begun.wait()
        await die(cp, agent, first)
        await agent_on(cp, ["ok"], tools=[slow.tool]).prompt("never mind")
        result = await agent_on(cp, []).prompt("go", key="k")
        assert (result.stop_reason, result.messages[0].text) == ("interrupted", "go")

    with_cp(database, use)


def test_the_key_is_stored_with_the_prompt_also_where_an_earlier_run_is_mended_first(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await interrupt(cp, Acting(hangs=1), act(1))
        first = await agent_on(cp, ["ok"], tools=[Acting().tool]).prompt("next", key="k")
        again = await agent_on(cp, []).prompt("next", key="k")
        assert (again.run_id, again.text) == (first.run_id, "ok")
        assert (await texts(cp, "t")).count("next") == 1

    with_cp(database, use)


def test_a_failure_is_returned_again_and_not_repeated(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, [NetworkFailed("cut off")], max_retries=0).prompt("go", key="k")
        again = await agent_on(cp, []).prompt("go", key="k")
        assert again.stop_reason == "error"
        assert isinstance(again.error, NetworkFailed)
        with pytest.raises(NetworkFailed, match="cut off"):
            await agent_on(cp, []).prompt("go", key="k", raise_errors=True)

    with_cp(database, use)


class Answer(msgspec.Struct):
    n: int


def test_the_output_of_a_joined_run_is_read_from_its_reply(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ['{"n": 5}']).prompt("go", key="k", output=Answer)
        assert (await agent_on(cp, []).prompt("go", key="k", output=Answer)).output == Answer(5)

    with_cp(database, use)


def test_a_stream_of_a_joined_run_tells_its_messages_as_a_whole(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        first = await agent_on(cp, ["done"]).prompt("go", key="k")
        async with agent_on(cp, []).stream("go", key="k") as stream:
            events = [event async for event in stream]
        assert isinstance(events[0], AgentStart)
        assert isinstance(events[-1], AgentEnd)
        assert [event.message.text for event in events if isinstance(event, MessageEnd)] == ["go", "done"]
        assert stream.result.run_id == first.run_id

    with_cp(database, use)


def test_run_sync_takes_a_key(database: Database) -> None:
    with database.checkpointer() as cp:
        first = agent_on(cp, ["done"]).run_sync("go", key="k")
        assert agent_on(cp, []).run_sync("go", key="k").run_id == first.run_id


def test_a_message_with_an_id_of_its_own_happens_once_while_it_is_in_the_thread(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("before"), AssistantMessage("yes")])
        said = UserMessage("go", id="m1")
        first = await agent_on(cp, ["done"]).prompt(said)
        assert (await agent_on(cp, []).prompt(said)).run_id == first.run_id
        with pytest.raises(KeyReused):
            await agent_on(cp, []).prompt(UserMessage("go on", id="m1"))
        await cp.rewind("t", 2)  # the message is not in the thread any more
        second = await agent_on(cp, ["again"]).prompt(said)
        assert (second.text, second.run_id == first.run_id) == ("again", False)
        assert (await agent_on(cp, []).prompt(said)).run_id == second.run_id

    with_cp(database, use)


@pytest.mark.parametrize("how", ["heard by a run", "waits for a run", "appended", "the second of two"])
def test_a_message_that_is_in_the_thread_already_is_not_said_again(database: Database, how: str) -> None:
    async def use(cp: Checkpointer) -> None:
        message, replies = UserMessage("hi", id="m1"), ["one", "two"]
        agent = agent_on(cp, replies)
        if how in ("heard by a run", "waits for a run"):
            await cp.steer("t", message)
        if how == "heard by a run":
            assert (await agent.prompt("go")).text == "two"
        elif how == "appended":
            await cp.append("t", message)
        elif how == "the second of two":
            await agent.prompt([UserMessage("go", id="m0"), message])
        result = await agent_on(cp, ["three"]).prompt(message)
        again = await agent_on(cp, []).prompt(message)
        assert (again.run_id, again.text) == (result.run_id, result.text)
        assert len(await cp.runs("t")) == 1
        log = (await loaded(cp, "t")).messages
        assert [each.text for each in log].count("hi") == 1
        assert log[-1].text == result.text
        assert await cp.inbox("t") == []
        with pytest.raises(KeyReused, match="m1"):
            await agent_on(cp, []).prompt(UserMessage("something else", id="m1"))

    with_cp(database, use)


def test_a_message_that_waits_for_another_message_is_refused_by_its_id(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.steer("t", UserMessage("hi", id="m1"))
        with pytest.raises(KeyReused, match="'m1' of thread 't' is the id of another message"):
            await agent_on(cp, []).prompt(UserMessage("ho", id="m1"))
        assert len(await cp.inbox("t")) == 1

    with_cp(database, use)


def test_a_message_that_is_queued_for_a_run_that_goes_on_is_answered_by_it(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        run = asyncio.create_task(agent_on(cp, [CALL_SLOW, "heard"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        message = UserMessage("hi", id="m1")
        await other.steer("t", message)
        joined = asyncio.create_task(agent_on(other, []).prompt(message))
        slow.let_go.set()
        assert (await joined).run_id == (await run).run_id
        assert [each.text for each in (await loaded(cp, "t")).messages].count("hi") == 1

    with_two(database, use)


def test_a_key_is_remembered_over_a_rewind(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("before"))
        first = await agent_on(cp, ["done"]).prompt("go", key="k")
        await cp.rewind("t", 1)
        assert (await agent_on(cp, []).prompt("go", key="k")).text == "done"
        assert len(await cp.runs("t")) == 1
        assert (await cp.run(first.run_id)) is not None

    with_cp(database, use)


def test_many_agents_at_the_same_moment_make_one_run(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        providers = [ScriptedProvider(["done"]) for _ in range(12)]
        agents: list[Agent] = [agent_on((cp, other)[n % 2], each) for n, each in enumerate(providers)]
        results = await asyncio.gather(*(agent.prompt("go", key="k") for agent in agents))
        assert len({result.run_id for result in results}) == 1
        assert {result.text for result in results} == {"done"}
        assert await texts(cp, "t") == ["go", "done"]
        assert sum(len(provider.requests) for provider in providers) == 1

    with_two(database, use)


def test_nothing_to_resume_stays_an_error_without_a_key(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ["done"]).prompt("go", key="k")
        with pytest.raises(NothingToResume):
            await agent_on(cp, []).resume()

    with_cp(database, use)
