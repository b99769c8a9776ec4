"""What a service does when it starts: finish every run that a crash or a deployment interrupted.

python examples/resume_all.py crash    # begin three runs and die in the middle of their tools
python examples/resume_all.py          # start again: each is finished, and no tool that had ended runs twice
"""

import asyncio
import os
import sys

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import SQLiteCheckpointer, TakeOver
from byssus.providers.base import Request
from byssus.testing import ScriptedProvider

dying = sys.argv[1:] == ["crash"]
last_words = asyncio.Barrier(3)


@tool
async def charge(order: int) -> str:
    """Charge a card: quick, and done before the crash."""
    print(f"charging for order {order}", flush=True)
    return "charged"


@tool(recovery="retry")
async def ship(order: int) -> str:
    """Ship an order: slow, and safe to try again, because the warehouse knows the idempotency key."""
    print(f"shipping order {order}", flush=True)
    if dying:
        async with last_words:
            os._exit(137)  # as kill -9 would
    return "shipped"


def script(request: Request) -> str | list[ToolCall]:
    """A stand-in for a model: calls both tools, and then reports."""
    results = [message.text for message in request.messages if message.role == "tool_result"]
    if results:
        return " and ".join(results)
    order = int(request.messages[-1].text.split()[-1])
    return [ToolCall("1", "charge", {"order": order}), ToolCall("2", "ship", {"order": order})]


def agent_for(thread_id: str, user_id: str | None) -> Agent:  # noqa: ARG001 - it gets its thread by attach()
    return Agent(
        provider=ScriptedProvider([script] * 2),
        model=Model(id="scripted"),
        tools=[charge, ship],
        tool_mode="sequential",
        user_id=user_id,
    )


def report(taken: TakeOver) -> None:
    told = taken.error if taken.result is None else taken.result.text
    print(f"{taken.thread_id}: {told}", flush=True)


async def begin(cp: SQLiteCheckpointer, order: int) -> None:
    agent = agent_for(f"order-{order}", None)
    agent.attach(cp, f"order-{order}")
    await agent.prompt(f"Handle order {order}")


async def main() -> None:
    async with SQLiteCheckpointer("orders.db") as cp:
        if dying:
            await asyncio.gather(*(begin(cp, order) for order in (1, 2, 3)))
        # A service would write `async with cp.supervise(agent_for):` around its work.
        await cp.supervise(agent_for, report=report).drained()


asyncio.run(main())
