"""The person's own editor, for what is typed in the input line."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from prompt_toolkit.application import in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.document import Document

from byssus.cli.chat.live.drawn.screen import ChatScreen
from byssus.errors import InputError


async def edit(screen: ChatScreen, buffer: Buffer) -> None:
    """Change the text in the editor. What a run says meanwhile is printed afterwards."""
    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    async with in_terminal():
        text = await asyncio.to_thread(_edited, command, buffer.text)
    if text is not None:
        buffer.set_document(Document(text, len(text)), bypass_readonly=True)
    screen.refresh_now()


def _edited(command: list[str], text: str) -> str | None:
    """The text as the editor has left it; None if the editor failed."""
    handle, name = tempfile.mkstemp(suffix=".md", prefix="byssus-")
    path = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        code = subprocess.run([*command, name], check=False).returncode  # noqa: S603 - the person's own
        return path.read_text("utf-8", "replace").removesuffix("\n") if code == 0 else None
    except OSError as error:
        raise InputError(
            f"the editor {command[0]!r} cannot be started ({error.strerror}); set VISUAL or EDITOR"
        ) from error
    finally:
        path.unlink(missing_ok=True)
