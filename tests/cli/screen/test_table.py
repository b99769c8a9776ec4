"""A table stands in columns whatever its characters are, and fits the screen that it is printed on."""

from __future__ import annotations

import io
import sys

import pytest

from byssus.cli.screen.table import cut, print_table, width
from tests.support.screens import screen_of

FAMILY = "👨‍👩‍👧‍👦"
HEADERS = ("THREAD", "MESSAGES", "TITLE")


@pytest.mark.parametrize(
    ("text", "columns"),
    [("", 0), ("abc", 3), ("北京", 4), (FAMILY, 2), ("🇳🇴", 2), ("e\u0301", 1), ("❤️", 2), ("👍🏽", 2), ("ｱ", 1)],
)
def test_a_text_is_as_wide_as_a_terminal_shows_it(text: str, columns: int) -> None:
    assert width(text) == columns


def test_a_cut_falls_between_what_a_reader_sees_as_characters() -> None:
    assert cut("北京的天气", 10) == "北京的天气"
    assert cut("北京的天气", 9) == "北京的天…"
    assert cut("北京的天气", 8) == "北京的…"  # half a character is none
    assert cut(f"{FAMILY}{FAMILY}{FAMILY}", 5) == f"{FAMILY}{FAMILY}…"
    assert cut("e\u0301" * 5, 3) == "e\u0301e\u0301…"


def test_columns_stand_under_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["trip", "北京", FAMILY, "🇳🇴 no", "cafe\u0301"]
    print_table(HEADERS, [(name, str(number * 100), "x") for number, name in enumerate(names)], right=[1])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "THREAD  MESSAGES  TITLE"
    assert [width(row) for row in rows] == [len("THREAD  MESSAGES  x")] * 5
    assert [row.endswith(f"{number * 100:>10}  x") for number, row in enumerate(rows)] == [True] * 5


def test_the_widest_text_is_cut_to_the_screen_and_numbers_never_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch, 40)
    print_table(HEADERS, [("trip", "1234567", "weather " * 20), ("北京" * 20, "1", "short")], right=[1])
    assert {width(line) for line in screen.lines} <= set(range(41))
    assert screen.lines[1].startswith("trip")
    assert "1234567" in screen.lines[1]
    assert screen.lines[1].endswith("…")
    assert screen.lines[2].endswith("  short")


def test_a_time_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch, 40)
    print_table(("THREAD", "TIME", "TEXT"), [("trip", "2026-01-31 08:00:00", "weather " * 9)], whole=[1])
    print_table(("THREAD", "TIME", "TEXT"), [("a-trip-to-oslo", "2026-01-31 08:00:00", "weather " * 9)], whole=[1])
    assert [screen.lines[1], screen.lines[3]] == [
        "trip    2026-01-31 08:00:00  weather we…",
        "a-trip-…  2026-01-31 08:00:00  weather…",
    ]


def test_where_too_little_would_be_left_each_row_is_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch, 20)
    print_table(HEADERS, [("trip-to-beijing", "7", "weather"), ("other", "12", "")], right=[1])
    assert screen.lines == [
        "THREAD    trip-to-beijing",
        "MESSAGES  7",
        "TITLE     weather",
        "",
        "THREAD    other",
        "MESSAGES  12",
        "TITLE",
    ]


def test_in_a_pipe_nothing_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    print_table(HEADERS, [("t" * 100, "1", "x" * 300)])
    assert f"{'t' * 100}  1         {'x' * 300}\n" in capsys.readouterr().out


def test_no_cell_breaks_a_line_or_drives_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch)
    print_table(("A", "B"), [("one\ntwo\t\x9b2J", "\u202ex\x1b]0;\x07")])
    assert screen.lines == ["A               B", "one two \\x9b2J  \\u202ex\\x1b]0;\\x07"]
    assert not set(screen.text) & {"\x9b", "\x1b", "\u202e", "\x07"}


def test_a_screen_without_utf_8_gets_columns_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch, 30, encoding="ascii")
    print_table(("THREAD", "TITLE"), [("北", "a" * 50), ("b", "c")])
    assert screen.lines == ["THREAD  TITLE", f"\\u5317  {'a' * 19}...", "b       c"]


def test_headers_are_bold_only_on_a_terminal_that_has_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch, term="xterm")
    print_table(("A",), [("x",)])
    assert screen.lines == ["\x1b[1mA\x1b[0m", "x"]
    monkeypatch.setenv("NO_COLOR", "1")
    print_table(("B",), [("x",)])
    assert screen.lines[2:] == ["B", "x"]
    monkeypatch.setattr(sys, "stdout", pipe := io.StringIO())
    monkeypatch.delenv("NO_COLOR")
    print_table(("C",), [])
    assert pipe.getvalue() == "C\n"


def test_in_a_block_nothing_is_cut_and_long_text_goes_on_below(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch, 30)
    print_table(
        ("THREAD", "TITLE", "STATE", "UPDATED"),
        [("a" * 40, "北京的天气怎么样, and the weather in Oslo?", "idle", "2026-01-31 08:00:00")],
    )
    assert screen.lines == [
        f"THREAD   {'a' * 40}",
        "TITLE    北京的天气怎么样, and",
        "         the weather in Oslo?",
        "STATE    idle",
        "UPDATED  2026-01-31 08:00:00",
    ]
    assert all(width(line) <= 30 for line in screen.lines[1:])  # an id stays whole, so that it can be copied
