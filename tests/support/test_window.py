"""The window that tests look at: what a terminal does, so that a test can tell what a person would see."""

from __future__ import annotations

import signal
from pathlib import Path

import pyte
import pytest

from tests.support.display import DIM, Display
from tests.support.programs import write_program
from tests.support.window import Window


def display_of(text: str, columns: int = 20, lines: int = 4) -> Display:
    display = Display(columns, lines)
    pyte.Stream(display).feed(text)
    return display


def test_what_leaves_the_screen_is_in_the_scrollback() -> None:
    display = display_of("\r\n".join("abcdef"))
    assert display.rows == ["c", "d", "e", "f"]
    assert display.transcript == "a\nb\nc\nd\ne\nf"


def test_the_alternate_screen_has_no_scrollback_and_gives_the_other_one_back() -> None:
    display = Display(20, 4)
    stream = pyte.Stream(display)
    stream.feed("one\r\ntwo")
    stream.feed("\x1b[?1049h" + "x\r\n" * 9)
    assert "one" not in display.transcript
    stream.feed("\x1b[?1049l!")
    assert display.transcript == "one\ntwo!"


def test_wide_and_joined_characters_take_the_columns_that_they_take() -> None:
    display = display_of("a😀b❤\ufe0fc 一二三四五六七八九")
    assert display.rows[:2] == ["a😀b❤\ufe0fc 一二三四五六", "七八九"]
    assert display.unwrapped == "a😀b❤\ufe0fc 一二三四五六七八九"


def test_long_lines_are_wrapped_again_when_the_width_changes() -> None:
    display = display_of("0123456789" * 3 + "\r\nend")
    display.resize(4, 10)
    assert display.rows == ["0123456789", "0123456789", "0123456789", "end"]
    assert (display.cursor.x, display.cursor.y) == (3, 3)
    display.resize(2, 15)
    assert display.transcript == "012345678901234\n567890123456789\nend"
    assert display.rows == ["567890123456789", "end"]


def test_dim_text_ends_with_bold() -> None:
    display = display_of("\x1b[2;38;5;2ma\x1b[22mb")
    assert [getattr(display.buffer[0][x], DIM) for x in (0, 1)] == [True, False]
    assert display.buffer[0][1].fg != "default"


@pytest.mark.processes
def test_a_window_is_the_terminal_of_a_real_program(tmp_path: Path) -> None:
    write_program(tmp_path)
    with Window("chat", "trip", "--app", "clerk:support", home=tmp_path) as window:
        window.wait_for("›")
        window.press("ctrl-z")
        window.wait_until_it_stops()
        window.resume()
        window.enter("Why?")
        window.wait_for("The answer.")
        window.kill()
        assert window.exit_code == -signal.SIGKILL
    with Window("show", "trip", home=tmp_path, env={"PAGER": "cat"}, columns=30) as window:
        assert window.wait_for_its_end() == 0
        assert "Why?" in window.screen


@pytest.mark.processes
def test_a_program_whose_window_is_closed_gets_a_signal(tmp_path: Path) -> None:
    write_program(tmp_path)
    with Window("chat", "trip", "--app", "clerk:support", home=tmp_path) as window:
        window.wait_for("›")
        window.hang_up()
        assert window.wait_for_its_end() == 128 + signal.SIGHUP
