"""How a tool is run: where, for how long, beside which others, and what it knows of its call."""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import functools
import threading
import time
from typing import Any

import pytest

from byssus import (
    Agent,
    Model,
    ToolCall,
    ToolContext,
    tool,
)
from byssus.events import Event, ToolExecutionEnd, ToolExecutionStart, ToolExecutionUpdate
from byssus.messages import encode
from byssus.providers.scripted import ScriptedProvider
from byssus.tools import Tool
from tests.support.databases import Database
from tests.support.tools import Made, call, context, prompted, properties, results_of, run, schema_of

# --- running ----------------------------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ValueError("no such city"), "ValueError: no such city"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration("over"), "StopIteration"),
        (StopAsyncIteration("over"), "StopAsyncIteration"),
        (TimeoutError(), "TimeoutError"),
        (ExceptionGroup("both", [ValueError("x")]), "both"),
        (RecursionError("deep"), "RecursionError"),
        (MemoryError(), "MemoryError"),
        (Exception("\ud800"), "\ud800"),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_whatever_a_tool_raises_is_a_result_for_the_model(error: BaseException, hint: str, kind: str) -> None:
    def sync() -> None:
        raise error

    async def later() -> None:
        raise error

    result = run(tool(name="t")(sync if kind == "sync" else later))
    assert result.is_error
    assert hint in result.text
    encode(result)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_error_that_cannot_be_printed_is_a_result_too(kind: str) -> None:
    def sync() -> None:
        raise Unspeakable

    async def later() -> None:
        raise Unspeakable

    result = run(tool(name="t")(sync if kind == "sync" else later))
    assert result.is_error
    assert "Unspeakable" in result.text


def test_a_plain_function_runs_beside_the_event_loop() -> None:
    seen: list[int] = []

    @tool
    def look() -> None:
        seen.append(threading.get_ident())

    async def main() -> None:
        await look.execute(ToolCall("c", "look"), context())
        seen.append(threading.get_ident())

    asyncio.run(main())
    assert seen[0] != seen[1]


def test_a_plain_function_does_not_stop_the_event_loop() -> None:
    async def main() -> str:
        go = threading.Event()

        @tool
        def look() -> str:
            assert go.wait(30)  # set by the loop, which would otherwise stand still
            return "went"

        task = asyncio.create_task(look.execute(ToolCall("c", "look"), context()))
        asyncio.get_running_loop().call_soon(go.set)
        return (await task).message.text

    assert asyncio.run(main()) == "went"


def test_an_async_function_runs_on_the_event_loop() -> None:
    @tool
    async def look() -> int:
        return threading.get_ident()

    async def main() -> None:
        result = (await look.execute(ToolCall("c", "look"), context())).message
        assert result.text == str(threading.get_ident())

    asyncio.run(main())


def test_a_plain_function_sees_the_context_variables_of_its_run() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="lost")

    @tool
    def look() -> str:
        return variable.get()

    async def main() -> str:
        variable.set("found")
        return (await look.execute(ToolCall("c", "look"), context())).message.text

    assert asyncio.run(main()) == "found"


def test_a_plain_function_that_returns_an_awaitable_is_awaited() -> None:
    async def answer(x: int) -> int:
        return 2 * x

    def look(x: int) -> Any:
        return answer(x)

    assert run(tool(look), x=4).text == "8"


def test_a_decorated_async_function_is_awaited() -> None:
    async def answer(x: int) -> int:
        return 2 * x

    @functools.wraps(answer)
    def look(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    assert run(tool(look), x=4).text == "8"


# --- time and order ---------------------------------------------------------------------------------------------------


def test_a_sync_tool_that_takes_too_long_is_an_error_and_the_run_goes_on() -> None:
    never = threading.Event()

    @tool(timeout=0.01)
    def hang() -> None:
        never.wait(60)

    try:
        result = call(hang)
    finally:
        never.set()
    assert result.is_error
    assert result.text == "Timed out after 0.01 s; it may or may not have taken effect."


def test_an_async_tool_that_takes_too_long_is_cancelled_and_may_clean_up() -> None:
    cleaned: list[str] = []

    @tool(timeout=0.01)
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    assert "Timed out" in call(hang).text
    assert cleaned == ["yes"]


def test_a_clean_up_that_fails_does_not_hide_the_time_limit() -> None:
    @tool(timeout=0.01)
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while cleaning up")

    assert "Timed out" in call(hang).text


def test_an_async_tool_that_ignores_its_cancellation_is_left_behind() -> None:
    async def main() -> None:
        enough = asyncio.Event()

        @tool(timeout=0.01)
        async def stubborn() -> None:
            while not enough.is_set():
                try:
                    await enough.wait()
                except asyncio.CancelledError:
                    continue

        result = await prompted([stubborn], [ToolCall("1", "stubborn")])
        assert "Timed out" in results_of(result.messages)[0].text
        enough.set()

    asyncio.run(main())


def test_a_tool_that_finishes_its_work_while_it_is_stopped_has_done_it() -> None:
    @tool(timeout=0.01)
    async def careful() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "committed"
        return "unreachable"

    result = call(careful)
    assert (result.text, result.is_error) == ("committed", False)


def test_a_tool_with_a_time_limit_is_aborted_with_its_run() -> None:
    async def main() -> None:
        cleaned = False

        @tool(timeout=600)
        async def hang(context: ToolContext) -> None:
            nonlocal cleaned
            context.update("hanging")
            try:
                await asyncio.Event().wait()
            finally:
                cleaned = True

        agent = Agent(provider=ScriptedProvider([[ToolCall("1", "hang")]]), model=Model("m"), tools=[hang])
        agent.subscribe(lambda event: agent.abort() if isinstance(event, ToolExecutionUpdate) else None)
        result = await agent.prompt("go")
        assert result.stop_reason == "aborted"
        assert "aborted" in results_of(result.messages)[0].text
        assert cleaned

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, 600.0])
def test_a_tool_whose_own_work_was_cancelled_has_failed_and_the_run_goes_on(timeout: float | None) -> None:
    @tool(timeout=timeout)
    async def work() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task

    result = call(work)
    assert result.is_error
    assert "CancelledError" in result.text


@pytest.mark.parametrize("timeout", [None, 600.0])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_tool_that_wants_to_exit_does_not_end_the_program(timeout: float | None, kind: str) -> None:
    def sync() -> None:
        raise SystemExit(3)

    async def later() -> None:
        raise SystemExit(3)

    made: Made = Tool(sync if kind == "sync" else later, name="t", timeout=timeout)
    assert call(made).text == "SystemExit: 3"


def test_calls_of_one_reply_run_side_by_side() -> None:
    meeting = threading.Barrier(3)

    @tool
    def meet(number: int) -> int:
        meeting.wait(30)  # broken unless all three are there
        return number

    calls = [ToolCall(str(number), "meet", {"number": number}) for number in range(3)]
    result = asyncio.run(prompted([meet], calls))
    assert [message.text for message in results_of(result.messages)] == ["0", "1", "2"]


def test_a_reply_with_a_thousand_calls_takes_a_bounded_number_of_os_threads() -> None:
    most = 0

    @tool
    def count(number: int) -> int:
        nonlocal most
        most = max(most, sum(thread.name == "byssus-tool" for thread in threading.enumerate()))
        time.sleep(0.05)  # its work
        return number

    calls = [ToolCall(str(number), "count", {"number": number}) for number in range(1_000)]
    result = asyncio.run(prompted([count], calls))
    assert [message.text for message in results_of(result.messages)] == [str(number) for number in range(1_000)]
    assert most <= 128  # 64, and some that are just ending


def test_calls_that_wait_for_a_thread_have_not_begun_and_an_abort_does_not_wait_for_them() -> None:
    async def main() -> None:
        let_go, begun = threading.Event(), threading.Semaphore(0)

        @tool
        def hang() -> None:
            begun.release()
            let_go.wait(60)

        @tool
        async def quick() -> str:
            return "done"

        events: list[Event] = []
        calls = [ToolCall(str(number), "hang") for number in range(200)] + [ToolCall("quick", "quick")]
        provider = ScriptedProvider([calls])
        agent = Agent(provider=provider, model=Model(id="scripted"), tools=[hang, quick], abort_grace=0.1)
        agent.subscribe(events.append)
        run = asyncio.create_task(agent.prompt("go"))
        for _ in range(64):
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        while not any(isinstance(event, ToolExecutionEnd) for event in events):  # what needs no thread does not wait
            await asyncio.sleep(0.01)
        agent.abort()
        result = await asyncio.wait_for(run, 20)
        let_go.set()
        assert result.stop_reason == "aborted"
        assert sum(isinstance(event, ToolExecutionStart) for event in events) == 65
        texts = [message.text for message in results_of(result.messages)]
        assert sum("not started" in text for text in texts) == 136
        assert sum("may or may not" in text for text in texts) == 64

    asyncio.run(main())


def test_a_plain_tool_that_waits_for_the_tools_of_other_agents_gets_them() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        @tool
        def inner() -> str:
            return "inner"

        async def ask() -> str:
            provider = ScriptedProvider([[ToolCall("1", "inner")], "asked"])
            return (await Agent(provider=provider, model=Model(id="scripted"), tools=[inner]).prompt("go")).text

        @tool
        def outer() -> str:
            return asyncio.run_coroutine_threadsafe(ask(), loop).result(30)

        calls = [ToolCall(str(number), "outer") for number in range(80)]
        result = await prompted([outer], calls)
        assert {message.text for message in results_of(result.messages)} == {"asked"}

    asyncio.run(main())


def test_a_reply_that_calls_a_sequential_tool_runs_its_calls_one_after_the_other() -> None:
    running: list[str] = []
    order: list[str] = []

    async def note(name: str) -> None:
        assert running == []
        running.append(name)
        for _ in range(5):
            await asyncio.sleep(0)  # long enough for another one to begin
        running.remove(name)
        order.append(name)

    @tool(sequential=True)
    async def write(name: str) -> None:
        await note(name)

    @tool
    async def read(name: str) -> None:
        await note(name)

    events: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, ToolExecutionStart | ToolExecutionEnd):
            events.append(f"{event.type} {event.tool_call_id}")

    calls = [ToolCall(str(n), name, {"name": str(n)}) for n, name in enumerate(["read", "write", "read"])]
    result = asyncio.run(prompted([write, read], calls, listen=listen))
    assert not any(message.is_error for message in results_of(result.messages))
    assert order == ["0", "1", "2"]
    assert events == [f"tool_execution_{what} {n}" for n in range(3) for what in ("start", "end")]


def test_a_blocking_tool_does_not_stall_the_event_loop() -> None:
    async def main() -> None:
        turned = threading.Event()

        @tool
        def block() -> str:
            return "free" if turned.wait(30) else "stalled"

        agent = Agent(provider=ScriptedProvider([[ToolCall("1", "block")], "done"]), model=Model("m"), tools=[block])
        running = asyncio.create_task(agent.prompt("go"))
        agent.subscribe(
            lambda event: (
                asyncio.get_running_loop().call_later(0.001, turned.set)
                if isinstance(event, ToolExecutionStart)
                else None
            )
        )
        result = await running
        assert results_of(result.messages)[0].text == "free"

    asyncio.run(main())


# --- the context ------------------------------------------------------------------------------------------------------


class Odd:
    def __repr__(self) -> str:
        return "<odd>"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def test_a_tool_that_asks_for_its_context_gets_it_unseen_by_the_model() -> None:
    @tool
    def look(city: str, ctx: ToolContext) -> str:
        return (
            f"{city} {ctx.tool_call_id} {ctx.tool_name} {ctx.thread_id} {ctx.user_id} {ctx.extra} {ctx.signal.aborted}"
        )

    assert list(properties(look)) == ["city"]
    made = context(thread_id="trip", user_id="ann", extra={"a": 1})
    result = asyncio.run(look.execute(ToolCall("c1", "look", {"city": "Kiel"}), made)).message
    assert result.text == "Kiel c1 look trip ann {'a': 1} False"


def test_a_model_cannot_pass_a_context() -> None:
    @tool
    def look(ctx: ToolContext) -> None: ...

    result = run(look, ctx={"tool_call_id": "x"})
    assert result.is_error
    assert "ctx" in result.text


def test_progress_goes_nowhere_when_nobody_listens() -> None:
    @tool
    def look(ctx: ToolContext) -> str:
        ctx.update("half")
        return "done"

    assert run(look).text == "done"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_progress_is_heard_on_the_loop_in_order_and_before_the_end(kind: str) -> None:
    heard: list[Event] = []
    threads: set[int] = set()

    def sync(ctx: ToolContext) -> str:
        for step in range(20):
            ctx.update({"step": step, "odd": Odd()})
        return "done"

    async def later(ctx: ToolContext) -> str:
        return sync(ctx)

    def listen(event: Event) -> None:
        heard.append(event)
        threads.add(threading.get_ident())

    provider = ScriptedProvider([[ToolCall("c1", "t")], "ok"])
    agent = Agent(
        provider=provider, model=Model("m"), tools=[tool(name="t")(sync) if kind == "sync" else tool(name="t")(later)]
    )
    agent.subscribe(listen)

    asyncio.run(agent.prompt("go"))
    updates = [event for event in heard if isinstance(event, ToolExecutionUpdate)]
    assert [event.update for event in updates] == [{"step": step, "odd": "<odd>"} for step in range(20)]
    kinds = [event.type for event in heard]
    assert kinds.index("tool_execution_start") < kinds.index("tool_execution_update")
    assert len(kinds) - kinds[::-1].index("tool_execution_update") <= kinds.index("tool_execution_end")
    assert threads == {threading.get_ident()}


def test_a_tool_that_is_over_has_nothing_more_to_say() -> None:
    heard: list[str] = []
    kept: list[ToolContext] = []

    @tool
    def look(ctx: ToolContext) -> None:
        kept.append(ctx)

    async def main() -> None:
        agent = Agent(provider=ScriptedProvider([[ToolCall("c1", "look")], "ok"]), model=Model("m"), tools=[look])
        agent.subscribe(lambda event: heard.append(event.type))
        await agent.prompt("go")
        kept[0].update("late")
        assert "tool_execution_update" not in heard
        assert heard[-1] == "agent_end"

    asyncio.run(main())


def test_a_tool_knows_where_it_is_called_from(database: Database) -> None:
    seen: list[ToolContext] = []

    @tool
    async def look(city: str, context: ToolContext) -> str:
        seen.append(context)
        context.extra["looked"] = city
        return "ok"

    async def main() -> None:
        async with database.checkpointer() as cp:
            script = ScriptedProvider([[ToolCall("call-1", "look", {"city": "Oslo"})], "done"])
            agent = Agent(provider=script, model=Model("m"), tools=[look], checkpointer=cp, thread_id="trip")
            agent.state.extra["before"] = 1
            await agent.prompt("go")
            thread = await cp.load("trip")
            assert thread is not None
            assert thread.extra == {"before": 1, "looked": "Oslo"}

    asyncio.run(main())
    (context,) = seen
    assert (context.thread_id, context.tool_call_id, context.tool_name) == ("trip", "call-1", "look")
    assert not context.signal.aborted
    assert "context" not in schema_of(look)["properties"]


def test_a_tool_whose_context_is_optional_gets_it_and_can_be_called_without() -> None:
    @tool
    def look(city: str, context: ToolContext | None = None) -> str:
        return f"{city} {context.tool_call_id if context else 'alone'}"

    assert call(look, city="Oslo").text == "Oslo 1"
    assert look("Oslo") == "Oslo alone"


def test_idempotency_keys_differ_between_calls_also_where_a_service_uses_an_id_twice() -> None:
    keys: list[str] = []

    @tool(sequential=True)
    def pay(context: ToolContext) -> str:
        keys.append(context.idempotency_key)
        again = context.idempotency_key
        assert again == keys[-1]
        return "paid"

    same = [ToolCall("0", "pay"), ToolCall("1", "pay")]
    asyncio.run(prompted([pay], same, same))
    assert len(keys) == 4
    assert len(set(keys)) == 4
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_progress_of_any_type_is_heard_before_the_end(kind: str) -> None:
    heard: list[Any] = []

    def sync(context: ToolContext) -> str:
        context.update({"when": datetime.date(2026, 1, 2), "odd": Unprintable()})
        return "done"

    async def later(context: ToolContext) -> str:
        return sync(context)

    def listen(event: Event) -> None:
        if isinstance(event, ToolExecutionUpdate):
            heard.append(event.update)
        elif isinstance(event, ToolExecutionEnd):
            heard.append("end")

    made: Made = Tool(sync if kind == "sync" else later, name="t")
    asyncio.run(prompted([made], [ToolCall("1", "t")], listen=listen))
    assert heard == [{"when": "2026-01-02", "odd": "<Unprintable: its repr raised RuntimeError>"}, "end"]


def test_a_tool_that_was_left_behind_by_its_time_limit_is_not_heard_any_more() -> None:
    heard: list[Event] = []
    go, said = threading.Event(), threading.Event()

    @tool(timeout=0.01)
    def slow(context: ToolContext) -> None:
        assert go.wait(30)
        context.update("late")
        said.set()

    async def main() -> None:
        await prompted([slow], [ToolCall("1", "slow")], listen=heard.append)
        go.set()
        await asyncio.to_thread(said.wait, 30)

    asyncio.run(main())
    assert said.is_set()
    assert not any(isinstance(event, ToolExecutionUpdate) for event in heard)
