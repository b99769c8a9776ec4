"""`/export` in the chat: a file that only its owner can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from byssus import UserMessage
from byssus.cli.chat.live.actions import about


def test_an_export_is_for_its_owner_alone_and_takes_every_text(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        for name in ("talk.md", "talk.html", "talk.json"):
            about._write(str(tmp_path / name), "t", [UserMessage("Oslo \ud800")])
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
            assert "Oslo \\ud800" in (tmp_path / name).read_text("utf-8")
    finally:
        os.umask(umask)
