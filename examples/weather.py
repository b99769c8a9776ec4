"""A weather agent with two tools: it asks for several places at once, and answers from what they said.

ANTHROPIC_API_KEY=... python examples/weather.py "Where is it warmer, in Oslo or in Lisbon?"
"""

import asyncio
import sys
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from byssus import Agent, Model, ToolResult, tool
from byssus.events import Event, ToolExecutionEnd
from byssus.providers.anthropic import AnthropicProvider

# Instead of a weather service: the temperatures of the days to come, in degrees Celsius.
DAYS = {"oslo": [4, 6, 3], "lisbon": [19, 18, 21]}


class Period(BaseModel):
    """A number of days, and how to write their temperatures."""

    days: int = Field(1, ge=1, le=3, description="how many days, today included")
    unit: Literal["C", "F"] = "C"


@tool
async def temperature(city: Annotated[str, "the city's name, in English"]) -> str:
    """The temperature in a city, now."""
    return f"{days_in(city)[0]} C"


@tool(timeout=10)
async def forecast(city: str, period: Period) -> ToolResult:
    """The highest temperature of each of the days to come.

    Args:
        city: the city's name, in English
        period: which days
    """
    celsius = days_in(city)[: period.days]
    shown = [f"{round(day * 9 / 5 + 32) if period.unit == 'F' else day} {period.unit}" for day in celsius]
    return ToolResult(", ".join(shown), details={"city": city, "celsius": celsius})  # details: for programs and people


def days_in(city: str) -> list[int]:
    if city.lower() not in DAYS:  # the model reads this, and knows how to go on
        raise LookupError(f"no station in {city!r}; known are {', '.join(sorted(DAYS))}")
    return DAYS[city.lower()]


def show(event: Event) -> None:
    if isinstance(event, ToolExecutionEnd):
        print(f"[{event.tool_name}: {event.result.text}]")


async def main(question: str) -> None:
    agent = Agent(
        provider=AnthropicProvider(),
        model=Model(id="claude-sonnet-5-5", provider="anthropic"),
        system_prompt="Answer in one sentence.",
        tools=[temperature, forecast],
    )
    agent.subscribe(show)
    result = await agent.prompt(question)
    result.raise_for_error()
    print(result.text)


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:]) or "Where is it warmer now, and tomorrow: in Oslo or in Lisbon?"))
