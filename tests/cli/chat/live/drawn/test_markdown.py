"""A text is cut into the same blocks wherever a stream cuts it, and none of its lines is lost."""

from __future__ import annotations

import cProfile
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from byssus.cli.chat.live.drawn.drawing import Appearance, Drawer
from byssus.cli.chat.live.drawn.markdown import PIECE, Block, Splitter, blocks_of
from byssus.cli.screen import table

_LINES = [
    "# A heading",
    "some *text* with `code`",
    "",
    "- an item",
    "  - one below it",
    "  goes on",
    "1. first",
    "7) seventh",
    "> quoted",
    "| a | b |",
    "|---|--:|",
    "| 1 | 中文 |",
    "```python",
    "def f(): return '''",
    "```",
    "~~~~",
    "    indented",
    "[name]: http://example.com",
    "<div>html</div>",
    "===",
    "---",
    "end of it 👍",
    "\x1b[31mred\x1b[0m",
]
texts = st.lists(st.sampled_from(_LINES), max_size=30).map("\n".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]


def streamed(pieces: list[str]) -> list[Block]:
    splitter, found = Splitter(), list[Block]()
    for piece in pieces:
        found += splitter.feed(piece)
        splitter.tail()  # what is drawn in between changes nothing
    return [*found, *splitter.end()]


@given(cut_texts())
@example(["- a\n\n1", ". b\n"])
@example(["a\r", "\nb\r\n", "\r\nc"])
def test_where_a_stream_is_cut_makes_no_difference(pieces: list[str]) -> None:
    assert streamed(pieces) == blocks_of("".join(pieces))


@given(texts)
def test_every_line_that_is_not_blank_is_in_one_block_in_order(text: str) -> None:
    told = [line.strip() for block in blocks_of(text) for line in block.source.split("\n") if line.strip()]
    assert told == [line.strip().replace("\x1b", "\\x1b") for line in text.split("\n") if line.strip()]


@given(cut_texts())
def test_what_is_closed_and_what_is_open_are_the_whole_at_any_time(pieces: list[str]) -> None:
    splitter, closed, so_far = Splitter(), list[Block](), ""
    for piece in pieces:
        closed += splitter.feed(piece)
        so_far += piece
        told = [line.strip() for b in [*closed, *splitter.tail()] for line in b.source.split("\n") if line.strip()]
        assert told == [line.strip().replace("\x1b", "\\x1b") for line in so_far.split("\n") if line.strip()]


@given(texts)
def test_a_long_paragraph_ends_where_a_short_one_does(text: str) -> None:
    line, more = "so it goes\n", 20
    short, long = blocks_of(line + text), blocks_of(line * (1 + more) + text)
    assert long == [short[0]._replace(source=line * more + short[0].source), *short[1:]]


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("", "so it goes on\n"),
        ("", "    code\n"),
        ("- item\n", "  goes on\n"),
        ("- item\n", "  - below\n"),
        ("> quoted\n", "> more\n"),
        ("| a | b |\n|---|---|\n", "| 1 | 2 |\n"),
        ("a | b\n--- | ---\n", "1 | 2\n"),
    ],
)
def test_a_line_costs_the_same_in_a_long_block_as_in_a_short_one(head: str, line: str) -> None:
    assert _calls(head + line * 400) < 3 * _calls(head + line * 200)


def _calls(text: str) -> int:
    """How many functions are called while a text streams."""
    splitter, profile = Splitter(), cProfile.Profile()
    with profile:
        for each in text.splitlines(keepends=True):
            splitter.feed(each)
    return sum(entry.callcount for entry in profile.getstats())


def test_code_is_printed_piece_by_piece_before_its_end() -> None:
    splitter = Splitter()
    found = splitter.feed("```python\n" + "x = 1\n" * (2 * PIECE + 3))
    assert [block.source.count("x = 1") for block in found] == [PIECE, PIECE]
    assert [(block.is_first, block.is_last) for block in found] == [(True, False), (False, False)]
    (last,) = splitter.feed("```\n")
    assert (last.source, last.is_last) == ("x = 1\nx = 1\nx = 1\n```", True)


def test_code_that_arrives_is_drawn_with_a_few_lines_before_it_however_long_it_is() -> None:
    def drawn_with(lines: int) -> str:
        splitter = Splitter()
        splitter.feed("```python\n" + "x = 1\n" * lines + "x")
        (block,) = splitter.tail()
        return block.before

    assert drawn_with(50) == drawn_with(500) != ""


def test_a_list_is_printed_item_by_item_with_its_numbers() -> None:
    splitter = Splitter()
    found = [*splitter.feed("1. a\n1. b\n\n   more of b\n1. c\n"), *splitter.end()]
    assert [(block.number, block.has_gap) for block in found] == [(1, False), (2, False), (3, False)]
    assert found[1].source == "1. b\n\n   more of b"


def test_control_characters_are_shown_and_not_sent() -> None:
    drawer = Drawer(Appearance(80))
    for text in ("\x1b[2Jgone", "```\n\x1b[2Jgone\n```", "| a |\n|---|\n| \x1b[2Jgone |"):
        lines = ["".join(part.text for part in line) for block in blocks_of(text) for line in drawer.block(block)]
        assert "\\x1b[2Jgone" in "\n".join(lines)
        assert "\x1b[2J" not in "".join(drawer.ansi(line) for block in blocks_of(text) for line in drawer.block(block))


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_no_line_is_wider_than_the_screen_but_code(columns: int) -> None:
    text = "# 很长的标题很长的标题很长的标题\n\n" + "word 中文 " * 30 + "\n\n- " + "item 🎉 " * 20
    text += "\n\n| a | b |\n|---|---|\n| " + "cell " * 20 + " | 中文 |\n"
    drawer = Drawer(Appearance(columns))
    widths = [
        table.width("".join(part.text for part in line)) for block in blocks_of(text) for line in drawer.block(block)
    ]
    assert max(widths) <= columns
