"""What is typed: pasted, Chinese, edited, interrupted, and never lost."""

from __future__ import annotations

import sqlite3

import pytest

from byssus.messages import AssistantMessage
from tests.support.chats import PROMPT, Stage

pytestmark = pytest.mark.processes


def test_five_hundred_pasted_lines_are_one_message(stage: Stage) -> None:
    window = stage.chat()
    lines = "\n".join(f"line {number}" for number in range(500))
    window.paste(lines)
    window.wait_for_on_screen("line 499")
    window.press("enter")
    window.wait_for(f"You said {len(lines)} characters.")
    asked, _ = stage.leave(window)
    assert asked.text == lines


def test_chinese_is_typed_moved_in_and_deleted_by_whole_characters(stage: Stage) -> None:
    window = stage.chat()
    window.type("你好世界")
    window.wait_for_on_screen(f"{PROMPT} 你好世界")
    assert window.cursor[0] == 2 + 8
    window.press("left", "left", "backspace")
    window.wait_for_on_screen(f"{PROMPT} 你世界")
    assert window.cursor[0] == 2 + 2
    window.enter("的")
    window.wait_for("You said: 你的世界.")
    assert stage.leave(window)[0].text == "你的世界"


def test_ctrl_c_stops_what_goes_on_at_every_stage_and_keeps_what_was_typed(stage: Stage) -> None:
    window = stage.chat()
    window.enter(f"tell {stage.write('quiet.md', chr(12) + 'never')}")  # before the first word
    window.wait_for("waiting for the model")
    window.press("ctrl-c")
    window.wait_for("[stopped]")
    window.enter(f"tell {stage.write('story.md', 'Once upon ' + chr(12) + 'never')}")  # in the middle of an answer
    window.wait_for("Once upon")
    window.press("ctrl-c")
    window.wait_for("[stopped]", times=2)
    window.enter("hang")  # in a tool
    window.wait_for_on_screen("hang 1 s")
    window.press("ctrl-c")
    window.wait_until_gone("hang 1 s")
    window.enter("run it")  # at a question
    window.wait_for_on_screen("allow?")
    window.type("y but")
    window.press("ctrl-c")
    window.wait_until_gone("allow?")
    window.enter("/threads")  # in a picker
    window.wait_for_on_screen("threads:")
    window.press("ctrl-c")
    window.wait_until_gone("threads:")
    window.enter("/approve")
    window.wait_for_on_screen("allow?")
    window.enter("n")
    window.wait_for("(denied")
    window.wait_for_match(r"You said: A person was\s+asked")
    half = next(m for m in stage.leave(window) if isinstance(m, AssistantMessage) and "Once upon" in m.text)
    assert half.stop_reason == "aborted"


def test_approvals_yes_no_with_a_reason_edited_and_always(stage: Stage) -> None:
    window = stage.chat()
    window.enter("run one")
    window.wait_for_on_screen("allow?", "command: one")
    window.enter("y")
    window.wait_for("You said: ran one.")
    window.enter("run two")
    window.wait_for_on_screen("allow?", "command: two")
    window.enter("n not on a Friday")
    window.wait_for_match(r"You said: .*not on a\s+Friday")
    window.enter("run three")
    window.wait_for_on_screen("allow?", "command: three")
    window.enter("e")
    window.wait_for_on_screen('"three"')
    window.press("ctrl-e", *["backspace"] * len('three"\n}'))
    window.enter('3"}')
    window.wait_for("\n  ran 3\n")
    window.enter("run four")
    window.wait_for_on_screen("allow?", "command: four")
    window.enter("a")
    window.wait_for("You said: ran four.")
    window.enter("run five")
    window.wait_for("You said: ran five.")


def test_what_is_not_stored_yet_is_said_to_wait_for_the_database(stage: Stage) -> None:
    window = stage.chat()
    window.enter("say first")
    window.wait_for("You said: first.")
    window.enter("/mark good")
    window.wait_for("is marked 'good'")  # the run is over
    writer = sqlite3.connect(stage.database, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    window.enter("say second")
    window.wait_for_on_screen("waiting for the database")
    writer.execute("ROLLBACK")
    window.wait_for("You said: second.")
    window.enter("/mark better")
    window.wait_for("is marked 'better'")
    writer.execute("BEGIN IMMEDIATE")
    window.enter("/checkpoint here")
    window.wait_for_on_screen("working on /checkpoint")
    writer.execute("ROLLBACK")
    writer.close()
    window.wait_for("(checkpoint here;")
