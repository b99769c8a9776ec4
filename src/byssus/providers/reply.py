"""A reply in the making: stream events in, an assistant message out.

There is one place that puts a reply together, so a provider only reports what arrives, and the part so far is known
whenever the stream breaks off. Impossible token counts of a provider are clamped: whatever number
it sends, the reply is kept.
"""

from __future__ import annotations

import json
import logging

import msgspec

from byssus.errors import NetworkFailed
from byssus.events import (
    StreamDone,
    StreamEvent,
    StreamStart,
    TextDelta,
    ThinkingDelta,
    ThinkingEnd,
    ThinkingStart,
    ToolCallEnd,
    ToolCallStart,
)
from byssus.messages import (
    AssistantMessage,
    Block,
    Failure,
    ReplyStop,
    TextContent,
    ThinkingContent,
    ToolCall,
    Usage,
    checked_dumps,
)
from byssus.values.following.growth import Growth

_log = logging.getLogger("byssus.model")


class Reply:
    """Collects one reply. `add` is on the hot path: it runs once for each delta."""

    def __init__(self, model: str, provider: str) -> None:
        self._model = model
        self.provider = provider
        self.growth = Growth()
        self._thinking: dict[int, ThinkingEnd | None] = {}
        self._calls: dict[int, ToolCall] = {}
        self._calling = False  # a call was announced, perhaps not yet whole
        self._usage = Usage()
        self._done: StreamDone | None = None
        self._halves: dict[tuple[int, type], str] = {}  # first halves of surrogate pairs, by block and kind of delta

    @property
    def is_empty(self) -> bool:
        """Whether nothing was shown yet, so that the same question may be asked again."""
        return not (self.growth.blocks or self._thinking or self._calls or self._calling)

    @property
    def is_whole(self) -> bool:
        return self._done is not None

    def add(self, event: StreamEvent) -> StreamEvent:
        """Add an event; returns what is to be shown of it, which is the event in all but rare cases."""
        kind = type(event)
        if kind is TextDelta or kind is ThinkingDelta:
            if self._halves or "\ud800" <= event.delta[-1:] <= "\udbff":  # type: ignore[union-attr]
                event = self._paired(event)  # type: ignore[arg-type]
            self.growth.add(event)
            return event
        self.growth.add(event)
        if isinstance(event, ThinkingStart):
            self._thinking[event.index] = None
        elif isinstance(event, ThinkingEnd):
            self._thinking[event.index] = event
        elif isinstance(event, ToolCallEnd):
            self._calls[event.index] = event.tool_call
        elif isinstance(event, ToolCallStart):
            self._calling = True
        elif isinstance(event, StreamStart):
            self._model = event.model or self._model
            self._usage = self._plausible(event.usage)
        elif isinstance(event, StreamDone):
            self._done = event
            self._usage = self._plausible(event.usage)
        return event

    def _paired(self, event: TextDelta | ThinkingDelta) -> TextDelta | ThinkingDelta:
        """A delta whose surrogate pairs are whole: a service that counts in UTF-16 may cut one in two.

        JSON would make one character of the halves, and the reply would not be what was shown of it.
        """
        strand = (event.index, type(event))
        text = self._halves.pop(strand, "") + event.delta
        if "\ud800" <= text[-1:] <= "\udbff":
            self._halves[strand], text = text[-1], text[:-1]
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return msgspec.structs.replace(event, delta=whole)

    def _plausible(self, reported: object) -> Usage:
        """The usage that a provider reports, clamped to possible values: users pay by it."""
        usage = reported.plausible() if isinstance(reported, Usage) else Usage()
        if usage != reported:
            what = "provider %r reported an impossible usage for model %r: %s; it is counted as %r"
            _log.warning(what, self.provider, self._model, _shown(reported), usage)
        return usage

    def check_whole(self) -> None:
        """A stream that ended before `done` is a failure."""
        if self._done is None:
            raise NetworkFailed(f"the stream from {self.provider} ended before the reply was complete; try again")

    def message(self) -> AssistantMessage:
        """The whole reply."""
        self.check_whole()
        assert self._done is not None
        stop_reason = "tool_use" if self._calls and self._done.stop_reason == "stop" else self._done.stop_reason
        return self._build(stop_reason, None)

    def broken(self, stop_reason: ReplyStop, error: Failure | None = None) -> AssistantMessage:
        """What has arrived so far, marked as broken off. A tool call that is not whole is left out."""
        return self._build(stop_reason, error)

    def so_far(self) -> AssistantMessage:
        """What would be worth keeping if it ended here: what can be read."""
        reply = self.broken("aborted")
        return msgspec.structs.replace(reply, content=[b for b in reply.content if not isinstance(b, ToolCall)])

    def _build(self, stop_reason: ReplyStop, error: Failure | None) -> AssistantMessage:
        indexes = sorted({*self.growth.blocks, *self._thinking, *self._calls})
        blocks = [block for index in indexes if (block := self._block(index)) is not None]
        return AssistantMessage(blocks, stop_reason, self._usage, self._model, self.provider, error)

    def _block(self, index: int) -> Block | None:
        if index in self._calls:
            return self._calls[index]
        text = self.growth.text(index) + "".join(half for (block, _), half in self._halves.items() if block == index)
        if index not in self._thinking:
            return TextContent(text) if text else None
        end = self._thinking[index]
        return ThinkingContent(text, end.signature, end.redacted) if end else ThinkingContent(text)


def _shown(reported: object) -> str:
    try:
        return repr(reported)[:200]
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def parse_tool_call(call_id: str, name: str, text: str) -> ToolCall:
    """A tool call from the JSON text of its arguments; text that is no JSON object is kept for the model to see."""
    try:
        arguments = json.loads(text or "{}")
        checked_dumps([[[arguments]]])  # as deep as it will stand in a message: what cannot be stored is broken too
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(call_id, name, {}, malformed=text)
    return ToolCall(call_id, name, arguments)
