"""What was typed before is kept for its owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory

from byssus.cli.chat.live.typed.history import history


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=oct)
def test_the_history_and_the_directories_made_for_it_are_private_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "new" / "data"))
    before = os.umask(umask)
    try:
        history().store_string("hello")
    finally:
        os.umask(before)
    made = {path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    folders = dict.fromkeys(("new", "new/data", "new/data/byssus"), 0o700)
    assert made == {**folders, "new/data/byssus/chat-history": 0o600}
    assert list(history().load_history_strings()) == ["hello"]


def test_a_history_that_cannot_be_kept_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert isinstance(history(), InMemoryHistory)
