"""How a chat ends, and what the next one finds: killed, hung up, terminated, without a reader; and two at once."""

from __future__ import annotations

import os
import signal

import pytest

from byssus.messages import AssistantMessage
from tests.support import forked
from tests.support.chats import PROMPT, Stage
from tests.support.window import environment

pytestmark = pytest.mark.processes
STORY = "Once upon a time \fthere was an end."


def test_after_kill_9_the_next_chat_shows_the_half_answer_and_finishes_it(stage: Stage) -> None:
    window = stage.chat()
    window.enter(f"tell {stage.write('story.md', STORY)}")
    window.wait_for("Once upon a time")
    while (thread := stage.thread()) is None or thread.partial is None:  # what has arrived is stored every second
        pass
    window.kill()
    assert window.exit_code == -signal.SIGKILL
    window = stage.chat(until="resume? [Y/n]")
    assert "The last run on this thread was interrupted." in window.transcript
    assert "Once upon a time" in window.transcript
    window.press("enter")
    stage.go()
    window.wait_for("there was an end.")
    assert stage.leave(window)[-1].text == STORY.replace("\f", "")


def test_a_terminal_that_goes_away_stops_the_run_in_good_order(stage: Stage) -> None:
    window = stage.chat()
    window.enter(f"tell {stage.write('story.md', STORY)}")
    window.wait_for("Once upon a time")
    window.hang_up()
    assert window.wait_for_its_end() == 128 + signal.SIGHUP
    _, half = stage.messages()
    assert isinstance(half, AssistantMessage)
    assert (half.stop_reason, half.text) == ("aborted", "Once upon a time ")


def test_sigterm_stops_the_run_and_leaves_a_usable_terminal(stage: Stage) -> None:
    window = stage.chat()
    window.enter(f"tell {stage.write('story.md', STORY)}")
    window.wait_for("Once upon a time")
    window.send(signal.SIGTERM)
    assert window.wait_for_its_end() == 128 + signal.SIGTERM
    assert "[stopped]" in window.transcript
    assert not window.display.has_private_mode(2004)
    assert not window.display.cursor.hidden


def test_a_reader_that_goes_away_is_no_error(stage: Stage) -> None:
    reader, writer = os.pipe()
    question, said = os.pipe()
    os.close(reader)
    os.write(said, b"Hello?")
    os.close(said)
    started = forked.start(
        ["chat", "--app", stage.app],
        env=environment(stage.folder),
        cwd=stage.folder,
        streams=(question, writer, os.open(os.devnull, os.O_WRONLY)),
    )
    with started.answer as answer:
        assert int(answer.recv(100)) == 141


def test_a_second_chat_on_a_thread_watches_and_can_be_heard(stage: Stage) -> None:
    first = stage.chat()
    first.enter(f"tell {stage.write('story.md', STORY)}")
    first.wait_for("Once upon a time")
    second = stage.chat(until="watch?")
    assert f":{first.process}" in second.transcript
    second.enter("w")
    second.wait_for("Once upon a time")
    second.enter("and then?")
    first.wait_for_on_screen("1 now and then?")
    stage.go()
    for window in (first, second):
        window.wait_for("there was an end.")
        window.wait_for("You said: and then?.")
    second.wait_for("(that run has ended)")
    second.enter("my turn")
    second.wait_for("You said: my turn.")
    assert PROMPT in first.screen
