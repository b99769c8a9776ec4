"""The transcript: what a run does becomes lines, whether its events come from this process or from another one.

What is finished is given to the screen at once. What is not finished is here: the open end of a reply, the calls that
run, and how long the model has been silent. `lines()` draws it, as often as the screen wants.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from byssus.checkpointer import (
    CallEnded,
    CallStarted,
    FollowItem,
    MessageAdded,
    ReplyDelta,
    ReplyReset,
    RunBegan,
    RunEnded,
)
from byssus.cli.chat.live.drawn.calls import Calls
from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.chat.live.drawn.markdown import Block, Splitter, blocks_of
from byssus.cli.chat.live.drawn.screen import ChatScreen
from byssus.cli.chat.live.typed import attachments
from byssus.cli.screen import terminal
from byssus.cli.subcommand import count
from byssus.events import (
    AgentEnd,
    AgentStart,
    Event,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    TextDelta,
    ThinkingDelta,
    ToolCallStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnStart,
)
from byssus.messages import (
    AssistantMessage,
    ImageContent,
    Message,
    Note,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_SPINNER = "|/-\\"
_SPIN = 0.12  # seconds for one step
_SHOWN = 5  # lines of an attached file, with its name


class _Reply:
    """A reply that is arriving."""

    def __init__(self, is_first: bool = True) -> None:
        self.splitter = Splitter()
        self.text = ""  # of the blocks of text so far
        self.thinking = ""
        self.thinking_since: float | None = None
        self.block: int | None = None
        self.has_begun = not is_first


class View:
    """What a thread's runs look like."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self._reply: _Reply | None = None
        self._waits_since: float | None = None  # for the model's first word
        self._is_stored = True  # the prompt
        self.calls = Calls(screen)
        self.folded: list[Callable[[Drawer], list[Line]]] = []  # what was cut short since the last prompt

    @property
    def is_moving(self) -> bool:
        """Whether something is drawn that changes with time alone."""
        return self._waits_since is not None or self.calls.are_running or self._is_thinking

    @property
    def _is_thinking(self) -> bool:
        return self._reply is not None and self._reply.thinking_since is not None

    def wait(self, *, is_stored: bool) -> None:
        """A run is about to begin. It waits for the database until its prompt is stored."""
        self._waits_since, self._is_stored = time.monotonic(), is_stored
        self._screen.refresh()

    # --- events -------------------------------------------------------------------------------------------------------

    def hear(self, event: Event) -> None:  # noqa: C901 - one case for each event
        """An event of a run in this process."""
        match event:
            case AgentStart():
                self.calls.forget()
            case TurnStart():
                self._waits_since = time.monotonic()
            case MessageUpdate(stream_event=TextDelta(index=index, delta=delta)):
                self._text(index, delta)
            case MessageUpdate(stream_event=ThinkingDelta(delta=delta)):
                self._think(delta)
            case MessageUpdate(stream_event=ToolCallStart(id=call_id, name=name)):
                self._end_text()
                self.calls.announce(call_id, name)
            case MessageStart(message=UserMessage() as message):
                self._is_stored = True
                self.show_prompt(message)
            case MessageEnd(message=AssistantMessage() as message):
                self._end_reply(message)
            case ToolExecutionStart():
                self._waits_since = None
                self.calls.begin(event.tool_call_id, event.tool_name, event.arguments)
            case ToolExecutionUpdate():
                self.calls.progress(event.tool_call_id, event.update)
            case ToolExecutionEnd() if self.calls.is_open(event.tool_call_id):
                self.calls.end(event.result, is_error=event.is_error)
            case MessageEnd(message=ToolResultMessage() as message) if self.calls.is_open(message.tool_call_id):
                self.calls.end(message, is_error=message.is_error)  # it was denied, or answered by a person
            case AgentEnd():
                self.end()
        self._screen.refresh()

    def follow(self, item: FollowItem) -> None:  # noqa: C901 - one case for each item
        """Something that a run in another process did."""
        match item:
            case RunBegan() if self._reply is None and not self.calls.are_running:  # what goes on is told before it
                self._waits_since, self._is_stored = time.monotonic(), True
            case ReplyDelta(kind="text"):
                self._text(item.block, item.delta)
            case ReplyDelta(kind="thinking"):
                self._think(item.delta)
            case ReplyDelta(kind="arguments") if item.call_id is not None:
                self._end_text()
                self.calls.announce(item.call_id, item.tool_name or "")
            case ReplyReset():
                self._void()
            case MessageAdded(message=AssistantMessage() as message):
                self._end_reply(message)
            case MessageAdded(message=ToolResultMessage() as message):
                self.calls.end(message, is_error=message.is_error)
            case MessageAdded():
                self.show_message(item.message)
                self._waits_since = time.monotonic()
            case CallStarted():
                self._waits_since = None
                arguments = item.arguments if isinstance(item.arguments, dict) else {}
                self.calls.begin(item.call_id, item.tool_name, arguments, attempt=item.attempt)
            case CallEnded():
                self.calls.settle(item.call_id)
            case RunEnded():
                self.end()
        self._screen.refresh()

    # --- replies ------------------------------------------------------------------------------------------------------

    def _current(self) -> _Reply:
        self._waits_since = None
        if self._reply is None:
            self._reply = _Reply()
        return self._reply

    def _text(self, index: int, delta: str) -> None:
        reply = self._current()
        if reply.thinking_since is not None:
            self._end_thinking(reply)
        if reply.block not in (None, index):
            self._end_text()
        reply.block = index
        reply.text += delta
        self._show_blocks(reply, reply.splitter.feed(delta))

    def _think(self, delta: str) -> None:
        reply = self._current()
        if reply.thinking_since is None:
            reply.thinking_since = time.monotonic()
        reply.thinking += delta

    def _end_thinking(self, reply: _Reply) -> None:
        since, text = reply.thinking_since, reply.thinking
        reply.thinking_since, reply.thinking = None, ""
        if since is not None and text.strip():
            self.show_thinking(text, time.monotonic() - since)

    def _end_text(self) -> None:
        if self._reply is not None:
            self._end_thinking(self._reply)
            self._show_blocks(self._reply, self._reply.splitter.end())
            self._reply.splitter = Splitter()

    def _show_blocks(self, reply: _Reply, blocks: list[Block]) -> None:
        for block in blocks:
            is_first, reply.has_begun = not reply.has_begun, True
            self._screen.show(_drawn(block, is_first=is_first))

    def _end_reply(self, message: AssistantMessage) -> None:
        streamed = "" if self._reply is None else self._reply.text
        self._end_text()
        self._reply, self._waits_since = None, None
        if not streamed and not self.calls.were_announced(message):
            self.show_thinking_of(message)
        if message.text != streamed:  # a hook has changed it, or it came as a whole
            if streamed:
                self.note("(the reply was changed; this is what is stored)")
            for number, block in enumerate(blocks_of(message.text)):
                self._screen.show(_drawn(block, is_first=number == 0))
        self.calls.expect(message.tool_calls)
        self._show_end(message)

    def _show_end(self, message: AssistantMessage) -> None:
        if message.stop_reason == "aborted":
            self.note("[stopped]")
        elif message.stop_reason == "length":
            self.note("[cut off: length]")

    def _void(self) -> None:
        """The reply that was arriving is none: it comes again."""
        if self._reply is not None and self._reply.text:
            self._end_text()
            self.note("(this reply was broken off, and begins again)")
        self._reply = None

    def end(self) -> None:
        """A run is over, or we look away."""
        self._end_text()
        self._reply, self._waits_since = None, None
        self.calls.end_all()

    # --- what was stored ----------------------------------------------------------------------------------------------

    def show_message(self, message: Message) -> None:
        """A message of the past, or of another process."""
        match message:
            case UserMessage():
                self.show_prompt(message)
            case AssistantMessage():
                self.show_thinking_of(message)
                for number, block in enumerate(blocks_of(message.text)):
                    self._screen.show(_drawn(block, is_first=number == 0))
                self.calls.expect(message.tool_calls)
                self._show_end(message)
                if message.error is not None:
                    self.fail(message.error.message)
            case ToolResultMessage():
                self.calls.end(message, is_error=message.is_error)
            case Note():
                self.note(message.text or terminal.as_json(message.body))

    def show_prompt(self, message: UserMessage) -> None:
        """What a person said, where the run took it."""
        self.folded.clear()
        images = sum(isinstance(block, ImageContent) for block in message.content)
        text, files = attachments.typed_in(message), attachments.attached_in(message)
        self.folded += [partial(_file, text=each) for each in files]
        if images:
            text += f"\n[{images} image{'s' * (images != 1)}]" if text else f"[{images} image{'s' * (images != 1)}]"
        sign = terminal.drawn("› ", "> ")

        def draw(drawer: Drawer) -> list[Line]:
            lines = drawer.text(text, "you", indent=2)
            if lines:
                lines[0] = [*drawer.line(("you", sign)), *_without_indent(lines[0])]
            return [[], *lines, *(line for each in files for line in _file(drawer, each, _SHOWN))]

        self._screen.show(draw)

    def show_thinking_of(self, message: AssistantMessage) -> None:
        thoughts = [b.thinking for b in message.content if isinstance(b, ThinkingContent) and b.thinking.strip()]
        if thoughts:
            self.show_thinking("\n\n".join(thoughts))

    def show_thinking(self, text: str, seconds: float | None = None) -> None:
        """Thinking, folded."""
        words = len(text.split())
        took = "" if seconds is None else f" for {seconds:.0f} s"
        self.folded.append(lambda drawer: [[], *drawer.text(text.strip(), "faint", indent=2)])
        label = f"{terminal.drawn('✻', '*')} thought{took}, {words:,} words (Ctrl-O shows them)"
        self._screen.show(lambda drawer: [[], *drawer.text(label, "faint")])

    def note(self, text: str) -> None:
        """A remark of the chat itself."""
        self._screen.show(lambda drawer: [[], *drawer.text(text, "note")])

    def lines(self, style: str, *texts: str) -> None:
        """Several lines of the chat itself, as they are."""
        self._screen.show(lambda drawer: [[], *(line for text in texts for line in drawer.text(text, style) or [[]])])

    def printed(self, line: str) -> None:
        """A line that a tool or a log has printed."""
        self._screen.show(lambda drawer: drawer.text(line, "note"))

    def fail(self, text: str) -> None:
        """One clear line for what went wrong."""
        sign = terminal.drawn("✗ ", "! ")
        self._screen.show(lambda drawer: [[], *drawer.text(sign + " ".join(text.split()), "bad")])

    def unfold(self) -> bool:
        """Show what was cut short since the last prompt; False if nothing was."""
        folded, self.folded = [*self.folded, *self.calls.folded], []
        self.calls.folded = []
        for piece in folded:
            self._screen.show(piece)
        return bool(folded)

    # --- what is drawn again and again --------------------------------------------------------------------------------

    def live(self, drawer: Drawer, rows: int) -> list[Line]:
        """What is not finished, in at most so many rows: the end of it."""
        lines: list[Line] = []
        if self._reply is not None:
            for block in self._reply.splitter.tail():
                if not lines and not self._reply.has_begun:
                    lines.append([])
                lines += drawer.block(block)
        calls = self.calls.live(drawer)
        waits = self._spinner(drawer)
        room = max(rows - len(calls) - len(waits), 1)
        return [*lines[-room:], *calls, *waits][-rows:]

    def _spinner(self, drawer: Drawer) -> list[Line]:
        since = self._waits_since
        label = "waiting for the model" if self._is_stored else "waiting for the database"
        if self._reply is not None and self._reply.thinking_since is not None:
            since, label = self._reply.thinking_since, "thinking"
            last = self._reply.thinking.rstrip().rsplit("\n", 1)[-1]
            label += f": {last[-max(drawer.width - 30, 10) :]}" if last else ""
        if since is None:
            return []
        seconds = time.monotonic() - since
        took = f" {seconds:.0f} s" if seconds >= 1 else ""
        return [[], drawer.line(("faint", f"{spinner(seconds)} {label}{took}"))]


def spinner(seconds: float) -> str:
    """The sign of what has gone on for so long."""
    signs = terminal.drawn(_SPINNER, _PLAIN_SPINNER)
    return signs[int(seconds / _SPIN) % len(signs)]


def _drawn(block: Block, *, is_first: bool) -> Callable[[Drawer], list[Line]]:
    """A block as it is printed; before the first one of a reply is a blank line."""
    has_gap = block.has_gap or is_first
    return lambda drawer: drawer.block(block._replace(has_gap=has_gap))


def _file(drawer: Drawer, text: str, most: int | None = None) -> list[Line]:
    """An attached file, or so many lines of it."""
    lines = text.split("\n")
    shown = lines if most is None else lines[:most]
    left = len(lines) - len(shown)
    more = f"{terminal.drawn('…', '...')} {count(left, 'more line')} (Ctrl-O shows all)"
    return drawer.text("\n".join([*shown, more] if left else shown), "faint", indent=2)


def _without_indent(line: Line) -> Line:
    """A line without the two spaces that begin it."""
    left, found = 2, list[Any]()
    for segment in line:
        cut = min(left, len(segment.text))
        left -= cut
        if segment.text[cut:]:
            found.append(segment._replace(text=segment.text[cut:]))
    return found


def as_call(call: ToolCall) -> tuple[str, dict[str, Any]]:
    return call.name, call.arguments
