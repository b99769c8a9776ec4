"""What a service does when it starts: finish every run that a crash or a deployment interrupted.

python examples/resume_all.py crash    # begin three runs and die in the middle of their tools
python examples/resume_all.py          # start again: each is finished, and no tool that had ended runs twice
"""

import asyncio
import os
import sys

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import SQLiteCheckpointer
from byssus.errors import ByssusError
from byssus.providers.base import Request
from byssus.testing import ScriptedProvider

dying = sys.argv[1:] == ["crash"]
last_words = asyncio.Barrier(3)
LOOKS, PAUSE = 2, 0.1  # a service looks every 10 seconds, as long as it lives


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


def agent_for(cp: SQLiteCheckpointer, thread_id: str) -> Agent:
    return Agent(
        provider=ScriptedProvider([script] * 2),
        model=Model(id="scripted"),
        tools=[charge, ship],
        tool_mode="sequential",
        checkpointer=cp,
        thread_id=thread_id,
    )


async def resume_all(cp: SQLiteCheckpointer) -> None:
    """Finish what was interrupted. Some threads are listed only when their lease has run out, so look again."""
    for _ in range(LOOKS):
        for thread in await cp.unfinished():
            try:
                result = await agent_for(cp, thread.id).resume()
                print(f"{thread.id}: {result.text}", flush=True)
            except ByssusError as error:  # ThreadBusy, NothingToResume: another process was faster
                print(f"{thread.id}: {error}", flush=True)
        await asyncio.sleep(PAUSE)


async def main() -> None:
    async with SQLiteCheckpointer("orders.db") as cp:
        if dying:
            agents = [(number, agent_for(cp, f"order-{number}")) for number in (1, 2, 3)]
            await asyncio.gather(*(agent.prompt(f"Handle order {number}") for number, agent in agents))
        await resume_all(cp)


asyncio.run(main())
