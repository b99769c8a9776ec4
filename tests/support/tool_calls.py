"""A tool that notes its runs and can be interrupted, and what the ledger says of it."""

from __future__ import annotations

import asyncio
from typing import Any

from byssus import (
    ToolCall,
    ToolContext,
    ToolResultMessage,
)
from byssus.checkpointer import Checkpointer
from byssus.providers.history import UNKNOWN_OUTCOME
from byssus.tools import Tool
from tests.support.checkpointers import loaded
from tests.support.leases import agent_on, die, look

UNKNOWN = f"tool_result: {UNKNOWN_OUTCOME}"


class Acting:
    """A tool that notes each of its runs, and hangs in the first ones."""

    def __init__(self, *, hangs: int = 0, name: str = "act", **options: Any) -> None:
        self.runs: list[tuple[int, str]] = []  # the argument and the idempotency key
        self.begun = asyncio.Event()
        self._hangs = hangs
        self.tool: Tool[..., Any] = Tool(self._run, name=name, **options)

    async def _run(self, n: int, context: ToolContext) -> str:
        self.runs.append((n, context.idempotency_key))
        if len(self.runs) <= self._hangs:
            self.begun.set()
            await asyncio.Event().wait()
        return f"did {n}"


def act(n: int, call_id: str = "") -> ToolCall:
    return ToolCall(call_id or f"c{n}", "act", {"n": n})


async def ledger(cp: Checkpointer) -> list[tuple[str, str, int]]:
    return [(record.call_id, record.status, record.attempts) for record in await cp.tool_calls("t")]


async def results(cp: Checkpointer) -> list[str]:
    return [f"tool_result: {m.text}" for m in (await loaded(cp, "t")).messages if isinstance(m, ToolResultMessage)]


async def interrupt(cp: Checkpointer, acting: Acting, *calls: ToolCall, **options: Any) -> None:
    """Let a run die under a tool that hangs."""
    agent = agent_on(cp, [list(calls or [act(1)])], tools=[acting.tool, look], **options)
    run = asyncio.create_task(agent.prompt("go"))
    await acting.begun.wait()
    await die(cp, agent, run)
