"""byssus: a durable agent runtime and conversation store.

A name is imported when it is first used: `byssus --help` and programs that only look need no agent, and start without.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from byssus.agent import Agent
    from byssus.messages import (
        AssistantMessage,
        ImageContent,
        TextContent,
        ThinkingContent,
        ToolCall,
        ToolResultMessage,
        Usage,
        UserMessage,
    )
    from byssus.middleware import HookContext, Middleware
    from byssus.middleware.windows import ExcludeMarked, Redact, SlidingWindow, Summarize, TokenBudget
    from byssus.providers.base import Model, Prices
    from byssus.run.settings import Limits
    from byssus.tools import Done, NotDone, ToolContext, Unknown, tool
    from byssus.values.decisions import Approval, Approve, Ask, Deny, Pending
    from byssus.values.results import RunResult, ToolResult
    from byssus.values.thread_key import ThreadKey

__version__ = "0.2.0"

__all__ = [
    "Agent",
    "Approval",
    "Approve",
    "Ask",
    "AssistantMessage",
    "Deny",
    "Done",
    "ExcludeMarked",
    "HookContext",
    "ImageContent",
    "Limits",
    "Middleware",
    "Model",
    "NotDone",
    "Pending",
    "Prices",
    "Redact",
    "RunResult",
    "SlidingWindow",
    "Summarize",
    "TextContent",
    "ThinkingContent",
    "ThreadKey",
    "TokenBudget",
    "ToolCall",
    "ToolContext",
    "ToolResult",
    "ToolResultMessage",
    "Unknown",
    "Usage",
    "UserMessage",
    "tool",
]

_HOMES = {
    "agent": ["Agent"],
    "messages": [
        *("AssistantMessage", "ImageContent", "TextContent", "ThinkingContent", "ToolCall", "ToolResultMessage"),
        *("Usage", "UserMessage"),
    ],
    "middleware": ["HookContext", "Middleware"],
    "middleware.windows": ["ExcludeMarked", "Redact", "SlidingWindow", "Summarize", "TokenBudget"],
    "providers.base": ["Model", "Prices"],
    "run.settings": ["Limits"],
    "tools": ["Done", "NotDone", "ToolContext", "Unknown", "tool"],
    "values.decisions": ["Approval", "Approve", "Ask", "Deny", "Pending"],
    "values.results": ["RunResult", "ToolResult"],
    "values.thread_key": ["ThreadKey"],
}

if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> object:
        """One of these names; or a module, as if all had been imported: `import byssus; byssus.errors.ThreadBusy`."""
        for home, names in _HOMES.items():
            if name in names:
                globals()[name] = getattr(importlib.import_module(f"byssus.{home}"), name)
                return globals()[name]
        if not name.startswith("_") and importlib.util.find_spec(f"byssus.{name}") is not None:
            return importlib.import_module(f"byssus.{name}")
        raise AttributeError(f"module 'byssus' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
