"""A chat that remembers: run it twice with the same thread id.

ANTHROPIC_API_KEY=... python examples/chat.py my-thread
"""

import asyncio
import sys

from byssus import Agent, Model
from byssus.checkpointer import SQLiteCheckpointer
from byssus.events import Event
from byssus.providers.anthropic import AnthropicProvider


def show(event: Event) -> None:
    if event.type == "message_update" and event.stream_event.type == "text_delta":
        print(event.stream_event.delta, end="", flush=True)


async def main(thread_id: str) -> None:
    async with SQLiteCheckpointer("chat.db") as cp:
        agent = Agent(
            provider=AnthropicProvider(),
            model=Model(id="claude-sonnet-5-5", provider="anthropic"),
            system_prompt="You are concise.",
            checkpointer=cp,
            thread_id=thread_id,
        )
        agent.subscribe(show)
        while text := await asyncio.to_thread(sys.stdin.readline):
            if text.strip():
                result = await agent.prompt(text)
                print()
                result.raise_for_error()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "main"))
