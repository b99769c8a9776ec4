"""The commands of the chat, as a person uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus import Agent, AssistantMessage, Model, UserMessage
from byssus.checkpointer import SQLiteCheckpointer
from byssus.testing import ScriptedProvider
from tests.support.talker import write_talker
from tests.support.window import Window

pytestmark = pytest.mark.processes


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Window]:
    """A chat in which something was said."""
    app = write_talker(tmp_path)
    with Window("chat", "trip", "--app", app, home=tmp_path, cwd=tmp_path, rows=40) as window:
        window.wait_for("› ")
        window.enter("say apples")
        window.wait_for("thread 120 tok")
        yield window


def test_threads_can_be_made_listed_renamed_and_opened(window: Window) -> None:
    window.enter("/rename Fruit")
    window.wait_for("(title: Fruit)")
    window.enter("/new other")
    window.wait_for("Thread other: new.")
    window.enter("say pears")
    window.wait_for("You said: say pears.")
    window.enter("/threads")
    window.wait_for_on_screen("threads:", "trip  Fruit", "user: say pears")
    window.type("fru")
    window.wait_for_on_screen("user: say apples")
    window.press("enter")
    window.wait_for("Thread trip: 2 messages so far (Fruit)")
    window.type("/open oth")
    window.press("tab")
    window.wait_for_on_screen("› /open other")
    window.press("enter")
    window.wait_for("Thread other: 2 messages so far")


def test_a_search_opens_the_thread_at_its_hit(window: Window) -> None:
    window.enter("/new other")
    window.wait_for("Thread other: new.")
    window.enter("/search apples")
    window.wait_for_on_screen("search:", "You said: say apples.")
    window.press("enter")
    window.wait_for("Thread trip: 2 messages so far")
    window.wait_for("here:")


def test_the_thread_goes_back_and_forth(window: Window) -> None:
    window.enter("/checkpoint early")
    window.wait_for("(checkpoint early;")
    window.enter("say pears")
    window.wait_for("thread 240 tok")
    window.enter("/rewind")  # also to before each message
    window.wait_for_on_screen("seq:2  early", "seq:0  before: say apples")
    window.press("down", "enter")
    window.wait_for("Rewind to message 0 would take 4 message(s) off this thread.")
    window.enter("n")
    window.enter("/rewind early")
    window.wait_for("would take 2 message(s) off this thread")
    window.wait_for("assistant: You said: say apples.")
    window.enter("y")
    back = window.wait_for_match(r"\(rewound; nothing is lost: /rewind (\w+)").group(1)
    window.enter("say plums")
    window.wait_for("You said: say plums.")
    window.enter(f"/rewind {back}")
    window.wait_for("Rewind to message 4 would bring back what an earlier rewind has left, 4")
    window.wait_for("assistant: You said: say pears.")
    window.enter("n")
    window.enter("/undo")
    window.wait_for("(taken back, with 1 message behind it: say plums)")
    window.enter("/rewind seq:99")
    window.wait_for("this thread ends with message 2, so there is no message 99")
    window.press("ctrl-c")
    window.enter("/edit")
    window.wait_for_on_screen("› say apples\ntrip ·")
    window.type(" and plums")
    window.press("enter")
    window.wait_for("You said: say apples and plums.")
    window.enter("/retry")
    window.wait_for("You said: say apples and plums.", 2)
    window.enter("/undo")
    window.wait_for("(taken back, with 1 message behind it: say apples and plums)")
    window.enter("/tree")
    window.wait_for_on_screen("tree:", "early")
    window.press("escape")
    window.enter("/fork early")  # at once: it is no key with Alt
    window.wait_for("(a copy of trip: trip-fork-1)")
    window.wait_for("Thread trip-fork-1:")
    assert "left left" not in window.transcript
    window.enter("/checkpoint there")
    window.enter("/fork")
    window.wait_for("(a copy of trip-fork-1: trip-fork-2)")
    window.enter("/open trip")
    window.wait_for("Thread trip: ")
    window.enter("/tree")
    window.wait_for_on_screen("tree:", "seq:2  there")
    window.type("there")
    window.wait_for_match(r"❯ +seq:2  there")
    window.press("enter")
    window.wait_for("Thread trip-fork-1:", 2)
    window.wait_for("Rewind to message 2 would take 0 message(s) off this thread.")


def test_retry_answers_anew_what_was_cut_off_and_says_that_there_is_nothing(window: Window, tmp_path: Path) -> None:
    async def add() -> None:
        async with SQLiteCheckpointer(tmp_path / "data" / "byssus" / "chat.db") as cp:
            await cp.append("cut", [UserMessage("say plums"), AssistantMessage("You said", stop_reason="length")])

    asyncio.run(add())
    window.enter("/open cut")
    window.enter("/retry")
    window.wait_for("You said: say plums.")
    window.enter("/undo")
    window.enter("/retry")
    window.wait_for("this thread has no messages yet, so there is nothing to try again")


def test_lists_of_checkpoints_show_the_latest_200_and_say_so(window: Window, tmp_path: Path) -> None:
    async def fill() -> None:
        async with SQLiteCheckpointer(tmp_path / "data" / "byssus" / "chat.db") as cp:
            agent = Agent(provider=ScriptedProvider([]), model=Model("m"), checkpointer=cp, thread_id="many")
            await cp.append("many", [UserMessage("Hello.")])
            for number in range(201):
                await agent.checkpoint(tags=[f"point{number}"])

    asyncio.run(fill())
    window.enter("/open many")
    window.wait_for("Thread many: 1 message so far")
    window.enter("/rewind")
    window.wait_for("(the latest 200 checkpoints; /rewind seq:N")
    window.type("point0")
    window.wait_until_gone("point200")
    assert "point0 " not in window.screen.replace("rewind to: point0", "")
    window.press("escape")
    window.wait_until_gone("rewind to:")
    window.enter("/tree")
    window.wait_for("(the latest 200 checkpoints of each thread;")
    window.press("escape")
    window.wait_until_gone("tree:")
    window.enter("/rewind point0")
    window.wait_for("Rewind to message 1 would take 0 message(s) off")


def test_what_there_is_can_be_shown_and_written(window: Window, tmp_path: Path) -> None:
    window.enter("/tokens")
    window.wait_for("120 tokens (100 in, 20 out), cost 0.0100")
    window.enter("/tools")
    window.wait_for("Delete a file. (recovery never, asks for approval)")
    window.enter("/mark good")
    window.wait_for("(the last message is marked 'good')")
    window.enter("/memory")
    window.wait_for("#good  assistant: You said: say apples.")
    window.enter("/export talk.md")
    window.wait_for("(2 messages written to talk.md)")
    assert "You said: say apples." in (tmp_path / "talk.md").read_text("utf-8")
    window.enter("/model other")
    window.wait_for("the app chooses its model itself")
    window.press("ctrl-c")
    window.enter("/help fork")
    window.wait_for("/fork [POINT]")
    window.enter("/theme plain")
    window.enter("/theme blue")
    window.wait_for("there is no theme 'blue'; choose one of dark, light, plain")


def test_an_attached_file_is_folded_and_edit_brings_back_what_was_typed(window: Window, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("".join(f"line {number}\n" for number in range(30)), "utf-8")
    window.enter("say what @notes.txt is")
    window.wait_for("› say what @notes.txt is\n  notes.txt:\n  ```\n  line 0\n  line 1\n  line 2\n  … 29 more lines")
    window.wait_for("thread 240 tok")
    window.enter("/edit")
    window.wait_for_on_screen("rewound", "› say what @notes.txt is\ntrip")
    window.press("ctrl-c", "ctrl-o")
    window.wait_for("  line 29")


def test_a_search_shows_its_hit_beside_it_and_says_that_nothing_was_found(window: Window) -> None:
    window.enter("say " + "pears " * 200 + "figs")
    window.wait_for("figs.")
    window.enter("/search figs")
    window.wait_for_on_screen("❯ trip  …", "**figs**", "│ ", "pears figs")
    window.press("escape")
    window.wait_until_gone("search:")
    window.enter("/search plums")
    window.wait_for_on_screen("nothing was found")


def test_queued_messages_can_be_withdrawn(window: Window, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a line", "utf-8")
    window.enter("slow 100")
    window.wait_for("word3")
    window.enter("/inbox 1")
    window.wait_for("no message waits, so there is none to withdraw")
    window.press("ctrl-c")
    window.enter("/later say never @notes.txt")
    window.wait_for_on_screen("1 later say never @notes.txt\n›")
    window.enter("/inbox")
    window.wait_for("1  later: say never @notes.txt\n")
    window.enter("/inbox 1")
    window.wait_for("(withdrawn: say never @notes.txt)")
    window.wait_for_on_screen("›\ntrip")  # what is typed next is not behind it
    window.press("ctrl-c")
    window.wait_for("[stopped]")
    assert "You said: say never" not in window.transcript
