"""Whatever goes wrong is one clear line in the transcript; the typed text is kept, and the chat goes on."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from byssus.messages import UserMessage
from tests.support.chats import PROMPT, Stage
from tests.support.window import Window

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("kind", "told"),
    [("key", "the key was refused"), ("model", "there is no model 'gpt-99'"), ("network", "no connection to")],
)
def test_a_model_that_does_not_answer_is_one_line(stage: Stage, kind: str, told: str) -> None:
    window = stage.chat()
    window.enter(f"fail {kind}")
    window.wait_for(told)
    window.enter("say hello")
    window.wait_for("You said: hello.")
    assert "Traceback" not in window.transcript


def test_what_cannot_be_used_is_said_and_stays_in_the_line(stage: Stage) -> None:
    (stage.folder / "big.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"x" * 30_000_000)
    (stage.folder / "fake.png").write_bytes(b"not an image")
    window = stage.chat()
    for typed, told in (
        ("/thraeds", "did you mean '/threads'"),
        ("look at @nothing.txt", "nothing.txt"),
        ("look at @big.png", "big.png"),
        ("look at @fake.png", "fake.png"),
    ):
        window.enter(typed)
        window.wait_for_match(rf"✗ .*{told}")
        window.wait_for_on_screen(f"{PROMPT} {typed}")
        window.press("ctrl-c")
        window.wait_until_gone(f"{PROMPT} {typed}")
    assert stage.messages() == []


# An app that opens the command's own database decides how long a write waits for another process.
HASTY = """
import asyncio, os
from byssus.checkpointer import SQLiteCheckpointer
from teller import agent

kept = SQLiteCheckpointer(os.environ["BYSSUS_DB"], busy_timeout=0.5)
asyncio.run(kept.open())
"""


def test_a_database_that_is_locked_is_one_line_and_the_text_is_kept(stage: Stage) -> None:
    stage.write("hasty.py", HASTY)
    stage.app = "hasty:agent"
    window = stage.chat()
    window.enter("first")
    window.wait_for("You said: first.")
    with closing(sqlite3.connect(stage.database)) as other:
        other.execute("BEGIN IMMEDIATE")
        window.enter("second")
        window.wait_for_match("✗ another process held the write lock")
        window.wait_for_on_screen(f"{PROMPT} second")
        other.rollback()
    window.press("enter")
    window.wait_for("You said: second.")
    assert [m.text for m in stage.messages() if isinstance(m, UserMessage)] == ["first", "second"]


def test_a_database_of_a_newer_version_is_refused_in_one_line(stage: Stage) -> None:
    window = stage.chat()
    window.press("ctrl-d")
    window.wait_for_its_end()
    with closing(sqlite3.connect(stage.database)) as made:
        made.execute("PRAGMA user_version = 9999")
    env = {"BYSSUS_DB": str(stage.database)}
    with Window("chat", "--app", stage.app, home=stage.folder, env=env) as refused:
        assert refused.wait_for_its_end() == 1
        assert refused.transcript.startswith("byssus: ")
        assert "newer" in refused.transcript


def test_a_database_that_is_read_only_is_one_line_and_the_text_is_kept(stage: Stage) -> None:
    window = stage.chat()
    window.enter("first")
    window.wait_for("You said: first.")
    stage.leave(window)
    with stage.database.open("r+b") as file:  # the version that a program must know to write it
        file.seek(18)
        file.write(b"\x03")
    window = stage.chat()
    for number, typed in enumerate(("second", "/mark good"), 1):
        window.enter(typed)
        window.wait_for("✗", number)
        window.wait_for_on_screen(f"{PROMPT} {typed}")
        window.press("ctrl-c")
        window.wait_until_gone(f"{PROMPT} {typed}")
    assert "chat.db'cannotbewritten;" in "".join(window.transcript.split())  # a long path is wrapped anywhere
    assert len(stage.messages()) == 2


def test_a_tool_that_hangs_can_be_stopped_and_left(stage: Stage) -> None:
    window = stage.chat()
    window.enter("hang")
    window.wait_for_on_screen("hang 1 s")
    window.press("ctrl-c")
    window.wait_for_match("✗ hang .*")
    window.enter("say hello")
    window.wait_for("You said: hello.")
    window.enter("block")
    window.wait_for_on_screen("block 1 s")
    window.press("ctrl-c")
    window.wait_for_match("✗ block .*")
    assert stage.leave(window)[-1].text.startswith("The run was aborted during this call")
