"""What was typed before: a file in the data directory, which only its owner can read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import platformdirs
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

_MOST_BYTES = 1_000_000  # of the file; then the older half is dropped
_NAME = "chat-history"


class _Kept(FileHistory):
    """A history that is never in the way: a full disk costs the history, and not the chat."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def history() -> History:
    """The history of this user; one in memory where no file can be."""
    folder = platformdirs.user_data_path("byssus", appauthor=False)
    if str(folder).startswith("~"):
        return InMemoryHistory()
    path = folder / _NAME
    try:
        _make_private(folder)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600))
        path.chmod(0o600)
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return _Kept(str(path))


def _make_private(folder: Path) -> None:
    """Make the directory as a database there would be made: what lies beside the history is private, too."""
    if folder.is_dir():
        return
    _make_private(folder.parent)
    with suppress(FileExistsError):  # another process was faster
        folder.mkdir(0o700)
        folder.chmod(0o700)  # a umask may take from the owner, too


def _shorten(path: Path) -> None:
    """Drop the older half of a long file."""
    if path.stat().st_size <= _MOST_BYTES:
        return
    data = path.read_bytes()
    start = data.find(b"\n# ", len(data) // 2)
    path.write_bytes(data[start:] if start >= 0 else b"")
