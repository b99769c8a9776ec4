"""holdfast: a durable agent runtime and conversation store."""

from holdfast.agent import Agent
from holdfast.loop import Limits, RunResult
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
from holdfast.middleware import Middleware, SlidingWindow
from holdfast.providers.base import Model, Prices
from holdfast.tools import ToolContext, ToolResult, tool

__all__ = [
    "Agent",
    "AssistantMessage",
    "ImageContent",
    "Limits",
    "Middleware",
    "Model",
    "Prices",
    "RunResult",
    "SlidingWindow",
    "TextContent",
    "ThinkingContent",
    "ToolCall",
    "ToolContext",
    "ToolResult",
    "ToolResultMessage",
    "Usage",
    "UserMessage",
    "tool",
]
