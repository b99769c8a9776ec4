"""The terminal: what is finished is printed into its scrollback, and what still changes is drawn below it.

prompt_toolkit draws the lower part, on the last lines of the terminal and not on a screen of its own. Each frame is one
write: it removes the lower part, prints what was finished meanwhile, and draws the lower part again, so nothing
flickers. Frames come at most every 20 ms, and less often where drawing takes long: drawing never takes more than a
quarter of the time.

After the width has changed, no program can know where its lines are. So the visible part is cleared, and the end of
the transcript, which is kept for this, is printed anew in the new width.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TextIO

from prompt_toolkit.application import Application
from prompt_toolkit.data_structures import Size
from prompt_toolkit.key_binding import KeyBindingsBase
from prompt_toolkit.layout import Layout
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from byssus.cli.chat.live.drawn.drawing import Appearance, Drawer, Line, are_colors_wanted

Piece = Callable[[Drawer], list[Line]]  # a part of the transcript, drawn for a width

_FRAME = 0.02  # seconds between two frames
_SHARE = 4  # a frame that took a while is followed by a pause that is so many times longer
_KEPT = 300  # pieces that are drawn again when the width changes
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # terminals that know it show nothing in between


class _Output(Vt100_Output):
    """Sends a frame as one write, and nothing more once the terminal is gone."""

    is_held = False
    is_gone = False

    def flush(self) -> None:
        if self.is_held:
            return
        if self.is_gone:
            self._buffer.clear()
            return
        try:
            super().flush()
        except OSError:  # a terminal that was closed; the end of the input, or SIGHUP, says the same
            self.is_gone = True
            self._buffer.clear()


class _Application(Application[int]):
    """An application that leaves it to the screen what a new size means."""

    on_resize: Callable[[], None]

    def _on_resize(self) -> None:
        self.on_resize()


def output_to(stream: TextIO) -> _Output:
    output = _Output.from_pty(stream)
    output.enable_cpr = False  # no question to the terminal: the answer could arrive as typed text
    assert isinstance(output, _Output)
    return output


class ChatScreen:
    """The transcript, and the lower part."""

    def __init__(self, theme: str) -> None:
        self.theme = theme
        self.output = output_to(sys.stdout)
        self.app: Application[int] | None = None
        self.on_frame: Callable[[], None] = lambda: None  # called before each frame
        self._pieces: deque[Piece] = deque(maxlen=_KEPT)
        self._waiting: list[Piece] = []
        self._again: list[Piece] = []  # printed before, and to be printed again
        self._is_torn = False  # what is on the screen is not what was drawn
        self._drawn_width = self.size.columns
        self._drawer = self._new_drawer()
        self._next_frame: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._took = 0.0
        self._ended = 0.0

    def application(self, layout: Layout, keys: KeyBindingsBase, style: Style) -> Application[int]:
        """The program that draws the lower part and reads the keys."""
        app = _Application(
            layout,
            style=style,
            key_bindings=keys,
            output=self.output,
            erase_when_done=True,
            color_depth=None if are_colors_wanted() else ColorDepth.DEPTH_1_BIT,
            enable_page_navigation_bindings=False,
        )
        app.ttimeoutlen = 0.1
        app.timeoutlen = 0.3
        app.before_render += lambda _: self._begin_frame()
        app.after_render += lambda _: self._end_frame()
        app.on_resize = self.resized
        self.app = app
        return app

    @property
    def size(self) -> Size:
        return self.output.get_size()

    @property
    def drawer(self) -> Drawer:
        """Draws for the width of now."""
        if self._drawer.look != self._look():
            self._drawer = self._new_drawer()
        return self._drawer

    @property
    def is_gone(self) -> bool:
        return self.output.is_gone

    def lose_terminal(self) -> None:
        """Write nothing any more: the terminal was closed."""
        self.output.is_gone = True

    # --- the transcript -----------------------------------------------------------------------------------------------

    def show(self, piece: Piece) -> None:
        """Print something that is finished, with the next frame."""
        self._waiting.append(piece)
        self.refresh()

    def say(self, *parts: tuple[str, str], indent: int = 0) -> None:
        """Print text, wrapped at words; each part is its style and its text."""
        self.show(lambda drawer: [line for style, text in parts for line in drawer.text(text, style, indent=indent)])

    def refresh(self) -> None:
        """Draw soon."""
        if self.app is None or not self.app.is_running or self._next_frame is not None:
            return
        earliest = self._ended + max(_FRAME - self._took, self._took * (_SHARE - 1))
        delay = max(0.0, earliest - time.monotonic())
        self._next_frame = asyncio.get_running_loop().call_later(delay, self._draw)

    def refresh_now(self) -> None:
        """Draw with the next turn of the event loop, as after a key."""
        if self.app is not None:
            self.app.invalidate()

    def repaint(self) -> None:
        """Print the end of the transcript anew: the width has changed, or something else has written here."""
        self._again = list(self._pieces)
        self._is_torn = True
        self.refresh()

    def resized(self) -> None:
        """The terminal has another size."""
        if self.size.columns != self._drawn_width:
            self.repaint()
        else:
            if self.app is not None:
                self.app.renderer.erase(leave_alternate_screen=False)
            self.refresh()

    def flush_left(self) -> None:
        """Print what waits, when the lower part is gone."""
        text = self._printed(self._take())
        self.output.write_raw(text)
        self.output.flush()

    # --- frames -------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        self._next_frame = None
        if self.app is not None:
            self.app.invalidate()

    def _begin_frame(self) -> None:
        assert self.app is not None
        self._began = time.thread_time()
        self.output.is_held = True
        self.output.write_raw(_BEGIN)
        self.on_frame()
        size, renderer = self.size, self.app.renderer
        if self._is_torn or size.columns != self._drawn_width:
            self._is_torn, self._drawn_width = False, size.columns
            renderer.reset()
            self.output.write_raw("\x1b[H\x1b[J")
        lines, last = self._take(), renderer.last_rendered_screen
        height = self.app.layout.container.preferred_height(size.columns, size.rows).preferred
        if lines or (last is not None and last.height > height):
            renderer.erase()
            self.output.write_raw(self._printed(lines))

    def _end_frame(self) -> None:
        self.output.write_raw(_END)
        self.output.is_held = False
        self.output.flush()
        self._ended = time.monotonic()
        self._took = time.thread_time() - self._began  # on a busy machine, the clock on the wall says more

    def _take(self) -> list[Line]:
        """What is to be printed: of what was printed before, the end that fits, and all that is new."""
        again, self._again = self._again, []
        new, self._waiting = self._waiting, []
        self._pieces.extend(new)
        drawer, lines = self.drawer, list[Line]()
        for piece in reversed(again):
            if len(lines) >= self.size.rows:
                break
            lines = piece(drawer) + lines
        return lines[-self.size.rows :] + [line for piece in new for line in piece(drawer)]

    def _printed(self, lines: Iterable[Line]) -> str:
        return "".join(self._encodable(self.drawer.ansi(line)) + "\r\n" for line in lines)

    def _encodable(self, text: str) -> str:
        with suppress(LookupError):
            encoding = self.output.encoding()
            return text.encode(encoding, "backslashreplace").decode(encoding)
        return text

    # --- looks --------------------------------------------------------------------------------------------------------

    def _look(self) -> Appearance:
        return Appearance(self.size.columns, self.theme, are_colors_wanted())

    def _new_drawer(self) -> Drawer:
        return Drawer(self._look())
