"""Agents that hold only the end of a thread: they write the same log, and send the end of the same history."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byssus import (
    Agent,
    AssistantMessage,
    ExcludeMarked,
    HookContext,
    SlidingWindow,
    Summarize,
    TokenBudget,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)
from byssus.checkpointer import Checkpointer
from byssus.errors import ByssusError, InputError, NotLoaded
from byssus.messages import Message, Note
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from tests.support.agents import look, make, sent, within
from tests.support.checkpointers import texts, with_cp
from tests.support.conversations import histories
from tests.support.databases import Database
from tests.support.histories import flaws, without_ids
from tests.support.leases import Slow, agent_on, die, until, with_two
from tests.support.marks import mark
from tests.support.quick import examples

LEFT_OUT = "(The beginning of this conversation is left out.)"


def turns(count: int) -> list[Message]:
    """So many questions, each with its answer."""
    said = ((UserMessage(f"q{i}", id=f"q{i}"), AssistantMessage(f"a{i}", id=f"a{i}")) for i in range(count))
    return [message for turn in said for message in turn]


async def long_thread(cp: Checkpointer, count: int = 50, thread_id: str = "t") -> None:
    await cp.append(thread_id, turns(count))


# --- how much is loaded -----------------------------------------------------------------------------------------------


def test_an_agent_holds_the_last_messages_and_says_that_there_are_earlier_ones(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await long_thread(cp)
        agent = agent_on(cp, ["hello"], history=4)
        await agent.load()
        assert [message.text for message in agent.state.messages] == ["q48", "a48", "q49", "a49"]
        assert (agent.state.has_earlier, agent.state.first_seq) == (True, 97)
        await agent.prompt("hi")
        assert [message.text for message in agent.state.messages] == ["q48", "a48", "q49", "a49", "hi", "hello"]
        assert len(await texts(cp, "t")) == 102

    with_cp(database, use)


@pytest.mark.parametrize("history", ["all", "auto", 100, 1_000_000])
def test_a_thread_that_is_not_longer_is_loaded_as_a_whole(database: Database, history: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        await long_thread(cp)
        agent = agent_on(cp, history=history)
        await agent.load()
        assert len(agent.state.messages) == 100
        assert (agent.state.has_earlier, agent.state.first_seq) == (False, 1)

    with_cp(database, use)


def test_without_a_window_the_model_gets_all_of_a_long_thread(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await long_thread(cp, 600)
        provider = ScriptedProvider(["hello"])
        agent = agent_on(cp, provider)
        await agent.prompt("hi")
        assert len(provider.requests[0].messages) == 1_201
        assert not agent.state.has_earlier

    with_cp(database, use)


@pytest.mark.parametrize("window", [SlidingWindow(4), TokenBudget(20), Summarize(20)])
def test_with_a_window_only_the_end_of_a_long_thread_is_loaded(database: Database, window: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.save_extra("t", {"summary": {"text": "as before", "upto": "a598", "count": 1198}})
        await long_thread(cp, 600)
        provider = ScriptedProvider(["hello"])
        agent = agent_on(cp, provider, middleware=[window])
        await agent.prompt("hi")
        assert sent(provider)[-1] == "user: hi"
        assert len(provider.requests[0].messages) <= 5
        assert len(agent.state.messages) == 1_002
        assert agent.state.has_earlier
        whole = agent_on(cp, history="all", middleware=[window])
        await whole.load()
        assert len(whole.state.messages) == 1_202

    with_cp(database, use)


def test_a_hook_before_the_window_gets_the_whole_thread(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await long_thread(cp, 600)
        seen: list[int] = []

        class Count:
            def transform_context(self, messages: list[Message]) -> list[Message]:
                seen.append(len(messages))
                return messages

        await agent_on(cp, ["hello"], middleware=[Count(), SlidingWindow(4)]).prompt("hi")
        await agent_on(cp, ["hello"], middleware=[SlidingWindow(4), Count()]).prompt("hi")
        assert seen == [1_201, 5]

    with_cp(database, use)


def test_what_a_window_needs_is_loaded_however_much_that_is(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await long_thread(cp)
        for window, expected in ((SlidingWindow(31), 31), (SlidingWindow(1_000), 101), (TokenBudget(10**6), 101)):
            provider = ScriptedProvider(["hello", "again"])
            agent = agent_on(cp, provider, history=2, middleware=[window], at=100)
            await agent.prompt("hi")
            assert len(provider.requests[0].messages) == expected
            held = len(agent.state.messages)
            await agent.prompt("more")  # what was needed is still there
            assert len(agent.state.messages) == held + 2

    with_cp(database, use)


def test_an_agent_in_memory_holds_all(database: Database) -> None:
    agent = make(["a", "b"], history=1)
    within(agent.prompt("one"))
    within(agent.prompt("two"))
    assert len(agent.state.messages) == 4
    assert (agent.state.has_earlier, agent.state.first_seq) == (False, 1)
    assert within(agent.earlier()).messages == []
    agent = make(["a"], history=1)

    async def use(cp: Checkpointer) -> None:
        await long_thread(cp)
        agent.attach(cp, "t")
        await agent.prompt("hi")
        assert len(agent.state.messages) == 3

    with_cp(database, use)


@pytest.mark.parametrize("history", [0, -1, True, 1.5, "some", "", None, [1], 2**53])
def test_a_history_that_is_none_is_refused(history: Any) -> None:
    with pytest.raises(InputError, match="history must be 'auto', 'all', or a number of messages from 1 up; got"):
        make([], history=history)


# --- where a tail begins ----------------------------------------------------------------------------------------------


def test_a_tail_does_not_begin_with_results_whose_reply_is_missing(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        calls = [ToolCall(f"c{i}", "look") for i in range(10)]
        results = [ToolResultMessage(call.id, "look", call.id) for call in calls]
        await cp.append("t", [*turns(20), UserMessage("go"), AssistantMessage(calls, "tool_use"), *results])
        provider = ScriptedProvider(["done"])
        agent = agent_on(cp, provider, history=3, tools=[look])
        result = await agent.resume()
        assert result.text == "done"
        assert [message.role for message in provider.requests[0].messages[1:]] == ["assistant", *["tool_result"] * 10]
        assert flaws(provider.requests[0].messages) == []

    with_cp(database, use)


def test_the_last_reply_is_found_if_it_has_open_calls_wherever_it_is(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [*turns(10), AssistantMessage([ToolCall("c1", "look")], "tool_use")])
        await cp.append("t", [UserMessage(f"u{i}") for i in range(100)])
        agent = agent_on(cp, ["done"], history=2, tools=[look])
        await agent.prompt("hi")
        said = await texts(cp, "t")
        assert said[-3:-1] == [said[-3], "hi"]
        assert "unknown" in said[-3]

    with_cp(database, use)


def test_a_reply_without_calls_is_not_loaded_but_names_a_checkpoint(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [*turns(10), *(UserMessage(f"u{i}") for i in range(100))])
        agent = agent_on(cp, history=2)
        await agent.checkpoint()
        assert [message.text for message in agent.state.messages] == ["u98", "u99"]
        assert [each.summary for each in await cp.list_checkpoints("t")] == ["a9"]

    with_cp(database, use)


def test_a_thread_that_ends_with_failures_and_notes_can_be_resumed(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        failed = [AssistantMessage("", "error") for _ in range(30)]
        await cp.append("t", [*turns(10), UserMessage("again?"), *failed, *({"role": "system"} for _ in range(30))])
        provider = ScriptedProvider(["yes"])
        assert (await agent_on(cp, provider, history=1).resume()).text == "yes"
        assert sent(provider) == ["user: again?"]

    with_cp(database, use)


def test_notes_alone_are_nothing_to_answer(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [{"role": "assistant", "note": i} for i in range(30)])
        agent = agent_on(cp, ["hello"], history=1)
        with pytest.raises(ByssusError, match="Cannot continue"):
            await agent.resume()
        assert (await agent.prompt("hi")).text == "hello"

    with_cp(database, use)


# --- earlier messages -------------------------------------------------------------------------------------------------


def test_earlier_pages_are_read_from_the_end_and_change_nothing(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await long_thread(cp)
        provider = ScriptedProvider(["hello"])
        agent = agent_on(cp, provider, history=4)
        with pytest.raises(NotLoaded, match=r"earlier\(\)"):
            await agent.earlier()
        await agent.load()
        page = await agent.earlier(30)
        said = [message.text for message in page.messages]
        assert (said[0], said[-1], len(said), page.has_earlier) == ("q33", "a47", 30, True)
        while page.has_earlier:
            page = await agent.earlier(30, before=page.seqs[0])
            said = [message.text for message in page.messages] + said
        assert said == [message.text for message in turns(48)]
        assert len(agent.state.messages) == 4
        await agent.prompt("hi")
        assert len(provider.requests[0].messages) == 5

    with_cp(database, use)


def test_a_middleware_can_ask_for_earlier_messages(database: Database) -> None:
    class First:
        """Sends the question that the thread began with, and the last one."""

        asks_for_earlier = True

        async def transform_context(self, messages: list[Message], *, context: HookContext) -> list[Message]:
            assert context.earlier is not None
            earlier = await context.earlier(context.earlier_count) if context.earlier_count else []
            asked.append(len(earlier))
            return [(earlier or messages)[0], messages[-1]]

    asked: list[int] = []

    async def use(cp: Checkpointer) -> None:
        await long_thread(cp)
        provider = ScriptedProvider(["hello", "again"])
        agent = agent_on(cp, provider, history=4, middleware=[First()])
        await agent.prompt("hi")
        await agent.prompt("more")
        assert asked == [96, 0]  # then the agent holds them
        assert sent(provider) == ["user: q0", "user: more"]
        with pytest.raises(ByssusError, match="limit must be a number from 1 up"):
            await agent_on(cp, history=4, middleware=[Wrong()]).prompt("hi")

    class Wrong:
        async def transform_context(self, messages: list[Message], *, context: HookContext) -> list[Message]:
            assert context.earlier is not None
            return await context.earlier(0)

    with_cp(database, use)


def test_a_hook_cannot_change_the_thread_through_earlier_messages(database: Database) -> None:
    class Spoils:
        async def transform_context(self, messages: list[Message], *, context: HookContext) -> list[Message]:
            assert context.earlier is not None
            page: list[Any] = await context.earlier(10)
            for message in page:
                message.content.clear()
            return messages

    async def use(cp: Checkpointer) -> None:
        await long_thread(cp)
        agent = agent_on(cp, ["hello"], history=4, middleware=[Spoils()])
        await agent.prompt("hi")
        assert [message.text for message in agent.state.messages[:2]] == ["q43", "a43"]

    with_cp(database, use)


# --- what changes while the agent lives -------------------------------------------------------------------------------


def test_an_agent_that_lives_long_lets_go_of_what_it_does_not_need(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["ok"] * 200, history=4)
        for number in range(200):
            await agent.prompt(f"hi {number}")
            assert len(agent.state.messages) <= 112
        assert agent.state.has_earlier
        assert len(await texts(cp, "t")) == 400

    with_cp(database, use)


def test_what_another_process_has_added_is_seen(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await long_thread(cp)
        provider = ScriptedProvider(["one", "three"])
        here, there = agent_on(cp, provider, history=4), agent_on(other, ["two"], history=4)
        await here.prompt("first")
        await there.prompt("second")
        await here.prompt("third")
        assert sent(provider)[-4:] == ["assistant: one", "user: second", "assistant: two", "user: third"]
        assert [message.text for message in here.state.messages][-4:] == ["second", "two", "third", "three"]

    with_two(database, use)


def test_of_a_whole_thread_only_what_changed_is_loaded_again(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await long_thread(cp, 600)
        provider = ScriptedProvider(["one", "three", "five", "seven"])
        here = agent_on(cp, provider)
        await here.prompt("first")
        first = here.state.messages[0]
        await agent_on(other, ["two"], history=4).prompt("second")
        await here.prompt("third")
        assert here.state.messages[0] is first
        assert without_times(here) == await texts(other, "t")
        await other.delete_message("t", "q3")
        await here.prompt("fourth")
        assert without_times(here) == await texts(other, "t")
        assert "q3" not in without_times(here)
        await other.rewind("t", 1_100)
        await here.prompt("fifth")
        assert without_times(here) == await texts(other, "t")
        assert len(provider.requests[-1].messages) == len(here.state.messages) - 1
        await other.delete_thread("t")
        await long_thread(other, 700)
        with pytest.raises(ByssusError, match="Cannot continue"):
            await here.resume()
        assert without_times(here) == await texts(other, "t")

    with_two(database, use)


def without_times(agent: Agent) -> list[str]:
    return [message.text for message in agent.state.messages]


def test_a_rewind_and_a_fork_are_read_from_their_end(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await long_thread(cp)
        provider = ScriptedProvider(["one", "two", "three"])
        agent = agent_on(cp, provider, history=4)
        await agent.prompt("first")
        await cp.rewind("t", 20)
        await agent.prompt("second")
        assert sent(provider) == ["user: q8", "assistant: a8", "user: q9", "assistant: a9", "user: second"]
        fork = await cp.fork("t", 21)
        await agent_on(cp, provider, fork, history=4).prompt("third")
        assert sent(provider)[-2:] == ["user: second", "user: third"]
        assert (await agent.earlier(2)).seqs == [15, 16]

    with_cp(database, use)


def test_messages_that_were_deleted_leave_no_hole_in_a_page(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [{"id": f"m{i}", "role": "user", "content": f"u{i}"} for i in range(30)])
        for number in range(5, 28):
            await cp.delete_message("t", f"m{number}")
        agent = agent_on(cp, history=4)
        await agent.load()
        assert [message.text for message in agent.state.messages] == ["u3", "u4", "u28", "u29"]
        assert [message.text for message in (await agent.earlier(9)).messages] == ["u0", "u1", "u2"]

    with_cp(database, use)


def test_marks_count_where_the_agent_holds_only_the_end(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        said = [{"id": f"m{i}", "role": "user", "content": f"u{i}"} for i in range(30)]
        await cp.append("t", [*said[:15], *turns(5), *said[15:]])
        await mark(cp, "t", [2, 18, 38], "hint")
        provider = ScriptedProvider(["hello"] * 2)
        for history in ("all", 25):
            await agent_on(cp, provider, history=history, middleware=[ExcludeMarked("hint")], at=40).prompt("hi")
        whole, end = (sent(provider, call) for call in (0, 1))
        assert len(whole) == 38
        assert end == whole[-len(end) :]
        assert len(end) == 24

    with_cp(database, use)


# --- recovery ---------------------------------------------------------------------------------------------------------


def test_a_run_that_was_interrupted_is_recovered_through_a_window(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await long_thread(cp)
        slow = Slow(recovery="retry")
        calls = [ToolCall("c0", "look"), ToolCall("c1", "slow")]
        agent = agent_on(cp, [calls], history=1, tools=[look, slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await until(lambda: _has_result(other))
        await die(cp, agent, run)
        again = Slow(recovery="retry")
        again.let_go.set()
        provider = ScriptedProvider(["done"])
        window = [SlidingWindow(1)]
        result = await agent_on(other, provider, history=1, tools=[look, again.tool], middleware=window).resume()
        assert (result.text, again.runs) == ("done", 1)
        assert (await texts(other, "t"))[-5:] == ["go", "", "seen here", "slow is done", "done"]
        assert flaws(provider.requests[0].messages) == []

    async def _has_result(cp: Checkpointer) -> bool:
        return "seen here" in await texts(cp, "t")

    with_two(database, use)


@pytest.mark.parametrize("every", [2, 3])
def test_checkpoints_come_at_the_same_turns(database: Database, every: int) -> None:
    async def use(cp: Checkpointer) -> None:
        for thread, history in (("all", "all"), ("end", 1)):
            for number in range(8):
                agent = agent_on(cp, [f"r{number}"], thread, history=history, checkpoint_every=every)
                await agent.prompt("on")
                if number == 4:
                    await agent.checkpoint(summary="mine")
        whole, end = [[(c.step, c.summary) for c in await cp.list_checkpoints(t)] for t in ("all", "end")]
        assert whole == end
        assert len(whole) == 8 // every + 1

    with_cp(database, use)


# --- for any thread ---------------------------------------------------------------------------------------------------

windows = st.sampled_from(
    [[], [SlidingWindow(1)], [SlidingWindow(5)], [TokenBudget(1)], [TokenBudget(60)], [Summarize(20, 2)]]
)


def test_a_run_writes_the_same_log_however_much_of_it_was_loaded(database: Database) -> None:
    numbers = itertools.count()

    with asyncio.Runner() as runner:
        cp = runner.run(database.checkpointer().open())

        @settings(max_examples=examples(60), deadline=None)
        @given(histories, st.integers(1, 9), windows, st.booleans(), st.sampled_from([None, 2]), st.booleans())
        def check(
            history: list[Message], n: int, window: list[Any], resumes: bool, every: int | None, is_fork: bool
        ) -> None:
            async def run(much: Any) -> tuple[list[Any], list[Request]]:
                thread = f"t{next(numbers)}"
                await cp.append(thread, history or [UserMessage("begin")])
                if is_fork:
                    thread = await cp.fork(thread)
                    await cp.append(thread, history[:2])
                provider = ScriptedProvider([_answer] * 9)
                options: dict[str, Any] = {"tools": [look], "middleware": window, "checkpoint_every": every}
                agent = agent_on(cp, provider, thread, history=much, **options)
                try:
                    await (agent.resume() if resumes else agent.prompt("go on"))
                    await agent.prompt("and on")
                except (ByssusError, ValueError) as error:
                    return [type(error), *await log(cp, thread)], provider.requests
                return await log(cp, thread), provider.requests

            whole, all_requests = runner.run(run("all"))
            end, requests = runner.run(run(n))
            assert end == whole
            assert len(requests) == len(all_requests)
            for request, with_all in zip(requests, all_requests, strict=True):
                assert flaws(request.messages) == []
                assert is_end_of(request.messages, with_all.messages, exactly=bool(window))

        check()
        runner.run(cp.close())


def _answer(request: Request) -> Any:
    if request.system_prompt == Summarize.INSTRUCTION:
        return "what happened"
    last = request.messages[-1]
    return "done" if isinstance(last, ToolResultMessage) else [ToolCall("new", "look")]


async def log(cp: Checkpointer, thread_id: str) -> list[Any]:
    """What a thread holds, without what chance gives each run: ids and times."""
    thread = await cp.load(thread_id)
    assert thread is not None
    points = [(c.step, c.summary, c.seq, c.tags) for c in await cp.list_checkpoints(thread_id)]
    return [*map(bare, thread.messages), thread.seqs, points]


def bare(message: Message) -> Message:
    return message if isinstance(message, Note) else msgspec.structs.replace(message, id=None, created_at=None)


def is_end_of(some: Sequence[Message], every: Sequence[Message], *, exactly: bool) -> bool:
    """Whether a request holds the end of another one; what is left out may be said to be."""
    told, whole = ([bare(m) for m in without_ids(each)] for each in (some, every))
    if told == whole:
        return True
    if told[0].text == LEFT_OUT:
        told = told[1:]
    return not exactly and told == whole[len(whole) - len(told) :]


def test_the_agent_is_as_it_says(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await long_thread(cp, 3)
        agent: Agent = agent_on(cp, history=2)
        await agent.load()
        assert repr(agent.state) == "AgentState(2 messages, idle)"

    with_cp(database, use)
