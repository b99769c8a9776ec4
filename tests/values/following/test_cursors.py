"""Cursors: what was read, as text that can be read back, whatever a client sends."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from byssus.values.following.cursors import Cursor, Offset, Seen, parse, reply_mark, thread_mark

numbers = st.integers(0, 2**61)
offsets = st.lists(
    st.tuples(st.integers(0, 50), st.builds(Offset, st.sampled_from(["text", "thinking", "arguments"]), numbers)),
    max_size=4,
).map(tuple)


def seen_of(seqs: list[int], replies: set[int]) -> Seen:
    seen = Seen()
    for seq in seqs:
        seen = seen.with_seq(seq, is_reply=seq in replies)
    return seen


@given(st.lists(st.integers(1, 30), unique=True), numbers, st.none() | st.text().map(reply_mark), offsets)
def test_a_cursor_is_read_back_as_it_was_written(
    seqs: list[int], branch: int, reply: str | None, at: tuple[tuple[int, Offset], ...]
) -> None:
    cursor = Cursor(thread_mark("", "t", "now"), branch, seen_of(seqs, set()), reply, at if reply else ())
    text = str(cursor)
    assert parse(text) == cursor
    assert re.fullmatch(r"[0-9a-z.~-]+", text)


def test_a_cursor_in_the_middle_of_a_thousand_calls_is_read_back() -> None:
    calls = tuple((block, Offset("arguments", 7)) for block in range(1_000))
    for cursor in (
        Cursor("000000", 1, seen_of(list(range(10_001, 12_001, 2)), set())),
        Cursor("000000", 1, Seen(), "0" * 8, calls),
    ):
        assert parse(str(cursor)) == cursor
    assert parse(f"000000-1-{'9' * 5_000}") is None


@given(st.text())
def test_any_other_text_is_no_cursor(text: str) -> None:
    cursor = parse(text)
    assert cursor is None or str(cursor) == text


@given(st.permutations(range(1, 9)))
def test_what_was_read_in_any_order_is_known_and_nothing_else(seqs: list[int]) -> None:
    for count in range(len(seqs) + 1):
        seen = seen_of(seqs[:count], set())
        assert {seq for seq in range(1, 9) if seq in seen} == set(seqs[:count])
        assert seen.last == max(seqs[:count], default=0)
    assert seen == Seen(8)


@given(st.lists(st.integers(1, 20), unique=True), st.integers(0, 25))
def test_its_gaps_are_what_is_not_in_it(seqs: list[int], head: int) -> None:
    seen = seen_of(sorted(seq for seq in seqs if seq <= head), set())
    gaps = [seq for after, upto in seen.gaps(head) for seq in range(after + 1, upto + 1)]
    assert gaps == [seq for seq in range(1, head + 1) if seq not in seen]


def test_places_before_a_reply_that_stayed_empty_are_passed_over() -> None:
    assert seen_of([1, 3, 5], {5}) == Seen(5)
    assert seen_of([1, 3, 5, 7], {5}) == Seen(5, ((7, 7),))


@given(st.lists(st.integers(1, 20), unique=True), st.integers(0, 20))
def test_a_rewind_cuts_what_is_behind_it(seqs: list[int], at: int) -> None:
    cut = seen_of(sorted(seqs), set()).cut(at)
    assert {seq for seq in range(1, 21) if seq in cut} == {seq for seq in seqs if seq <= at}


def test_threads_and_replies_have_marks_of_their_own() -> None:
    marks = {thread_mark(*key) for key in [("", "t", "1"), ("", "t", "2"), ("", "u", "1"), ("n", "t", "1")]}
    assert len(marks) == 4
    assert reply_mark("a") != reply_mark("\ud800")
