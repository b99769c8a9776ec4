"""A terminal window with the command `byssus` in it: type, paste, resize, and read what a person would see.

The program is the real one in a process of its own, on a pseudo-terminal that is its controlling terminal. The server
of tests/support/fork_server.py starts it, and stands in for the shell: Ctrl-Z stops the program, and `resume` is `fg`.

    with Window("chat", "trip", home=tmp_path, env={"BYSSUS_DB": place}) as window:
        window.wait_for("> ")
        window.type("Hello.")
        window.press("enter")
        window.wait_for("Hi!")
"""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte
from pyte.screens import Char

from tests.support import forked
from tests.support.display import BRACKETED_PASTE, Display

_PATIENCE = 60.0  # seconds
_KEYS = {
    "enter": "\r",
    "alt-enter": "\x1b\r",
    "tab": "\t",
    "shift-tab": "\x1b[Z",
    "escape": "\x1b",
    "backspace": "\x7f",
    "delete": "\x1b[3~",
    "up": "\x1b[A",
    "down": "\x1b[B",
    "right": "\x1b[C",
    "left": "\x1b[D",
    "home": "\x1b[H",
    "end": "\x1b[F",
    "page-up": "\x1b[5~",
    "page-down": "\x1b[6~",
    **{f"ctrl-{letter}": chr(ord(letter) - ord("a") + 1) for letter in "abcdefghijklmnopqrstuvwxyz"},
    **{f"alt-{letter}": f"\x1b{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"},
}
# What would change how the command behaves if the person who tests has it set.
_OURS = ("BYSSUS_", "NO_COLOR", "COLORTERM", "COLUMNS", "LINES", "TERM", "PAGER", "EDITOR", "VISUAL", "FORCE_COLOR")


def environment(home: Path, env: Mapping[str, str] = {}) -> dict[str, str]:
    """The variables of a person with this home directory, a terminal of today, and no settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    usual = {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    return {**kept, **usual, **env}


class Window:
    """A terminal window; the program in it is killed when the window is left."""

    def __init__(
        self,
        *arguments: str,
        home: Path,
        env: Mapping[str, str] = {},
        cwd: Path | None = None,
        columns: int = 80,
        rows: int = 24,
        display: Display | None = None,
    ) -> None:
        """`display`: a screen that shows what earlier programs have written, and has a size."""
        if display is not None:
            columns, rows = display.columns, display.lines
        self._master, slave = os.openpty()
        _set_size(slave, columns, rows)
        started = forked.start(
            arguments, env=environment(home, env), cwd=cwd or home, streams=(slave, slave, slave), has_terminal=True
        )
        self.process = started.process
        self._shell = started.answer
        self.display = display or Display(columns, rows)
        self.display.answer = self.type
        self.output = ""  # all that the program has written, with its escape sequences
        self.exit_code: int | None = None
        self.is_stopped = False
        self._stream = pyte.Stream(self.display)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.on_output: Callable[[str], None] = lambda _: None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- the keyboard -------------------------------------------------------------------------------------------------

    def type(self, text: str) -> None:
        """Send characters as they are."""
        data = text.encode()
        while data:
            _, writable, _ = select.select([], [self._master], [], 0)
            if writable:
                data = data[os.write(self._master, data[:1024]) :]
            else:  # the program has to read first, and may have to write before it can
                self._take()

    def press(self, *keys: str) -> None:
        """Press keys by their names: enter, alt-enter, ctrl-c, up, page-down, ..."""
        for key in keys:
            self.type(_KEYS[key])

    def enter(self, text: str) -> None:
        """Type a line, and Enter."""
        self.type(text)
        self.press("enter")

    def paste(self, text: str) -> None:
        """Paste, as a terminal does it: marked as a paste if the program has asked for that."""
        is_marked = self.display.has_private_mode(BRACKETED_PASTE)
        text = text.replace("\n", "\r")
        self.type(f"\x1b[200~{text}\x1b[201~" if is_marked else text)

    # --- the window ---------------------------------------------------------------------------------------------------

    def resize(self, columns: int, rows: int) -> None:
        """The program gets SIGWINCH from the system."""
        self.display.resize(rows, columns)
        _set_size(self._master, columns, rows)

    def hang_up(self) -> None:
        """Close the window: the terminal is gone, and the program gets SIGHUP from the shell."""
        os.close(self._master)
        self._master = -1

    def kill(self) -> None:
        """`kill -9`, and wait until it is dead; what it has shown stays."""
        self.send(signal.SIGKILL)
        self.wait_for_its_end()
        self.close()

    def send(self, signal_number: int) -> None:
        os.kill(self.process, signal_number)

    def resume(self) -> None:
        """`fg`: continue the program that has stopped itself."""
        assert self.is_stopped
        self.is_stopped = False
        self._shell.send(b"continue")

    # --- the screen ---------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[str]:
        """The rows that are on the screen."""
        return self.display.rows

    @property
    def screen(self) -> str:
        """What is on the screen, as text."""
        return "\n".join(self.rows).rstrip()

    @property
    def transcript(self) -> str:
        """What is in the scrollback and on the screen, as text."""
        return self.display.transcript

    @property
    def cursor(self) -> tuple[int, int]:
        """The column and the row of the cursor, from 0."""
        return min(self.display.cursor.x, self.display.columns - 1), self.display.cursor.y

    def look_of(self, text: str) -> Char:
        """The colours and the style of a text that is on the screen: those of its first character."""
        for y, row in enumerate(self.rows):
            if text in row:
                before, x = row[: row.index(text)], 0
                while "".join(self.display.buffer[y][each].data for each in range(x)) != before:
                    x += 1
                return self.display.buffer[y][x]
        raise AssertionError(f"{text!r} is not on the screen:\n{self.screen}")

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until the text is in the scrollback or on the screen, so many times at least. Rows have no spaces at
        their ends, so neither should the text."""
        text = text.rstrip()
        self.wait_until(lambda: self.transcript.count(text) >= times, f"{text!r} ({times} x)")

    def wait_for_match(self, pattern: str) -> re.Match[str]:
        """Wait until a regular expression matches in the scrollback and the screen."""
        self.wait_until(lambda: re.search(pattern, self.transcript) is not None, pattern)
        found = re.search(pattern, self.transcript)
        assert found is not None
        return found

    def wait_for_on_screen(self, *texts: str) -> None:
        """Wait until these texts are on the screen, at once."""
        self.wait_until(lambda: all(text in self.screen for text in texts), repr(texts))

    def wait_until_gone(self, text: str) -> None:
        """Wait until the text is no longer on the screen."""
        self.wait_until(lambda: text not in self.screen, f"the end of {text!r}")

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Read what the program writes until something is so."""
        until = time.monotonic() + _PATIENCE
        while not is_so():
            ended = self.exit_code is not None
            if not self._take(0 if ended else max(0.0, until - time.monotonic())) and not is_so():
                why = f"the program ended with {self.exit_code}" if ended else "it did not appear"
                raise AssertionError(f"waiting for {what}: {why}; there is\n{self.transcript}")

    def wait_for_its_end(self) -> int:
        """Read until the program has ended; its exit code, which is negative for a signal."""
        self.wait_until(lambda: self.exit_code is not None, "its end")
        while self._take(0):
            pass
        assert self.exit_code is not None
        return self.exit_code

    def wait_until_it_stops(self) -> None:
        """Wait until the program has stopped itself, as on Ctrl-Z."""
        self.wait_until(lambda: self.is_stopped, "the program to stop")

    def _take(self, seconds: float = 1.0) -> bool:
        """Take what the program has written, and what the shell knows of it. False if there is nothing."""
        places = [each for each in (self._master, self._shell.fileno()) if each >= 0]
        ready, _, _ = select.select(places, [], [], seconds)
        took = False
        if self._shell.fileno() in ready:
            took = self._hear()
        if self._master in ready:
            took = self._read() or took
        return took

    def _hear(self) -> bool:
        with suppress(ConnectionError):
            if told := self._shell.recv(100):
                if told == b"stopped":
                    self.is_stopped = True
                else:
                    self.exit_code = int(told)
                return True
        self._shell.close()
        return False

    def _read(self) -> bool:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says so when nobody has the other end open any more
            data = b""
        if not data:
            self.hang_up()
            return False
        text = self._decoder.decode(data)
        self.output += text
        self._stream.feed(text)
        self.on_output(text)
        return True

    def close(self) -> None:
        """End the program if it runs, and close the window."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)
        if self._master >= 0:
            self.hang_up()
        self._shell.close()


def _set_size(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
