"""byssus: a durable agent runtime and conversation store."""

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
