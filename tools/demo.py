"""Record docs/demo.svg: `byssus chat` in a real terminal is killed in the middle of a reply, and goes on.

The command is the real one. Its model is a local server that speaks Anthropic's protocol and whose first reply stalls,
so the recording needs no service and is the same each time. Times are made up: they depend on the text alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from html import escape
from pathlib import Path

from tests.support.terminal import Terminal
from tests.support.wire import Anthropic, Server

TARGET = Path(__file__).parent.parent / "docs" / "demo.svg"
QUESTION = "Plan a day in Lisbon."
HALF = "Morning: the Alfama, before the crowds. Noon: grilled sardines by the river."
WHOLE = "Morning: the Alfama. Noon: sardines by the river. Evening: fado, and tram 28 back."
STYLE = """
svg { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
rect { fill: #161b22; stroke: #6e7681; } text { fill: #e6edf3; white-space: pre; }
.typed { fill: #7ee787; } .killed { fill: #ff7b72; }
tspan { opacity: 0; animation: appear 0.01s forwards; } @keyframes appear { to { opacity: 1; } }
"""


class Screen:
    """The lines of the recording: pieces of text, each with its class and the second at which it appears."""

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str, float]]] = [[]]
        self.now = 0.5

    def add(self, text: str, kind: str = "", pause: float = 0.06) -> None:
        """Show the text piece by piece."""
        pieces = list(text) if kind == "typed" else text.replace(" ", " \0").replace("\n", "\n\0").split("\0")
        for piece in pieces:
            self.lines[-1].append((piece.rstrip("\n"), kind, self.now))
            if piece.endswith("\n"):
                self.lines.append([])
            self.now += pause

    def svg(self, width: int = 100) -> str:
        rows = []
        for number, line in enumerate(self.lines):
            spans = "".join(
                f'<tspan{f" class={kind!r}" if kind else ""} style="animation-delay:{at:.2f}s">{escape(text)}</tspan>'
                for text, kind, at in line
                if text
            )
            rows.append(f'<text x="16" y="{30 + 20 * number}">{spans}</text>')
        size = f'width="{width * 8.6:.0f}" height="{30 + 20 * len(rows)}"'
        box = '<rect x="0.5" y="0.5" width="99.9%" height="99.7%" rx="8"/>'
        title = "<title>A chat is killed in the middle of a reply, and goes on when it is started again</title>"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{title}<style>{STYLE}</style>{box}'
        return "\n".join([head, *rows, "</svg>", ""])


def record(screen: Screen, folder: Path) -> None:
    """Play the scene: ask, kill, start again, let it finish the reply, and show what is stored."""
    replies = [
        Anthropic.answer(HALF + " Then, in the evening").stall(after=3 + len(HALF.split())),
        Anthropic.answer(WHOLE),
    ]
    with Server(replies) as server:
        env = {"BYSSUS_DB": str(folder / "chat.db"), "ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "demo"}
        chat = start(screen, env, "chat", "trip", "--provider", "anthropic")
        say(screen, chat, QUESTION)
        screen.add(shown(chat, r"by the river\.? ?"))
        while not stored(env):
            pass
        screen.now += 1
        chat.close()
        screen.add("\n", pause=0)
        screen.add("Killed (kill -9)\n", "killed", 0.2)
        chat = start(screen, env, "chat", "trip", "--provider", "anthropic", until=r"\[Y/n\] ")
        chat.type("\n")
        screen.add("\n", pause=0.5)
        screen.add(shown(chat, r"28 back\.").lstrip("\n"))
        chat.wait_for("> ")  # a key that comes earlier is not the end of the input
        chat.type("\x04")
        chat.wait_for_its_end()
        screen.add("\n", pause=1)
        screen.add(start(screen, env, "show", "trip", until="").wait_for_its_end().replace("\r", ""), pause=0.02)


def start(screen: Screen, env: dict[str, str], *arguments: str, until: str = "> ") -> Terminal:
    screen.add("$ ")
    screen.add(f"byssus {' '.join(arguments)}\n", "typed")
    program = Terminal(sys.executable, "-m", "byssus", *arguments, env=env)
    if until:
        screen.add(shown(program, until))
    return program


def say(screen: Screen, chat: Terminal, text: str) -> None:
    screen.add(f"{text}\n", "typed")
    chat.type(f"{text}\n")
    chat.wait_for(f"{text}\r\n")  # the terminal's echo


def shown(program: Terminal, pattern: str) -> str:
    """What appears until the pattern does."""
    return program.wait_for(pattern).replace("\r", "")


def stored(env: dict[str, str]) -> bool:
    """Whether the half reply is on disk: what has arrived is saved every second."""
    check = Terminal(sys.executable, "-m", "byssus", "show", "trip", env=env)
    return "sardines" in check.wait_for_its_end()


def main() -> None:
    screen = Screen()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COLUMNS"] = "96"
        record(screen, Path(folder))
    TARGET.write_text(screen.svg(), "utf-8")


if __name__ == "__main__":
    main()
