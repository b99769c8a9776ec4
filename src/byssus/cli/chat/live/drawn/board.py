"""The lower part of the screen: what is arriving, what waits, the input, and the status.

A question of the chat (`ask`) uses the same input line as everything else: what was typed there is put aside, and is
back after the answer. So no key that a person is just typing can answer a question; that takes Enter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.layout import (
    BufferControl,
    ConditionalContainer,
    Dimension,
    FormattedTextControl,
    HSplit,
    Layout,
    Window,
)
from prompt_toolkit.layout.processors import BeforeInput
from prompt_toolkit.styles import Style
from prompt_toolkit.widgets import SearchToolbar

from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.chat.live.drawn.picker import Picker
from byssus.cli.chat.live.drawn.screen import ChatScreen
from byssus.cli.chat.live.typed.attachments import name_being_typed
from byssus.cli.screen import table, terminal

_INPUT_ROWS = 10
_MENU_ROWS = 6
_LEAST = 3  # rows that what is arriving has at least


class ChatQuestion(NamedTuple):
    """Something that the chat asks in the input line."""

    lines: Callable[[Drawer], list[Line]]
    label: str
    answer: asyncio.Future[str | None]
    kept: Document  # what was being typed


class ChatBoard:
    """The lower part. `live`, `chips` and `status` are asked with each frame."""

    def __init__(self, screen: ChatScreen, history: History, completer: Completer) -> None:
        self._screen = screen
        self.live: Callable[[Drawer, int], list[Line]] = lambda drawer, rows: []  # noqa: ARG005
        self.chips: Callable[[Drawer], list[Line]] = lambda drawer: []  # noqa: ARG005
        self.status: Callable[[Drawer], Line] = lambda drawer: []  # noqa: ARG005
        self.picker: Picker | None = None
        self._kept = Document()  # what was being typed before the list
        self.question: ChatQuestion | None = None
        self.input = Buffer(
            history=history,
            completer=completer,
            complete_while_typing=Condition(self._completes_itself),
            enable_history_search=False,
            multiline=True,
        )
        self.input.on_text_changed += lambda _: self._filter()
        self._search = SearchToolbar(text_if_not_searching="")
        self._input_control = BufferControl(
            self.input,
            input_processors=[BeforeInput(self._prompt)],
            search_buffer_control=self._search.control,
            preview_search=True,
        )
        self._live_lines: list[Line] = []
        self._picker_lines: list[Line] = []
        self.style = Style([])
        screen.on_frame = self._prepare
        self.layout = Layout(self._parts(), focused_element=self._input_control)

    def _parts(self) -> HSplit:
        def text(get: Callable[[], StyleAndTextTuples]) -> Window:
            return Window(FormattedTextControl(get), dont_extend_height=True, always_hide_cursor=True)

        is_picking = Condition(lambda: self.picker is not None)
        self._input_window = Window(
            self._input_control,
            height=lambda: Dimension(min=1, max=max(1, min(_INPUT_ROWS, self._screen.size.rows - 4))),
            wrap_lines=True,
            dont_extend_height=True,
        )
        return HSplit(
            [
                ConditionalContainer(text(self._live_text), Condition(lambda: bool(self._live_lines))),
                ConditionalContainer(text(self._picker_text), is_picking),
                text(self._above_input),
                self._input_window,
                self._search,
                ConditionalContainer(text(self._menu_text), Condition(self._has_menu)),
                Window(FormattedTextControl(self._status_text), height=1, dont_extend_height=True),
            ]
        )

    # --- asking -------------------------------------------------------------------------------------------------------

    async def ask(self, label: str, lines: Callable[[Drawer], list[Line]], text: str = "") -> str | None:
        """What a person answers in the input line; None if they do not want to. `text` is there to begin with."""
        while self.question is not None:
            await asyncio.wait({self.question.answer})
            await asyncio.sleep(0)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.question = asked = ChatQuestion(lines, label, answer, self.input.document)
        self.input.set_document(Document(text, len(text)), bypass_readonly=True)
        self._screen.refresh_now()
        try:
            return await answer
        finally:
            if self.question is asked:
                self._end_question(asked)

    def answer(self, text: str | None) -> bool:
        """Answer the question, if there is one. Keys that come next, however soon, go to the line as it was before."""
        if (question := self.question) is None or question.answer.done():
            return False
        self._end_question(question)
        question.answer.set_result(text)
        return True

    def _end_question(self, question: ChatQuestion) -> None:
        self.question = None
        self.input.set_document(question.kept, bypass_readonly=True)
        self._screen.refresh_now()

    async def pick(self, picker: Picker) -> Any:
        """What a person picks; None if they leave."""
        self.picker, self._kept = picker, self.input.document
        self.input.set_document(Document(picker.text), bypass_readonly=True)
        picker.on_change = self._screen.refresh
        try:
            return await picker.choice()
        finally:
            if self.picker is picker:
                self._end_picker()

    def leave_picker(self) -> bool:
        """Leave the list, if there is one. Keys that come next, however soon, go to the line as it was before."""
        if self.picker is None:
            return False
        self.picker.leave()
        self._end_picker()
        return True

    def _end_picker(self) -> None:
        self.picker = None
        self.input.set_document(self._kept, bypass_readonly=True)
        self._screen.refresh_now()

    def _filter(self) -> None:
        if self.picker is not None:
            self.picker.filter(self.input.text)

    # --- what is drawn ------------------------------------------------------------------------------------------------

    def _rows(self) -> int:
        """The rows above the input."""
        used = self._input_rows() + 2 + (_MENU_ROWS if self._has_menu() else 0)
        return max(self._screen.size.rows - used, _LEAST)

    def _input_rows(self) -> int:
        columns = max(self._screen.size.columns - 3, 1)
        lines = self.input.text.split("\n")
        return min(sum(1 + table.width(line) // columns for line in lines[:_INPUT_ROWS]), _INPUT_ROWS)

    def _prepare(self) -> None:
        """Once for each frame: what is drawn above the input."""
        drawer, rows = self._screen.drawer, self._rows()
        self._picker_lines = [] if self.picker is None else [[], *self.picker.lines(drawer, rows - 1)]
        self._live_lines = self.live(drawer, max(rows - len(self._picker_lines), _LEAST))

    def _live_text(self) -> StyleAndTextTuples:
        drawer = self._screen.drawer
        return _fragments(drawer, [_fitted(line, drawer.width) for line in self._live_lines])

    def _picker_text(self) -> StyleAndTextTuples:
        return _fragments(self._screen.drawer, self._picker_lines)

    def _above_input(self) -> StyleAndTextTuples:
        drawer = self._screen.drawer
        lines: list[Line] = [[]]
        if self.question is not None:
            lines += self.question.lines(drawer)[-max(self._rows() - 1, 1) :]
        lines += self.chips(drawer)
        return _fragments(drawer, [_fitted(line, drawer.width) for line in lines])

    def _status_text(self) -> StyleAndTextTuples:
        drawer = self._screen.drawer
        return drawer.fragments(_fitted(self.status(drawer), drawer.width))  # type: ignore[return-value]

    def _prompt(self) -> StyleAndTextTuples:
        if self.question is not None:
            return [("bold fg:ansiyellow", f"{self.question.label} ")]
        if self.picker is not None:
            return [("bold fg:ansiyellow", f"{self.picker.label} ")]
        return [("bold fg:ansicyan", terminal.drawn("› ", "> "))]

    # --- completion ---------------------------------------------------------------------------------------------------

    def _completes_itself(self) -> bool:
        """Commands, and files behind an @, are offered while they are typed."""
        if self.question is not None or self.picker is not None:
            return False
        text = self.input.document.text_before_cursor
        return (text.startswith("/") and "\n" not in text) or name_being_typed(text) is not None

    def _has_menu(self) -> bool:
        state = self.input.complete_state
        return state is not None and bool(state.completions)

    def _menu_text(self) -> StyleAndTextTuples:
        state = self.input.complete_state
        if state is None:
            return []
        drawer, chosen = self._screen.drawer, state.complete_index or 0
        first = max(0, min(chosen - _MENU_ROWS + 2, len(state.completions) - _MENU_ROWS))
        shown = state.completions[first : first + _MENU_ROWS]
        broad = max(table.width(each.display_text) for each in shown)
        lines: list[Line] = []
        for number, each in enumerate(shown, first):
            style = "you" if number == state.complete_index else ""
            name = each.display_text + " " * (broad - table.width(each.display_text))
            lines.append(drawer.line((style, f"  {name}  "), ("faint", each.display_meta_text)))
        return _fragments(drawer, [_fitted(line, drawer.width) for line in lines])


def _fragments(drawer: Drawer, lines: list[Line]) -> StyleAndTextTuples:
    found: StyleAndTextTuples = []
    for number, line in enumerate(lines):
        if number:
            found.append(("", "\n"))
        found += drawer.fragments(line)
    return found


def _fitted(line: Line, columns: int) -> Line:
    """A line in at most so many columns: the rest of a long one shows when it is printed."""
    if sum(table.width(segment.text) for segment in line) <= columns:
        return line
    left, found = columns, []
    for segment in line:
        text = table.cut(segment.text, left) if table.width(segment.text) > left else segment.text
        found.append(segment._replace(text=text))
        left -= table.width(text)
        if left <= 0 or text != segment.text:
            break
    return found
