"""The database keeps the whole conversation; the model sees the last few messages. No key is needed."""

import asyncio

from byssus import Agent, Model, SlidingWindow
from byssus.checkpointer import SQLiteCheckpointer
from byssus.testing import ScriptedProvider


async def main() -> None:
    provider = ScriptedProvider([f"Reply {n}." for n in range(1, 6)])
    async with SQLiteCheckpointer("window.db") as cp:
        agent = Agent(
            provider=provider,
            model=Model(id="scripted"),
            checkpointer=cp,
            thread_id="window",
            middleware=[SlidingWindow(3)],
        )
        for n in range(1, 6):
            await agent.prompt(f"Question {n}?")
        thread = await cp.load("window")
        assert thread is not None
        print(f"stored: {len(thread.messages)} messages")
        print("seen by the model at the end:", [message.text for message in provider.requests[-1].messages])


if __name__ == "__main__":
    asyncio.run(main())
