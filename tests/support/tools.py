"""Tools that are called without a run, and by a real agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from byssus import (
    Agent,
    Model,
    RunResult,
    ToolCall,
    ToolContext,
    ToolResultMessage,
    tool,
)
from byssus.events import Event
from byssus.messages import Message
from byssus.providers.scripted import ScriptedProvider
from byssus.signals import Signal
from byssus.tools import Tool

Made = Tool[..., Any]


def context(**fields: Any) -> ToolContext:
    return ToolContext("c1", "look", Signal(), **fields)


def run(made: Made, /, **arguments: Any) -> ToolResultMessage:
    return asyncio.run(made.execute(ToolCall("c1", made.name, arguments), context())).message


def returning(value: Any) -> Made:
    def t() -> Any:
        return value

    return tool(t)


def properties(made: Made) -> dict[str, Any]:
    found: dict[str, Any] = made.spec.parameters["properties"]
    return found


async def prompted(tools: list[Any], *replies: Any, listen: Callable[[Event], None] | None = None) -> RunResult[Any]:
    agent = Agent(provider=ScriptedProvider([*replies, "done"]), model=Model("m"), tools=tools)
    if listen is not None:
        agent.subscribe(listen)
    return await agent.prompt("go")


def results_of(messages: list[Message]) -> list[ToolResultMessage]:
    return [message for message in messages if isinstance(message, ToolResultMessage)]


def call(made: Any, /, **arguments: Any) -> ToolResultMessage:
    """Let a model call the tool once; the result that it sees."""
    made = made if isinstance(made, Tool) else tool(made)
    result = asyncio.run(prompted([made], [ToolCall("1", made.name, arguments)]))
    (message,) = results_of(result.messages)
    assert result.text == "done"
    return message


def schema_of(made: Made) -> dict[str, Any]:
    """The schema with all references put in place, as a validator would read it."""

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            name = part["$ref"].removeprefix("#/$defs/")
            return inlined(made.spec.parameters["$defs"][name])
        return {key: inlined(value) for key, value in part.items() if key != "$defs"}

    found: dict[str, Any] = inlined(made.spec.parameters)
    return found
