"""The program that is told to end: python -m tests.run.termination_child SCENE [DATABASE]

Each line on stdout is written at once. "ready" says that the moment for a signal has come; the lines after it tell what
the program could still do. Its database is that of the test, which looks at it afterwards.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any

from byssus import Agent, Model, ToolCall, ToolContext, tool
from byssus.checkpointer import Checkpointer, checkpointer_for
from byssus.events import AgentEnd, Event, MessageUpdate, StreamEvent, StreamStart, TextDelta, TextStart
from byssus.providers.base import Provider, Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from tests.support.agents import Heard, check_whole

SCENES: dict[str, Callable[[], Any]] = {}
ASKED_TO_END = signal.SIGTERM


def scene(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENES[function.__name__] = function
    return function


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


_missing = 1


def expect(runs: int) -> None:
    """We are ready when so many runs have come as far as they come."""
    global _missing  # noqa: PLW0603
    _missing = runs


def arrive() -> None:
    global _missing  # noqa: PLW0603
    _missing -= 1
    if _missing == 0:
        say("ready")


class Talking:
    """Says something and then nothing more."""

    name = "talking"

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        yield TextStart(0)
        yield TextDelta(0, "Hel")
        arrive()
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Checkpointer]:
    try:
        async with checkpointer_for(sys.argv[2]) as cp:
            yield cp
    finally:
        say("closed")


def make(cp: Checkpointer | None, thread_id: str = "t", provider: Provider | None = None, **options: Any) -> Agent:
    where: Any = {"checkpointer": cp, "thread_id": thread_id} if cp else {}
    return Agent(provider=provider or Talking(), model=Model("m"), **where, **options)


@contextlib.contextmanager
def tells(*agents: Agent) -> Any:
    """Say how the runs of the agents came out, however this is left."""
    heards = [Heard(agent) for agent in agents]
    try:
        yield
    except BaseException as error:
        say(f"{type(error).__name__} {getattr(error, 'code', '')}".strip())
        raise
    finally:
        for heard in heards:
            check_whole(heard)
            say(f"whole {heard.of(AgentEnd)[0].stop_reason}")


# --- runs of which there is nothing special ---------------------------------------------------------------------------


@scene
async def prompt() -> None:
    async with opened() as cp:
        agent = make(cp)
        with tells(agent):
            await agent.prompt("hi")


@scene
async def resume() -> None:
    async with opened() as cp:
        await make(cp, provider=ScriptedProvider([OSError("no network")])).prompt("hi")
        agent = make(cp)
        with tells(agent):
            await agent.resume()


@scene
async def stream() -> None:
    async with opened() as cp:
        agent = make(cp)
        with tells(agent):
            async for event in agent.stream("hi"):
                say(f"got {event.type}")


@scene
async def busy_stream() -> None:
    """A consumer that hears of nothing, because it is occupied for ever."""
    async with opened() as cp:
        agent = make(cp)
        with tells(agent):
            async with agent.stream("hi") as events:
                await anext(events)
                await asyncio.Event().wait()


@scene
async def closing_stream() -> None:
    """A consumer that has left and waits for the end of its run when the signal comes."""
    async with opened() as cp:
        agent = make(cp)
        agent.subscribe(terminating_at("message_end"))
        with tells(agent):
            async with agent.stream("hi") as events:
                async for event in events:
                    if event.type == "message_update" and event.stream_event.type == "text_delta":
                        break
            say("went on")


@scene
async def dropped_stream() -> None:
    """A run that nobody waits for any more."""
    async with opened() as cp:
        agent = make(cp)
        agent.subscribe(terminating_at("message_end"))
        with tells(agent):
            async for event in agent.stream("hi"):
                if event.type == "message_update" and event.stream_event.type == "text_delta":
                    break
            await asyncio.Event().wait()


def terminating_at(kind: str) -> Callable[[Event], None]:
    """A listener that has the signal sent when such an event of the assistant comes."""

    def listen(event: Event) -> None:
        if event.type == kind and getattr(getattr(event, "message", None), "role", "assistant") == "assistant":
            signal.raise_signal(ASKED_TO_END)

    return listen


def at_the_first_word(act: Callable[[], object]) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta):
            act()

    return listen


@scene
async def at_the_very_end() -> None:
    """The run has nothing left to do when the signal comes."""
    async with opened() as cp:
        agent = make(cp, provider=ScriptedProvider(["Hello."]))
        agent.subscribe(terminating_at("agent_end"))
        with tells(agent):
            await agent.prompt("hi")
            say("went on")


@scene
async def two() -> None:
    expect(2)
    async with opened() as cp:
        agents = make(cp, "t"), make(cp, "u")
        with tells(*agents):
            await asyncio.gather(*(agent.prompt("hi") for agent in agents))


@scene
async def two_in_a_group() -> None:
    expect(2)
    async with opened() as cp:
        agents = make(cp, "t"), make(cp, "u")
        with tells(*agents):
            async with asyncio.TaskGroup() as group:
                for agent in agents:
                    group.create_task(agent.prompt("hi"))


@scene
async def a_prompt_and_a_stream() -> None:
    expect(2)
    async with opened() as cp:
        agents = make(cp, "t"), make(cp, "u")

        async def consume() -> None:
            async for _ in agents[1].stream("hi"):
                pass

        with tells(*agents):
            await asyncio.gather(agents[0].prompt("hi"), consume())


@scene
async def many() -> None:
    expect(50)
    agents = [make(None) for _ in range(50)]
    with tells(*agents):
        await asyncio.gather(*(agent.prompt("hi") for agent in agents))


@scene
async def background() -> None:
    """The run belongs to a task; the main one is busy with something else."""
    async with opened() as cp:
        agent = make(cp)
        with tells(agent):
            running = asyncio.create_task(agent.prompt("hi"))
            await asyncio.Event().wait()
            await running


@scene
async def main_and_background() -> None:
    """The main task's run is over at once; the other one takes its time, and somebody would go on after it."""

    expect(3)

    @tool
    async def slow() -> str:
        arrive()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)
        return "in order"

    async with opened() as cp:
        quick = make(cp)
        steps: list[Step] = [[ToolCall("c1", "slow")]]
        late = make(cp, "u", provider=ScriptedProvider(steps), tools=[slow], abort_grace=60)
        others = make(cp, "v")

        async def go_on(agent: Agent) -> None:
            await agent.prompt("hi")
            say("went on")

        running = [asyncio.create_task(go_on(agent)) for agent in (late, others)]
        with tells(quick, late, others):
            await quick.prompt("hi")
        await asyncio.gather(*running)


@scene
async def nested() -> None:
    """An agent that is a tool of another one."""
    async with opened() as cp:
        inner = make(cp, "u")

        @tool
        async def ask() -> str:
            return (await inner.prompt("deeper")).stop_reason

        outer = make(cp, provider=ScriptedProvider([[ToolCall("c1", "ask")]]), tools=[ask])
        with tells(inner, outer):
            await outer.prompt("hi")


# --- runs that are hard to end ----------------------------------------------------------------------------------------


@scene
async def stuck_tool() -> None:
    """A tool that does not listen, on a thread that nobody can end."""

    @tool
    def stuck() -> None:
        say("ready")
        threading.Event().wait()

    async with opened() as cp:
        steps: list[Step] = [[ToolCall("c1", "stuck")]]
        agent = make(cp, provider=ScriptedProvider(steps), tools=[stuck], abort_grace=0.01)
        with tells(agent):
            await agent.prompt("hi")


@scene
async def slow_tool() -> None:
    """A tool that takes its time to end: until something comes on the standard input."""

    @tool
    async def slow(ctx: ToolContext) -> str:
        say("ready")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        say(f"stopping: {ctx.signal.reason}")
        await asyncio.to_thread(sys.stdin.readline)
        return "in order"

    async with opened() as cp:
        steps: list[Step] = [[ToolCall("c1", "slow")]]
        agent = make(cp, provider=ScriptedProvider(steps), tools=[slow], abort_grace=60)
        with tells(agent):
            await agent.prompt("hi")


@scene
async def aborted_already() -> None:
    async with opened() as cp:
        agent = make(cp)
        agent.subscribe(at_the_first_word(agent.abort))
        agent.subscribe(terminating_at("message_end"))
        with tells(agent):
            await agent.prompt("hi")
            say("went on")


@scene
async def cancelled_already() -> None:
    """Whoever waits gives up at the same moment, and would go on with something else."""
    async with opened() as cp:
        agent, main = make(cp), asyncio.current_task()
        assert main is not None
        agent.subscribe(at_the_first_word(main.cancel))
        agent.subscribe(terminating_at("message_end"))
        with tells(agent):
            with contextlib.suppress(asyncio.CancelledError):
                await agent.prompt("hi")
            main.uncancel()
            say("went on")


@scene
async def failing() -> None:
    """A run that fails on its way out."""

    class Failing:
        def on_run_end(self, result: object) -> None:
            raise ValueError("no")

    async with opened() as cp:
        agent = make(cp, middleware=[Failing()])
        heard = Heard(agent)
        try:
            await agent.prompt("hi")
        except BaseException as error:
            say(f"{type(error).__name__} {getattr(error, 'code', '')}")
            check_whole(heard)
            raise


# --- whose signal it is -----------------------------------------------------------------------------------------------


@scene
async def own_handler() -> None:
    agent = make(None)

    def end(number: int, frame: FrameType | None) -> None:
        say("own handler")
        loop.call_soon_threadsafe(agent.abort)

    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGTERM, end)
    with tells(agent):
        await agent.prompt("hi")
    assert signal.getsignal(signal.SIGTERM) is end


@scene
async def own_handler_of_the_loop() -> None:
    agent = make(None)

    def end() -> None:
        say("own handler")
        agent.abort()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    with tells(agent):
        await agent.prompt("hi")


@scene
async def own_handler_in_mid_run() -> None:
    agent = make(None)
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        say("own handler")
        told.set()
        agent.abort()

    def install(event: Event) -> None:
        if event.type == "turn_start":
            loop.add_signal_handler(signal.SIGTERM, end)

    agent.subscribe(install)
    with tells(agent):
        await agent.prompt("hi")
    told.clear()
    signal.raise_signal(signal.SIGTERM)  # it is still there
    await told.wait()


@scene
async def ours_put_back_by_a_program() -> None:
    """A program replaces the handler for a while and puts back what it found, which by then nobody needs any more."""
    agent, found = make(None, provider=ScriptedProvider(["a", "b"])), list[Any]()

    def replace(event: Event) -> None:
        if event.type == "turn_start":
            found.append(signal.signal(signal.SIGTERM, signal.SIG_IGN))

    unsubscribe = agent.subscribe(replace)
    await agent.prompt("hi")
    unsubscribe()
    signal.signal(signal.SIGTERM, found[0])
    say("ready")
    threading.Event().wait()


@scene
async def ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    agent = make(None)
    agent.subscribe(at_the_first_word(lambda: signal.raise_signal(signal.SIGTERM)))
    agent.subscribe(at_the_first_word(lambda: asyncio.get_running_loop().call_soon(agent.abort)))
    with tells(agent):
        await agent.prompt("hi")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@scene
async def afterwards() -> None:
    agent = make(None, provider=ScriptedProvider(["a", "b"]))
    await asyncio.gather(agent.prompt("hi"), make(None, provider=ScriptedProvider(["c"])).prompt("hi"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    say("ready")
    await asyncio.Event().wait()


@scene
def other_thread() -> None:
    """A run in a thread where signals are not handled: SIGTERM does what it always did."""
    running = threading.Thread(target=lambda: asyncio.run(make(None).prompt("hi")))
    running.start()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    running.join()


@scene
async def other_thread_alone_at_last() -> None:
    """The main thread's run is over, and one in another thread goes on."""
    expect(2)
    beside, begun = make(None), threading.Event()
    beside.subscribe(at_the_first_word(begun.set))
    threading.Thread(target=lambda: asyncio.run(beside.prompt("hi")), daemon=True).start()
    await asyncio.to_thread(begun.wait)
    await make(None, provider=ScriptedProvider(["ok"])).prompt("hi")
    arrive()
    await asyncio.Event().wait()


@scene
async def both_threads() -> None:
    expect(2)
    async with opened() as cp:
        agents = make(cp, "t"), make(cp, "u")
        beside = threading.Thread(target=lambda: asyncio.run(agents[1].prompt("hi")))
        beside.start()
        try:
            with tells(agents[0]):
                await agents[0].prompt("hi")
        finally:
            beside.join()


@scene
async def forked() -> None:
    """A child that a tool forks is ended by SIGTERM as ever."""

    @tool
    async def fork() -> str:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            signal.alarm(60)  # whatever happens, it is not left behind
            os.write(writer, b"x")
            while True:
                signal.pause()
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        return str(os.waitpid(child, 0)[1])

    result = await make(None, provider=ScriptedProvider([[ToolCall("c1", "fork")], "ok"]), tools=[fork]).prompt("hi")
    say(f"{result.text} {result.messages[2].text}")


@scene
def loop_of_ones_own() -> None:
    loop = asyncio.new_event_loop()
    agent = make(None)
    try:
        with tells(agent):
            loop.run_until_complete(agent.prompt("hi"))
    finally:
        loop.close()


@scene
def left_in_a_loop_that_stands_still() -> None:
    """A run that cannot go on, because nobody turns its loop: there is nothing to end in good order."""
    loop = asyncio.new_event_loop()
    agent = make(None, provider=ScriptedProvider(["hello"]))
    running = loop.create_task(agent.prompt("hi"))
    loop.call_soon(loop.call_soon, loop.stop)
    loop.run_forever()
    assert not running.done()
    say("ready")
    threading.Event().wait()


if __name__ == "__main__":
    atexit.register(say, "atexit")
    chosen = SCENES[sys.argv[1]]
    asyncio.run(chosen()) if asyncio.iscoroutinefunction(chosen) else chosen()
