"""An agent with tools: it looks the weather up, in two cities at once.

ANTHROPIC_API_KEY=... python examples/tools.py
"""

import asyncio
from typing import Annotated

from holdfast import Agent, Model, tool
from holdfast.events import Event, ToolExecutionEnd
from holdfast.providers.anthropic import AnthropicProvider

TEMPERATURES = {"oslo": 4, "lisbon": 19}


@tool
async def temperature(city: Annotated[str, "the city's name, in English"]) -> str:
    """The temperature in a city, now."""
    if city.lower() not in TEMPERATURES:
        raise ValueError(f"no station in {city!r}; known are {', '.join(sorted(TEMPERATURES))}")
    return f"{TEMPERATURES[city.lower()]} C"


def show(event: Event) -> None:
    if isinstance(event, ToolExecutionEnd):
        print(f"[{event.tool_name}: {event.result.text}]")


async def main() -> None:
    agent = Agent(
        provider=AnthropicProvider(),
        model=Model(id="claude-sonnet-5-5", provider="anthropic"),
        system_prompt="Answer in one sentence.",
        tools=[temperature],
    )
    agent.subscribe(show)
    result = await agent.prompt("Is it warmer in Oslo or in Lisbon?")
    result.raise_for_error()
    print(result.text)


if __name__ == "__main__":
    asyncio.run(main())
