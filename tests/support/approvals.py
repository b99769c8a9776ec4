"""A tool that needs approval, for the tests that ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from byssus import (
    Agent,
    ToolCall,
    ToolContext,
    tool,
)
from byssus.checkpointer import Checkpointer
from byssus.messages import ToolResultMessage
from byssus.values.results import RunResult
from tests.support.checkpointers import loaded


class Deleting:
    """A tool that needs approval, and what it was told to delete."""

    def __init__(self, **options: Any) -> None:
        self.deleted: list[str] = []
        self.keys: list[str] = []

        @tool(**{"approval": True, **options})
        def delete(path: str, context: ToolContext) -> str:
            self.deleted.append(path)
            self.keys.append(context.idempotency_key)
            return f"{path} is gone"

        self.tool = delete


def delete(path: str, call_id: str = "") -> ToolCall:
    return ToolCall(call_id or path, "delete", {"path": path})


@tool
def look() -> str:
    return "seen"


async def results(cp: Checkpointer, thread_id: str = "t") -> list[ToolResultMessage]:
    return [m for m in (await loaded(cp, thread_id)).messages if isinstance(m, ToolResultMessage)]


async def statuses(cp: Checkpointer, thread_id: str = "t") -> dict[str, str]:
    return {record.call_id: record.status for record in await cp.tool_calls(thread_id)}


async def ends(run: Coroutine[Any, Any, RunResult[Any]], agent: Agent) -> RunResult[Any]:
    """The run's result; one that turns in circles is aborted, and fails the test."""
    task = asyncio.create_task(run)
    _, late = await asyncio.wait([task], timeout=2)
    if late:
        agent.abort()
        await asyncio.gather(task, return_exceptions=True)
        pytest.fail("the run does not come to an end")
    return task.result()
