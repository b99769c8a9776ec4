"""The app of the demo: a model that answers from a script, and a tool that books a tour.

The script stops where a picture is taken, until the file "go" is there. So nothing depends on the speed of a machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from byssus import Agent, AssistantMessage, Model, ToolCall, ToolContext, Usage, UserMessage, tool
from byssus.events import StreamEvent, TextDelta
from byssus.messages import TextContent, ThinkingContent
from byssus.providers.base import Request
from byssus.signals import Signal
from byssus.testing import ScriptedProvider

PLAN = """\
## Lisbon in a day

- **Morning**: the Alfama, \fbefore the crowds
- **Noon**: grilled sardines \fby the river
- **Evening**: fado, and tram 28 back

I am booking \fthe tram tour for two.
"""
FAMILY = "With children: the **Oceanário** in the morning, \fand pastéis de nata afterwards."
COSTS = """\
| what | for two | for four |
|---|---:|---:|
| tram 28 | 6 EUR | 12 EUR |
| 海洋馆 Oceanário | 50 EUR | 80 EUR |

\f```python
def total(prices: list[int]) -> int:
    return sum(prices)  # EUR
```

里斯本 is worth it ☀
"""
_GO = Path("go")


async def gate() -> None:
    """Wait for the file "go", and take it away."""
    while not _GO.exists():
        await asyncio.sleep(0.01)
    _GO.unlink()


@tool(approval=True, recovery="ask")
async def book(tour: str, people: int, ctx: ToolContext) -> str:
    """Book a tour."""
    ctx.update("asking the office")
    await gate()
    return f"booked: {tour}, {people} people, reference L-28"


def answer(request: Request) -> object:
    """What the script has for the last message."""
    last = request.messages[-1]
    usage = Usage(820, 96, cost=0.0031)
    if not isinstance(last, UserMessage):
        return AssistantMessage("The tour is booked: be at Martim Moniz at **17:00**, reference L-28.", usage=usage)
    if "children" in last.text:
        return AssistantMessage(FAMILY, usage=usage)
    if "cost" in last.text:
        thoughts = ThinkingContent("Two grown-ups and two children. The tram is cheap, the museum is not.")
        return AssistantMessage([thoughts, TextContent(COSTS)], usage=usage)
    call = ToolCall("call_1", "book", {"tour": "Tram 28, 17:00", "people": 2})
    return AssistantMessage([TextContent(PLAN), call], stop_reason="tool_use", usage=usage)


class Gated(ScriptedProvider):
    """Stops at each form feed."""

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        return _gated(super().stream(request, signal))


async def _gated(events: AsyncIterator[StreamEvent]) -> AsyncIterator[StreamEvent]:
    async for event in events:
        if isinstance(event, TextDelta) and "\f" in event.delta:
            before, _, after = event.delta.partition("\f")
            yield TextDelta(event.index, before)
            await gate()
            event = TextDelta(event.index, after)
        yield event


def agent(thread_id: str, user_id: str | None) -> Agent:
    """The agent of a thread."""
    return Agent(provider=Gated([answer] * 20), model=Model("guide-1"), tools=[book])
