"""One writer a thread: whoever comes second is told, or waits; and an idle agent holds nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from byssus import (
    Agent,
    AssistantMessage,
    HookContext,
    Limits,
    Middleware,
    ToolCall,
    ToolContext,
    ToolResult,
    UserMessage,
    tool,
)
from byssus.checkpointer import Checkpointer
from byssus.errors import (
    InputError,
    NothingToResume,
    ProviderError,
    StoreFull,
    ThreadBusy,
)
from byssus.events import AgentEnd, AgentStart, Event, MessageEnd, ToolExecutionEnd
from byssus.messages import Note
from byssus.providers.base import Request
from byssus.providers.history import open_calls
from byssus.providers.scripted import ScriptedProvider
from byssus.store.owners import Presence
from byssus.values.results import RunResult
from tests.support.agents import Acted, Hanging, Heard, check_whole, history, sent
from tests.support.checkpointers import loaded, texts
from tests.support.databases import Database
from tests.support.leases import (
    CALL_SLOW,
    FAR_AWAY,
    LOOK,
    Slow,
    agent_on,
    break_writes,
    claim,
    everything,
    is_free,
    lease_of,
    look,
    unfinished,
    until,
    with_two,
)

# --- who comes second -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["prompt", "resume"])
def test_a_run_during_somebody_elses_is_told_at_once_who_drives_the_thread_and_what_to_do(
    database: Database, way: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        first = asyncio.create_task(agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        second = agent_on(other, ["fine"])
        heard = Heard(second)
        with pytest.raises(ThreadBusy) as told:
            await (second.prompt("me too") if way == "prompt" else second.resume())
        assert not first.done()
        host_and_pid = Presence(None).name("", 30).split(" ")[0]
        assert host_and_pid.endswith(f":{os.getpid()}")
        for part in ("'t'", host_and_pid, "steer", "follow_up", "wait=seconds"):
            assert part in str(told.value)
        assert (told.value.thread_id, told.value.owner) == ("t", (await lease_of(cp)).owner)
        check_whole(heard)
        assert second.state.error is told.value
        slow.let_go.set()
        assert (await first).text == "ok"
        assert (await second.prompt("me too")).text == "fine"
        lines = ["user: go", "assistant: ", "tool_result: slow is done", "assistant: ok", "user: me too"]
        assert await history(cp, "t") == [*lines, "assistant: fine"]

    with_two(database, use)


@pytest.mark.parametrize("way", ["prompt", "resume"])
def test_a_run_that_waits_comes_after_the_other_one_and_sees_its_messages(database: Database, way: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        first = asyncio.create_task(
            agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool], limits=Limits(turns=1)).prompt("go")
        )
        await slow.begun.wait()
        provider = ScriptedProvider(["after you"])
        second = agent_on(other, provider, wait=30)
        heard = Heard(second)
        waiting = asyncio.create_task(second.prompt("me too") if way == "prompt" else second.resume())
        await asyncio.sleep(0.05)  # it may be refused once or several times
        assert not waiting.done()
        slow.let_go.set()
        assert (await first).stop_reason == "turn_limit"
        result = await waiting
        assert result.text == "after you"
        assert result.run_id != (await first).run_id  # which has ended: this is another run, from its first event on
        assert [event.run_id for event in heard if isinstance(event, AgentStart | AgentEnd)] == [result.run_id] * 2
        check_whole(heard)
        lines = ["user: go", "assistant: ", "tool_result: slow is done"]
        assert sent(provider) == lines + (["user: me too"] if way == "prompt" else [])
        assert await is_free(cp)

    with_two(database, use)


def test_a_resume_that_waited_for_a_run_to_end_leaves_no_run_of_its_own(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        first = asyncio.create_task(agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        second = agent_on(other, wait=30)
        heard = Heard(second)
        waiting = asyncio.create_task(second.resume())
        await until(lambda: "not loaded" not in repr(second.state))  # as a thread with a run that it would continue
        slow.let_go.set()
        result = await first
        with pytest.raises(NothingToResume):
            await waiting
        check_whole(heard)
        assert [(run.id, run.attempts, run.stop_reason) for run in await cp.runs("t")] == [(result.run_id, 1, "stop")]
        assert await is_free(cp)

    with_two(database, use)


def test_a_run_that_has_waited_long_enough_is_told_that_the_thread_is_busy(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, FAR_AWAY, "theirs")
        second = agent_on(other, wait=0.05)
        heard = Heard(second)
        with pytest.raises(ThreadBusy, match="far-away:17"):
            await second.prompt("me too")
        check_whole(heard)
        assert await texts(cp, "t") == ["theirs"]

    with_two(database, use)


@pytest.mark.parametrize("how", ["abort", "cancel", "time limit"])
def test_a_run_that_waits_for_its_thread_can_be_ended(database: Database, how: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, FAR_AWAY, "theirs")
        limits = Limits(seconds=0.05) if how == "time limit" else None
        second = agent_on(other, wait=1_000, limits=limits)
        heard = Heard(second)
        waiting = asyncio.create_task(second.prompt("me too"))
        await until(lambda: heard.of(AgentEnd) or len(heard) >= 2)
        if how == "abort":
            second.abort()
        elif how == "cancel":
            waiting.cancel()
        result = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if how == "cancel":
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert isinstance(result, RunResult)
            assert result.stop_reason == ("aborted" if how == "abort" else "time_limit")
        check_whole(heard)
        assert await texts(cp, "t") == ["theirs"]

    with_two(database, use)


def test_a_prompt_that_is_aborted_as_it_gets_its_thread_is_told_if_it_is_stored(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, ["ok"], wait=30)
        heard = Heard(agent)
        loop = asyncio.get_running_loop()

        def abort(moment: str) -> None:
            """On the writer's thread: the abort is through before the outcome of the commit is told."""
            if moment == "after commit":
                agent.abort()
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0.02), loop).result(10)

        cp.store.boundary = abort
        try:
            result = await agent.prompt("go")
        finally:
            cp.store.boundary = None
        assert result.stop_reason == "aborted"
        check_whole(heard)
        thread = await other.load("t")
        stored_messages = [] if thread is None else thread.messages
        assert [event.message for event in heard.of(MessageEnd)] == stored_messages == result.messages

    with_two(database, use)


def test_two_agents_of_one_process_are_two_writers_too(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        first = asyncio.create_task(agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        with pytest.raises(ThreadBusy):
            await agent_on(cp).prompt("me too")
        assert (await agent_on(cp, ["fine"], "another thread").prompt("hi")).text == "fine"
        slow.let_go.set()
        await first

    with_two(database, use)


def test_agents_that_take_turns_see_what_the_others_said_and_left_in_the_extra(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        @tool
        def note(i: int, context: ToolContext) -> str:
            context.extra[f"key {i}"] = i
            return f"noted {i}"

        def ask(request: Request) -> list[ToolCall]:
            return [ToolCall("c1", "note", {"i": int(request.messages[-1].text)})]

        providers = [ScriptedProvider([ask, "ok"] * 5) for _ in "ab"]
        agents = [agent_on(opener, p, tools=[note]) for opener, p in zip((cp, other), providers, strict=True)]
        expected: list[str] = []
        for i in range(10):
            await agents[i % 2].prompt(str(i))
            expected += [f"user: {i}", "assistant: ", f"tool_result: noted {i}"]
            assert sent(providers[i % 2]) == expected
            expected.append("assistant: ok")
        assert await history(cp, "t") == expected
        assert (await loaded(other, "t")).extra == {f"key {i}": i for i in range(10)}

    with_two(database, use)


def test_many_agents_that_wait_for_one_thread_each_get_their_turn_and_see_all_that_came_before(
    database: Database,
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        providers = [ScriptedProvider([[ToolCall(f"c{i}", "look")], f"answer {i}"]) for i in range(12)]
        agents = [agent_on((cp, other)[i % 2], p, tools=[look], wait=30) for i, p in enumerate(providers)]
        await asyncio.gather(*(agent.prompt(f"prompt {i}") for i, agent in enumerate(agents)))
        lines = await history(cp, "t")
        order = [int(line.rpartition(" ")[2]) for line in lines[::4]]
        assert sorted(order) == list(range(12))
        runs = [[f"user: prompt {i}", "assistant: ", "tool_result: seen", f"assistant: answer {i}"] for i in order]
        assert lines == [line for run in runs for line in run]
        for turn, i in enumerate(order):
            assert sent(providers[i], 0) == lines[: 4 * turn + 1]

    with_two(database, use)


# --- who writes without a run -----------------------------------------------------------------------------------------


def test_writing_to_a_thread_that_is_being_driven_is_thread_busy_and_writes_nothing(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        run = asyncio.create_task(agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        before = await cp.store.read(everything)
        writers: list[Callable[..., Any]] = [
            lambda: other.append("t", UserMessage("x")),
            lambda: other.append("t", UserMessage("x"), wait=0.02),
            lambda: other.save_extra("t", {"x": 1}),
            lambda: other.save_extra("t", {"x": 1}, wait=0.02),
            lambda: cp.append("t", UserMessage("x")),
        ]
        for write in writers:
            with pytest.raises(ThreadBusy, match="wait=seconds waits for its end"):
                await write()
        assert await cp.store.read(everything) == before
        await other.append("another", UserMessage("threads do not wait for each other"))
        slow.let_go.set()
        await run
        await other.append("t", UserMessage("now it is free"))
        await other.save_extra("t", {"x": 1})

    with_two(database, use)


def test_writers_that_wait_come_after_the_run_and_each_stays_together(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        run = asyncio.create_task(agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        writes = [
            (cp, other)[call % 2].append("t", [UserMessage(f"{call} {part}") for part in range(1 + call % 4)], wait=30)
            for call in range(60)
        ]
        waiting = asyncio.gather(*writes, other.save_extra("t", {"late": 1}, wait=30))
        await asyncio.sleep(0.03)
        assert not waiting.done()
        slow.let_go.set()
        await run
        await waiting
        thread = await loaded(cp, "t")
        seen = [message.text for message in thread.messages]
        assert seen[:4] == ["go", "", "slow is done", "ok"]
        order = list(dict.fromkeys(text.split()[0] for text in seen[4:]))
        assert seen[4:] == [f"{call} {part}" for call in order for part in range(1 + int(call) % 4)]
        assert len(order) == 60
        assert thread.extra == {"late": 1}

    with_two(database, use)


@pytest.mark.parametrize("wait", [None, "long", -1, float("nan"), True, 1e10])
def test_a_wait_that_is_no_number_of_seconds_is_an_input_error(database: Database, wait: Any) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        with pytest.raises(InputError, match="wait"):
            await cp.append("t", UserMessage("x"), wait=wait)
        with pytest.raises(InputError, match="wait"):
            await cp.save_extra("t", {}, wait=wait)
        with pytest.raises(InputError, match="wait"):
            agent_on(cp, wait=wait)
        assert await cp.load("t") is None

    with_two(database, use)


def test_a_tool_that_writes_to_the_thread_of_its_own_run_is_told_that_it_is_busy(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        @tool
        async def meddle() -> str:
            await cp.append("t", UserMessage("psst"))
            return "never"

        run = await agent_on(cp, [[ToolCall("c1", "meddle")], "ok"], tools=[meddle]).prompt("go")
        assert run.text == "ok"
        result = (await loaded(cp, "t")).messages[2]
        assert "ThreadBusy" in result.text
        assert "steer" in result.text
        assert "psst" not in await texts(cp, "t")

    with_two(database, use)


# --- an idle agent holds nothing --------------------------------------------------------------------------------------


class Failing(Middleware):
    """A hook that fails."""

    def __init__(self, hook: str) -> None:
        def fail(*_: object) -> None:
            raise ValueError("no")

        setattr(self, hook, fail)


@tool
def finish() -> ToolResult:
    return ToolResult("enough", end_run=True)


@tool
def spoil(context: ToolContext) -> str:
    context.extra["unstorable"] = object()
    return "spoilt"


ENDINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a reply": (["ok"], {}),
    "a reply behind tools": ([LOOK, "ok"], {}),
    "a reply with middleware": ([LOOK, "ok"], {"middleware": [Middleware()]}),
    "a reply that says nothing": ([[]], {}),
    "a failure of the model": ([ProviderError("no")], {}),
    "a failure of the model behind tools": ([LOOK, ProviderError("no")], {}),
    "a script that is too short": ([], {}),
    "a tool that ends the run": ([[ToolCall("c1", "finish")]], {}),
    "a limit of turns": ([LOOK], {"limits": Limits(turns=1)}),
    **{
        f"a failure of {hook}": ([LOOK, "ok"], {"middleware": [Failing(hook)]})
        for hook in (
            "transform_context",
            "convert_to_llm",
            "transform_system_prompt",
            "after_model_response",
            "before_tool_call",
            "after_tool_call",
            "should_stop_after_turn",
            "on_run_end",
        )
    },
}


async def check_idle(cp: Checkpointer, other: Checkpointer, agent: Agent) -> None:
    """Nobody drives the thread, so that anybody can; and nothing is left to be taken up."""
    assert await is_free(cp)
    assert await other.unfinished() == []
    await other.append("t", UserMessage("free"))
    assert (await agent_on(other, ["fine"], tools=[look, finish, spoil]).prompt("hi")).text == "fine"


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_gives_its_thread_back_whatever_ends_it(database: Database, ending: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        script, options = ENDINGS[ending]
        agent = agent_on(cp, script, tools=[look, finish], max_retries=0, **options)
        heard = Heard(agent)
        await asyncio.gather(agent.prompt("go"), return_exceptions=True)
        check_whole(heard)
        await check_idle(cp, other, agent)

    with_two(database, use)


@pytest.mark.parametrize("where", ["stream", "tool"])
@pytest.mark.parametrize("how", ["abort", "cancel", "time limit"])
def test_a_run_that_is_cut_off_gives_its_thread_back(database: Database, where: str, how: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow, hanging = Slow(), Hanging("Hel")
        script: Any = [CALL_SLOW] if where == "tool" else Acted(hanging)
        limits = Limits(seconds=1) if how == "time limit" else None
        agent = agent_on(cp, script, tools=[slow.tool], limits=limits)
        run = asyncio.create_task(agent.prompt("go"))
        await (slow if where == "tool" else hanging).begun.wait()
        if how == "abort":
            agent.abort()
        elif how == "cancel":
            run.cancel()
        await asyncio.wait([run])
        await check_idle(cp, other, agent)

    with_two(database, use)


def test_a_run_whose_extra_cannot_be_stored_gives_its_thread_back(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, [[ToolCall("c1", "spoil")], "ok"], tools=[spoil])
        with pytest.raises(InputError, match="unstorable"):
            await agent.prompt("go")
        await other.append("t", UserMessage("free"))
        agent.state.extra.clear()
        assert (await agent_on(other, ["fine"], tools=[spoil]).prompt("hi")).text == "fine"

    with_two(database, use)


@pytest.mark.parametrize("steps", range(0, 60, 4))
def test_a_run_whose_event_loop_ends_under_it_keeps_no_thread_busy(database: Database, steps: int) -> None:
    cp = database.checkpointer()
    slow = Slow()
    slow.let_go.set()
    options: dict[str, Any] = {"tools": [slow.tool, look], "tool_mode": "sequential"}

    async def begin() -> None:
        await cp.open()
        agent = agent_on(cp, [[*LOOK, ToolCall("c2", "slow"), ToolCall("c3", "look")], "ok"], **options)
        run = asyncio.create_task(agent.prompt("go"))
        for _ in range(steps):
            await asyncio.sleep(0.0005)
        del run

    async def judge() -> None:
        async with database.checkpointer() as other:
            await other.append("t", Note("free"))
            await agent_on(other, ["fine"], **options).prompt("hi")
            assert await unfinished(other) == []
        await cp.close()

    asyncio.run(begin())
    asyncio.run(judge())


def test_a_run_that_is_torn_down_between_two_tools_is_one_that_was_interrupted(database: Database) -> None:
    """As a deployment does it: the event loop ends, and cancels every task."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        def tear_down(event: Event) -> None:
            if isinstance(event, ToolExecutionEnd):
                run = asyncio.current_task()
                assert run is not None
                run.cancel()

        calls = [ToolCall("c1", "look"), ToolCall("c2", "look")]
        agent = agent_on(cp, [calls], tools=[look], tool_mode="sequential")
        agent.subscribe(tear_down)
        with pytest.raises(asyncio.CancelledError):
            await agent.prompt("go")
        await other.append("t", Note("free"))
        assert open_calls((await loaded(other, "t")).messages)
        assert await unfinished(other) == ["t"]
        assert (await agent_on(other, ["ok"], tools=[look]).resume()).text == "ok"
        assert await unfinished(other) == []

    with_two(database, use)


def test_an_agent_that_has_only_loaded_its_thread_holds_nothing(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cp.append("t", UserMessage("x"))
        await agent_on(cp).load()
        assert await is_free(cp)
        await other.append("t", UserMessage("y"))

    with_two(database, use)


def test_a_run_that_was_refused_before_it_began_holds_nothing(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cp.append("t", [UserMessage("x"), AssistantMessage("y")])
        with pytest.raises(NothingToResume):
            await agent_on(cp).resume()
        assert await is_free(cp)
        await other.append("t", UserMessage("z"))

    with_two(database, use)


@pytest.mark.parametrize("middleware", [[], [Middleware()]], ids=["with the reply", "after the reply"])
def test_a_run_that_could_not_give_its_thread_back_does_not_keep_it_busy(
    database: Database, monkeypatch: pytest.MonkeyPatch, middleware: list[Middleware]
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        with monkeypatch.context() as broken:
            break_writes(broken, cp.store, lambda query, options: bool(options.get("release")))
            agent = agent_on(cp, ["ok"], middleware=middleware)
            with pytest.raises(StoreFull):
                await agent.prompt("go")
            assert not await is_free(cp)  # on disk it is still ours
        assert [info.id for info in await other.unfinished()] == ["t"]
        await other.append("t", UserMessage("free"))
        assert (await agent_on(other, ["fine"]).prompt("hi")).text == "fine"
        assert await is_free(cp)

    with_two(database, use)


def test_what_a_hook_writes_to_the_extra_when_the_run_has_ended_is_stored(database: Database) -> None:
    class Counting(Middleware):
        async def on_run_end(
            self, result: RunResult[Any], *, signal: object = None, context: HookContext | None = None
        ) -> None:
            assert context is not None
            context.extra["runs"] = context.extra.get("runs", 0) + 1

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        for runs in range(1, 4):
            await agent_on((cp, other)[runs % 2], ["ok"], middleware=[Counting()]).prompt("go")
            assert (await loaded(cp, "t")).extra == {"runs": runs}
            assert await is_free(cp)

    with_two(database, use)


def test_a_run_that_has_answered_does_not_fail_because_somebody_else_came_during_its_last_hook(
    database: Database,
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        class Last(Middleware):
            async def on_run_end(
                self, result: RunResult[Any], *, signal: object = None, context: HookContext | None = None
            ) -> None:
                assert context is not None
                context.extra["ended"] = True
                writes.append(asyncio.create_task(other.append("t", UserMessage("me too"), wait=20)))
                await asyncio.sleep(0.05)  # it is stored, or waits

        writes: list[asyncio.Task[None]] = []
        assert (await agent_on(cp, ["ok"], middleware=[Last()]).prompt("go")).text == "ok"
        await writes[0]
        assert await texts(cp, "t") == ["go", "ok", "me too"]
        assert (await loaded(cp, "t")).extra == {"ended": True}

    with_two(database, use)
