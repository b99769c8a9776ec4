"""Agents that are tools of others, and what is known of their threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from byssus import ToolCall
from byssus.checkpointer import Checkpointer
from byssus.providers.base import Provider
from byssus.providers.scripted import Step
from byssus.tools import Tool
from tests.support.agents import make

CHILD = "t.research-1"


def research(script: Iterable[Step] | Provider, **options: Any) -> Tool[[str], Any]:
    """A tool that is an agent with this script; `output` and `approval` are those of the tool."""
    of_tool = {name: options.pop(name) for name in ("output", "approval", "sequential") if name in options}
    return make(script, **options).as_tool("research", "Find something out.", **of_tool)


def ask(task: str = "find it", call_id: str = "r1") -> ToolCall:
    return ToolCall(call_id, "research", {"task": task})


async def ids(cp: Checkpointer) -> list[str]:
    """The ids of all threads, children included."""
    return sorted(info.id for info in await cp.threads(children=True))
