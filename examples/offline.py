"""A conversation with the embedded model: no key, no network. It is a small model, so do not expect much."""

import asyncio

from byssus import Agent
from byssus.checkpointer import SQLiteCheckpointer
from byssus.providers.local import SMOLLM2, LocalProvider


async def main() -> None:
    async with SQLiteCheckpointer("offline.db") as cp:
        agent = Agent(provider=LocalProvider(), model=SMOLLM2, checkpointer=cp, thread_id="offline")
        result = await agent.prompt("Say hello in one sentence.")
        result.raise_for_error()
        print(result.text)
        print(f"{result.usage.total} tokens, {len(agent.state.messages)} messages in the thread")


if __name__ == "__main__":
    asyncio.run(main())
