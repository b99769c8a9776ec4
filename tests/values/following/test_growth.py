"""A reply as it grows: however it is cut, and however often somebody looks, each word comes once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from byssus import AssistantMessage, ToolCall
from byssus.events import (
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ThinkingEnd,
    ThinkingStart,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from byssus.messages import TextContent, ThinkingContent
from byssus.values.following.growth import Growth, Piece, assembled, decode_pieces, encode_pieces

texts = st.text(max_size=5)
events = st.lists(
    st.one_of(
        st.builds(TextDelta, st.sampled_from([1, 4]), texts),
        st.builds(ThinkingDelta, st.just(0), texts),
        st.builds(ToolCallDelta, st.just(2), texts),
    ),
    max_size=20,
)


@given(events, st.lists(st.booleans(), min_size=20, max_size=20), st.none() | st.integers(1, 4))
def test_the_pieces_of_any_looks_make_the_same_reply(
    said: list[StreamEvent], looks: list[bool], most: int | None
) -> None:
    growth, offsets, bodies = Growth(), dict[tuple[int, str], int](), list[str]()
    growth.add(ThinkingStart(0))
    growth.add(ToolCallStart(2, "c", "look"))
    for event, is_look in zip([*said, TextDelta(1, "end")], [*looks[: len(said)], True], strict=True):
        growth.add(event)
        while is_look and (pieces := growth.since(offsets, most=most)):
            assert most is None or all(len(piece.text) <= most for piece in pieces)
            bodies.append(encode_pieces(pieces))
            offsets |= {(piece.block, piece.kind): piece.offset + len(piece.text) for piece in pieces}
    again = Growth()
    for body in bodies:
        again.put(decode_pieces(body))
        again.put(decode_pieces(body))  # what comes twice is noticed
    assert {strand: length for strand, length in again.offsets.items() if length} == {
        strand: length for strand, length in growth.offsets.items() if length
    }
    assert [again.text(block) for block in (0, 1, 4)] == [growth.text(block) for block in (0, 1, 4)]
    assert growth.since(offsets) == []


def test_a_call_is_there_before_its_arguments_and_whole_at_its_end() -> None:
    growth = Growth()
    growth.add(ToolCallStart(0, "c", "look"))
    assert growth.since({}) == [Piece(0, "arguments", 0, "", "c", "look")]
    growth.add(ToolCallEnd(0, ToolCall("c", "look", {"a": 1})))
    assert growth.since({(0, "arguments"): 0}) == [Piece(0, "arguments", 0, '{"a":1}', "c", "look")]


def test_what_was_saved_is_a_reply_with_its_thoughts_and_without_calls() -> None:
    growth = Growth()
    for event in (
        ThinkingStart(0),
        ThinkingDelta(0, "hm"),
        ThinkingEnd(0, "signed", "hidden"),
        TextDelta(1, "so \0\ud800"),
        ToolCallStart(2, "c", "look"),
    ):
        growth.add(event)
    head = AssistantMessage([], "aborted", id="r")
    saved = assembled(head, [encode_pieces(growth.since({}))])
    assert saved.content == [ThinkingContent("hm", "signed", "hidden"), TextContent("so \0\ud800")]
    assert (saved.id, saved.stop_reason) == ("r", "aborted")
    assert assembled(AssistantMessage("old"), []) == AssistantMessage("old")
