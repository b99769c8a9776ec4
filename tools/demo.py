"""Record the animation of the README and the pictures of docs/chat.md: `byssus chat`, in a real terminal.

`make demo` writes them. The command is the real one; its model is the script of lisbon.py, and the machine is this one.
A test plays the same scripts, and compares what they say with the files: the pictures show what the program does.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.window import Window
from tools import svg
from tools.screencast import Frame, Screencast

DOCS = Path(__file__).parent.parent / "docs"
DEMO = DOCS / "demo.svg"
PICTURES = DOCS / "pictures"
DEMO_TITLE = "A chat is killed while it books a tour, and the next one knows what is open"
_APP = Path(__file__).parent / "lisbon.py"
_PROMPT = "\u203a"
_CONFIGURATION = 'database = "chat.db"\napp = "lisbon:agent"\n'


class Stage:
    """A directory with the app, and a screen."""

    def __init__(self, folder: Path, rows: int = 24) -> None:
        self.folder = folder
        shutil.copy(_APP, folder)
        (folder / "byssus.toml").write_text(_CONFIGURATION, "utf-8")
        self.cast = Screencast(folder, rows=rows)

    def chat(self, thread: str = "trip", *until: str) -> Window:
        window = self.cast.shell("chat", thread)
        window.wait_for_on_screen(f"Thread {thread}", *(until or (_PROMPT, "thread 0 tok")))
        self.cast.show()
        return window

    def go(self, window: Window, *until: str, seconds: float = 0.6) -> None:
        """Let the script go on, and show what came."""
        (self.folder / "go").touch()
        window.wait_for_on_screen(*until)
        self.cast.show(seconds)

    def plan(self, window: Window) -> None:
        """Ask for the plan, up to the question about the tour."""
        cast = self.cast
        cast.enter(window, "Plan a day in Lisbon, and book the tram tour for two.")
        window.wait_for_on_screen("the Alfama,")
        cast.show(0.6)
        self.go(window, "grilled sardines")
        self.go(window, "I am booking")
        self.go(window, "allow?", "thread 916", seconds=1.5)


def record_demo(folder: Path) -> list[Frame]:
    """A chat, a tool that is approved, kill -9 in the middle of it, a restart, and a fork."""
    stage = Stage(folder)
    cast = stage.cast
    window = stage.chat()
    stage.plan(window)
    cast.type(window, "y")
    cast.show(0.5)
    window.press("enter")
    window.wait_for_on_screen("asking the office")
    cast.show(1.5)
    window.kill()
    cast.note("Killed (kill -9)")
    window = stage.chat("trip", "resume? [Y/n]", "thread 916")
    cast.show(2)
    window.press("enter")
    window.wait_for_on_screen("what now?", "chat.db")
    cast.show(2)
    cast.enter(window, "y")
    window.wait_for_on_screen("attempt 2")
    cast.show(1)
    stage.go(window, "17:00, reference L-28.", "thread 1.8k", seconds=2)
    window.enter("/fork")  # at once: the list of completions comes when it comes
    window.wait_for("Thread trip-fork-1: ")
    window.wait_for_on_screen("trip-fork-1 \u00b7")
    cast.show(1)
    cast.enter(window, "Now the same with children, please.")
    window.wait_for_on_screen("in the morning,")
    cast.show(0.5)
    stage.go(window, "afterwards.", "turn 916", seconds=2)
    window.close()
    return cast.frames


def record_streaming(folder: Path) -> list[Frame]:
    stage = Stage(folder, rows=26)
    window = stage.chat()
    stage.cast.enter(window, "What does it cost, with the museum?")
    window.wait_for_on_screen("80 EUR")
    window.enter("And is it open on Mondays?")
    window.wait_for_on_screen("1 now And is it open on Mondays?")
    stage.cast.type(window, "Then we need ")
    stage.cast.show()
    window.close()
    return stage.cast.frames


def record_whole(folder: Path) -> list[Frame]:
    stage = Stage(folder, rows=26)
    window = stage.chat()
    stage.cast.enter(window, "What does it cost, with the museum?")
    window.wait_for_on_screen("80 EUR")
    stage.go(window, "is worth it", "thread 916")
    window.wait_for_on_screen("thread 916")
    stage.cast.show()
    window.close()
    return stage.cast.frames


def record_approval(folder: Path) -> list[Frame]:
    stage = Stage(folder)
    window = stage.chat()
    stage.plan(window)
    window.close()
    return stage.cast.frames


def record_interrupted(folder: Path) -> list[Frame]:
    stage = Stage(folder)
    window = stage.chat()
    stage.plan(window)
    window.enter("y")
    window.wait_for_on_screen("asking the office")
    window.kill()
    stage.cast.display.reset()
    window = stage.chat("trip", "resume? [Y/n]", "thread 916")
    window.press("enter")
    window.wait_for_on_screen("what now?", "chat.db")
    stage.cast.show()
    window.close()
    return stage.cast.frames


def record_picker(folder: Path) -> list[Frame]:
    stage = Stage(folder, rows=20)
    window = stage.chat("costs")
    stage.cast.enter(window, "What does it cost?")
    window.wait_for_on_screen("80 EUR")
    (folder / "go").touch()
    window.wait_for_on_screen("thread 916")
    window.enter("/new family")
    window.wait_for_on_screen("Thread family")
    window.enter("A day with children, please.")
    window.wait_for_on_screen("in the morning,")
    (folder / "go").touch()
    window.wait_for_on_screen("thread 916", "family \u00b7")
    window.enter("/threads")
    window.wait_for_on_screen("threads:", "user: A day with")
    stage.cast.show()
    window.close()
    return stage.cast.frames


# The pictures of docs/chat.md: what each shows, and the script whose last step it is.
SCENES: dict[str, tuple[str, Callable[[Path], list[Frame]]]] = {
    "streaming": ("An answer that is arriving, and the next message in the input line", record_streaming),
    "answer": ("A table, code and Chinese text, and the status line", record_whole),
    "approval": ("A tool call that asks for approval, with its arguments", record_approval),
    "interrupted": ("A run that was interrupted, and a call whose outcome is unknown", record_interrupted),
    "picker": ("A list of threads to choose from, with a preview", record_picker),
}


def recorded(record: Callable[[Path], list[Frame]]) -> list[Frame]:
    """Play a script in a directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return record(Path(folder))


def said(svg_text: str) -> list[str]:
    """The rows of a picture, each once; of those that are typed or arrive, the whole row.

    Without the status line: when its figures change between two steps is a matter of moments.
    """
    rows = {re.sub(r"<[^>]*>", "", line) for line in svg_text.splitlines() if "<text" in line}
    rows = {row for row in rows if " \u00b7 " not in row}
    return sorted(row for row in rows if not any(other != row and other.startswith(row) for other in rows))


def drawn(path: Path) -> str:
    """What belongs into one of the files."""
    if path == DEMO:
        return svg.animation(recorded(record_demo), DEMO_TITLE)
    title, record = SCENES[path.stem]
    return svg.picture(recorded(record)[-1], title)


FILES = [DEMO, *(PICTURES / f"{name}.svg" for name in SCENES)]


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for path in FILES:
        text = drawn(path)
        path.write_text(text, "utf-8")
        print(f"{path}: {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
