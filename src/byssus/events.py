"""The events that a run publishes, and the events of a provider's stream.

Two layers. *Stream events* come from a provider while a reply arrives; a run passes each one on inside a
`message_update`. *Events* come from the run. Every `..._start` has its `..._end`, also after an abort or an error, and
a `message_end` means that the message is on disk.

A stream is: `start`, then for each block `{text,thinking,toolcall}_start`, `_delta`*, `_end` with the block's index,
then `done`. A provider does not send `error`: it raises, and the run publishes the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from msgspec import Struct

from byssus.messages import AssistantMessage, Failure, Message, ReplyStop, ToolCall, ToolResultMessage, Usage
from byssus.values.following.records import Record, read

if TYPE_CHECKING:
    from byssus.values.results import StopReason as RunStop
else:
    RunStop = str  # an event that a newer version wrote may name another one


class _Event(Record, frozen=True, gc=False):
    """What stream events and events have in common."""


# --- what a provider streams ------------------------------------------------------------------------------------------


class StreamStart(_Event, frozen=True, tag="start"):
    """The reply begins; `model` is the name that the service reports, `usage` its count so far."""

    type: ClassVar[Literal["start"]] = "start"
    model: str | None = None
    usage: Usage = Usage()


class TextStart(_Event, frozen=True, tag="text_start"):
    """A block of text begins."""

    type: ClassVar[Literal["text_start"]] = "text_start"
    index: int


class TextDelta(_Event, frozen=True, tag="text_delta"):
    """A piece of text; `delta` is what is new."""

    type: ClassVar[Literal["text_delta"]] = "text_delta"
    index: int
    delta: str


class TextEnd(_Event, frozen=True, tag="text_end"):
    """A block of text is whole."""

    type: ClassVar[Literal["text_end"]] = "text_end"
    index: int


class ThinkingStart(_Event, frozen=True, tag="thinking_start"):
    """A block of thinking begins."""

    type: ClassVar[Literal["thinking_start"]] = "thinking_start"
    index: int


class ThinkingDelta(_Event, frozen=True, tag="thinking_delta"):
    """A piece of thinking; `delta` is what is new."""

    type: ClassVar[Literal["thinking_delta"]] = "thinking_delta"
    index: int
    delta: str


class ThinkingEnd(_Event, frozen=True, tag="thinking_end"):
    """A block of thinking is whole; see `ThinkingContent` for the fields."""

    type: ClassVar[Literal["thinking_end"]] = "thinking_end"
    index: int
    signature: str | None = None
    redacted: str | None = None


class ToolCallStart(_Event, frozen=True, tag="toolcall_start"):
    """The model begins to call a tool."""

    type: ClassVar[Literal["toolcall_start"]] = "toolcall_start"
    index: int
    id: str
    name: str


class ToolCallDelta(_Event, frozen=True, tag="toolcall_delta"):
    """A piece of the arguments' JSON text."""

    type: ClassVar[Literal["toolcall_delta"]] = "toolcall_delta"
    index: int
    delta: str


class ToolCallEnd(_Event, frozen=True, tag="toolcall_end"):
    """A tool call is whole, with its arguments. The tool has not run yet."""

    type: ClassVar[Literal["toolcall_end"]] = "toolcall_end"
    index: int
    tool_call: ToolCall


class StreamDone(_Event, frozen=True, tag="done"):
    """The reply is whole. `stop_reason` is stop, tool_use or length."""

    type: ClassVar[Literal["done"]] = "done"
    stop_reason: ReplyStop = "stop"
    usage: Usage = Usage()


class StreamError(_Event, frozen=True, tag="error"):
    """The model call failed; `error` says how."""

    type: ClassVar[Literal["error"]] = "error"
    error: Failure


StreamEvent: TypeAlias = (
    StreamStart
    | TextStart
    | TextDelta
    | TextEnd
    | ThinkingStart
    | ThinkingDelta
    | ThinkingEnd
    | ToolCallStart
    | ToolCallDelta
    | ToolCallEnd
    | StreamDone
    | StreamError
)

# --- what a run tells -------------------------------------------------------------------------------------------------


class AgentStart(_Event, frozen=True, tag="agent_start"):
    """A run begins."""

    type: ClassVar[Literal["agent_start"]] = "agent_start"
    run_id: str
    thread_id: str | None = None


class TurnStart(_Event, frozen=True, tag="turn_start"):
    """A turn begins: one model call and its tools. The first turn of a run is 1."""

    type: ClassVar[Literal["turn_start"]] = "turn_start"
    turn: int


class MessageStart(_Event, frozen=True, tag="message_start"):
    """A message begins. An assistant's is still empty here; it grows by `message_update`."""

    type: ClassVar[Literal["message_start"]] = "message_start"
    message: Message


class MessageUpdate(_Event, frozen=True, tag="message_update"):
    """A piece of a reply arrived: see `stream_event`."""

    type: ClassVar[Literal["message_update"]] = "message_update"
    stream_event: StreamEvent


class MessageEnd(_Event, frozen=True, tag="message_end"):
    """The message is complete and committed. `stored` is False only if the run failed on its database."""

    type: ClassVar[Literal["message_end"]] = "message_end"
    message: Message
    stored: bool = True


class ToolExecutionStart(_Event, frozen=True, tag="tool_execution_start"):
    """A tool starts to run; its start is committed."""

    type: ClassVar[Literal["tool_execution_start"]] = "tool_execution_start"
    tool_call_id: str
    tool_name: str
    arguments: dict[str, Any]


class ToolExecutionUpdate(_Event, frozen=True, tag="tool_execution_update"):
    """Progress that a tool reported."""

    type: ClassVar[Literal["tool_execution_update"]] = "tool_execution_update"
    tool_call_id: str
    tool_name: str
    update: Any


class ToolExecutionEnd(_Event, frozen=True, tag="tool_execution_end"):
    """The tool is done and its result is committed. `stored` is False only if the run failed on its database."""

    type: ClassVar[Literal["tool_execution_end"]] = "tool_execution_end"
    tool_call_id: str
    tool_name: str
    result: ToolResultMessage
    is_error: bool = False
    stored: bool = True


class TurnEnd(_Event, frozen=True, tag="turn_end"):
    """A model call and its tools are done. `message` is None if the turn ended before there was a reply."""

    type: ClassVar[Literal["turn_end"]] = "turn_end"
    message: AssistantMessage | None = None
    tool_results: list[ToolResultMessage] = []  # noqa: RUF012 - msgspec copies it


class AgentEnd(_Event, frozen=True, tag="agent_end"):
    """The run is over; `messages` are those that it added."""

    type: ClassVar[Literal["agent_end"]] = "agent_end"
    run_id: str
    messages: list[Message]
    stop_reason: RunStop
    usage: Usage = Usage()
    error: Failure | None = None


Event: TypeAlias = (
    AgentStart
    | TurnStart
    | MessageStart
    | MessageUpdate
    | MessageEnd
    | ToolExecutionStart
    | ToolExecutionUpdate
    | ToolExecutionEnd
    | TurnEnd
    | AgentEnd
)


# --- JSON -------------------------------------------------------------------------------------------------------------

_KINDS: dict[str, type[Struct]] = {kind.type: kind for kind in (*get_args(Event), *get_args(StreamEvent))}


def from_json(text: str | bytes) -> Event | StreamEvent:
    """The event that `to_json` wrote. Fields that this version does not know are ignored."""
    event: Event | StreamEvent = read(text, _KINDS, "event")
    return event
