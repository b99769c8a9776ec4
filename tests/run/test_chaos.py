"""Whatever happens to a thread, and in whatever order, the promises hold.

Two processes prompt and resume one thread, speak to it, answer its questions, abort each other and die; models and
tools fail, ids are used twice. After each step the database is held against what really happened.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from byssus import (
    Agent,
    Ask,
    Deny,
    Done,
    Limits,
    Middleware,
    NotDone,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    Unknown,
    Usage,
    UserMessage,
)
from byssus.checkpointer import Checkpointer
from byssus.errors import (
    AnswerNeeded,
    HookFailed,
    InputError,
    LeaseLost,
    NetworkFailed,
    NothingToResume,
    ThreadBusy,
)
from byssus.events import MessageEnd, StreamDone, StreamEvent, StreamStart, ToolCallEnd, ToolCallStart
from byssus.providers.base import Request
from byssus.signals import Signal
from byssus.threads.waiting import owner_is_gone
from byssus.tools import Tool
from tests.support.agents import Heard, check_whole, text_events
from tests.support.checkpointers import loaded
from tests.support.databases import Database
from tests.support.histories import flaws
from tests.support.leases import agent_on, die, is_free, lease_of, unfinished, with_two

POLICIES: dict[str, dict[str, Any]] = {
    "never": {},
    "retry": {"recovery": "retry"},
    "ask": {"recovery": "ask"},
    "approve": {"approval": True},
    "check": {"recovery": "check"},
}
REFUSALS = (AnswerNeeded, ThreadBusy, NothingToResume, HookFailed)


class World:
    """What really happened: which tools ran for which call, and what was said."""

    name = "chaos"  # it is the provider, too

    def __init__(self, seed: int, cp: Checkpointer, other: Checkpointer) -> None:
        self.chance = random.Random(seed)
        self.openers = (cp, other)
        self.runs: Counter[str] = Counter()
        self.said: dict[str, int] = {}  # how often each steering message or follow-up must be found
        self._flaws: list[str] = []
        self._numbers = iter(range(10**9))

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        self._flaws += flaws(request.messages)  # what is raised here would be taken for the model's failure
        chance = self.chance
        yield StreamStart()
        for event in text_events("so"):
            yield event
        await asyncio.sleep(chance.choice([0, 0, 0.02]))
        if chance.random() < 0.08:
            raise NetworkFailed("cut")
        for index in range(1, chance.choice([1, 1, 1, 2, 3, 4])):
            number = next(self._numbers)
            name = chance.choice([*POLICIES, "no such tool"])
            call = ToolCall(chance.choice(["twice", f"c{number}"]), name, {"n": number})
            yield ToolCallStart(index, call.id, call.name)
            yield ToolCallEnd(index, call)
        yield StreamDone("stop", Usage(1, 1))

    def _tool(self, name: str) -> Tool[..., Any]:
        async def act(n: int, context: ToolContext) -> str:
            self.runs[context.idempotency_key] += 1
            await asyncio.sleep(self.chance.choice([0, 0.01, 0.03]))
            if self.chance.random() < 0.1:
                raise ValueError("no")
            return f"did {n}"

        check = (lambda _: self.chance.choice([Done("it was"), NotDone(), Unknown()])) if name == "check" else None
        return Tool(act, name=name, check=check, **POLICIES[name])

    def agent(self, number: int) -> Agent:
        chance = self.chance
        modes = ("all", "one-at-a-time")
        return agent_on(
            self.openers[number],
            self,
            tools=[self._tool(name) for name in POLICIES],
            tool_mode=chance.choice(["parallel", "sequential"]),
            middleware=[Moody(chance)] if chance.random() < 0.3 else [],
            steering_mode=chance.choice(modes),
            follow_up_mode=chance.choice(modes),
            limits=Limits(turns=chance.choice([1, 3, 6])),
            save_partial=chance.choice([None, 0.003]),
            max_retries=0,
        )

    async def run(self, number: int, agent: Agent) -> None:
        """Prompt or resume, and perhaps disturb it."""
        chance, opener, heard = self.chance, self.openers[number], Heard(agent)
        way = agent.prompt(f"prompt {next(self._numbers)}") if chance.random() < 0.5 else agent.resume()
        run = asyncio.create_task(way)
        disturbance = chance.choice(
            ["", "", "", "die", "die", "die", "abort", "remote abort", "cancel", "speak", "answer"]
        )
        await asyncio.sleep(chance.random() * 0.04 if disturbance else 0)
        dies = disturbance == "die" and not run.done()
        if dies:
            await die(opener, agent, run)
        elif disturbance == "abort":
            agent.abort()
        elif disturbance == "remote abort":
            await self.openers[1 - number].abort("t")
        elif disturbance == "cancel":
            run.cancel()
        elif disturbance == "speak":
            await self.speak(agent.steer, agent.follow_up)
        elif disturbance == "answer":
            await self.answer(1 - number)
        await asyncio.wait([run])
        error = None if run.cancelled() else run.exception()
        assert error is None or isinstance(error, (*REFUSALS, LeaseLost) if dies else REFUSALS), repr(error)
        check_whole(heard)
        if dies:
            return
        stored = (await loaded(opener, "t")).messages
        assert all(event.message in stored for event in heard.of(MessageEnd) if event.stored)
        if error is None and not run.cancelled():
            assert agent.state.messages == stored
            lease = await lease_of(opener)  # of a run that died before, if this one was aborted before it began
            assert lease.owner is None or owner_is_gone(opener.store, lease.owner)

    async def speak(self, *ways: Callable[[str], Awaitable[Any]]) -> None:
        text = f"said {next(self._numbers)}"
        self.said[text] = 1
        await self.chance.choice(ways)(text)

    async def answer(self, number: int) -> None:
        opener = self.openers[number]
        answers: list[Any] = ["approve", "approve", "deny", Deny("no"), ToolResult("by hand")]
        for question in await opener.pending("t"):
            await opener.answer("t", question.call_id, self.chance.choice(answers))

    async def judge(self) -> None:
        assert self._flaws == []
        cp = self.openers[0]
        messages = (await loaded(cp, "t")).messages
        waiting = [item.message.text for item in await cp.inbox("t")]
        found = Counter([*(message.text for message in messages), *waiting])
        assert {text: found[text] for text in self.said} == self.said
        records = await cp.tool_calls("t")
        for record in records:
            assert self.runs[record.idempotency_key] <= record.attempts, record
            assert record.attempts <= 1 or record.recovery in ("retry", "ask", "check"), record
        assert len({record.idempotency_key for record in records}) == len(records)
        ended = sum(record.ended_at is not None for record in records)
        assert ended <= sum(isinstance(message, ToolResultMessage) for message in messages)


class Moody(Middleware):
    """Hooks that ask, deny and fail now and then."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def before_tool_call(self, call: ToolCall, **_: Any) -> Any:
        return self._chance.choice([None] * 18 + [Ask("?"), Deny("no")])

    async def after_tool_call(self, call: ToolCall, result: ToolResultMessage, **_: Any) -> None:
        if self._chance.random() < 0.05:
            raise ValueError("no")

    async def after_model_response(self, message: Any, **_: Any) -> None:
        if self._chance.random() < 0.05:
            raise ValueError("no")


@pytest.mark.large
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_to_a_thread_the_promises_hold(database: Database, seed: int) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        world = World(seed, cp, other)
        chance = world.chance
        await cp.append("t", UserMessage("begin"))
        agents = [world.agent(0), world.agent(1)]
        for _ in range(35):
            number = chance.randrange(2)
            opener = (cp, other)[number]
            if chance.random() < 0.4:
                agents[number] = world.agent(number)
            step = chance.choice(["run", "run", "run", "run", "answer", "speak", "withdraw", "visit"])
            if step == "run":
                await world.run(number, agents[number])
            elif step == "answer":
                await world.answer(number)
            elif step == "speak":
                await world.speak(functools.partial(opener.steer, "t"), functools.partial(opener.follow_up, "t"))
            elif step == "withdraw":
                for item in (await opener.inbox("t"))[:1]:
                    assert await opener.withdraw("t", item)
                    world.said[item.message.text] = 0
            else:
                await opener.append("t", UserMessage("a visitor"), wait=1)
            await world.judge()
        await wind_up(world)

    with_two(database, use)


async def wind_up(world: World) -> None:
    """Answer and resume until nothing is left to do: then nothing is open any more."""
    cp = world.openers[0]
    while True:
        await world.answer(1)
        try:
            await world.agent(0).resume()
        except NothingToResume:
            break
        except HookFailed:
            continue
        except InputError as error:
            raise AssertionError from error
    await world.judge()
    assert await unfinished(cp) == []
    assert await cp.inbox("t") == []
    assert {record.status for record in await cp.tool_calls("t")} <= {"done", "failed", "denied", "aborted", "unknown"}
    assert await is_free(cp)
