"""holdfast: a durable agent runtime and conversation store."""

from holdfast.agent import Agent
from holdfast.decisions import Ask, Deny, Pending
from holdfast.messages import (
    AssistantMessage,
    ImageContent,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from holdfast.middleware import HookContext, Middleware
from holdfast.providers.base import Model, Prices
from holdfast.results import RunResult, ToolResult
from holdfast.setup import Limits
from holdfast.tools import Done, NotDone, ToolContext, Unknown, tool
from holdfast.windows import ExcludeMarked, Redact, SlidingWindow, Summarize, TokenBudget

__version__ = "0.1.0"

__all__ = [
    "Agent",
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
