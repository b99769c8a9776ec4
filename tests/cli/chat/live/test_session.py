"""The chat that draws, in a real terminal: streaming, steering, stopping, questions, and what is there afterwards."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from byssus.checkpointer import SQLiteCheckpointer
from tests.support.talker import write_talker
from tests.support.window import Window

pytestmark = pytest.mark.processes

Chat = Callable[..., Window]


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Chat]:
    """Opens a chat with the app of tests/support/talker.py."""
    app, windows = write_talker(tmp_path), list[Window]()

    def start(thread: str = "main", columns: int = 80, **env: str) -> Window:
        window = Window("chat", thread, "--app", app, home=tmp_path, cwd=tmp_path, columns=columns, env=env)
        windows.append(window)
        window.wait_for("› ")
        window.wait_for(f"Thread {thread}: ")  # it is loaded
        return window

    yield start
    for window in windows:
        window.close()


def test_an_answer_is_drawn_and_kept(chat: Chat) -> None:
    window = chat()
    window.enter("say **this**")
    window.wait_for("You said: say this.")
    window.wait_for("turn 120 tok $0.01 · thread 120 tok $0.01")
    window.press("ctrl-d")
    assert window.wait_for_its_end() == 0
    again = chat()
    again.wait_for("Thread main: 2 messages so far")
    again.wait_for("You said: say this.")
    again.press("up")
    again.wait_for_on_screen("› say **this**")
    again.press("ctrl-c", "ctrl-r")
    again.type("**th")
    again.wait_for_on_screen("› say **this**", "I-search backward: **th")


def test_what_is_typed_while_an_answer_arrives_reaches_the_run_or_waits_for_its_end(chat: Chat) -> None:
    window = chat()
    window.enter("slow 60")
    window.wait_for("word3")
    window.enter("say now")
    window.type("say later")
    window.press("alt-enter")
    window.wait_for_on_screen("1 now say now", "2 later say later")
    window.wait_for("You said: say later.")
    answers = ["word59", "› say now", "You said: say now.", "› say later", "You said: say later."]
    places = [window.transcript.index(each) for each in answers]
    assert places == sorted(places)
    window.wait_until_gone("2 later")


def test_ctrl_c_clears_the_line_then_stops_the_answer_then_leaves(chat: Chat) -> None:
    window = chat()
    window.enter("slow 2000")
    window.wait_for("word3")
    window.type("half a thought")
    window.wait_for_on_screen("› half a thought")
    window.press("ctrl-c")
    window.wait_until_gone("half a thought")
    window.press("ctrl-c")
    window.wait_for("[stopped]")
    window.press("up")
    window.wait_for_on_screen("› half a thought")
    window.press("ctrl-c")
    window.wait_until_gone("half a thought")
    window.press("ctrl-c")
    assert window.wait_for_its_end() == 0


def test_a_call_that_asks_for_approval_shows_its_arguments_and_takes_every_answer(chat: Chat) -> None:
    window = chat()
    window.enter("delete a.txt")
    window.wait_for("? delete asks for your approval:\n  path: a.txt")
    for unclear in ("maybe", "y, but tomorrow", "yes but tomorrow"):
        window.enter(unclear)
        window.wait_for(f"{unclear!r} is no answer here")
    window.enter("n not that one")
    window.wait_for("not that one")
    window.wait_for("The tool said:")
    window.enter("delete b.txt")
    window.wait_for("path: b.txt")
    window.enter("e")
    window.wait_for_on_screen("arguments {")
    window.press("ctrl-u")
    window.press("ctrl-c")
    window.wait_until_gone("arguments {")
    window.enter("a")
    window.wait_for("b.txt is gone")
    window.wait_for("The tool said:", 2)
    window.enter("delete c.txt")
    window.wait_for("(delete: allowed always in this thread)")
    window.wait_for("c.txt is gone")
    window.enter("/quit")
    assert window.wait_for_its_end() == 0
    again = chat()
    again.enter("delete d.txt")
    again.wait_for("d.txt is gone")


def test_a_question_that_was_answered_elsewhere_is_taken_back(chat: Chat, tmp_path: Path) -> None:
    window = chat()
    window.enter("delete a.txt")
    window.wait_for_on_screen("allow?")
    with Window("answer", "main", "c1", "approve", home=tmp_path) as other:
        assert other.wait_for_its_end() == 0
    window.wait_for("(answered elsewhere)")
    window.wait_for("a.txt is gone")


def test_a_message_while_a_call_waits_is_kept_and_the_call_is_asked_about(chat: Chat) -> None:
    window = chat()
    window.enter("delete a.txt")
    window.wait_for_on_screen("allow?")
    window.press("escape")
    window.wait_for("/approve asks again")
    window.enter("/model")  # it waits for the end of the run
    window.wait_for("model: talker")
    window.enter("say it then")
    window.wait_for("(first, this thread needs an answer from you; your message is kept)")
    window.wait_for_on_screen("allow?")
    window.enter("y")
    window.wait_for("a.txt is gone")
    window.wait_for_on_screen("› say it then")
    window.press("enter")
    window.wait_for("You said: say it then.")


def test_retry_asks_about_the_call_that_waits(chat: Chat) -> None:
    window = chat()
    window.enter("delete a.txt")
    window.wait_for_on_screen("allow?")
    window.press("escape")
    window.wait_for("/approve asks again")
    window.enter("/retry")
    window.wait_for("? delete asks for your approval:", 2)
    window.enter("y")
    window.wait_for("a.txt is gone")


def test_without_drawing_a_call_that_waits_names_the_command_that_lists_it(chat: Chat, tmp_path: Path) -> None:
    with Window("chat", "--plain", "--app", "talker:agent", home=tmp_path, cwd=tmp_path) as window:
        window.wait_for("> ")
        window.enter("delete a.txt")
        window.wait_for("A tool call waits for a person: byssus pending main")


def test_a_run_that_was_killed_is_offered_and_the_outcome_of_its_call_asked_for(chat: Chat, tmp_path: Path) -> None:
    window = chat()
    window.enter("pay 5")
    window.wait_for_on_screen("pay amount=5", "waiting for go")
    window.kill()
    again = chat()
    again.wait_for("The last run on this thread was interrupted.")
    again.wait_for("It was running pay")
    again.wait_for_on_screen("thread 15 tok", "resume?")
    again.enter("say more")  # no answer to the question
    again.wait_for("(left as it is")
    again.wait_for_on_screen("› say more")
    again.press("ctrl-c")
    again.enter("/retry")
    (tmp_path / "go").touch()
    again.wait_for("? pay was interrupted:\n  This call was interrupted: it may or may not have taken effect.")
    again.enter("y")
    again.wait_for("(attempt 2)")
    again.wait_for("The tool said: paid 5.")


def test_a_second_chat_watches_the_run_of_the_first_and_can_steer_it(chat: Chat) -> None:
    first = chat()
    first.enter("slow 300")
    first.wait_for("word3")
    second = chat()
    second.wait_for("This thread is being driven by")
    second.enter("w")
    second.wait_for("word20")
    second.enter("say from the other side")
    first.wait_for_on_screen("1 now say from the other side")
    first.press("ctrl-c")
    second.wait_for("(that run has ended)")


def test_other_chats_watch_a_call_or_wait_for_its_end_or_fork_and_miss_nothing(chat: Chat, tmp_path: Path) -> None:
    first = chat()
    first.enter("work")
    first.wait_for_on_screen("waiting for go")
    second = chat()
    second.wait_for_on_screen("watch?")
    second.enter("w")
    second.wait_for_match(r"[\u2800-\u28ff] work +1 s")
    assert "waiting for the model" not in second.screen
    third = chat()
    third.wait_for_on_screen("watch?")
    third.enter("l")
    third.wait_for("(waiting for its end; Ctrl-C stops waiting)")
    fourth = chat()
    fourth.wait_for_on_screen("watch?")
    fourth.enter("f")
    fourth.wait_for("Thread main-fork-1: ")
    (tmp_path / "go").touch()
    for other in (second, third):
        other.wait_for("✓ work")
        other.wait_for("The tool said: step 0")
        other.wait_for("(that run has ended)")
        assert other.transcript.count("› work") == 1


def test_a_second_chat_shows_no_call_that_has_ended_as_running(chat: Chat) -> None:
    first = chat()
    first.enter("print a line")
    first.wait_for("The tool said: done.")
    first.enter("slow 300")
    first.wait_for("word3")
    second = chat()
    second.wait_for("This thread is being driven by")
    second.enter("w")
    second.wait_for("word20")
    second.wait_for_on_screen("watching")
    assert "print text=a line" not in second.screen.partition("(watching;")[2]
    first.press("ctrl-c")
    second.wait_for("(that run has ended)")


def test_a_prompt_on_a_busy_thread_is_kept_and_the_thread_is_not_shown_again(chat: Chat) -> None:
    first, second = chat(), chat()
    first.enter("slow 300")
    first.wait_for("word3")
    second.enter("say it soon")
    second.wait_for("This thread is being driven by")
    assert second.transcript.count("› slow 300") == 1
    assert "so far" not in second.transcript
    second.enter("please")
    second.wait_for_on_screen("'please' is no answer here", "watch? please")
    second.press("escape")
    second.wait_for_on_screen("› say it soon")
    second.press("enter")
    second.wait_for_on_screen("watch?")
    second.enter("w")
    second.wait_for("word20")
    second.wait_for_on_screen("› say it soon")
    first.press("ctrl-c")
    second.wait_for("(that run has ended)")
    assert second.transcript.count("› slow 300") == 1


def test_what_was_said_elsewhere_meanwhile_is_shown_before_the_next_answer(chat: Chat, tmp_path: Path) -> None:
    first, second = chat(), chat()
    second.enter("say it there")
    second.wait_for("thread 120 tok")
    first.enter("say it here")
    first.wait_for("You said: say it here.")
    expected = "(meanwhile, from elsewhere:)\n\n› say it there\n\nYou said: say it there.\n\n› say it here"
    assert expected in first.transcript
    first.enter("say more")
    first.wait_for("You said: say more.")
    assert first.transcript.count("(meanwhile, from elsewhere:)") == 1
    with Window("rewind", "main", "seq:4", home=tmp_path) as other:
        assert other.wait_for_its_end() == 0
    first.enter("say again")
    first.wait_for("(meanwhile, this thread was rewound elsewhere, to message 4)")
    first.wait_for("You said: say again.")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_chat_and_what_was_streamed_is_kept(chat: Chat, number: signal.Signals) -> None:
    window = chat()
    window.enter("slow 2000")
    window.wait_for("word5")
    window.send(number)
    assert window.wait_for_its_end() == 128 + number
    again = chat()
    again.wait_for("word3")
    again.wait_for("[stopped]")


def test_a_window_that_is_closed_ends_the_chat_and_what_was_streamed_is_kept(chat: Chat) -> None:
    window = chat()
    window.enter("slow 2000")
    window.wait_for("word5")
    window.hang_up()
    assert window.wait_for_its_end() == 128 + signal.SIGHUP
    again = chat()
    again.wait_for("word3")
    again.wait_for("[stopped]")


def test_a_chat_can_be_suspended_and_goes_on(chat: Chat) -> None:
    window = chat()
    window.type("half a thought")
    window.wait_for_on_screen("half a thought")
    window.press("ctrl-z")
    window.wait_until_it_stops()
    window.resume()
    window.wait_for_on_screen("› half a thought")
    window.press("ctrl-c")
    window.enter("say it")
    window.wait_for("You said: say it.")


def test_a_run_that_was_suspended_for_too_long_names_the_command_that_goes_on(chat: Chat, tmp_path: Path) -> None:
    async def take_it() -> None:
        async with SQLiteCheckpointer(tmp_path / "data" / "byssus" / "chat.db") as cp:
            await cp.store.write(lambda tx: tx.run("UPDATE threads SET lease_epoch = lease_epoch + 1"))

    window = chat()
    window.enter("slow 60")
    window.wait_for("word3")
    asyncio.run(take_it())
    window.wait_for_match(r"has lost the lease[^✗]*/retry goes on")


def test_what_a_tool_prints_is_a_line_of_the_transcript(chat: Chat) -> None:
    window = chat()
    window.enter("print 中文")
    window.wait_for("\nprinted: 中文")
    window.wait_for("The tool said: done.")


def test_thinking_and_arguments_that_were_cut_short_can_be_shown(chat: Chat) -> None:
    window = chat(columns=40)
    window.enter("think")
    window.wait_for_match(r"✻ thought for \d s, 4 words \(Ctrl-O shows\nthem\)\n\nYou said: think")
    assert "first this" not in window.transcript
    window.press("ctrl-o")
    window.wait_for("  first this, then that")
    window.enter("print the first and the last of many words")
    window.wait_for("✓ print text=the first and the")
    window.wait_for("The tool said: done.")
    window.press("ctrl-o")
    window.wait_for("print\n  text: the first and the last of many\n  words\ndone")


def test_a_refused_key_is_one_line_and_the_chat_goes_on(chat: Chat) -> None:
    window = chat()
    window.enter("refuse")
    window.wait_for("the key was refused; set TALKER_KEY")
    window.enter("look at @missing.txt")
    window.wait_for("there is no file 'missing.txt' to attach")
    window.wait_for_on_screen("› look at @missing.txt")  # what was typed is there
    window.press("ctrl-c")
    window.enter("/hlep")
    window.wait_for("did you mean '/help'?")
    window.press("ctrl-c")
    window.enter("say it")
    window.wait_for("You said: say it.")


def test_code_longer_than_the_screen_is_whole_and_what_was_cut_short_can_be_seen(chat: Chat, tmp_path: Path) -> None:
    window = chat(columns=40)
    window.enter("code 100")
    window.wait_for("That was all.")
    expected = "\n".join(f"line_{number} = {number}" for number in range(100))
    assert f"```python\n{expected}\n```\n\nThat was all." in window.transcript
    (tmp_path / "go").touch()
    window.enter("work")
    window.wait_for("16 more lines (Ctrl-O shows all)")
    window.press("ctrl-o")
    window.wait_for("step 19")


def test_pasted_lines_and_an_editor_make_one_message(chat: Chat, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\necho 'say edited' > \"$1\"\n", "utf-8")
    editor.chmod(0o755)
    window = chat(EDITOR=str(editor))
    window.paste("say 一\nand 二")
    window.press("enter")
    window.wait_for("You said: say 一 and 二.")
    window.type("draft")
    window.press("ctrl-x", "ctrl-e")
    window.wait_for_on_screen("› say edited")
    window.type("/the")
    window.press("ctrl-c")
    window.type("/the")
    window.press("tab")
    window.wait_for_on_screen("› /theme")


def test_a_narrower_window_shows_the_transcript_in_its_width(chat: Chat) -> None:
    window = chat()
    window.enter("say | a | b |")
    window.wait_for("You said:")
    window.resize(40, 24)
    window.press("ctrl-l")
    window.wait_for_on_screen("› say | a | b |", "You said: say | a | b |.")
    assert window.screen.count("You said") == 1
