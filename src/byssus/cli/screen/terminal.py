"""Reading and writing a terminal, or whatever stands in its place.

Text comes from models, tools and other people's databases. Nothing of it may drive the terminal, so control
characters are shown, not sent; and a character that the output cannot encode is shown by its number. In JSON they are
escaped as JSON escapes them, whatever the output is: it stays valid, and nothing is lost.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal

from byssus.values.places import redacted

with suppress(ImportError):  # not every Python has it
    import readline  # noqa: F401 - merely importing it gives input() line editing and a history

# C0 without tab and newline, DEL, C1, and the marks that reorder text on the screen.
_CONTROLS = [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS}
_SHOWN_ON_ONE_LINE = {**_SHOWN, ord("\n"): " ", ord("\t"): " "}
# In JSON it costs nothing to escape more: line separators, and the marks that only hint at a direction.
_ESCAPED_IN_JSON = {
    code: f"\\u{code:04x}" for code in (*(c for c in _CONTROLS if c > 126), 0x61C, 0x200E, 0x200F, 0x2028, 0x2029)
}
_STYLES = {"bold": "\x1b[1m", "dim": "\x1b[2m"}
_BAR_WIDTH = 24
_BAR_SECONDS = 0.1  # between two updates


def prepare() -> None:
    """Let no text fail for its characters."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def read_utf8() -> None:
    """Read UTF-8 from now on, whatever the locale says. Nothing may have been read before."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")


def typed(word: str) -> str:
    """A word of the command line. Python cannot decode UTF-8 where the locale says that there is none: then we do."""
    try:
        return word.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return word


def read_all() -> str:
    """All that is piped in: UTF-8, whatever the locale says, and else what the locale says."""
    if sys.stdin is None:
        return ""
    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:
        return sys.stdin.read()
    data: bytes = raw.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode(sys.stdin.encoding or "utf-8", "replace")
    return text.replace("\r\n", "\n")


def is_interactive() -> bool:
    """Whether a person sits at both ends."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def clean(text: str) -> str:
    """The text with its control characters made visible."""
    return text.translate(_SHOWN)


def line(text: str) -> str:
    """The same, on one line."""
    return text.translate(_SHOWN_ON_ONE_LINE)


def json_line(text: str) -> str:
    """JSON that is the same value, with nothing in it that drives a terminal or that the output cannot encode."""
    text = text.translate(_ESCAPED_IN_JSON)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return "".join(each if each.isascii() else json.dumps(each)[1:-1] for each in text)
    return text


def html_piece(text: str) -> str:
    """HTML for an output of any encoding: the page says that it is UTF-8, and ASCII is the same in both."""
    try:
        is_utf8 = codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name == "utf-8"
    except LookupError:
        is_utf8 = False
    return text if is_utf8 else text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def printable(text: str) -> str:
    """The text on one line, with a character that the output cannot encode shown by its number."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return line(text).encode(encoding, "backslashreplace").decode(encoding)


def drawn(sign: str, plain: str) -> str:
    """The sign, or what stands for it where the output cannot encode it."""
    return sign if printable(sign) == sign else plain


def when(iso: str, utc: bool) -> str:
    """A stored time for people: local, or in UTC with a Z behind it. What is no time with a zone is shown as it is."""
    try:
        time = datetime.fromisoformat(iso)
        if time.tzinfo is None:
            return line(iso)
        return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}" if utc else f"{time.astimezone():%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError):  # a database may hold what another program wrote
        return line(iso)


def is_screen() -> bool:
    """Whether a person reads what is printed."""
    return sys.stdout is not None and sys.stdout.isatty()


def columns() -> int | None:
    """How wide the screen is; None if the output is not a terminal."""
    return shutil.get_terminal_size().columns if is_screen() else None


def styled(text: str, style: Literal["bold", "dim"]) -> str:
    """The text in a style, on a terminal that has styles and a person who wants them."""
    if not is_screen() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return text
    return f"{_STYLES[style]}{text}\x1b[0m"


def as_json(value: Any) -> str:
    """JSON on one line for people: letters of every language are shown, not escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def print_json(value: Any) -> None:
    print(json_line(json.dumps(value, indent=2, ensure_ascii=False)))


def write(text: str) -> None:
    """Show text at once, without a newline of its own."""
    print(clean(text), end="", flush=True)


def remark(text: str) -> None:
    """The same on stderr, so that redirected output holds only what was asked for."""
    print(clean(text), end="", file=sys.stderr, flush=True)


def read_line() -> str | None:
    """The next line of input, after a prompt if a person types it; None at the end."""
    if not is_interactive():
        return (sys.stdin.readline() or None) if sys.stdin is not None else None
    try:
        return input("> ")
    except EOFError:
        print()
        return None


@contextmanager
def keys_to_ourselves() -> Iterator[None]:
    """Be the terminal's foreground group, alone.

    The keys' signals go to the whole group. A program that started us there and waits for us, as `make` does, would
    die of a Ctrl-C that only meant to stop a reply. Nobody could wake us from a Ctrl-Z then, so it is ignored.
    """
    group = os.getpgrp() if is_interactive() and hasattr(os, "tcsetpgrp") else None
    if group is None or group == os.getpid() or os.tcgetpgrp(sys.stdin.fileno()) != group:
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTTOU, signal.SIGTSTP)}
    os.setpgid(0, 0)
    os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    try:
        yield
    finally:
        with suppress(OSError):  # the program that started us may be gone
            os.tcsetpgrp(sys.stdin.fileno(), group)
            os.setpgid(0, group)
        for number, handler in before.items():
            signal.signal(number, handler)


class ProgressBar:
    """One line on a terminal that overwrites itself; if stderr is not a terminal, nothing. Do not pass foreign text."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._shown_at = float("-inf")
        self._length = 0

    def show(self, label: str, done: int, total: int, detail: str = "") -> None:
        now = time.monotonic()
        if not self._is_shown or now < self._shown_at + _BAR_SECONDS:
            return
        self._shown_at = now
        share = min(done / total, 1) if total else 1
        text = f"{label} [{'#' * round(share * _BAR_WIDTH):{_BAR_WIDTH}}] {share:4.0%}{detail}"
        text = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text:{self._length}}", end="", file=sys.stderr, flush=True)
        self._length = len(text)

    def clear(self) -> None:
        if self._length:
            print(f"\r{'':{self._length}}\r", end="", file=sys.stderr, flush=True)
            self._length = 0


@contextmanager
def progress_bar() -> Iterator[ProgressBar]:
    """A bar that is gone afterwards, whatever happens."""
    bar = ProgressBar()
    try:
        yield bar
    finally:
        bar.clear()


def complain(error: BaseException | str) -> None:
    """Say what went wrong, in one line on stderr."""
    print(f"byssus: {line(redacted(str(error)) or type(error).__name__)}", file=sys.stderr, flush=True)


def flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def abandon_output() -> None:
    """Throw away what the reader of stdout will not take, or Python complains about it once more at its end."""
    try:
        flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
