"""The screen of `byssus watch`: the list of the runs, one of them, and the answers to their questions.

It is drawn anew when something has changed, and once a second for the figures.
"""

from __future__ import annotations

import asyncio
import getpass
import shlex
import signal
from contextlib import suppress
from functools import partial

from prompt_toolkit.application import Application
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import ConditionalContainer, HSplit, Layout, Window
from prompt_toolkit.layout.controls import FormattedTextControl
from prompt_toolkit.styles import Style
from prompt_toolkit.widgets import TextArea

from byssus.checkpointer import Checkpointer
from byssus.cli.screen import signals, terminal
from byssus.cli.watch import rows
from byssus.cli.watch.board import Board
from byssus.cli.watch.watched import Watched
from byssus.cli.words import in_words, options_for
from byssus.errors import ByssusError
from byssus.values.decisions import Answer, Deny, Pending

_STYLE = Style.from_dict(
    {
        "bold": "bold",
        "dim": "fg:ansibrightblack",
        "selected": "reverse",
        "asks": "bold fg:ansiyellow",
        "call": "fg:ansicyan",
        "added": "fg:ansigreen",
        "removed": "fg:ansired",
        "note": "italic",
    }
)
_PAGE = 10  # rows


class Screen:
    """Shows a board, and answers questions. `thread_id`: follow this thread from the start."""

    def __init__(self, board: Board, checkpointer: Checkpointer, thread_id: str | None = None) -> None:
        self._board = board
        self._cp = checkpointer
        self._selected: str | None = thread_id
        self._is_following = thread_id is not None
        self._is_alone = thread_id is not None
        self._back = 0  # rows above the end of the run that is followed
        self._note = ""
        self._armed = ""  # the call that the next y approves
        self._asked: tuple[Watched, Pending] | None = None  # the call that is being denied
        self._read: int | None = None  # the first row of the question, while all of it is shown
        self._tasks: set[asyncio.Task[None]] = set()
        self._reason = TextArea(height=1, multiline=False, prompt="Why not? ", accept_handler=self._deny)
        self._list = Window(FormattedTextControl(self._text, focusable=True, show_cursor=False), wrap_lines=False)
        asking = Condition(lambda: self._app.layout.has_focus(self._reason))
        self._app: Application[int] = Application(
            layout=Layout(HSplit([self._list, ConditionalContainer(self._reason, asking)]), self._list),
            key_bindings=self._keys(asking),
            style=_STYLE,
            full_screen=True,
            min_redraw_interval=0.03,
        )
        self._app.ttimeoutlen = 0.05
        board.on_change = self._app.invalidate

    async def run(self) -> int:
        """Show it until a person leaves; the exit code."""
        keeping = asyncio.create_task(self._board.keep())
        try:
            signals.on_end(self._leave)
            return await self._app.run_async()
        except (EOFError, OSError):  # the terminal is gone
            return 128 + signal.SIGHUP
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, *self._tasks, return_exceptions=True)

    def _leave(self, number: int) -> None:
        with suppress(Exception):  # it leaves already
            self._app.exit(result=128 + number)

    def _text(self) -> StyleAndTextTuples:
        size = self._app.output.get_size()
        lines = size.rows - self._app.layout.has_focus(self._reason)
        note = self._note or self._board.error
        run = self._run()
        if self._read is not None and run is not None and run.waiting:
            drawn, self._read = rows.reading(run.waiting, self._read, note, size.columns, lines)
        elif self._is_following:
            name, is_alone = self._selected or "", self._is_alone
            drawn = rows.followed(run, name, self._back, note, size.columns, lines, is_alone=is_alone)
        else:
            drawn = rows.overview(self._runs(), self._selected, note, size.columns, lines, self._board.tasks)
        pieces = [piece for row in drawn for piece in (*row, ("", "\n"))]
        return [
            (f"class:{style}" if style else "", terminal.printable(text) if text != "\n" else text)
            for style, text in pieces[:-1]
        ]

    def _runs(self) -> list[Watched]:
        return list(self._board.runs.values())

    def _run(self) -> Watched | None:
        """The selected run; the first one if none is selected, or it is gone."""
        runs = self._board.runs
        if self._selected not in runs and not self._is_following:
            self._selected = next(iter(runs), None)
        return None if self._selected is None else runs.get(self._selected)

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _keys(self, asking: Condition) -> KeyBindings:
        keys = KeyBindings()
        calm = ~asking
        for key in ("q", "c-c", "c-d"):
            keys.add(key, filter=calm)(lambda event: event.app.exit(result=0))
        for key, by in (("up", -1), ("k", -1), ("down", 1), ("j", 1)):
            keys.add(key, filter=calm)(partial(self._move, by=by))
        for key, by in (("pageup", _PAGE), ("pagedown", -_PAGE)):
            keys.add(key, filter=calm)(partial(self._scroll, by=by))
        keys.add("enter", filter=calm)(self._follow)
        for key in ("escape", "left", "backspace"):
            keys.add(key, filter=calm)(self._go_back)
        keys.add("y", filter=calm)(self._approve)
        keys.add("v", filter=calm)(self._show_all)
        keys.add("n", filter=calm)(self._ask_why)
        keys.add("c-z")(lambda event: event.app.suspend_to_background())
        for key in ("escape", "c-c"):
            keys.add(key, filter=asking, eager=True)(lambda event: event.app.layout.focus(self._list))
        return keys

    def _move(self, _: KeyPressEvent, by: int) -> None:
        if self._read is not None or self._is_following:
            self._scroll(_, -by)
            return
        names = list(self._board.runs)
        if names:
            at = names.index(self._selected) if self._selected in names else 0
            self._selected = names[min(max(at + by, 0), len(names) - 1)]

    def _scroll(self, _: KeyPressEvent, by: int) -> None:
        if self._read is not None:
            self._read = max(self._read - by, 0)
        else:
            self._back = max(self._back + by, 0)

    def _follow(self, _: KeyPressEvent) -> None:
        self._is_following, self._back, self._note = self._run() is not None or self._is_alone, 0, ""
        self._read, self._armed = None, ""

    def _go_back(self, _: KeyPressEvent) -> None:
        if self._read is None:
            self._is_following = self._is_alone
        self._read, self._note, self._armed = None, "", ""

    def _show_all(self, _: KeyPressEvent) -> None:
        """Show the whole question, or what was there before."""
        run = self._run()
        self._read = 0 if self._read is None and run is not None and run.waiting else None

    # --- answers ------------------------------------------------------------------------------------------------------

    def _approve(self, _: KeyPressEvent) -> None:
        """Approve at the second press: the question may have changed under the finger."""
        run = self._run()
        if run is None or not run.waiting:
            return
        call = run.waiting[0]
        name = f"{run.thread_id} {call.call_id} {call.asked_at}"
        if self._armed == name:
            self._armed = ""
            self._answer(run, call, "approve")
        else:
            self._armed, self._note = name, f"press y once more to approve {call.tool_name} in {run.thread_id}"

    def _ask_why(self, event: KeyPressEvent) -> None:
        run = self._run()
        if run is not None and run.waiting:
            self._reason.text, self._asked = "", (run, run.waiting[0])
            event.app.layout.focus(self._reason)

    def _deny(self, _: object) -> bool:
        self._app.layout.focus(self._list)
        reason = self._reason.text.strip()
        if self._asked is not None:
            self._answer(*self._asked, Deny(reason) if reason else "deny")
        return False

    def _answer(self, run: Watched, call: Pending, answer: Answer) -> None:
        task = asyncio.ensure_future(self._record(run, call, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record(self, run: Watched, call: Pending, answer: Answer) -> None:
        try:
            is_enough = await self._cp.answer(run.thread_id, call.call_id, answer, by=_login_name(), source="watch")
        except ByssusError as error:
            self._note = str(in_words(error, run.thread_id))
        else:
            how = f"; to continue the run: byssus resume {shlex.quote(run.thread_id)} {options_for([call.tool_name])}"
            more = "; it needs more approvals" if not is_enough else "" if run.state == "running" else how
            self._note = f"{'denied' if answer != 'approve' else 'approved'}: {call.tool_name}{more}"
        self._read = None
        self._board.look_soon()
        self._app.invalidate()


def _login_name() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None
