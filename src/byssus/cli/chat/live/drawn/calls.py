"""Tool calls as they run: the name, the arguments on one line, progress, time, outcome and attempts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.chat.live.drawn.screen import ChatScreen
from byssus.cli.screen import table, terminal
from byssus.messages import AssistantMessage, ImageContent, ToolCall, ToolResultMessage

_SHOWN = 4  # lines of a result
_LONGEST = 2_000  # characters of a line of a result that is shown
_BESIDE_ARGUMENTS = 12  # columns of the line of an ended call: the sign, its time, spaces
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class _Call:
    def __init__(self, name: str, arguments: dict[str, Any] | None = None, attempt: int = 1) -> None:
        self.name = name
        self.arguments = arguments
        self.attempt = attempt
        self.began: float | None = None
        self.took: float | None = None  # seconds, when it has ended and its result is not here yet
        self.progress = ""


class Calls:
    """The calls of a thread that are open, and what is said of those that have ended."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self._open: dict[str, _Call] = {}
        self._attempts: dict[str, int] = {}
        self.folded: list[Callable[[Drawer], list[Line]]] = []

    @property
    def are_running(self) -> bool:
        return any(call.began is not None and call.took is None for call in self._open.values())

    def forget(self) -> None:
        """A run begins: what is open belongs to it."""
        self.folded = []

    def know_attempts(self, attempts: dict[str, int]) -> None:
        """How often calls were started before, by their ids."""
        self._attempts.update(attempts)

    def is_open(self, call_id: str) -> bool:
        return call_id in self._open

    def were_announced(self, message: AssistantMessage) -> bool:
        return any(call.id in self._open for call in message.tool_calls)

    def announce(self, call_id: str, name: str) -> None:
        """The model begins to call a tool."""
        self._open.setdefault(call_id, _Call(name))

    def expect(self, calls: Iterable[ToolCall]) -> None:
        """Calls of a reply, which will be run."""
        for call in calls:
            known = self._open.setdefault(call.id, _Call(call.name))
            known.arguments = call.arguments

    def begin(self, call_id: str, name: str, arguments: dict[str, Any], *, attempt: int | None = None) -> None:
        number = attempt or self._attempts.get(call_id, 0) + 1
        self._attempts[call_id] = number
        call = self._open[call_id] = _Call(name, arguments, number)
        call.began = time.monotonic()

    def progress(self, call_id: str, update: Any) -> None:
        if (call := self._open.get(call_id)) is not None:
            text = update if isinstance(update, str) else terminal.as_json(update)
            call.progress = text.strip().rsplit("\n", 1)[-1]

    def settle(self, call_id: str) -> None:
        """A call has ended elsewhere. Its result comes next, or came long ago: then nothing more is said of it."""
        if (call := self._open.get(call_id)) is not None and call.began is not None:
            call.took = time.monotonic() - call.began

    def end(self, result: ToolResultMessage, *, is_error: bool) -> None:
        call = self._open.pop(result.tool_call_id, None) or _Call(result.tool_name)
        self._attempts.pop(result.tool_call_id, None)
        seconds = call.took
        if seconds is None and call.began is not None:
            seconds = time.monotonic() - call.began
        text = _text_of(result)
        self._screen.show(lambda drawer: _ended(drawer, call, text, seconds, is_error=is_error))
        if _is_cut(call, text, self._screen.size.columns):
            self.folded.append(lambda drawer: _unfolded(drawer, call, text))

    def end_all(self) -> None:
        """Nothing runs any more."""
        self._open = {}

    def live(self, drawer: Drawer) -> list[Line]:
        found = [self._running(drawer, call) for call in self._open.values() if call.took is None]
        return [[], *found] if found else []

    def _running(self, drawer: Drawer, call: _Call) -> Line:
        now = time.monotonic()
        signs = terminal.drawn(_SPINNER, "|/-\\")
        sign = signs[int(now / 0.12) % len(signs)] if call.began is not None else terminal.drawn("·", ".")
        end = ""
        if call.began is not None:
            end = f" {now - call.began:.0f} s" if now - call.began >= 1 else ""
        if call.attempt > 1:
            end += f" (attempt {call.attempt})"
        if call.progress:
            end += f" {terminal.drawn('—', '-')} {terminal.line(call.progress)}"
        return _headline(drawer, ("tool", sign), call, end)


def arguments_line(arguments: dict[str, Any] | None) -> str:
    """Arguments, folded to one line: without quotes and braces where they are plain."""
    if not arguments:
        return ""
    return ", ".join(f"{name}={_value(value)}" for name, value in arguments.items())


def _value(value: Any) -> str:
    return terminal.line(value if isinstance(value, str) else terminal.as_json(value))


def _headline(drawer: Drawer, sign: tuple[str, str], call: _Call, end: str) -> Line:
    """The sign, the name, as much of the arguments as fits, and the end."""
    name = terminal.line(call.name)
    arguments = arguments_line(call.arguments)
    room = drawer.width - table.width(sign[1]) - 1 - table.width(name) - 1
    end = table.cut(end, max(room, 0)) if end else ""
    room -= table.width(end)
    shown = table.cut(arguments, room) if room > 3 else ""
    parts = [(sign[0], sign[1] + " "), ("tool", name), ("", f" {shown}" if shown else ""), ("faint", end)]
    return drawer.line(*parts)


def _ended(drawer: Drawer, call: _Call, text: str, seconds: float | None, *, is_error: bool) -> list[Line]:
    sign = ("bad", terminal.drawn("✗", "x")) if is_error else ("good", terminal.drawn("✓", "+"))
    end = "" if seconds is None else f"  {seconds:.1f} s"
    if call.attempt > 1:
        end += f" (attempt {call.attempt})"
    lines = [[], _headline(drawer, sign, call, end)]
    shown = text.split("\n")[:_SHOWN] if text else []
    lines += [drawer.line(("faint", table.cut("  " + terminal.line(line[:_LONGEST]), drawer.width))) for line in shown]
    left = text.count("\n") + 1 - _SHOWN
    if left > 0:
        more = f"  {terminal.drawn('…', '...')} {left:,} more line{'s' * (left != 1)} (Ctrl-O shows all)"
        lines.append(drawer.line(("faint", more)))
    return lines


def _is_cut(call: _Call, text: str, columns: int) -> bool:
    """Whether the lines of an ended call leave something out."""
    arguments = call.arguments or {}
    room = columns - table.width(call.name) - _BESIDE_ARGUMENTS
    return (
        text.count("\n") >= _SHOWN
        or any(table.width(line) > columns - 2 for line in text.split("\n"))
        or table.width(arguments_line(arguments)) > room
        or any(isinstance(value, str) and "\n" in value for value in arguments.values())
    )


def _unfolded(drawer: Drawer, call: _Call, text: str) -> list[Line]:
    head = drawer.line(("tool", terminal.line(call.name)))
    return [[], head, *argument_lines(drawer, call.arguments or {}), *drawer.text(text, "faint")]


def argument_lines(drawer: Drawer, arguments: Mapping[str, Any]) -> list[Line]:
    """All arguments of a call, as they are."""
    lines: list[Line] = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else terminal.as_json(value)
        if "\n" in text:
            lines += [drawer.line(("", f"  {name}:")), *drawer.text(text, indent=4)]
        else:
            lines += drawer.text(f"{name}: {text}", indent=2)
    return lines


def _text_of(result: ToolResultMessage) -> str:
    images = [block for block in result.content if isinstance(block, ImageContent)]
    text = result.text.replace("\r\n", "\n").strip("\n")
    return "\n".join([*([text] if text else []), *(f"[image, {image.mime_type}]" for image in images)])
