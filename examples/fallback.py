"""A model fallback: Claude answers, a smaller Claude if that one cannot, and the embedded model if the service is down.

ANTHROPIC_API_KEY=... python examples/fallback.py

Without a key, or without a network, the embedded model answers; do not expect much of it.
"""

import asyncio
import logging

from byssus import Agent, AssistantMessage, Model
from byssus.providers.anthropic import AnthropicProvider
from byssus.providers.local import SMOLLM2, LocalProvider


async def main() -> None:
    agent = Agent(
        provider=[AnthropicProvider(), LocalProvider()],
        model=[
            Model(id="claude-sonnet-5-5", provider="anthropic"),
            Model(id="claude-haiku-4-5", provider="anthropic"),
            SMOLLM2,
        ],
        system_prompt="You are concise.",
        max_retries=1,
        idle_timeout=60,
    )
    result = await agent.prompt("Say hello in one sentence.")
    result.raise_for_error()
    print(result.text)
    reply = result.messages[-1]
    assert isinstance(reply, AssistantMessage)
    print(f"answered by {reply.model} ({reply.provider})")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)  # tells each retry and each fallback
    asyncio.run(main())
