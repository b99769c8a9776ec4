"""A chat in a real terminal, with the app of tests/support/teller.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

from byssus.checkpointer import Thread, checkpointer_for
from byssus.messages import Message
from tests.support.teller import write_teller
from tests.support.window import Window

PROMPT = "\u203a"


class Stage:
    """A directory with the app, a database and files that a model can tell; and the windows that are open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app = write_teller(folder)
        self.database = folder / "chat.db"
        self._windows: list[Window] = []

    def chat(
        self, thread: str = "main", *, columns: int = 80, rows: int = 24, until: str = PROMPT, **env: str
    ) -> Window:
        """Start a chat, and wait until it can be typed to."""
        arguments = ["chat", thread, "--app", self.app]
        given = {"BYSSUS_DB": str(self.database), **env}
        window = Window(*arguments, home=self.folder, env=given, columns=columns, rows=rows)
        self._windows.append(window)
        window.wait_for(until)
        return window

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text, "utf-8")
        return name

    def go(self) -> None:
        """Let a story that stopped at a form feed go on."""
        (self.folder / "go").touch()

    def leave(self, window: Window) -> list[Message]:
        """Leave a chat, and return what is stored."""
        window.press("ctrl-d")
        assert window.wait_for_its_end() == 0
        return self.messages()

    def messages(self) -> list[Message]:
        """What is stored."""
        thread = self.thread()
        return [] if thread is None else thread.messages

    def thread(self) -> Thread | None:
        async def load() -> Thread | None:
            async with checkpointer_for(str(self.database)) as cp:
                return await cp.load("main")

        return asyncio.run(load())

    def close(self) -> None:
        for window in self._windows:
            window.close()
