"""holdfast: a durable agent runtime and conversation store."""

from holdfast.agent import Agent
from holdfast.loop import Limits
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
from holdfast.middleware import Deny, HookContext, Middleware
from holdfast.providers.base import Model, Prices
from holdfast.results import RunResult
from holdfast.tools import ToolContext, ToolResult, tool
from holdfast.windows import Redact, SlidingWindow, Summarize, TokenBudget

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AssistantMessage",
    "Deny",
    "HookContext",
    "ImageContent",
    "Limits",
    "Middleware",
    "Model",
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
    "Usage",
    "UserMessage",
    "tool",
]
